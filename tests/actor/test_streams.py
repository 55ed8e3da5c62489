"""Generator endpoints: order, back-pressure, errors in the middle, and readers that stop early."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from monarch_backend._actor.calls.pending_calls import STREAM_WINDOW
from monarch_backend.actor import (
    Accumulator,
    Actor,
    ActorError,
    ActorMesh,
    CancelledError,
    Channel,
    Port,
    ProcMesh,
    SerializationError,
    Stream,
    ValueMesh,
    concurrent_endpoint,
    current_rank,
    endpoint,
)
from tests.actor.actors import Gate, Sync, running, until
from tests.actor.support import PATIENCE

pytestmark = pytest.mark.usefixtures("faults")


class Source(Actor):
    """Actor with generators that count their values and record how they end."""

    def __init__(self) -> None:
        self.made = 0
        self.ends: list[str] = []

    @endpoint
    def count(self, n: int, begun: Port[Any] | None = None) -> Iterator[int]:
        """Yield 0 to n - 1. Record how the generator ends."""
        try:
            for i in range(n):
                self.made += 1
                if begun is not None and i == 0:
                    begun.send(current_rank().rank)
                yield i
            self.ends.append("to the end")
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        finally:
            self.ends.append("finally")

    @endpoint
    def fail_after(self, n: int) -> Iterator[int]:
        yield from range(n)
        raise ValueError(f"after {n}")

    @endpoint
    def unserializable_after(self, n: int) -> Iterator[Any]:
        yield from range(n)
        yield threading.Lock()

    @endpoint
    def give(self, values: list[Any]) -> Iterator[Any]:
        yield from values

    @endpoint
    def same_array(self, n: int) -> Iterator[Any]:
        """Yield one array repeatedly, changed after each value, as training loops do."""
        array = np.zeros(5000)
        for _ in range(n):
            yield array
            array += 1

    @endpoint
    def not_started(self, begun: Port[Any]) -> Iterator[int]:
        begun.send("begun")
        return
        yield 1

    @endpoint
    def count_here(self) -> int:
        return self.made

    @endpoint
    def take_ends(self) -> list[str]:
        ends, self.ends = self.ends, []
        return ends


class AsyncSource(Actor):
    """Some endpoints of `Source` as ``async`` generators."""

    def __init__(self) -> None:
        self.made = 0
        self.ends: list[str] = []

    @endpoint
    async def count(self, n: int, begun: Port[Any] | None = None) -> AsyncIterator[int]:
        try:
            for i in range(n):
                self.made += 1
                if begun is not None and i == 0:
                    begun.send(current_rank().rank)
                yield i
            self.ends.append("to the end")
        except BaseException as error:
            self.ends.append(type(error).__name__)
            raise
        finally:
            self.ends.append("finally")

    @endpoint
    async def fail_after(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            yield i
        raise ValueError(f"after {n}")

    @endpoint
    async def unserializable_after(self, n: int) -> AsyncIterator[Any]:
        for i in range(n):
            yield i
        yield threading.Lock()

    @endpoint
    async def give(self, values: list[Any]) -> AsyncIterator[Any]:
        for value in values:
            yield value

    @endpoint
    async def same_array(self, n: int) -> AsyncIterator[Any]:
        array = np.zeros(5000)
        for _ in range(n):
            yield array
            array += 1

    @endpoint
    async def not_started(self, begun: Port[Any]) -> AsyncIterator[int]:
        begun.send("begun")
        return
        yield 1

    @endpoint
    async def count_here(self) -> int:
        return self.made

    @endpoint
    async def take_ends(self) -> list[str]:
        ends, self.ends = self.ends, []
        return ends


class Watched(Actor):
    """Actor with a concurrent generator, so that other calls can read its count."""

    def __init__(self) -> None:
        self.made = 0

    @concurrent_endpoint
    async def count(self, n: int) -> AsyncIterator[int]:
        for i in range(n):
            self.made += 1
            yield i

    @endpoint
    async def count_here(self) -> int:
        return self.made


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    with running({"gpus": 3}) as mesh:
        yield mesh


@pytest.fixture(params=[Source, AsyncSource])
def source(procs: ProcMesh, request: pytest.FixtureRequest) -> Iterator[ActorMesh]:
    mesh = procs.spawn("source", request.param)
    yield mesh
    mesh.stop().get(PATIENCE)


@pytest.fixture
def one(source: ActorMesh) -> ActorMesh:
    return source.slice(gpus=1)


def ends(one: ActorMesh) -> list[str]:
    found: list[str] = one.take_ends.call_one().get(PATIENCE)
    return found


# ---- all values, in order


@pytest.mark.parametrize("n", [0, 1, STREAM_WINDOW - 1, STREAM_WINDOW, STREAM_WINDOW + 1, 10 * STREAM_WINDOW + 7])
def test_stream_has_all_values_in_order(one: ActorMesh, n: int) -> None:
    stream = one.count.call_one(n)
    assert isinstance(stream, Stream)
    assert list(stream) == list(range(n))
    assert list(stream) == []  # the stream stays ended
    assert ends(one) == ["to the end", "finally"]


def test_stream_has_values_of_all_ranks(source: ActorMesh) -> None:
    n = 3 * STREAM_WINDOW
    values = [future.get(PATIENCE) for future in source.count.stream(n)]
    assert sorted(values) == sorted(3 * list(range(n)))


def test_call_gives_lists_by_rank(source: ActorMesh) -> None:
    n = 3 * STREAM_WINDOW
    lists = source.count.call(n).get(PATIENCE)
    assert isinstance(lists, ValueMesh)
    assert lists.extent == source.extent
    assert list(lists.values()) == [list(range(n))] * 3
    assert list(source.count.call(0).get(PATIENCE).values()) == [[]] * 3


def test_call_does_not_block_generators(source: ActorMesh) -> None:
    n = 5 * STREAM_WINDOW
    collected = source.count.call(n)
    until(lambda: collected.done(), "all has come without anybody asking")
    assert list(collected.get(0).values()) == [list(range(n))] * 3


def test_accumulate_over_generators(source: ActorMesh) -> None:
    assert Accumulator(source.count, 0, lambda done, more: done + sum(more)).accumulate(5).get(PATIENCE) == 30


def test_broadcast_runs_the_generator_to_its_end(one: ActorMesh) -> None:
    one.count.broadcast(5 * STREAM_WINDOW)
    assert ends(one) == ["to the end", "finally"]


def test_values_of_every_size_are_streamed(one: ActorMesh) -> None:
    values = [None, b"x" * 10, torch.arange(100_000), np.arange(9.0), b"y" * 200_000, {"deep": [torch.ones(3000)]}]
    found = list(one.give.call_one(values))
    assert found[:2] == values[:2]
    assert torch.equal(found[2], values[2])
    assert (found[3] == values[3]).all()
    assert found[4] == values[4]
    assert torch.equal(found[5]["deep"][0], torch.ones(3000))


def test_value_is_a_snapshot_at_yield(one: ActorMesh) -> None:
    arrays = list(one.same_array.call_one(10))
    assert [array[0] for array in arrays] == list(range(10))
    assert [array[-1] for array in arrays] == list(range(10))


def test_two_streams_of_one_actor_run_in_sequence(one: ActorMesh) -> None:
    first, second = one.count.call_one(10), one.count.call_one(20)
    # the first stream fits into its window, so its generator ends without a reader
    assert list(second) == list(range(20))
    assert list(first) == list(range(10))


def test_generator_without_values_gives_an_empty_stream(one: ActorMesh) -> None:
    port, receiver = Channel.open()
    assert list(one.not_started.call_one(port)) == []
    assert receiver.recv().get(PATIENCE) == "begun"
    receiver.close()


def test_stream_of_a_plain_endpoint_has_its_replies(procs: ProcMesh) -> None:
    mesh = procs.spawn("plain", Sync)
    assert sorted(future.get(PATIENCE) for future in mesh.square.stream(2)) == [(0, 4), (1, 4), (2, 4)]
    mesh.stop().get(PATIENCE)


def test_last_value_is_available_before_the_stream_ends(procs: ProcMesh) -> None:
    """A rank that is closed before its last value is put would look like the end of the stream to a reader."""
    mesh = procs.spawn("gate", Gate)
    stream: Any = mesh.wait.stream()
    steps: list[str] = []
    put = stream._put

    class Open(set[int]):
        def discard(self, rank: int) -> None:
            steps.append("closed")
            super().discard(rank)

    stream._put = lambda *args: (steps.append("put"), put(*args))
    stream._open = Open(stream._open)
    mesh.let_pass.call().get(PATIENCE)
    assert sorted(future.get(PATIENCE) for future in stream) == [0, 1, 2]
    assert steps == ["put", "closed"] * 3
    mesh.stop().get(PATIENCE)


# ---- back-pressure


def test_async_generator_is_at_most_one_window_ahead(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=0).spawn("watched", Watched)
    stream = mesh.count.call_one(100 * STREAM_WINDOW)

    def made() -> int:
        return int(mesh.count_here.call_one().get(PATIENCE))

    until(lambda: made() == STREAM_WINDOW + 1, "it has filled the window, and holds the next value")
    assert next(stream) == 0
    for taken in range(1, 5 * STREAM_WINDOW):
        assert next(stream) == taken
        if taken % 16 == 0:
            assert made() <= taken + 1 + STREAM_WINDOW + 1
    stream.close()
    mesh.stop().get(PATIENCE)


def test_plain_generator_is_at_most_one_window_ahead(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=0).spawn("source", Source)
    stream = mesh.count.call_one(10 * STREAM_WINDOW)
    waiting = mesh.count_here.call_one()
    for taken in range(10 * STREAM_WINDOW - STREAM_WINDOW - 1):
        assert next(stream) == taken
        assert not waiting.done()  # the generator has not ended
    assert list(stream) == list(range(10 * STREAM_WINDOW - STREAM_WINDOW - 1, 10 * STREAM_WINDOW))
    assert waiting.get(PATIENCE) == 10 * STREAM_WINDOW
    mesh.stop().get(PATIENCE)


def test_unread_rank_does_not_block_others(source: ActorMesh) -> None:
    unread = source.slice(gpus=0).count.call_one(10 * STREAM_WINDOW)
    assert list(source.slice(gpus=1).count.call_one(10 * STREAM_WINDOW)) == list(range(10 * STREAM_WINDOW))
    unread.close()


# ---- errors


@pytest.mark.parametrize("n", [0, 1, 3 * STREAM_WINDOW])
def test_error_comes_after_earlier_values(one: ActorMesh, n: int) -> None:
    stream = one.fail_after.call_one(n)
    assert [next(stream) for _ in range(n)] == list(range(n))
    with pytest.raises(ActorError, match=f"ValueError: after {n}") as caught:
        next(stream)
    assert isinstance(caught.value.__cause__, ValueError)
    assert list(stream) == []
    assert list(one.count.call_one(2)) == [0, 1]  # the actor still works


def test_error_of_one_rank_is_raised_in_the_stream(source: ActorMesh) -> None:
    values, errors = [], []
    for future in source.fail_after.stream(2):
        error = future.exception(PATIENCE)
        (errors if error else values).append(error or future.get())
    assert sorted(values) == [0, 0, 0, 1, 1, 1]
    assert sorted(error.rank for error in errors) == [0, 1, 2]


def test_error_of_one_rank_fails_the_call_and_closes_the_others(source: ActorMesh) -> None:
    with pytest.raises(ActorError, match="after 3"):
        source.fail_after.call(3).get(PATIENCE)
    assert list(source.count.call(1).get(PATIENCE).values()) == [[0]] * 3


def test_unpicklable_value_is_an_error_of_the_stream(one: ActorMesh) -> None:
    stream = one.unserializable_after.call_one(2)
    assert (next(stream), next(stream)) == (0, 1)
    with pytest.raises(ActorError, match="can't serialize") as caught:
        next(stream)
    assert isinstance(caught.value.__cause__, SerializationError)
    assert list(one.count.call_one(2)) == [0, 1]


def test_wrong_arguments_raise_at_once(one: ActorMesh) -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'n'"):
        one.count.call_one()


# ---- readers that stop early


def begin(one: ActorMesh, n: int = 10**9) -> Stream[int]:
    """Return a stream whose generator has begun."""
    port, receiver = Channel.open()
    stream: Stream[int] = one.count.call_one(n, port)
    receiver.recv().get(PATIENCE)
    receiver.close()
    return stream


def closed(found: list[str]) -> bool:
    """Return whether the generator was ended from outside and ran its ``finally``."""
    return found in (["GeneratorExit", "finally"], ["CancelledError", "finally"])


def test_close_ends_the_generator(one: ActorMesh) -> None:
    stream = begin(one)
    assert next(stream) == 0
    stream.close()
    assert list(stream) == []
    assert closed(ends(one))
    stream.close()
    assert list(one.count.call_one(2)) == [0, 1]


def test_leaving_a_with_block_closes_the_stream(one: ActorMesh) -> None:
    with begin(one) as stream:
        for value in stream:
            if value == 100:
                break
    assert closed(ends(one))


def test_error_in_a_with_block_closes_the_stream(one: ActorMesh) -> None:
    def read() -> None:
        with begin(one) as stream:
            for value in stream:
                assert 1 / (5 - value)

    with pytest.raises(ZeroDivisionError):
        read()
    assert closed(ends(one))


def test_an_abandoned_stream_is_closed(one: ActorMesh) -> None:
    stream = begin(one)
    assert next(stream) == 0
    del stream
    gc.collect()
    assert closed(ends(one))  # otherwise the actor would wait forever for its reader


def test_leaving_a_for_loop_closes_the_stream(one: ActorMesh) -> None:
    for value in begin(one):
        if value == 3:
            break
    gc.collect()
    assert closed(ends(one))


def test_an_abandoned_stream_of_all_ranks_is_closed(source: ActorMesh) -> None:
    port, receiver = Channel.open()
    stream = source.count.stream(10**9, port)
    for _ in range(3):
        receiver.recv().get(PATIENCE)
    del stream
    gc.collect()
    for found in source.take_ends.call().get(PATIENCE).values():
        assert closed(found)
    receiver.close()


def test_cancel_of_a_call_closes_the_generators(source: ActorMesh) -> None:
    port, receiver = Channel.open()
    future = source.count.call(10**9, port)
    for _ in range(3):
        receiver.recv().get(PATIENCE)
    assert future.cancel()
    assert isinstance(future.exception(), CancelledError)
    for found in source.take_ends.call().get(PATIENCE).values():
        assert closed(found)
    receiver.close()


def test_close_before_the_start_works(one: ActorMesh) -> None:
    first = begin(one)
    waiting = one.count.call_one(10)
    waiting.close()
    first.close()
    assert list(waiting) == []
    assert closed(ends(one))


def test_messages_during_close_are_all_handled(one: ActorMesh) -> None:
    for _ in range(20):
        stream = begin(one)
        waiting = [one.count_here.call_one() for _ in range(5)]
        stream.close()
        waiting += [one.count_here.call_one() for _ in range(5)]
        assert len({future.get(PATIENCE) for future in waiting}) == 1
        assert closed(ends(one))


def test_close_wakes_a_waiting_thread(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=0).spawn("watched", Watched)
    stream = mesh.count.call_one(STREAM_WINDOW // 2)
    assert [next(stream) for _ in range(STREAM_WINDOW // 2)] == list(range(STREAM_WINDOW // 2))
    assert list(stream) == []
    slow = procs.slice(gpus=1).spawn("slow", Slow)
    silent = slow.one_and_no_more.call_one()
    assert next(silent) == 1
    found: list[Any] = []
    reader = threading.Thread(target=lambda: found.append(list(silent)))
    reader.start()
    silent.close()
    reader.join(PATIENCE)
    assert found == [[]]
    mesh.stop().get(PATIENCE)
    slow.stop().get(PATIENCE)


class Slow(Actor):
    @endpoint
    async def one_and_no_more(self) -> AsyncIterator[int]:
        yield 1
        await asyncio.Event().wait()


@pytest.mark.parametrize("verb", ["call_one", "stream", "call"])
def test_timeout_ends_a_generator(procs: ProcMesh, verb: str) -> None:
    mesh = procs.slice(gpus=1).spawn("slow", Slow)
    result = getattr(mesh.one_and_no_more.options(timeout=0.1), verb)()

    def read() -> None:
        if verb == "call":
            result.get(PATIENCE)
        else:
            for item in result:
                assert (item.get(PATIENCE) if verb == "stream" else item) == 1

    with pytest.raises(TimeoutError, match=r"slow\.one_and_no_more took longer than 0.1 s"):
        read()
    mesh.stop().get(PATIENCE)


# ---- asyncio


def test_async_for_reads_a_stream(one: ActorMesh) -> None:
    async def main() -> None:
        n = 3 * STREAM_WINDOW
        assert [value async for value in one.count.call_one(n)] == list(range(n))
        with pytest.raises(ActorError, match="after 2"):
            [value async for value in one.fail_after.call_one(2)]
        assert [value async for value in one.count.call_one(0)] == []

    asyncio.run(main())


def test_async_for_reads_all_ranks(source: ActorMesh) -> None:
    async def main() -> list[int]:
        return [await future async for future in source.count.stream(100)]

    assert sorted(asyncio.run(main())) == sorted(3 * list(range(100)))


def test_many_streams_are_read_in_one_loop(source: ActorMesh) -> None:
    async def total(one: ActorMesh) -> int:
        result = 0
        async for value in one.count.call_one(3 * STREAM_WINDOW):
            result += value
        return result

    async def main() -> list[int]:
        return list(await asyncio.gather(*[total(source.slice(gpus=i % 3)) for i in range(9)]))

    assert asyncio.run(main()) == [sum(range(3 * STREAM_WINDOW))] * 9


def test_cancelled_reader_task_leaves_the_stream_usable(procs: ProcMesh) -> None:
    mesh = procs.slice(gpus=1).spawn("slow", Slow)

    async def main() -> None:
        stream = mesh.one_and_no_more.call_one()
        assert await anext(stream) == 1
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        stream.close()
        assert [value async for value in stream] == []

    asyncio.run(main())
    mesh.stop().get(PATIENCE)


def test_leaving_an_async_for_loop_closes_the_stream(one: ActorMesh) -> None:
    async def main(stream: Stream[int]) -> None:
        async for value in stream:
            if value == 3:
                break

    asyncio.run(main(begin(one)))
    gc.collect()
    assert closed(ends(one))


# ---- between actors


class Reader(Actor):
    @endpoint
    def read(self, source: ActorMesh, n: int) -> int:
        return sum(source.count.call_one(n))

    @endpoint
    def pass_on(self, source: ActorMesh, n: int) -> Iterator[int]:
        for value in source.count.call_one(n):
            yield -value


class AsyncReader(Actor):
    @endpoint
    async def read(self, source: ActorMesh, n: int) -> int:
        return sum([value async for value in source.count.call_one(n)])

    @endpoint
    async def pass_on(self, source: ActorMesh, n: int) -> AsyncIterator[int]:
        async for value in source.count.call_one(n):
            yield -value


@pytest.mark.parametrize("cls", [Reader, AsyncReader])
def test_actors_stream_to_each_other(procs: ProcMesh, one: ActorMesh, cls: type[Actor]) -> None:
    n = 4 * STREAM_WINDOW
    for place in (0, 1):  # in another process, in the same process
        reader = procs.slice(gpus=place).spawn("reader", cls)
        assert reader.read.call_one(one, n).get(PATIENCE) == sum(range(n))
        assert list(reader.pass_on.call_one(one, n)) == [-i for i in range(n)]
        reader.stop().get(PATIENCE)


def test_close_propagates_along_nested_streams(procs: ProcMesh, one: ActorMesh) -> None:
    for cls in (Reader, AsyncReader):
        reader = procs.slice(gpus=0).spawn("reader", cls)
        stream = reader.pass_on.call_one(one, 10**9)
        assert next(stream) == 0
        stream.close()
        assert closed(ends(one)), cls  # the end of the reader's generator closes the stream that it reads
        reader.stop().get(PATIENCE)
