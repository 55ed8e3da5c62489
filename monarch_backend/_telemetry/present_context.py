"""The present span or message as a W3C header, for requests to other services."""

from __future__ import annotations

import os

from monarch_backend import _native
from monarch_backend._telemetry import program_recording, recorder, spans, trace_context
from monarch_backend._telemetry.export.span_tree import SpanTree, span_identity
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.reader import Area

_own_start = (0, 0)  # the pid, and the time


def traceparent() -> str | None:
    """Return the present span or message as a W3C ``traceparent`` header, for requests to other services.

    None if no span and no message is recorded here. Within `remote_parent` it takes microseconds. Elsewhere the
    identities are derived from what all processes of the program have recorded, as `monarch-backend export otlp` does:
    it takes some milliseconds, and about 10 us for each event in full rings.

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
        if not _native.is_recording() or number == of_header:
            return header
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


def _own_start_ns() -> int:
    """Return when the recording of this process started, by which others tell it from one with its pid. 0: unknown."""
    global _own_start
    if _own_start[0] != os.getpid():
        try:
            descriptor = recorder.recording_area_of_this_process()
        except OSError:  # no descriptor is left, or the starter has ended
            return 0
        if descriptor is None:
            return 0
        with Area(descriptor) as area:
            found = area.processes_of(os.getpid(), None)
        _own_start = os.getpid(), max((each.started_ns for each in found), default=0)
    return _own_start[1]
