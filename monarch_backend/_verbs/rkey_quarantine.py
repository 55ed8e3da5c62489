"""Keys of memory that others could reach: once taken back, none leads to the same bytes again.

A NIC asks for an address and a key of 32 bits, of which the driver draws a part at random, or counts it up. So a handle
that is used after its memory was dropped could meet a new registration, which has its key by chance. Engine.expose asks
here. Nothing is registered in this module.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from monarch_backend._verbs.deferred_destroy import destroy
from monarch_backend._verbs.errors import VerbsError
from monarch_backend._verbs.provider import Registration

MAX_KEYS = 4096
"""Keys that are remembered. Drivers begin anew after 256 of one memory, or after 16 million of all."""

MAX_TRIES = 16
"""Then any key is taken: a driver that has so few is better than none."""


class RkeyQuarantine:
    """Of one device: those of the last registrations that ended, and what was behind each of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranges: OrderedDict[int, tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, rkey: int, address: int, nbytes: int) -> None:
        """It is about to be taken back."""
        start, end = address, address + nbytes
        with self._lock:
            if known := self._ranges.pop(rkey, None):
                start, end = min(start, known[0]), max(end, known[1])
            self._ranges[rkey] = (start, end)
            if len(self._ranges) > MAX_KEYS:
                self._ranges.popitem(last=False)

    def led_to(self, rkey: int, address: int, nbytes: int) -> bool:
        """Somebody may have a handle with this key, of something that some of these bytes were a part of."""
        known = self._ranges.get(rkey)
        return known is not None and known[0] < address + nbytes and address < known[1]

    def fresh(self, make: Callable[[], Registration], address: int, nbytes: int, device: str) -> Registration:
        """What ``make`` registers, again while it gets a key that others may have. Raises what that raises."""
        made = make()
        with contextlib.ExitStack() as unfit:
            for _ in range(MAX_TRIES):
                if not self.led_to(made.rkey, address, nbytes):
                    break
                try:
                    another = make()
                except (VerbsError, OSError):  # twice is too much for a limit: then this one it is
                    break
                unfit.callback(destroy, made, "a region", device)  # only now: it would give out the same key
                made = another
            return made
