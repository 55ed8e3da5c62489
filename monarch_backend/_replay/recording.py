"""Recording of actors for a replay: runners that write replay files, and hooks in the runtime of their process.

A runtime without recording has none of this code on its paths: `install` replaces functions of one runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import re
import sys
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.actor import build
from monarch_backend._actor.calls.codec import HOST, pack_failure, read_prefix, text_of
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.port import PortReceiver
from monarch_backend._actor.execution.async_runner import AsyncActorRunner
from monarch_backend._actor.execution.message_queue import Message, ReplyHandle
from monarch_backend._actor.execution.runner import ActorRunner
from monarch_backend._core import env
from monarch_backend._replay.collectives import recorded_group
from monarch_backend._replay.event_loop import Position, RecordedLoop
from monarch_backend._replay.replay_file import (
    SUFFIX,
    Arrived,
    Ended,
    Expired,
    Fired,
    Header,
    Lost,
    Opened,
    Record,
    Refused,
    ReplayFile,
    Replied,
    Sent,
    Spawned,
    Started,
    TimedOut,
    plain,
)
from monarch_backend._replay.scope import Scope, current
from monarch_backend._serialization.pickling import dumps_in_band
from monarch_backend._transport.local.frames import Frame, Kind, Status, own, size_of
from monarch_backend._transport.local.peer import Peer, PeerGoneError

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")

MAX_ARGUMENT_BYTES = 64 << 10
"""Arguments of the actor's own calls up to this size are recorded. Of larger ones, size and checksum are."""

_OWN_MODULES = "monarch_backend."
_NO_STATUS = frozenset({Status.DEAD, Status.LOST, Status.NOTHING})


class ActorRecorder:
    """Writer of one actor's replay file. Methods do nothing once recording has stopped."""

    def __init__(self, runner: ActorRunner, file: ReplayFile, header: Header) -> None:
        self._file, self._name, self._rank = file, runner.name, runner.rank
        self._program, self._runner = runner.program, runner
        self._arrivals: deque[Callable[[], None]] = deque()
        self._arriving = threading.RLock()  # of arrivals and waits
        self._waits = 0  # that block the event loop
        self._messages = 0
        self.now = file.now
        self.write(header, header.body, header.buffers)

    @property
    def is_recording(self) -> bool:
        """Whether records have an effect. Otherwise none is made: its payload may be large."""
        return self._file.is_open

    def write(self, record: Record, payload: Any = b"", buffers: Any = None) -> None:
        why = self._file.write(record, payload, buffers)
        if why is not None:
            log.warning(
                "recording of %s, rank %d, for a replay has stopped: %s. The actor goes on. A replay of %s ends there",
                self._name, self._rank, why, self._file.path,
            )  # fmt: skip

    @property
    def position(self) -> Position:
        """Position in the event loop, for what another thread does now."""
        loop = self._runner.code.loop if isinstance(self._runner, AsyncActorRunner) else None
        return loop.position if isinstance(loop, RecordedLoop) else (0, 0)

    def start(self, message: Message) -> Scope:
        """Record the start of a message, in the step that begins it."""
        peer, frame, _ = message
        self._messages += 1
        if not self.is_recording:
            return Scope(self, self._messages)
        body, buffers = plain(frame.body, frame.buffers)
        is_main = peer is (self._program.root or self._program.router.me)
        sender = f"main (pid {peer.pid or self._program.pid})" if is_main else str(peer)
        period, steps = self.position
        record = Started(
            self._messages, self.now(), frame.prefix, frame.rank, frame.ref, peer.token, sender, recorded_group(), body,
            buffers, (period, max(steps - 1, 0)),
        )  # fmt: skip
        self.write(record, body, buffers)
        return Scope(self, self._messages)

    def end(self, scope: Scope) -> None:
        self.write(Ended(scope.message, scope.error, scope.is_cancelled, scope.has_begun))

    def arrive(self, handle: Callable[[], None]) -> None:
        """Handle a reply or a port's value: at once, or on the event loop, which thus decides the recorded order."""
        loop = self._runner.code.loop if isinstance(self._runner, AsyncActorRunner) else None
        if isinstance(loop, RecordedLoop):
            with self._arriving:
                if not self._waits and (self.is_recording or self._arrivals):
                    self._arrivals.append(handle)
                    with contextlib.suppress(RuntimeError):  # the loop is closed
                        loop.call_uncounted(self.handle_arrivals)
                    return
        handle()

    def handle_arrivals(self) -> None:
        with self._arriving:
            while self._arrivals:
                self._arrivals.popleft()()

    def note_timer(self, message: int, number: int) -> None:
        """Record that a timer of the event loop runs."""
        if self.is_recording:
            self.write(Fired(message, number, self.now(), self.position))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Handle arrivals at once meanwhile, if this thread is the event loop's, which waits for one of them."""
        is_loop = threading.get_ident() == self._runner.code.thread_id
        if is_loop:
            with self._arriving:
                self._waits += 1
                self.handle_arrivals()
        try:
            yield
        finally:
            if is_loop:
                with self._arriving:
                    self._waits -= 1

    def close(self, reason: str) -> None:
        self._file.close(reason, is_complete=True)


Known = tuple[ActorRecorder, int, int]
"""Recorder, message and place of a call or port."""


def _recorded_scope() -> Scope | None:
    """Return the scope of the message that this code handles, if it is being recorded."""
    scope = current.get()
    return scope if scope is not None and scope.owner.is_recording else None


class RecordedReply(ReplyHandle):
    """Reply of a recorded message."""

    __slots__ = ("_scope",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._scope = current.get()

    def __call__(self, status: bytes, body: Any, buffers: Any = None) -> None:
        if self._scope is not None and status not in _NO_STATUS and self._scope.owner.is_recording:
            data, views = plain(body, buffers)
            self._scope.owner.write(Replied(self._scope.message, status, data, views), data, views)
        super().__call__(status, body, buffers)

    def settle(self) -> None:
        if self._scope is not None:
            self._scope.is_cancelled = True
        super().settle()


class _Recorded(ActorRunner):
    reply_class = RecordedReply
    _recorder: ActorRecorder | None = None
    _received: Any = None  # by the constructor

    def construct(self) -> bool:
        self._received = plain(self._plan_body, self._plan_buffers)
        try:
            return super().construct()
        finally:
            self._received = None

    def _build(self, cls: type, args: Any, kwargs: Any) -> Any:
        received, self._received = self._received, None
        if cls.__module__.startswith(_OWN_MODULES):
            return build(cls, args, kwargs)
        self._recorder = self._begin(cls, *received)
        if self._recorder is None:
            return build(cls, args, kwargs)
        scope = Scope(self._recorder, 0)
        token = current.set(scope)
        try:
            return build(cls, args, kwargs)
        except BaseException as error:
            scope.error = text_of(error)
            raise
        finally:
            current.reset(token)
            self._recorder.end(scope)

    def _begin(self, cls: type, body: Any, buffers: Any) -> ActorRecorder | None:
        """Create the replay file. Return None, with a line in the log, if the system refuses."""
        program, began = self.program, time.time()
        limit = env.get("MONARCH_REPLAY_BYTES")
        folder = Path(env.get("MONARCH_REPLAY"))
        name, host = (re.sub(r"[^\w-]", "_", text)[:80] for text in (self.name, HOST))
        path = folder / f"{name}.{self.rank}.{host}.{program.pid}.{time.time_ns() // 1000}{SUFFIX}"
        try:
            file = ReplayFile(path, limit, env.get("MONARCH_REPLAY_FOLDER_BYTES"))
        except OSError as error:
            log.warning("%s, rank %d, is not recorded for a replay: %s", self.name, self.rank, error)
            return None
        torch = sys.modules.get("torch")
        header = Header(
            actor=self.name, rank=self.rank, labels=tuple(self.extent.labels), sizes=tuple(self.extent.sizes),
            creator=self.creator, generation=self.generation, is_async=self.is_async, number=self.actor,
            class_name=cls.__qualname__, mesh=self.mesh.name, host=HOST, pid=program.pid, started_at=began,
            token=program.router.token, owner=self.owner.token,
            root=program.router.token if program.root is None else program.root.token, home_rank=program.home_rank,
            limit_bytes=limit, python=sys.version.partition(" ")[0],
            torch="" if torch is None else str(torch.__version__), hash_seed=os.environ.get("PYTHONHASHSEED", ""),
            folder=os.getcwd(), arguments=list(sys.argv), path=[str(entry) for entry in sys.path],
            random=random_states(), body=body, buffers=buffers,
        )  # fmt: skip
        return ActorRecorder(self, file, header)

    def _raised(self, error: BaseException, answer: ReplyHandle, cause: BaseException | None = None) -> None:
        scope = _recorded_scope()
        if scope is not None:
            scope.error = text_of(error)
        super()._raised(error, answer, cause)

    def _die_aborted(self, answer: ReplyHandle | None = None) -> None:
        scope = current.get()
        if scope is not None:
            scope.is_cancelled = True
        super()._die_aborted(answer)

    def _ended(self) -> None:
        if self._recorder is not None and self.failure is not None:
            self._recorder.close(self.failure.deaths[0].what.partition("\n")[0])
        super()._ended()


class RecordedRunner(_Recorded):
    """Runner of a recorded plain actor."""

    def _execute(self, message: Message) -> None:
        if self._recorder is None:
            super()._execute(message)
            return
        scope = self._recorder.start(message)
        token = current.set(scope)
        try:
            super()._execute(message)
        finally:
            current.reset(token)
            self._recorder.end(scope)


class RecordedAsyncRunner(_Recorded, AsyncActorRunner):
    """Runner of a recorded actor with an event loop."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._scopes: dict[int, Scope] = {}  # of messages that have not begun, by identity

    def _new_loop(self) -> asyncio.AbstractEventLoop:
        return super()._new_loop() if self._recorder is None else RecordedLoop(self._recorder.note_timer)

    def _call_on_loop(self, loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
        if isinstance(loop, RecordedLoop):
            loop.call_uncounted(call)
        else:
            super()._call_on_loop(loop, call)

    async def _execute_async(self, message: Message) -> None:
        if self._recorder is None:
            await super()._execute_async(message)
            return
        scope = self._scopes[id(message)] = self._recorder.start(message)
        try:
            await super()._execute_async(message)
        finally:
            if self._scopes.pop(id(message), None) is not None:  # cancelled before its first step
                scope.is_cancelled, scope.has_begun = True, False
                self._recorder.end(scope)

    async def _one(self, message: Message) -> None:
        if self._recorder is None:
            await super()._one(message)
            return
        scope = self._scopes.pop(id(message))
        current.set(scope)  # of this task
        try:
            await super()._one(message)
        finally:
            self._recorder.end(scope)


# ---- what the actor does itself


def describe_message(runtime: Runtime, kind: int, target: int, prefix: bytes) -> str:
    """Return the name of a message that an actor sends: "mesh.endpoint", or "a port"."""
    if kind != Kind.CALL:
        return "a port"
    core = runtime.actors.get(target)
    return f"{'?' if core is None else core.name}.{read_prefix(prefix)[0].method}"


def sent_record(scope: Scope, what: str, ref: int, body: Any, buffers: Any) -> Sent:
    """Return the record of a message that is being sent."""
    place, size = scope.next_place(), size_of(body, buffers)
    data = own(body)
    checksum = zlib.crc32(data)
    for buffer in buffers or ():
        checksum = zlib.crc32(buffer, checksum)
    is_short = size <= MAX_ARGUMENT_BYTES and not buffers
    return Sent(scope.message, place, ref, what, size, checksum, data if is_short else None)


def random_states() -> bytes:
    """Return the states of the generators of Python, NumPy and torch (CPU), as far as they are imported."""
    random, numpy, torch = (sys.modules.get(name) for name in ("random", "numpy.random", "torch"))
    states = (
        None if random is None else random.getstate(),
        None if numpy is None else numpy.get_state(),
        None if torch is None else bytes(torch.get_rng_state().numpy()),
    )
    return pickle.dumps(states)


class _Ports(weakref.WeakValueDictionary[int, PortReceiver[Any]]):
    """Ports of a runtime, which are recorded when they are opened."""

    def __init__(self, hooks: _Hooks) -> None:
        super().__init__()
        self._hooks = hooks

    def __setitem__(self, number: int, receiver: PortReceiver[Any]) -> None:
        super().__setitem__(number, receiver)
        self._hooks.opened(number, receiver)


class _Hooks:
    """Functions of a runtime that record what actors send, receive and spawn."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._calls: dict[int, Known] = {}  # by number
        self._ports: dict[int, Known] = {}
        router = runtime.router
        self._send, self._multicast, self._push = router.send, router.multicast, router.push
        self._replied, self._ported = router.handlers[Kind.REPLY], router.handlers[Kind.PORT]
        self._wait, self._withdraw, self._lost = runtime.wait, runtime.withdraw, runtime.on_process_lost
        self._spawn_procs, self._spawn_actors = runtime.spawn_procs, runtime.spawn_actors

    def install(self) -> None:
        runtime, router = self._runtime, self._runtime.router
        router.send, router.multicast, router.push = self.send, self.multicast, self.push  # type: ignore[method-assign]
        router.handlers.update({Kind.REPLY: self.replied, Kind.PORT: self.ported})
        runtime.wait = self.wait
        runtime.withdraw, runtime.on_process_lost = self.withdraw, self.lost  # type: ignore[method-assign]
        runtime.spawn_procs, runtime.spawn_actors = self.spawn_procs, self.spawn_actors  # type: ignore[method-assign]
        runtime.ports = _Ports(self)
        runtime.local_actors.runner_classes = RecordedRunner, RecordedAsyncRunner

    # ---- sending

    def _note(self, kind: int, target: int, ref: int, prefix: bytes, body: Any, buffers: Any) -> Scope | None:
        scope = _recorded_scope()
        if scope is None:
            return None
        record = sent_record(scope, describe_message(self._runtime, kind, target, prefix), ref, body, buffers)
        if ref:  # before it is sent: the reply may arrive at once
            self._calls[ref] = scope.owner, scope.message, record.place
        scope.owner.write(record)
        return scope

    def send(
        self, peer: Peer, kind: int, target: int, ref: int, rank: int, prefix: bytes, body: Any, buffers: Any = None
    ) -> None:
        scope = self._note(kind, target, ref, prefix, body, buffers)
        try:
            self._send(peer, kind, target, ref, rank, prefix, body, buffers)
        except PeerGoneError:
            self._calls.pop(ref, None)
            if scope is not None:
                scope.owner.write(Refused(scope.message, scope.place - 1, peer.token, peer.gone or ""))
            raise

    def multicast(
        self,
        to: Any,
        kind: int,
        target: int,
        ref: int,
        prefix: bytes,
        body: Any,
        buffers: Any = None,
        combine: bool = False,
    ) -> None:
        self._note(kind, target, ref, prefix, body, buffers)
        self._multicast(to, kind, target, ref, prefix, body, buffers, combine)

    def push(
        self, peer: Peer, kind: int, target: int, rank: int, prefix: bytes, body: Any, buffers: Any = None
    ) -> None:
        self._note(kind, target, 0, prefix, body, buffers)
        self._push(peer, kind, target, rank, prefix, body, buffers)

    def opened(self, number: int, receiver: PortReceiver[Any]) -> None:
        scope = _recorded_scope()
        if scope is not None:
            place = scope.next_place()
            self._ports[number] = scope.owner, scope.message, place
            weakref.finalize(receiver, self._ports.pop, number, None).atexit = False
            scope.owner.write(Opened(scope.message, place, number))

    def spawn_procs(self, *args: Any, **options: Any) -> Any:
        return self._spawned("spawn_procs", self._spawn_procs(*args, **options))

    def spawn_actors(self, procs: Any, name: str, *args: Any, **options: Any) -> Any:
        return self._spawned(f"spawn({name!r})", self._spawn_actors(procs, name, *args, **options))

    def _spawned(self, what: str, mesh: Any) -> Any:
        scope = _recorded_scope()
        if scope is not None:
            body = dumps_in_band(mesh)
            scope.owner.write(Spawned(scope.message, scope.next_place(), what, body), body)
        return mesh

    # ---- receiving

    def replied(self, peer: Peer, frame: Frame, via: Any) -> None:
        known = self._calls.get(frame.ref)
        if known is None:
            self._replied(peer, frame, via)
        else:
            known[0].arrive(lambda: self._handle_reply(known, peer, frame, via))

    def _handle_reply(self, known: Known, peer: Peer, frame: Frame, via: Any) -> None:
        pending = self._runtime.pending
        if frame.ref in pending:
            self._arrived(known, frame)
        self._replied(peer, frame, via)
        if frame.ref not in pending:
            self._calls.pop(frame.ref, None)

    def ported(self, peer: Peer, frame: Frame, via: Any) -> None:
        known = self._ports.get(frame.target)
        if known is None:
            self._ported(peer, frame, via)
        else:
            known[0].arrive(lambda: self._handle_value(known, peer, frame, via))

    def _handle_value(self, known: Known, peer: Peer, frame: Frame, via: Any) -> None:
        if frame.target in self._runtime.ports:
            self._arrived(known, frame)
        else:
            self._ports.pop(frame.target, None)
        self._ported(peer, frame, via)

    def _arrived(self, known: Known, frame: Frame) -> None:
        recorder, message, place = known
        if not recorder.is_recording:
            return
        body, buffers = plain(frame.body, frame.buffers)
        record = Arrived(
            message, place, recorder.now(), frame.rank, frame.prefix, body, buffers, recorder.position
        )  # fmt: skip
        recorder.write(record, body, buffers)

    def wait(self, what: Any, seconds: float | None = None) -> bool:
        scope = current.get()
        if scope is None:
            return self._wait(what, seconds)
        with scope.owner.waiting():
            done = self._wait(what, seconds)
        if not done and seconds is not None and isinstance(what, Future):
            _, message, place = self._known(what) or (None, scope.message, -1)
            scope.owner.write(TimedOut(message, place, scope.owner.now()))
        return done

    def _known(self, what: Any) -> Known | None:
        number = number_of(what)
        return self._calls.get(number) or self._ports.get(number)

    def withdraw(self, core: Any, ref: int, peers: Any, reason: str) -> None:
        known = self._calls.pop(ref, None)
        if known is not None:
            recorder, message, place = known
            recorder.write(Expired(message, place, recorder.now(), reason))
        self._withdraw(core, ref, peers, reason)

    def lost(self, peer: Peer, failure: Any) -> None:
        for recorder in {known[0] for known in list(self._calls.values())}:
            recorder.handle_arrivals()  # replies of this process came before its end
        if failure is None:
            failure = self._runtime.references.exit_of(peer)
        for ref, (recorder, message, place) in list(self._calls.items()):
            call = self._runtime.pending.get(ref)
            if call is None:
                self._calls.pop(ref, None)
                continue
            stream = getattr(call, "stream", None)  # a weak reference
            waiting = call if stream is None else stream()
            if any(other is peer for _, other in getattr(waiting, "missing", list)()):
                recorder.write(Lost(message, place, recorder.now(), peer.token, peer.gone or "", pack_failure(failure)))
        self._lost(peer, failure)


def number_of(what: Any) -> int:
    """Return the number of the call or port that a thread waits for, 0 for other objects."""
    receiver = getattr(what, "_home", None)
    return int(getattr(what, "ref", 0) if receiver is None else receiver.number)


def install(runtime: Runtime) -> None:
    """Record the actors of this process. Call it before the runtime is used."""
    _Hooks(runtime).install()
