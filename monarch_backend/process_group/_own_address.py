"""Address of this process for Gloo's connections, where the hostname gives none that other hosts can reach.

Gloo listens on the address of the hostname. Debian's installer maps the hostname to 127.0.1.1, and a name without an
entry makes Gloo use 127.0.0.1. Ranks on other hosts then fail with "Connection refused". The way to the group's store
gives a better address: the store is where all ranks meet.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from monarch_backend.process_group._handshake import Deadline, appear

_PORT = 9  # of a datagram socket that sends nothing: any port finds the route


def agree(store: Store, size: int, deadline: Deadline) -> str:
    """Return the address that Gloo should use in this process, or "" for Gloo's own choice.

    All ranks of the group call it, with a new store. A rank on the store's own host may know only loopback. It then
    takes its address on the way to a rank of another host, which writes its own address here.
    Raises TimeoutError after the deadline.
    """
    if size == 1:
        return ""
    own = on_the_way_to(_host_of(store))
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
    return on_the_way_to(store.get("address").decode()) if store.check(["address"]) else ""


@functools.lru_cache(maxsize=1)
def is_hostname_loopback(hostname: str) -> bool:
    """True if the first address of the hostname that this host has is a loopback one, or if it has none."""
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:  # as Gloo looks for it
                probe.bind(address)
        except OSError:
            continue
        return ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback
    return True


def on_the_way_to(host: str) -> str:
    """The local address of connections to a host, or "" for a loopback or link-local one and where there is no way."""
    if not host:
        return ""
    try:
        found = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return ""
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0]).partition("%")[0]
        except OSError:
            continue
        known = ipaddress.ip_address(own)
        return "" if known.is_loopback or known.is_link_local or known.is_unspecified else own
    return ""


def _host_of(store: Any) -> str:
    """The host of a TCPStore below any prefixes; "" for another kind of store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return str(store.host) if isinstance(store, TCPStore) else ""
