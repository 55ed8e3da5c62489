"""Whether this process's NICs may carry large messages between hosts, and from how many bytes.

By looking, as cheaply as can be: no device is opened, and rdma is imported only on a machine that has NICs. Who carries
what by them is process_group/_rdma/peer_reads.py's, for messages of ranks, and _transport/network/rdma_send.py's, for
those of actors.
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
"""One of them has to be there; their names are _binding.py's, too, which is not imported to find out."""

# Bytes from which a message is worth two more latencies of Gloo and some changes of threads, 0.3 ms together: in that
# time Gloo carries about this much.


def least() -> int:
    """Bytes from which this process's NICs carry messages; 0 where none may be used.

    Raises ValueError for what is no number of bytes.
    """
    wanted = wanted_least()
    return wanted if usable() else 0


def wanted_least() -> int:
    """MONARCH_RDMA_MIN_BYTES, or the default. Raises ValueError for what is no number of bytes."""
    return int(env.get("MONARCH_RDMA_MIN_BYTES"))


def there() -> bool:
    """There is something that may be a NIC, and a package for it: takes no time, and may turn out to be unusable."""
    try:
        return bool(os.listdir(DEVICES)) and any(importlib.util.find_spec(name) for name in PACKAGES)
    except OSError:  # no devices
        return False


@functools.cache
def usable() -> bool:
    """This process's NICs may carry messages, as was found once: where there are some, that takes seconds.

    What stands against it is no reason to fail whoever does without them.
    """
    if not there():
        return False
    try:
        from monarch_backend._verbs.discovery import available

        return env.get("MONARCH_RDMA_TRANSPORT") != "tcp" and available() is None
    except Exception as error:  # a MONARCH_RDMA_TRANSPORT that means nothing, a package that does not load
        log.warning(
            "large messages between hosts are carried by gloo and TCP, since NICs can't be used by pid %d: %r. "
            "`monarch-backend doctor` explains the machine",
            os.getpid(),
            error,
        )
        return False


fork.register(fork.Step.RDMA_ELIGIBILITY, after_in_child=usable.cache_clear)
