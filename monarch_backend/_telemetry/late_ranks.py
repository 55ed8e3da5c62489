"""Ranks that have not entered a collective in which others wait, and the lines of code where they are."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from monarch_backend._core.parallel import in_parallel
from monarch_backend._telemetry import jobs, own_recording, stragglers, whereabouts
from monarch_backend._telemetry.kinds import POINT_TO_POINT, Kind, State
from monarch_backend._telemetry.program_recording import Recording, is_alive
from monarch_backend._telemetry.programs import Program
from monarch_backend._telemetry.reader import Activity, RecordedProcess

MIN_WAIT_S = 1.0
"""Seconds for which a rank must have waited. Ranks that enter a collective one after another are not late."""

MAX_NAMED = 4
"""Late ranks that the text of a long wait names."""

PLACE_TIMEOUT_S = 0.5
"""Seconds in which a late rank must answer where it is."""


@dataclass(frozen=True)
class LateRank:
    """A rank that others wait for: in operation ``number`` of a group, for ``seconds``, with ``waiting`` ranks.

    ``instead``: the other operation in which it waits itself, "" if it has not entered this one.
    """

    group: str
    operation: str
    number: int
    rank: int
    pid: int
    label: str
    seconds: float
    waiting: tuple[int, ...]
    place: str
    instead: str = ""

    def __str__(self) -> str:
        waiting = f"{len(self.waiting)} ranks wait" if len(self.waiting) > 1 else "1 rank waits"
        label = "" if self.label == f"rank {self.rank}" else f"{self.label}, "
        return (
            f"{self.operation} #{self.number} of {self.group}: rank {self.rank} ({label}pid {self.pid}) "
            f"{f'is in {self.instead} instead' if self.instead else 'has not entered'}, "
            f"{waiting} for {self.seconds:.0f} s; it is {self.place}"
        )


@dataclass(frozen=True)
class _Late:
    """A process that has not entered the operation that ``first`` shows in another one, or is in another operation."""

    process: RecordedProcess
    rank: int
    first: Activity
    seconds: float
    waiting: tuple[int, ...]
    instead: str = ""


def add_to(programs: Iterable[Program]) -> None:
    """Add the late and the slow ranks to the programs that have them.

    It asks each late rank for its stack, which takes at most `PLACE_TIMEOUT_S` seconds.
    """
    program_of = {process.pid: program for program in programs for process in program.processes}
    found = [job for job in jobs.running().values() if any(process.pid in program_of for process in job)]
    for each in (late for job in found for late in of_job(job)):
        if each.pid in program_of:
            program_of[each.pid].late.append(_as_json(each))
    if not any(each.kind == Kind.STEP for job in found for p in job for each in p.activities):
        return
    for times in (times for job in jobs.running(*stragglers.KINDS).values() for times in stragglers.of_job(job)):
        if times.is_slow and times.pid in program_of:
            program_of[times.pid].slow.append({**asdict(times), "text": str(times)})


def add_of_hosts(recording: Recording, places: Callable[[str, list[int]], list[str]]) -> None:
    """Add the late ranks of groups over several hosts. Each host has added those that it can find by itself.

    ``places(host, pids)`` returns where processes of a host are in their programs.
    """
    program_of = {id(each.recorded): each.program for each in recording.processes if is_alive(each)}
    members = [each.recorded for each in recording.processes if id(each.recorded) in program_of]
    found = [each for group in _groups(members) for each in _of_group(group)]
    known = {(program.host, each["pid"]): each["place"] for program in recording.programs for each in program.late}
    asked = defaultdict[str, list[int]](list)
    for each in found:
        key = program_of[id(each.process)].host, each.process.pid
        if key not in known:
            asked[key[0]].append(key[1])
    for host, told in zip(asked, in_parallel(lambda host: places(host, asked[host]), asked), strict=True):
        known |= zip(((host, pid) for pid in asked[host]), told, strict=True)
    for program in recording.programs:
        program.late = [
            _as_json(_late_rank(each, known[program.host, each.process.pid]))
            for each in found
            if program_of[id(each.process)] is program
        ]


def _as_json(late: LateRank) -> dict[str, Any]:
    return {**asdict(late), "text": str(late)}


def _is_entered(activity: Activity) -> bool:
    return _is_of_all(activity) and activity.state == State.RUNNING


def _is_of_all(activity: Activity) -> bool:
    """Return whether it is a collective, in which each rank of the group waits for the others."""
    return activity.kind == Kind.COLLECTIVE and activity.detail not in POINT_TO_POINT


def _groups(processes: Iterable[RecordedProcess]) -> list[list[tuple[RecordedProcess, Activity]]]:
    """Return the last collective of each process, for each group.

    Groups are told apart by their identities. Several may have the same name: each mesh has a default group.
    """
    groups = defaultdict[int, list[tuple[RecordedProcess, Activity]]](list)
    for process in processes:
        for activity in filter(_is_of_all, process.activities):
            groups[activity.trace].append((process, activity))
    return list(groups.values())


def of_job(processes: Iterable[RecordedProcess]) -> list[LateRank]:
    """Return the late ranks of a job's processes."""
    late = [each for members in _groups(processes) for each in _of_group(members)]
    places = _places([each.process for each in late])
    return [_late_rank(each, place) for each, place in zip(late, places, strict=True)]


def behind(group: int, number: int) -> list[tuple[int, str]]:
    """Return the ranks of a group on this machine that have not entered operation ``number``, and where they are.

    ``group``: identity of the group. Never raises.
    """
    try:
        late = [
            (activity.rank, process)
            for process in _running()
            for activity in filter(_is_of_all, process.activities)
            if activity.trace == group and _is_late(activity, number)
        ]
        places = _places([process for _, process in late])
        return [(rank, place) for (rank, _), place in zip(late, places, strict=True)]
    except Exception:  # as in place_of_rank
        return []


def entered_in(group: int, pid: int) -> tuple[Activity, list[tuple[int, int]]] | None:
    """Return the collective of a group that a process of this machine has entered, and the late ranks of this machine.

    Each late rank is with the identity of its process. Return None if the process has entered none.
    """
    members = [
        (process, activity)
        for process in _running()
        for activity in filter(_is_of_all, process.activities)
        if activity.trace == group
    ]
    entered = next((each for process, each in members if process.pid == pid and each.state == State.RUNNING), None)
    if entered is None:
        return None
    late = [(each.rank, process.identity) for process, each in members if _is_late(each, entered.reference)]
    return entered, late


def is_late(group: int, number: int) -> bool:
    """Return whether this process is in a group, and has not entered operation ``number``. Raises OSError."""
    own = own_recording.read()
    activities = () if own is None else own.activities
    return any(_is_of_all(each) and each.trace == group and _is_late(each, number) for each in activities)


def _is_late(activity: Activity, number: int) -> bool:
    return activity.state != State.RUNNING and activity.count < number


def places_of(pids: Collection[int]) -> list[str]:
    """Return where processes of this machine are in their programs, "gone" for those that do not run."""
    asked = [process for process in _running() if process.pid in pids]
    place_of = dict(zip((process.pid for process in asked), _places(asked), strict=True))
    return [place_of.get(pid, "gone") for pid in pids]


def _running() -> Iterator[RecordedProcess]:
    """Return the running processes of this machine."""
    return itertools.chain.from_iterable(jobs.running().values())


def _places(processes: list[RecordedProcess]) -> list[str]:
    return in_parallel(lambda each: whereabouts.place_of(each, PLACE_TIMEOUT_S), processes)


def _late_rank(late: _Late, place: str) -> LateRank:
    first, process = late.first, late.process
    return LateRank(
        first.name, first.detail, first.reference, late.rank, process.pid, process.label, late.seconds, late.waiting,
        place, late.instead,
    )  # fmt: skip


def collective_of(process: RecordedProcess, caller: int) -> str:
    """Return ", in ..., which rank 1 has not entered" for a process in a collective that waits for another rank.

    ``caller``: identity of the process that waits for this one. If it is the late rank, each waits for the other.
    """
    entered = {(each.trace, each.reference) for each in process.activities if _is_entered(each)}
    if not entered:
        return ""
    members = next((job for job in jobs.running().values() if any(each.pid == process.pid for each in job)), [])
    own = [group for group in _groups(members) if any(each.pid == process.pid for each, _ in group)]
    late = [each for group in own for each in _of_group(group)]
    late = [each for each in late if (each.first.trace, each.first.reference) in entered]
    if not late:
        return ""
    callers = next((each for each in late if each.process.identity == caller), None)
    first = (callers or late[0]).first
    what = f", in {first.detail} #{first.reference} of {first.name}, which"
    if callers is not None:
        return (
            f"{what} this process has not entered as rank {callers.rank}. Each waits for the other, until the timeout "
            "of the group"
        )
    late = [each for each in late if each.first is first]  # threads of the process may be in several groups
    ranks = ", ".join(f"rank {each.rank} (pid {each.process.pid})" for each in late[:MAX_NAMED])
    more = f" and {len(late) - MAX_NAMED} more" if len(late) > MAX_NAMED else ""
    return f"{what} {ranks}{more} {'has' if len(late) == 1 else 'have'} not entered"


def _of_group(members: list[tuple[RecordedProcess, Activity]]) -> Iterator[_Late]:
    if any(activity.payload.is_only_enqueued for _, activity in members):
        yield from _behind_in_queue(members)
        return
    entered = [activity for _, activity in members if activity.state == State.RUNNING]
    if not entered:
        return
    number = min(each.reference for each in entered)
    inside = sorted((each for each in entered if each.reference == number), key=lambda each: each.since_ns)
    usual = Counter(each.detail for each in inside).most_common(1)[0][0]  # Gloo and NCCL compare no operations
    waiting = [each for each in inside if each.detail == usual]
    first, ranks = waiting[0], tuple(sorted(each.rank for each in waiting))
    for process, activity in members:
        is_elsewhere = activity.state == State.RUNNING and activity.reference == number and activity.detail != usual
        since_ns = max(activity.since_ns, first.since_ns) if is_elsewhere else inside[0].since_ns
        seconds = (process.read_ns - since_ns) / 1e9  # hosts are not read at the same time
        if seconds >= MIN_WAIT_S and (is_elsewhere or _is_late(activity, number)):
            yield _Late(process, activity.rank, first, seconds, ranks, activity.detail if is_elsewhere else "")


def _behind_in_queue(members: list[tuple[RecordedProcess, Activity]]) -> Iterator[_Late]:
    """Return the ranks that have enqueued the fewest collectives, if another rank's last one is not recent.

    Other ranks may be behind too, since they wait on the host for a collective that these have not enqueued.
    """
    last = max((activity for _, activity in members), key=lambda each: (each.count, -each.since_ns))
    fewest = min(activity.count for _, activity in members)
    ranks = tuple(sorted(activity.rank for _, activity in members if activity.count == last.count))
    for process, activity in members:
        seconds = (process.read_ns - last.since_ns) / 1e9
        if seconds >= MIN_WAIT_S and activity.count == fewest < last.count:
            yield _Late(process, activity.rank, last, seconds, ranks)


def place_of_rank(group: int, rank: int, pid: int) -> str | None:
    """Return where a rank of a group is, if its process runs on this machine and records. Never raises.

    ``group``: identity of the group.
    """
    try:
        for process in _running():
            if process.pid == pid and any(
                each.kind == Kind.COLLECTIVE and each.trace == group and each.rank == rank
                for each in process.activities
            ):
                return whereabouts.place_of(process, PLACE_TIMEOUT_S)
    except Exception:  # no /proc, or no access to it: the text of an error must not hide the error
        return None
    return None
