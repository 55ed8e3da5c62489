"""Kept output of running programs: the log histories of all their processes, merged by time."""

from __future__ import annotations

from collections.abc import Iterable

from monarch_backend._telemetry import log_history
from monarch_backend._telemetry.log_history import HistoryReader, LogLine
from monarch_backend._telemetry.programs import Program


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


def labels_of(program: Program, lines: Iterable[LogLine]) -> list[str]:
    """Return the labels of a program's processes, also of those that have written lines and are not recorded."""
    return list(dict.fromkeys([*(process.label for process in program.processes), *(line.label for line in lines)]))
