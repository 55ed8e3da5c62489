"""Address of this process for Gloo's connections, where the hostname gives none that other hosts can reach.

Gloo listens on the address of the hostname. Debian's installer maps the hostname to 127.0.1.1, and a name without an
entry makes Gloo use 127.0.0.1. Ranks on other hosts then fail with "Connection refused". A socket connected to the
group's store gives a better address, because all ranks reach the store.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from monarch_backend._core.addresses import address_towards, is_loopback
from monarch_backend.process_group._handshake import Deadline, appear


def agree(store: Store, size: int, deadline: Deadline) -> str:
    """Return the address that Gloo should use in this process, or "" for Gloo's own choice.

    All ranks of the group call this with a new store. A rank on the store's own host may know only loopback. It then
    uses its address on the way to a rank of another host, which has written its own address to the store. Raises
    TimeoutError after the deadline.
    """
    if size == 1:
        return ""
    own = address_towards(host_of(store))
    if own:
        store.set("address", own)
    if store.add("ranks with an address or without", 1) == size:
        store.set("all addresses", "")
    if os.environ.get("GLOO_SOCKET_IFNAME") or not is_hostname_loopback(socket.gethostname()):
        return ""
    if own:
        return own
    if not appear(store, ["all addresses"], deadline.seconds()):
        raise TimeoutError("ranks did not exchange their addresses in time")
    return address_towards(store.get("address").decode()) if store.check(["address"]) else ""


@functools.lru_cache(maxsize=1)
def is_hostname_loopback(hostname: str) -> bool:
    """True if the hostname's first address on this host is a loopback one, or if it has none."""
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:  # Gloo searches the same way
                probe.bind(address)
        except OSError:
            continue
        return is_loopback(str(address[0]))
    return True


def host_of(store: Any) -> str:
    """Return the host of a TCPStore below any prefixes; "" for another kind of store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, TCPStore) else ""
