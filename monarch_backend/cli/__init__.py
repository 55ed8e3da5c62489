"""The command line, `monarch-backend COMMAND`: the parser, and one module per command.

This package handles arguments and exit codes. The commands call other packages for their work.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from monarch_backend import __version__
from monarch_backend.cli import up as up_module


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. Unknown commands and options exit with 2 and a usage line."""
    try:
        return _run_command(argv)
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
    up = commands.add_parser("up", help="make this machine a host on which controllers can start processes")
    up_module.add_arguments(up)
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
    args = parser.parse_args(words)

    if args.command == "up":
        return up_module.run(args)
    from monarch_backend.cli import doctor as doctor_module

    return doctor_module.run(as_json=args.json)
