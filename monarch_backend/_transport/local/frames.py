"""What a frame says: its kinds, and the typed control messages, which are small and bounded.

The layout of a frame is csrc/channel/frame.h; what its prefix and body mean is said here and nowhere else. No sending.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, Any, NamedTuple

import msgspec


class Kind(IntEnum):
    """Kinds of frames. MET, GONE, REFUSED and HOST_GONE are not sent: the links report them."""

    CALL = 1  # to an actor; the prefix names the endpoint, the body has the arguments
    REPLY = 2  # to a caller; the prefix is a Status
    PORT = 3  # to a port; the prefix is a Status
    CAST = 4  # a frame for many, on its way down the tree; the prefix is a Route
    REPLIES = 5  # many replies in one, on their way up; the prefix is Replies
    CONTROL = 6  # the prefix is one of the structs below, the body what a user gave, if anything
    CREDIT = 7  # target: messages that the receiver is done with
    PART = 8  # a piece of a frame that is larger than shared memory has room for
    MET = -1
    GONE = -2
    REFUSED = -3
    HOST_GONE = -4  # precedes GONE and REFUSED of the processes of a lost host


class Status:
    """The prefix of a reply. Short, since it is compared for every reply."""

    VALUE = b""
    ERROR = b"E"  # the endpoint raised; the body is a packed exception
    DEAD = b"D"  # the actor was dead before the message was looked at; the body is a packed exception
    LOST = b"L"  # the actor died while it had the message; the body is a packed exception
    ITEM = b"I"  # a value of a generator; more follow
    END = b"."  # of a generator
    NOTHING = b"-"  # among combined replies: this one goes another way


class Frame(NamedTuple):
    """A frame as the links give it; for MET and GONE only a tuple of four (see Links.receive)."""

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
"""Bytes of a control message, what the user gave left out."""


class RelayHop(NamedTuple):
    """One receiver of a cast: its process, its place in the order of the sender's messages, its rank in the mesh."""

    token: str
    seq: int
    rank: int


TOKEN_LENGTH = 32
"""Characters of a token."""


class Route(msgspec.Struct, array_like=True, gc=False):
    """Who gets a cast: the receivers in the order of the tree. Each finds its own place in the frame's rank.

    One string and two lists, because every receiver reads all of it and needs a few of them.
    """

    cast: int
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

    def hop(self, index: int) -> RelayHop:
        """The receiver at this place."""
        return RelayHop(
            self.tokens[TOKEN_LENGTH * index : TOKEN_LENGTH * (index + 1)], self.seqs[index], self.ranks[index]
        )


class Part(msgspec.Struct, array_like=True, gc=False):
    """One reply among many: whose, of which status, and how many bytes of the body and how many buffers are its own."""

    rank: int
    status: bytes
    body: Annotated[int, msgspec.Meta(ge=0)]
    buffers: Annotated[int, msgspec.Meta(ge=0)]


class Replies(msgspec.Struct, array_like=True, gc=False):
    """The prefix of combined replies: numbers of casts are their root's own."""

    root: str
    parts: list[Part]
    missing: int = 0  # how many more will not come this way: of processes below a lost one


class CastArrived(msgspec.Struct, tag="arrived", array_like=True, gc=False):
    """To the root of a cast: these processes have it."""

    cast: int
    tokens: list[str]


class CastLost(msgspec.Struct, tag="lost", array_like=True, gc=False):
    """To the root of a cast: what was below this process may not have it."""

    cast: int
    tokens: list[str]


class LookupRequest(msgspec.Struct, tag="where", array_like=True, gc=False):
    """To an owner: can the process with this token be reached by now?"""

    token: str


class LookupReply(msgspec.Struct, tag="there", array_like=True, gc=False):
    """The answer to Where: it is up, or how it ended."""

    token: str
    gone: str | None


class Cancel(msgspec.Struct, tag="cancel", array_like=True, gc=False):
    """To an actor: its caller no longer wants this call."""

    actor: int
    ref: int
    reason: str


class MoreCredit(msgspec.Struct, tag="more", array_like=True, gc=False):
    """To an actor: its caller has taken this many values of the generator."""

    actor: int
    ref: int
    count: int


class Construct(msgspec.Struct, tag="construct", array_like=True, gc=False):
    """To a process: build an actor; the body has the class, its arguments and the mesh of processes."""

    actor: int
    name: str
    rank: int
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    owner: int  # the actor that spawns it, 0 for a program
    creator: str  # its name
    generation: int = 0
    restarts: bool = False  # after a death another Construct may come
    is_async: bool = False


class Constructed(msgspec.Struct, tag="constructed", array_like=True, gc=False):
    """To the owner: this rank of an actor mesh is up."""

    actor: int
    rank: int
    generation: int = 0


class Stop(msgspec.Struct, tag="stop", array_like=True, gc=False):
    """To a process: stop an actor, or with actor 0 itself; `how` is stop, abort, restart or kill."""

    actor: int
    how: str
    reason: str


class Stopped(msgspec.Struct, tag="stopped", array_like=True, gc=False):
    """To the owner: this rank of an actor mesh has ended and cleaned up, whether it was told to or has failed."""

    actor: int
    rank: int
    generation: int = 0


class Failed(msgspec.Struct, tag="failed", array_like=True, gc=False):
    """To the owner: this rank of an actor mesh is dead; the body is a packed exception."""

    actor: int
    rank: int
    generation: int = 0


MAX_REPLACED_RANKS = 8192
"""Ranks that one Replaced tells of, well within MOST_CONTROL."""


class Replaced(msgspec.Struct, tag="replaced", array_like=True, gc=False):
    """To everybody: these ranks of a mesh of processes have successors, which have these tokens."""

    mesh: str
    ranks: list[int]
    tokens: list[str]


KNOCK = "knock"
"""The name of a Setting that sets nothing: who has not read it stands still."""

REPORT_BUSY = "report_busy"
"""The name of a Setting that has actors which are to end log where they are busy."""


class Setting(msgspec.Struct, tag="setting", array_like=True, gc=False):
    """To a process: something about itself, such as its level of logging. KNOCK is only to be read."""

    name: str
    value: Any


class Agent(msgspec.Struct, tag="agent", array_like=True, gc=False):
    """Between a controller and its agents on hosts: the body is one of _hosts/protocol.py."""


Control = (
    CastArrived
    | CastLost
    | LookupRequest
    | LookupReply
    | Cancel
    | MoreCredit
    | Construct
    | Constructed
    | Stop
    | Stopped
    | Failed
    | Replaced
    | Setting
    | Agent
)

_encoder = msgspec.msgpack.Encoder()
_control = msgspec.msgpack.Decoder(Control)
_route = msgspec.msgpack.Decoder(Route)
_replies = msgspec.msgpack.Decoder(Replies)


class FrameError(ValueError):
    """Bytes of another process that are not what they should be."""


def encode(message: Any) -> bytes:
    """The bytes of a struct of this module. Raises FrameError for one that is larger than MOST_CONTROL."""
    data = _encoder.encode(message)
    if len(data) > MAX_CONTROL_BYTES:
        raise FrameError(
            f"a control message of {len(data)} bytes ({type(message).__name__}): the limit is {MAX_CONTROL_BYTES}"
        )
    return data


def decode(decoder: Any, data: bytes, what: str = "a control message") -> Any:
    """What stands in bytes of another process; FrameError for anything else, and for more than MOST_CONTROL."""
    if len(data) > MAX_CONTROL_BYTES:
        raise FrameError(f"{what} of {len(data)} bytes: the limit is {MAX_CONTROL_BYTES}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # the last two are no DecodeErrors
        raise FrameError(f"not {what}: {error}") from error


def decode_control(data: bytes) -> Control:
    """The control message; FrameError for anything else."""
    message: Control = decode(_control, data)
    return message


def decode_route(data: bytes) -> Route:
    """The route of a cast; FrameError for anything else, and for one without receivers."""
    route: Route = decode(_route, data)
    if not route.seqs or len(route.tokens) != TOKEN_LENGTH * len(route.seqs) or len(route.ranks) != len(route.seqs):
        raise FrameError("a cast whose receivers do not add up")
    return route


def decode_replies(data: bytes) -> Replies:
    """The table of combined replies; FrameError for anything else."""
    replies: Replies = decode(_replies, data)
    return replies
