"""Queries for the RDMA devices and the route that this process would use for memory on other hosts.

They read /sys and settings only. They open no device, ask no process and start no program. `RDMABuffer.backend` tells
the route to one buffer.
"""

from __future__ import annotations

from monarch_backend._rdma.routes.selection import forced
from monarch_backend._verbs import available


def is_rdma_available() -> bool:
    """Return whether this process can use an RDMA NIC: an active and permitted port, its device file, and a package for
    verbs.

    The check reads /sys and opens no device. `RDMABuffer` works in either case: without a NIC it uses TCP.
    `monarch-backend doctor` says what is missing. MONARCH_RDMA_TRANSPORT makes no difference here.

    >>> from monarch_backend.rdma import is_rdma_available
    >>> is_rdma_available() in (True, False)
    True
    """
    return available() is None


def get_rdma_backend() -> str:
    """Return the best route from this process to memory on other hosts: "verbs" or "tcp".

    The route to one buffer also depends on its owner: see `RDMABuffer.backend`. It is "tcp" if the owner has no NIC,
    and "same host" or "this process" if no network is in between. Raises ValueError for an invalid
    MONARCH_RDMA_TRANSPORT.

    >>> from monarch_backend.rdma import get_rdma_backend, is_rdma_available
    >>> get_rdma_backend() == "tcp" or is_rdma_available()
    True
    """
    return "verbs" if forced() != "tcp" and is_rdma_available() else "tcp"
