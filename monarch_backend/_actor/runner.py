"""An actor in its process: its queue, its thread, its life from construction to the end.

A cell has a thread of its own (the process's main thread for the first one), so that what a thread keeps for itself,
such as the current device, is the actor's. A plain actor takes its messages there one by one; an async one has an
event loop there (async_runner.py). Endpoints are called here and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from monarch_backend._actor import blocking_calls, context
from monarch_backend._actor.actor import ActorClassInfo, blueprint, build, specify
from monarch_backend._actor.codec import HOST, Address, pack_error, pack_failure, read_prefix, text_of
from monarch_backend._actor.errors import CancelledError, Death, MeshFailure
from monarch_backend._actor.pending_calls import STREAM_WINDOW
from monarch_backend._actor.port import HandedPort, Port, ReplyPort, port_at
from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._serialization.exceptions import remote_traceback
from monarch_backend._serialization.pickling import DeserializationError, SerializationError, dumps, loads
from monarch_backend._transport.local.broadcast_tree import ReplyAggregator
from monarch_backend._transport.local.event_loop import Timer, release
from monarch_backend._transport.local.frames import (
    Cancel,
    Construct,
    Constructed,
    Failed,
    Frame,
    MoreCredit,
    Status,
    Stopped,
)
from monarch_backend._transport.local.peer import Peer, PeerGoneError

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

Message = tuple[Peer, Frame, ReplyAggregator | None]
Job = Callable[[], Any]

CLEANUP_TIMEOUT_S = 10.0
"""How long ``__cleanup__`` may take before a process that stops no longer waits for it."""

INTERRUPT_AFTER_S = 5.0
"""Time that ``abort`` gives the constructor or message that runs; then it is interrupted."""

KILL_AFTER_S = 3.0
"""Time that interrupted code gets to end; then its process is killed."""

REPORT_AFTER_S = 2.0
"""After a cancellation, until an actor that is still busy is reported."""

RETRY_S, MAX_RETRY_S = 0.001, 0.05
"""Between two attempts to interrupt: the first pause, and the longest one."""

_CONSTRUCTOR = object()
"""Stands for the constructor, where a running message is (peer, number)."""


def _leave_fork(error: BaseException) -> NoReturn:
    """An endpoint's os.fork() has come back to us in the child, where there is no actor: the child ends."""
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


class StreamCredit:
    """How much of a generator's output its reader has not taken yet."""

    __slots__ = ("gate", "ready", "room")

    def __init__(self) -> None:
        self.room = STREAM_WINDOW
        self.ready = False
        self.gate: threading.Lock | None = None

    def more(self, count: int) -> None:
        """The reader has taken some."""
        self.room += count
        self.ready = True
        release(self)


class ReplyHandle:
    """The way back for one message."""

    __slots__ = ("__weakref__", "_due", "_frame", "_peer", "_program", "_sent", "_via", "explicit", "port")

    def __init__(self, program: Runtime, message: Message, port: Address | None) -> None:
        self._program = program
        self._peer, self._frame, self._via = message
        self.port = port
        self._sent = False
        self.explicit = False  # the endpoint answers through a port
        self._due = True  # it has neither been given nor handed on

    @property
    def wanted(self) -> bool:
        """Somebody waits for it."""
        return self._frame.ref != 0 or self.port is not None

    def __call__(self, status: bytes, body: Any, buffers: Any = None) -> None:
        frame, self._due = self._frame, False
        if self.port is not None:
            target = port_at(self.port, frame.rank)
            try:
                target._send(status, body, buffers)
            except PeerGoneError:
                return
        elif frame.ref and self._via is not None and not self._sent:
            self._sent = True
            self._via.own(frame.rank, status, body, buffers)
        elif frame.ref:
            self._program.router.reply(self._peer, frame.ref, frame.rank, status, body, buffers)

    def hand_on(self) -> Port[Any]:
        """The way back for others to use."""
        self._due = False
        if self.port is not None:
            return port_at(self.port, self._frame.rank)
        if self._via is not None and not self._sent:
            self._sent = True
            self._via.straight()
        return HandedPort(self._peer.token, self._frame.ref, self._frame.rank)

    def dropped(self) -> None:
        """Nobody has the port any more. Wherever the garbage collection has struck: no lock here."""
        if self.wanted and self._due:
            error = RuntimeError("the endpoint has let go of its port without an answer")
            self._program.soon(lambda: self(Status.ERROR, pack_error(error)))

    def lost(self, failure: MeshFailure) -> None:
        """The actor has ended. What it has handed on, others may still answer."""
        if self.wanted and self._due:
            self(Status.LOST, pack_failure(failure))

    def settle(self) -> None:
        """Nobody wants an answer any more; but where answers are collected on their way, this one is waited for."""
        if self._via is not None and not self._sent:
            self._sent = True
            self._via.own(self._frame.rank, Status.END, b"", None)

    def value(self, value: Any) -> None:
        """What the endpoint returned; an error if it can't be serialized."""
        if not self.wanted:
            return
        try:
            body, buffers = dumps(value)
        except SerializationError as error:
            self(Status.ERROR, pack_error(error))
            return
        self(Status.VALUE, body, buffers)


class ActorRunner:
    """One actor. `put` may be called from any thread; the rest runs on the actor's own, but where said otherwise."""

    _blocked_by = "C code does not return to Python"

    def __init__(self, program: Runtime, plan: Construct, owner: Peer, body: Any, buffers: Any) -> None:
        self.program, self.owner = program, owner
        self.actor, self.name, self.creator = plan.actor, plan.name, plan.creator
        self.owner_actor, self.generation, self.restarts = plan.owner, plan.generation, plan.restarts
        self.extent = Extent(plan.labels, plan.sizes)
        self.rank = plan.rank
        self.point = Point(plan.rank, self.extent)
        self.children: list[Any] = []  # what this actor has spawned, to be stopped with it
        self.mesh: Any = None  # its processes
        self._asked: weakref.WeakSet[ReplyHandle] = weakref.WeakSet()  # those that are given through ports
        self.instance: Any = None
        self.failure: MeshFailure | None = None  # why it is dead or stopped
        self.ready = False
        self.gate: threading.Lock | None = None
        self.blueprint: ActorClassInfo | None = None
        self._plan_body, self._plan_buffers = body, buffers
        self._inbox: deque[Message | Job] = deque()
        self._running: Any = None  # the message, as (peer, number), or _CONSTRUCTOR
        self._current: ReplyHandle | None = None  # of that message
        self._hit = False  # the caller has given the running message up
        self._is_interrupted = False  # and it has been interrupted, or will be with its next step
        self._reason = ""
        self._standstill = blocking_calls.Standstill()
        self._report: Timer | None = None  # that it is still busy
        self._aborted: str | None = None  # why what runs is interrupted for the actor's end
        self._limits: list[Timer] = []  # of the time that the end may take
        self.over = False  # it has ended and cleaned up
        self.successor: ActorRunner | None = None
        self._lock = threading.Lock()
        self._flows: dict[tuple[str, int], StreamCredit] = {}
        self._methods: dict[tuple[str, int], Any] = {}
        self._thread_id = 0
        self.waiting_for: Any = None  # what its thread waits for, so that it can be interrupted

    # ---- from any thread

    def put(self, item: Message | Job) -> None:
        """A message, or something to do, after what is here already."""
        self._inbox.append(item)
        if self.failure is not None and isinstance(item, tuple):
            # Looked at last: where it ends at this moment, one of the two finds the message. Or it is for the next one.
            if not self.restarts:
                self._refuse_all()
            return
        self.ready = True
        if self.gate is not None:
            release(self)

    def take_over(self, former: ActorRunner) -> None:
        """Come after the former one of this rank: its messages first, and not before it has ended."""
        with former._lock:
            if not former.over:
                former.successor = self
        if former.successor is self:
            if former.failure is None:
                former.end("abort", "it is started anew")
        else:
            self._inherit(former)

    def _inherit(self, former: ActorRunner) -> None:
        left = list(former._taken())
        former.restarts = False  # from now on `put` refuses there
        left += former._taken()
        self._inbox.extendleft(item for item in reversed(left) if isinstance(item, tuple))
        self.ready = True
        self.program.soon(lambda: self.program.run_cell(self))

    def end(self, how: str, reason: str) -> None:
        """Stop after what is here already, or fail after the running message, or end the process.

        "restart" is "abort" for one that is to be followed by another, which gets its messages.
        """
        if self.failure is not None:
            if how != "restart":
                self._give_up()
            return
        if how == "kill":
            self.program.exit_now(f"{self.name} was killed: {reason}")
        elif how in ("abort", "restart"):
            self._inbox.appendleft(lambda: self.die(RuntimeError(f"aborted: {reason}"), told=True))
            self._wake()
        else:
            self.put(lambda: self.stop(reason))
            self._wake()

    def end_in_time(self, how: str, reason: str) -> None:
        """`end`, for an owner: "abort" interrupts what runs after a while, "interrupt" at once. Then the process dies.

        On the reading thread.
        """
        self.end("abort" if how == "interrupt" else how, reason)
        if how in ("abort", "interrupt") and self.failure is None:
            seconds = INTERRUPT_AFTER_S if how == "abort" else 0.0
            self._limits.append(self.program.pump.later(seconds, lambda: self._interrupt_to_end(reason)))

    def _interrupt_to_end(self, reason: str) -> None:
        if self.failure is not None:
            return
        self._limits.append(self.program.pump.later(KILL_AFTER_S, lambda: self._kill_process(reason)))
        self._aborted = reason
        self._standstill = blocking_calls.Standstill()
        self._interrupt_what_runs(reason)

    def _interrupt_what_runs(self, reason: str) -> None:
        with self._lock:
            running = self._running
            self._hit, self._is_interrupted, self._reason = running is not None, False, reason
        if running is not None:
            self._interrupt_running(running)
        elif self.failure is None:  # between two messages, or in __supervise__
            self._limits.append(self.program.pump.later(MAX_RETRY_S, lambda: self._interrupt_what_runs(reason)))

    def _kill_process(self, reason: str) -> None:
        """Time is up, and something still runs that cannot be interrupted."""
        if self.failure is not None:
            return
        why = f"{self._who()} was aborted ({reason}), and {self._activity()} could not be interrupted"
        if self.program.root is not None:
            self.program.exit_now(f"{why}: the process is killed. It was at {self._place()}")
            return
        log.warning("%s: it goes on in this program, which is not killed. It is at %s", why, self._place())
        death = Death(self.rank, str(self.point), HOST, self.program.pid, f"aborted: {reason}")
        if self._end(MeshFailure(self.name, [death])):
            self._ended()

    def report_busy(self) -> None:
        """On the reading thread: log where this actor is, which is to end and does not."""
        if self.failure is None and self._running is not None:
            log.warning("%s is to end, and %s runs: %s", self._who(), self._activity(), self._place())

    def _place(self) -> str:
        return blocking_calls.place(self._thread_id)

    def _who(self) -> str:
        return f"actor {self.name} ({self.point}, host {HOST}, pid {self.program.pid})"

    def _activity(self) -> str:
        return "its constructor" if self.instance is None else "its running message"

    def _give_up(self) -> None:
        """There will be no successor: what was kept for it is refused."""
        self.restarts = False
        self._refuse_all()

    def _refuse_all(self) -> None:
        for item in self._taken():
            if isinstance(item, tuple):
                self._refuse(item)

    def _taken(self) -> Iterator[Message | Job]:
        """What waits, one after the other; another thread may be taking, too."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._inbox.popleft()

    def is_cancelled(self) -> bool:
        """Of the running message."""
        return self._hit

    def cancel(self, peer: Peer, message: Cancel) -> None:
        """On the reading thread: the caller no longer wants this call."""
        for item in list(self._inbox):
            if isinstance(item, tuple) and item[0] is peer and item[1].ref == message.ref:
                try:
                    self._inbox.remove(item)
                except ValueError:
                    break  # it has just begun
                self.program.router.processed(peer, item[1])
                ReplyHandle(self.program, item, None).settle()
                return
        self._interrupt(peer, message.ref, message.reason)

    def more(self, peer: Peer, message: MoreCredit) -> None:
        """On the reading thread: the reader of a generator has taken some."""
        flow = self._flows.get((peer.token, message.ref))
        if flow is not None:
            flow.more(message.count)

    def reader_gone(self, peer: Peer) -> None:
        """On the reading thread: nobody takes what generators yield for this process."""
        for (token, _), flow in list(self._flows.items()):
            if token == peer.token:
                flow.more(STREAM_WINDOW)

    def supervise(self, failure: MeshFailure) -> None:
        """On the reading thread: something that this actor has spawned has failed."""
        if self.failure is not None:
            return
        if self.instance is not None and getattr(self.instance, "__supervise__", None) is None:
            # Nobody to ask: its own failure, also while it waits for something in the middle of a message.
            self.die(failure)
            self._wake()
        else:
            self._inbox.appendleft(lambda: self._ask(failure))
            self._wake()

    def _wake(self) -> None:
        self.ready = True
        if self.gate is not None:
            release(self)
        self.program.pump.wake()

    def _interrupt(self, peer: Peer, ref: int, reason: str) -> None:
        running = (peer, ref)
        with self._lock:
            if self._running != running or self._hit:
                return
            self._hit, self._is_interrupted, self._reason = True, False, reason
            self._standstill = blocking_calls.Standstill()
        self._interrupt_running(running)

    def _interrupt_running(self, running: Any, pause: float = RETRY_S) -> None:
        """Raise CancelledError in what runs: in the user's code, also where it blocks, or where it waits for a reply.

        Never inside of this package, where an unexpected exception would leave an inconsistent state. It is tried again
        until it was possible or the message has ended.
        """
        time.sleep(0)  # a new slice of the interpreter: no other thread runs between the look and the exception
        with self._lock:
            if self._running != running or self._is_interrupted:
                return
            waiting = self.waiting_for
            if waiting is None and self._report is None:
                self._report = self.program.pump.later(REPORT_AFTER_S, lambda: self._report_busy(running))
            by_signal = blocking_calls.can_interrupt(self._thread_id)
            if waiting is None and not by_signal and self._is_users(sys._current_frames().get(self._thread_id)):
                self._is_interrupted = True
                blocking_calls.raise_soon(self._thread_id)
                return
        if waiting is not None:
            release(waiting)
            self.program.pump.wake()
        elif by_signal:
            blocking_calls.interrupt(self)
        self.program.pump.later(pause, lambda: self._interrupt_running(running, min(2 * pause, MAX_RETRY_S)))

    def raise_in(self, frame: FrameType | None) -> None:
        """In a signal handler of the main thread, which has interrupted this frame: raise CancelledError there."""
        # Only the runtime's frames hold the lock, so the user's code cannot be waited for here.
        if threading.get_ident() == self._thread_id and self._is_users(frame):
            self.interrupt_here()

    def repeat_interruption(self, error: BaseException | None) -> bool:
        """Interrupt again if this exception, which Python has ignored, was an interruption. On the actor's thread."""
        with self._lock:
            running = self._running
            if (
                type(error) is not CancelledError
                or not self._is_interrupted
                or self._thread_id != threading.get_ident()
            ):
                return False
            self._is_interrupted = False
        self.program.pump.later(RETRY_S, lambda: self._interrupt_running(running))
        return True

    def _report_busy(self, running: Any) -> None:
        if self._running == running:
            self._log_busy(self._reason)

    def _log_busy(self, reason: str) -> None:
        why = blocking_calls.why_not(self._thread_id)
        if why is None:
            why = "the code goes on after the exception" if self._is_interrupted else self._blocked_by
        log.warning(
            "%s is still busy %.0f s after %s was cancelled (%s): %s. It takes the next message when the code returns. "
            "It is at %s",
            self._who(), REPORT_AFTER_S, self._activity(), reason, why, self._place(),
        )  # fmt: skip

    def interrupt_pending(self) -> bool:
        """The running message was given up, and does not know yet."""
        return self._hit and not self._is_interrupted

    def interrupt_here(self) -> None:
        """On the actor's thread, which has waited for something: raise CancelledError, if that is to be."""
        with self._lock:
            if not self.interrupt_pending() or self._thread_id != threading.get_ident():
                return
            self._is_interrupted = True
        raise CancelledError(self._reason)

    def _is_users(self, frame: FrameType | None) -> bool:
        """Whether this frame runs the user's code, called by the runtime at a place that expects exceptions."""
        if frame is None:
            return False
        first, innermost = frame, True
        while frame is not None:
            if frame.f_code is loads.__code__:  # code that unpickling runs, if it is of the constructor or message
                is_run = frame.f_back is not None and frame.f_back.f_code in _CALLERS
                return is_run and not innermost and self._standstill.allows(first)
            if frame.f_code in _CALLERS:
                return not innermost and self._standstill.allows(first)
            if frame.f_code.co_filename.startswith(_PACKAGE):
                return False
            frame, innermost = frame.f_back, False
        return False

    def _refuse(self, message: Message) -> None:
        peer, frame, _ = message
        self.program.router.processed(peer, frame)
        called, _ = read_prefix(frame.prefix)
        answer = ReplyHandle(self.program, message, called.port)
        if answer.wanted and self.failure is not None:
            body = pack_failure(self.failure)
            self.program.without_waiting(lambda: answer(Status.DEAD, body))

    # ---- its life

    def run(self) -> None:
        """On its own thread, from construction to the end."""
        self._thread_id = threading.get_ident()
        context.cell.set(self)
        context.message.set(None)  # of the actor that had this thread before
        if self.construct():
            self._serve()
        context.cell.set(None)

    def construct(self) -> bool:
        """Build the instance; False if that failed, of which the owner is told."""
        self._running = _CONSTRUCTOR
        try:
            try:
                if self._aborted is not None:
                    raise CancelledError(self._aborted)
                cls, args, kwargs, self.mesh = loads(self._plan_body, self._plan_buffers)
                self._plan_body = self._plan_buffers = None
                self.blueprint = blueprint(cls)
                instance = build(cls, args, kwargs)
            finally:
                self._end_run()
        except BaseException as error:
            if self._aborted is None:
                self.die(error)
            else:
                self._die_aborted()
            return False
        self.instance = instance
        self.program.router.tell(self.owner, Constructed(self.actor, self.rank, self.generation))
        return True

    def _serve(self) -> None:
        inbox, wait = self._inbox, self.program.pump.wait
        while self.failure is None:
            try:
                if not inbox:
                    self.ready = False
                    if not inbox:
                        wait(self)
                        continue
                self.step()
            except CancelledError:  # it came a moment too late, between two messages
                if self._aborted is not None:
                    self._die_aborted(self._current)

    def step(self) -> None:
        """Take the next message, or do the next thing that there is to do."""
        self.ready = True
        try:
            item = self._inbox.popleft()
        except IndexError:
            return  # a cancelled message was taken out
        if isinstance(item, tuple):
            self._execute(item)
        else:
            item()

    def _find(self, name: str, plain: int) -> Any:
        """The method, and how it is to be called. Raises AttributeError."""
        assert self.blueprint is not None
        if plain:
            method = getattr(self.instance, name)
            return method, specify(name, getattr(type(self.instance), name), False, plain == 2)
        spec = self.blueprint.spec(name)
        return getattr(self.instance, name), spec

    def _execute(self, message: Message) -> None:
        peer, frame, _ = message
        called, extent = read_prefix(frame.prefix)
        answer = ReplyHandle(self.program, message, called.port)
        self.program.router.processed(peer, frame)
        context.message.set((frame.rank, extent))
        self._current = answer
        with self._lock:
            self._running, self._hit = (peer, frame.ref), False
        try:
            self._call(called.method, called.plain, frame, peer, answer)
        except CancelledError as error:
            if self._aborted is not None:
                self._die_aborted(answer)
            elif self._hit:
                answer.settle()
            else:
                self._raised(error, answer)
        except BaseException as error:
            self._raised(error, answer)
        finally:
            self._end_run()
        self._current = None

    def _end_run(self) -> None:
        """Nothing runs any more; an exception on its way must not hit the next message."""
        with self._lock:
            self._running = None
            if self._report is not None:
                self._report.cancel()
                self._report = None
            was_interrupted = self._is_interrupted
            self._hit = self._is_interrupted = False
        if was_interrupted:
            blocking_calls.discard_exception()

    def _die_aborted(self, answer: ReplyHandle | None = None) -> None:
        """What ran was interrupted, so that the actor ends; ``answer`` is of the message that was interrupted."""
        self._end_run()
        self.die(RuntimeError(f"aborted: {self._aborted}"), told=True)
        if answer is not None and self.failure is not None:
            answer.lost(self.failure)

    def _call(self, name: str, plain: int, frame: Frame, peer: Peer, answer: ReplyHandle) -> None:
        found = self._methods.get((name, plain))
        if found is None:
            found = self._methods[name, plain] = self._find(name, plain)
        method, spec = found
        args, kwargs = loads(frame.body, frame.buffers)
        if spec is not None and spec.explicit_port:
            method(self._port(answer), *args, **kwargs)
            return
        result = method(*args, **kwargs)
        if spec is not None and spec.is_generator:
            self._drain(result, frame, peer, answer)
        else:
            answer.value(result)

    def _port(self, answer: ReplyHandle) -> ReplyPort[Any]:
        answer.explicit = True
        self._asked.add(answer)
        return ReplyPort(answer)

    def _drain(self, generator: Any, frame: Frame, peer: Peer, answer: ReplyHandle) -> None:
        key = (peer.token, frame.ref)
        flow = self._flows[key] = StreamCredit()
        try:
            for value in generator:
                if self._hit:
                    self.interrupt_here()
                if not answer.wanted:
                    continue
                if answer.port is not None:  # whose window holds us up
                    answer.value(value)
                    continue
                while flow.room <= 0:
                    flow.ready = flow.room > 0
                    self.program.wait(flow, None)
                if peer.gone is not None:
                    break
                flow.room -= 1
                answer(Status.ITEM, *dumps(value))
            if answer.port is None:
                answer(Status.END, b"")
        finally:
            self._flows.pop(key, None)
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
        """What does the actor say to a failure of what it has spawned?"""
        if getattr(self.instance, "__supervise__", None) is None:  # it was still being built when this was asked for
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

    # ---- its end

    def die(self, error: BaseException, told: bool = False) -> MeshFailure | None:
        """The actor has failed; its owner is told. None if it had ended before."""
        if self.program.disowned:
            _leave_fork(error)
        what = str(error) if told else f"its actor failed: {text_of(error)}"
        if isinstance(error, MeshFailure):
            what = f"its actor did not handle the failure of mesh {error.mesh_name!r}"
        cause = error.__cause__ if told else error
        trace = "" if told or isinstance(error, MeshFailure) else remote_traceback(error)
        death = Death(
            self.rank, str(self.point), HOST, self.program.pid, what, error=None if told else error, trace=trace
        )
        failure = MeshFailure(self.name, [death])
        failure.__cause__ = cause
        message = Failed(self.actor, self.rank, self.generation)
        # The owner first: a failure that nobody handles ends the program before its callers go on with their errors.
        body = pack_failure(failure)
        if not self._end(failure, tell=lambda: self.program.router.tell(self.owner, message, body)):
            return None
        self._finish(error)
        return failure

    def stop(self, reason: str) -> None:
        """The actor has been told to stop."""
        failure = MeshFailure(
            self.name, [Death(self.rank, str(self.point), HOST, self.program.pid, f"it was stopped: {reason}")]
        )
        if self._end(failure, final=True):
            self._finish(None)

    def _end(self, failure: MeshFailure, final: bool = False, tell: Callable[[], None] = lambda: None) -> bool:
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
        tell()
        if final:
            self.restarts = False
        if not self.restarts:
            self._refuse_all()
        return True

    def _finish(self, error: BaseException | None) -> None:
        """What it owns goes first, then it cleans up; on its own thread, if it is not there already."""
        children, self.children = self.children, []
        for child in reversed(list(children)):  # what has ended is taken out of it
            self.program.end_child(child, self.failure, "stop" if error is None else "abort")
        if self.instance is None:
            self._ended()
            return
        self.program.pump.later(CLEANUP_TIMEOUT_S, self._give_up_cleanup)
        if threading.get_ident() == self._thread_id or self._thread_id == 0:
            self._clean_up(error)
        else:
            self.program.aside(lambda: self._clean_up(error))

    def _clean_up(self, error: BaseException | None) -> None:
        cleanup = getattr(self.instance, "__cleanup__", None)
        try:
            result = None if cleanup is None else cleanup(error)
            if inspect.isawaitable(result):
                asyncio.run(_awaited(result))
        except BaseException:
            log.exception("__cleanup__ of %s failed", self.name)
        self._ended()

    def _give_up_cleanup(self) -> None:
        if not self.over:
            log.warning("__cleanup__ of %s has not returned after %.0f s: it is given up", self.name, CLEANUP_TIMEOUT_S)
            self._ended()
            if self.program.leaving and self._thread_id == threading.main_thread().ident:
                self.program.exit_now("it was to stop, and does not come back from __cleanup__")

    def _ended(self) -> None:
        """All is done here, whatever the reason was. What is kept for references to it is why it has ended, no more."""
        with self._lock:
            if self.over:
                return
            self.over, successor = True, self.successor
        for timer in self._limits:
            timer.cancel()
        assert self.failure is not None
        for answer in list(self._asked):
            answer.lost(self.failure)
        self.instance = self._plan_body = self._plan_buffers = None
        self._methods.clear()
        if successor is not None:
            successor._inherit(self)
        self.program.router.tell(self.owner, Stopped(self.actor, self.rank, self.generation))


_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_CALLERS = {ActorRunner._call.__code__, ActorRunner._drain.__code__, ActorRunner.construct.__code__, build.__code__}
"""Functions that call the user's code, and expect that it raises."""


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
