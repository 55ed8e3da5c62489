"""Comparison of what a replayed actor does with what is recorded."""

from __future__ import annotations

import re
from typing import Any

from monarch_backend._serialization.pickling import dumps, loads
from monarch_backend._transport.local.frames import own

_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+\b")

MAX_TEXT = 200
"""Characters of a value in a deviation."""


def equal_text(one: str, other: str) -> bool:
    """Return whether two errors have the same text, apart from addresses of objects."""
    return _ADDRESS.sub("0x", one) == _ADDRESS.sub("0x", other)


def equal_payload(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Return whether two payloads (body, buffers) are of equal values. It unpickles them if their bytes differ."""
    if _bytes(*one) == _bytes(*other):
        return True
    try:
        values = loads(*_copy(*one)), loads(*_copy(*other))
    except Exception:
        return False
    try:
        if bool(values[0] == values[1]):
            return True
    except Exception:  # arrays and tensors of several elements have no truth value
        pass
    try:  # equal objects can have unequal pickles, because parts are shared or not: both were unpickled now
        return _bytes(*dumps(values[0])) == _bytes(*dumps(values[1]))
    except Exception:
        return False


def text_of_payload(body: Any, buffers: Any) -> str:
    """Return the value's repr, shortened."""
    try:
        text = repr(loads(*_copy(body, buffers)))
    except Exception as error:
        return f"a value that cannot be unpickled here ({type(error).__name__}: {error})"
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _bytes(body: Any, buffers: Any) -> tuple[bytes, list[bytes]]:
    return bytes(own(body)), [bytes(buffer) for buffer in buffers or ()]


def _copy(body: Any, buffers: Any) -> tuple[bytes, list[bytearray] | None]:
    return bytes(own(body)), None if buffers is None else [bytearray(buffer) for buffer in buffers]
