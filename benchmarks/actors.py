"""Benchmark of actors on one host: this project, torchmonarch, Ray, torch.distributed.rpc, and floors.

    python tools/peer_env.py torchmonarch ray       # once: the peers' own environments
    python benchmarks/actors.py [--rounds N] [--starts N] [--procs 8 64] [--only round_trip ...] [--peers ours ...]
                                [--out DIR]

Each peer has a runner process, which sleeps between requests. Each case is measured in rounds. A round measures all
runners, and each round starts with another one, so that noise of the machine affects all alike. All runners time the
peers' calls with the same loops (actor_peers/_runner.py). Figures are medians over all rounds. In brackets is the
factor by which ours is better: the median of the rounds' ratios.

call_one        a no-op to one actor in one process: one call at a time, or all sent before the first reply is read
call            a no-op to all actors, until all have replied; meshes of up to 8 processes exist at the same time
tensor          a float32 tensor with a new last element in each call, which the reply must repeat
start           until all processes have imported torch, have an actor, and have replied. Warm: the program has started
                workers before. Cold: the first workers of a new program, which has imported the library itself
death           from SIGKILL of the process that handles a call until the call raises at the caller
memory          private pages of a new worker, clean and dirty

A dash stands for a peer that is not installed, cannot do the case, or fails. The reason is below the table.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _actor_report import PINNED, Results, markdown, plot
from _actor_runners import (
    FLOOR,
    PEERS,
    Peer,
    Refused,
    Runner,
    RunnerFailed,
    adopt_orphans,
    available_bytes,
    end_all,
)
from _machine_report import Others, machine

CHOICES = ("round_trip", "pipelined", "cast", "tensor", "start", "death", "memory")
SIDE_BY_SIDE = 8  # largest mesh that all peers start at the same time; more would need too much memory
MIB = 64
WORKER_BYTES = 250e6  # assumed memory of a worker if it was not measured
Values = list[float]


class Run:
    """The runners, and their results so far."""

    def __init__(self, peers: Sequence[Peer], args: argparse.Namespace, folder: Path) -> None:
        self._peers, self._args, self._folder = list(peers), args, folder
        self._runners: dict[str, Runner] = {}
        self._folders = 0
        self.results = Results()
        self.versions: dict[str, str] = {}
        self.says: dict[str, str] = {}
        self.left: dict[str, int] = {}
        self.notes: list[str] = []

    def all(self) -> None:
        """Measure all selected cases."""
        for case, measure, rounds in self._simple_cases():
            self._rounds([case], rounds, measure)
        for procs in self._args.procs:
            if {"cast", "start"} & set(self._args.only):
                self._meshes(procs)
        self.notes.append(f"cores used by sleeping runners: {self._idle()}")
        self.end()
        if "start" in self._args.only:
            for procs in self._args.procs:
                self._rounds([f"cold_{procs}"], self._starts(procs), functools.partial(self._cold, procs))

    def end(self, patient: bool = True) -> None:
        """End all runners."""
        while self._runners:
            self._forget(next(iter(self._runners)), patient)

    def _idle(self, seconds: float = 1.0) -> str:
        """Return the share of a core that each idle runner uses. It disturbs the other measurements."""
        before = {key: runner.cpu_seconds() for key, runner in self._runners.items()}
        time.sleep(seconds)
        shares = {key: (self._runners[key].cpu_seconds() - used) / seconds for key, used in before.items()}
        return ", ".join(f"{key} {share:.0%}" for key, share in shares.items()) or "none was there"

    def _simple_cases(self) -> list[tuple[str, Callable[[Peer], Values], int]]:
        """Return (case, function that measures a peer, rounds) for the cases that need at most one worker."""

        def times(scale: float, do: str, **arguments: Any) -> Callable[[Peer], Values]:
            return lambda peer: [value * scale for value in self._ask(peer, do, **arguments)]

        def rates(peer: Peer) -> Values:
            return [MIB * (1 << 20) / 1e9 / seconds for seconds in self._ask(peer, "tensor", mib=MIB, n=5)]

        def death(peer: Peer) -> Values:
            answer = self._ask(peer, "death")
            self.says[peer.key] = answer["says"]
            return [answer["seconds"] * 1e3]

        def round_trip(peer: Peer) -> Values:
            if peer is FLOOR:
                for case, seconds in zip(PINNED, self._ask(peer, "pinned", n=300), strict=True):
                    self.results.add(case, peer.key, [value * 1e6 for value in seconds])
            return times(1e6, "round_trip", n=300)(peer)

        cases = [
            ("round_trip", round_trip, self._args.rounds),
            ("pipelined", times(1, "pipelined", n=2000), self._args.rounds),
            ("tensor", rates, self._args.rounds),
            ("memory", times(1e-6, "memory"), self._args.starts),
            ("death", death, self._args.starts),
        ]
        return [case for case in cases if case[0] in self._args.only]

    def _starts(self, procs: int) -> int:
        starts: int = self._args.starts
        return starts if procs <= SIDE_BY_SIDE else max(1, starts // 2)

    def _meshes(self, procs: int) -> None:
        """Measure warm starts, and calls to all processes."""
        warm, cast, together = f"warm_{procs}", f"cast_{procs}", procs <= SIDE_BY_SIDE

        def call(peer: Peer) -> Values:
            return [seconds * 1e6 for seconds in self._ask(peer, "cast", procs=procs, n=20)]

        def start(peer: Peer) -> Values:
            self._fits(peer, procs)
            self._ask(peer, "round_trip", n=1)  # makes the start warm: the peer has started a worker before
            took: Values = self._ask(peer, "start", procs=procs)
            if not together:
                if "cast" in self._args.only:
                    self.results.add(cast, peer.key, call(peer))
                self._ask(peer, "drop")
            return took

        self._rounds([warm] if together else [warm, cast], self._starts(procs), start)
        if together and "cast" in self._args.only:
            for (case, key), reason in list(self.results.reasons.items()):
                if case == warm:
                    self.results.fail(cast, key, reason)
            self._rounds([cast], self._args.rounds, call)
        for peer in self._peers:
            if peer.key in self._runners:
                with contextlib.suppress(Refused, RunnerFailed):
                    self._ask(peer, "drop")

    def _cold(self, procs: int, peer: Peer) -> Values:
        self._fits(peer, procs)
        try:
            took: Values = self._ask(peer, "start", procs=procs)
            return took
        finally:
            self._forget(peer.key)

    def _fits(self, peer: Peer, procs: int) -> None:
        """Raise Refused if the workers would not fit into free memory."""
        each = (self.results.median("memory", peer.key) or WORKER_BYTES / 1e6) * 1e6
        free = available_bytes() - (1 << 30)
        if procs * each > free:
            raise Refused(f"{procs} workers need about {procs * each / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")

    def _rounds(self, cases: Sequence[str], rounds: int, measure: Callable[[Peer], Values]) -> None:
        """Measure all peers in each round, starting with another one each time, and add the values to the first case.

        A failure counts for all of the cases.
        """
        for turn in range(rounds):
            first = turn % len(self._peers)
            for peer in self._peers[first:] + self._peers[:first]:
                if peer.only and cases[0] not in peer.only:
                    continue
                if any((case, peer.key) in self.results.reasons for case in cases):
                    continue
                print(f"{cases[0]}, round {turn + 1} of {rounds}: {peer.name} ", end="", file=sys.stderr, flush=True)
                try:
                    values = measure(peer)
                except (Refused, RunnerFailed) as failure:
                    print(failure, file=sys.stderr)
                    for case in cases:
                        self.results.fail(case, peer.key, str(failure).splitlines()[0][:300])
                else:
                    print(f"{statistics.median(values):.4g}", file=sys.stderr)
                    self.results.add(cases[0], peer.key, values)

    def _ask(self, peer: Peer, do: str, **arguments: Any) -> Any:
        """Send a request to this peer's runner and return the answer. Start the runner if there is none."""
        runner = self._runners.get(peer.key)
        if runner is None:
            lacks = peer.missing()
            if lacks:
                raise Refused(lacks)
            self._folders += 1
            runner = Runner(peer, self._folder / str(self._folders))
            self._runners[peer.key] = runner
            self.versions[peer.key] = runner.versions
        try:
            return runner.ask(do, **arguments)
        except RunnerFailed:
            del self._runners[peer.key]
            raise

    def _forget(self, key: str, patient: bool = True) -> None:
        runner = self._runners.pop(key, None)
        if runner is not None:
            runner.end(patient)
            self.left[key] = self.left.get(key, 0) + runner.left


def _text(run: Run, peers: Sequence[Peer]) -> str:
    lines = ["# Actors of one host", "", machine(), ""]
    lines += ["Median, or median / 99th percentile (ours is so many times better; below 1 worse)", ""]
    lines += [markdown(run.results, peers), ""]
    lines += [f"- {peer.name}: {run.versions[peer.key]}; {peer.settings}" for peer in peers if peer.key in run.versions]
    lines += [
        f"- {peer.name} says of a killed worker: {' '.join(run.says[peer.key].split())[:300]}"
        for peer in peers
        if peer.key in run.says
    ]
    lines += [f"- {key} left {count} processes behind; they were killed" for key, count in run.left.items() if count]
    lines += [f"- {note}" for note in run.notes]
    return "\n".join(lines) + "\n"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    keys = [peer.key for peer in PEERS]
    parser.add_argument("--rounds", type=int, default=6, help="of calls")
    parser.add_argument("--starts", type=int, default=2, help="rounds of starts, deaths and memory; half above 8")
    parser.add_argument("--procs", type=int, nargs="*", choices=(8, 64), default=[8, 64])
    parser.add_argument("--only", nargs="+", choices=CHOICES, default=list(CHOICES))
    parser.add_argument("--peers", nargs="+", choices=keys, default=keys)
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="where the table and plot go")
    return parser.parse_args()


def _stop(*_: object) -> None:
    sys.exit(143)


def main() -> None:
    """Run the benchmark; print and write the report."""
    args = _arguments()
    if sys.platform != "linux":
        sys.exit("the processes are watched through /proc and pidfds, which are Linux's")
    signal.signal(signal.SIGTERM, _stop)
    args.out.mkdir(parents=True, exist_ok=True)
    peers, others = [peer for peer in PEERS if peer.key in args.peers], Others()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="mba-", ignore_cleanup_errors=True) as folder:
        run, patient = Run(peers, args, Path(folder)), False
        try:
            run.all()
            patient = True
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore a second Ctrl-C, which would leave processes behind
            with contextlib.suppress(RunnerFailed):
                run.end(patient)
            end_all()
    run.notes.append(others.note())
    reason = plot(run.results, peers, args.out / "actors.png")
    run.notes += [reason] if reason else []
    text = _text(run, peers)
    print(text)
    (args.out / "actors.md").write_text(text, encoding="utf-8")
    print(f"written to {args.out}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
