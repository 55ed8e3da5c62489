"""Fake NICs for forked ranks. An RDMA read copies the memory of the other process with process_vm_readv.

`install` gives a rank one port, whose address contains the process id. `apart` makes ranks of one machine look like
ranks of several hosts. Registrations, queues and completions come from tests/rdma/verbs/fabric.py.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from monarch_backend import _native
from monarch_backend._verbs import discovery, eligibility, engine
from monarch_backend._verbs.discovery import PortFacts
from monarch_backend._verbs.providers.provider import READ, Path, Work
from monarch_backend._verbs.wire_format import ROCE_V2, Gid
from tests.rdma.verbs.fabric import REMOTE_ACCESS, RETRIES, Fabric, FakeNic, FakePair

_NETWORK = bytes(10) + b"\xff\xff" + bytes([10])  # the process id follows in three bytes, which makes an IPv4 address


class Wires(Fabric):
    """The binding of one rank. If ``dead`` is true, every transfer times out."""

    def open_nic(self, device: str, completions: int) -> FakeNic:
        return _Nic(self, device, completions)


class _Nic(FakeNic):
    def queue_pair(self, depth: int) -> FakePair:
        return _Pair(self, min(depth, self.limits.depth))


class _Pair(FakePair):
    def connect(self, path: Path) -> None:
        if self.nic.fabric.unreachable:
            raise OSError(101, "Network is unreachable")
        super().connect(path)

    def _do(self, work: Work) -> int:
        if self.nic.fabric.dead:
            return RETRIES
        if not work.nbytes:
            return 0
        assert work.opcode == READ
        assert self.path is not None
        assert self.nic.registered[work.lkey].covers(work.local, work.nbytes)
        return _copy(int.from_bytes(self.path.gid[13:], "big"), work)


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _copy(pid: int, work: Work) -> int:
    here, there = _Span(work.local, work.nbytes), _Span(work.remote, work.nbytes)
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    if call(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == work.nbytes:
        return 0
    return RETRIES if ctypes.get_errno() == 3 else REMOTE_ACCESS  # ESRCH: the process does not exist


def install() -> Wires:
    """Give this process a fake NIC until the process ends."""
    wires: Any = Wires()
    gid = Gid(1, ROCE_V2, _NETWORK + os.getpid().to_bytes(3, "big"))
    facts = [PortFacts("fake0", 1, "ACTIVE", True, (gid,), -1)]
    discovery.usable = lambda settings, root=None: facts  # type: ignore[assignment]
    engine.available = discovery.available = lambda *_: None  # type: ignore[assignment]
    engine.load = lambda wanted: wires  # type: ignore[assignment]
    eligibility.DEVICES, eligibility.PACKAGES = "/proc/self", ("os",)  # any directory and module that exist
    eligibility.usable.cache_clear()
    return wires


def apart(host: int) -> None:
    """Make this rank look like a rank of ``host``: it shares no memory with ranks of other hosts."""
    _native.ipc_namespace = lambda: f"host {host}"  # type: ignore[assignment]
