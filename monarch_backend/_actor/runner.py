"""The loop of one actor: its queue, its thread, and its life from construction to the end.

Each runner has a thread, which is the process's main thread for the first one. So thread-local state, such as the
current device, belongs to one actor. A plain actor handles messages one by one on that thread; an async actor has an
event loop there (async_runner.py). Endpoints are called in these two modules only.
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
"""Seconds that an ending process waits for ``__cleanup__``."""

INTERRUPT_AFTER_S = 5.0
"""Seconds that ``abort`` gives to the running constructor or message, which is then interrupted."""

KILL_AFTER_S = 3.0
"""Seconds that interrupted code has to end. Then its process is killed."""

REPORT_AFTER_S = 2.0
"""Seconds after a cancellation until a log line reports an actor that is still busy."""

RETRY_S, MAX_RETRY_S = 0.001, 0.05
"""Seconds between two attempts to interrupt: the first pause, and the longest one."""

_CONSTRUCTOR = object()
"""Marks a running constructor, where a running message is (peer, number)."""


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


class StreamCredit:
    """Number of values that a generator may still send to its reader."""

    __slots__ = ("gate", "ready", "room")

    def __init__(self) -> None:
        self.room = STREAM_WINDOW
        self.ready = False
        self.gate: threading.Lock | None = None

    def more(self, count: int) -> None:
        """Add credit, after the reader has taken values."""
        self.room += count
        self.ready = True
        release(self)


class ReplyHandle:
    """Sends the reply of one message."""

    __slots__ = ("__weakref__", "_due", "_frame", "_peer", "_program", "_sent", "_via", "explicit", "port")

    def __init__(self, program: Runtime, message: Message, port: Address | None) -> None:
        self._program = program
        self._peer, self._frame, self._via = message
        self.port = port
        self._sent = False
        self.explicit = False  # the endpoint replies through a port
        self._due = True  # neither sent nor passed on

    @property
    def wanted(self) -> bool:
        """True if the caller waits for a reply."""
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
        """Return a port for the reply that other processes can use."""
        self._due = False
        if self.port is not None:
            return port_at(self.port, self._frame.rank)
        if self._via is not None and not self._sent:
            self._sent = True
            self._via.straight()
        return HandedPort(self._peer.token, self._frame.ref, self._frame.rank)

    def dropped(self) -> None:
        """Send an error, as the endpoint's port was collected. Takes no lock: the garbage collector may call it
        anywhere.
        """
        if self.wanted and self._due:
            error = RuntimeError("the endpoint has dropped its port without a reply")
            self._program.soon(lambda: self(Status.ERROR, pack_error(error)))

    def lost(self, failure: MeshFailure) -> None:
        """Report the end of the actor, unless the reply was passed on."""
        if self.wanted and self._due:
            self(Status.LOST, pack_failure(failure))

    def settle(self) -> None:
        """Finish a reply that is no longer wanted: reply aggregation waits for one from each rank."""
        if self._via is not None and not self._sent:
            self._sent = True
            self._via.own(self._frame.rank, Status.END, b"", None)

    def value(self, value: Any) -> None:
        """Send the endpoint's result, or an error if it cannot be serialized."""
        if not self.wanted:
            return
        try:
            body, buffers = dumps(value)
        except SerializationError as error:
            self(Status.ERROR, pack_error(error))
            return
        self(Status.VALUE, body, buffers)


class ActorRunner:
    """Runner of one actor. Any thread may call `put`. Other methods run on the actor's thread unless stated."""

    _blocked_by = "C code does not return to Python"

    def __init__(self, program: Runtime, plan: Construct, owner: Peer, body: Any, buffers: Any) -> None:
        self.program, self.owner = program, owner
        self.actor, self.name, self.creator = plan.actor, plan.name, plan.creator
        self.owner_actor, self.generation, self.restarts = plan.owner, plan.generation, plan.restarts
        self.extent = Extent(plan.labels, plan.sizes)
        self.rank = plan.rank
        self.point = Point(plan.rank, self.extent)
        self.children: list[Any] = []  # meshes that this actor has spawned, stopped with it
        self.mesh: Any = None  # mesh of its processes
        self._asked: weakref.WeakSet[ReplyHandle] = weakref.WeakSet()  # replies through explicit ports
        self.instance: Any = None
        self.failure: MeshFailure | None = None  # why it has ended
        self.ready = False
        self.gate: threading.Lock | None = None
        self.blueprint: ActorClassInfo | None = None
        self._plan_body, self._plan_buffers = body, buffers
        self._inbox: deque[Message | Job] = deque()
        self._running: Any = None  # the message, as (peer, number), or _CONSTRUCTOR
        self._current: ReplyHandle | None = None  # reply of that message
        self._hit = False  # the running message was cancelled
        self._is_interrupted = False  # and interrupted, at the latest at its next instruction
        self._reason = ""
        self._standstill = blocking_calls.Standstill()
        self._report: Timer | None = None  # timer of the report that it is still busy
        self._aborted: str | None = None  # why running code is interrupted to end the actor
        self._limits: list[Timer] = []  # timers that bound the time of the end
        self.over = False  # it has ended and cleaned up
        self.successor: ActorRunner | None = None
        self._lock = threading.Lock()
        self._flows: dict[tuple[str, int], StreamCredit] = {}
        self._methods: dict[tuple[str, int], Any] = {}
        self._thread_id = 0
        self.waiting_for: Any = None  # set while its thread waits, so that the wait can be interrupted

    # ---- from any thread

    def put(self, item: Message | Job) -> None:
        """Queue a message, or a function to call."""
        self._inbox.append(item)
        if self.failure is not None and isinstance(item, tuple):
            # Checked after the append: if the actor ends meanwhile, one of the two threads finds the message.
            if not self.restarts:
                self._refuse_all()
            return
        self.ready = True
        if self.gate is not None:
            release(self)

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
        left = list(former._taken())
        former.restarts = False  # from now on `put` refuses there
        left += former._taken()
        self._inbox.extendleft(item for item in reversed(left) if isinstance(item, tuple))
        self.ready = True
        self.program.soon(lambda: self.program.run_cell(self))

    def end(self, how: str, reason: str) -> None:
        """End the actor, its process, or both.

        ``how`` is "stop": after the messages in the queue; "abort": fail after the running message; "kill": end the
        process. "restart" is "abort" for an actor whose successor gets its messages.
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
        """End the actor as `end` does, on behalf of its owner. Called on the reading thread.

        "abort" interrupts running code after a while, "interrupt" at once. If that fails, the process is killed.
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
        """Kill the process, because running code could not be interrupted in time."""
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
        """Log the place of an actor that is to end and still runs. Called on the reading thread."""
        if self.failure is None and self._running is not None:
            log.warning("%s is to end, and %s runs: %s", self._who(), self._activity(), self._place())

    def _place(self) -> str:
        return blocking_calls.place(self._thread_id)

    def _who(self) -> str:
        return f"actor {self.name} ({self.point}, host {HOST}, pid {self.program.pid})"

    def _activity(self) -> str:
        return "its constructor" if self.instance is None else "its running message"

    def _give_up(self) -> None:
        """Refuse messages that were kept for a successor, because there will be none."""
        self.restarts = False
        self._refuse_all()

    def _refuse_all(self) -> None:
        for item in self._taken():
            if isinstance(item, tuple):
                self._refuse(item)

    def _taken(self) -> Iterator[Message | Job]:
        """Take the queued items one by one. Another thread may take items, too."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._inbox.popleft()

    def is_cancelled(self) -> bool:
        """Return whether the running message was cancelled."""
        return self._hit

    def cancel(self, peer: Peer, message: Cancel) -> None:
        """Cancel a call, queued or running. Called on the reading thread."""
        for item in list(self._inbox):
            if isinstance(item, tuple) and item[0] is peer and item[1].ref == message.ref:
                try:
                    self._inbox.remove(item)
                except ValueError:
                    break  # it has just started
                self.program.router.processed(peer, item[1])
                ReplyHandle(self.program, item, None).settle()
                return
        self._interrupt(peer, message.ref, message.reason)

    def more(self, peer: Peer, message: MoreCredit) -> None:
        """Add credit for a generator. Called on the reading thread."""
        flow = self._flows.get((peer.token, message.ref))
        if flow is not None:
            flow.more(message.count)

    def reader_gone(self, peer: Peer) -> None:
        """Let generators for this ended process run to their end. Called on the reading thread."""
        for (token, _), flow in list(self._flows.items()):
            if token == peer.token:
                flow.more(STREAM_WINDOW)

    def supervise(self, failure: MeshFailure) -> None:
        """Handle the failure of a mesh that this actor has spawned. Called on the reading thread."""
        if self.failure is not None:
            return
        if self.instance is not None and getattr(self.instance, "__supervise__", None) is None:
            # Without a handler the actor fails, also if it waits in the middle of a message.
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
        """Raise CancelledError in running user code, also where it blocks or waits for a reply.

        It is never raised inside of this package, where it would leave inconsistent state. Attempts are repeated until
        one succeeds or the message has ended.
        """
        time.sleep(0)  # start a new GIL interval: no other thread runs between the check and the exception
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
        """Raise CancelledError in this frame, which a signal has interrupted. Called in the handler, on the main
        thread.
        """
        # Only frames of this package hold the lock, so it is free when user code was interrupted.
        if threading.get_ident() == self._thread_id and self._is_users(frame):
            self.interrupt_here()

    def repeat_interruption(self, error: BaseException | None) -> bool:
        """Interrupt again if Python has ignored this exception and it was an interruption. On the actor's thread."""
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
        """Return whether the running message was cancelled and not interrupted yet."""
        return self._hit and not self._is_interrupted

    def interrupt_here(self) -> None:
        """Raise a pending CancelledError, after a wait. Called on the actor's thread."""
        with self._lock:
            if not self.interrupt_pending() or self._thread_id != threading.get_ident():
                return
            self._is_interrupted = True
        raise CancelledError(self._reason)

    def _is_users(self, frame: FrameType | None) -> bool:
        """Return whether this frame runs user code, called by this package where exceptions are handled."""
        if frame is None:
            return False
        first, innermost = frame, True
        while frame is not None:
            if frame.f_code is loads.__code__:  # unpickling of a constructor's or message's arguments
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

    # ---- construction and messages

    def run(self) -> None:
        """Run the actor from its construction to its end, on its own thread."""
        self._thread_id = threading.get_ident()
        context.cell.set(self)
        context.message.set(None)  # left by the former actor of this thread
        if self.construct():
            self._serve()
        context.cell.set(None)

    def construct(self) -> bool:
        """Construct the instance. Return False if that failed, which is reported to the owner."""
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
            except CancelledError:  # raised between two messages, too late for the cancelled one
                if self._aborted is not None:
                    self._die_aborted(self._current)

    def step(self) -> None:
        """Handle the next item of the queue."""
        self.ready = True
        try:
            item = self._inbox.popleft()
        except IndexError:
            return  # a cancelled message was removed
        if isinstance(item, tuple):
            self._execute(item)
        else:
            item()

    def _find(self, name: str, plain: int) -> Any:
        """Return a method and its description. Raises AttributeError."""
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
        """Note that nothing runs any more, so that a pending interruption cannot hit the next message."""
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
        """Fail after an interruption that was to end the actor. ``answer`` is of the interrupted message."""
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
                if answer.port is not None:  # sending blocks when the port's queue is full
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
        death = Death(
            self.rank, str(self.point), HOST, self.program.pid, what, error=None if told else error, trace=trace
        )
        failure = MeshFailure(self.name, [death])
        failure.__cause__ = cause
        message = Failed(self.actor, self.rank, self.generation)
        # The owner first: an unhandled failure ends the program before callers continue with their errors.
        body = pack_failure(failure)
        if not self._end(failure, tell=lambda: self.program.router.tell(self.owner, message, body)):
            return None
        self._finish(error)
        return failure

    def stop(self, reason: str) -> None:
        """End the actor as its owner has requested."""
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
        """End the actor's meshes, then call its ``__cleanup__`` on its own thread, or on a new one."""
        children, self.children = self.children, []
        for child in reversed(list(children)):  # a copy: ended meshes are removed from the list
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
            log.warning(
                "__cleanup__ of %s has not returned after %.0f s: it is not waited for any more",
                self.name,
                CLEANUP_TIMEOUT_S,
            )
            self._ended()
            if self.program.leaving and self._thread_id == threading.main_thread().ident:
                self.program.exit_now("it was to stop, and __cleanup__ does not return")

    def _ended(self) -> None:
        """Release all state except the reason of the end, which references need, and report the end to the owner."""
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
"""Functions that call user code and handle its exceptions."""


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
