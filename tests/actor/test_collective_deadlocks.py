"""Cycles through a collective: a call to an actor in it raises DeadlockError if the caller has not entered it."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend._actor import collective_waits
from monarch_backend._actor.current_runtime import program
from monarch_backend._telemetry import late_ranks
from monarch_backend.actor import Actor, ActorError, ActorMesh, DeadlockError, ProcMesh, endpoint, this_proc
from tests.actor.actors import running
from tests.actor.support import PATIENCE
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("faults")

LONGER_THAN_A_PROBE_S = 0.6


class Trainer(Actor):
    """Rank of a process group."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @endpoint
    def join(self) -> None:
        """Return once all ranks have a trainer and a group."""
        dist.barrier()

    @endpoint
    def reduce(self, asynchronous: bool = False) -> float:
        x = torch.ones(4)
        if asynchronous:
            work = dist.all_reduce(x, async_op=True)
            time.sleep(2 * LONGER_THAN_A_PROBE_S)
            work.wait()
        else:
            dist.all_reduce(x)
        return float(x[0])

    @endpoint
    def value(self) -> float:
        return 0.5

    @endpoint
    def ask_then_reduce(self, route: list[ActorMesh], method: str, catches: bool = True) -> float:
        """Call the first actor of a route, which calls the next one, and enter a collective after that."""
        try:
            answer = getattr(route[0], method).call_one(*([route[1:]] if route[1:] else [])).get()
        except DeadlockError as error:
            self.seen.append(str(error))
            if not catches:
                raise
            answer = -1.0
        x = torch.ones(4)
        dist.all_reduce(x)
        return float(answer + x[0])

    @endpoint
    def ask_with_limit_then_reduce(self, target: ActorMesh) -> float:
        try:
            target.value.call_one().get(LONGER_THAN_A_PROBE_S)
        except TimeoutError:
            self.seen.append("TimeoutError")
        x = torch.ones(4)
        dist.all_reduce(x)
        return float(x[0])

    @endpoint
    def ask_while_a_thread_reduces(self, target: ActorMesh) -> float:
        """Another thread of this rank enters the collective later."""

        def reduce() -> None:
            time.sleep(LONGER_THAN_A_PROBE_S)
            dist.all_reduce(torch.ones(4))

        thread = threading.Thread(target=reduce)
        thread.start()
        try:
            return float(target.value.call_one().get())
        finally:
            thread.join()

    @endpoint
    def ask(self, target: ActorMesh) -> float:
        return float(target.value.call_one().get())

    @endpoint
    def sleep_then_reduce(self) -> float:
        time.sleep(LONGER_THAN_A_PROBE_S)
        x = torch.ones(4)
        dist.all_reduce(x)
        return float(x[0])

    @endpoint
    def reduce_then_sleep(self) -> float:
        x = torch.ones(4)
        dist.all_reduce(x)
        time.sleep(3 * LONGER_THAN_A_PROBE_S)
        return float(x[0])

    @endpoint
    def delay_looks(self, seconds: float) -> None:
        """Let each look at the lateness of this rank end later."""
        is_late = late_ranks.is_late

        def delayed(*args: Any) -> bool:
            found = is_late(*args)
            time.sleep(seconds)
            return found

        collective_waits.late_ranks = SimpleNamespace(is_late=delayed, entered_in=late_ranks.entered_in)  # type: ignore[assignment]

    @endpoint
    def sleep_reduce_ask(self, target: ActorMesh) -> str:
        """Enter the collective after the look has begun, and wait for an actor before it ends."""
        time.sleep(LONGER_THAN_A_PROBE_S)
        dist.all_reduce(torch.ones(4))
        try:
            target.nothing.call_one().get()
        except DeadlockError:
            return "DeadlockError"
        return "reply"

    @endpoint
    def taken(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen


class AsyncTrainer(Trainer):
    """The same with an event loop."""

    @endpoint
    async def join(self) -> None:
        dist.barrier()

    @endpoint
    async def reduce(self, asynchronous: bool = False) -> float:
        x = torch.ones(4)
        dist.all_reduce(x)
        return float(x[0])

    @endpoint
    async def value(self) -> float:
        return 0.5

    @endpoint
    async def ask_then_reduce(self, route: list[ActorMesh], method: str, catches: bool = True) -> float:
        try:
            await getattr(route[0], method).call_one(*([route[1:]] if route[1:] else []))
        except DeadlockError as error:
            self.seen.append(str(error))
        x = torch.ones(4)
        dist.all_reduce(x)
        return float(x[0]) - 1.0

    @endpoint
    async def taken(self) -> list[str]:
        seen, self.seen = self.seen, []
        return seen

    ask_with_limit_then_reduce = ask_while_a_thread_reduces = ask = sleep_then_reduce = None  # type: ignore[assignment]
    reduce_then_sleep = delay_looks = sleep_reduce_ask = None  # type: ignore[assignment]


class Between(Actor):
    """Passes a call on, in a process without a group."""

    @endpoint
    def value(self, route: list[ActorMesh]) -> float:
        return float(route[0].value.call_one(*([route[1:]] if route[1:] else [])).get())

    @endpoint
    def ask_for_reduce(self, target: ActorMesh) -> float:
        return float(target.reduce_then_sleep.call_one().get())

    @endpoint
    def nothing(self) -> None:
        pass


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as made:
        made.process_group(timeout=4 * PATIENCE).get(PATIENCE)
        yield made


@pytest.fixture(params=[Trainer, AsyncTrainer])
def any_trainers(procs: ProcMesh, request: pytest.FixtureRequest) -> Iterator[list[ActorMesh]]:
    yield from _trainers(procs, request.param)


@pytest.fixture
def trainers(procs: ProcMesh) -> Iterator[list[ActorMesh]]:
    yield from _trainers(procs, Trainer)


def _trainers(procs: ProcMesh, cls: type[Trainer]) -> Iterator[list[ActorMesh]]:
    mesh = procs.spawn("trainer", cls)
    mesh.join.call().get(PATIENCE)
    yield [mesh.slice(gpus=rank) for rank in range(3)]
    mesh.stop().get(PATIENCE)
    detector = program().deadlocks
    wait_until(lambda: not detector._waits and not detector._claimed, PATIENCE)


def _check(text: str, waiter: str, late: str) -> None:
    """Check that an error names the actor that waits for a reply, and the one in the collective."""
    lines = text.splitlines()
    assert any(line.startswith(f"  trainer.{waiter}") for line in lines), text
    assert any(re.search(rf" waits for all_reduce #.*, which .*{late} ha\w+ not entered", line) for line in lines), text


def test_call_to_a_rank_in_a_collective_raises_and_the_collective_goes_on(any_trainers: list[ActorMesh]) -> None:
    waiting = [any_trainers[rank].reduce.call_one() for rank in (0, 2)]
    start = time.monotonic()
    late = any_trainers[1].ask_then_reduce.call_one([any_trainers[0]], "value")
    assert late.get(PATIENCE) == 2.0
    print(f"{time.monotonic() - start:.3f} s")
    assert [each.get(PATIENCE) for each in waiting] == [3.0, 3.0]
    [text] = any_trainers[1].taken.call_one().get(PATIENCE)
    assert "cycle of 2 actors" in text
    _check(text, "ask_then_reduce (rank 1", "rank 1")
    assert any_trainers[0].value.call_one().get(PATIENCE) == 0.5


def test_call_of_a_method_that_enters_the_collective_raises(any_trainers: list[ActorMesh]) -> None:
    """The call itself runs, and cannot return before its caller enters the collective."""
    waiting = any_trainers[2].reduce.call_one()
    assert any_trainers[1].ask_then_reduce.call_one([any_trainers[0]], "reduce").get(PATIENCE) == 2.0
    assert waiting.get(PATIENCE) == 3.0
    [text] = any_trainers[1].taken.call_one().get(PATIENCE)
    _check(text, "reduce (rank 0", "rank 1")


def test_cycle_of_three_raises_in_both_callers(trainers: list[ActorMesh]) -> None:
    between = this_proc().spawn("between", Between)
    waiting = [trainers[rank].reduce.call_one() for rank in (0, 2)]
    assert trainers[1].ask_then_reduce.call_one([between, trainers[0]], "value").get(PATIENCE) == 2.0
    assert [each.get(PATIENCE) for each in waiting] == [3.0, 3.0]
    [text] = trainers[1].taken.call_one().get(PATIENCE)
    assert "cycle of 3 actors" in text and "between.value" in text
    between.stop().get(PATIENCE)


def test_two_late_ranks_that_call_the_waiting_one_raise(trainers: list[ActorMesh]) -> None:
    waiting = trainers[0].reduce.call_one()
    late = [trainers[rank].ask_then_reduce.call_one([trainers[0]], "value") for rank in (1, 2)]
    assert [each.get(PATIENCE) for each in late] == [2.0, 2.0]
    assert waiting.get(PATIENCE) == 3.0
    for rank in (1, 2):
        [text] = trainers[rank].taken.call_one().get(PATIENCE)
        _check(text, f"ask_then_reduce (rank {rank}", rf".*rank {rank}.*")


def test_unhandled_error_reaches_the_caller_at_once(trainers: list[ActorMesh]) -> None:
    waiting = [trainers[rank].reduce.call_one() for rank in (0, 2)]
    error = trainers[1].ask_then_reduce.call_one([trainers[0]], "value", False).exception(PATIENCE)
    assert isinstance(error, ActorError) and isinstance(error.__cause__, DeadlockError)
    trainers[1].reduce.call_one().get(PATIENCE)  # the waiting ranks were not interrupted
    assert [each.get(PATIENCE) for each in waiting] == [3.0, 3.0]


def _limit_of_time(trainers: list[ActorMesh], _: ProcMesh) -> Any:
    return trainers[1].ask_with_limit_then_reduce.call_one(trainers[0])


def _another_thread(trainers: list[ActorMesh], _: ProcMesh) -> Any:
    return trainers[1].ask_while_a_thread_reduces.call_one(trainers[0])


def _busy_rank(trainers: list[ActorMesh], _: ProcMesh) -> Any:
    """The late rank does not wait for anything, but another actor waits for the rank in the collective."""
    call = trainers[1].sleep_then_reduce.call_one()
    trainers[0].value.call_one().get(PATIENCE)
    return call


def _another_actor(trainers: list[ActorMesh], procs: ProcMesh) -> Any:
    """Another actor of the late rank's process enters the collective."""
    other = procs.slice(gpus=1).spawn("other", Trainer)
    other.value.call_one().get(PATIENCE)
    call = trainers[1].ask.call_one(trainers[0])
    with pytest.raises(TimeoutError):
        call.get(LONGER_THAN_A_PROBE_S)
    other.reduce.call_one().get(PATIENCE)
    other.stop().get(PATIENCE)
    return call


@pytest.mark.parametrize("scenario", [_limit_of_time, _another_thread, _busy_rank, _another_actor])
def test_waits_that_end_raise_no_deadlock_error(scenario: Any, trainers: list[ActorMesh], procs: ProcMesh) -> None:
    waiting = [trainers[rank].reduce.call_one() for rank in (0, 2)]
    scenario(trainers, procs).get(PATIENCE)
    assert [each.get(PATIENCE) for each in waiting] == [3.0, 3.0]
    assert not any("cycle of" in text for text in trainers[1].taken.call_one().get(PATIENCE))


def test_collective_under_way_while_the_rank_computes_is_no_wait(trainers: list[ActorMesh]) -> None:
    """The rank has begun a collective and sleeps. Only its wait after that closes the cycle."""
    waiting, start = [trainers[0].reduce.call_one(True), trainers[2].reduce.call_one()], time.monotonic()
    assert trainers[1].ask_then_reduce.call_one([trainers[0]], "value").get(PATIENCE) == 2.0
    assert time.monotonic() - start > 2 * LONGER_THAN_A_PROBE_S
    assert [each.get(PATIENCE) for each in waiting] == [3.0, 3.0]


def test_rank_that_enters_the_collective_during_the_look_is_not_late(
    procs: ProcMesh, trainers: list[ActorMesh]
) -> None:
    between = this_proc().spawn("between", Between)
    trainers[1].delay_looks.call_one(2 * LONGER_THAN_A_PROBE_S).get(PATIENCE)
    others = [trainers[2].reduce.call_one(), trainers[1].sleep_reduce_ask.call_one(between)]
    asked = between.ask_for_reduce.call_one(trainers[0])
    assert [each.get(PATIENCE) for each in others] == [3.0, "reply"]
    assert asked.get(PATIENCE) == 3.0
    trainers[1].delay_looks.call_one(0.0).get(PATIENCE)
    between.stop().get(PATIENCE)


def test_cycle_raises_in_ranks_that_have_not_met_and_a_group_made_after_its_actors() -> None:
    with running({"gpus": 2}) as fresh:
        mesh = fresh.spawn("trainer", Trainer)
        mesh.value.call().get(PATIENCE)
        fresh.process_group(timeout=4 * PATIENCE).get(PATIENCE)
        between, ranks = this_proc().spawn("between", Between), [mesh.slice(gpus=rank) for rank in range(2)]
        waiting = ranks[0].reduce.call_one()
        assert ranks[1].ask_then_reduce.call_one([between, ranks[0]], "value").get(PATIENCE) == 1.0
        assert waiting.get(PATIENCE) == 2.0
        [text] = ranks[1].taken.call_one().get(PATIENCE)
        assert "cycle of 3 actors" in text
        between.stop().get(PATIENCE)
