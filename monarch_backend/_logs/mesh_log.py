"""Output of one mesh: level, rate, folding, prefix, files, and the last lines of every rank.

It has the options, and the steps from a rank's stream to the text that is shown. log_collector.py has the pipes and
threads. The collector calls everything but `MeshLog.configure`, with its lock held.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from monarch_backend._logs.dedup import LineDeduplicator, RateLimit, ranks_of
from monarch_backend._logs.line_splitter import LineSplitter, read_records
from monarch_backend._telemetry import log_files
from monarch_backend._telemetry.log_history import LogHistory

STDOUT, STDERR = 1, 2
STREAM_NAMES = {STDOUT: "stdout", STDERR: "stderr"}

TAIL_LINES = 64
TAIL_LINE_BYTES = 2048
_CACHED_PREFIXES = 1024


@dataclass(frozen=True)
class LogOptions:
    """Options of a mesh's output; the arguments of `logging_option`.

    Args: stream_to_client: show the lines on the controller's own stdout and stderr. aggregate_window_sec: seconds that
    a line waits for the same line of other ranks. 0 or None: every line is shown at once and nothing is folded. A line
    that all ranks have written never waits. level: minimum level of shown records of `logging`; a number or a name such
    as "WARNING". to_files: a directory. Every line is appended to ``<to_files>/<mesh name>/<ranks>.stdout`` or
    ``.stderr``, also lines that level and rate suppress on the screen. None: no files. lines_per_sec: lines per second
    that one rank may show in the long run. None: no limit. burst: lines that one rank may show at once after a silence.

    Raises: TypeError, ValueError: for an invalid value, with the name of its option.

    >>> LogOptions(level="warning").level
    30
    >>> LogOptions(aggregate_window_sec=-1)
    Traceback (most recent call last):
        ...
    ValueError: aggregate_window_sec must be 0 or more seconds, or None; got -1
    """

    stream_to_client: bool = True
    aggregate_window_sec: float | None = 0.1
    level: int | str = logging.INFO
    to_files: str | os.PathLike[str] | None = None
    lines_per_sec: float | None = 2000.0
    burst: int = 10_000

    def __post_init__(self) -> None:
        window, rate = self.aggregate_window_sec, self.lines_per_sec
        if window is not None and not 0 <= window < float("inf"):
            raise ValueError(f"aggregate_window_sec must be 0 or more seconds, or None; got {window!r}")
        if rate is not None and not rate > 0:
            raise ValueError(f"lines_per_sec must be more than 0, or None for no limit; got {rate!r}")
        if self.burst < 1:
            raise ValueError(f"burst must be 1 line or more; got {self.burst!r}")
        object.__setattr__(self, "level", level_number(self.level))
        if self.to_files is not None:
            os.fspath(self.to_files)  # a TypeError here rather than in the collector's thread


def level_number(level: int | str) -> int:
    """Return a level of `logging` as its number. Raises ValueError for a name that `logging` does not know.

    >>> level_number("info"), level_number(15)
    (20, 15)
    """
    if isinstance(level, str):
        number: Any = logging.getLevelName(level.upper())
        if not isinstance(number, int):
            raise ValueError(f"level must be a number or a name of logging, such as 'WARNING'; got {level!r}")
        return number
    return int(level)


class MeshLog:
    """The output of one mesh: its options, its waiting lines, and the last lines of every rank.

    Args: name: name of the mesh, and of its directory of files. label_of: function that returns text for ranks of the
    mesh, such as "gpus 0-7". options: initial options; `configure` changes them. pid_of: function that returns the pid
    of a rank for the history, or 0.

    >>> log = MeshLog("trainers", lambda ranks: "gpus " + ",".join(map(str, ranks)))
    >>> log.configure(level="ERROR", aggregate_window_sec=3)
    >>> log.options.level, log.options.aggregate_window_sec
    (40, 3)
    """

    def __init__(
        self,
        name: str,
        label_of: Callable[[Iterable[int]], str],
        options: LogOptions | None = None,
        *,
        pid_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        self.name = name
        self.options = options or LogOptions()
        self.on_change: Callable[[], None] | None = None  # set by the collector that has the pipes
        self.history: LogHistory | None = None  # likewise
        self._pid_of = pid_of
        self._history_labels: dict[int, str] = {}
        self._configuring = threading.Lock()
        self._label_of = label_of
        self._folds = {stream: LineDeduplicator(self._window) for stream in STREAM_NAMES}
        self._limit = RateLimit(self.options.lines_per_sec, self.options.burst)
        self._pipes: Counter[tuple[int, int]] = Counter()  # (rank, stream) -> its open pipes
        self._tails: dict[int, deque[bytes]] = {}  # of stderr
        self._last: dict[int, deque[bytes]] = {}  # of both streams
        self._prefix = functools.lru_cache(_CACHED_PREFIXES)(self._make_prefix)
        self._files: dict[tuple[int, int], int] = {}
        self._files_failed = False
        self._out: list[tuple[int, bytes]] = []

    @property
    def _window(self) -> float:
        return self.options.aggregate_window_sec or 0.0

    def configure(self, **changes: Any) -> None:
        """Change some of the options, from now on. Any thread may call it.

        Raises: TypeError, ValueError: as `LogOptions` does. Then nothing is changed.
        """
        with self._configuring:
            self.options = replace(self.options, **changes)
        if self.on_change is None:
            self.options_changed()
        else:
            self.on_change()

    def options_changed(self) -> None:
        """Apply the changed options. Waiting lines are shown under the old ones."""
        self._show_all()
        for fold in self._folds.values():
            fold.window = self._window
        self._limit.change(self.options.lines_per_sec, self.options.burst)
        self.close_files()

    def open(self, rank: int, stream: int) -> None:
        self._pipes[rank, stream] += 1
        self._folds[stream].join(rank)

    def end(self, rank: int, stream: int) -> None:
        """Note the end of a pipe of ``rank``. The process that replaces it may have another one."""
        self._pipes[rank, stream] -= 1
        if self._pipes[rank, stream] == 0:
            del self._pipes[rank, stream]
            self._folds[stream].leave(rank)
            if (file := self._files.pop((rank, stream), None)) is not None:
                os.close(file)

    def say(self, rank: int, stream: int, lines: list[bytes], splitter: LineSplitter, now: float) -> None:
        options, shown = self.options, lines
        if splitter.has_records:
            records = read_records(lines)
            lines = [text for _, text in records]
            shown = [text for level, text in records if level is None or level >= level_number(options.level)]
        if self.history is not None:
            self._keep(self.history, rank, stream, lines)
        if stream == STDERR:
            self._remember(self._tails, rank, lines)
        self._remember(self._last, rank, lines)
        if options.to_files is not None and not self._files_failed:
            self._write_file(rank, stream, lines)
        if options.stream_to_client and shown:
            passed = self._limit.admit(rank, len(shown), now)
            self._folds[stream].add(rank, shown if passed == len(shown) else shown[:passed], now)

    def due(self, now: float) -> list[tuple[int, bytes]]:
        """Return the text to write now, as pairs of stream and text."""
        for stream, fold in self._folds.items():
            self._render(stream, fold.take(now))
        self._report_dropped(now, early=False)
        return self._take_out()

    def flush(self, now: float) -> list[tuple[int, bytes]]:
        """Return what `due` returns, with everything that waits."""
        self._show_all()
        self._report_dropped(now, early=True)
        return self._take_out()

    def deadline(self) -> float | None:
        """Return the time of the next `due`, or None if only new lines make one necessary."""
        deadlines = [*(fold.deadline() for fold in self._folds.values()), self._limit.deadline()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def tail(self, rank: int) -> list[str]:
        """Return the last lines that ``rank`` wrote to stderr."""
        return _text_lines(self._tails.get(rank, ()))

    def last_lines(self, rank: int) -> list[str]:
        """Return the last lines that ``rank`` wrote to stdout and stderr, as they were read."""
        return _text_lines(self._last.get(rank, ()))

    def close_files(self) -> None:
        """Close the files. The next line opens them again if ``to_files`` is set."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._files_failed = False

    def _show_all(self) -> None:
        for stream, fold in self._folds.items():
            self._render(stream, fold.flush())

    def _take_out(self) -> list[tuple[int, bytes]]:
        out, self._out = self._out, []
        return out

    def _render(self, stream: int, shown: Sequence[tuple[int, bytes]]) -> None:
        parts: list[bytes] = []
        for ranks, text in shown:
            prefix = self._prefix(ranks)
            if b"\n" in text:
                text = text.replace(b"\n", b"\n" + prefix)
            parts += (prefix, text, b"\n")
        if parts:
            self._out.append((stream, b"".join(parts)))

    def _make_prefix(self, ranks: int) -> bytes:
        return f"[{self._label(ranks_of(ranks))}] ".encode(errors="replace")

    def _label(self, ranks: list[int]) -> str:
        try:
            return self._label_of(ranks) or self.name
        except Exception as error:  # an error of label_of must not lose the line
            return f"{self.name} ranks {ranks}, unnamed: {type(error).__name__}"

    def _note(self, ranks: int, text: str) -> None:
        self._out.append((STDERR, self._prefix(ranks) + text.encode(errors="replace") + b"\n"))

    def _report_dropped(self, now: float, *, early: bool) -> None:
        if dropped := self._limit.report(now, early=early):
            self._note(
                dropped.ranks,
                f"{dropped.lines} lines dropped within {dropped.seconds:.1f} s, limit "
                f"{self.options.lines_per_sec:g} lines/s per process; logging_option(to_files=) keeps all of them",
            )

    def _remember(self, tails: dict[int, deque[bytes]], rank: int, lines: list[bytes]) -> None:
        tail = tails.get(rank)
        if tail is None:
            tail = tails[rank] = deque(maxlen=TAIL_LINES)
        for line in lines[-TAIL_LINES:]:
            tail.append(line if len(line) <= TAIL_LINE_BYTES else line[:TAIL_LINE_BYTES] + b" ...")

    def _keep(self, history: LogHistory, rank: int, stream: int, lines: list[bytes]) -> None:
        label = self._history_labels.get(rank)
        if label is None:
            label = self._history_labels[rank] = f"{self._label([rank])} of {self.name}"
        try:
            history.append(label, self._pid_of(rank), stream, b"\n".join(lines))
        except OSError as error:
            self.history = None
            self._note(
                1 << rank,
                f"cannot keep the output of mesh {self.name!r} for `monarch-backend logs`: {error.strerror}; free "
                f"space in {log_files.folder()}, or set MONARCH_LOG_DIR",
            )

    def _write_file(self, rank: int, stream: int, lines: list[bytes]) -> None:
        try:
            file = self._files.get((rank, stream))
            if file is None:
                file = self._files[rank, stream] = self._open_file(rank, stream)
            rest = memoryview(b"".join([line + b"\n" for line in lines]))
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError as error:
            self.close_files()
            self._files_failed = True
            self._note(
                1 << rank,
                f"cannot write {error.filename or self.options.to_files}: {error.strerror}; no output of mesh "
                f"{self.name!r} goes to files any more: mend it and set logging_option(to_files=) again",
            )

    def _open_file(self, rank: int, stream: int) -> int:
        assert self.options.to_files is not None
        directory = Path(self.options.to_files) / _file_name(self.name)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{_file_name(self._label([rank]))}.{STREAM_NAMES[stream]}"
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _text_lines(lines: Iterable[bytes]) -> list[str]:
    text = b"\n".join(lines).decode(errors="replace")
    return text.split("\n")[-TAIL_LINES:] if text else []


def _file_name(text: str) -> str:
    name = re.sub(r"[^\w.,=+-]+", "_", text)
    return name if name.strip(".") else f"_{name}"
