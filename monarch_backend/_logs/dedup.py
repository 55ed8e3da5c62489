"""De-duplication of the output of many ranks, and the limit on lines per second.

This is pure logic: times are parameters, and lines to show are results. It has no pipes, threads or clocks.

How lines fold. Every rank has a queue of lines that it has written and that are not shown yet. The n-th waiting "x" of
one rank and the n-th waiting "x" of another are one entry. Each rank's own lines keep their order: an entry is shown
after all that its ranks have written before it, and otherwise the oldest is shown first. Where ranks wrote the same
lines in opposite orders, the oldest entry is shown for the ranks whose queues it heads, and waits for the others.

Entries are shown when their window ends, or as soon as every living rank has written them. All earlier entries are
shown with them: no rank that has written the later one could still join an earlier one. A line that one rank repeats is
shown as often as it was written. "(x3)" would save lines, but change the output; `RateLimit` handles floods.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Limits of waiting lines. Beyond them the oldest are shown before their window ends.
MAX_PENDING_LINES = 1 << 16
MOST_WAITING_BYTES = 32 << 20

# Entries that wait for each other. Beyond it they are treated as in opposite orders, which only folds less.
_MAX_DEPTH = 100


@dataclass(eq=False, slots=True)
class _Entry:
    """A line, the ranks that wrote it, and the ranks for which it is not shown yet. Bits of integers are ranks."""

    text: bytes
    created_at: float
    said: int = 0  # all ranks that wrote it
    ranks: int = 0  # of these, those not shown yet
    is_next: bool = False  # it is shown once its ranks' earlier lines are


class LineDeduplicator:
    """Folds equal lines of the ranks of one mesh on one stream.

    Args: window: seconds that a line waits for other ranks to write it, too. 0 folds nothing.

    Results are lists of ``(ranks, line)``, where ``ranks`` has bit r set for rank r (`ranks_of` lists them).

    >>> fold = LineDeduplicator(window=1.0)
    >>> for rank in range(3):
    ...     fold.join(rank)
    >>> fold.add(0, [b"hello from 0", b"ready"], now=0.0)
    >>> fold.add(1, [b"hello from 1", b"ready"], now=0.2)
    >>> fold.take(now=0.5), fold.deadline()
    ([], 1.0)
    >>> fold.add(2, [b"ready", b"bye"], now=0.6)
    >>> [(ranks_of(ranks), line) for ranks, line in fold.take(now=0.6)]
    [([0], b'hello from 0'), ([1], b'hello from 1'), ([0, 1, 2], b'ready')]
    >>> [(ranks_of(ranks), line) for ranks, line in fold.take(now=1.6)]
    [([2], b'bye')]
    """

    def __init__(self, window: float) -> None:
        self.window = window
        self._everyone = 0
        self._queues: dict[int, deque[_Entry]] = {}  # the lines of each rank that are not shown yet
        # Waiting entries by text. Most texts have one, without a list: each object costs time in the garbage collector.
        self._index: dict[bytes, _Entry | list[_Entry]] = {}
        self._by_age: deque[_Entry] = deque()  # also entries that are shown, until they are the oldest
        self._complete: list[_Entry] = []  # written by all ranks; the last one of each `add`, which follows the others
        self._shown: list[tuple[int, bytes]] = []
        self._bytes = 0

    def join(self, rank: int) -> None:
        """Make lines incomplete until ``rank`` (0 or more) has written them. Needed before `add`."""
        self._everyone |= 1 << rank
        self._queues.setdefault(rank, deque())

    def leave(self, rank: int) -> None:
        """Note the end of ``rank``. Its lines are shown as if it still ran."""
        self._everyone &= ~(1 << rank)

    def add(self, rank: int, lines: Sequence[bytes], now: float) -> None:
        bit, queue = 1 << rank, self._queues[rank]
        if self.window <= 0:
            self._show_all()
            self._shown += [(bit, line) for line in lines]
            return
        index, missing = self._index, ~bit & self._everyone
        complete = None
        for line in lines:
            known = index.get(line)
            if known is None:
                entry = index[line] = self._new_entry(line, now)
            elif type(known) is _Entry and not known.said & bit:
                entry = known
            else:
                entry = self._repeated(known, bit, line, now)
            entry.said |= bit
            entry.ranks |= bit
            if not missing & ~entry.said:
                complete = entry
            queue.append(entry)
        if complete is not None:
            self._complete.append(complete)
        if len(self._by_age) > MAX_PENDING_LINES or self._bytes > MOST_WAITING_BYTES:
            self._make_room()

    def take(self, now: float) -> list[tuple[int, bytes]]:
        """Return the lines to show at ``now``: all of them if no rank is left that could write them, too."""
        if not self._everyone:
            self._show_all()
        for entry in self._complete:
            while entry.ranks and (oldest := self._oldest()):
                self._show(oldest)
        self._complete.clear()
        while (oldest := self._oldest()) and oldest.created_at + self.window <= now:
            self._show(oldest)
        return self._take_shown()

    def flush(self) -> list[tuple[int, bytes]]:
        self._show_all()
        return self._take_shown()

    def deadline(self) -> float | None:
        """Return the time of the next `take`, or None when nothing waits."""
        oldest = self._oldest()
        return None if oldest is None else oldest.created_at + self.window

    def _take_shown(self) -> list[tuple[int, bytes]]:
        shown, self._shown = self._shown, []
        return shown

    def _new_entry(self, line: bytes, now: float) -> _Entry:
        self._bytes += len(line)
        entry = _Entry(line, now)
        self._by_age.append(entry)
        return entry

    def _repeated(self, known: _Entry | list[_Entry], bit: int, line: bytes, now: float) -> _Entry:
        """Return the first waiting entry of ``line`` that the rank has not written; those that it has come first."""
        if isinstance(known, _Entry):
            known = self._index[line] = [known]
        place = bisect_left(known, True, key=lambda entry: not entry.said & bit)
        if place == len(known):
            known.append(self._new_entry(line, now))
        return known[place]

    def _oldest(self) -> _Entry | None:
        by_age = self._by_age
        while by_age and not by_age[0].ranks:
            by_age.popleft()
        return by_age[0] if by_age else None

    def _show(self, entry: _Entry, depth: int = 0) -> None:
        """Show the earlier lines of the entry's ranks, then the entry."""
        entry.is_next = True
        queues = self._queues
        for rank in ranks_of(entry.ranks):
            queue = queues[rank]
            while queue and (head := queue[0]) is not entry and entry.ranks >> rank & 1:
                if head.is_next or depth == _MAX_DEPTH:
                    self._show_for(sum(1 << other for other in ranks_of(head.ranks) if queues[other][0] is head), head)
                else:
                    self._show(head, depth + 1)
        if entry.ranks:
            self._show_for(entry.ranks, entry)

    def _show_for(self, ranks: int, entry: _Entry) -> None:
        """Show the entry for ``ranks``, whose queues it heads."""
        for rank in ranks_of(ranks):
            self._queues[rank].popleft()
        self._shown.append((ranks, entry.text))
        entry.ranks ^= ranks
        if entry.ranks:
            return
        self._bytes -= len(entry.text)
        known = self._index[entry.text]
        if isinstance(known, list):
            known.remove(entry)
        if known is entry or not known:
            del self._index[entry.text]

    def _make_room(self) -> None:
        self._by_age = deque(entry for entry in self._by_age if entry.ranks)
        while (oldest := self._oldest()) and (
            len(self._by_age) > MAX_PENDING_LINES // 2 or self._bytes > MOST_WAITING_BYTES // 2
        ):
            self._show(oldest)

    def _show_all(self) -> None:
        while oldest := self._oldest():
            self._show(oldest)
        self._complete.clear()


class Dropped(NamedTuple):
    """Lines that a `RateLimit` dropped: their number, their ranks (as bits), and the period in seconds."""

    ranks: int
    lines: int
    seconds: float


class RateLimit:
    """Limits lines per second and rank, and counts the lines that it drops.

    ``per_second``: lines that each rank may write in the long run; None: no limit. ``burst``: lines that a rank may
    write at once after a silence.

    >>> limit = RateLimit(per_second=10, burst=20)
    >>> limit.admit(3, 50, now=0.0), limit.admit(3, 50, now=1.0)
    (20, 10)
    >>> limit.report(now=1.0)
    Dropped(ranks=8, lines=70, seconds=1.0)
    """

    PERIOD = 1.0  # seconds that one report covers

    def __init__(self, per_second: float | None, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._left: dict[int, tuple[float, float]] = {}  # rank -> lines that it may write, and the time of that number
        self._ranks = 0
        self._lines = 0
        self._since = 0.0

    def change(self, per_second: float | None, burst: int) -> None:
        """Set other limits; every rank starts with a full burst."""
        self._per_second, self._burst = per_second, burst
        self._left.clear()

    def admit(self, rank: int, lines: int, now: float) -> int:
        """Return how many of the next ``lines`` lines of ``rank`` pass. The others count as dropped."""
        if self._per_second is None:
            return lines
        left, as_of = self._left.get(rank, (float(self._burst), now))
        left = min(self._burst, left + (now - as_of) * self._per_second)
        passed = min(lines, int(left))
        self._left[rank] = left - passed, now
        if passed < lines:
            if not self._lines:
                self._since = now
            self._lines += lines - passed
            self._ranks |= 1 << rank
        return passed

    def report(self, now: float, *, early: bool = False) -> Dropped | None:
        """Return what was dropped since the last report, once `PERIOD` is over or when ``early``."""
        if not self._lines or (not early and now < self._since + self.PERIOD):
            return None
        dropped = Dropped(self._ranks, self._lines, now - self._since)
        self._ranks = self._lines = 0
        return dropped

    def deadline(self) -> float | None:
        """Return the time of the next `report`, or None when nothing was dropped."""
        return self._since + self.PERIOD if self._lines else None


@functools.lru_cache(maxsize=1024)
def ranks_of(bits: int) -> list[int]:
    """Return the ranks whose bits are set, in order. Callers must not change the list.

    >>> ranks_of(0b1101)
    [0, 2, 3]
    """
    ranks = []
    while bits:
        lowest = bits & -bits
        ranks.append(lowest.bit_length() - 1)
        bits ^= lowest
    return ranks
