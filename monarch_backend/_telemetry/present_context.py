"""The present span or message as a W3C header, for requests to other services."""

from __future__ import annotations

import os

from monarch_backend import _native
from monarch_backend._telemetry import own_recording, program_recording, spans, trace_context
from monarch_backend._telemetry.export.span_tree import SpanTree, message_identity, span_identity
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.reader import RecordedProcess

_own_start = (0, 0)  # the pid, and the time


def traceparent() -> str | None:
    """Return the present span or message as a W3C ``traceparent`` header, for requests to other services.

    None if no span and no message is recorded here. Within `remote_parent` it takes microseconds, and less than a
    millisecond in a message that was sent within it. Elsewhere the identities are derived from what all processes of
    the program have recorded, as `monarch-backend export otlp` does: it takes some milliseconds, and about 10 us for
    each event in full rings.

    >>> from monarch_backend.telemetry import remote_parent, traceparent
    >>> with remote_parent("00-0000000000000000000000000000002a-0000000000000007-01"):
    ...     traceparent()
    '00-0000000000000000000000000000002a-0000000000000007-01'
    """
    header, of_header = trace_context.remote.get()
    number, thread = spans.current_span(), _native.thread_number()
    if header:
        found = trace_context.parse(header)
        assert found is not None
        if not _native.is_recording():
            return header
        if number == of_header:
            is_message = not of_header and trace_context.message.get() is not None
            return _of_message(found[0], header) if is_message else header
        own = _own_start_ns()
        if not own:
            return header
        identity = span_identity(os.getpid(), own, number)
        return trace_context.as_header(found[0], identity, trace_context.flags_of(header))
    if not _native.is_recording():
        return None
    around = None
    try:
        recording = program_recording.read_pids([os.getpid()])
    except OSError:  # no descriptor is left
        return None
    for node in SpanTree().nodes(recording):
        if node.end is None and node.process.pid == os.getpid():
            if node.kind == Kind.SPAN and number and node.reference == number:
                return trace_context.as_header(node.trace, node.identity)
            if node.kind == Kind.MESSAGE and not number and node.thread == thread:
                around = trace_context.as_header(node.trace, node.identity)
    return around


def _of_message(trace: int, header: str) -> str:
    """Return the header of the traced message that runs here, and keep it. ``header``: of the span above it."""
    own = _own_process()
    if own is None:
        return header
    call, sender = trace_context.message.get() or (0, 0)
    for each in own.activities:
        if each.kind == Kind.MESSAGE and (each.reference, each.trace) == (call, sender):
            name = f"{each.name}.{each.detail}"
            identity = message_identity(own.pid, own.started_ns, name, each.since_ns, sender, call)
            header = trace_context.as_header(trace, identity, trace_context.flags_of(header))
            trace_context.remote.set((header, 0))
            trace_context.message.set(None)
    return header


def _own_start_ns() -> int:
    """Return when the recording of this process started, by which others tell it from one with its pid. 0: unknown."""
    global _own_start
    if _own_start[0] != os.getpid():
        own = _own_process()
        if own is None:
            return 0
        _own_start = os.getpid(), own.started_ns
    return _own_start[1]


def _own_process() -> RecordedProcess | None:
    """Return what is recorded of this process, without events. None if that cannot be read."""
    try:
        return own_recording.read()
    except OSError:  # no descriptor is left, or the starter has ended
        return None
