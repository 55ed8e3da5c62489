"""Runner of an actor whose endpoints are ``async def``: as in runner.py, on an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Callable
from typing import Any

from monarch_backend._actor import context
from monarch_backend._actor.calls.codec import pack_failure, read_prefix
from monarch_backend._actor.calls.own_waits import has_alarm
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._actor.execution import interruption
from monarch_backend._actor.execution.actor_event_loop import WatchedLoop, new_event_loop
from monarch_backend._actor.execution.async_interruption import MessageKey, RunningTasks, call_soon
from monarch_backend._actor.execution.message_queue import Job, Message, ReplyHandle
from monarch_backend._actor.execution.open_messages import OpenMessages
from monarch_backend._actor.execution.runner import ActorRunner, StreamCredit, wait_post_mortem
from monarch_backend._actor.host_ending import HostEnding
from monarch_backend._serialization.pickling import dumps, loads
from monarch_backend._telemetry import kinds, trace_context
from monarch_backend._transport.local.frames import Frame, Status
from monarch_backend._transport.local.peer import Peer

log = logging.getLogger("monarch_backend")


class Handled:
    """The message that an actor handles alone: the next one waits for its end."""

    __slots__ = ("is_seen", "key", "pause_s", "reply", "seen", "task")

    def __init__(self, key: MessageKey, task: asyncio.Task[None]) -> None:
        self.key, self.task = key, task
        self.reply: ReplyHandle | None = None  # set when the task starts
        self.is_seen = False  # at a look of awaits.py
        self.seen: asyncio.Future[Any] | None = None  # what it awaited then
        self.pause_s = 0.0  # to the next look, if the last one was in vain


class AsyncActorRunner(ActorRunner):
    """Runs one message at a time; messages of concurrent endpoints run interleaved."""

    code_class = RunningTasks
    is_async = True
    code: RunningTasks

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._there: asyncio.Event | None = None
        self._scheduled = False
        self._open = OpenMessages(self)
        self._others: set[asyncio.Task[Any]] = set()
        self._last: list[BaseException | None] = []  # arguments of pending __cleanup__ calls
        self._main_task: asyncio.Task[Any] | None = None
        self.handled: Handled | None = None  # None between messages, and while concurrent ones run

    # ---- from any thread

    def is_busy(self) -> bool:
        return self._scheduled or bool(self.code.tasks) or self.code.running is not None

    def put(self, item: Message | Job) -> None:
        super().put(item)
        self._wake()

    def _wake(self) -> None:
        loop = self.code.loop
        if loop is None or self._scheduled:
            return
        self._scheduled = True
        try:
            self._call_on_loop(loop, self._look)
        except RuntimeError:  # the loop is closed
            return

    def _call_on_loop(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        """Call a function on the loop. Raises RuntimeError if the loop is closed."""
        loop.call_soon_threadsafe(call)

    def on_loop(self, call: Callable[[], object]) -> None:
        """Call a function on the event loop, if it has not ended."""
        loop = self.code.loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._call_on_loop(loop, call)

    def _look(self) -> None:
        self._scheduled = False
        if self._there is not None:  # else the loop has not started yet
            self._there.set()

    def supervise(self, failure: MeshFailure) -> None:
        if self.failure is not None:
            return
        if getattr(self.instance, "__supervise__", None) is None or self.code.loop is None:
            super().supervise(failure)
        else:
            # Concurrently with the running message, which may wait for the mesh that has failed.
            call_soon(self.code.loop, lambda: self._start(self._ask_async(failure)))

    def announce(self, notice: HostEnding) -> None:
        if self.code.loop is None:
            super().announce(notice)
        else:
            call_soon(self.code.loop, lambda: self._start(self._receive_notice_async(notice)))

    # ---- construction and messages

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return new_event_loop()

    def _serve(self) -> None:
        self.code.loop = loop = self._new_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._main())
        finally:
            with self._lock:
                self.code.loop = None
                left, self._last = self._last, []
            for error in left:
                super()._clean_up(error)
            loop.run_until_complete(loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            loop.close()

    async def _main(self) -> None:
        self._there = asyncio.Event()
        self._main_task = asyncio.current_task()
        while self.failure is None:
            if not self.inbox:
                self._there.clear()
                if not self.inbox:
                    await self._there.wait()
                    continue
            try:
                item = self.inbox.popleft()
            except IndexError:
                continue
            if self.code.tasks:  # of a concurrent message
                self._show_queue()
            if isinstance(item, tuple):
                await self._execute_async(item)
            elif inspect.isawaitable(result := item()):
                await result
        for task in [*self._others, *self.code.tasks.values()]:
            task.cancel()
        await asyncio.gather(*self._others, *self.code.tasks.values(), return_exceptions=True)
        while self._last:
            await self._clean_up_async(self._last.pop(0))
            self._ended()

    def _start(self, coroutine: Any) -> asyncio.Task[Any]:
        assert self.code.loop is not None
        task = self.code.loop.create_task(coroutine)
        self._others.add(task)
        task.add_done_callback(self._others.discard)
        return task

    async def _execute_async(self, message: Message) -> None:
        peer, frame, _ = message
        called, _ = read_prefix(frame.prefix)
        self.program.router.processed(peer, frame)
        code = self.code
        assert code.loop is not None
        assert self.blueprint is not None
        key = (peer, frame.ref or id(message))
        task = code.tasks[key] = code.loop.create_task(self._one(message), name=called.method)
        task.add_done_callback(lambda _: code.forget(key))
        spec = self.blueprint.endpoints.get(called.method)
        if spec is None or not spec.concurrent:
            self.handled = Handled(key, task)
            await asyncio.wait({task})
            self.handled = None
        else:
            await asyncio.sleep(0)  # it starts before the next message

    async def _one(self, message: Message) -> None:
        peer, frame, _ = message
        called, extent = read_prefix(frame.prefix)
        answer = self.reply_class(self.program, message, called.port)
        if self.handled is not None:
            self.handled.reply = answer
        context.message.set((frame.rank, extent))
        if called.trace:
            trace_context.enter_message(called.trace, frame.ref, peer.identity)
        number = self._endpoint_number(called.method)
        opened = self._open.begin(number, frame, peer.identity, len(self.inbox))
        status = kinds.Status.OK
        try:
            if self._waits_at_errors:
                await self._call_async_post_mortem(called.method, called.plain, frame, peer, answer)
            else:
                await self._call_async(called.method, called.plain, frame, peer, answer)
        except asyncio.CancelledError as error:
            status = kinds.Status.CANCELLED
            if self.failure is not None:
                if answer.wanted:
                    answer(Status.LOST, pack_failure(self.failure))
            elif self.code.is_withdrawn((peer, frame.ref)):
                answer.settle()
            elif self.code.aborted is not None:
                self._die_aborted(answer)
            else:
                self._raised(RuntimeError("the endpoint was cancelled by its own code"), answer, error)
        except BaseException as error:
            status = kinds.Status.ERROR
            try:
                self._note_failure(error, message)
            finally:
                self._raised(error, answer)
        finally:
            self._open.end(opened, int(status), len(self.inbox))

    async def _call_async_post_mortem(self, *args: Any) -> None:
        try:
            await self._call_async(*args)
        except Exception as error:
            wait_post_mortem(error)
            raise

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
        flow = AsyncFlow(asyncio.get_running_loop())
        self.streams[peer.token, frame.ref] = flow
        try:
            async for value in generator:
                if not answer.wanted:
                    continue
                if answer.port is not None:
                    answer.value(value)
                    continue
                while flow.sent >= flow.granted:
                    await flow.wait()
                if peer.gone is not None or flow.is_closed:
                    break
                flow.sent += 1
                answer(Status.ITEM, *dumps(value))
            if answer.port is None:
                answer(Status.END, b"")
        finally:
            self.streams.pop((peer.token, frame.ref), None)
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

    def _receive_notice(self, notice: HostEnding) -> None:
        self._start(self._receive_notice_async(notice))

    async def _receive_notice_async(self, notice: HostEnding) -> None:
        try:
            await self._call_optional_async("__host_ending__", notice)
        except Exception:
            log.exception("__host_ending__ of %s failed", self.name)

    async def _call_optional_async(self, name: str, argument: object) -> None:
        method = getattr(self.instance, name, None)
        result = None if method is None else method(argument)
        if inspect.isawaitable(result):
            await result

    # ---- waits, for the detection of deadlocks

    def running_message(self) -> tuple[Any, ReplyHandle | None]:
        if self.code.loop is None:  # it is constructed
            return super().running_message()
        handled = self.handled
        return (None, None) if handled is None else (handled.key, handled.reply)

    def keeps_reply(self) -> bool:
        _, reply = self.running_message()
        return reply is not None and not reply.explicit

    def handles_alone(self) -> bool:
        loop, handled = self.code.loop, self.handled
        return loop is None or (handled is not None and asyncio.current_task(loop) is handled.task)

    def awaited(self) -> asyncio.Future[Any] | None:
        """Return the future that must end before this actor does anything. Called on its event loop.

        Return None if the actor may go on without it: after some time, or by another task, a file or a signal.
        """
        loop, handled = self.code.loop, self.handled
        if loop is None or handled is None or not isinstance(loop, WatchedLoop) or loop.may_wake() or has_alarm():
            return None
        if not asyncio.all_tasks(loop) <= {handled.task, self._main_task}:
            return None
        return getattr(handled.task, "_fut_waiter", None)  # asyncio has no public name for it

    # ---- end

    def _end(self, failure: MeshFailure, final: bool = False, tell: Callable[[], None] = lambda: None) -> bool:
        ended = super()._end(failure, final, tell)
        if ended:
            call_soon(self.code.loop, self._cancel_all)  # other tasks may run when the actor fails
        return ended

    def _cancel_all(self) -> None:
        self.code.cancel_all()
        self._look()

    def _clean_up(self, error: BaseException | None) -> None:
        with self._lock:
            ended = self.code.loop is None
            if not ended:
                self._last.append(error)
        if ended:
            super()._clean_up(error)
            return
        self._scheduled = False
        self._wake()

    async def _clean_up_async(self, error: BaseException | None) -> None:
        try:
            await self._call_optional_async("__cleanup__", error)
        except BaseException:
            log.exception("__cleanup__ of %s failed", self.name)


interruption.CALLERS |= {AsyncActorRunner._call_async.__code__, AsyncActorRunner._drain_async.__code__}


class AsyncFlow(StreamCredit):
    """Credit that the reading thread adds and a coroutine awaits."""

    __slots__ = ("_event", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._event = asyncio.Event()

    def more(self, count: int) -> None:
        call_soon(self._loop, self._add, count)

    def _add(self, count: int) -> None:
        self.granted += count
        self._event.set()

    async def wait(self) -> None:
        self._event.clear()
        if self.sent >= self.granted:
            await self._event.wait()
