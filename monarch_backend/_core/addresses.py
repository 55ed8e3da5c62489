"""Addresses of hosts: of another one by its name, and of this one as another sees it."""

from __future__ import annotations

import ipaddress
import socket

_PORT = 9  # of a datagram socket that sends nothing: any port finds the route


def numeric_address(host: str) -> str:
    """The first address of a host, or ``host`` itself where it does not resolve.

    >>> numeric_address("127.0.0.1")
    '127.0.0.1'
    """
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return host


def is_loopback(host: str) -> bool:
    """True for an address that other machines can't reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_towards(host: str) -> str:
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
