"""Recordings without running processes."""

from __future__ import annotations

import json
from typing import Any

from monarch_backend._telemetry.kinds import Kind, SlotState
from monarch_backend._telemetry.program_recording import CONSTRUCTOR, ProcessRecording, Recording, Unread
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


def event_of(kind: Kind, name: str, detail: str = "", **fields: Any) -> RecordedEvent:
    """Return an event at time 0 with these fields, and 0 in all others."""
    return RecordedEvent(1, 0, 0, kind, 0, 0, name, detail, 0, 0, 0)._replace(**fields)


def mesh_event(name: str, sizes: dict[str, int], procs: str = "", **about: Any) -> RecordedEvent:
    """Return the event of a new mesh of actors on ``procs``, or of a mesh of processes."""
    on = {"procs": procs} if procs else {}
    of_class = "Trainer" if procs else "ProcMesh"
    return event_of(Kind.MESH, name, json.dumps({"class": of_class, "sizes": sizes, **on, **about}))


def constructed(actor: str) -> RecordedEvent:
    """Return the event of the construction of an actor."""
    return event_of(Kind.MESSAGE, actor, CONSTRUCTOR)


def add_program(
    recording: Recording, host: str, pid: int, processes: dict[int, tuple[str, int, int, list[RecordedEvent]]]
) -> None:
    """Add a program of a host. A process has a pid, a label, the pid of its starter, an identity, and events."""
    program = Program(pid, f"program {pid}", [], host)
    recording.programs.append(program)
    for number, (label, parent, identity, events) in processes.items():
        process = Process(number, label, "running", parent, 0.0, None, None, None, [])
        program.processes.append(process)
        recorded = RecordedProcess(0, number, label, SlotState.ALIVE, 0, None, identity, [], events)
        recording.processes.append(ProcessRecording(recorded, program, process))
