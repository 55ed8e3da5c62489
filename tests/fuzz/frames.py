"""Fuzz target: decoding of frames of another process: control messages, routes, replies, pieces.

Only FrameError may be raised: the router disconnects a peer whose frame raises it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from monarch_backend._transport.local import frames
from monarch_backend._transport.local.fragmentation import Assembly
from monarch_backend._transport.local.frames import FrameError

MOST_ASSEMBLED = 1 << 16
"""Largest frame in bytes that this target assembles from pieces."""


def one(data: bytes) -> None:
    """Decode a frame. The first byte selects the decoder of the other bytes."""
    if data:
        try:
            _TARGETS[data[0] % len(_TARGETS)](data[1:])
        except FrameError:
            return


def _control(data: bytes) -> None:
    message = frames.decode_control(data)
    assert type(message) in frames.Control.__subclasses__()


def _route(data: bytes) -> None:
    route = frames.decode_route(data)
    tokens = [route.token(index) for index in range(len(route))]
    assert tokens and all(len(token) == frames.TOKEN_LENGTH for token in tokens)
    assert len(tokens) == len(route.seqs) == len(route.ranks)
    assert frames.decode_route(frames.encode(route)) == route


def _replies(data: bytes) -> None:
    replies = frames.decode_replies(data)
    assert all(part.body >= 0 and part.buffers >= 0 for part in replies.parts)
    assert frames.decode_replies(frames.encode(replies)) == replies


def _pieces(data: bytes) -> None:
    """Assemble a frame. ``data`` has the size of a header, the header, and pieces, each after its size."""
    head, rest = data[1 : 1 + data[0]] if data else b"", data[1 + data[0] :] if data else b""
    try:
        announced = msgspec.msgpack.decode(head)[6]
        if sum(announced) > MOST_ASSEMBLED:
            return  # large allocations are not tested here
    except Exception:
        pass
    assembly, number = Assembly(head), 0
    while rest:
        piece, rest = rest[1 : 1 + rest[0]], rest[1 + rest[0] :]
        if not assembly.add(number, piece):
            return
        number += 1
        if assembly.complete:
            frame = assembly.frame(1, 1)
            assert len(frame) == 10 and all(isinstance(part, bytearray) for part in (frame[8], *(frame[9] or ())))
            return


_VALUES: tuple[Any, ...] = (
    *(0, 1, 2, 3, -1, 127, 128, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), 0.5, 1e308),
    *(
        "",
        "t" * 32,
        "t" * 64,
        "\u00e4" * 32,
        "stop",
        "ping",
        b"",
        b"E",
        b"t" * 32,
        None,
        True,
        False,
        [],
        {},
        [1],
        [-1],
    ),
    *(
        [0, b"", 1, 0],
        [0, b"", -1, 0],
        [[0, b"E", 1, 1]],
        [1, 2],
        ["t" * 32],
        {"a": 1},
        ["gpus"],
        msgspec.msgpack.Ext(5, b"e"),
    ),
)
_TAGS = tuple(kind.__struct_config__.tag for kind in frames.Control.__subclasses__())


def _at(value: Any) -> int:
    return next(at for at, known in enumerate(_VALUES) if type(known) is type(value) and known == value)


def _shaped(data: bytes) -> None:
    """Decode well-formed MessagePack. The bytes select the decoder, the struct and each value. Random bytes are rarely
    well-formed.

    msgspec is compiled and shows the fuzzer no branches. Without this target it would refuse nearly all inputs.
    """
    if len(data) < 2:
        return
    values = [_VALUES[byte % len(_VALUES)] for byte in data[2:]]
    which = data[0] % 4
    if which == 0:
        _control(msgspec.msgpack.encode([_TAGS[data[1] % len(_TAGS)], *values]))
    elif which == 1:
        _route(msgspec.msgpack.encode(values))
    elif which == 2:
        _replies(msgspec.msgpack.encode(values))
    else:
        head = msgspec.msgpack.encode(values)
        if len(head) < 256:
            _pieces(bytes([len(head)]) + head + data[2:])


_TARGETS = (_control, _route, _replies, _pieces, _shaped)


def _seeds() -> dict[str, bytes]:
    controls = [
        frames.MulticastArrived(1, ["t" * 32]),
        frames.MulticastLost(1, ["t" * 32]),
        frames.LookupRequest("t" * 32),
        frames.LookupReply("t" * 32, None),
        frames.Cancel(1, 2, "why"),
        frames.MoreCredit(1, 2, 3),
        frames.Construct(1, "name", 0, ("gpus",), (2,), "creator"),
        frames.Constructed(1, 0),
        frames.Stop(1, "stop", "why"),
        frames.Stopped(1, 0),
        frames.Failed(1, 0),
        frames.Replaced("mesh", [0, 1], ["t" * 32, "u" * 32]),
        frames.Setting("level", {"a": [1, 2.5, None, b"b", True]}),
    ]
    seeds = {type(control).__name__.lower(): b"\0" + frames.encode(control) for control in controls}
    route = frames.Route(1, "r" * 32, 1, 2, 3, True, b"p", "t" * 64, [1, 2], [0, 1])
    replies = frames.Replies("r" * 32, [frames.Part(0, b"", 3, 1), frames.Part(1, b"E", 0, 0)], 1)
    head = frames.encode([1, 2, 3, 4, 5, b"prefix", [4, 2], 3])
    seeds["route"] = b"\1" + frames.encode(route)
    seeds["replies"] = b"\2" + frames.encode(replies)
    seeds["pieces"] = b"\3" + bytes([len(head)]) + head + b"\2ab\2cd\2ef"
    seeds["shaped-construct"] = bytes(
        [4, 0, _TAGS.index("construct"), 1, _at("stop"), 0, _at(["gpus"]), _at([1]), _at("stop")]
    )
    seeds["shaped-route"] = bytes(
        [4, 1, 0, 1, _at("t" * 32), 1, 2, 3, _at(True), _at(b""), _at("t" * 64), _at([1, 2]), _at([1, 2])]
    )
    seeds["shaped-replies"] = bytes([4, 2, 0, _at("stop"), _at([[0, b"E", 1, 1]]), 1])
    seeds["shaped-pieces"] = bytes([4, 3, 0, 1, 2, 3, 0, 1, _at(b""), _at([1]), 1])
    return seeds


SEEDS = _seeds()
