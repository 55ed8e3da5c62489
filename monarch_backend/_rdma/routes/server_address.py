"""Address of a process's memory server: the addresses of its host, and the program's secret.

The main program knows both, and sends them to its processes at their first request. routes/tcp.py has the server and
its clients.
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
    """Addresses and secret of a process, as the main program sends them."""

    secret: bytes  # of the program, for memory only; it never leaves the program's processes
    addresses: tuple[str, ...]  # at which other hosts reach this one
    encrypted: bool


_lock = threading.Lock()
_secrets: weakref.WeakKeyDictionary[Runtime, bytes] = weakref.WeakKeyDictionary()


def place(owner: Runtime) -> ServerInfo:
    """Return this process's addresses and secret. Raises RDMAError if the main program does not answer."""
    if owner.root is None:
        found = _place_of(owner, owner.router.token)
    else:
        found = msgspec.msgpack.decode(ask(owner, owner.root, "place"), type=ServerInfo)
    if not env.get("MONARCH_TLS"):  # in this process alone
        found = ServerInfo(found.secret, found.addresses, False)
    return found


def _place_of(root: Runtime, token: str) -> ServerInfo:
    from monarch_backend._hosts.connection_settings import tls_for

    with _lock:
        secret = _secrets.setdefault(root, secrets.token_bytes(32))
    host = root.hosts.of(token)
    addresses = tuple(dict.fromkeys(_own_addresses(root))) if host is None else (host.address[0],)
    return ServerInfo(secret, addresses or (LOOPBACK,), tls_for() is not None)


def _own_addresses(root: Runtime) -> Iterator[str]:
    """Return the addresses of the main program's host from which it connects to other hosts."""
    for host in root.hosts.attached():
        if host.lost is not None or host.through is not None:
            continue
        yield from local_addresses(host.address[0])


def _answer(root: Runtime, peer: Peer, _: bytes) -> bytes:
    return msgspec.msgpack.encode(_place_of(root, peer.token))


TOPICS["place"] = _answer
