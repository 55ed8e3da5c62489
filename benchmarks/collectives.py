"""Benchmark of collectives on one host: monarch, Gloo, OpenMPI, Intel MPI, DeepSpeed, and floors.

    python benchmarks/collectives.py [--quick] [--ranks 2 4] [--sizes 8 64K 1M] [--ddp] [--out DIR]

The ranks of all peers are started once and block in a socket's recv. The driver tells one peer after the other to run a
batch of calls. Each round starts with another peer, so that noise of the machine affects all alike. If a peer is not
installed or fails, the report says so, and the run continues with the others.

Timing: after a barrier and warm-up calls, each rank times the calls of a batch with perf_counter_ns, without pauses
between them. The time of the i-th call is that of the slowest rank. Otherwise a rank that runs ahead, such as the root
of a broadcast, would favour libraries that buffer. The time of a ping-pong is half of rank 0's round trip. Tables have
the median and 99th percentile over all rounds, and the median of the rounds' ratios to monarch.

A size is the number of bytes of the larger buffer (the output of all_gather, the input of reduce_scatter), and at least
one float32 per rank. Results are checked once for every peer, collective and size. All libraries use the same kind of
buffers. _floors.py describes the floors, and _collective_peers.py has the peers' settings. The report prints the
settings.

Peers: `pip install 'monarch_backend[bench]'` installs all but DeepSpeed. Its setup needs the installed torch, which
pip's isolated build does not see. `make bench` installs it with

    DS_ACCELERATOR=cpu DS_BUILD_OPS=0 pip install --no-deps --no-build-isolation 'deepspeed>=0.19'
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from _collective_peers import (
    COLLECTIVES,
    COMMON,
    FLOORS,
    OTHER_FLOORS,
    PEERS,
    SIZED_FLOORS,
    build_spin,
    deepspeed_segments,
)
from _rank_set import PeerFailed, RankSet
from _report import Series, Table, markdown, plot

SIZES = (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20)
QUICK_SIZES = (8, 64 << 10, 1 << 20)


@dataclass(frozen=True)
class Effort:
    """Number of rounds and length of a batch."""

    rounds: int
    batch_seconds: float
    most_calls: int = 400
    fewest_calls: int = 3


@dataclass
class Contender:
    """A peer or a floor in one case: the function that runs a batch, and the times so far."""

    name: str
    rank_set: RankSet
    batch: Callable[[int, int], list[int]]  # (calls, warm-up calls) -> nanoseconds
    series: Series
    calls: int = 0

    def run(self) -> None:
        warm = max(self.calls // 10, 1)
        self.series.rounds.append([ns / 1e3 for ns in self.batch(self.calls, warm)])


def _slowest(answers: Sequence[Sequence[int]]) -> list[int]:
    return [max(times) for times in zip(*answers, strict=True)]


class Runner:
    """Measures all peers with one number of ranks."""

    def __init__(self, rank_sets: list[RankSet], effort: Effort, notes: list[str]) -> None:
        self._rank_sets, self._effort, self._notes = rank_sets, effort, notes

    def drop(self, rank_set: RankSet, reason: object) -> None:
        """End a peer that failed and continue without it."""
        print(f"{rank_set.peer.name}: {reason}", file=sys.stderr)
        self._notes.append(f"{rank_set.peer.name} left the run: {str(reason).splitlines()[0][:200]}")
        self._rank_sets.remove(rank_set)
        rank_set.__exit__(PeerFailed, None, None)

    def measure(self, contenders: list[Contender]) -> dict[str, Series]:
        """Run all rounds, each starting with another contender. Return the times of each contender."""
        for contender in list(contenders):
            self._guarded(contenders, contender, self._calibrate)
        for turn in range(self._effort.rounds):
            turned = contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)] if contenders else []
            for contender in turned:
                self._guarded(contenders, contender, Contender.run)
        return {one.name: one.series for one in contenders}

    def _guarded(self, contenders: list[Contender], one: Contender, action: Callable[[Contender], None]) -> None:
        if one not in contenders:
            return
        try:
            action(one)
        except PeerFailed as failure:
            contenders[:] = [other for other in contenders if other.rank_set is not one.rank_set]
            self.drop(one.rank_set, failure)

    def _calibrate(self, contender: Contender) -> None:
        """Warm up, and choose the number of calls in a batch."""
        effort, calls = self._effort, 2
        while True:
            took = statistics.median(contender.batch(calls, 1)) / 1e9
            fitting = int(effort.batch_seconds / max(took, 1e-9))
            if calls >= min(fitting, 32):
                break
            calls *= 4
        contender.calls = max(effort.fewest_calls, min(effort.most_calls, fitting))

    def collective(self, what: str, size: int) -> list[Contender]:
        """Return the peers that have this collective, after checking their results."""
        contenders = []
        for rank_set in list(self._rank_sets):
            if what not in rank_set.peer.collectives:
                continue
            try:
                right = rank_set.ask("check", what, size)
            except PeerFailed as failure:
                self.drop(rank_set, failure)
                continue
            if not all(right):
                sys.exit(f"{rank_set.peer.name}: {what} of {size} bytes gave wrong values, by rank: {right}")
            contenders.append(Contender(rank_set.peer.name, rank_set, _batch_of(rank_set, what), Series()))
        return contenders

    def floors(self, names: Sequence[str], size: int) -> list[Contender]:
        """Return the named floors at this size."""
        rank_set = next((rank_set for rank_set in self._rank_sets if rank_set.peer is FLOORS), None)
        if rank_set is None:
            return []

        def of(name: str) -> Callable[[int, int], list[int]]:
            def batch(calls: int, warm: int) -> list[int]:
                rank_set.ask("check", name, size)
                return list(rank_set.ask("batch", name, calls, warm)[0])

            return batch

        return [Contender(name, rank_set, of(name), Series()) for name in names]

    def ddp(self) -> dict[str, Series]:
        """Measure a training step with gloo, with monarch, and without communication."""
        contenders = []
        for rank_set in self._rank_sets:
            if rank_set.peer.name in ("monarch", "gloo"):
                contenders.append(Contender(rank_set.peer.name, rank_set, _step_of(rank_set, "ddp"), Series(), 3))
        if contenders:
            rank_set = contenders[-1].rank_set
            contenders.append(Contender("no communication", rank_set, _step_of(rank_set, "local"), Series(), 3))
        return self.measure(contenders)


def _batch_of(rank_set: RankSet, what: str) -> Callable[[int, int], list[int]]:
    def batch(calls: int, warm: int) -> list[int]:
        answers = rank_set.ask("batch", what, calls, warm)
        return [ns // 2 for ns in answers[0]] if what == "send_recv" else _slowest(answers)

    return batch


def _step_of(rank_set: RankSet, kind: str) -> Callable[[int, int], list[int]]:
    return lambda calls, warm: _slowest(rank_set.ask("step", kind, calls, warm))


def _idle(rank_sets: list[RankSet], seconds: float = 0.5) -> str:
    """Return the share of a core that each peer's idle ranks use. It should be 0: they would disturb other peers."""
    before = [rank_set.cpu_seconds() for rank_set in rank_sets]
    time.sleep(seconds)
    shares = [(rank_set.cpu_seconds() - used) / seconds for rank_set, used in zip(rank_sets, before, strict=True)]
    return ", ".join(f"{rank_set.peer.name} {share:.0%}" for rank_set, share in zip(rank_sets, shares, strict=True))


class _Others:
    """CPU time of processes that do not belong to the benchmark. The report gives it as a measure of noise."""

    def __init__(self, rank_sets: list[RankSet]) -> None:
        self._rank_sets, self._start, self._before = rank_sets, time.monotonic(), self._used(rank_sets)

    @staticmethod
    def _used(rank_sets: list[RankSet]) -> float:
        fields = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()
        everybody = sum(map(int, (*fields[1:4], *fields[6:9]))) / os.sysconf("SC_CLK_TCK")
        return everybody - sum(rank_set.cpu_seconds() for rank_set in rank_sets) - time.process_time()

    def note(self) -> str:
        """Return a line with the mean number of cores that other processes have used since the start."""
        cores = (self._used(self._rank_sets) - self._before) / (time.monotonic() - self._start)
        return f"other processes of the machine used {max(cores, 0):.2f} cores meanwhile"


def _started(
    peers: Sequence[Any], ranks: int, run: Path, stack: contextlib.ExitStack, notes: list[str]
) -> list[RankSet]:
    rank_sets = []
    for peer in peers:
        lacks = peer.missing()
        if lacks:
            notes.append(f"{peer.name} is missing: {lacks}")
            print(notes[-1], file=sys.stderr)
        else:
            rank_sets.append(stack.enter_context(RankSet(peer, ranks, run)))
    for rank_set in list(rank_sets):
        try:
            if rank_set.peer is FLOORS:
                reason = build_spin(rank_set.folder)
                notes.extend([reason] if reason else [])
            rank_set.wait_connected()
            for path in deepspeed_segments(run) if rank_set.peer.name == "DeepSpeed" else []:
                path.unlink(missing_ok=True)  # all ranks have mapped it, so unlink it now
        except PeerFailed as failure:
            print(f"{rank_set.peer.name}: {failure}", file=sys.stderr)
            notes.append(f"{rank_set.peer.name} did not start: {str(failure).splitlines()[0][:200]}")
            rank_set.__exit__(PeerFailed, None, None)
            rank_sets.remove(rank_set)
    return rank_sets


def _measure(ranks: int, args: argparse.Namespace, effort: Effort, notes: list[str]) -> tuple[Table, Table]:
    """Measure all cases with this number of ranks. Return two tables: cases with sizes, and cases without."""
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None  # OpenMPI puts its segments into this folder
    wanted = [peer for peer in PEERS if peer.name in args.peers]
    table: Table = {}
    once: Table = {}
    with tempfile.TemporaryDirectory(prefix="monarch-bench-", dir=base, ignore_cleanup_errors=True) as folder:
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: [path.unlink(missing_ok=True) for path in deepspeed_segments(Path(folder))])
            rank_sets = _started([*wanted, FLOORS], ranks, Path(folder), stack, notes)
            notes.append(f"cores used by sleeping ranks: {_idle(rank_sets)}")
            others = _Others(list(rank_sets))
            runner = Runner(rank_sets, effort, notes)
            for what in args.collectives:
                for size in args.sizes:
                    print(f"{ranks} ranks, {what}, {size} B", file=sys.stderr)
                    floors = runner.floors(SIZED_FLOORS, size) if what == args.collectives[0] else []
                    table[what, size] = runner.measure(runner.collective(what, size) + floors)
            has_spin = (Path(folder) / "floors" / "spin").exists()
            names = [name for name in OTHER_FLOORS if name != "spin" or has_spin]
            once["floors", 0] = runner.measure(runner.floors(names, 8))
            if args.ddp and ranks == 2:
                print("2 ranks, DDP", file=sys.stderr)
                once["DDP step, 29 M parameters", 0] = runner.ddp()
            notes.append(f"the same at the end: {_idle(rank_sets)}")
            notes.append(others.note())
    return table, once


def _versions() -> str:
    found = []
    for name in ("torch", "monarch_backend", "openmpi", "impi-rt", "mpi4py", "deepspeed"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"{', '.join(found)}; Python {platform.python_version()}; {len(os.sched_getaffinity(0))} cores"


def _text(ranks: int, table: Table, once: Table, peers: Sequence[str], notes: Sequence[str]) -> str:
    sized: Table = {}
    for (_, size), entries in table.items():
        sized.setdefault(("", size), {}).update({name: entries[name] for name in SIZED_FLOORS if name in entries})
    lines = [f"## {ranks} ranks", "", "Microseconds: median / 99th percentile (times monarch's)", ""]
    lines += [markdown(table, peers), "", "Floors:", ""]
    lines += [markdown(sized, SIZED_FLOORS), ""]
    lines += [markdown({key: value for key, value in once.items() if key[0] == "floors"}, OTHER_FLOORS), ""]
    steps = {key: value for key, value in once.items() if key[0] != "floors"}
    if steps:
        lines += [markdown(steps, ("monarch", "gloo", "no communication")), ""]
    lines += [f"- {peer.name}: {peer.settings(ranks)}" for peer in PEERS if peer.name in peers]
    lines += [f"- {note}" for note in notes]
    return "\n".join(lines) + "\n"


def _bytes(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20}
    return int(text[:-1]) * units[text[-1].upper()] if text[-1].upper() in units else int(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [peer.name for peer in PEERS]
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=_bytes, nargs="+", help="bytes, or with K or M")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--peers", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--ddp", action="store_true", help="also a DDP training step on two ranks")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds: about a minute")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="where the table and plots go")
    args = parser.parse_args()
    args.sizes = args.sizes or list(QUICK_SIZES if args.quick else SIZES)
    return args


def _stop(*_: object) -> None:
    sys.exit(143)


def main() -> None:
    """Run the benchmark; print and write the report."""
    args = _arguments()
    signal.signal(signal.SIGTERM, _stop)
    effort = Effort(args.rounds or 4, 0.008) if args.quick else Effort(args.rounds or 8, 0.02)
    args.out.mkdir(parents=True, exist_ok=True)
    common = " ".join(f"{name}={value}" for name, value in COMMON.items())
    text = f"# Collectives on one host\n\n{_versions()}. All ranks: {common}\n\n"
    print(text)
    for ranks in args.ranks:
        notes: list[str] = []
        table, once = _measure(ranks, args, effort, notes)
        measured = {name for entries in table.values() for name in entries}
        peers = [peer.name for peer in PEERS if peer.name in measured]
        reason = plot(
            table, peers, SIZED_FLOORS, f"{ranks} ranks, float32", args.out / f"collectives-{ranks}-ranks.png"
        )
        part = _text(ranks, table, once, peers, notes + ([reason] if reason else []))
        print(part, flush=True)
        text += part + "\n"
    (args.out / "collectives.md").write_text(text, encoding="utf-8")
    print(f"written to {args.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
