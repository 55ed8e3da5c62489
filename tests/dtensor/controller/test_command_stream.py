"""Batches of commands: when and in which order they are sent, and how far the controller runs ahead of fake workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend import _native
from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import command_stream
from monarch_backend.dtensor._controller.command_stream import Stream


class FakeWorkers:
    """Fake workers: they record batches, and the test decides when they reply and whether they have room."""

    def __init__(self) -> None:
        self.batches: list[Any] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.allowed_replies = threading.Semaphore(0)
        self.room = True

    def send(self, batch: bytes) -> None:
        self.batches.append(_protocol.decode(batch))

    def send_counted(self, batch: bytes) -> Callable[[], object]:
        self.send(batch)
        return lambda: self.allowed_replies.acquire(timeout=60)

    def send_at_the_end(self, batch: bytes) -> None:
        self.send(batch)

    def has_room(self) -> bool:
        return self.room

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.timers.append((seconds, call))


@pytest.fixture
def fake_workers() -> FakeWorkers:
    return FakeWorkers()


def test_definitions_come_first_and_deletions_last(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    stream.words += (7, 0, 1)
    stream.unreachable.append(1)
    stream.define(_protocol.Define.GROUP, "g", [[0, 1]])
    stream.flush()
    assert fake_workers.batches == [[[[_protocol.Define.GROUP, "g", [[0, 1]]]], [7, 0, 1, _protocol.DELETE, 1, 1]]]
    stream.flush()
    assert len(fake_workers.batches) == 1, "nothing was sent again"


def test_timer_does_not_wait_for_workers(fake_workers: FakeWorkers) -> None:
    """The timer runs on the thread that reads messages. If it waited, no message that makes room would be read."""
    stream = Stream(fake_workers)
    stream.wake()
    stream.words += (7, 0, 1)
    fake_workers.room = False
    fake_workers.timers[-1][1]()
    assert not fake_workers.batches and len(fake_workers.timers) == 2 and stream.closed is None
    fake_workers.room = True
    fake_workers.timers[-1][1]()
    assert [words for _, words in fake_workers.batches] == [[7, 0, 1]]


def test_idle_batch_is_sent_by_the_timer(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    stream.wake()
    stream.words += (7, 0, 1)
    stream.wake()
    assert len(fake_workers.timers) == 1, "one timer for a batch"
    assert fake_workers.timers[0][0] <= 0.001
    fake_workers.timers[0][1]()
    assert [words for _, words in fake_workers.batches] == [[7, 0, 1]]


def test_timer_leaves_a_growing_batch(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    stream.wake()
    stream.words += (7, 0, 1)
    stream.flush()
    stream.wake()
    stream.words += (8, 0, 1)
    fake_workers.timers.pop()[1]()
    assert len(fake_workers.batches) == 1, "these words are newer than the clock"
    fake_workers.timers.pop()[1]()
    assert [words for _, words in fake_workers.batches] == [[7, 0, 1], [8, 0, 1]]


def test_controller_far_ahead_waits_for_workers(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    most = (
        command_stream.ACKNOWLEDGE_EVERY_WORDS
        // command_stream.MIN_BATCH_WORDS
        * (command_stream.MAX_INFLIGHT_BATCHES + 1)
        - 1
    )
    for _ in range(most):
        stream.words.append(7)
        stream.flush()
    assert len(fake_workers.batches) == most, "until there it does not wait"

    ahead = threading.Thread(target=lambda: (stream.words.append(7), stream.flush()))  # type: ignore[func-returns-value]
    ahead.start()
    while len(fake_workers.batches) == most:  # the thread sends this batch and then waits for a reply
        pass
    assert ahead.is_alive()
    fake_workers.allowed_replies.release()
    ahead.join(60)
    assert not ahead.is_alive()


def test_many_writing_and_sending_threads_lose_no_commands(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    fake_workers.allowed_replies.release(10_000)

    def write(thread: int) -> None:
        for i in range(2000):
            stream.words += (thread, i)
            if i % 7 == 0:
                stream.flush()

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(1, 5)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    stream.flush()
    words = [word for _, batch in fake_workers.batches for word in batch]
    pairs = list(zip(words[::2], words[1::2], strict=True))
    for thread in range(1, 5):
        assert [i for who, i in pairs if who == thread] == list(range(2000))


def test_close_sends_the_rest_without_waiting(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    fake_workers.room = False
    stream.words += (7, 0, 1)
    stream.send_the_rest()
    stream.send_the_rest()
    assert [words for _, words in fake_workers.batches] == [[7, 0, 1]]


def test_unsent_batch_at_close_raises_at_the_next_read(fake_workers: FakeWorkers) -> None:
    def send(_: bytes) -> None:
        raise RuntimeError("rank 1 is dead")

    fake_workers.send_at_the_end = send  # type: ignore[method-assign]
    stream = Stream(fake_workers)
    stream.words += (7, 0, 1)
    stream.send_the_rest()
    with pytest.raises(RuntimeError, match="rank 1 is dead"):
        stream.flush()


def test_close_waits_for_a_running_send_with_a_limit(
    fake_workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Close on another thread during a send: the first close times out, the second waits and sends the rest."""
    monkeypatch.setattr(command_stream, "SEND_TIMEOUT_S", 0.01)
    stream, ends = Stream(fake_workers), []

    def end() -> threading.Thread:
        ends.append(threading.Thread(target=stream.send_the_rest))
        ends[-1].start()
        return ends[-1]

    own = fake_workers.send

    def send(batch: bytes) -> None:
        fake_workers.send = own  # type: ignore[method-assign]
        stream.words += (8, 0, 2)
        end().join(60)
        monkeypatch.setattr(command_stream, "SEND_TIMEOUT_S", 60.0)
        end()
        own(batch)

    fake_workers.send = send  # type: ignore[method-assign]
    stream.words += (7, 0, 1)
    stream.flush()
    ends[-1].join(60)
    assert [words for _, words in fake_workers.batches] == [[7, 0, 1], [8, 0, 2]]
    assert not any(each.is_alive() for each in ends)


def test_waiting_for_replies_does_not_block_sends(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    while len(stream._missing) <= command_stream.MAX_INFLIGHT_BATCHES:
        stream.words.append(7)
        stream.flush(wait=False)
    stream.words.append(8)
    ahead = threading.Thread(target=stream.flush)
    ahead.start()
    while len(stream._missing) > command_stream.MAX_INFLIGHT_BATCHES:  # until the thread waits, or soon will
        pass
    stream.words.append(9)
    stream.send_the_rest()
    assert fake_workers.batches[-1][1] == [9]
    fake_workers.allowed_replies.release()
    ahead.join(60)


def test_no_commands_are_sent_after_close(fake_workers: FakeWorkers) -> None:
    stream = Stream(fake_workers)
    stream.closed = RuntimeError("they have ended")
    stream.words.append(7)
    stream.send_the_rest()
    with pytest.raises(RuntimeError, match="they have ended"):
        stream.flush()
    assert not fake_workers.batches


@pytest.mark.parametrize("when", ["words", "unreachable", "_definitions"])
def test_writes_during_a_flush_keep_their_order(
    fake_workers: FakeWorkers, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(fake_workers)
    interrupted = [getattr(stream, when)]
    take_all = _native.take_all

    def take(words: list[Any]) -> list[Any]:
        """Write right after one list was taken: 9 is defined, its record makes tensor 5, and 5 is dropped."""
        taken = take_all(words)
        if interrupted and words is interrupted[0]:
            interrupted.clear()
            stream.define(_protocol.Define.GROUP, "9", [])
            stream.words += (9, 0, 5)
            stream.unreachable.append(5)
        return taken

    monkeypatch.setattr(_native, "take_all", take)
    stream.flush()
    stream.flush()
    said: list[Any] = []
    for definitions, words in fake_workers.batches:
        said += [*definitions, *words]
    wanted = [[_protocol.Define.GROUP, "9", []], 9, 0, 5, _protocol.DELETE, 1, 5]
    assert said == wanted


def test_timer_does_not_overtake_a_blocked_batch(fake_workers: FakeWorkers) -> None:
    """A thread that waits to send runs timers meanwhile."""
    stream = Stream(fake_workers)
    order: list[Any] = []

    def send(batch: bytes) -> None:
        if not order:
            order.append("waits")
            stream.wake()
            stream.words += (8, 0, 2)
            fake_workers.timers.pop()[1]()
        order.append(_protocol.decode(batch)[1])

    fake_workers.send = send  # type: ignore[method-assign]
    stream.words += (7, 0, 1)
    stream.flush()
    assert order == ["waits", [7, 0, 1]]
    fake_workers.timers.pop()[1]()
    assert order == ["waits", [7, 0, 1], [8, 0, 2]]
