"""The caller's side of endpoints: `Endpoint` and its ways of sending. The actor's side is execution/runner.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from sys import _getframe
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from monarch_backend._actor.actor import EndpointSpec, specify
from monarch_backend._actor.calls.codec import prefix_of, supervision_error, with_trace
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.pending_calls import (
    BroadcastCall,
    DerivedFuture,
    Stream,
    StreamCollector,
    UnaryCall,
    _error_of,
    asked_of,
    loading,
)
from monarch_backend._actor.calls.unread_errors import CallSite
from monarch_backend._actor.calls.wait_notice import expire_late
from monarch_backend._actor.current_runtime import program
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._mesh.value_mesh import ValueMesh
from monarch_backend._serialization.pickling import dumps
from monarch_backend._telemetry import kinds, recorder, trace_context
from monarch_backend._telemetry.recorder import record_event
from monarch_backend._telemetry.spans import current_span
from monarch_backend._transport.local.frames import Kind
from monarch_backend._transport.local.peer import PeerGoneError

if TYPE_CHECKING:
    from monarch_backend._actor.calls.port import Port
    from monarch_backend._actor.meshes.actor_mesh import ActorMesh

R = TypeVar("R")
A = TypeVar("A")

_call = int(Kind.CALL)
_SENT = int(kinds.Kind.SENT)
_remote_parent = trace_context.remote.get


class Endpoint(Generic[R]):
    """An endpoint of the actors of a mesh or slice: the attribute ``mesh.method``.

    `call_one`, `choose` and `call` return one `Future`; `stream` returns a `Stream`; `broadcast` has no reply. Every
    argument is serialized, also for an actor in this process, so that caller and actor share no objects.

    All of them raise TypeError if the arguments do not fit the method's signature, and SerializationError if one of
    them cannot be pickled. They block while the queue of a receiver is full. The future raises:

    - `ActorError` if the endpoint raised,
    - `SupervisionError` if the actor or its process has ended,
    - `CancelledError` after `Future.cancel`,
    - TimeoutError if ``options(timeout=...)`` has set a limit.

    >>> from monarch_backend.actor import Actor, endpoint, this_proc
    >>> class Echo(Actor):
    ...     @endpoint
    ...     def say(self, text):
    ...         return text
    >>> mesh = this_proc().spawn("echo", Echo)
    >>> mesh.say.call_one("hello").get()
    'hello'
    >>> list(mesh.say.options(timeout=30.0).call("hello").get().values())
    ['hello']
    >>> mesh.say.broadcast("hello")
    """

    def __init__(self, mesh: ActorMesh, spec: EndpointSpec, plain: int = 0) -> None:
        self._mesh, self._spec, self._plain = mesh, spec, plain
        self._core = mesh._core
        self._ranks: Sequence[int] = mesh._shape.ranks
        self._one = self._ranks[0] if len(self._ranks) == 1 else -1
        self._program = program()
        self._prefix = prefix_of(spec.name, mesh.extent, None, plain)
        self._check = spec.check
        self._timeout: float | None = None
        self._turn = 0
        self._names = recorder.name_number(self._core.name), recorder.name_number(spec.name)
        self._mesh_name, self._method_name = self._names

    @property
    def name(self) -> str:
        """The method's name."""
        return self._spec.name

    def options(self, timeout: float | None = None) -> Endpoint[R]:
        """Return the same endpoint with a limit of ``timeout`` seconds for each call.

        A call that takes longer is cancelled, also at the actor, and its future raises TimeoutError. None sets no
        limit.

        Raises ValueError for 0, a negative number or NaN. Raises TypeError for a value that is neither a number of
        seconds nor a timedelta.
        """
        timeout = check_timeout(timeout, zero=False)
        other: Endpoint[R] = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _timeout=timeout)
        return other

    def __reduce__(self) -> Any:
        if self._plain:
            raise TypeError(f"as_endpoint({self.name!r}) cannot be sent: send the mesh, and call as_endpoint there")
        return _endpoint_of, (self._mesh, self.name, self._timeout)

    # ---- ways of sending

    def call_one(self, *args: Any, **kwargs: Any) -> Any:
        """Call the only actor of this mesh. Return a `Future` of its result, or a `Stream` for a generator method.

        Raises ValueError if the mesh or slice has several ranks.
        """
        rank = self._one
        if rank < 0:
            raise ValueError(
                f"call_one is for a mesh of one rank, and {self._core.name!r} ({self._mesh.extent}) has "
                f"{len(self._ranks)}: slice it, or use call, choose or broadcast"
            )
        return self._send_one(rank, args, kwargs)

    def choose(self, *args: Any, **kwargs: Any) -> Any:
        """Call one actor: one with the fewest pending `choose` calls of this process. Ranks known to be dead are
        avoided.

        Return a `Future` of its result, or a `Stream` for a generator method.
        """
        load, core, count = self._core.load, self._core, len(self._ranks)
        self._turn = (self._turn + 1) % count
        best, least = -1, None
        for step in range(count):
            rank = self._ranks[(self._turn + step) % count]
            if (least is None or load[rank] < least) and core.failure_of(rank) is None and core.peer(rank).gone is None:
                best, least = rank, load[rank]
        chosen = best if best >= 0 else self._ranks[0]
        return self._send_one(chosen, args, kwargs, self._ranks.index(chosen), counted=True)

    def call(self, *args: Any, **kwargs: Any) -> Future[ValueMesh[Any]]:
        """Call all actors. Return a `Future` of the `ValueMesh` of their results, or of lists for a generator method.

        The future raises the first error as soon as it arrives.
        """
        if self._spec.is_generator:
            collector: StreamCollector[Any] = self._stream(tuple(self._ranks), args, kwargs, True, StreamCollector)
            return collector.whole
        body, buffers = self._arguments(args, kwargs)
        program, core = self._program, self._core
        ref = next(program.ids)
        peers = [core.peer(rank) for rank in self._ranks]
        call: BroadcastCall[Any] = BroadcastCall(
            program, core, self._mesh.extent, tuple(self._ranks), peers, self.name, ref, _call_site()
        )
        self._multicast(call, ref, peers, body, buffers, combine=True)
        return call

    def stream(self, *args: Any, **kwargs: Any) -> Stream[Any]:
        """Call all actors. Return a `Stream` of Futures, one for each reply or yielded value, as they arrive."""
        stream: Stream[Any] = self._stream(tuple(self._ranks), args, kwargs, futures=True)
        return stream

    def broadcast(self, *args: Any, **kwargs: Any) -> None:
        """Send to all actors, without a reply. An exception in the endpoint ends the actor.

        Raises SupervisionError, and sends nothing, if one of the ranks is known to be dead.
        """
        self._broadcast(self._prefix, args, kwargs)

    def push(self, *args: Any, **kwargs: Any) -> None:
        """Send to all actors as `broadcast` does, but never block on a full queue.

        For messages that must precede the message to stop. Raises SupervisionError as `broadcast` does.
        """
        body, buffers = self._arguments(args, kwargs)
        self._refuse_dead(range(len(self._ranks)))
        for place, rank in enumerate(self._ranks):
            self._program.router.push(
                self._core.peer(rank), _call, self._core.actor, place, self._prefix, body, buffers
            )

    def has_room(self) -> bool:
        """Return True if `broadcast` would not block on a full queue."""
        return all(self._program.router.has_room(self._core.peer(rank)) for rank in self._ranks)

    def send(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        port: Any = None,
        selection: str = "all",
    ) -> None:
        """Send to "all" actors, or to one of them in turn with ``selection="choose"``. Each reply goes to ``port``.

        Without ``port`` there is no reply. Raises ValueError for another selection, and SupervisionError as `broadcast`
        does.
        """
        if selection not in ("all", "choose"):
            raise ValueError(f"selection={selection!r}: it must be 'all' or 'choose'")
        only = None
        if selection == "choose":
            only = self._turn % len(self._ranks)
            self._turn += 1
        reply_to = None if port is None else port.address
        self._broadcast(prefix_of(self.name, self._mesh.extent, reply_to, self._plain), args, dict(kwargs or {}), only)

    # ---- implementation

    def _arguments(self, args: Any, kwargs: Any) -> Any:
        if self._check is not None:
            self._check(*args, **kwargs)
        return dumps((args, kwargs))

    def _send_one(self, rank: int, args: Any, kwargs: Any, at: int = 0, counted: bool = False) -> Any:
        """Call one rank of the whole mesh. ``at`` is its place in the mesh or slice that is called."""
        if self._spec.is_generator:
            return self._stream((rank,), args, kwargs, futures=False, first=at)
        if self._check is not None:
            self._check(*args, **kwargs)
        body, buffers = dumps((args, kwargs))
        program, core = self._program, self._core
        ref = next(program.ids)
        base = core.bases[rank]
        peer = core.procs.known[base] or core.procs.peer(base)
        caller = _getframe(2)  # of call_one or choose
        site = caller.f_code, caller.f_lasti
        call: UnaryCall[R] = UnaryCall(program, core, rank, peer, self._spec.name, ref, site)
        if counted:
            with loading:
                core.load[rank] += 1
            call.load = core.load
        if core.dead or core.stopped:
            failure = core.failure_of(rank)
            if failure is not None:
                call._fail(supervision_error(failure, self._label(), "not sent"))
                return call
        program.pending[ref] = call
        prefix = self._prefix if not _remote_parent()[0] else _traced(self._prefix)
        try:
            program.router.send(peer, _call, core.actor, ref, at, prefix, body, buffers)
            record_event(_SENT, 0, self._mesh_name, self._method_name, 0, ref, len(body), current_span())
        except PeerGoneError:
            program.pending.pop(ref, None)
            call._fail(supervision_error(program.failure_of(core, rank), self._label(), "not sent"))
        except BaseException:
            program.pending.pop(ref, None)
            call.ignore()._fail(RuntimeError("not sent"))
            raise
        if self._timeout is not None:
            self._limit(call)
        return call

    def _multicast(self, call: Any, ref: int, peers: list[Any], body: Any, buffers: Any, combine: bool) -> None:
        program, core = self._program, self._core
        for rank in self._ranks:
            failure = core.failure_of(rank) or (
                program.failure_of(core, rank) if core.peer(rank).gone is not None else None
            )
            if failure is not None:
                call._fail(supervision_error(failure, self._label(), "not sent"))
                return
        program.pending[ref] = call
        prefix = _traced(self._prefix)
        try:
            pairs = [(peer, i) for i, peer in enumerate(peers)]
            program.router.multicast(pairs, _call, core.actor, ref, prefix, body, buffers, combine)
            record_event(_SENT, 0, *self._names, 0, ref, len(body), current_span())
        except BaseException:
            program.pending.pop(ref, None)
            raise
        for i, peer in enumerate(peers):
            if peer.gone is not None and not call.ready:
                call.on_gone(peer, program.failure_of(core, self._ranks[i]))
        if self._timeout is not None:
            self._limit(call)

    def _stream(
        self,
        ranks: tuple[int, ...],
        args: Any,
        kwargs: Any,
        futures: bool,
        kind: type[Stream[Any]] = Stream,
        first: int = 0,
    ) -> Any:
        body, buffers = self._arguments(args, kwargs)
        program, core = self._program, self._core
        ref = next(program.ids)
        peers = [core.peer(rank) for rank in ranks]
        stream = kind(
            program, core, ranks, peers, self.name, ref, futures=futures, generator=self._spec.is_generator,
            first=first, site=_call_site(),
        )  # fmt: skip
        if isinstance(stream, StreamCollector):
            stream.start(self._mesh.extent)
        program.pending[ref] = stream.pending()
        for i, rank in enumerate(ranks):
            failure = core.failure_of(rank) or (program.failure_of(core, rank) if peers[i].gone is not None else None)
            if failure is not None:
                stream.refuse(i, supervision_error(failure, self._label(), "not sent"))
        going = [(peer, first + i) for i, peer in enumerate(peers) if i in stream._open]
        try:
            program.router.multicast(going, _call, core.actor, ref, _traced(self._prefix), body, buffers)
        except BaseException:
            stream._close("its call could not be sent to all actors")
            raise
        record_event(_SENT, 0, *self._names, 0, ref, len(body), current_span())
        for peer, i in going:
            if peer.gone is not None:
                stream.on_gone(peer, program.failure_of(core, ranks[i - first]))
        if self._timeout is not None:
            self._limit(stream)
        return stream

    def _broadcast(self, prefix: bytes, args: Any, kwargs: Any, only: int | None = None) -> None:
        body, buffers = self._arguments(args, kwargs)
        program, core = self._program, self._core
        places = range(len(self._ranks)) if only is None else [only]
        self._refuse_dead(places)
        pairs = [(core.peer(self._ranks[place]), place) for place in places]
        program.router.multicast(pairs, _call, core.actor, 0, _traced(prefix), body, buffers)
        record_event(_SENT, 0, *self._names, 0, 0, len(body), current_span())

    def _refuse_dead(self, places: Sequence[int]) -> None:
        program, core = self._program, self._core
        for rank in (self._ranks[place] for place in places):
            failure = core.failure_of(rank) or (
                program.failure_of(core, rank) if core.peer(rank).gone is not None else None
            )
            if failure is not None:
                raise supervision_error(failure, self._label(), "not sent")

    def _limit(self, call: Any) -> None:
        seconds = self._timeout

        def late() -> None:
            waiting = program.pending.pop(ref, None)
            if waiting is not None:
                text = f"{self._label()} took longer than {seconds} s; it was cancelled at the actor"
                expire_late(program, waiting, seconds or 0.0, text)

        program, ref = self._program, call.ref
        timer = program.progress.later(seconds or 0.0, late)
        if isinstance(call, Future):
            call.add_done_callback(lambda _: timer.cancel())
        if isinstance(call, (UnaryCall, BroadcastCall, Stream)):
            call.has_limit = True

    def _label(self) -> str:
        return f"{self._core.name}.{self.name}"

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(
            f"{self._label()} is an endpoint of a mesh: choose a way to send, mesh.{self.name}.call(...), "
            ".call_one(...), .choose(...), .stream(...) or .broadcast(...)"
        )

    def __repr__(self) -> str:
        return f"<Endpoint {self._label()} of {self._mesh.extent}>"


def _traced(prefix: bytes) -> bytes:
    """Return the prefix with the present span, if the call is within `remote_parent`."""
    if not _remote_parent()[0]:
        return prefix
    from monarch_backend._telemetry.present_context import traceparent  # its imports are slow

    return with_trace(prefix, traceparent() or "")


def _call_site() -> CallSite:
    """Return the place of the innermost caller outside of this module."""
    frame = _getframe(1)
    while frame.f_globals is _here and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


_here = globals()


def _endpoint_of(mesh: Any, name: str, timeout: float | None) -> Any:
    return getattr(mesh, name).options(timeout)


class NonEndpointMethod:
    """A method of the actors that is not an endpoint: an argument of `as_endpoint` only."""

    def __init__(self, mesh: ActorMesh, name: str) -> None:
        self._mesh, self._name = mesh, name

    def __getattr__(self, verb: str) -> Any:
        return self._mesh._core.blueprint.spec(self._name)  # raises, with advice in its text

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        self._mesh._core.blueprint.spec(self._name)


def as_endpoint(method: Any, *, explicit_response_port: bool = False) -> Endpoint[Any]:
    """Return an undecorated method of the actors as an `Endpoint`: ``as_endpoint(mesh.method)``.

    Raises TypeError if the argument is not a method of a mesh, or is ``async def`` while the class's endpoints are not.

    >>> from monarch_backend.actor import Actor, as_endpoint, this_proc
    >>> class Echo(Actor):
    ...     def say(self, text):
    ...         return text
    >>> mesh = this_proc().spawn("echo", Echo)
    >>> as_endpoint(mesh.say).call_one("hello").get()
    'hello'
    """
    if isinstance(method, Endpoint):
        return method
    if not isinstance(method, NonEndpointMethod):
        raise TypeError(f"as_endpoint takes mesh.method, not {method!r}")
    function = getattr(method._mesh._core.blueprint.cls, method._name)
    spec = specify(method._name, function, False, explicit_response_port)
    if spec.is_async and not method._mesh._core.blueprint.is_async:
        raise TypeError(
            f"{method._name} is `async def`, and the endpoints of {method._mesh._core.blueprint.cls.__name__} are not: "
            "all endpoints of an actor must be of one kind"
        )
    return Endpoint(method._mesh, spec, plain=2 if explicit_response_port else 1)


def send(
    endpoint: Endpoint[Any], args: Any = (), kwargs: Any = None, port: Port[Any] | None = None, selection: str = "all"
) -> None:
    """Send to an endpoint as `Endpoint.send` does, whose errors it raises.

    >>> from monarch_backend.actor import Actor, Channel, endpoint, send, this_proc
    >>> class Echo(Actor):
    ...     @endpoint
    ...     def say(self, text):
    ...         return text
    >>> mesh = this_proc().spawn("echo", Echo)
    >>> port, receiver = Channel.open()
    >>> send(mesh.say, ("hello",), port=port)
    >>> receiver.recv().get()
    'hello'
    """
    endpoint.send(args, kwargs, port, selection)


class Accumulator(Generic[A]):
    """Fold of the replies of all ranks, in order of rank: ``combine(combine(identity, reply 0), reply 1)``, and so on.

    The order is fixed, so that sums of floats have the same bits every time.

    >>> from monarch_backend.actor import Accumulator, Actor, endpoint, this_proc
    >>> class Loss(Actor):
    ...     @endpoint
    ...     def value(self, scale):
    ...         return 2 * scale
    >>> mesh = this_proc().spawn("loss", Loss)
    >>> Accumulator(mesh.value, 1, lambda total, loss: total + loss).accumulate(10).get()
    21
    """

    def __init__(self, endpoint: Endpoint[Any], identity: A, combine: Callable[[A, Any], A]) -> None:
        self._endpoint, self._identity, self._combine = endpoint, identity, combine

    def accumulate(self, *args: Any, **kwargs: Any) -> Future[A]:
        """Call all ranks. Return a `Future` of the fold of their replies.

        The future raises the first error of a rank, or the error of ``combine``. Arguments are checked as by
        `Endpoint.call`.
        """
        replies = self._endpoint.call(*args, **kwargs)
        future: Future[A] = DerivedFuture(self._endpoint._program.wait, replies.cancel, asked_of(replies))

        def fold() -> A:
            value = self._identity
            for reply in replies.result().values():
                value = self._combine(value, reply)
            return value

        def settle(_: Any) -> None:
            unread = getattr(replies, "_unread", None)
            if unread is None:
                future.set_lazy_result(fold)
            else:
                future.set_lazy_exception(partial(_error_of, replies), unread)

        replies.add_done_callback(settle)
        return future
