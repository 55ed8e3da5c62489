"""An open device of this process: its queue pairs by number, credit of its completion queue, registrations."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend import _native
from monarch_backend._verbs import discovery
from monarch_backend._verbs.config import Settings
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.errors import VerbsError
from monarch_backend._verbs.providers.provider import LOCAL_WRITE, Binding, Registration, destroy
from monarch_backend._verbs.registrations.cache import MemoryCache, register
from monarch_backend._verbs.wire_format import Endpoint

if TYPE_CHECKING:
    from monarch_backend._verbs.connections.queue_pair import SendQueuePair

COMPLETION_QUEUE_SIZE = 16384
"""Entries of a device's completion queue; each work request may need one, if it fails."""

_MAX_OUTSTANDING_READS = 16
"""READs and atomics in flight on a queue pair. Common devices support 16, and each takes memory."""

FIRST_PACE, SLOWER = 1e-10, 1.25
"""Initial seconds per byte of a device (10 GB/s), and the largest factor of slowdown by one transfer.

A transfer may seem slow because its thread was not running.
"""

_UNTIMED = 15
"""Transfers that are not timed after one at the device's known speed.

In some guests reading the clock is a system call.
"""

_SLOTS = 512
_VALUE = struct.Struct("=Q")

MAX_KEYS = 4096
"""Keys that are remembered. Drivers repeat keys after 256 of one memory, or after 16 million of all."""

MAX_TRIES = 16
"""Registrations until any key is accepted, for drivers that have few keys."""


class RkeyQuarantine:
    """Remote keys of a device's last ended registrations: such a key never gives access to the same bytes again.

    A NIC accesses an address by a key of 32 bits, which the driver partly draws at random or counts up. A handle used
    after its memory was released could match a new registration with the same key by chance. Engine.expose checks new
    keys here.
    """

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


class Slot:
    """Eight registered bytes, to which the NIC writes an atomic's old value."""

    def __init__(self, page: mmap.mmap, offset: int, address: int, lkey: int) -> None:
        self._page, self._offset = page, offset
        self.address, self.lkey = address, lkey

    @property
    def value(self) -> int:
        return int(_VALUE.unpack_from(self._page, self._offset)[0])


class Device:
    """An open device. ``index``: its number among this process's devices, which selects its keys in records."""

    def __init__(
        self, binding: Binding, index: int, ports: Sequence[PortFacts], settings: Settings, on_gone: Callable[[], None]
    ) -> None:
        self.index, self.node = index, ports[0].node
        self.nic = binding.open_nic(ports[0].device, COMPLETION_QUEUE_SIZE)
        self.name = self.nic.name
        self.endpoints = [self._endpoint(facts, settings) for facts in ports]
        self.max_message = min(self.nic.port(facts.port).max_message for facts in ports)
        # A quarter of the completion queue is for proofs of new queue pairs and for completions of closed ones.
        self.most_lanes = max(1, self.nic.limits.completions // 4)
        self.credit = max(1, self.nic.limits.completions - self.most_lanes)
        self.starved = False  # a queue pair had work, and there was no credit
        self.armed = False  # an event is requested for the next completion
        self.pace = FIRST_PACE
        self.untimed = 0  # transfers that need not be timed
        self.looked_promptly = False  # the polling thread polled a moment ago
        self.lanes: dict[int, SendQueuePair] = {}  # by their queue pairs' numbers
        self.retired = RkeyQuarantine()
        self.cache = MemoryCache(self.nic, settings.cache_entries, settings.cache_bytes, on_gone)
        self._pages: list[Registration] = []
        self._slots: list[Slot] = []
        self.lost_slots: set[int] = set()  # addresses of slots to which the device may still write: never reused

    def _endpoint(self, facts: PortFacts, settings: Settings) -> Endpoint:
        port, limits = self.nic.port(facts.port), self.nic.limits
        gids = [gid for gid in facts.gids if settings.gid_index in (None, gid.index)]
        return Endpoint(
            self.index,
            self.name,
            facts.port,
            port.ethernet,
            port.lid,
            port.mtu,
            min(limits.reads_in, _MAX_OUTSTANDING_READS),
            min(limits.reads_out, _MAX_OUTSTANDING_READS),
            gids,
        )

    def took(self, seconds: float, nbytes: int) -> None:
        """Update the speed from the time between posting on an idle queue pair and the poll that found the completion.

        Without prompt polling the time is only an upper limit.
        """
        found = seconds / nbytes
        self.untimed = _UNTIMED if self.pace / SLOWER < found < self.pace * SLOWER else 0
        self.pace = min(found, self.pace * (SLOWER if self.looked_promptly else 1.0))

    def take_slot(self) -> Slot:
        """Return a slot until `give_slot`. Raises VerbsError."""
        if not self._slots:
            page = mmap.mmap(-1, _SLOTS * _VALUE.size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(page))
            registration = register(self.nic, address, len(page), LOCAL_WRITE, [self.cache])
            self._pages.append(registration)
            for offset in range(0, len(page), _VALUE.size):
                self._slots.append(Slot(page, offset, address + offset, registration.lkey))
        return self._slots.pop()

    def give_slot(self, slot: Slot) -> None:
        if slot.address in self.lost_slots:
            _native.keep_for_ever(slot)
        else:
            self._slots.append(slot)

    def close(self) -> None:
        self.cache.close()
        for page in self._pages:
            destroy(page, "a registration", self.name)
        destroy(self.nic, "what was opened", self.name)


class ExposedMemory:
    """Local state of a region; keeps the owner of the memory alive."""

    def __init__(self, owner: Any, address: int, nbytes: int) -> None:
        self.owner, self.address, self.nbytes = owner, address, nbytes
        self.registrations: list[tuple[Registration, Device]] = []

    def close(self) -> None:
        for registration, device in self.registrations:
            device.retired.add(registration.rkey, self.address, self.nbytes)
        ended = [destroy(registration, "a region", device.name) for registration, device in self.registrations]
        if not all(ended):
            _native.keep_for_ever(self.owner)  # other processes may still access its memory, so it must not be reused
        self.registrations, self.owner = [], None


def open_devices(binding: Binding, settings: Settings, on_gone: Callable[[], None]) -> list[Device]:
    """Open all devices that may be used and can send. Raises OSError."""
    by_device: dict[str, list[PortFacts]] = {}
    for facts in discovery.usable(settings):
        by_device.setdefault(facts.device, []).append(facts)
    opened: list[Device] = []
    try:
        for ports in by_device.values():
            opened.append(Device(binding, len(opened), ports, settings, on_gone))
    except BaseException:
        for device in opened:
            device.close()
        raise
    return opened
