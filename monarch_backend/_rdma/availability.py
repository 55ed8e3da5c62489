"""What this process would take to memory on other hosts, as far as can be told by looking.

No device is opened, no process asked and no program started: which route leads to one buffer is RDMABuffer.backend's.
"""

from __future__ import annotations

from monarch_backend._rdma.routes.selection import forced
from monarch_backend._verbs import available


def is_rdma_available() -> bool:
    """Whether this process can use an RDMA NIC: a port that is up and permitted, its device file, a package for verbs.

    That is found by looking, and no device is opened. `RDMABuffer` works in either case, by TCP where there is no NIC;
    `monarch-backend doctor` says what is missing. MONARCH_RDMA_TRANSPORT makes no difference here.

    >>> from monarch_backend.rdma import is_rdma_available
    >>> is_rdma_available() in (True, False)
    True
    """
    return available() is None


def get_rdma_backend() -> str:
    """The best route from this process to memory on other hosts: "verbs" or "tcp".

    The other side has a part in it, too: `RDMABuffer.backend` is the route to one buffer, which is also "tcp" where its
    owner has no NIC, and "same host" or "this process" where no network is in between. Raises ValueError for a
    MONARCH_RDMA_TRANSPORT that means nothing.

    >>> from monarch_backend.rdma import get_rdma_backend, is_rdma_available
    >>> get_rdma_backend() == "tcp" or is_rdma_available()
    True
    """
    return "verbs" if forced() != "tcp" and is_rdma_available() else "tcp"
