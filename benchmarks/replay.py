"""Benchmark of the recording for a replay: what it costs a call, and the file a message.

    python benchmarks/replay.py [--rounds 30] [--out FILE]

One program has three processes with the same actor: without recording, without a second time, and with it. A round
measures all three, in random order. A figure is the least of the rounds' means. A ratio is the median of the rounds'
ratios to the first process. The ratio of the second process shows the noise of the machine. No peer records messages,
so there is no other contender.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _machine_report import Others, machine

from monarch_backend.actor import Actor, endpoint, this_host

CONTENDERS = ("off", "off again", "on")


class Echo(Actor):
    """Returns what it gets."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


def cases(mesh: Any) -> dict[str, tuple[int, int, Callable[[], object]]]:
    """Return calls in a round, messages in a call, and the call, by case."""
    small, large = torch.ones(1 << 12), torch.ones(1 << 18)

    def pipelined() -> None:
        for future in [mesh.echo.call_one(1) for _ in range(100)]:
            future.get()

    return {
        "call_one": (300, 1, lambda: mesh.echo.call_one(1).get()),
        "100 x call_one": (10, 100, pipelined),
        "tensor of 16 KiB": (200, 1, lambda: mesh.echo.call_one(small).get()),
        "tensor of 1 MiB": (20, 1, lambda: mesh.echo.call_one(large).get()),
    }


def measure(rounds: int) -> str:
    """Return the table."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    messages: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    host = this_host()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The limit is above what a run writes: the recording does not stop.
        env = {"MONARCH_REPLAY_BYTES": str(1 << 38), "MONARCH_REPLAY_FOLDER_BYTES": str(1 << 38)}
        procs = [host.spawn_procs(replay=folder if each == "on" else None, env=env) for each in CONTENDERS]
        calls = {each: cases(mesh.spawn("echo", Echo)) for each, mesh in zip(CONTENDERS, procs, strict=True)}
        for each in CONTENDERS:
            for _, _, call in calls[each].values():
                call()
        for _ in range(rounds):
            for case in calls["off"]:
                for each in random.sample(CONTENDERS, len(CONTENDERS)):
                    count, size, call = calls[each][case]
                    written = _size(folder)
                    began = time.perf_counter()
                    for _ in range(count):
                        call()
                    seconds[case, each].append((time.perf_counter() - began) / count)
                    if each == "on":
                        messages[case] += count * size
                        sizes[case] += _size(folder) - written
        for mesh in procs:
            mesh.stop().get()
    lines = ["| case | off, us | on, us | on / off | off again / off | bytes a message |", "| --- |" + " ---: |" * 5]
    for case in calls["off"]:
        off, again, on = (seconds[case, each] for each in CONTENDERS)
        ratio, noise = (statistics.median(a / b for a, b in zip(some, off, strict=True)) for some in (on, again))
        lines.append(
            f"| {case} | {1e6 * min(off):.1f} | {1e6 * min(on):.1f} | {ratio:.2f} | {noise:.2f} | "
            f"{sizes[case] / messages[case]:.0f} |"
        )
    return "\n".join(lines) + "\n"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir()) if folder.exists() else 0


def main() -> None:
    """Print the table, or write it to a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="number of rounds; each measures all contenders")
    parser.add_argument("--out", type=Path, help="file for the table")
    args = parser.parse_args()
    others = Others()
    table = measure(args.rounds)
    text = f"{table}\n{machine()} {others.note()}\n"
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
