"""Forked processes with a mailbox each, for tests of `_native.Post`: they play a role and report.

They wait for flags in shared memory, except where the code under test waits. No checks are here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from monarch_backend import _native
from monarch_backend._transport.local.frames import Frame
from tests.support.ranks import _answer, _collect, _kill, _spawn

PATIENCE = 30.0
MET, GONE, REFUSED = -1, -2, -3
SILENT = -2  # in place of a link
UP = mmap.PAGESIZE - 8  # flags of the ranks that are there


class Flags:
    """Bytes that forked processes share; each is raised, or told, once."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def raise_(self, number: int) -> None:
        self._memory[number] = 1

    def is_raised(self, number: int) -> bool:
        return self._memory[number] != 0

    def tell(self, number: int, yes: bool) -> None:
        """An answer to a question, which `hear` waits for."""
        self._memory[number] = 1 + yes

    def hear(self, number: int) -> bool:
        self.wait(number)
        return self._memory[number] == 2

    def wait(self, *numbers: int) -> None:
        until(lambda: all(self._memory[number] for number in numbers), f"the flags {numbers}")

    def close(self) -> None:
        self._memory.close()


def until(ready: Callable[[], object], what: str) -> None:
    """Ask again and again; fails after a long time."""
    deadline = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.0005)


class Office:
    """A process's host and post, and what has come."""

    def __init__(self, rank: int, tokens: Sequence[str], flags: Flags, arena: int, share: int = 1 << 62) -> None:
        self.rank, self.tokens, self.flags = rank, tokens, flags
        self.host = _native.Host(arena, tokens[rank])
        self.post = _native.Post(self.host, False, share)
        self.ranks: dict[int, int] = {}  # by link
        self._read: list[Frame] = []
        flags.raise_(UP + rank)

    def connect(self, rank: int) -> int:
        """The link to a rank, once it is up."""
        self.flags.wait(UP + rank)
        link = self.post.connect(self.tokens[rank])
        assert link >= 0
        return link

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """The turn to read; nobody else wants it."""
        assert self.post.take()
        try:
            yield
        finally:
            self.post.pass_on()

    def events(self, seconds: float | None = 0.0) -> list[Any]:
        """One look at what has come."""
        with self.turn():
            events = self.post.receive(seconds)
        for event in events:
            if event[1] == MET:
                self.ranks[event[0]] = self.tokens.index(event[2])
        return events

    def read(self, count: int = 1) -> list[Frame]:
        """So many frames, the next ones; whoever is met meanwhile is only noted, nobody may go."""
        deadline = time.monotonic() + PATIENCE
        while len(self._read) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"{len(self._read)} frames of {count} have come"
            for event in self.events(left):
                assert event[1] != GONE, event
                if event[1] >= 0:
                    self._read.append(Frame._make(event))
        frames, self._read = self._read[:count], self._read[count:]
        return frames

    def read_till_gone(self, links: int = 1) -> list[Any]:
        """All events until so many links are gone, but for whom we have met."""
        events: list[Any] = []
        deadline = time.monotonic() + PATIENCE
        while sum(event[1] == GONE for event in events) < links:
            left = deadline - time.monotonic()
            assert left > 0, "nobody has gone"
            events += [event for event in self.events(left) if event[1] != MET]
        return events

    def meet(self) -> int:
        """The link of the next process that connects."""
        deadline = time.monotonic() + PATIENCE
        while True:
            left = deadline - time.monotonic()
            assert left > 0, "nobody has come"
            for event in self.events(left):
                assert event[1] == MET, event
                return int(event[0])

    def send(self, link: int, *, seq: int = 1, ref: int = 0, body: Any = b"", buffers: Any = None) -> bool:
        """A frame in which nothing else matters."""
        return self.post.send(link, 1, 0, ref, seq, 0, 0, b"", body, buffers)

    def used(self) -> int:
        """Bytes of the arena in use, once those are given back that nobody looks at any more."""
        self.host.drop_board(self.host.make_board(1))
        return self.host.used()


Role = Callable[[Office], Any]


def play(*roles: Role, dying: Sequence[int] = (), arena: int = 64 << 20, share: int = 1 << 62) -> list[Any]:
    """Run each role in a process of its own; what those return that do not die, by rank.

    Processes that have ended stay zombies until all have answered, so that everybody can see how they ended.
    """
    tokens = [secrets.token_hex(16) for _ in roles]
    flags = Flags()

    def body(rank: int) -> Callable[[Connection], None]:
        def run(pipe: Connection) -> None:
            office = Office(rank, tokens, flags, arena, share)
            if rank in dying:
                roles[rank](office)
                os._exit(0)
            _answer(pipe, lambda: roles[rank](office))
            pipe.poll(PATIENCE)  # stays there for the others until all are through

        return run

    started = [_spawn(body(rank)) for rank in range(len(roles))]
    living = [rank for rank in range(len(roles)) if rank not in dying]
    try:
        return _collect([started[rank][0] for rank in living], [started[rank][1] for rank in living], PATIENCE)
    finally:
        for _, pipe in started:
            pipe.close()
        _kill([pid for pid, _ in started])
        flags.close()
