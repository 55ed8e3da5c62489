"""Addresses of hosts: of another host by its name, and of this host as another one sees it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator

_PORT = 9  # for a datagram socket that sends nothing: any port finds the route


def numeric_address(host: str) -> str:
    """Return the first address of a host, or ``host`` itself where it does not resolve.

    >>> numeric_address("127.0.0.1")
    '127.0.0.1'
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return host


def is_loopback(host: str) -> bool:
    """Return whether this is an address that other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def local_addresses(host: str) -> Iterator[str]:
    """Yield the local address of connections to each address of a host; nothing is sent.

    Addresses without a route are skipped. A link-local address has its interface: ``fe80::1%eth0``.
    """
    try:
        found = socket.getaddrinfo(host, _PORT, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
        except OSError:
            continue
        yield own


def address_towards(host: str) -> str:
    """Return the first of `local_addresses`, or "" if there is none or if other hosts cannot use it.

    >>> address_towards("127.0.0.1")
    ''
    """
    own = next(local_addresses(host), "") if host else ""
    if not own:
        return ""
    known = ipaddress.ip_address(own.partition("%")[0])
    return "" if known.is_loopback or known.is_link_local or known.is_unspecified else own
