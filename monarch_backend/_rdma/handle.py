"""Handle: the description of registered memory that is sent to other processes. It holds data only."""

from __future__ import annotations

from typing import NamedTuple

Ticket = tuple[int, int, int]
"""Slot, epoch and key of a registration (csrc/memory/registration_table.h).

A process that has the ticket may access the memory.
"""


class Handle(NamedTuple):
    """A range of registered memory of any process: its owner, its ticket, and the routes to it."""

    token: str  # of the process that registered it
    pid: int
    host: str
    ticket: Ticket
    offset: int  # of the range in the registration, in bytes
    nbytes: int
    device: str
    writable: bool
    ways: tuple[tuple[str, int], ...] = ()  # addresses and ports of the owner's server, if there is one
    encrypted: bool = False  # connections to that server use TLS
    verbs: bytes = b""  # the packed Region for NICs, if a NIC of the owner reaches the memory
    staged: bool = False  # the owner has NICs that do not reach the memory, so transfers use staging memory

    def __str__(self) -> str:
        return f"{self.nbytes} bytes of process {self.pid} on host {self.host}"

    def part(self, start: int, stop: int) -> Handle:
        return self._replace(offset=self.offset + start, nbytes=stop - start)
