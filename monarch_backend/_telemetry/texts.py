"""Texts of spans and metrics among the names of the recording: their names, and their attributes as compact JSON.

A program can make any number of such texts. Those of a bounded part of the room stay, so that names of actors still
fit. Further ones go to a ring: the oldest are overwritten.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from monarch_backend import _native
from monarch_backend._core import fork
from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.kinds import Kind, Status
from monarch_backend._telemetry.recording_area import printable

MAX_NAME_BYTES = 12 << 10
"""Room for names of spans and metrics of a process. Further ones go to the ring."""

MAX_ATTRIBUTE_BYTES = 16 << 10
"""Room for attributes of a process. Further ones go to the ring."""

MAX_TEXT = 480
"""Bytes of JSON of attributes. Further attributes are left out, and ``"...": true`` is added."""

MAX_RING_TEXT = _native.recording_layout["text_bytes"]
"""Bytes of a text in the ring: of the JSON of attributes that differ each time."""

_PLAIN = frozenset((str, int, float, bool, type(None)))
"""Types of values that are kept as keys. Others may be large, such as tensors."""

_names: dict[str, str] = {}
_name_bytes = 0
_numbers: dict[Any, int] = {}
_attribute_bytes = 0


def name_number(text: str) -> int:
    """Return the number of a name in events, 0 while nothing is recorded."""
    kept = name(text)
    if kept or not text:
        return recorder.name_number(kept)
    return _native.record_text(printable(text, MAX_RING_TEXT))


def event(kind: int, what: str, detail: str, *, status: int = 0, start_ns: int = 0, value: int = 0) -> None:
    """Record an event whose texts differ much, such as addresses and reasons: both are in the ring.

    Texts of more than `MAX_RING_TEXT` bytes are cut.
    """
    if _native.is_recording():
        numbers = [_native.record_text(printable(text, MAX_RING_TEXT)) for text in (what, detail)]
        recorder.record_event(int(kind), status, numbers[0], numbers[1], start_ns, 0, value, 0)


def failure(actor: int, reason: str, reference: int, sender: int) -> None:
    """Record why a message fails, before its end is recorded on the same thread. ``actor`` is the number of a name."""
    if _native.is_recording():
        text = _native.record_text(printable(" ".join(reason[: 4 * MAX_RING_TEXT].split()), MAX_RING_TEXT))
        recorder.record_event(int(Kind.FAILURE), int(Status.ERROR), actor, text, 0, reference, 0, sender)


def life(kind: int, of: str, what: str, reason: str = "", *, is_failure: bool = False, pid: int = 0) -> None:
    """Record that a host, mesh or process is ready, failed, restarted or stopped."""
    status = Status.ERROR if is_failure else Status.OK
    event(kind, of, f"{what}: {reason}" if reason else what, status=status, value=pid)


def name(text: str) -> str:
    """Return a name as it is recorded: the same, or empty if there is no more room for it.

    >>> name("load")
    'load'
    """
    global _name_bytes
    found = _names.get(text)
    if found is not None:
        return found
    if _name_bytes >= MAX_NAME_BYTES:
        return ""
    made = _names[text] = printable(text, 512)
    _name_bytes += len(made.encode()) + 2
    return made


def number(attributes: Mapping[str, Any]) -> int:
    """Return the number of these attributes in events, 0 while nothing is recorded. Never raises."""
    try:
        values = tuple(attributes.values())
        types = tuple(map(type, values))
        key = (tuple(attributes), values, types) if _PLAIN.issuperset(types) else None  # 1, 1.0 and True are equal
        found = None if key is None else _numbers.get(key)
        if found is not None:
            return found
    except Exception:  # a list as a value, or a hash that raises
        key = None
    try:
        if _attribute_bytes >= MAX_ATTRIBUTE_BYTES:
            return _native.record_text(as_json(attributes, MAX_RING_TEXT))
        return _intern(as_json(attributes), key)
    except Exception:  # a repr that raises
        return 0


def _intern(text: str, key: Any) -> int:
    global _attribute_bytes
    if key is None:
        key = text
        if key in _numbers:
            return _numbers[key]
    made = _native.intern_name(text)
    if made:
        _attribute_bytes += len(text) + 2  # ASCII
        _numbers[key] = made
    return made


def is_in_ring(number: int) -> bool:
    """Return whether a number is of a text in the ring, which each use numbers anew."""
    return number >= 1 << 31


def as_json(attributes: Mapping[str, Any], limit: int = MAX_TEXT) -> str:
    """Return compact JSON of at most ``limit`` bytes.

    >>> as_json({"shard": 3, "path": "a/b"})
    '{"shard":3,"path":"a/b"}'
    >>> len(as_json({"long": "x" * 1000, "n": 1}))
    12
    """
    text = _dumps(attributes)
    if len(text) <= limit:
        return text
    kept: dict[str, Any] = {}
    for name, value in attributes.items():
        if len(_dumps({**kept, name: value, "...": True})) > limit:
            break
        kept[name] = value
    return _dumps({**kept, "...": True})


def _dumps(values: Mapping[str, Any]) -> str:
    return json.dumps({str(name): value for name, value in values.items()}, separators=(",", ":"), default=_text)


def _text(value: Any) -> Any:
    return repr(value)[:200]


def _in_forked_child() -> None:
    global _name_bytes, _attribute_bytes
    _names.clear()
    _numbers.clear()
    _name_bytes = _attribute_bytes = 0


fork.register(fork.Step.RECORDING, after_in_child=_in_forked_child)
