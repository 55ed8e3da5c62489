"""Recordings without running processes."""

from __future__ import annotations

from monarch_backend._telemetry.kinds import Kind, SlotState
from monarch_backend._telemetry.program_recording import ProcessRecording, Recording, Unread
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.reader import RecordedEvent, RecordedProcess


def recording_of(pids: dict[str, list[int]], unread: list[Unread]) -> Recording:
    """Return a recording of one program on each host, whose processes have these pids, and have sent a message."""
    found = Recording([], [], unread, 0, 0)
    for host, those in pids.items():
        processes = [Process(pid, f"process {pid}", "running", 0, 0.0, None, None, None, []) for pid in those]
        found.programs.append(Program(1, "program", processes, host))
        for process in processes:
            events = [RecordedEvent(1, 0, 0, Kind.SENT, 0, 0, "actor", "endpoint", 0, 0, 0)]
            recorded = RecordedProcess(0, process.pid, process.label, SlotState.ALIVE, 0, None, 0, [], events)
            found.processes.append(ProcessRecording(recorded, found.programs[-1], process))
    return found
