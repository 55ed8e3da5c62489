"""What OpenTelemetry has as the resource of spans and metrics: the process that has recorded them."""

from __future__ import annotations

import socket

from monarch_backend._telemetry.program_recording import ProcessRecording
from monarch_backend._telemetry.programs import Program


def title_of(program: Program) -> str:
    """Return the name of a program, by the label of its own process: without arguments, which may be secret."""
    return program.processes[0].label.removeprefix("program ") if program.processes else ""


def resource_of(process: ProcessRecording) -> dict[str, str | int]:
    """Return the attributes of the resource that a process is."""
    rank, _, mesh = process.label.partition(" of ")
    found: dict[str, str | int] = {
        "service.name": title_of(process.program),
        "host.name": process.host or socket.gethostname(),
        "process.pid": process.pid,
        "monarch.process": process.label,
    }
    if rank.rpartition(" ")[2].isdecimal():
        found["monarch.rank"] = rank
    if mesh:
        found["monarch.mesh"] = mesh
    return found
