"""Kept output of programs: the log histories of all their processes, merged by time; also of ended programs."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from monarch_backend._telemetry import labels, log_files, log_history
from monarch_backend._telemetry.log_history import HistoryReader, LogLine
from monarch_backend._telemetry.programs import Program

_SEARCH_S = 1.0
"""Seconds between two searches for new processes, which read all of /proc."""


class ProgramOutput:
    """Reader of the output of one program. Close it, or use it in a ``with`` block."""

    def __init__(self, program: Program) -> None:
        self.pid = program.pid
        self._readers: dict[int, HistoryReader] = {}
        self.find_histories(program)

    @property
    def is_kept(self) -> bool:
        """Whether a process of the program keeps output."""
        return bool(self._readers)

    def find_histories(self, program: Program) -> None:
        """Also read what processes have begun to collect since the last call."""
        for process in program.processes:
            if process.exit_code is None and process.pid not in self._readers:
                reader = log_history.of_process(process.pid)
                if reader is not None:
                    self._readers[process.pid] = reader

    def read(self) -> list[LogLine]:
        """Return the lines since the last call, oldest first. The first call returns all that are kept."""
        lines = [line for reader in self._readers.values() for line in reader.read()]
        return sorted(lines, key=lambda line: line.time) if len(self._readers) > 1 else lines

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def __enter__(self) -> ProgramOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class LineFilter:
    """Lines that are wanted: of these ranks (labels or pids) or of all, with this regular expression, of the last
    ``since_s`` seconds on the clock of their host; of these the last ``limit``.
    """

    ranks: tuple[str, ...] = ()
    pattern: str = ""
    since_s: float | None = None
    limit: int | None = None

    def test(self) -> Callable[[LogLine], bool]:
        """Return the function that says whether a line is wanted, apart from ``limit``."""
        after = float("-inf") if self.since_s is None else time.time() - self.since_s
        search = re.compile(self.pattern).search

        def is_wanted(line: LogLine) -> bool:
            return (
                line.time >= after
                and labels.is_wanted(line.label, line.pid, self.ranks or None)
                and (not self.pattern or search(line.text) is not None)
            )

        return is_wanted

    def chosen(self, lines: Iterable[LogLine]) -> tuple[list[LogLine], int]:
        """Return the lines that are wanted, and the number of earlier ones beyond ``limit``."""
        kept = list(filter(self.test(), lines))
        left_out = 0 if self.limit is None else max(0, len(kept) - self.limit)
        return kept[left_out:], left_out


ALL_LINES = LineFilter()


@dataclass(frozen=True)
class Lines:
    """Lines of a program, oldest first. ``left_out`` counts earlier ones beyond the limit of the filter.

    ``labels`` are those of the program's processes, also of ended ones that have written lines. ``is_kept`` is false if
    the program keeps no output, and ``has_ended`` is true if it has ended.
    """

    lines: list[LogLine]
    left_out: int
    labels: list[str]
    is_kept: bool
    has_ended: bool = False


class FollowedOutput:
    """Output of a program, read again and again. ``find`` returns the program, None once it has ended."""

    def __init__(self, find: Callable[[], Program | None]) -> None:
        """Raises LookupError if the program has ended."""
        self._find = find
        found = find()
        if found is None:
            raise LookupError("the program has ended")
        self._program = found
        self._output = ProgramOutput(found)
        self._searched_at = time.monotonic()

    def next(self, wanted: LineFilter) -> Lines:
        """Return the lines since the last call."""
        has_ended = False
        if time.monotonic() >= self._searched_at + _SEARCH_S:
            found = self._find()
            self._searched_at = time.monotonic()
            has_ended = found is None
            if found is not None:
                self._program = found
                self._output.find_histories(found)
        lines = self._output.read()  # also after the end: the memory stays while it is mapped here
        return Lines(*wanted.chosen(lines), labels_of(self._program, lines), self._output.is_kept, has_ended)

    def close(self) -> None:
        self._output.close()


def read(program: Program, wanted: LineFilter = ALL_LINES) -> Lines:
    """Return the kept lines of a program of this machine that are wanted."""
    output = FollowedOutput(lambda: program)
    try:
        return output.next(wanted)
    finally:
        output.close()


class EndedProgram(NamedTuple):
    """A program that has ended: its pid, command, file of output, and when it began, in seconds since the epoch.

    ``jobs`` are the names of the jobs that it has used.
    """

    pid: int
    command: str
    file: Path
    began: float
    jobs: tuple[str, ...] = ()

    def __str__(self) -> str:
        return (
            f"{self.pid} ({self.command[:60]}), begun {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(self.began))}"
        )


def ended_programs(name: str | None = None) -> list[EndedProgram]:
    """Return programs of this user that have ended, and whose output is kept in files; oldest first.

    ``name``: a pid, a part of the command, the name of a job that it has used, or a file of output. None stands for
    all. Raises OSError or ValueError for a file that cannot be read, with its path.
    """
    if name is not None and name.endswith(log_files.SUFFIX):
        return [_ended(Path(name))]
    found = []
    for path in log_files.ended():
        with contextlib.suppress(OSError, ValueError):  # removed meanwhile, or of another release
            program = _ended(path)
            if name in (None, str(program.pid)) or (
                name and not name.isdecimal() and (name in program.command or name in program.jobs)
            ):
                found.append(program)
    return found


def _ended(path: Path) -> EndedProgram:
    try:
        with _reader_of(path) as reader:
            return EndedProgram(reader.owner, reader.program, path, log_files.began(path), tuple(reader.jobs))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def read_ended(program: EndedProgram, wanted: LineFilter = ALL_LINES) -> Lines:
    """Return the lines of a program that has ended. Raises OSError if its file is gone."""
    with _reader_of(program.file) as reader:
        lines = reader.read()
    written = list(dict.fromkeys(line.label for line in lines))
    return Lines(*wanted.chosen(lines), written, is_kept=True, has_ended=True)


def _reader_of(path: Path) -> HistoryReader:
    return HistoryReader(log_files.open_to_read(path))


def labels_of(program: Program, lines: Iterable[LogLine]) -> list[str]:
    """Return the labels of a program's processes, also of those that have written lines and are not recorded."""
    return list(dict.fromkeys([*(process.label for process in program.processes), *(line.label for line in lines)]))
