"""Quarantine of remote keys: a key that was withdrawn never gives access to the same bytes again.

A NIC accesses an address by a key of 32 bits, which the driver partly draws at random or counts up. A handle used after
its memory was released could match a new registration with the same key by chance. Engine.expose checks new keys here.
This module registers nothing itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from monarch_backend._verbs.errors import VerbsError
from monarch_backend._verbs.providers.provider import Registration, destroy

MAX_KEYS = 4096
"""Keys that are remembered. Drivers repeat keys after 256 of one memory, or after 16 million of all."""

MAX_TRIES = 16
"""Registrations until any key is accepted, for drivers that have few keys."""


class RkeyQuarantine:
    """Quarantine of one device: the keys of its last ended registrations, with their memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, rkey: int, address: int, nbytes: int) -> None:
        start, end = address, address + nbytes
        with self._lock:
            if known := self._ranges.pop(rkey, None):
                start, end = min(start, known[0]), max(end, known[1])
            self._ranges[rkey] = (start, end)
            if len(self._ranges) > MAX_KEYS:
                self._ranges.popitem(last=False)

    def led_to(self, rkey: int, address: int, nbytes: int) -> bool:
        """True if a process may have a handle with this key for some of these bytes."""
        known = self._ranges.get(rkey)
        return known is not None and known[0] < address + nbytes and address < known[1]

    def fresh(self, make: Callable[[], Registration], address: int, nbytes: int, device: str) -> Registration:
        """Call ``make`` until its registration has a key that no handle may have. Raises what ``make`` raises."""
        made = make()
        with contextlib.ExitStack() as unfit:
            for _ in range(MAX_TRIES):
                if not self.led_to(made.rkey, address, nbytes):
                    break
                try:
                    another = make()
                except (VerbsError, OSError):  # twice exceeds a limit, so this one is used
                    break
                # Only at the end, else ``make`` would get the same key again.
                unfit.callback(destroy, made, "a region", device)
                made = another
            return made
