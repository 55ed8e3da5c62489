"""Loop of one actor: its thread, and its life from construction to the end.

Each runner has a thread, which is the process's main thread for the first one. So thread-local state, such as the
current device, belongs to one actor. A plain actor handles messages one by one on that thread; an async actor has an
event loop there (async_runner.py). Endpoints are called in these two modules only. interruption.py interrupts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from monarch_backend._actor import context
from monarch_backend._actor.actor import ActorClassInfo, build, specify
from monarch_backend._actor.calls.codec import HOST, pack_error, pack_failure, read_prefix, text_of
from monarch_backend._actor.calls.pending_calls import STREAM_WINDOW
from monarch_backend._actor.calls.port import ReplyPort
from monarch_backend._actor.errors import CancelledError, Death, MeshFailure
from monarch_backend._actor.execution import interruption
from monarch_backend._actor.execution.interruption import CONSTRUCTOR, AbortLimits, RunningCode
from monarch_backend._actor.execution.message_queue import Job, Message, MessageQueue, ReplyHandle
from monarch_backend._actor.execution.port_use import only_sends
from monarch_backend._actor.host_ending import HostEnding
from monarch_backend._actor.meshes.actor_mesh import blueprint
from monarch_backend._core import env
from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._serialization.exceptions import remote_traceback
from monarch_backend._serialization.pickling import DeserializationError, dumps, loads
from monarch_backend._telemetry import kinds, last_messages, recorder, texts, trace_context
from monarch_backend._telemetry.recorder import begin_activity, end_activity, note_arrival, record_event
from monarch_backend._transport.local.event_loop import release
from monarch_backend._transport.local.frames import (
    Cancel,
    Construct,
    Constructed,
    Failed,
    Frame,
    FrameError,
    Status,
    Stopped,
)
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

_IDLE, _CONSTRUCTING, _RUNNING = map(int, (kinds.State.IDLE, kinds.State.CONSTRUCTING, kinds.State.RUNNING))
_OK, _ERROR, _CANCELLED = int(kinds.Status.OK), int(kinds.Status.ERROR), int(kinds.Status.CANCELLED)
_ENDED = int(kinds.Status.ABORTED)
_QUEUE = int(kinds.Kind.QUEUE)
_WITHDRAWN, _REFUSED = int(kinds.QueueStatus.WITHDRAWN), int(kinds.QueueStatus.REFUSED)

MAX_RECORDED_QUEUE = 8
"""Messages that are recorded while they wait. Further ones are counted: a burst of calls must not become slower."""

MAX_PREFIXES = 256
"""Prefixes of calls whose endpoints an actor keeps, to record messages that wait."""

CLEANUP_TIMEOUT_S = 10.0
"""Seconds that an ending process waits for ``__cleanup__``."""


def _leave_fork(error: BaseException) -> NoReturn:
    """End a forked child in which an endpoint has returned from os.fork(): it has no actor."""
    code: Any = 1
    if isinstance(error, SystemExit):
        code = 0 if error.code is None else error.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
            code = 1
    else:
        traceback.print_exception(error)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def wait_post_mortem(error: Exception) -> None:
    """Wait for `monarch-backend debug` where an endpoint has raised this error. A cancellation is raised here."""
    from monarch_backend._processes.debugging import remote_pdb  # imports pdb

    remote_pdb.post_mortem(error)


class StreamCredit:
    """Number of values that a generator may send to its reader, and of those that it has sent.

    Each number is written by one thread: ``granted`` by the reading thread, ``sent`` by the actor's. ``is_closed`` is
    True once its reader has raised DeadlockError: the generator ends at its next value.
    """

    __slots__ = ("granted", "is_closed", "ready", "sent", "wait_lock")

    def __init__(self) -> None:
        self.granted, self.sent = STREAM_WINDOW, 0
        self.is_closed = False
        self.ready = False
        self.wait_lock: threading.Lock | None = None

    def more(self, count: int) -> None:
        self.granted += count
        self.ready = True
        release(self)

    def close(self) -> None:
        self.is_closed = True
        self.more(1)  # for a generator that waits


class ActorRunner:
    """Runner of one actor. Any thread may call `put`. Other methods run on the actor's thread unless stated."""

    code_class: type[RunningCode] = RunningCode
    reply_class: type[ReplyHandle] = ReplyHandle
    is_async = False

    def __init__(self, program: Runtime, plan: Construct, owner: Peer, body: Any, buffers: Any) -> None:
        self.program, self.owner = program, owner
        self.actor, self.name, self.creator = plan.actor, plan.name, plan.creator
        self.generation, self.restarts = plan.generation, plan.restarts
        self.extent = Extent(plan.labels, plan.sizes)
        self.rank = plan.rank
        self.point = Point(plan.rank, self.extent)
        self.children: list[Any] = []  # meshes that this actor has spawned, stopped with it
        self.mesh: Any = None  # mesh of its processes
        self._asked: weakref.WeakSet[ReplyHandle] = weakref.WeakSet()  # replies through explicit ports
        self.instance: Any = None
        self.failure: MeshFailure | None = None  # why it has ended
        self.ready = True  # unless its thread waits for a message
        self.wait_lock: threading.Lock | None = None
        self.blueprint: ActorClassInfo | None = None
        self._plan_body, self._plan_buffers = body, buffers
        self.inbox = MessageQueue(program)
        # Credit of each stream that the actor sends, by the reader's token and its call. The reading thread adds it.
        self.streams: dict[tuple[str, int], StreamCredit] = {}
        self.code = self.code_class(
            program.progress, f"actor {self.name} ({self.point}, host {HOST}, pid {program.pid})"
        )
        self._limits = AbortLimits(program.progress, self.code, self._kill_process)
        self.running_reply: ReplyHandle | None = None  # reply of the running message
        self._explicit_method: Any = None  # the last one that replies through a port
        self.over = False  # it has ended and cleaned up
        self.successor: ActorRunner | None = None
        self._lock = threading.Lock()  # of failure, over and successor
        self._methods: dict[tuple[str, int], Any] = {}
        self._is_traced = False  # the last message was sent within `remote_parent`
        self.recording_cell = recorder.take_cell(kinds.Kind.MESSAGE, self.name, self.rank)  # shows what the actor does
        self._name_number = recorder.name_number(self.name)
        self._endpoint_numbers: dict[str, int] = {}
        self._numbers_of_prefixes: dict[bytes, int] = {}
        self.queue_cell = self.recording_cell  # shows the length of the queue
        self._waits_at_errors = program.root is not None and env.get("MONARCH_POST_MORTEM")

    # ---- from any thread

    def put(self, item: Message | Job) -> None:
        self.inbox.append(item)
        if self.is_busy():
            self._note_arrival(item)
        if self.failure is not None and isinstance(item, tuple):
            # Checked after the append: if the actor ends meanwhile, one of the two threads finds the message.
            if not self.restarts:
                self._refuse_all(self.failure)
            return
        self.ready = True
        if self.wait_lock is not None:
            release(self)

    def is_busy(self) -> bool:
        """Return whether a new message has to wait: the constructor or a message runs, or the thread is woken up."""
        return self.ready or self.code.running is not None

    def _show_queue(self) -> None:
        """Show the length of the queue, as the start of the running message did."""
        length = len(self.inbox)  # before the cell is looked up: the actor's thread may release it meanwhile
        recorder.note_queue(self.queue_cell, length)

    def _note_arrival(self, item: Message | Job) -> None:
        """Record a message that has to wait, and show the length of the queue."""
        if not self.recording_cell:
            return
        length = len(self.inbox)
        if length > MAX_RECORDED_QUEUE and length % MAX_RECORDED_QUEUE:
            return
        if length > MAX_RECORDED_QUEUE or not isinstance(item, tuple):
            self._show_queue()
            return
        peer, frame, _ = item
        number = self._numbers_of_prefixes.get(frame.prefix)
        if number is None:
            number = self._number_in(frame)
        note_arrival(self.queue_cell, length, self._name_number, number, frame.ref, len(frame.body), peer.identity)

    def _note_left(self, message: Message, status: int) -> None:
        """Record that a message has left the queue, and is not handled."""
        if self.recording_cell:
            peer, frame, _ = message
            number = self._number_in(frame)
            record_event(_QUEUE, status, self._name_number, number, 0, frame.ref, len(frame.body), peer.identity)

    def _note_failure(self, error: BaseException, message: Message) -> None:
        """Record why the message that ends now has failed."""
        if self.recording_cell:
            peer, frame, _ = message
            texts.failure(self._name_number, text_of(error), frame.ref, peer.identity)

    def _number_in(self, frame: Frame) -> int:
        """Return the number of the name of a message's endpoint, 0 if it cannot be read."""
        try:
            number = self._endpoint_number(read_prefix(frame.prefix)[0].method)
        except FrameError:
            return 0
        if len(self._numbers_of_prefixes) < MAX_PREFIXES:  # calls that reply to ports have many
            self._numbers_of_prefixes[frame.prefix] = number
        return number

    def _refuse_all(self, failure: MeshFailure) -> None:
        for message in self.inbox.refuse_all(failure):
            self._note_left(message, _REFUSED)

    def withdraw(self, peer: Peer, ref: int) -> bool:
        """Remove a call from the queue. Return False if it does not wait any more. Called on the reading thread."""
        message = self.inbox.cancel(peer, ref)
        if message is None:
            return False
        self._note_left(message, _WITHDRAWN)
        self._show_queue()
        return True

    def take_over(self, former: ActorRunner) -> None:
        """Succeed the former runner of this rank: take its messages once it has ended."""
        with former._lock:
            if not former.over:
                former.successor = self
        if former.successor is self:
            if former.failure is None:
                former.end("abort", "it is restarted")
        else:
            self._inherit(former)

    def _inherit(self, former: ActorRunner) -> None:
        left = list(former.inbox.taken())
        former.restarts = False  # from now on `put` refuses there
        left += former.inbox.taken()
        self.inbox.inherit(left)
        self.ready = True
        self.program.call_soon(lambda: self.program.start_runner(self))

    def end(self, how: str, reason: str) -> None:
        """End the actor, its process, or both.

        ``how`` is "stop": after the messages in the queue; "abort": fail after the running message; "kill": end the
        process. "restart" is "abort" for an actor whose successor gets its messages.
        """
        if self.failure is not None:
            if how != "restart":  # there will be no successor
                self.restarts = False
                self._refuse_all(self.failure)
            return
        if how == "kill":
            self.program.exit_now(f"{self.name} was killed: {reason}")
        elif how in ("abort", "restart"):
            self.inbox.appendleft(lambda: self.die(RuntimeError(f"aborted: {reason}"), told=True))
            self._wake()
        else:
            self.put(lambda: self.stop(reason))
            self._wake()

    def end_in_time(self, how: str, reason: str) -> None:
        """End the actor as `end` does, on behalf of its owner. Called on the reading thread.

        "abort" interrupts running code after a while, "interrupt" at once. If that fails, the process is killed.
        """
        self.end("abort" if how == "interrupt" else how, reason)
        if how in ("abort", "interrupt") and self.failure is None:
            seconds = interruption.INTERRUPT_AFTER_S if how == "abort" else 0.0
            self._limits.start(seconds, reason)

    def _kill_process(self, reason: str) -> None:
        """Kill the process, because running code could not be interrupted in time."""
        if self.failure is not None:
            return
        code = self.code
        why = f"{code.actor} was aborted ({reason}), and {code.what} could not be interrupted"
        if self.program.root is not None:
            self.program.exit_now(f"{why}: the process is killed. It was at {code.place()}")
            return
        log.warning("%s: it goes on in this program, which is not killed. It is at %s", why, code.place())
        if self._end(self._failure(f"aborted: {reason}", messages=self._last_messages())):
            self._ended()

    def _last_messages(self) -> tuple[str, ...]:
        return last_messages.of_actor(self.name) if self.program.waiting.is_real else ()

    def _failure(
        self, what: str, error: BaseException | None = None, trace: str = "", messages: tuple[str, ...] = ()
    ) -> MeshFailure:
        death = Death(
            self.rank, str(self.point), HOST, self.program.pid, what, error=error, trace=trace, messages=messages
        )
        return MeshFailure(self.name, [death])

    def cancel(self, peer: Peer, message: Cancel) -> None:
        """Cancel a call, queued or running. Called on the reading thread."""
        if not self.withdraw(peer, message.ref):
            self.code.cancel(peer, message.ref, message.reason)

    def supervise(self, failure: MeshFailure) -> None:
        """Handle the failure of a mesh that this actor has spawned. Called on the reading thread."""
        if self.failure is not None:
            return
        if self.instance is not None and getattr(self.instance, "__supervise__", None) is None:
            # Without a handler the actor fails, also if it waits in the middle of a message.
            self.die(failure)
            self._wake()
        else:
            self.inbox.appendleft(lambda: self._ask(failure))
            self._wake()

    def announce(self, notice: HostEnding) -> None:
        """Give the notice to the actor, before the messages in its queue. Called on the reading thread."""
        if self.failure is None:
            self.inbox.appendleft(lambda: self._receive_notice(notice))
            self._wake()

    def _wake(self) -> None:
        self.ready = True
        if self.wait_lock is not None:
            release(self)
        self.program.progress.wake()

    # ---- construction and messages

    def run(self) -> None:
        """Run the actor from its construction to its end, on its own thread."""
        self.code.thread_id = threading.get_ident()
        context.runner.set(self)
        context.message.set(None)  # left by the former actor of this thread
        if self.construct():
            self._serve()
        context.runner.set(None)

    def construct(self) -> bool:
        """Construct the instance. Return False if that failed, which is reported to the owner."""
        code, start = self.code, recorder.monotonic_ns()
        begin_activity(self.recording_cell, _CONSTRUCTING, recorder.name_number("__init__"), 0, 0, 0, 0)
        code.running = CONSTRUCTOR
        try:
            try:
                if code.aborted is not None:
                    raise CancelledError(code.aborted)
                cls, args, kwargs, self.mesh = loads(self._plan_body, self._plan_buffers)
                self._plan_body = self._plan_buffers = None
                self.blueprint = blueprint(cls)
                instance = self._build(cls, args, kwargs)
            finally:
                code.end()
        except BaseException as error:
            if code.aborted is None:
                self.die(error)
            else:
                self._die_aborted()
            return False
        self.instance = instance
        begin_activity(self.recording_cell, _IDLE, 0, 0, 0, 0, 0)  # the cell counts only messages
        recorder.event(kinds.Kind.MESSAGE, self.name, "__init__", start_ns=start)
        code.what = "its running message"
        self.program.router.tell(self.owner, Constructed(self.actor, self.rank, self.generation))
        return True

    def _build(self, cls: type, args: Any, kwargs: Any) -> Any:
        return build(cls, args, kwargs)

    def _serve(self) -> None:
        inbox, wait = self.inbox, self.program.progress.wait
        while self.failure is None:
            try:
                if not inbox:
                    self.ready = False
                    if not inbox:
                        wait(self)
                        continue
                self.step()
            except CancelledError:  # raised between two messages, too late for the cancelled one
                if self.code.aborted is not None:
                    self._die_aborted(self.running_reply)

    def step(self) -> None:
        self.ready = True
        try:
            item = self.inbox.popleft()
        except IndexError:
            return  # a cancelled message was removed
        if isinstance(item, tuple):
            self._execute(item)
        else:
            item()

    def _find(self, name: str, plain: int) -> Any:
        assert self.blueprint is not None
        if plain:
            method = getattr(self.instance, name)
            return method, specify(name, getattr(type(self.instance), name), False, plain == 2)
        spec = self.blueprint.spec(name)
        return getattr(self.instance, name), spec

    def _execute(self, message: Message) -> None:
        peer, frame, _ = message
        called, extent = read_prefix(frame.prefix)
        answer = self.reply_class(self.program, message, called.port)
        self.program.router.processed(peer, frame)
        context.message.set((frame.rank, extent))
        if called.trace or self._is_traced:
            self._is_traced = bool(called.trace)
            trace_context.enter_message(called.trace, frame.ref, peer.identity)
        self.running_reply = answer
        code, status = self.code, _OK
        number = self._endpoint_numbers.get(called.method) or self._endpoint_number(called.method)
        begin_activity(
            self.recording_cell, _RUNNING, number, frame.ref, len(self.inbox), len(frame.body), peer.identity
        )
        with code.lock:
            code.running, code.is_cancelled = (peer, frame.ref), False
        try:
            if self._waits_at_errors:
                self._call_post_mortem(called.method, called.plain, frame, peer, answer)
            else:
                self._call(called.method, called.plain, frame, peer, answer)
        except CancelledError as error:
            status = _CANCELLED
            if code.aborted is not None:
                self._die_aborted(answer)
            elif code.is_cancelled:
                answer.settle()
            else:
                self._raised(error, answer)
        except BaseException as error:
            status = _ERROR
            try:
                self._note_failure(error, message)
            finally:
                self._raised(error, answer)
        finally:
            code.end()
            end_activity(self.recording_cell, status)
        self.running_reply = None

    def _endpoint_number(self, name: str) -> int:
        number = self._endpoint_numbers.get(name)
        if number is None:
            number = self._endpoint_numbers[name] = recorder.name_number(name)
        return number

    def _die_aborted(self, answer: ReplyHandle | None = None) -> None:
        """Fail after an interruption that was to end the actor. ``answer`` is of the interrupted message."""
        self.code.end()
        self.die(RuntimeError(f"aborted: {self.code.aborted}"), told=True)
        if answer is not None and self.failure is not None:
            answer.lost(self.failure)

    def _call(self, name: str, plain: int, frame: Frame, peer: Peer, answer: ReplyHandle) -> None:
        found = self._methods.get((name, plain))
        if found is None:
            found = self._methods[name, plain] = self._find(name, plain)
        method, spec = found
        args, kwargs = loads(frame.body, frame.buffers)
        if spec is not None and spec.explicit_port:
            self._explicit_method = method
            method(self._port(answer), *args, **kwargs)
            return
        result = method(*args, **kwargs)
        if spec is not None and spec.is_generator:
            self._drain(result, frame, peer, answer)
        else:
            answer.value(result)

    def _call_post_mortem(self, *args: Any) -> None:
        try:
            self._call(*args)
        except Exception as error:
            wait_post_mortem(error)
            raise

    def running_message(self) -> tuple[Any, ReplyHandle | None]:
        """Return the message that the actor handles alone, as (peer, number) or CONSTRUCTOR, and its reply."""
        return self.code.running, self.running_reply

    def handles_alone(self) -> bool:
        """Return whether the actor does nothing else while this thread, which is its own, waits."""
        return True

    def keeps_reply(self) -> bool:
        """Return whether only this thread can reply to the running message. Called where the endpoint waits."""
        answer = self.running_reply
        if answer is None or not answer.explicit:
            return answer is not None
        return answer.is_due and only_sends(self._explicit_method)

    def has_explicit_reply(self, ref: int) -> bool:
        """Return whether a port replies to this call, or to another process's call of the same number."""
        return any(answer.ref == ref for answer in list(self._asked))

    def _port(self, answer: ReplyHandle) -> ReplyPort[Any]:
        answer.explicit = True
        self._asked.add(answer)
        return ReplyPort(answer)

    def _drain(self, generator: Any, frame: Frame, peer: Peer, answer: ReplyHandle) -> None:
        code, flow = self.code, StreamCredit()
        self.streams[peer.token, frame.ref] = flow
        try:
            for value in generator:
                if code.is_cancelled:
                    code.raise_here()
                if not answer.wanted:
                    continue
                if answer.port is not None:  # sending blocks when the port's queue is full
                    answer.value(value)
                    continue
                while flow.sent >= flow.granted:
                    flow.ready = False
                    if flow.sent >= flow.granted:  # look again: credit that came before must not be waited for
                        self.program.wait(flow, None)
                if peer.gone is not None or flow.is_closed:
                    break
                flow.sent += 1
                answer(Status.ITEM, *dumps(value))
            if answer.port is None:
                answer(Status.END, b"")
        finally:
            self.streams.pop((peer.token, frame.ref), None)
            generator.close()

    def _raised(self, error: BaseException, answer: ReplyHandle, cause: BaseException | None = None) -> None:
        if self.program.disowned:
            _leave_fork(error)
        if cause is not None:
            error.__cause__ = cause
        lives = isinstance(error, Exception) and answer.wanted and not answer.explicit
        if isinstance(error, DeserializationError) or lives:
            if answer.wanted:
                answer(Status.ERROR, pack_error(error))
            else:
                log.error("%s dropped a message that it can't read: %s", self.name, error)
            return
        failure = self.die(error)
        if answer.wanted and failure is not None:
            answer(Status.LOST, pack_failure(failure))

    def _ask(self, failure: MeshFailure) -> None:
        """Call the actor's ``__supervise__`` for the failure of a mesh that it has spawned."""
        if getattr(self.instance, "__supervise__", None) is None:  # it was not constructed yet when the failure arrived
            self.die(failure)
            return
        try:
            handled = self.instance.__supervise__(failure)
            if inspect.isawaitable(handled):
                handled = asyncio.run(_awaited(handled))
        except BaseException as error:
            if error.__cause__ is None:
                error.__cause__ = failure
            self.die(error)
            return
        if not handled:
            self.die(failure)

    def _receive_notice(self, notice: HostEnding) -> None:
        """Call the actor's ``__host_ending__``. An error does not end the actor, which has little time left."""
        try:
            self._call_optional("__host_ending__", notice)
        except Exception:
            log.exception("__host_ending__ of %s failed", self.name)

    def _call_optional(self, name: str, argument: object) -> None:
        """Call a method that an actor may have, plain or ``async``."""
        method = getattr(self.instance, name, None)
        result = None if method is None else method(argument)
        if inspect.isawaitable(result):
            asyncio.run(_awaited(result))

    # ---- end

    def die(self, error: BaseException, told: bool = False) -> MeshFailure | None:
        """Fail, and report it to the owner. Return None if the actor had ended before."""
        if self.program.disowned:
            _leave_fork(error)
        what = str(error) if told else f"its actor failed: {text_of(error)}"
        if isinstance(error, MeshFailure):
            what = f"its actor did not handle the failure of mesh {error.mesh_name!r}"
        cause = error.__cause__ if told else error
        trace = "" if told or isinstance(error, MeshFailure) else remote_traceback(error)
        failure = self._failure(what, None if told else error, trace, self._last_messages())
        failure.__cause__ = cause
        message = Failed(self.actor, self.rank, self.generation)
        # The owner first: an unhandled failure ends the program before callers continue with their errors.
        body = pack_failure(failure)
        if not self._end(failure, tell=lambda: self.program.router.tell(self.owner, message, body)):
            return None
        self._finish(error)
        return failure

    def stop(self, reason: str) -> None:
        if self._end(self._failure(f"it was stopped: {reason}"), final=True):
            self._finish(None)

    def _end(self, failure: MeshFailure, final: bool = False, tell: Callable[[], None] = lambda: None) -> bool:
        with self._lock:
            if self.failure is not None:
                return False
            self.failure, self.code.is_over = failure, True
        tell()
        if final:
            self.restarts = False
        if not self.restarts:
            self._refuse_all(failure)
        return True

    def _finish(self, error: BaseException | None) -> None:
        """End the actor's meshes, then call its ``__cleanup__`` on its own thread, or on a new one."""
        children, self.children = self.children, []
        for child in reversed(list(children)):  # a copy: ended meshes are removed from the list
            self.program.end_child(child, self.failure, "stop" if error is None else "abort")
        if self.instance is None:
            self._ended()
            return
        self.program.progress.later(CLEANUP_TIMEOUT_S, self._give_up_cleanup)
        if threading.get_ident() == self.code.thread_id or self.code.thread_id == 0:
            self._clean_up(error)
        else:
            self.program.run_in_thread(lambda: self._clean_up(error))

    def _clean_up(self, error: BaseException | None) -> None:
        try:
            self._call_optional("__cleanup__", error)
        except BaseException:
            log.exception("__cleanup__ of %s failed", self.name)
        self._ended()

    def _give_up_cleanup(self) -> None:
        if not self.over:
            log.warning(
                "__cleanup__ of %s has not returned after %.0f s: it is not waited for any more",
                self.name,
                CLEANUP_TIMEOUT_S,
            )
            self._ended()
            if self.program.leaving and self.code.thread_id == threading.main_thread().ident:
                self.program.exit_now("it was to stop, and __cleanup__ does not return")

    def _ended(self) -> None:
        """Release all state except the reason of the end, which references need, and report the end to the owner."""
        with self._lock:
            if self.over:
                return
            self.over, successor = True, self.successor
        self._limits.cancel()
        assert self.failure is not None
        recorder.event(kinds.Kind.ACTOR, self.name, str(self.failure)[:300], status=_ENDED)
        recorder.release_cell(self.recording_cell)
        for answer in list(self._asked):
            answer.lost(self.failure)
        self.instance = self._plan_body = self._plan_buffers = None
        self._methods.clear()
        self._explicit_method = None
        if successor is not None:
            successor._inherit(self)
        self.program.router.tell(self.owner, Stopped(self.actor, self.rank, self.generation))


interruption.CALLERS |= {ActorRunner._call.__code__, ActorRunner._drain.__code__, ActorRunner.construct.__code__}


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
