"""The command line, `monarch-backend COMMAND`: the parser, and one module per command.

This package handles arguments and exit codes. The commands call other packages for their work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from monarch_backend import __version__
from monarch_backend.cli import (
    dashboard,
    debug,
    export,
    flight_recorder,
    k8s,
    kill,
    logs,
    metrics,
    profile,
    ps,
    replay,
    sql,
    stack,
    top,
    trace,
    up,
)
from monarch_backend.cli.arguments import has_reader

_COMMANDS: dict[str, tuple[Any, str]] = {
    "up": (up, "make this machine a host on which controllers can start processes"),
    "ps": (ps, "running programs: their processes, actors and messages"),
    "stack": (stack, "Python stacks of a program's processes, equal ones once"),
    "trace": (trace, "a timeline of running programs, for Perfetto"),
    "profile": (profile, "torch.profiler or flame graphs of running ranks"),
    "sql": (sql, "ask what running programs have recorded, in SQL"),
    "metrics": (metrics, "metrics of running programs, as Prometheus's text or its server"),
    "flight-recorder": (flight_recorder, "collectives of all ranks, for torch's flight recorder analyser"),
    "export": (export, "spans, messages and metrics to an OpenTelemetry receiver"),
    "debug": (debug, "processes that wait at a breakpoint, and pdb in them"),
    "replay": (replay, "run a recorded actor again, alone, with the same messages, under pdb"),
    "logs": (logs, "output of a program's processes, also of ended ones"),
    "top": (top, "ps with rates, refreshed each second on the whole screen"),
    "dashboard": (dashboard, "a page in the browser: ranks, failures, timeline, stacks, logs, SQL, curves"),
    "k8s": (k8s, "objects of a KubernetesJob as YAML, logs and shells of its pods, missing permissions"),
    "kill": (kill, "end a program with all of its processes, or one of them"),
}
"""Modules of the commands that need no torch, with their lines in the help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Unknown commands and options exit with 2 and a usage line.

    A command whose output has no reader any more (``| head``) ends with 0.
    """
    try:
        return _run_command(argv)
    except BrokenPipeError:
        if has_reader():  # of another pipe or connection
            raise
        return 0
    finally:
        _flush_stdout()


def _flush_stdout() -> None:
    """Flush stdout. Without a reader (``| head``) drop the rest, which the interpreter would report at its end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def _run_command(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="monarch-backend", description="Tools around backend='monarch'.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser(
        "doctor", help="what this machine offers, which route each device takes, what is missing"
    )
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    for name, (module, about) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=about))
    commands.add_parser("run", help="torchrun, with ranks from a fork server; its options", add_help=False)
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["run"]:  # the other arguments are torchrun's, which has its own parser
        from monarch_backend import _launch
        from monarch_backend._core import env

        try:
            env.check()
        except ValueError as error:
            print(f"monarch-backend run: {error}", file=sys.stderr)
            return 2
        return _launch.run(words[1:])
    args, unknown = parser.parse_known_args(words)
    if unknown:  # argparse would print the usage without that of the command
        commands.choices[args.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command in _COMMANDS:
        return int(_COMMANDS[args.command][0].run(args))
    from monarch_backend.cli import doctor as doctor_module

    return doctor_module.run(as_json=args.json)
