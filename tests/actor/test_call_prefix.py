"""The prefix of a call, which names the endpoint: it round-trips, or decoding raises FrameError."""

from __future__ import annotations

import msgspec
import pytest

from monarch_backend._actor.calls.codec import prefix_of, read_prefix
from monarch_backend._mesh.extent import Extent
from monarch_backend._transport.local.frames import FrameError


def test_call_prefix_round_trips() -> None:
    extent = Extent(("gpus",), (2,))
    called, where = read_prefix(prefix_of("method", extent))
    assert (called.method, where) == ("method", extent)


WRONG = [
    b"",
    b"\x95\xa3\xff\xfe\xfd\x90\x90\xc0\x00",  # not UTF-8
    # nested deeper than the stack, in an element that the decoder skips
    b"\x96\xa1m\x90\x90\xc0\x00" + b"\x91" * 200_000,
    *map(
        msgspec.msgpack.encode,
        (["m", ["gpus"], [-1], None, 0], ["m", ["a", "a"], [1, 1], None, 0], ["m", ["a"], [], None, 0], ["m", "a", 1]),
    ),
]


@pytest.mark.parametrize("prefix", WRONG, ids=range(len(WRONG)))
def test_damaged_call_prefix_raises_frame_error(prefix: bytes) -> None:
    with pytest.raises(FrameError, match="not the prefix of a call"):
        read_prefix(prefix)
