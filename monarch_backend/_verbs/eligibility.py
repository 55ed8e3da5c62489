"""Eligibility of this process's NICs for large messages between hosts, and the least size in bytes.

The checks are cheap: they open no device, and import the engine only on a machine that has NICs. Users are
process_group/_rdma/peer_reads.py for messages of ranks, and _transport/network/rdma_send.py for those of actors.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os

from monarch_backend._core import env, fork

log = logging.getLogger("monarch_backend")

DEVICES = "/sys/class/infiniband"
PACKAGES = ("pyverbs", "ibverbs")
"""Provider packages; one is needed. providers/provider.py has these names too; it is not imported for this check."""

# Break-even size of a message: NICs add two latencies of Gloo and some thread switches, 0.3 ms together. Gloo carries
# about this much in that time.


def least() -> int:
    """Return the bytes from which this process's NICs carry messages; 0 where none may be used.

    Raises ValueError if the setting is not a number of bytes.
    """
    wanted = wanted_least()
    return wanted if usable() else 0


def wanted_least() -> int:
    """Return MONARCH_RDMA_MIN_BYTES, or the default. Raises ValueError if it is not a number of bytes."""
    return int(env.get("MONARCH_RDMA_MIN_BYTES"))


def has_devices() -> bool:
    """True if the system has RDMA devices, usable or not, for any library."""
    try:
        return bool(os.listdir(DEVICES))
    except OSError:
        return False


def there() -> bool:
    """True if there may be a NIC, and a package for it. Takes no time; the NIC may still be unusable."""
    return has_devices() and any(importlib.util.find_spec(name) for name in PACKAGES)


@functools.cache
def usable() -> bool:
    """True if this process's NICs may carry messages. The first call takes seconds where there are NICs.

    Errors are logged and not raised, because messages can do without NICs.
    """
    if not there():
        return False
    try:
        from monarch_backend._verbs.discovery import available

        return env.get("MONARCH_RDMA_TRANSPORT") != "tcp" and available() is None
    except Exception as error:  # an invalid MONARCH_RDMA_TRANSPORT, or a package that does not load
        log.warning(
            "large messages between hosts are carried by gloo and TCP, since NICs can't be used by pid %d: %r. "
            "`monarch-backend doctor` explains the machine",
            os.getpid(),
            error,
        )
        return False


fork.register(fork.Step.RDMA_ELIGIBILITY, after_in_child=usable.cache_clear)
