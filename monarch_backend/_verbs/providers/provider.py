"""Interface to libibverbs: the methods of an adapter, and the choice of the adapter.

`pyverbs.py` and `ibverbs.py` are the adapters. No other module uses either package, and neither is
imported before a device is opened. Numbers are those of the verbs' ABI, because the packages rename their enums and the
kernel does not.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

from monarch_backend import _native
from monarch_backend._verbs.config import Settings
from monarch_backend._verbs.errors import VerbsError

log = logging.getLogger("monarch_backend")

BINDINGS = ("pyverbs", "ibverbs")
"""The packages, the preferred one first."""

WRITE, READ, COMPARE_SWAP, FETCH_ADD = 0, 4, 5, 6
"""Values of ibv_wr_opcode."""

SEND_SIGNALED = 2
"""Value of ibv_send_flags."""

LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC = 1, 2, 4, 8
"""Values of ibv_access_flags."""

QP_TYPE_RC = 2
"""Value of ibv_qp_type: a reliable connection."""

RESET_TO_INIT = 1 | 16 | 32 | 8
INIT_TO_RTR = 1 | 128 | 256 | 1 << 20 | 4096 | 131072 | 32768
RTR_TO_RTS = 1 | 512 | 1024 | 2048 | 65536 | 8192
"""Values of ibv_qp_attr_mask: the attributes that each step sets."""

INIT, RTR, RTS = 1, 2, 3
"""Values of ibv_qp_state."""


@dataclass(frozen=True)
class Limits:
    depth: int  # work requests of a queue pair
    completions: int  # of a completion queue
    reads_in: int  # READs and atomics that a queue pair serves at a time
    reads_out: int  # READs and atomics that it may have in flight


@dataclass(frozen=True)
class Port:
    active: bool
    ethernet: bool
    lid: int
    mtu: int  # ibv_mtu: 1 is 256 bytes, 5 is 4096
    max_message: int  # bytes


@dataclass(frozen=True)
class Path:
    """Attributes that connect one queue pair to another."""

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
    settings: Settings


class Work(NamedTuple):
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
    id: int
    status: int
    number: int  # of the queue pair
    vendor: int


class Registration(Protocol):
    """A memory region of a protection domain."""

    lkey: int  # for this process's requests
    rkey: int  # for other processes' requests

    def close(self) -> None:
        """Deregister the memory."""


class QueuePair(Protocol):
    """One end of a reliable connection."""

    number: int  # that the other end needs

    def initialize(self, port: int, access: int) -> None:
        """Change from RESET to INIT."""

    def connect(self, path: Path) -> None:
        """Change from INIT to RTR to RTS. Raises OSError if the other port can't be reached."""

    def post(self, works: Sequence[Work]) -> None:
        """Post work requests in one call. Raises OSError."""

    def close(self) -> None:
        """Destroy the queue pair; afterwards none of its work requests is in flight."""


class Nic(Protocol):
    """An open device: one protection domain, one completion queue with its channel."""

    name: str  # in /sys/class/infiniband
    limits: Limits
    fd: int  # readable after an event, if `arm` was called before the completion

    def port(self, number: int) -> Port:
        """Return the present state of a port."""

    def arm(self) -> None:
        """Request an event for the next completion."""

    def take_event(self) -> None:
        """Consume the event that made `fd` readable."""

    def poll(self, most: int) -> list[Completion]:
        """Return up to ``most`` completions."""

    def register(self, address: int, nbytes: int, access: int) -> Registration:
        """Register memory. Raises OSError."""

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int, access: int) -> Registration:
        """Register bytes of a dma-buf, for requests at ``address``; ``fd`` may be closed afterwards. Raises OSError."""

    def queue_pair(self, depth: int) -> QueuePair:
        """Make a queue pair. Raises OSError."""

    def close(self) -> None:
        """Close the device, after all that was made of it."""


class Binding(Protocol):
    """Adapter of a package for libibverbs."""

    def open_nic(self, device: str, completions: int) -> Nic:
        """Open a device. Raises OSError."""


def installed() -> list[str]:
    return [name for name in BINDINGS if importlib.util.find_spec(name) is not None]


def load(wanted: str = "") -> Binding:
    """Return the first adapter that loads, or the wanted one. Raises VerbsError."""
    if wanted and wanted not in BINDINGS:
        raise VerbsError(f"MONARCH_VERBS_PROVIDER={wanted!r}: known are {' and '.join(BINDINGS)}")
    # A process that forks (a data loader's workers) must keep its registered pages. New kernels do so by themselves.
    os.environ.setdefault("RDMAV_FORK_SAFE", "1")
    reasons = []
    for name in [wanted] if wanted else BINDINGS:
        try:
            return cast(Binding, importlib.import_module(f"monarch_backend._verbs.providers.{name}"))
        except (ImportError, OSError) as error:  # OSError: the wheel is there, libibverbs.so.1 is not
            reasons.append(f"{name}: {error}")
    raise VerbsError(
        f"no package for verbs loads ({'; '.join(reasons)}): install the distribution's python3-pyverbs, or "
        "libibverbs1 and ibverbs-providers with pip install 'monarch_backend[rdma]'"
    )


def compiled_queue(queue: Any, fd: int, entries: int) -> _native.VerbsCompletionQueue | None:
    """Return posting, polling and arming in C++ on the completion queue of a package; None if it is not found.

    Both packages keep libibverbs's pointers in C fields of their objects. The core finds them there
    (csrc/verbs/queue_pairs.h) and checks them. If the check fails, the package's own functions are used, which are
    about ten times slower.
    """
    found = _native.VerbsCompletionQueue.find(queue, fd, entries)
    if found is None:
        log.info(
            "verbs: %s's queues are not in the expected places; its own Python functions are used, which are slower",
            type(queue).__module__.partition(".")[0],
        )
    return found


def compiled_pair(pair: Any, number: int, queue: _native.VerbsCompletionQueue | None) -> _native.VerbsQueuePair | None:
    """Return the compiled queue pair of a package's object that completes in ``queue``; None if not found."""
    return None if queue is None else _native.VerbsQueuePair.find(pair, number, queue)


def destroy(part: Nic | QueuePair | Registration, what: str, device: str) -> bool:
    """Close a resource. Return False if its device refuses, as one that was removed or reset.

    Then the resource is kept until the process ends. The device may still use it, and its destructor would try again at
    any point of other code.
    """
    try:
        part.close()
    except OSError as error:
        log.warning("verbs: %s of %s cannot be destroyed, and is left as it is: %s", what, device, error)
        _native.keep_for_ever(part)
        return False
    return True


def close_each(parts: Iterable[Any], close: Callable[[Any], None]) -> None:
    """Close all in reverse order; raises the OSError of one that fails, after the others."""
    with contextlib.ExitStack() as each:
        for part in parts:
            each.callback(close, part)
