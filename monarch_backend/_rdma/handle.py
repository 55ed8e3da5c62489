"""What travels of registered memory: whose it is, the ticket that opens it, and the way there. No behaviour."""

from __future__ import annotations

from typing import NamedTuple

Ticket = tuple[int, int, int]
"""Slot, epoch and key of a registration (csrc/memory/registration_table.h): who has it may touch the memory."""


class Handle(NamedTuple):
    """A range of registered memory, of any process."""

    token: str  # of the process that has registered it
    pid: int
    host: str
    ticket: Ticket
    offset: int  # of the range
    nbytes: int
    device: str
    writable: bool
    ways: tuple[tuple[str, int], ...] = ()  # addresses and ports of its owner's server, if there is one
    encrypted: bool = False  # what is said there
    verbs: bytes = b""  # what a NIC needs, if its owner has one that reaches it
    staged: bool = False  # its owner has one that does not: staging memory is between them

    def __str__(self) -> str:
        """For people."""
        return f"{self.nbytes} bytes of process {self.pid} on host {self.host}"

    def part(self, start: int, stop: int) -> Handle:
        """Bytes ``start`` to ``stop`` of it."""
        return self._replace(offset=self.offset + start, nbytes=stop - start)
