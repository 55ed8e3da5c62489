"""`Future` without processes or messages: threads, callbacks, event loops, concurrent readers."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from monarch_backend._transport.local.event_loop import release
from monarch_backend.actor import CancelledError, Future, gather
from tests.actor.support import PATIENCE

LIMIT = 10.0


def wait_for(what: Any, seconds: float | None) -> bool:
    """Wait on the future's wait lock, as the progress loop does for a thread that does not read."""
    with _gates:
        gate = what.wait_lock
        if gate is None or not gate.locked():
            gate = threading.Lock()
            gate.acquire()
            what.wait_lock = gate
    if what.ready:
        return True
    if not gate.acquire(timeout=LIMIT if seconds is None else seconds):
        assert seconds is not None, "waited for ever"
        return bool(what.ready)
    gate.release()
    return True


_gates = threading.Lock()


def fresh(cancel: Callable[[str], object] | None = None) -> Future[Any]:
    return Future(wait_for, cancel)


def in_threads(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run ``work(i)`` in ``count`` threads that start together. Return each result or exception."""
    line = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(i: int) -> None:
        line.wait(LIMIT)
        try:
            results[i] = work(i)
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return results


class ExpectedError(Exception):
    pass


# ---- completed and pending futures


def test_value_can_be_read_repeatedly() -> None:
    future = fresh()
    assert not future.done()
    assert repr(future) == "<Future waiting>"
    future._set(5)
    for _ in range(3):
        assert (future.get(), future.get(0), future.result(), future.exception(), future.done()) == (
            5,
            5,
            5,
            None,
            True,
        )
    assert repr(future) == "<Future done>"


def test_error_can_be_read_repeatedly() -> None:
    future = fresh()
    error = ExpectedError("no")
    future._fail(error)
    for _ in range(3):
        with pytest.raises(ExpectedError) as caught:
            future.get()
        assert caught.value is error
        with pytest.raises(ExpectedError):
            future.result(0)
        assert future.exception() is error
    assert repr(future) == "<Future failed: ExpectedError('no')>"


def test_completed_future_has_its_value() -> None:
    assert Future.of(None).get(0) is None
    assert Future.of([1]).result() == [1]


def test_a_timeout_does_not_consume_the_future() -> None:
    future = fresh()
    for look in (future.get, future.result, future.exception):
        with pytest.raises(TimeoutError, match=r"no answer within 0.001 s; the call goes on, see Future\.cancel"):
            look(0.001)
    assert not future.done()
    future._set(1)
    assert future.get(0.001) == 1


def test_timeout_error_as_a_result_is_not_a_timeout() -> None:
    future = fresh()
    error = TimeoutError("of the call itself")
    future._fail(error)
    assert future.exception(0.001) is error
    with pytest.raises(TimeoutError, match="of the call itself"):
        future.get()


def test_first_result_counts() -> None:
    future = fresh()
    future._set(1)
    future._set(2)
    future.set_lazy_result(lambda: 3)
    future._fail(ExpectedError())
    assert future.get() == 1
    failed = fresh()
    failed._fail(ExpectedError())
    failed._set(1)
    assert isinstance(failed.exception(), ExpectedError)


def test_gather_keeps_the_order_and_raises_the_first_error() -> None:
    futures = [fresh() for _ in range(3)]
    threading.Thread(target=lambda: [futures[i]._set(i) for i in (2, 0, 1)]).start()
    assert gather(futures) == [0, 1, 2]
    assert gather([]) == []
    first, second = fresh(), fresh()
    first._fail(ExpectedError("first"))
    second._fail(ExpectedError("second"))
    with pytest.raises(ExpectedError, match="first"):
        gather([Future.of(1), first, second])


# ---- values computed on demand


def test_lazy_value_is_computed_once() -> None:
    made: list[object] = []

    def cook() -> object:
        time.sleep(0.01)  # so that all threads wait while the value is computed
        made.append(object())
        return made[0]

    future = fresh()
    future.set_lazy_result(cook)
    results = in_threads(8, lambda i: future.get(PATIENCE) if i % 2 else future.result())
    assert len(made) == 1
    assert all(result is made[0] for result in results)


def test_lazy_value_that_fails_is_an_error_for_all_readers() -> None:
    def cook() -> object:
        raise ExpectedError("spoilt")

    future = fresh()
    future.set_lazy_result(cook)
    results = in_threads(8, lambda i: future.get(PATIENCE) if i % 2 else future.exception())
    assert all(isinstance(result, ExpectedError) for result in results)
    assert future.exception() is results[0]


def test_function_of_a_lazy_value_is_released() -> None:
    class Large:
        pass

    large = Large()
    gone = weakref.ref(large)
    future = fresh()
    future.set_lazy_result(lambda large=large: 1)  # type: ignore[misc]
    del large
    assert future.get() == 1
    gc.collect()
    assert gone() is None


# ---- threads


@pytest.mark.parametrize("ending", ["value", "error", "cancel"])
def test_every_waiting_thread_is_woken(ending: str) -> None:
    future = fresh()

    def look(i: int) -> Any:
        if i == 0:
            if ending == "value":
                future._set(7)
            elif ending == "error":
                future._fail(ExpectedError())
            else:
                future.cancel()
            return None
        return future.get(PATIENCE)

    results = in_threads(12, look)[1:]
    expected = {"value": int, "error": ExpectedError, "cancel": CancelledError}[ending]
    assert all(isinstance(result, expected) for result in results)


def test_concurrent_result_and_cancel_leave_one_outcome() -> None:
    for _ in range(200):
        told: list[Future[Any]] = []
        future = fresh()
        future.add_done_callback(told.append)

        def race(i: int, future: Future[Any] = future) -> Any:
            return future.cancel() if i == 0 else future._set(i)

        in_threads(2, race)
        assert future.done()
        outcomes = {repr(future.exception()) for _ in range(3)}
        assert len(outcomes) == 1
        assert len(told) == 1


# ---- callbacks


def test_callbacks_before_and_after_completion_run() -> None:
    future = fresh()
    told: list[Any] = []
    future.add_done_callback(lambda f: told.append(("first", f.get())))
    future.add_done_callback(lambda f: told.append(("second", f.get())))
    assert told == []
    future._set(3)
    assert told == [("first", 3), ("second", 3)]
    future.add_done_callback(lambda f: told.append(("late", f.get())))
    assert told[2:] == [("late", 3)]


def test_callbacks_run_after_errors_and_cancellation() -> None:
    told: list[BaseException | None] = []
    for end in (lambda f: f._fail(ExpectedError()), lambda f: f.cancel()):
        future = fresh()
        future.add_done_callback(lambda f: told.append(f.exception()))
        end(future)
    assert [type(error) for error in told] == [ExpectedError, CancelledError]


def test_every_callback_is_called_once_under_races() -> None:
    for _ in range(50):
        future = fresh()
        told: list[int] = []

        def work(i: int, future: Future[Any] = future, told: list[int] = told) -> None:
            if i == 3:
                future._set(i)
            else:
                for n in range(20):
                    future.add_done_callback(lambda _, name=100 * i + n: told.append(name))

        in_threads(6, work)
        assert sorted(told) == [100 * i + n for i in (0, 1, 2, 4, 5) for n in range(20)]


def test_callback_that_raises_does_not_stop_others(caplog: pytest.LogCaptureFixture) -> None:
    future = fresh()
    told: list[Any] = []

    def broken(_: Future[Any]) -> None:
        raise ExpectedError("in a callback")

    future.add_done_callback(broken)
    future.add_done_callback(lambda f: told.append(f.get()))
    future._set(4)  # runs on the reading thread, which an exception of a user's callback must not reach
    assert told == [4]
    assert future.get() == 4
    future.add_done_callback(broken)
    assert "in a callback" in caplog.text


def test_callback_can_add_a_callback() -> None:
    future = fresh()
    told: list[str] = []
    future.add_done_callback(lambda f: f.add_done_callback(lambda _: told.append("inner")))
    future._set(1)
    assert told == ["inner"]


# ---- cancellation


def test_cancel_notifies_the_producer_once() -> None:
    reasons: list[str] = []
    future = fresh(reasons.append)
    assert future.cancel("no longer wanted")
    assert not future.cancel("again")
    assert reasons == ["no longer wanted"]
    with pytest.raises(CancelledError, match="no longer wanted"):
        future.get()
    assert isinstance(future.exception(), CancelledError)
    future._set(1)
    assert isinstance(future.exception(), CancelledError)


def test_cancel_after_completion_is_false() -> None:
    reasons: list[str] = []
    for end in (lambda f: f._set(1), lambda f: f._fail(ExpectedError()), lambda f: f.set_lazy_result(lambda: 1)):
        future = fresh(reasons.append)
        end(future)
        assert not future.cancel()
    assert reasons == []


def test_cancelled_error_is_no_exception() -> None:
    assert not issubclass(CancelledError, Exception)


# ---- asyncio


def later(future: Future[Any], value: Any) -> threading.Thread:
    """Complete the future from another thread."""
    answer = future._fail if isinstance(value, BaseException) else future._set
    thread = threading.Thread(target=answer, args=(value,))
    thread.start()
    return thread


def test_await_works_before_and_after_completion() -> None:
    async def main() -> list[Any]:
        future = fresh()
        later(future, 3)
        return [await future, await future, await future.as_asyncio(), await Future.of(4)]

    assert asyncio.run(main()) == [3, 3, 3, 4]


def test_await_raises_the_error() -> None:
    async def main() -> None:
        for _ in range(2):
            future = fresh()
            later(future, ExpectedError("at the actor"))
            with pytest.raises(ExpectedError, match="at the actor"):
                await future
            with pytest.raises(ExpectedError, match="at the actor"):
                await future

    asyncio.run(main())


def test_many_tasks_await_one_future() -> None:
    async def main() -> list[Any]:
        future = fresh()

        async def look() -> Any:
            return await future

        tasks = [asyncio.create_task(look()) for _ in range(10)]
        await asyncio.sleep(0)
        later(future, "x")
        return list(await asyncio.gather(*tasks))

    assert asyncio.run(main()) == ["x"] * 10


def test_many_loops_and_threads_await_one_future() -> None:
    future = fresh()

    async def look() -> Any:
        return await future

    def work(i: int) -> Any:
        if i == 0:
            return future._set(9)
        return asyncio.run(look()) if i % 2 else future.get(PATIENCE)

    assert in_threads(9, work)[1:] == [9] * 8


def test_cancelled_future_cancels_awaiting_tasks() -> None:
    async def main() -> None:
        future = fresh()
        waiting = asyncio.ensure_future(future.as_asyncio())
        await asyncio.sleep(0)
        future.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert waiting.cancelled()

    asyncio.run(main())


def test_cancel_of_the_task_cancels_the_call() -> None:
    reasons: list[str] = []

    async def main() -> None:
        future = fresh(reasons.append)

        async def look() -> Any:
            return await future

        task = asyncio.create_task(look())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)  # done callbacks run in the next turn of the loop
        assert isinstance(future.exception(), CancelledError)

    asyncio.run(main())
    assert reasons == ["its asyncio task was cancelled"]


def test_wait_for_timeout_cancels_the_call() -> None:
    reasons: list[str] = []

    async def main() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(fresh(reasons.append).as_asyncio(), 0.001)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert reasons == ["its asyncio task was cancelled"]


def test_result_after_the_loop_is_closed_is_no_error() -> None:
    future = fresh()

    async def main() -> asyncio.Future[Any]:
        return future.as_asyncio()

    asyncio.run(main())
    future._set(1)
    assert future.get() == 1


def test_as_asyncio_needs_a_running_loop() -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        fresh().as_asyncio()


def test_get_in_a_running_loop_warns() -> None:
    slow = threading.Event()

    async def main() -> Any:
        future = fresh()
        threading.Thread(target=lambda: (slow.wait(LIMIT), future._set(6))).start()
        with pytest.warns(RuntimeWarning, match="await the future") as caught:
            with pytest.raises(TimeoutError):
                future.get(0.001)
        assert caught[0].filename == __file__
        slow.set()
        return await future

    assert asyncio.run(main()) == 6


def test_get_of_a_finished_future_does_not_warn() -> None:
    async def main() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return Future.of(1).get(), Future.of(2).result(), Future.of(3).exception()

    assert asyncio.run(main()) == (1, 2, None)


# ---- random use


def test_random_use_by_many_threads_is_consistent() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        futures = [fresh() for _ in range(10)]
        endings = [rng.choice(["value", "raw", "error", "cancel"]) for _ in futures]
        told = [0] * len(futures)
        order = list(range(len(futures)))
        rng.shuffle(order)

        def finish(
            futures: list[Future[Any]] = futures, endings: list[str] = endings, order: list[int] = order
        ) -> None:
            for i in order:
                match endings[i]:
                    case "value":
                        futures[i]._set(i)
                    case "raw":
                        futures[i].set_lazy_result(lambda i=i: i)
                    case "error":
                        futures[i]._fail(ExpectedError(i))
                    case _:
                        futures[i].cancel()

        def work(n: int, futures: list[Future[Any]] = futures, told: list[int] = told) -> list[Any]:
            if n == 0:
                return finish() or []
            if n == 1:
                for i, future in enumerate(futures):
                    future.add_done_callback(lambda _, i=i: told.__setitem__(i, told[i] + 1))
                return []
            return [future.exception(PATIENCE) or future.get() for future in futures]

        results = in_threads(6, work)
        assert told == [1] * len(futures)
        for seen in results[2:]:
            for i, ending in enumerate(endings):
                kind = {"value": int, "raw": int, "error": ExpectedError, "cancel": CancelledError}[ending]
                assert type(seen[i]) is kind


def test_release_without_waiters_is_harmless() -> None:
    future = fresh()
    release(future)
    assert not future.done()
