"""Checks of each request before it is handled: the Host header, the origin and the token; and headers of each answer.

A page of another site can make a browser send requests to a loopback address. It has no token. It also cannot read an
answer, because no answer has CORS headers, and a name that it lets point to a loopback address is refused.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from monarch_backend._dashboard.problem import Problem, as_response

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}
"""Headers of each answer."""


class Guard:
    """ASGI application that refuses requests for other hosts, of other sites, and to ``prefix`` without the token.

    ``names`` are the host names of this server, besides loopback. With ``any_address`` an IP address is accepted, too.
    """

    def __init__(self, app: ASGIApp, *, token: str, prefix: str, names: Iterable[str], any_address: bool) -> None:
        self._app, self._prefix = app, prefix
        self._expected = f"Bearer {token}".encode()
        self._names = {name.lower() for name in names}
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        problem = self._problem(scope["path"], Headers(scope=scope))
        app = self._app if problem is None else as_response(problem)
        await app(scope, receive, send_with_headers)

    def _problem(self, path: str, headers: Headers) -> Problem | None:
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._is_own(host):
            hint = "open the address that the command has printed"
            return Problem(403, f"the request is for the host {host[:100]!r}, which this dashboard is not", hint)
        if (origin := headers.get("origin")) is not None and _site(origin) != host.lower():
            return Problem(403, f"the request comes from the site {origin[:100]!r}", "open the dashboard's own page")
        if headers.get("sec-fetch-site", "none") in ("cross-site", "same-site") and path.startswith(self._prefix):
            return Problem(403, "the request comes from another site", "open the dashboard's own page")
        if path.startswith(self._prefix):
            given = headers.getlist("authorization")
            if len(given) != 1 or not hmac.compare_digest(given[0].encode("latin-1"), self._expected):
                hint = "send the header 'Authorization: Bearer TOKEN' with the token that the command has printed"
                return Problem(401, "the token is missing or wrong", hint, {"WWW-Authenticate": "Bearer"})
        return None

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
            _ = urlsplit(f"//{host}").port
        except ValueError:
            return False
        if name == "localhost" or name in self._names:
            return True
        address = _address(name)
        return address is not None and (self._any_address or address.is_loopback)


def _address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether all addresses of a host are loopback addresses. Raises OSError for an unknown host.

    >>> is_loopback("127.0.0.1"), is_loopback("0.0.0.0")
    (True, False)
    """
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


def _site(origin: str) -> str:
    """Return the host and port of an origin, "" for what is none."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
