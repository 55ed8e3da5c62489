"""Trace context of the W3C: the header ``traceparent`` of other programs, before and after our spans and messages."""

from __future__ import annotations

import contextvars
import re
import sys
import types
from typing import Any

from monarch_backend import _native
from monarch_backend._telemetry import recorder
from monarch_backend._telemetry.kinds import Kind

REMOTE_PARENT = "remote parent"
"""Name of the span that stands for a span of another program. Its attribute `HEADER` has that one's identity."""

HEADER = "traceparent"

_FORM = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_OPENTELEMETRY = "opentelemetry.trace"

remote: contextvars.ContextVar[tuple[str, int]] = contextvars.ContextVar("monarch_remote_parent", default=("", 0))
"""Header of the enclosing `remote_parent`, and the number of its span: 0 in a message that was sent within one."""

message: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("monarch_traced_message", default=None)
"""Such a message: the number of the call and the sender's identity, until its own header is known."""


def enter_message(header: str, call: int, sender: int) -> None:
    """Continue the trace of a message, or end that of an earlier one with an empty header.

    ``header``: of the span in which it was sent. ``call`` and ``sender``: as in the event of the message.
    """
    if parse(header) is None:
        remote.set(("", 0))
        message.set(None)
        return
    remote.set((header, 0))
    message.set((call, sender))
    if recorder.is_recording():
        recorder.record_event(int(Kind.LINK), 0, 0, _native.record_text(header), 0, call, 0, sender)


def parse(header: object) -> tuple[int, int] | None:
    """Return the identities of the trace and of the span, None for anything but a valid header.

    >>> parse("00-0000000000000000000000000000002a-0000000000000007-01"), parse("00-1-2-01")
    ((42, 7), None)
    """
    found = _FORM.fullmatch(header.strip()) if isinstance(header, str) else None
    if found is None or (found[1] == "00" and found[5]):  # only later versions may have more parts
        return None
    return int(found[2], 16), int(found[3], 16)


def flags_of(header: str) -> str:
    """Return the flags of a valid header, such as whether the trace is sampled.

    >>> flags_of("00-0000000000000000000000000000002a-0000000000000007-00")
    '00'
    """
    return header.strip().split("-")[3]


def as_header(trace: int, span: int, flags: str = "01") -> str:
    """Return the header of a span.

    >>> as_header(42, 7)
    '00-0000000000000000000000000000002a-0000000000000007-01'
    """
    return f"00-{trace:032x}-{span:016x}-{flags}"


def with_opentelemetry(attributes: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a span without parent, with OpenTelemetry's current span as its parent. Never raises.

    OpenTelemetry is not imported: without it, no span of it is there.
    """
    try:
        module: types.ModuleType | None = sys.modules.get(_OPENTELEMETRY)
        context = None if module is None else module.get_current_span().get_span_context()
        if context is None or not context.is_valid:
            return attributes
        return {HEADER: as_header(context.trace_id, context.span_id), **attributes}
    except Exception:  # another package of this name, or one that is being imported
        return attributes
