"""Driver of the ranks of several peers: starts them, has them run one batch after the other, and collects times.

collectives.py and training_steps.py use it. _rank_set.py talks to the ranks of one peer.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _collective_peers import FLOORS, build_spin, deepspeed_segments
from _rank_set import PeerFailed, RankSet
from _report import Series


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

    def step(self, kind: str) -> list[Contender]:
        """Return the peers with a training step of this kind."""
        return [
            Contender(rank_set.peer.name, rank_set, _step_of(rank_set, kind), Series()) for rank_set in self._rank_sets
        ]


def _batch_of(rank_set: RankSet, what: str) -> Callable[[int, int], list[int]]:
    def batch(calls: int, warm: int) -> list[int]:
        answers = rank_set.ask("batch", what, calls, warm)
        return [ns // 2 for ns in answers[0]] if what == "send_recv" else _slowest(answers)

    return batch


def _step_of(rank_set: RankSet, kind: str) -> Callable[[int, int], list[int]]:
    return lambda calls, warm: _slowest(rank_set.ask("step", kind, calls, warm))


def idle(rank_sets: list[RankSet], seconds: float = 0.5) -> str:
    """Return the share of a core that each peer's idle ranks use. It should be 0: they would disturb other peers."""
    before = [rank_set.cpu_seconds() for rank_set in rank_sets]
    time.sleep(seconds)
    shares = [(rank_set.cpu_seconds() - used) / seconds for rank_set, used in zip(rank_sets, before, strict=True)]
    return ", ".join(f"{rank_set.peer.name} {share:.0%}" for rank_set, share in zip(rank_sets, shares, strict=True))


class Others:
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


def started(
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
