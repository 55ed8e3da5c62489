"""The one door to libibverbs: what an adapter offers, and which one is taken.

`provider_pyverbs.py` and `provider_ibverbs.py` are the adapters; nothing else here knows either package, and neither is
imported before a device is opened. Numbers are those of the verbs' ABI: the packages rename their enums, the kernel
does not.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

from monarch_backend._verbs.errors import VerbsError

BINDINGS = ("pyverbs", "ibverbs")
"""The packages, the preferred one first."""

WRITE, READ, COMPARE_SWAP, FETCH_ADD = 0, 4, 5, 6
"""Of ibv_wr_opcode."""

SEND_SIGNALED = 2
"""Of ibv_send_flags."""

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC = 1, 2, 4, 8
"""Of ibv_access_flags."""

QP_TYPE_RC = 2
"""Of ibv_qp_type: a reliable connection."""

RESET_TO_INIT = 1 | 16 | 32 | 8
INIT_TO_RTR = 1 | 128 | 256 | 1 << 20 | 4096 | 131072 | 32768
RTR_TO_RTS = 1 | 512 | 1024 | 2048 | 65536 | 8192
"""Of ibv_qp_attr_mask: what each step sets."""

INIT, RTR, RTS = 1, 2, 3
"""Of ibv_qp_state."""


@dataclass(frozen=True)
class Limits:
    """Of a device."""

    depth: int  # work requests of a queue pair
    completions: int  # of a completion queue
    reads_in: int  # READs and atomics that a queue pair answers at a time
    reads_out: int  # and that it has under way


@dataclass(frozen=True)
class Port:
    """Of a device, as it is now."""

    active: bool
    ethernet: bool
    lid: int
    mtu: int  # of ibv_mtu: 1 is 256 bytes, 5 is 4096
    max_message: int  # bytes


@dataclass(frozen=True)
class Path:
    """From one queue pair to another: all that makes it ready."""

    port: int
    number: int  # of the other queue pair
    psn_out: int
    psn_in: int
    mtu: int
    gid_index: int
    gid: bytes  # the other port's
    lid: int  # the other port's; 0 on Ethernet
    is_global: bool
    reads_in: int
    reads_out: int
    timeout: int  # 4.096 us * 2**timeout for an acknowledgement
    retries: int
    traffic_class: int = 0
    service_level: int = 0


class Work(NamedTuple):
    """A work request."""

    id: int
    opcode: int
    signaled: bool
    local: int
    nbytes: int
    lkey: int
    remote: int
    rkey: int
    compare_add: int = 0
    swap: int = 0


class Completion(NamedTuple):
    """A work completion."""

    id: int
    status: int
    number: int  # of the queue pair
    vendor: int


class Registration(Protocol):
    """A memory region of a protection domain."""

    @property
    def lkey(self) -> int:
        """For this process's requests."""

    @property
    def rkey(self) -> int:
        """For others' requests."""

    def close(self) -> None:
        """Nobody reaches the memory through it any more."""


class QueuePair(Protocol):
    """A reliable connection's end."""

    @property
    def number(self) -> int:
        """Which the other end must know."""

    def initialize(self, port: int, access: int) -> None:
        """RESET to INIT."""

    def connect(self, path: Path) -> None:
        """INIT to RTR to RTS. Raises OSError where there is no way."""

    def post(self, works: Sequence[Work]) -> None:
        """In one go. Raises OSError."""

    def close(self) -> None:
        """Nothing of it is under way any more."""


class Nic(Protocol):
    """An open device: one protection domain, one completion queue with its channel."""

    @property
    def name(self) -> str:
        """As in /sys/class/infiniband."""

    @property
    def limits(self) -> Limits:
        """What it can."""

    @property
    def fd(self) -> int:
        """Readable when there are completions and `arm` was called before they came."""

    def port(self, number: int) -> Port:
        """As it is now."""

    def arm(self) -> None:
        """Tell of the next completion."""

    def take_event(self) -> None:
        """`fd` is readable: not any more."""

    def poll(self, most: int) -> list[Completion]:
        """What has completed."""

    def register(self, address: int, nbytes: int, access: int) -> Registration:
        """Raises OSError."""

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int, access: int) -> Registration:
        """Bytes of a dma-buf, which requests find at ``address``; ``fd`` may be closed then. Raises OSError."""

    def queue_pair(self, depth: int) -> QueuePair:
        """Raises OSError."""

    def close(self) -> None:
        """After all that was made of it."""


class Binding(Protocol):
    """A package that knows libibverbs."""

    def open_nic(self, device: str, completions: int) -> Nic:
        """Raises OSError."""


def installed() -> list[str]:
    """Which of the packages are there; imports none of them."""
    return [name for name in BINDINGS if importlib.util.find_spec(name) is not None]


def load(wanted: str = "") -> Binding:
    """The package's adapter: the first that loads, or the one that is wanted. Raises VerbsError."""
    if wanted and wanted not in BINDINGS:
        raise VerbsError(f"MONARCH_VERBS_PROVIDER={wanted!r}: there are {' and '.join(BINDINGS)}")
    # A process that forks (a data loader's workers) must keep its registered pages; new kernels need no help in it.
    os.environ.setdefault("RDMAV_FORK_SAFE", "1")
    reasons = []
    for name in [wanted] if wanted else BINDINGS:
        try:
            return cast(Binding, importlib.import_module(f"monarch_backend._verbs.provider_{name}"))
        except (ImportError, OSError) as error:  # OSError: the wheel is there, libibverbs.so.1 is not
            reasons.append(f"{name}: {error}")
    raise VerbsError(
        f"no package for verbs loads ({'; '.join(reasons)}): install the distribution's python3-pyverbs, or "
        "libibverbs1 and ibverbs-providers with pip install 'monarch_backend[rdma]'"
    )
