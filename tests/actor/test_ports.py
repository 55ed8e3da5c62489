"""Ports: which receiver gets which value, also when a future was not read. Between processes: test_message_order.py."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from typing import Any

import pytest

from monarch_backend.actor import ActorError, Channel, PortClosedError
from tests.actor.actors import until
from tests.actor.support import PATIENCE


def test_value_of_an_unread_future_goes_to_the_next() -> None:
    """The value arrives as the wait times out: the future is dropped with a value in it."""
    port, receiver = Channel.open()
    late = receiver.recv()
    with pytest.raises(TimeoutError):
        late.get(0.001)
    port.send("just then")
    assert late.done()
    del late
    assert receiver.recv().get(PATIENCE) == "just then"


@pytest.mark.parametrize("order", ["abc", "cba", "bca"])
def test_returned_values_keep_their_order(order: str) -> None:
    port, receiver = Channel.open()
    futures = {name: receiver.recv() for name in "abc"}
    for name in "abcd":
        port.send(name)
    for name in order:
        del futures[name]
    assert [receiver.recv().get(PATIENCE) for _ in range(4)] == list("abcd")


def test_value_that_was_read_does_not_return() -> None:
    port, receiver = Channel.open()
    for value in range(3):
        future = receiver.recv()
        port.send(value)
        assert future.result() == value
        del future
    failing = receiver.recv()
    port.exception(ValueError("the sender's"))
    assert isinstance(failing.exception(PATIENCE), ActorError)
    del failing
    gc.collect()
    waiting = receiver.recv()
    assert not waiting.done()
    port.send("the next")
    assert waiting.get(PATIENCE) == "the next"


def test_error_of_an_unread_future_goes_to_the_next() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    port.exception(ValueError("the sender's"))
    assert future.done()
    del future
    with pytest.raises(ActorError, match="the sender's"):
        receiver.recv().get(PATIENCE)


def test_waiting_receiver_gets_a_returned_value() -> None:
    port, receiver = Channel.open()
    first, second = receiver.recv(), receiver.recv()
    port.send("a value")
    assert first.done() and not second.done()
    del first
    assert second.get(PATIENCE) == "a value"


def test_cancelled_future_takes_no_value() -> None:
    port, receiver = Channel.open()
    future = receiver.recv()
    assert future.cancel()
    port.send("a value")
    assert receiver.recv().get(PATIENCE) == "a value"


def test_task_cancelled_at_arrival_loses_no_value() -> None:
    async def main() -> Any:
        port, receiver = Channel.open()

        async def take() -> Any:
            return await receiver.recv()

        task = asyncio.create_task(take())
        await asyncio.sleep(0)  # the task starts to wait
        port.send("just then")  # the loop would resume the task in its next iteration
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        return await asyncio.wait_for(receiver.recv(), PATIENCE)

    assert asyncio.run(main()) == "just then"


def test_value_at_the_timeout_of_wait_for_is_not_lost() -> None:
    async def main() -> list[Any]:
        port, receiver = Channel.open()
        loop = asyncio.get_running_loop()

        def both() -> None:
            """Let the value arrive and the timeout end in the same iteration of the loop."""
            port.send(1)
            port.send(2)
            time.sleep(0.1)

        loop.call_later(0.01, both)
        got = []
        while len(got) < 2:
            try:
                got.append(await asyncio.wait_for(receiver.recv(), 0.05 if not got else PATIENCE))
            except asyncio.TimeoutError:
                continue
        return got

    assert asyncio.run(main()) == [1, 2]


def test_awaited_error_counts_as_read() -> None:
    async def main() -> Any:
        port, receiver = Channel.open()
        future = receiver.recv()
        port.exception(ValueError("the sender's"))
        with pytest.raises(ActorError):
            await future
        del future
        port.send("the next")
        return await receiver.recv()

    assert asyncio.run(main()) == "the next"


def test_one_value_port_gives_its_value_to_the_reader() -> None:
    port, receiver = Channel.open(once=True)
    future = receiver.recv()
    port.send("the one")
    assert future.done()
    del future
    assert receiver.recv().get(PATIENCE) == "the one"
    with pytest.raises(PortClosedError):
        receiver.recv()


def test_concurrent_receivers_neither_lose_nor_double_values() -> None:
    """Each thread's wait times out now and then, perhaps at the moment at which its value arrives."""
    count, takers = 3000, 3
    port, receiver = Channel.open()
    taken: list[list[int]] = [[] for _ in range(takers)]
    over = threading.Event()

    def take(mine: list[int]) -> None:
        while not over.is_set():
            try:
                mine.append(receiver.recv().get(0.0005))
            except TimeoutError:
                continue

    threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
    for thread in threads:
        thread.start()
    for value in range(count):
        port.send(value)
    until(lambda: sum(map(len, taken)) >= count, "all values to be taken")
    over.set()
    for thread in threads:
        thread.join()
    assert sorted(value for mine in taken for value in mine) == list(range(count))
