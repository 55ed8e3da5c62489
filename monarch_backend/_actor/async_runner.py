"""Runner of an actor whose endpoints are ``async def``: as in runner.py, on an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from monarch_backend._actor import blocking_calls, context
from monarch_backend._actor.codec import read_prefix
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._actor.runner import (
    _CALLERS,
    MAX_RETRY_S,
    REPORT_AFTER_S,
    ActorRunner,
    Job,
    Message,
    ReplyHandle,
    StreamCredit,
)
from monarch_backend._serialization.pickling import dumps, loads
from monarch_backend._transport.local.frames import Frame, Status
from monarch_backend._transport.local.peer import Peer

log = logging.getLogger("monarch_backend")

BLOCKED_S = 0.1
"""Seconds after a cancellation in which an event loop that has not run counts as blocked."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return a new event loop, of uvloop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class AsyncActorRunner(ActorRunner):
    """Runs one message at a time; messages of concurrent endpoints run interleaved."""

    _blocked_by = "C code does not return to Python, or a task that the message has started blocks the event loop"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._there: asyncio.Event | None = None
        self._scheduled = False
        self._tasks: dict[tuple[Peer, int], asyncio.Task[None]] = {}
        self._others: set[asyncio.Task[Any]] = set()
        self._withdrawn: set[tuple[Peer, int]] = set()  # calls that their callers have cancelled
        self._to_cancel: dict[tuple[Peer, int], str] = {}  # reasons of cancellations that the loop has not handled yet
        self._interrupted_tasks: set[tuple[Peer, int]] = set()  # interrupted to end the actor
        self._last: list[BaseException | None] = []  # arguments of pending __cleanup__ calls

    # ---- from any thread

    def put(self, item: Message | Job) -> None:
        super().put(item)
        self._wake()

    def _wake(self) -> None:
        loop = self._loop
        if loop is None or self._scheduled:
            return
        self._scheduled = True
        try:
            loop.call_soon_threadsafe(self._look)
        except RuntimeError:  # the loop is closed
            return

    def _look(self) -> None:
        self._scheduled = False
        if self._there is not None:  # else the loop has not started yet
            self._there.set()

    def _interrupt(self, peer: Peer, ref: int, reason: str) -> None:
        key = peer, ref
        if self._loop is None or key not in self._tasks:
            _soon(self._loop, self._cancel_task, peer, ref, reason)
            return
        if not self._to_cancel:  # further cancellations must not reset its time
            self._standstill = blocking_calls.Standstill()
        self._to_cancel[key] = reason
        _soon(self._loop, self._cancel_task, peer, ref, reason)
        later = self.program.pump.later
        later(BLOCKED_S, lambda: self._unblock(key))
        later(REPORT_AFTER_S, lambda: self._log_busy(reason) if key in self._to_cancel else None)

    def report_busy(self) -> None:
        if self._loop is None:
            super().report_busy()
        elif self.failure is None:
            for task in list(self._tasks.values()):
                log.warning("%s is to end, and a message runs: %s", self._who(), blocking_calls.place_of_task(task))

    def _unblock(self, key: tuple[Peer, int]) -> None:
        """Interrupt a coroutine that blocks the loop, which has not run for a while."""
        if key in self._to_cancel and blocking_calls.can_interrupt(self._thread_id):
            blocking_calls.interrupt(self)
            self.program.pump.later(MAX_RETRY_S, lambda: self._unblock(key))

    def _interrupt_what_runs(self, reason: str) -> None:
        if self._loop is None:
            super()._interrupt_what_runs(reason)
        elif self.failure is None:
            if blocking_calls.can_interrupt(self._thread_id):
                blocking_calls.interrupt(self)
            self._limits.append(self.program.pump.later(MAX_RETRY_S, lambda: self._interrupt_what_runs(reason)))

    def raise_in(self, frame: FrameType | None) -> None:
        """Raise CancelledError in this frame if it is of a cancelled coroutine that blocks the loop."""
        loop = self._loop
        if loop is None:
            super().raise_in(frame)
            return
        if threading.get_ident() != self._thread_id or not self._is_users(frame):
            return
        key = self._running_key(loop)
        if key is None:
            return
        reason = self._to_cancel.pop(key, None)
        if reason is not None:
            self._withdrawn.add(key)
        elif self._aborted is not None and key not in self._interrupted_tasks:
            self._interrupted_tasks.add(key)
            reason = self._aborted
        if reason is not None:
            raise asyncio.CancelledError(reason)

    def _running_key(self, loop: asyncio.AbstractEventLoop) -> tuple[Peer, int] | None:
        """Return (peer, number) of the message whose task runs; None between tasks. Called on the loop's thread."""
        task = asyncio.current_task(loop)
        return next((key for key, each in self._tasks.items() if each is task), None)

    def repeat_interruption(self, error: BaseException | None) -> bool:
        loop = self._loop
        if loop is None:
            return super().repeat_interruption(error)
        if type(error) is not asyncio.CancelledError or threading.get_ident() != self._thread_id:
            return False
        key = self._running_key(loop)
        if key is None:
            return False
        if key in self._interrupted_tasks:  # its interruption is repeated anyway
            self._interrupted_tasks.discard(key)
            return True
        if key not in self._withdrawn:
            return False
        self._interrupt(*key, str(error))
        return True

    def _cancel_task(self, peer: Peer, ref: int, reason: str) -> None:
        if self._to_cancel.pop((peer, ref), None) is None and (peer, ref) in self._withdrawn:
            return  # it was interrupted where it blocked the loop
        task = self._tasks.get((peer, ref))
        if task is not None:
            self._withdrawn.add((peer, ref))
            task.cancel(reason)

    def supervise(self, failure: MeshFailure) -> None:
        if self.failure is not None:
            return
        if getattr(self.instance, "__supervise__", None) is None or self._loop is None:
            super().supervise(failure)
        else:
            # Concurrently with the running message, which may wait for the mesh that has failed.
            _soon(self._loop, lambda: self._start(self._ask_async(failure)))

    # ---- construction and messages

    def _serve(self) -> None:
        self._loop = loop = new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._main())
        finally:
            with self._lock:
                self._loop = None
                left, self._last = self._last, []
            for error in left:
                super()._clean_up(error)
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()

    async def _main(self) -> None:
        self._there = asyncio.Event()
        while self.failure is None:
            if not self._inbox:
                self._there.clear()
                if not self._inbox:
                    await self._there.wait()
                    continue
            try:
                item = self._inbox.popleft()
            except IndexError:
                continue
            if isinstance(item, tuple):
                await self._execute_async(item)
            elif inspect.isawaitable(result := item()):
                await result
        for task in [*self._others, *self._tasks.values()]:
            task.cancel()
        await asyncio.gather(*self._others, *self._tasks.values(), return_exceptions=True)
        while self._last:
            await self._clean_up_async(self._last.pop(0))
            self._ended()

    def _start(self, coroutine: Any) -> asyncio.Task[Any]:
        assert self._loop is not None
        task = self._loop.create_task(coroutine)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    async def _execute_async(self, message: Message) -> None:
        peer, frame, _ = message
        called, _ = read_prefix(frame.prefix)
        self.program.router.processed(peer, frame)
        assert self._loop is not None
        assert self.blueprint is not None
        key = (peer, frame.ref or id(message))
        task = self._tasks[key] = self._loop.create_task(self._one(message))
        task.add_done_callback(lambda _: self._forget(key))
        spec = self.blueprint.endpoints.get(called.method)
        if spec is None or not spec.concurrent:
            await asyncio.wait({task})
        else:
            await asyncio.sleep(0)  # it starts before the next message

    def _forget(self, key: tuple[Peer, int]) -> None:
        self._tasks.pop(key, None)
        self._to_cancel.pop(key, None)
        self._withdrawn.discard(key)

    async def _one(self, message: Message) -> None:
        peer, frame, _ = message
        called, extent = read_prefix(frame.prefix)
        answer = ReplyHandle(self.program, message, called.port)
        context.message.set((frame.rank, extent))
        try:
            await self._call_async(called.method, called.plain, frame, peer, answer)
        except asyncio.CancelledError as error:
            if self.failure is not None:
                if answer.wanted:
                    answer(Status.LOST, self._failure_body())
            elif (peer, frame.ref) in self._withdrawn:
                answer.settle()
            elif self._aborted is not None:
                self._die_aborted(answer)
            else:
                self._raised(RuntimeError("the endpoint was cancelled by its own code"), answer, error)
        except BaseException as error:
            self._raised(error, answer)

    async def _call_async(self, name: str, plain: int, frame: Frame, peer: Peer, answer: ReplyHandle) -> None:
        found = self._methods.get((name, plain))
        if found is None:
            found = self._methods[name, plain] = self._find(name, plain)
        method, spec = found
        args, kwargs = loads(frame.body, frame.buffers)
        if spec is not None and spec.explicit_port:
            args = (self._port(answer), *args)
        result = method(*args, **kwargs)
        if spec is not None and spec.is_generator:
            await self._drain_async(result, frame, peer, answer)
            return
        if inspect.isawaitable(result):
            result = await result
        if not answer.explicit:
            answer.value(result)

    async def _drain_async(self, generator: Any, frame: Frame, peer: Peer, answer: ReplyHandle) -> None:
        key = (peer.token, frame.ref)
        flow = self._flows[key] = AsyncFlow(asyncio.get_running_loop())
        try:
            async for value in generator:
                if not answer.wanted:
                    continue
                if answer.port is not None:
                    answer.value(value)
                    continue
                while flow.room <= 0:
                    await flow.wait()
                if peer.gone is not None:
                    break
                flow.room -= 1
                answer(Status.ITEM, *dumps(value))
            if answer.port is None:
                answer(Status.END, b"")
        finally:
            self._flows.pop(key, None)
            await generator.aclose()

    async def _ask_async(self, failure: MeshFailure) -> None:
        try:
            handled = self.instance.__supervise__(failure)
            if inspect.isawaitable(handled):
                handled = await handled
        except BaseException as error:
            if error.__cause__ is None:
                error.__cause__ = failure
            self.die(error)
            return
        if not handled:
            self.die(failure)

    # ---- end

    def _end(self, failure: MeshFailure, final: bool = False, tell: Callable[[], None] = lambda: None) -> bool:
        ended = super()._end(failure, final, tell)
        if ended:
            _soon(self._loop, self._cancel_all)  # other tasks may run when the actor fails
        return ended

    def _cancel_all(self) -> None:
        for task in self._tasks.values():
            if task is not asyncio.current_task():
                task.cancel("the actor has failed")
        self._look()

    def _failure_body(self) -> bytes:
        from monarch_backend._actor.codec import pack_failure

        assert self.failure is not None
        return pack_failure(self.failure)

    def _clean_up(self, error: BaseException | None) -> None:
        with self._lock:
            ended = self._loop is None
            if not ended:
                self._last.append(error)
        if ended:
            super()._clean_up(error)
            return
        self._scheduled = False
        self._wake()

    async def _clean_up_async(self, error: BaseException | None) -> None:
        cleanup = getattr(self.instance, "__cleanup__", None)
        if cleanup is None:
            return
        try:
            result = cleanup(error)
            if inspect.isawaitable(result):
                await result
        except BaseException:
            log.exception("__cleanup__ of %s failed", self.name)


_CALLERS |= {AsyncActorRunner._call_async.__code__, AsyncActorRunner._drain_async.__code__}


def _soon(loop: asyncio.AbstractEventLoop | None, call: Callable[..., object], *args: Any) -> None:
    """Call a function on the loop, from any thread. Does nothing if the loop has ended or ends meanwhile."""
    if loop is not None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(call, *args)


class AsyncFlow(StreamCredit):
    """Credit that the reading thread adds and a coroutine awaits."""

    __slots__ = ("_event", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._event = asyncio.Event()

    def more(self, count: int) -> None:
        _soon(self._loop, self._add, count)

    def _add(self, count: int) -> None:
        self.room += count
        self._event.set()

    async def wait(self) -> None:
        """Wait until the reader has taken values."""
        self._event.clear()
        if self.room <= 0:
            await self._event.wait()
