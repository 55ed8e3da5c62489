"""Splitter of a pipe's bytes into lines: progress bars, over-long lines and marked log records.

It handles the bytes of one stream, without I/O, clocks or other ranks.
"""

from __future__ import annotations

from collections.abc import Iterable

MAX_LINE_BYTES = 64 * 1024
_CUT = b" ... [cut: longer than %d bytes]" % MAX_LINE_BYTES

# What the worker's logging writes around a record (worker_logging.py): RECORD level LEVEL_END text "\n", where every
# line break inside the text is a RECORD_BREAK, so that a traceback stays one unit.
RECORD = b"\x1e"
LEVEL_END = b"\x1f"
RECORD_BREAK = b"\x1d"


class LineSplitter:
    r"""Splits one stream's bytes into lines without their ends.

    A line that was overwritten with carriage returns counts as what was left standing. A line longer than
    `MAX_LINE_BYTES` bytes is cut there, with a note, and the rest of it is dropped. What has no line end yet is kept
    until its end comes or `take_partial` asks for it.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"loading\n10%\r20%")
    [b'loading']
    >>> splitter.feed(b"\r100%\nnext")
    [b'100%']
    >>> splitter.take_partial(final=False)
    b'next'
    """

    __slots__ = ("_cutting", "_rest", "_taken", "has_records")

    def __init__(self) -> None:
        self.has_records = False  # a mark was seen, so `read_records` is needed
        self._rest = b""
        self._cutting = False  # inside a long line whose beginning was returned
        self._taken = False  # the beginning of this line was returned as a partial one

    @property
    def has_partial(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        if RECORD in data:
            self.has_records = True
        if self._cutting:
            _, end, data = data.partition(b"\n")
            self._cutting = not end
        size = len(data) + len(self._rest)
        lines = data.split(b"\n")
        if self._rest:
            lines[0] = self._rest + lines[0]
        rest = lines.pop()
        if b"\r" in data or self._rest.startswith(b"\r"):
            lines = [_left_standing(line) for line in lines]
            rest = _overwritten(rest)
        if self._taken and lines:
            self._taken = False
            if not lines[0]:
                del lines[0]  # the end of a line that was already returned
        if size > MAX_LINE_BYTES:
            lines = [_cut(line) for line in lines]
            if len(rest) > MAX_LINE_BYTES:
                lines.append(_cut(rest))
                rest, self._cutting = b"", True
        self._rest = rest
        return lines

    def take_partial(self, *, final: bool) -> bytes | None:
        """Return the bytes that wait for their line end, as a line; None when there is nothing to show.

        Unless ``final``, a character that has only partly arrived is kept.
        """
        text, self._rest = self._rest, b""
        if text.startswith(b"\r"):
            text = _left_standing(text)
            if not text.strip():
                return None  # an erased progress bar
        if not final:
            complete = _whole_characters(text)
            text, self._rest = text[:complete], text[complete:]
        if not text:
            return None
        self._taken = True
        return text


def read_records(lines: Iterable[bytes]) -> list[tuple[int | None, bytes]]:
    r"""Return each line with the level of its log record, or None for one that is not a record.

    The marks are removed; line breaks inside a record are restored. Text before a mark on the same line becomes a
    separate line: it is another writer's line without its end.

    >>> read_records([b"plain", b"half a line\x1e40\x1fboom\x1d  Traceback"])
    [(None, b'plain'), (None, b'half a line'), (40, b'boom\n  Traceback')]
    """
    found: list[tuple[int | None, bytes]] = []
    for line in lines:
        if RECORD not in line:
            found.append((None, line))
            continue
        before, _, record = line.partition(RECORD)
        level, end, text = record.partition(LEVEL_END)
        if not (end and level.isdigit() and len(level) < 10):
            found.append((None, line))
            continue
        if before:
            found.append((None, before))
        found.append((int(level), text.replace(RECORD_BREAK, b"\n")))
    return found


def _left_standing(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _overwritten(rest: bytes) -> bytes:
    """Return ``rest`` without overwritten states. It starts with a carriage return if it had one."""
    if b"\r" not in rest:
        return rest
    return b"\r" + _left_standing(rest) + (b"\r" if rest.endswith(b"\r") else b"")


def _cut(line: bytes) -> bytes:
    if len(line) <= MAX_LINE_BYTES:
        return line
    return line[: _whole_characters(line[:MAX_LINE_BYTES])] + _CUT


def _whole_characters(text: bytes) -> int:
    """Return the length of ``text`` without an incomplete UTF-8 character at its end."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:  # the first byte of a character says how many it has
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - back if back < length else len(text)
        if byte < 0x80:
            break
    return len(text)
