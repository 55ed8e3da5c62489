"""Benchmark of an actor's first large messages, before their memory is warm: this project, Ray, and floors.

    python tools/peer_env.py ray                    # once: Ray's own environment
    python benchmarks/cold_payloads.py [--rounds 5] [--mib 1 16 64 256] [--peers ours without ray]
                                       [--pause 1] [--before PYTHON] [--out FILE]

Each figure comes from a new program with a new worker, which has sent only small messages before, and then nothing for
``--pause`` seconds. "without" is this project with MONARCH_PREFAULT_BYTES=0: no memory is committed
ahead. The programs of a round run one after another, and each round starts with another one, so that noise of the
machine affects all alike.
``--before`` adds the interpreter of another checkout of this project. Rates are GB/s, medians over all rounds; in
brackets is the part of the warm rate, the median of the rounds' ratios.

first, second   the first and the second call with a payload of this size
warm            median of the calls from the fourth on
memcpy          a copy between two tensors that were written before
fresh           writing to fresh memory in small pages: the cost of its page faults, and of zeroing it
"""

from __future__ import annotations

import argparse
import dataclasses
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _actor_runners import PEERS, Peer, Refused, Runner, RunnerFailed, adopt_orphans, end_all
from _machine_report import Others, machine

CALLS = 9
Rates = dict[tuple[str, str, int], list[list[float]]]  # peer, direction, MiB -> of each round the rate of each call


@dataclasses.dataclass(frozen=True)
class Checkout(Peer):
    """This project from another checkout, with the same runner."""

    interpreter: Path = Path()

    @property
    def python(self) -> Path:
        """Path of the runner's interpreter."""
        return self.interpreter


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def floors(size: int) -> dict[str, float]:
    """Return the rates of a warm copy, and of writing to fresh memory."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    fresh = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    written = torch.frombuffer(fresh, dtype=torch.uint8)
    copied = statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(CALLS))
    return {"memcpy": size / 1e9 / copied, "fresh": size / 1e9 / _seconds(lambda: written.fill_(1))}


WITHOUT = Peer(
    "without", "without", "ours.py", "MONARCH_PREFAULT_BYTES=0", environment=lambda: {"MONARCH_PREFAULT_BYTES": "0"}
)
"""This project without memory that is committed ahead."""


def measure(peers: list[Peer], sizes: list[int], rounds: int, pause: float, folder: Path, notes: list[str]) -> Rates:
    """Measure all peers; those that fail are in the notes."""
    rates: Rates = {}
    programs = 0
    for turn in range(rounds):
        for mib in sizes:
            for floor, rate in floors(mib << 20).items():
                rates.setdefault((floor, "", mib), []).append([rate])
            for direction in ("argument", "reply"):
                for peer in [*peers[turn % len(peers) :], *peers[: turn % len(peers)]]:
                    programs += 1
                    try:
                        runner = Runner(peer, folder / str(programs))
                        try:
                            asked = {"nbytes": mib << 20, "n": CALLS, "reply": direction == "reply", "pause": pause}
                            seconds = runner.ask("payloads", **asked)
                        finally:
                            runner.end()
                    except (Refused, RunnerFailed) as error:
                        notes.append(f"{peer.name}, {mib} MiB: {str(error).splitlines()[0][:200]}")
                        continue
                    of_peer = rates.setdefault((peer.name, direction, mib), [])
                    of_peer.append([(mib << 20) / 1e9 / each for each in seconds])
    return rates


def report(rates: Rates) -> str:
    """Return the table."""
    lines = ["| payload | | first | second | warm |", "| --- | --- | --- | --- | --- |"]
    for (name, direction, mib), of in sorted(rates.items(), key=lambda item: (item[0][2], item[0][1], item[0][0])):
        if not direction:
            lines.append(f"| {mib} MiB | {name} | | | {statistics.median(each[0] for each in of):.1f} |")
            continue
        warm = [statistics.median(each[3:]) for each in of]
        cells = []
        for call in range(2):
            part = statistics.median(each[call] / of_warm for each, of_warm in zip(of, warm, strict=True))
            cells.append(f"{statistics.median(each[call] for each in of):.2f} ({part:.2f})")
        lines.append(f"| {mib} MiB {direction} | {name} | {' | '.join(cells)} | {statistics.median(warm):.1f} |")
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark and print the table; with --out also write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--peers", nargs="+", choices=("ours", "without", "ray"), default=["ours", "without", "ray"])
    parser.add_argument("--pause", type=float, default=1.0, help="seconds before the first large message")
    parser.add_argument("--before", type=Path, metavar="PYTHON", help="interpreter of another checkout to compare with")
    parser.add_argument("--out", type=Path, help="write a page with the table to this file")
    args = parser.parse_args()
    peers = [peer for peer in (*PEERS, WITHOUT) if peer.key in args.peers]
    if args.before:
        peers.append(Checkout("before", "before", "ours.py", "", interpreter=args.before.absolute()))
    notes = [f"{peer.name}: {peer.missing()}" for peer in peers if peer.missing()]
    peers = [peer for peer in peers if not peer.missing()]
    adopt_orphans()
    others = Others()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="monarch-bench-") as folder:
        try:
            rates = measure(peers, args.mib, args.rounds, args.pause, Path(folder), notes)
        finally:
            end_all()
    said = [
        f"{machine()}; torch {torch.__version__}; {args.rounds} rounds, {args.pause:g} s pause; {others.note()}",
        *dict.fromkeys(notes),
    ]
    text = f"{report(rates)}\n\n" + "\n".join(f"- {note}" for note in said)
    print(text)
    if args.out:
        title = "# Measured: the first large messages of an actor\n\nGB/s, medians, from `benchmarks/cold_payloads.py`."
        args.out.write_text(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
