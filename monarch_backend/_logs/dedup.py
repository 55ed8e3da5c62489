"""De-duplication of the output of many ranks, and the limit on lines per second.

This is pure logic: times are parameters, and lines to show are results. It has no pipes, threads or clocks.

How lines fold. Every rank has a queue of lines that it has written and that are not shown yet. The n-th waiting "x" of
one rank and the n-th waiting "x" of another are one entry. Each rank's own lines keep their order: an entry is ready
when it is first in the queue of every rank that wrote it. Of several ready entries the oldest is shown first. Where
ranks wrote the same lines in opposite orders no entry is ready. Then the oldest entry at the head of a queue is shown
for the ranks where it is the head, and waits for the others.

Entries are shown when their window ends, or as soon as every living rank has written them. All earlier entries are
shown with them: no rank that has written the later one could still join an earlier one. A line that one rank repeats is
shown as often as it was written. "(x3)" would save lines, but change the output; `RateLimit` handles floods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

# Limits of waiting lines. Beyond them the oldest are shown before their window ends.
MAX_PENDING_LINES = 1 << 16
MOST_WAITING_BYTES = 32 << 20

_CACHED_SETS = 1024


@dataclass(eq=False, slots=True)
class _Entry:
    """A line, the ranks that wrote it, and the ranks for which it is not shown yet. Bits of integers are ranks."""

    text: bytes
    created_at: float
    number: int  # order of first occurrence
    said: int = 0  # all ranks that wrote it
    ranks: int = 0  # of these, those not shown yet
    at_head: int = 0  # of these, those whose queue it heads
    in_ready: bool = False


_Queue = tuple[int, deque[_Entry]]  # a rank's bit, and its lines that are not shown yet


class _Repeated:
    """Waiting entries of one text that a rank has written more than once, numbered from the first one on.

    Most texts have one entry, which is in the index itself: each object costs time in the garbage collector.
    """

    __slots__ = ("entries", "first", "last_of")

    def __init__(self, entry: _Entry) -> None:
        self.entries = [entry]
        self.first = 0
        self.last_of = dict.fromkeys(ranks_of(entry.said), 0)  # rank -> number of its last entry

    def next_for(self, rank: int) -> _Entry | None:
        """Return the entry for the next occurrence from ``rank``, or None for a new one, which the caller appends."""
        number = max(self.last_of.get(rank, -1) + 1, self.first)
        waiting = len(self.entries)
        while (index := number - self.first) < waiting and not self.entries[index].ranks:
            number += 1  # shown already, behind one that is not
        self.last_of[rank] = number
        return self.entries[index] if index < waiting else None

    def forget_shown(self) -> bool:
        """Drop shown entries from the front. Return whether none is left."""
        while self.entries and not self.entries[0].ranks:
            del self.entries[0]
            self.first += 1
        return not self.entries


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
        self._queues: dict[int, _Queue] = {}
        self._index: dict[bytes, _Entry | _Repeated] = {}  # waiting entries by their text
        self._by_age: deque[_Entry] = deque()  # also entries that are shown, until they are the oldest
        self._ready: list[tuple[int, _Entry]] = []
        self._complete: list[_Entry] = []  # written by all ranks; the last one of each `add`, which follows the others
        self._shown: list[tuple[int, bytes]] = []
        self._bytes = 0
        self._said = 0
        self._members: dict[int, list[_Queue]] = {}  # set of ranks -> their queues

    def join(self, rank: int) -> None:
        """Make lines incomplete until ``rank`` (0 or more) has written them. Needed before `add`."""
        self._everyone |= 1 << rank
        if rank not in self._queues:
            self._queues[rank] = 1 << rank, deque()

    def leave(self, rank: int) -> None:
        """Note the end of ``rank``. Its lines are shown as if it still ran."""
        self._everyone &= ~(1 << rank)

    def add(self, rank: int, lines: Sequence[bytes], now: float) -> None:
        bit, queue = self._queues[rank]
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
                entry = self._say_again(known, rank, line, now)
            entry.said |= bit
            entry.ranks |= bit
            if not missing & ~entry.said:
                complete = entry
            queue.append(entry)
            if len(queue) == 1:
                self._now_first(entry, bit)
        if complete is not None:
            self._complete.append(complete)
        if len(self._by_age) > MAX_PENDING_LINES or self._bytes > MOST_WAITING_BYTES:
            self._make_room()

    def take(self, now: float) -> list[tuple[int, bytes]]:
        """Return the lines to show at ``now``: all of them if no rank is left that could write them, too."""
        if not self._everyone:
            self._show_all()
        for entry in self._complete:
            while entry.ranks:
                self._show_one()
        self._complete.clear()
        while (oldest := self._oldest()) and oldest.created_at + self.window <= now:
            self._show_one()
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
        self._said += 1
        self._bytes += len(line)
        entry = _Entry(line, now, self._said)
        self._by_age.append(entry)
        return entry

    def _say_again(self, known: _Entry | _Repeated, rank: int, line: bytes, now: float) -> _Entry:
        if isinstance(known, _Entry):
            known = self._index[line] = _Repeated(known)
        entry = known.next_for(rank)
        if entry is None:
            entry = self._new_entry(line, now)
            known.entries.append(entry)
        return entry

    def _now_first(self, entry: _Entry, bit: int) -> None:
        entry.at_head |= bit
        if entry.at_head == entry.ranks and not entry.in_ready:
            entry.in_ready = True
            heappush(self._ready, (entry.number, entry))

    def _oldest(self) -> _Entry | None:
        by_age = self._by_age
        while by_age and not by_age[0].ranks:
            by_age.popleft()
        return by_age[0] if by_age else None

    def _show_one(self) -> None:
        entry = self._next()
        ranks, entry.at_head = entry.at_head, 0
        entry.ranks ^= ranks
        self._shown.append((ranks, entry.text))
        if not entry.ranks:
            self._forget(entry)
        for bit, queue in self._members.get(ranks) or self._members_of(ranks):
            queue.popleft()
            if queue:
                head = queue[0]
                head.at_head |= bit
                if head.at_head == head.ranks and not head.in_ready:
                    head.in_ready = True
                    heappush(self._ready, (head.number, head))

    def _next(self) -> _Entry:
        ready = self._ready
        while ready:
            _, entry = heappop(ready)
            entry.in_ready = False
            if entry.at_head == entry.ranks != 0:  # another rank may have written it since, behind other lines
                return entry
        return min((queue[0] for _, queue in self._queues.values() if queue), key=lambda entry: entry.number)

    def _forget(self, entry: _Entry) -> None:
        self._bytes -= len(entry.text)
        known = self._index[entry.text]
        if known is entry or (isinstance(known, _Repeated) and known.forget_shown()):
            del self._index[entry.text]

    def _members_of(self, ranks: int) -> list[_Queue]:
        if len(self._members) >= _CACHED_SETS:
            self._members.clear()
        members = self._members[ranks] = [self._queues[rank] for rank in ranks_of(ranks)]
        return members

    def _make_room(self) -> None:
        self._by_age = deque(entry for entry in self._by_age if entry.ranks)
        while self._oldest() and (len(self._by_age) > MAX_PENDING_LINES // 2 or self._bytes > MOST_WAITING_BYTES // 2):
            self._show_one()

    def _show_all(self) -> None:
        while self._oldest():
            self._show_one()
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


def ranks_of(bits: int) -> list[int]:
    """Return the ranks whose bits are set, in order.

    >>> ranks_of(0b1101)
    [0, 2, 3]
    """
    ranks = []
    while bits:
        lowest = bits & -bits
        ranks.append(lowest.bit_length() - 1)
        bits ^= lowest
    return ranks
