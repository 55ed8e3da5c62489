"""Frame formats: kinds of frames, payloads, and the typed control messages, which are small and bounded.

csrc/channel/frame.h defines the layout of a frame. This module defines the meaning of its prefix and body.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec


class Kind(IntEnum):
    """Kinds of frames. MET, GONE, REFUSED and HOST_GONE are not sent: the links report them."""

    CALL = 1  # to an actor; the prefix names the endpoint, the body has the arguments
    REPLY = 2  # to a caller; the prefix is a Status
    PORT = 3  # to a port; the prefix is a Status
    MULTICAST = 4  # a multicast frame on its way down the tree; the prefix is a Route
    REPLIES = 5  # aggregated replies on their way up the tree; the prefix is Replies
    CONTROL = 6  # the prefix is one of the structs below; the body has the user's data, if any
    CREDIT = 7  # target: the returned credits
    PART = 8  # a piece of a frame that is larger than the space in shared memory
    MET = -1
    GONE = -2
    REFUSED = -3
    HOST_GONE = -4  # precedes GONE and REFUSED of the processes of a lost host


CARRIED = 0x40
"""Flag in a kind: the frame is for, or from, a process on another host. Gateways use all kinds from this one on."""


class Status:
    """Prefix of a reply. It is short because it is compared for every reply."""

    VALUE = b""
    ERROR = b"E"  # the endpoint raised; the body is a packed exception
    DEAD = b"D"  # the actor died before it read the message; the body is a packed exception
    LOST = b"L"  # the actor died while it handled the message; the body is a packed exception
    ITEM = b"I"  # a value of a generator; more follow
    END = b"."  # the end of a generator
    NOTHING = b"-"  # in aggregated replies: this reply is sent separately


class Frame(NamedTuple):
    """Frame as links deliver it. Events of a negative kind are shorter tuples."""

    link: int
    kind: int
    target: int
    ref: int
    seq: int
    rank: int
    epoch: int
    prefix: bytes
    body: Any
    buffers: list[Any] | None


MAX_CONTROL_BYTES = 1 << 20
"""Bytes of a control message without its body, which is the user's data."""


TOKEN_LENGTH = 32
"""Characters of a token."""


class Route(msgspec.Struct, array_like=True, gc=False):
    """Receivers of a multicast, in the order of the tree. The frame's rank is the receiver's place in it.

    ``seqs`` and ``ranks`` are the message's sequence numbers and the ranks in the mesh. The tokens are one string:
    every receiver decodes the whole route and needs only a few entries.
    """

    multicast: int
    root: str
    kind: int
    target: int
    ref: int
    combine: bool
    prefix: bytes
    tokens: str
    seqs: list[int]
    ranks: list[int]

    def __len__(self) -> int:
        return len(self.seqs)

    def token(self, index: int) -> str:
        return self.tokens[TOKEN_LENGTH * index : TOKEN_LENGTH * (index + 1)]


class Part(msgspec.Struct, array_like=True, gc=False):
    """One of the aggregated replies: its rank and status, and its bytes of the common body and number of buffers."""

    rank: int
    status: bytes
    body: Annotated[int, msgspec.Meta(ge=0)]
    buffers: Annotated[int, msgspec.Meta(ge=0)]


class Replies(msgspec.Struct, array_like=True, gc=False):
    """Prefix of aggregated replies. Each root numbers its own multicasts."""

    root: str
    parts: list[Part]
    missing: int = 0  # further replies that do not come this way


class Control(msgspec.Struct, array_like=True, gc=False):
    """Prefix of a control message, which one of the classes below defines."""


class MulticastArrived(Control, tag="arrived"):
    """To the root of a multicast: these processes have received it."""

    multicast: int
    tokens: list[str]


class MulticastLost(Control, tag="lost"):
    """To the root of a multicast: the processes below these ones may not have received it."""

    multicast: int
    tokens: list[str]


class LookupRequest(Control, tag="where"):
    """To an owner: asks whether the process with this token is up."""

    token: str


class LookupReply(Control, tag="there"):
    """The reply to `LookupRequest`: the process is up, or ``gone`` says how it ended."""

    token: str
    gone: str | None


class Cancel(Control, tag="cancel"):
    """To an actor: its caller has cancelled this call."""

    actor: int
    ref: int
    reason: str


class MoreCredit(Control, tag="more"):
    """To an actor: its caller has consumed this many values of the generator."""

    actor: int
    ref: int
    count: int


class Construct(Control, tag="construct"):
    """To a process: build an actor; the body has the class, its arguments and the mesh of processes."""

    actor: int
    name: str
    rank: int
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    creator: str  # name of the actor or program that spawns it
    generation: int = 0
    restarts: bool = False  # whether another Construct may follow after a failure
    is_async: bool = False


class Constructed(Control, tag="constructed"):
    """To the owner: this rank of an actor mesh is up."""

    actor: int
    rank: int
    generation: int = 0


class Stop(Control, tag="stop"):
    """To a process: stop an actor, or the process itself if actor is 0; `how` is stop, abort, restart or kill."""

    actor: int
    how: str
    reason: str


class Stopped(Control, tag="stopped"):
    """To the owner: this rank of an actor mesh has ended and cleaned up, after a stop or a failure."""

    actor: int
    rank: int
    generation: int = 0


class Failed(Control, tag="failed"):
    """To the owner: this rank of an actor mesh has failed; the body is a packed exception."""

    actor: int
    rank: int
    generation: int = 0


MAX_REPLACED_RANKS = 8192
"""Ranks in one Replaced message, which stays well below MAX_CONTROL_BYTES."""


class Replaced(Control, tag="replaced"):
    """To all processes that use the mesh: these ranks have been restarted, with these tokens."""

    mesh: str
    ranks: list[int]
    tokens: list[str]


PING = "ping"
"""Name of a Setting without effect. A process that has not read it does not make progress."""

REPORT_BUSY = "report_busy"
"""Name of a Setting that makes actors which should stop log where they are busy."""


class Setting(Control, tag="setting"):
    """To a process: a new value of one of its settings, such as the log level, or one of the names above."""

    name: str
    value: Any


class DeadlockStep(IntEnum):
    """Step in the detection of a deadlock (_actor/deadlocks.py)."""

    PROBE = 0
    CLAIM = 1
    RAISE = 2


class DeadlockMember(msgspec.Struct, array_like=True, gc=False):
    """An actor that waits for the reply of call number ``ref`` of its process. ``waits_for`` names the endpoint.

    It is empty for an actor that waits for credit. Then ``ref`` is a number of that wait alone. An actor
    ``in_collective`` waits for ranks of the process group ``ref``, and raises nothing.
    """

    token: str
    actor: int
    ref: int
    name: str
    rank: int
    endpoint: str
    waits_for: str
    host: str
    pid: int
    in_collective: bool = False


class Deadlock(Control, tag="deadlock"):
    """To the actor that must handle call ``ref`` of the last member, which waits for it.

    ``number`` numbers the probes of a process. In later steps it is the receiver's place in the cycle, and the members
    are all of it. In the last step ``ref`` is the place where the message has begun. ``actor`` is 0 in the probe of a
    wait for credit, as any actor of the process may hold it.

    ``received`` is the number of values that have arrived, for a call of a generator. ``counts_calls`` is for a wait
    for credit: no call of the last member's process to the receiver can be cancelled while the member waits.

    ``actor`` is -1 in the probe of a wait in a collective, for which the receiver must enter operation ``received`` of
    the process group ``ref``.
    """

    step: DeadlockStep
    number: Annotated[int, msgspec.Meta(ge=0)]
    actor: int
    ref: int
    members: Annotated[list[DeadlockMember], msgspec.Meta(min_length=1)]
    received: int = 0
    counts_calls: bool = False


class Agent(Control, tag="agent"):
    """Between a controller and its agents on hosts: the body is a message of _hosts/protocol.py."""


_encoder = msgspec.msgpack.Encoder()
_route = msgspec.msgpack.Decoder(Route)


class FrameError(ValueError):
    """Bytes from another process are not a valid frame or message."""


def encode(message: Any) -> bytes:
    """Encode a struct of this module. Raises FrameError if it is larger than MAX_CONTROL_BYTES."""
    data = _encoder.encode(message)
    if len(data) > MAX_CONTROL_BYTES:
        raise FrameError(
            f"a control message of {len(data)} bytes ({type(message).__name__}): the limit is {MAX_CONTROL_BYTES}"
        )
    return data


def decode(decoder: Any, data: bytes, what: str = "a control message") -> Any:
    """Decode bytes from another process. Raises FrameError if they are invalid or more than MAX_CONTROL_BYTES."""
    if len(data) > MAX_CONTROL_BYTES:
        raise FrameError(f"{what} of {len(data)} bytes: the limit is {MAX_CONTROL_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last two are not DecodeErrors
        raise FrameError(f"not {what}: {error}") from error


# Every class of control messages must be defined in this module, above this line.
_control = msgspec.msgpack.Decoder(functools.reduce(operator.or_, Control.__subclasses__()))
decode_control: Callable[[bytes], Control] = functools.partial(decode, _control)
decode_replies: Callable[[bytes], Replies] = functools.partial(decode, msgspec.msgpack.Decoder(Replies))


def decode_route(data: bytes) -> Route:
    """Decode the route of a multicast. Raises FrameError, also for a route without receivers."""
    route: Route = decode(_route, data)
    if not route.seqs or len(route.tokens) != TOKEN_LENGTH * len(route.seqs) or len(route.ranks) != len(route.seqs):
        raise FrameError("a multicast whose receivers do not add up")
    return route


# ---- memory of payloads


def size_of(body: Any, buffers: Any) -> int:
    """Return the bytes of a body (bytes, a view, or a list of them) and of its buffers."""
    size = len(body) if isinstance(body, (bytes, bytearray, memoryview)) else sum(len(chunk) for chunk in body)
    return size + sum(memoryview(buffer).nbytes for buffer in buffers) if buffers else size


def own(body: Any) -> Any:
    """Return the body as bytes; copies memory that the caller can still change."""
    if isinstance(body, bytes):
        return body
    return bytes(body) if isinstance(body, (bytearray, memoryview)) else b"".join(body)


def own_all(buffers: Any) -> list[bytearray] | None:
    return [bytearray(buffer) for buffer in buffers] if buffers else None
