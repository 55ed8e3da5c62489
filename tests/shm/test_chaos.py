"""Ranks that die or stop in the middle of random operations over shared memory, in 200 random runs.

The error on every survivor must name the failed rank, and must come soon. Operations without the victim continue with
correct results. Operations with it fail from then on. `destroy_process_group` works, and no resource is left.

The seed determines a run, except for the scheduler: `MONARCH_TEST_SEED=<seed>` repeats one run ten times.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import mmap
import os
import pickle
import random
import re
import select
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend.process_group._errors import CollectiveTimeoutError, RankFailedError
from monarch_backend.process_group._shm import segment
from tests.shm import random_programs
from tests.support.ranks import _answer, _spawn, init, store_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's"),
]

SEED = os.environ.get("MONARCH_TEST_SEED", "")
RUNS = 200
AT_ONCE = 3  # concurrent runs: a run mostly waits for the store, the timeout or the kernel
STEPS = 40
DEADLINE = 60.0  # seconds for a run: more than a run takes on a busy machine
TIMEOUT = 4.0  # seconds: more than a rank computes between operations on a busy machine
# seconds from a death to the errors: limits for the median and for the worst; every timeout is longer
SOON, SOME_TIME = 1.0, 5.0

DEATHS = {"kill": "killed by signal 9", "exit": "exited with status 7"}


# Runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Victim:
    """A rank that dies before step ``step``, during it, or ``delay`` seconds after its start."""

    rank: int
    step: int
    when: str
    delay: float


@dataclass(frozen=True)
class Scenario:
    """The parameters of one run, drawn from its seed."""

    seed: int
    how: str
    program: random_programs.Program
    victims: tuple[Victim, ...]
    wakes: bool  # whether a stopped rank is resumed at the end

    def __str__(self) -> str:
        who = ", ".join(f"rank {v.rank} {v.when} step {v.step} (+{v.delay * 1e6:.0f} us)" for v in self.victims)
        return f"MONARCH_TEST_SEED={self.seed}: {self.how} of {self.program.size} ranks: {who}"

    @property
    def ranks(self) -> set[int]:
        return {victim.rank for victim in self.victims}


def _draw_scenario(seed: int) -> Scenario:
    pick = random.Random(f"scene {seed}")
    how = pick.choices(("kill", "exit", "stop"), (50, 25, 25))[0]
    size = pick.randint(2, 4)
    # With several groups, a survivor may time out because of another survivor that waits for the stopped rank. Its
    # error then rightly names that survivor. In one group collectives are entered in order, so only the stopped rank is
    # late.
    only = how == "stop"
    groups = 1 if only else 3
    weights = (45, 30, 22, 3)
    program = random_programs.draw(seed, size, STEPS, groups=groups, messages=not only, weights=weights)
    count = 2 if how == "kill" and size > 2 and pick.random() < 0.3 else 1
    victims = []
    for rank in pick.sample(range(size), count):
        when = pick.choice(("before", "in", "after"))
        delay = {"before": 0.0, "in": pick.uniform(0, 500e-6), "after": pick.uniform(0, 50e-3)}[when]
        victims.append(Victim(rank, pick.randrange(STEPS) if when != "after" else pick.randrange(5), when, delay))
    return Scenario(seed, how, program, tuple(victims), pick.random() < 0.5)


# Survivors ------------------------------------------------------------------------------------------------------------


class Clocks:
    """The time of each rank's death, in memory that outlives the rank."""

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, 8 * size)
        self._times = (ctypes.c_double * size).from_buffer(self._memory)

    def note(self, rank: int) -> None:
        self._times[rank] = time.monotonic()

    def of(self, rank: int) -> float:
        return float(self._times[rank])

    def close(self) -> None:
        del self._times
        self._memory.close()


@dataclass
class Report:
    """The result that a rank sends at the end."""

    # (time, group, the error's rank or None if it has none, text)
    errors: list[tuple[float, int, int | None, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    played: int = 0


class Survivor:
    """A rank that runs the program as far as possible. A victim does the same until it dies."""

    def __init__(self, scenario: Scenario, rank: int, clocks: Clocks) -> None:
        self.scenario, self.rank, self.clocks = scenario, rank, clocks
        self.player = random_programs.Player(scenario.program, rank)
        self.order = self.player.order()
        self.report = Report()
        self.broken: set[int] = set()
        self.expected = CollectiveTimeoutError if scenario.how == "stop" else RankFailedError
        self.fate = next((victim for victim in scenario.victims if victim.rank == rank), None)

    def play(self) -> Report:
        """Run all steps. Then call every group again, so that each survivor sees each failure."""
        under_way: list[random_programs.Pending] = []
        for step in self.scenario.program.steps:
            if self.fate is not None and step.number == self.fate.step:
                self.meet(self.fate)
            if not self.player.plays(step):
                continue
            started = self.attempt(step.group, str(step), lambda step=step: self.player.start(step, self.order))
            if started is not None:
                under_way.append(started)
            while len(under_way) > 8 or (under_way and self.order.random() < 0.4):
                self.finish(under_way.pop(self.order.randrange(len(under_way))))
        while under_way:
            self.finish(under_way.pop(0))
        while self.fate is not None and not self.clocks.of(self.rank):
            time.sleep(1e-3)  # the thread that kills this process is still waiting
        while self.fate is not None and self.scenario.how != "stop":
            time.sleep(1e-3)
        self.check_all_groups()
        return self.report

    def finish(self, pending: random_programs.Pending) -> None:
        """Finish an operation in progress. It may succeed if it ended before the death."""
        group = pending.step.group
        if group not in self.broken:
            if self.attempt(group, str(pending.step), lambda: self.player.wait(pending, self.order) or True):
                self.check(pending)
            return
        try:
            self.player.wait(pending, self.order)
        except Exception as error:
            if not self.is_expected(error):
                self.report.wrong.append(f"{pending.step}, under way at the time: {_in_short(error)}")
            return
        self.check(pending)

    def is_expected(self, error: Exception) -> bool:
        """Return whether the error has the expected class. torch's futures wrap it in a RuntimeError for some calls."""
        if isinstance(error, self.expected):
            return True
        return isinstance(error, RuntimeError) and f"callback: {self.expected.__name__}: " in str(error)

    def check(self, pending: random_programs.Pending) -> None:
        try:
            self.player.check(pending)
        except AssertionError as error:
            self.report.wrong.append(str(error))

    def attempt(self, group: int, what: str, call: Any) -> Any:
        """Run a call. On a failed group it must raise. On another group it may raise, and the group has then failed."""
        try:
            result = call()
            if isinstance(result, random_programs.Pending) and group in self.broken and self.active(result.step):
                self.player.wait(result, self.order)
        except Exception as error:
            if not self.is_expected(error):
                self.report.wrong.append(f"{what}: {_in_short(error)}")
            self.note(group, error)
            return None
        if group in self.broken:
            if not isinstance(result, random_programs.Pending) or self.active(result.step):
                self.report.wrong.append(f"{what} worked, though the group had failed")
            return None
        self.report.played += 1
        return result

    def active(self, step: random_programs.Step) -> bool:
        """Return whether this rank takes part in the step. A step's messages may all be between other ranks."""
        me = self.player.groups[step.group].rank()
        return not step.messages or any(me in (message.source, message.to) for message in step.messages)

    def note(self, group: int, error: Exception) -> None:
        now, ranks = time.monotonic(), self.scenario.program.groups[group]
        place = getattr(error, "rank", None)
        culprit = None if place is None else ranks[place] if place >= 0 else -1
        self.report.errors.append((now, group, culprit, _in_short(error)))
        self.broken.add(group)

    def check_all_groups(self) -> None:
        """Call each group several times: every call on a group with a victim must fail, the others must succeed."""
        for index, ranks in enumerate(self.scenario.program.groups):
            if self.rank not in ranks:
                continue
            group, doomed = self.player.groups[index], bool(self.scenario.ranks & set(ranks))
            other = next(r for r in ranks if r != self.rank)
            calls = [
                lambda group=group: dist.barrier(group) or True,
                lambda group=group: dist.all_reduce(torch.ones(3), group=group) or True,
                lambda group=group: dist.all_reduce(torch.ones(100_000), group=group, async_op=True).wait(),
            ]
            if doomed:
                calls += [
                    lambda group=group, other=other: dist.recv(torch.ones(3), other, group, 99),
                    lambda group=group, other=other: dist.isend(torch.ones(3), other, group, 99).wait(),
                ]
            for call in calls:
                if self.attempt(index, f"the end of group {index}", call) and doomed and index not in self.broken:
                    self.report.wrong.append(f"group {index} works without {sorted(self.scenario.ranks & set(ranks))}")

    # Victims ------------------------------------------------------------------------------------------------------

    def meet(self, fate: Victim) -> None:
        if fate.when == "before":
            self.die()
        else:
            threading.Thread(target=self.die_after, args=(fate.delay,), daemon=True).start()

    def die_after(self, delay: float) -> None:
        end = time.monotonic() + delay
        if delay > 2e-3:
            time.sleep(delay - 1e-3)
        while time.monotonic() < end:
            pass
        self.die()

    def die(self) -> None:
        self.clocks.note(self.rank)
        if self.scenario.how == "exit":
            os._exit(7)
        os.kill(os.getpid(), signal.SIGKILL if self.scenario.how == "kill" else signal.SIGSTOP)


def _in_short(error: Exception) -> str:
    text = str(error).partition("\n\nAt:\n")[0]  # the text from a future includes a traceback
    return f"{type(error).__name__}: {text}"


def _live(scenario: Scenario, rank: int, address: str, clocks: Clocks, connection: Connection) -> None:
    os.environ.update(
        MONARCH_SHM="1", MONARCH_CMA_MIN_BYTES="40000", RANK=str(rank), WORLD_SIZE=str(scenario.program.size)
    )
    torch.set_num_threads(1)
    inherited = _left()  # inherited from the test process, which may have such resources

    def play() -> Report:
        init(rank, scenario.program.size, address)
        survivor = Survivor(scenario, rank, clocks)
        if scenario.how == "stop":
            dist.group.WORLD.set_timeout(datetime.timedelta(seconds=TIMEOUT))  # type: ignore[union-attr]
        dist.barrier()
        report = survivor.play()
        del survivor
        return report

    _answer(connection, play)
    # wait until all ranks have reported, because they may still need this rank
    if connection.poll(DEADLINE) and connection.recv_bytes():
        _answer(connection, lambda: _leave(inherited))


def _leave(inherited: dict[str, int]) -> dict[str, int]:
    """Destroy the groups. Return the resources of other ranks that this process still has."""
    dist.destroy_process_group()
    end = time.monotonic() + 5
    # Threads that report the end of operations keep their group until they finish.
    while (
        (left := {what: count - inherited[what] for what, count in _left().items()})
        and (left["of the dead"] or left["mappings"] > 1 + left["pidfds"])
        and time.monotonic() < end
    ):
        gc.collect()
        # Memory of destroyed groups is released when the next allocation needs it.
        host = segment.this_process().host
        host.free_control_block(host.allocate_control_block(1))
    return left


def _left() -> dict[str, int]:
    links: dict[int, str] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread may close its descriptor meanwhile
            links[int(entry.name)] = os.readlink(entry)
    pidfds = [fd for fd, link in links.items() if "pidfd" in link]
    watch = select.poll()
    for fd in pidfds:
        watch.register(fd, select.POLLIN)
    return {
        "pidfds": len(pidfds),
        "of the dead": sum(bool(event & select.POLLIN) for _, event in watch.poll(0)),
        "memfds": sum("memfd:monarch" in link for link in links.values()),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:monarch"),
    }


# Control of runs ------------------------------------------------------------------------------------------------------


class Run:
    """The processes of a scenario and their results."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.wrong, self.delays = scenario, [], []  # type: ignore[var-annotated]
        self.reports: dict[int, Report] = {}
        self._stack = contextlib.ExitStack()
        address = self._stack.enter_context(store_file())
        clocks = self.clocks = Clocks(scenario.program.size)
        self.pids: list[int] = []
        self.pipes: list[Connection] = []
        for rank in range(scenario.program.size):
            pid, pipe = _spawn(lambda pipe, rank=rank: _live(scenario, rank, address, clocks, pipe))
            self.pids.append(pid)
            self.pipes.append(pipe)
        self.deadline = time.monotonic() + DEADLINE
        self.survivors = [rank for rank in range(scenario.program.size) if rank not in scenario.ranks]
        self.waiting = set(self.survivors)
        self.left: dict[int, dict[str, int]] = {}
        self.phase = "play"

    def told(self, rank: int) -> None:
        """Handle an answer of a rank, or its end."""
        self.waiting.discard(rank)
        try:
            good, answer = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            good, answer = False, "died without an answer"
        if not good:
            self.wrong.append(f"rank {rank}, {self.phase}: {answer}")
        elif self.phase == "leave":
            self.left[rank] = answer
        else:
            self.reports[rank] = answer
        if not self.waiting:
            self.go_on()

    def go_on(self) -> None:
        """Start the next phase after all ranks have answered."""
        if self.phase == "play" and self.scenario.how == "stop" and self.scenario.wakes:
            self.phase, self.waiting = "wake", set(self.scenario.ranks)
            for rank in self.scenario.ranks:
                os.kill(self.pids[rank], signal.SIGCONT)
        elif self.phase in ("play", "wake") and not self.wrong:
            self.phase, self.waiting = "leave", set(self.reports)
            for rank in self.reports:
                self.pipes[rank].send_bytes(b"leave")
        else:
            self.phase = "done"

    def hang(self) -> None:
        """Handle the deadline: ranks without an answer print their stacks to stderr."""
        self.wrong.append(f"{self.phase}: no answer of ranks {sorted(self.waiting)} within {DEADLINE:.0f} s")
        for rank in self.waiting - self.scenario.ranks:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(1.0)
        self.phase = "done"

    def end(self) -> None:
        """Kill all processes, free their resources, then check the reports."""
        times = {rank: self.clocks.of(rank) for rank in self.scenario.ranks}
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid, pipe in zip(self.pids, self.pipes, strict=True):
            os.waitpid(pid, 0)
            pipe.close()
        self.clocks.close()
        self._stack.close()
        for rank, report in self.reports.items():
            for text in dict.fromkeys(self.judge(rank, report, times)):
                self.wrong.append(f"rank {rank}: {text}")
        timed_out = [text for report in self.reports.values() for _, _, _, text in report.errors]
        if self.scenario.how == "stop" and not any(
            re.search(r"did not enter \w+|does not go on with \w+", text) for text in timed_out
        ):
            self.wrong.append(f"nobody names the collective: {timed_out[:1]}")
        for rank, left in self.left.items():
            living = (self.scenario.program.size if self.scenario.how == "stop" else len(self.reports)) - 1
            if left["memfds"] > 1 or left["pidfds"] > living or left["mappings"] > 1 + living:
                self.wrong.append(f"rank {rank}: {left} are left, of {living} living peers")

    def judge(self, rank: int, report: Report, times: dict[int, float]) -> Iterator[str]:
        """Yield the errors in a report."""
        yield from report.wrong
        if not report.errors:
            yield "no error"
        woken = rank in self.scenario.ranks
        for at, group, culprit, text in report.errors:
            blamed = re.search(r"rank (\d+) \(host [^)]*, pid (\d+)\)", text)
            if woken:
                continue  # a resumed rank may find that it was late, or that other ranks were
            if blamed is None:
                yield f"names nobody: {text}"
                continue
            ranks = self.scenario.program.groups[group]
            named = ranks[int(blamed[1])]
            if named not in times or int(blamed[2]) != self.pids[named]:
                yield f"blames rank {named}, pid {blamed[2]}: {text}"
            elif self.scenario.how != "stop" and (
                culprit not in (None, named) or DEATHS[self.scenario.how] not in text
            ):
                yield f"culprit {culprit}: {text}"
            elif not 0 <= at - times[named] <= SOME_TIME + (STEPS * TIMEOUT if self.scenario.how == "stop" else 0):
                yield f"{at - times[named]:.3f} s after the death: {text}"
        if report.errors and not woken and not self.wrong:
            at, group, _, text = report.errors[0]
            blamed = re.search(r"rank (\d+) \(host", text)
            if blamed is not None:
                self.delays.append(at - times.get(self.scenario.program.groups[group][int(blamed[1])], at))


def _play(scenarios: list[Scenario]) -> list[Run]:
    """Run all scenarios, several at once, in one controlling process."""
    random_programs.prepare()
    to_do, active, done = list(reversed(scenarios)), [], []  # type: ignore[var-annotated]
    try:
        while to_do or active:
            while to_do and len(active) < AT_ONCE:
                active.append(Run(to_do.pop()))
            pipes: dict[Any, tuple[Run, int]] = {run.pipes[rank]: (run, rank) for run in active for rank in run.waiting}
            for pipe in wait(list(pipes), 1.0):
                run, rank = pipes[pipe]
                run.told(rank)
            for run in active:
                if run.phase != "done" and time.monotonic() > run.deadline:
                    run.hang()
            for run in [run for run in active if run.phase == "done"]:
                active.remove(run)
                run.end()
                done.append(run)
    finally:
        for run in active:
            run.end()
    return done


def test_survivors_name_the_dead_rank() -> None:
    first = int(SEED or random.SystemRandom().randrange(1_000_000))
    scenarios = [_draw_scenario(first + i) for i in range(RUNS)] if not SEED else [_draw_scenario(first)] * 10
    start = time.monotonic()
    runs = _play(scenarios)
    kinds = {how: sum(run.scenario.how == how for run in runs) for how in ("kill", "exit", "stop")}
    print(f"{len(runs)} runs from seed {first} in {time.monotonic() - start:.0f} s: {kinds}")
    for title, hows in (("from a death", ("kill", "exit")), ("from a stop", ("stop",))):
        delays = sorted(delay for run in runs if run.scenario.how in hows for delay in run.delays)
        if delays:
            median, worst = statistics.median(delays), delays[-1]
            late = delays[int(len(delays) * 0.99)]
            print(
                f"{title} to an error: median {median * 1e3:.1f} ms, 99 % {late * 1e3:.1f} ms, max {worst * 1e3:.1f} ms"
            )
            assert "kill" not in hows or median <= SOON
    failed = [f"{run.scenario}\n  " + "\n  ".join(run.wrong) for run in runs if run.wrong]
    assert not failed, f"{len(failed)} of {len(runs)} runs failed:\n" + "\n".join(failed[:12])
