"""Where a process's memory can be had from other hosts: the addresses of its own host, and the program's secret for it.

The main program knows both and tells its processes when they first need it. The server that listens there, and those
who call it, are routes/tcp.py's.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections.abc import Iterator

import msgspec

from monarch_backend._actor.runtime import Runtime
from monarch_backend._core import env
from monarch_backend._core.addresses import local_addresses
from monarch_backend._rdma.control_rpc import TOPICS, ask
from monarch_backend._transport.local.peer import Peer

LOOPBACK = "127.0.0.1"


class ServerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a process is told of itself."""

    secret: bytes  # the program's, for memory only; it never leaves the processes of the program
    addresses: tuple[str, ...]  # at which others reach its host
    encrypted: bool


_lock = threading.Lock()
_secrets: weakref.WeakKeyDictionary[Runtime, bytes] = weakref.WeakKeyDictionary()


def place(owner: Runtime) -> ServerInfo:
    """This process's. Raises RDMAError if the main program does not answer."""
    if owner.root is None:
        found = _place_of(owner, owner.router.token)
    else:
        found = msgspec.msgpack.decode(ask(owner, owner.root, "place"), type=ServerInfo)
    if not env.get("MONARCH_TLS"):  # in this process alone
        found = ServerInfo(found.secret, found.addresses, False)
    return found


def _place_of(root: Runtime, token: str) -> ServerInfo:
    from monarch_backend._hosts.tls_config import tls_for

    with _lock:
        secret = _secrets.setdefault(root, secrets.token_bytes(32))
    host = root.host(token)
    addresses = tuple(dict.fromkeys(_own_addresses(root))) if host is None else (host.address[0],)
    return ServerInfo(secret, addresses or (LOOPBACK,), tls_for() is not None)


def _own_addresses(root: Runtime) -> Iterator[str]:
    """Of the main program's host, as others see it: those from which it would talk to them."""
    for host in [] if root.hosts is None else list(root.hosts.hosts.values()):
        if host.lost is not None or host.through is not None:
            continue
        yield from local_addresses(host.address[0])


def _answer(root: Runtime, peer: Peer, _: bytes) -> bytes:
    return msgspec.msgpack.encode(_place_of(root, peer.token))


TOPICS["place"] = _answer
