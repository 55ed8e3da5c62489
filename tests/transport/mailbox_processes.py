"""Forked processes with a mailbox each, for tests of `_native.Mailbox`: each runs a role and reports.

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

TIMEOUT_S = 30.0
MET, GONE, REFUSED = -1, -2, -3
LINK_PENDING = -2  # in place of a link
UP = mmap.PAGESIZE - 8  # flags of the ranks that have started


class Flags:
    """Bytes that forked processes share. Each one is set once."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)

    def raise_(self, number: int) -> None:
        self._memory[number] = 1

    def is_raised(self, number: int) -> bool:
        return self._memory[number] != 0

    def tell(self, number: int, yes: bool) -> None:
        """Raise a flag with a yes or no, which `answer_to` waits for and returns."""
        self._memory[number] = 1 + yes

    def answer_to(self, number: int) -> bool:
        self.wait(number)
        return self._memory[number] == 2

    def wait(self, *numbers: int) -> None:
        until(lambda: all(self._memory[number] for number in numbers), f"the flags {numbers}")

    def close(self) -> None:
        self._memory.close()


def until(ready: Callable[[], object], what: str) -> None:
    """Wait until ``ready()`` is true. Fail after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while not ready():
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.0005)


class MailboxProcess:
    """Host and mailbox of a process, and the frames that it has read."""

    def __init__(self, rank: int, tokens: Sequence[str], flags: Flags, arena: int, share: int = 1 << 62) -> None:
        self.rank, self.tokens, self.flags = rank, tokens, flags
        self.host = _native.Host(arena, tokens[rank])
        self.mailbox = _native.Mailbox(self.host, False, share)
        self.ranks: dict[int, int] = {}  # by link
        self._read: list[Frame] = []
        flags.raise_(UP + rank)

    def connect(self, rank: int) -> int:
        """Connect to a rank once its mailbox has started, and return the link."""
        self.flags.wait(UP + rank)
        until(lambda: self.mailbox.connect(self.tokens[rank]) != LINK_PENDING, f"the link to rank {rank}")
        link = self.mailbox.connect(self.tokens[rank])
        assert link >= 0
        return link

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn to read, which no other thread wants."""
        assert self.mailbox.acquire_turn()
        try:
            yield
        finally:
            self.mailbox.release_turn()

    def events(self, seconds: float | None = 0.0) -> list[Any]:
        """Return the events that have arrived."""
        with self.turn():
            events = self.mailbox.receive(seconds)
        for event in events:
            if event[1] == MET:
                self.ranks[event[0]] = self.tokens.index(event[2])
        return events

    def read(self, count: int = 1) -> list[Frame]:
        """Return the next frames. New links are noted; no link may close."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(self._read) < count:
            left = deadline - time.monotonic()
            assert left > 0, f"{len(self._read)} frames of {count} have come"
            for event in self.events(left):
                assert event[1] != GONE, event
                if event[1] >= 0:
                    self._read.append(Frame._make(event))
        frames, self._read = self._read[:count], self._read[count:]
        return frames

    def read_until_gone(self, links: int = 1) -> list[Any]:
        """Return all events but new links, until this number of links is closed."""
        events: list[Any] = []
        deadline = time.monotonic() + TIMEOUT_S
        while sum(event[1] == GONE for event in events) < links:
            left = deadline - time.monotonic()
            assert left > 0, "no link has closed"
            events += [event for event in self.events(left) if event[1] != MET]
        return events

    def next_link(self) -> int:
        """Return the link of the next process that connects."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            left = deadline - time.monotonic()
            assert left > 0, "no process has connected"
            for event in self.events(left):
                assert event[1] == MET, event
                return int(event[0])

    def send(self, link: int, *, seq: int = 1, ref: int = 0, body: Any = b"", buffers: Any = None) -> bool:
        """Send a frame; the other fields have fixed values."""
        return self.mailbox.send(link, 1, 0, ref, seq, 0, 0, b"", body, buffers)

    def used(self) -> int:
        """Return the bytes of the arena in use, after unused ones are released."""
        self.host.free_control_block(self.host.allocate_control_block(1))
        return self.host.used()


Role = Callable[[MailboxProcess], Any]


def play(*roles: Role, dying: Sequence[int] = (), arena: int = 64 << 20, share: int = 1 << 62) -> list[Any]:
    """Run each role in its own process. Return the results of those that do not die, by rank.

    Processes that have ended stay zombies until all have answered, so that other processes can read how they ended.
    """
    tokens = [secrets.token_hex(16) for _ in roles]
    flags = Flags()

    def body(rank: int) -> Callable[[Connection], None]:
        def run(pipe: Connection) -> None:
            process = MailboxProcess(rank, tokens, flags, arena, share)
            if rank in dying:
                roles[rank](process)
                os._exit(0)
            _answer(pipe, lambda: roles[rank](process))
            pipe.poll(TIMEOUT_S)  # stay until all roles have ended, because the others may still use this mailbox

        return run

    started = [_spawn(body(rank)) for rank in range(len(roles))]
    living = [rank for rank in range(len(roles)) if rank not in dying]
    try:
        return _collect([started[rank][0] for rank in living], [started[rank][1] for rank in living], TIMEOUT_S)
    finally:
        for _, pipe in started:
            pipe.close()
        _kill([pid for pid, _ in started])
        flags.close()
