"""Replay of one actor: its runner, which gets the recorded messages, and the comparison of their results."""

from __future__ import annotations

import asyncio
import bdb
import os
import pickle
import selectors
import sys
import time
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from monarch_backend._actor import context
from monarch_backend._actor.actor import build
from monarch_backend._actor.calls.codec import text_of
from monarch_backend._actor.errors import CancelledError
from monarch_backend._actor.execution import interruption
from monarch_backend._actor.execution.async_runner import AsyncActorRunner
from monarch_backend._actor.execution.message_queue import Message, ReplyHandle
from monarch_backend._actor.execution.runner import ActorRunner, StreamCredit
from monarch_backend._replay.collectives import set_group
from monarch_backend._replay.comparison import equal_payload, equal_text, text_of_payload
from monarch_backend._replay.debugger import ReplayPdb
from monarch_backend._replay.event_loop import ReadyQueue, SteppedLoop
from monarch_backend._replay.replay_file import (
    Arrived,
    Ended,
    Expired,
    Fired,
    Lost,
    Opened,
    ReplayError,
    Sent,
    Spawned,
    Started,
    TimedOut,
)
from monarch_backend._replay.scope import Scope, current
from monarch_backend._replay.script import RecordedMessage, Script
from monarch_backend._replay.world import FileEndsError, World
from monarch_backend._serialization import pickling
from monarch_backend._transport.local.frames import Construct, Frame, Kind, Status, own, own_all

REAL_WAIT_S = 10.0
"""Seconds in which a thread or socket of the actor must make progress, where the file goes on after it."""


@dataclass(frozen=True)
class Outcome:
    """Result of a replay. ``stopped`` says why it ended before the chosen message, if it did."""

    messages: int  # replayed, with the constructor
    deviations: list[str]
    stopped: str = ""


class _Stop(BaseException):
    """Ends the replay."""


class Player:
    """Replays an actor up to message ``last``. With ``stop_at``, pdb stops there, and at exceptions."""

    def __init__(self, script: Script, last: int, stop_at: int | None) -> None:
        self.script, self.last, self.stop_at = script, last, stop_at
        self.world = World(script)
        self.debugger = None if stop_at is None else ReplayPdb()
        self.finished: set[int] = set()
        self.is_over = False
        self.count = 0
        self.stopped = ""
        self.replies: dict[int, list[tuple[bytes, Any, Any]]] = {}

    def run(self) -> Outcome:
        """Construct the actor and give it the messages. Raises ReplayError if its class cannot be loaded."""
        header = self.script.header
        plan = Construct(
            header.number, header.actor, header.rank, header.labels, header.sizes, header.creator, header.generation,
            False, header.is_async,
        )  # fmt: skip
        kind = _AsyncReplayRunner if header.is_async else _ReplayRunner
        runner = kind(
            self.world.runtime, plan, self.world.runtime.router.peer(header.owner), header.body, _buffers(header)
        )
        runner.player = self
        self.world.runtime.runners[header.number] = runner
        try:
            runner.run()
        except _Stop:
            pass
        finally:
            sys.settrace(None)
        return Outcome(self.count, self.world.deviations, self.stopped)

    # ---- called by the runner

    def message(self, started: Started) -> Message:
        """Return a recorded message as the runner takes it."""
        set_group(started.group)
        peer = self.world.runtime.router.peer(started.token)
        peer.label = peer.label or started.sender
        frame = Frame(
            -1, Kind.CALL, self.script.header.number, started.ref, 0, started.rank, 0, started.prefix, started.body,
            _buffers(started),
        )  # fmt: skip
        return peer, frame, None

    def end(self, scope: Scope, error: BaseException | None) -> None:
        """Compare what a message has done, and stop in pdb where it has failed."""
        if self.is_over:  # the tasks that are left are cancelled
            return
        self.finished.add(scope.message)
        self.count += 1
        if self.debugger is not None and not self.debugger.breaks:
            sys.settrace(None)
        recorded = self.script.messages[scope.message]
        if isinstance(error, bdb.BdbQuit) or (isinstance(error, KeyboardInterrupt) and self.debugger is None):
            self.stopped = "quit" if isinstance(error, bdb.BdbQuit) else "interrupted"
            raise _Stop
        if isinstance(error, FileEndsError):
            self.stopped = str(error)
        else:
            self._compare(recorded, scope, error)
        if error is not None and self.debugger is not None and self._shows(recorded, error):
            print(f"message {scope.message} ({recorded.endpoint}): {text_of(error)}", flush=True)
            try:
                self.debugger.post_mortem(error)
            except bdb.BdbQuit:
                self.stopped = "quit"
                raise _Stop from None
        if isinstance(error, FileEndsError):
            raise _Stop

    def _shows(self, recorded: RecordedMessage, error: BaseException) -> bool:
        """Return whether pdb stops at this error: the chosen message's, or one that was not recorded."""
        text = "" if recorded.ended is None else recorded.ended.error
        return recorded.number == self.stop_at or not equal_text(text_of(error), text)

    def _compare(self, recorded: RecordedMessage, scope: Scope, error: BaseException | None) -> None:
        if recorded.ended is None:
            return
        deviates = self.world.deviates
        label = f"message {recorded.number} ({recorded.endpoint})"
        text = "" if error is None else text_of(error)
        before = [(reply.body, reply.buffers) for reply in recorded.replies if reply.status in _VALUES]
        now = [(body, buffers) for status, body, buffers in self.replies.get(recorded.number, ()) if status in _VALUES]
        if recorded.ended.is_cancelled:
            if not scope.is_cancelled and not isinstance(error, CancelledError):
                deviates(f"{label} {_result(text, now)} now, and was cancelled when recorded")
            return
        if not equal_text(text, recorded.ended.error):
            then = _result(recorded.ended.error, before)
            deviates(f"{label} {_result(text, now)} now, and {then} when recorded")
            return
        for index, (old, new) in enumerate(zip(before, now, strict=False)):
            if not equal_payload(old, new):
                number = f" as value {index + 1}" if len(before) > 1 else ""
                was, becomes = text_of_payload(*old), text_of_payload(*new)
                deviates(f"{label} returned {becomes} now{number}, and {was} when recorded")
                return
        if not len(before) - recorded.late_replies <= len(now) <= len(before):
            deviates(f"{label} sent {len(now)} values now, and {len(before)} when recorded")
        if scope.place < recorded.effects:
            deviates(f"{label} made {scope.place} calls now, and {recorded.effects} when recorded")

    def compare_late(self, scope: Scope, value: tuple[Any, Any], index: int) -> None:
        """Compare a reply that is sent after the end of its message."""
        recorded = self.script.messages[scope.message]
        label = f"message {scope.message} ({recorded.endpoint})"
        old = recorded.replies[index] if index < len(recorded.replies) else None
        if old is None or not equal_payload((old.body, old.buffers), value):
            was = "nothing" if old is None else text_of_payload(old.body, old.buffers)
            self.world.deviates(f"{label} sent {text_of_payload(*value)} later, and {was} when recorded")

    def next_method(self, found: tuple[Any, Any], scope: Scope) -> tuple[Any, Any]:
        """Return method and specification, with the debugger around the chosen message."""
        if self.debugger is None:
            return found
        method, spec = found
        return self.debugger.wrap(method, lambda: scope.message == self.stop_at), spec

    def announce(self, number: int) -> None:
        if number == self.stop_at and self.debugger is not None:
            recorded = self.script.messages[number]
            print(
                f"message {number} of {self.script.last} of {self.script.where}: {recorded.endpoint}, {recorded.state}"
            )


_VALUES = (Status.VALUE, Status.ITEM)


def _result(error: str, values: list[tuple[Any, Any]]) -> str:
    if error:
        return f"raised {error}"
    return f"returned {text_of_payload(*values[-1])}" if values else "returned"


def _buffers(record: Any) -> list[bytearray] | None:
    return None if record.buffers is None else [bytearray(buffer) for buffer in record.buffers]


class _ReplayReply(ReplyHandle):
    """Reply of a replayed message: it is kept, to be compared."""

    __slots__ = ("_scope",)

    def __init__(self, program: Any, *args: Any) -> None:
        super().__init__(program, *args)
        self._scope = current.get()

    def __call__(self, status: bytes, body: Any, buffers: Any = None) -> None:
        self.is_due = False
        scope = self._scope
        if scope is None or status in (Status.DEAD, Status.LOST):
            return
        player: Player = scope.owner
        sent = player.replies.setdefault(scope.message, [])
        recorded = player.script.messages[scope.message]
        is_cut = recorded.ended is None or recorded.ended.is_cancelled
        if status == Status.ITEM and is_cut and len(sent) >= len(recorded.replies):
            if recorded.ended is None:
                raise FileEndsError(f"message {scope.message} yields another value, and the file ends here")
            raise CancelledError("its reader had left when it was recorded")
        value = own(body), own_all(buffers)
        if scope.message in player.finished and status in _VALUES:
            player.compare_late(scope, value, len(sent))
        sent.append((status, *value))

    def settle(self) -> None:
        if self._scope is not None:
            self._scope.is_cancelled = True

    def dropped(self) -> None:
        if self.wanted and self.is_due:
            self(Status.ERROR, b"")


class _Streams(dict[tuple[str, int], StreamCredit]):
    """Credit of streams: there is no reader, so it is not bounded."""

    def __setitem__(self, key: tuple[str, int], credit: StreamCredit) -> None:
        credit.granted = 1 << 60
        super().__setitem__(key, credit)


class _Replay(ActorRunner):
    reply_class = _ReplayReply
    player: Player

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.streams = _Streams()
        self._errors: dict[int, BaseException] = {}
        self._running: dict[int, Message] = {}
        self._waits_at_errors = False

    def _build(self, cls: type, args: Any, kwargs: Any) -> Any:
        player = self.player
        restore_random_states(player.script.header.random)
        scope = Scope(player, 0)
        token = current.set(scope)
        error: BaseException | None = None
        if player.debugger is not None and player.stop_at == 0:
            player.announce(0)
            player.debugger.arm()
        try:
            return build(cls, args, kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            current.reset(token)
            player.end(scope, error)

    def _raised(self, error: BaseException, _answer: ReplyHandle, _cause: BaseException | None = None) -> None:
        scope = current.get()
        assert scope is not None
        self._errors[scope.message] = error

    def die(self, error: BaseException, _told: bool = False) -> Any:
        """End the replay after an error of the constructor, which was compared already."""
        if 0 not in self.player.finished:
            raise ReplayError(
                f"{self.player.script.path}: the actor cannot be constructed: {text_of(error)}"
            ) from error
        raise _Stop

    def _find(self, name: str, plain: int) -> Any:
        scope = current.get()
        found = super()._find(name, plain)
        return found if scope is None else self.player.next_method(found, scope)


class _ReplayRunner(_Replay):
    """Runner of a plain actor: the records are handled in their order."""

    def _serve(self) -> None:
        player = self.player
        for record in player.script.records:
            if isinstance(record, Started):
                if record.message > player.last:
                    return
                self._replay(record)
            elif isinstance(record, Arrived | TimedOut | Expired | Lost):
                self._deliver(record)

    def _replay(self, started: Started) -> None:
        player = self.player
        player.announce(started.message)
        scope = Scope(player, started.message)
        token = current.set(scope)
        self._methods.clear()  # the debugger's are for one message
        try:
            self._execute(player.message(started))
        finally:
            current.reset(token)
        player.world.progress.run_calls()
        player.end(scope, self._errors.pop(started.message, None))

    def _deliver(self, record: Any) -> None:
        """Deliver what has arrived before the next message, unless it was delivered already."""
        world = self.player.world
        events = world.script.events[record.message, record.place]
        if events and events[0] is record:
            events.popleft()
            number = world.number_at((record.message, record.place))
            if number is not None and not isinstance(record, TimedOut):
                world.apply(number, record)
                world.progress.run_calls()


class _AsyncReplayRunner(_Replay, AsyncActorRunner):
    """Runner of an actor with an event loop. An `_Order` gives it each record after the recorded step."""

    _order: _Order

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._numbers: dict[int, int] = {}  # of messages that have not begun, by identity

    def _serve(self) -> None:
        player = self.player
        player.world.is_driven = True
        order = self._order = _Order(player, self)
        loop = order.loop = _ReplayLoop(order)
        self.code.loop = loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._run(order))
        finally:
            self.code.loop = None
            asyncio.set_event_loop(None)
            loop.close()

    async def _run(self, order: _Order) -> None:
        order.end = asyncio.get_running_loop().create_future()
        main = asyncio.ensure_future(self._main())
        main.add_done_callback(order.set_end)
        order.loop.ready.steps = 0  # this step was not in the recorded loop
        try:
            await order.end
        finally:
            self.player.is_over = True
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def give(self, number: int, message: Message) -> None:
        """Let the actor take this message in the next step."""
        self._numbers[id(message)] = number
        self.put(message)

    def _wake(self) -> None:
        if self._there is None:
            return
        ready = self._order.loop.ready
        before = len(ready)
        self._there.set()
        if len(ready) > before:  # the runner waits: its step comes next, as when it was recorded
            ready.rotate(1)

    async def _one(self, message: Message) -> None:
        player = self.player
        scope = Scope(player, self._numbers.pop(id(message)))
        current.set(scope)  # of this task
        player.announce(scope.message)
        self._methods.clear()
        self._running[scope.message] = message
        await super()._one(message)
        del self._running[scope.message]
        try:
            player.end(scope, self._errors.pop(scope.message, None))
        except _Stop:
            self._order.set_end()

    def cancel_message(self, number: int) -> bool:
        """Cancel a message that runs, as its caller did. Return False if it does not run."""
        message = self._running.get(number)
        if message is None:
            return False
        peer, frame, _ = message
        self.code._cancel_task(peer, frame.ref, "cancelled by the caller when it was recorded")
        return True


class _Order:
    """Order of an async actor's replay: each record waits until what precedes it has happened, and for its step."""

    loop: _ReplayLoop

    def __init__(self, player: Player, runner: _AsyncReplayRunner) -> None:
        self._player, self._runner = player, runner
        self._records = iter(player.script.records)
        self._record: Any = next(self._records)
        self._last_progress = time.monotonic()
        self._period = 0
        self._timers = set(player.script.timers)  # whose records are still to come
        self._made_timers: dict[tuple[int, int], asyncio.TimerHandle] = {}
        self.end: asyncio.Future[None] | None = None

    def set_end(self, task: asyncio.Task[None] | None = None) -> None:
        """End the replay, with the error of the runner if it has failed."""
        if self.end is None or self.end.done():
            return
        error = None if task is None or task.cancelled() else task.exception()
        if error is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(error)

    def has_timer(self, name: tuple[int, int]) -> bool:
        """Return whether a record says when this timer runs."""
        return name in self._timers

    def add_timer(self, name: tuple[int, int], timer: asyncio.TimerHandle) -> None:
        self._made_timers[name] = timer

    def _next(self) -> Any:
        """Return the record to give next."""
        while self._record is not None and self._has_happened(self._record):
            self._advance()
        return self._record

    def give_due(self) -> bool:
        """Give the records whose step is reached in this busy period. Return whether there were any."""
        is_any = False
        while self.end is not None and not self.end.done():
            position = getattr(self._record, "position", None)
            if position is not None and position > (self._period, self.loop.ready.steps):
                break
            record = self._next()
            position = getattr(record, "position", None)
            if position is None or position[0] != self._period or position[1] > self.loop.ready.steps:
                break
            if self._is_missing(record):
                break
            self._advance()
            self._give(record)
            is_any = True
        return is_any

    def idle(self, now: float, timeout: float | None, poll: Callable[[float], Any]) -> tuple[float, Any]:
        """Do the next thing, as the loop has nothing to do. Return the new time and events of sockets."""
        events = poll(0.0)
        if events or self.end is None or self.end.done():
            self._last_progress = time.monotonic()
            return now, events
        if self.give_due():
            return now, []
        record = self._next()
        at = getattr(record, "at", None)
        if at is not None and (timeout is None or at <= now + timeout) and not self._is_missing(record):
            self._period, self.loop.ready.steps = getattr(record, "position", (-1, 0))
            self._advance()
            self._give(record)
            return max(now, at), []
        self._period, self.loop.ready.steps = -1, 0
        if isinstance(record, Ended) and record.is_cancelled and self._runner.cancel_message(record.message):
            self._advance()
            return now, []
        if timeout is not None:
            return now + timeout, []
        return self._stuck(record, now, poll)

    def _stuck(self, record: Any, now: float, poll: Callable[[float], Any]) -> tuple[float, Any]:
        """Wait for threads and sockets of the actor, for a limited time. Then go on without what should have come."""
        is_waited_for = record is not None or any(
            message <= self._player.last and message not in self._player.finished and recorded.ended is not None
            for message, recorded in self._player.script.messages.items()
        )
        if is_waited_for and time.monotonic() - self._last_progress < REAL_WAIT_S and self._may_progress():
            return now, poll(0.05)
        self._last_progress = time.monotonic()
        if record is None:
            self._note_unfinished()
            self.set_end()
        else:
            self._advance()
        return now, []

    def _may_progress(self) -> bool:
        return any(thread for thread in sys._current_frames() if thread != self._runner.code.thread_id)

    def _advance(self) -> None:
        if isinstance(self._record, Fired):
            self._timers.discard((self._record.message, self._record.number))
        self._record = next(self._records, None)
        self._last_progress = time.monotonic()

    def _has_happened(self, record: Any) -> bool:
        player = self._player
        match record:
            case Started(message=message):
                return message > player.last
            case Sent() | Opened() | Spawned():
                return record.message > player.last or record.message == 0 or self._made(record)
            case Ended(message=message):
                return message > player.last or message in player.finished
            case Fired(message=message):
                return message > player.last
            case Arrived() | Expired() | Lost():
                key = record.message, record.place
                events = player.script.events[key]
                is_made = player.world.number_at(key) is not None
                return is_made and not (events and events[0] is record)  # a wait has taken it
            case TimedOut():
                return True
        return True

    def _is_missing(self, record: Any) -> bool:
        """Return whether the record is of a timer that the replay has not made."""
        return isinstance(record, Fired) and (record.message, record.number) not in self._made_timers

    def _made(self, record: Sent | Opened | Spawned) -> bool:
        if isinstance(record, Spawned) or (isinstance(record, Sent) and not record.ref):
            return True
        return self._player.world.number_at((record.message, record.place)) is not None

    def _give(self, record: Any) -> None:
        player = self._player
        if isinstance(record, Started):
            ended = player.script.messages[record.message].ended
            if ended is not None and not ended.has_begun:
                player.finished.add(record.message)
                player.count += 1
            elif not record.message > player.last:
                self._runner.give(record.message, player.message(record))
            return
        if isinstance(record, Fired):
            timer = self._made_timers.pop((record.message, record.number), None)
            if timer is not None and not timer.cancelled():
                timer._run()
            return
        events = player.script.events[record.message, record.place]
        number = player.world.number_at((record.message, record.place))
        if number is None:
            given = player.world.given
            given[record.message, record.place] = given.get((record.message, record.place), 0) + 1
        elif events and events[0] is record:
            events.popleft()
            player.world.apply(number, record)
        player.world.progress.run_calls()

    def _note_unfinished(self) -> None:
        player = self._player
        for number, recorded in player.script.messages.items():
            if 0 < number <= player.last and number not in player.finished:
                if recorded.ended is None:
                    player.stopped = f"message {number} waits, and the file ends here"
                elif not recorded.ended.is_cancelled:
                    player.world.deviates(f"message {number} ({recorded.endpoint}) does not end now")


class _ReplayedReadyQueue(ReadyQueue):
    """Callbacks that the loop runs next. Before each one, the records are given whose step is reached."""

    def __init__(self, order: _Order) -> None:
        super().__init__()
        self._order = order

    def popleft(self) -> asyncio.Handle:
        self._order.give_due()
        return super().popleft()


class _ReplaySelector(selectors.DefaultSelector):
    """Selector that never sleeps: where the loop would, the next record is given."""

    def __init__(self, order: _Order) -> None:
        super().__init__()
        self._order, self.now = order, 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout <= 0:
            return super().select(0)
        self.now, events = self._order.idle(self.now, timeout, super().select)
        return events


class _ReplayLoop(SteppedLoop):
    """Event loop with the recorded time and timers."""

    def __init__(self, order: _Order) -> None:
        self._replayed = _ReplaySelector(order)
        super().__init__(self._replayed, _ReplayedReadyQueue(order))
        self._order = order

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        name = self.next_timer()
        if not self._order.has_timer(name):
            return super().call_at(when, callback, *args, context=context)
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._order.add_timer(name, timer)
        return timer

    def time(self) -> float:
        return self._replayed.now


interruption.CALLERS |= {_Replay._build.__code__}


# ---- surroundings


def restore_random_states(states: bytes) -> None:
    """Set the generators to their states at the construction of the recorded actor."""
    python, numpy_state, torch_state = pickle.loads(states)
    if python is not None:
        import random

        random.setstate(python)
    if numpy_state is not None:
        import numpy as np

        np.random.set_state(numpy_state)
    if torch_state is not None:
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


def prepare_process(script: Script) -> None:
    """Give this process the recorded folder and module path. The folder is kept if it does not exist any more."""
    for entry in reversed(script.header.path):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    if Path(script.header.folder).is_dir():
        os.chdir(script.header.folder)
    pickling.settle_in(sys.modules["__main__"])


def replay(script: Script, last: int | None = None, stop_at: int | None = None) -> Outcome:
    """Replay the actor in this process, up to message ``last``. With ``stop_at``, under pdb, which reads stdin."""
    prepare_process(script)
    context.message.set(None)
    player = Player(script, script.last if last is None else last, stop_at)
    return player.run()
