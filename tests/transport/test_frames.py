"""Decoding of another process's frames gives their content or FrameError, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from monarch_backend._serialization.pickling import DeserializationError, loads
from monarch_backend._transport.local import frames
from monarch_backend._transport.local.fragmentation import Assembly
from monarch_backend._transport.local.frames import MAX_CONTROL_BYTES, FrameError, Part, Replies, Route, own, size_of

DECODERS = [frames.decode_control, frames.decode_route, frames.decode_replies, Assembly]


def _setting(value: bytes) -> bytes:
    return b"\x93\xa7setting\xa5level" + value


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xa3\xff\xfe\xfd",  # invalid UTF-8, for which msgspec raises no DecodeError
        b"\x93\xa7setting\xa1\xff\x01",
        b"\x98" + b"\xa3\xff\xfe\xfd" * 8,
        b"\x91" * 200_000,
        _setting(b"\x91" * 200_000 + b"\xc0"),  # nested deeper than the stack allows
        _setting(b"\x81\x91\x81\x01\x01\x01"),  # an unhashable key
        _setting(b"\xd7\xff" + b"\xff" * 8),  # a timestamp that is out of range
        bytes(MAX_CONTROL_BYTES + 1),
    ],
    ids=range(11),
)
def test_corrupt_frames_raise_only_frame_errors(decode: Any, data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data)


def test_numbers_of_bytes_are_not_negative() -> None:
    good = Replies("r" * 32, [Part(0, b"", 3, 1)])
    assert frames.decode_replies(frames.encode(good)) == good
    for part in (Part(0, b"", -1, 0), Part(0, b"", 0, -1)):
        with pytest.raises(FrameError, match=">= 0"):
            frames.decode_replies(frames.encode(Replies("r" * 32, [part])))


@pytest.mark.parametrize(
    ("tokens", "seqs", "ranks"), [("", [], []), ("t" * 32, [1, 2], [0, 1]), ("t" * 64, [1, 2], [0]), ("t", [1], [0])]
)
def test_receivers_add_up(tokens: str, seqs: list[int], ranks: list[int]) -> None:
    with pytest.raises(FrameError, match="do not add up"):
        frames.decode_route(frames.encode(Route(1, "r" * 32, 1, 2, 3, True, b"", tokens, seqs, ranks)))


def _head(sizes: list[int], count: int) -> bytes:
    return frames.encode([1, 2, 3, 4, 5, b"prefix", sizes, count])


@pytest.mark.parametrize("sizes", [[], [-1], [5, -1], [1 << 63], [(1 << 64) - 1]])
def test_pieces_of_impossible_sizes_are_refused(sizes: list[int]) -> None:
    with pytest.raises(FrameError, match="a frame in pieces"):
        Assembly(_head(sizes, 1))


def test_frame_larger_than_memory_is_replaced_by_a_memory_error_of_its_size() -> None:
    size = 1 << 62
    whole = Assembly(_head([3, size], 2))
    assert whole.add(0, b"abc") and not whole.complete
    with pytest.raises(FrameError, match="lacks"):
        whole.frame(1, 0)
    half = Assembly(_head([size - 4, 4], 1))
    half._missing = 0  # pretend that the last piece is complete: no test sends this many bytes
    *head, body, buffers = half.frame(9, 8)
    assert (head, buffers) == ([9, 1, 2, 3, 4, 5, 8, b"prefix"], None)
    assert size_of(body, buffers) == size_of(own(body), None) == size
    with pytest.raises(DeserializationError, match=f"no memory for a message of {size} bytes") as caught:
        loads(body, buffers)
    assert type(caught.value.__cause__) is MemoryError


def test_pieces_add_up() -> None:
    whole = Assembly(_head([4, 0, 2], 3))
    assert whole.add(0, b"ab") and not whole.add(2, b"cd") and whole.add(1, b"cd") and not whole.complete
    assert not whole.add(2, b"too much")
    short = Assembly(_head([4], 1))
    assert short.add(0, b"abc") and short.complete
    with pytest.raises(FrameError, match="lacks 1 bytes"):
        short.frame(1, 0)
    right = Assembly(_head([4, 0, 2], 3))
    assert right.add(0, b"ab") and right.add(1, b"cd") and right.add(2, b"ef") and right.complete
    assert right.frame(9, 8) == (9, 1, 2, 3, 4, 5, 8, b"prefix", b"abcd", [b"", b"ef"])
