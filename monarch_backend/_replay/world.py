"""Runtime of a replay: it has no peers. What the actor sends is compared, and answered from the replay file."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import current_runtime
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.pending_calls import UnaryCall
from monarch_backend._actor.errors import CancelledError
from monarch_backend._actor.execution.runner import StreamCredit
from monarch_backend._actor.runtime import Runtime
from monarch_backend._mesh.extent import Extent
from monarch_backend._replay.comparison import equal_payload, text_of_payload
from monarch_backend._replay.recording import describe_message, number_of, sent_record
from monarch_backend._replay.replay_file import (
    Arrived,
    Expired,
    Lost,
    Opened,
    Refused,
    ReplayError,
    Sent,
    Spawned,
    TimedOut,
)
from monarch_backend._replay.scope import Scope, current
from monarch_backend._serialization.exceptions import unpack_exception
from monarch_backend._serialization.pickling import loads
from monarch_backend._transport.local.event_loop import Timer
from monarch_backend._transport.local.frames import Frame, Kind
from monarch_backend._transport.local.links import RealClock
from monarch_backend._transport.local.peer import Peer, PeerGoneError

if TYPE_CHECKING:
    from monarch_backend._replay.script import Key, Script


class FileEndsError(BaseException):
    """The actor waits for a reply, and the file ends before it arrives. User code must not catch it."""


class _NoLinks:
    """Links of a process that has no peers."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.mailbox = SimpleNamespace(set_oversubscribed=lambda _: None, kept_back=lambda: False)

    def connect(self, token: str) -> int:
        raise ReplayError(f"the replayed actor connects to process {token[8:16]}, which does not exist in a replay")

    def send(self, *_: Any) -> bool:
        raise ReplayError("the replayed actor sends a message that a replay cannot answer")

    multicast: Any = send

    def drop(self, _link: int) -> None:
        """Do nothing."""

    def unread(self, _link: int) -> int:
        return 0


class _Progress:
    """Progress loop without messages. Timers never end: the file has what limits of time have done."""

    reading = False

    def __init__(self) -> None:
        self.soon: deque[Callable[[], None]] = deque()

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        if seconds <= 0:
            self.soon.append(call)
        return Timer(call)

    def wait(self, what: Any, *_: Any) -> bool:
        raise ReplayError(f"the replayed actor waits for {what!r}, which a replay cannot answer")

    def wake(self) -> None:
        """Do nothing: no thread waits."""

    def run_calls(self) -> None:
        while self.soon:
            self.soon.popleft()()


class _Numbers:
    """Numbers of calls and ports: those in the file, so that ports have their recorded addresses."""

    def __init__(self, script: Script) -> None:
        self._script, self._others = script, itertools.count(1 << 40)

    def __next__(self) -> int:
        scope = current.get()
        if scope is not None:
            match self._script.effects.get((scope.message, scope.place)):
                case Sent(ref=number) | Opened(number=number) if number:
                    return number
        return next(self._others)


class _Ports(dict[int, Any]):
    """Ports of the runtime. Opening one is compared with the file."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def __setitem__(self, number: int, receiver: Any) -> None:
        super().__setitem__(number, receiver)
        self._world.opened(number)


class World:
    """The surroundings of one replayed actor. ``deviations`` grows while it runs."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.deviations: list[str] = []
        self.is_driven = False  # an event loop delivers replies, in the recorded order
        self.progress = _Progress()
        self._sources: dict[int, Key] = {}  # key of each call and port of the replay, by number
        self._numbers: dict[Key, int] = {}
        self.given: dict[Key, int] = {}  # events that came before their call, which is late
        header = script.header
        runtime: Any = Runtime(_NoLinks(header.token), self.progress, RealClock())
        self.runtime: Runtime = runtime
        runtime.ids = _Numbers(script)
        runtime.ports = _Ports(self)
        runtime.root = None if header.root == header.token else runtime.router.peer(header.root)
        runtime.home_rank, runtime.home_extent = header.home_rank, Extent((), ())
        runtime.wait, runtime.withdraw = self.wait, lambda *_: None
        runtime.spawn_procs = lambda *_, **__: self._spawned("spawn_procs")
        runtime.spawn_actors = lambda _procs, name, *_, **__: self._spawned(f"spawn({name!r})")
        runtime.stop_procs = runtime.stop_actors = lambda *_, **__: Future.of(None)
        runtime.ready = lambda _: Future.of(None)
        runtime.process_group = self._refuse("ProcMesh.process_group")
        runtime.profile_procs = self._refuse("ProcMesh.profile")
        runtime.exit_now = self._exit
        runtime.extensions.extend = self._refuse("registered memory, or an attached host,")
        runtime.run_in_thread = self._refuse("an operation on a thread of the package")
        router = runtime.router
        router.send, router.multicast, router.push = self.send, self.multicast, self.push
        router.tell = router.reply = router.processed = lambda *_, **__: None
        router.wake = lambda: None
        current_runtime.set_program(runtime)

    def _refuse(self, what: str) -> Callable[..., Any]:
        def refuse(*_: Any, **__: Any) -> Any:
            raise ReplayError(f"{what} is not recorded, so a replay cannot answer it")

        return refuse

    def _exit(self, reason: str) -> None:
        raise FileEndsError(f"the actor kills its process: {reason}")

    def deviates(self, text: str) -> None:
        """Note a deviation."""
        self.deviations.append(text)

    # ---- what the actor sends

    def _scope(self, what: str) -> Scope:
        scope = current.get()
        if scope is None:
            raise ReplayError(f"{what} was called by a thread that the actor has started, whose calls are not recorded")
        return scope

    def _mismatch(self, scope: Scope, what: str) -> ReplayError:
        """Return the error of a call that the file does not have, and note it as a deviation."""
        recorded = self.script.effects.get((scope.message, scope.place))
        match recorded:
            case None if (message := self.script.messages.get(scope.message)) is not None and message.ended is None:
                then = "The file ends before it"
            case None:
                then = "It did not when it was recorded"
            case Sent(what=name) | Spawned(what=name):
                then = f"When it was recorded, it called {name} here"
            case _:
                then = "When it was recorded, it opened a port here"
        text = f"message {scope.message} ({self._endpoint(scope)}) calls {what}. {then}"
        self.deviates(text)
        return ReplayError(f"{text}: there is nothing to answer it")

    def _endpoint(self, scope: Scope) -> str:
        message = self.script.messages.get(scope.message)
        return "?" if message is None else message.endpoint

    def _sends(self, kind: int, target: int, ref: int, prefix: bytes, body: Any, buffers: Any) -> None:
        what = describe_message(self.runtime, kind, target, prefix)
        scope = self._scope(what)
        recorded = self.script.effects.get((scope.message, scope.place))
        if not isinstance(recorded, Sent) or recorded.what != what:
            raise self._mismatch(scope, what)
        key = scope.message, scope.place
        now = sent_record(scope, what, ref, body, buffers)
        self._compare(scope, recorded, now)
        events = self.script.events.get(key)
        if events and isinstance(events[0], Refused):
            raise self._gone(events.popleft())
        if ref:
            self._add_source(ref, key)
            if not self.is_driven:
                self.deliver(ref)
            for _ in range(self.given.pop(key, 0)):
                self.apply(ref, self.script.events[key].popleft())

    def _compare(self, scope: Scope, recorded: Sent, now: Sent) -> None:
        if (recorded.size, recorded.checksum) == (now.size, now.checksum):
            return
        label = f"message {scope.message} ({self._endpoint(scope)}) calls {now.what}"
        if recorded.arguments is None or now.arguments is None:
            self.deviates(f"{label} with other arguments: {now.size} bytes now, {recorded.size} bytes when recorded")
        elif not equal_payload((recorded.arguments, None), (now.arguments, None)):
            before, after = text_of_payload(recorded.arguments, None), text_of_payload(now.arguments, None)
            self.deviates(f"{label} with {after} now, with {before} when recorded")

    def send(
        self, _peer: Peer, kind: int, target: int, ref: int, _rank: int, prefix: bytes, body: Any, buffers: Any = None
    ) -> None:
        self._sends(kind, target, ref, prefix, body, buffers)

    def multicast(
        self, _to: Any, kind: int, target: int, ref: int, prefix: bytes, body: Any, buffers: Any = None, *_: Any
    ) -> None:
        self._sends(kind, target, ref, prefix, body, buffers)

    def push(
        self, _peer: Peer, kind: int, target: int, _rank: int, prefix: bytes, body: Any, buffers: Any = None
    ) -> None:
        self._sends(kind, target, 0, prefix, body, buffers)

    def opened(self, number: int) -> None:
        """Compare the opening of a port."""
        scope = self._scope("Channel.open")
        if not isinstance(self.script.effects.get((scope.message, scope.place)), Opened):
            raise self._mismatch(scope, "Channel.open")
        self._add_source(number, (scope.message, scope.next_place()))

    def _spawned(self, what: str) -> Any:
        scope = self._scope(what)
        recorded = self.script.effects.get((scope.message, scope.place))
        if not isinstance(recorded, Spawned) or recorded.what != what:
            raise self._mismatch(scope, what)
        scope.next_place()
        mesh = loads(recorded.body, None)
        if what != "spawn_procs":
            mesh._core.owned = SimpleNamespace(built=Future.of(None))
        return mesh

    # ---- what it receives

    def _add_source(self, number: int, key: Key) -> None:
        self._sources[number], self._numbers[key] = key, number

    def number_at(self, key: Key) -> int | None:
        """Return the number of a call or port that the replay has made, by its recorded name."""
        return self._numbers.get(key)

    def deliver(self, number: int, *, also_limits: bool = False) -> None:
        """Deliver recorded events of a call or port, up to a wait that timed out."""
        events = self.script.events.get(self._sources[number])
        while events and (also_limits or isinstance(events[0], Arrived | Lost)):
            if isinstance(events[0], TimedOut):
                return
            self.apply(number, events.popleft())

    def apply(self, number: int, event: Any) -> None:
        """Let one event happen: a reply or value, the loss of a process, or the end of a call's limit of time."""
        call = self.runtime.pending.get(number)
        if call is not None and hasattr(call, "stream"):
            call = call.stream()
        match event:
            case Arrived():
                frame = Frame(-1, Kind.REPLY, number, number, 0, event.rank, 0, event.status, event.body, _own(event))
                if call is not None:
                    call.on_reply(frame)
                elif (receiver := self.runtime.ports.get(number)) is not None:
                    receiver._take(self.runtime.router.me, frame)
            case Lost():
                self._gone(event)
                if call is not None:  # `choose` may take another rank in a replay
                    peer = call.peer if isinstance(call, UnaryCall) else self.runtime.router.peer(event.token)
                    call.on_gone(peer, unpack_exception(event.body))
            case Expired() if call is not None:
                self.runtime.pending.pop(number, None)
                call.expire(TimeoutError(event.reason))
        if number not in self.runtime.pending and number not in self.runtime.ports:
            self._sources.pop(number, None)  # nothing more can arrive

    def _gone(self, event: Any) -> PeerGoneError:
        peer = self.runtime.router.peer(event.token)
        peer.gone = event.gone or "it has ended"
        return PeerGoneError.of(peer)

    def wait(self, what: Any, _seconds: float | None = None) -> bool:
        """Wait as `Runtime.wait` does: deliver what is recorded. Raise if nothing is left that ends the wait."""
        self.progress.run_calls()
        if isinstance(what, StreamCredit):
            what.granted = 1 << 60
            return True
        if what.ready:
            return True
        scope = current.get()
        key = self._sources.get(number_of(what)) or (-1 if scope is None else scope.message, -1)
        events = self.script.events.get(key)
        if events and isinstance(events[0], TimedOut):
            events.popleft()
            return False
        for number in itertools.chain([number_of(what)], list(self._sources)):  # a future may depend on several
            if number in self._sources:
                self.deliver(number, also_limits=True)
            self.progress.run_calls()
            if what.ready:
                return True
        raise self._endless(scope, what)

    def _endless(self, scope: Scope | None, what: Any) -> BaseException:
        endpoint = getattr(what, "endpoint", None)
        name = type(what).__name__.lstrip("_") if endpoint is None else f"{what.core.name}.{endpoint}"
        message = None if scope is None else self.script.messages.get(scope.message)
        if scope is None or message is None:
            return ReplayError(f"the actor waits for {name}, whose reply is not recorded")
        if message.ended is None:
            return FileEndsError(f"message {scope.message} waits for {name}, and the file ends here")
        if message.ended.is_cancelled:
            return CancelledError("cancelled by the caller when it was recorded")
        text = f"message {scope.message} ({message.endpoint}) waits for {name}, whose reply is not recorded"
        self.deviates(text)
        return ReplayError(text)


def _own(event: Arrived) -> list[bytearray] | None:
    return None if event.buffers is None else [bytearray(buffer) for buffer in event.buffers]
