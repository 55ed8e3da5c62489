"""Ranks with their states, and collectives in flight, from what processes do now."""

from __future__ import annotations

from collections import defaultdict

from monarch_backend._dashboard.answers import CollectiveInFlight, Collectives, ProgramTree, Rank
from monarch_backend._telemetry.kinds import Kind, State
from monarch_backend._telemetry.labels import fold_labels
from monarch_backend._telemetry.program_recording import Recording, is_alive
from monarch_backend._telemetry.programs import Process, Program
from monarch_backend._telemetry.rank_states import state_of, title_of
from monarch_backend._telemetry.rates import ProcessKey

MAX_IN_FLIGHT = 200


def tree(program: Program) -> ProgramTree:
    """Return a program with the states of its processes."""
    return ProgramTree(program.pid, program.command, [rank(each) for each in program.processes], program.host)


def rank(process: Process) -> Rank:
    """Return the state of a process."""
    state, activity = state_of(process)
    return Rank(
        pid=process.pid,
        parent=process.parent,
        label=process.label,
        mesh=process.label.partition(" of ")[2] if process.parent else "",
        state=state,
        doing=title_of(activity) if activity else "",
        since_s=float(activity["seconds"]) if activity else 0.0,
        queue=sum(int(each["queue"]) for each in process.activities),
        done=sum(int(each["ended"]) for each in process.activities if each["kind"] == "message"),
        memory_bytes=process.memory,
        cpu_s=process.cpu_seconds,
        exit_code=process.exit_code,
    )


def in_flight(recording: Recording) -> Collectives:
    """Return the collectives that ranks are in, each once, with the ranks of the same group that are not in it.

    Groups of the same name, such as the default ones of two programs, are told apart by their identities.
    """
    members = defaultdict[int, dict[ProcessKey, str]](dict)  # labels by process
    inside = defaultdict[tuple[int, str, str, int], list[tuple[ProcessKey, float, int]]](list)
    for process in recording.processes:
        if not is_alive(process):
            continue
        own = process.host, process.pid
        for each in process.recorded.activities:
            if each.kind == Kind.COLLECTIVE:
                members[each.trace][own] = process.label
                if each.state != State.IDLE:
                    seconds = max(0, recording.now_ns - each.since_ns) / 1e9
                    inside[each.trace, each.name, each.detail, each.reference].append((own, seconds, each.value))
    found = []
    for (identity, group, operation, number), entered in inside.items():
        labels = members[identity]
        present = {own for own, _, _ in entered}
        missing = labels.keys() - present
        found.append(
            CollectiveInFlight(
                group=group,
                operation=operation,
                number=number,
                bytes=max(size for _, _, size in entered),
                seconds=max(seconds for _, seconds, _ in entered),
                entered=fold_labels(labels[own] for own in sorted(present)),
                entered_count=len(present),
                missing=fold_labels(labels[own] for own in sorted(missing)),
                missing_count=len(missing),
            )
        )
    found.sort(key=lambda each: -each.seconds)
    return Collectives(found[:MAX_IN_FLIGHT], max(0, len(found) - MAX_IN_FLIGHT))
