"""Failures in a recording: ended processes, failed actors, messages and collectives, each with its chain of causes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from monarch_backend._dashboard.answers import Cause, Failure, Failures
from monarch_backend._telemetry.kinds import Kind, Status
from monarch_backend._telemetry.messages import reasons_of
from monarch_backend._telemetry.program_output import LineFilter
from monarch_backend._telemetry.program_recording import ProcessRecording, Recording, is_alive
from monarch_backend._telemetry.rank_states import exit_text
from monarch_backend._telemetry.reader import EventFilter, RecordedEvent
from monarch_backend._telemetry.subject import Subject

WANTED = EventFilter(kinds=(Kind.ACTOR, Kind.MESSAGE, Kind.FAILURE, Kind.COLLECTIVE, Kind.TRANSFER), failed=True)
"""Events that `find` needs."""

MAX_FAILURES = 200
LOG_LINES = 12
"""Last lines of output of a process that a failure has."""

MAX_LOG_LINES = 10_000
"""Last lines of the failed processes of a program in which those of each one are looked for."""

_MAX_CHAIN = 20
_RECORDING_DELAY_NS = 10**9
"""A message's end is recorded after its reply is sent, so the end of the caller may be recorded before it."""


@dataclass(eq=False)
class _Failed:
    process: ProcessRecording
    event: RecordedEvent
    reason: str = ""

    @property
    def start_ns(self) -> int:
        return self.event.end_ns - self.event.duration_ns

    @property
    def what(self) -> str:
        event = self.event
        if event.kind == Kind.ACTOR:
            return f"actor {event.name} has ended: {event.detail or 'no reason recorded'}"
        verb = "was cancelled" if event.status == Status.CANCELLED else "failed"
        name = f"{event.name}.{event.detail}" if event.kind == Kind.MESSAGE else f"{event.detail} in {event.name}"
        return f"{name} {verb} after {event.duration_ns / 1e9:.3g} s{self.reason and f': {self.reason}'}"


def find(recording: Recording, there: Subject) -> Failures:
    """Return the failures in a recording that was read with `WANTED`. ``there`` has the output of the processes."""
    failed = [each for process in recording.processes for each in _failed_in(process)]
    failed.sort(key=lambda each: -each.event.end_ns)
    found = [*_ended(recording), *(_failure(each, failed, recording) for each in failed[:MAX_FAILURES])]
    found.sort(key=lambda each: -(each.unix_s or 0))
    shown = found[:MAX_FAILURES]
    _add_logs(shown, recording, there)
    left_out = len(failed) - MAX_FAILURES if len(failed) > MAX_FAILURES else 0
    return Failures(shown, left_out + len(found) - len(shown), [str(each) for each in recording.unread])


def _failed_in(process: ProcessRecording) -> Iterator[_Failed]:
    reasons = reasons_of(process.recorded.events)
    for event in process.recorded.events:
        if event.kind != Kind.FAILURE:
            yield _Failed(process, event, reasons.get(event.number, ""))


def _failure(failed: _Failed, others: list[_Failed], recording: Recording) -> Failure:
    """Return a failure with what has caused it: the messages that this one has sent, while it ran, and that failed."""
    chain, link = [_cause(failed)], failed
    while len(chain) < _MAX_CHAIN and (cause := _cause_of(link, others)) is not None:
        chain.append(_cause(cause))
        link = cause
    return Failure(
        unix_s=(failed.event.end_ns + recording.wall_offset_ns) / 1e9,
        kind=Kind(failed.event.kind).title,
        what=failed.what,
        process=failed.process.label,
        pid=failed.process.pid,
        chain=chain,
        log=[],
        host=failed.process.host,
    )


def _cause_of(failed: _Failed, others: list[_Failed]) -> _Failed | None:
    """Return the last failed message that was sent by the same process and handled while this message ran.

    One that ended before this message comes before one whose end was recorded a moment later.
    """
    identity = failed.process.recorded.identity
    if failed.event.kind != Kind.MESSAGE or not identity:
        return None
    inner = [
        each
        for each in others
        if each is not failed
        and each.event.kind == Kind.MESSAGE
        and each.event.trace == identity
        and failed.start_ns <= each.start_ns <= failed.event.end_ns
        and each.event.end_ns <= failed.event.end_ns + _RECORDING_DELAY_NS
    ]
    return max(inner, key=lambda each: (each.event.end_ns <= failed.event.end_ns, each.event.end_ns), default=None)


def _cause(failed: _Failed) -> Cause:
    return Cause(failed.what, failed.process.label, failed.process.pid)


def _ended(recording: Recording) -> Iterator[Failure]:
    for process in recording.processes:
        code = process.recorded.exit_code
        if is_alive(process) or not code:
            continue
        chain = [Cause(f"the process has ended: {exit_text(code)}", process.label, process.pid)]
        for each in process.going_on(Kind.MESSAGE):
            chain.append(Cause(f"it ran {each.name}.{each.detail}", process.label, process.pid))
        yield Failure(
            unix_s=(process.recorded.last_ns + recording.wall_offset_ns) / 1e9,
            kind="process",
            what=chain[0].what,
            process=process.label,
            pid=process.pid,
            chain=chain,
            log=[],
            host=process.host,
        )


def _add_logs(failures: list[Failure], recording: Recording, there: Subject) -> None:
    for program in recording.programs:
        own = [each for each in failures if each.host == program.host and program.has([each.pid])]
        if not own:
            continue
        wanted = LineFilter(ranks=tuple({str(each.pid) for each in own}), limit=MAX_LOG_LINES)
        lines: dict[int, list[str]] = {}
        with contextlib.suppress(LookupError):  # its host does not answer any more
            for line in there.lines(program, wanted).lines:
                lines.setdefault(line.pid, []).append(line.text)
        for each in own:
            each.log = lines.get(each.pid, [])[-LOG_LINES:]
