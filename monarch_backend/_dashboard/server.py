"""The server of the dashboard: the page, and the HTTP API that is made from the table of routes."""

from __future__ import annotations

import contextlib
import html
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from monarch_backend import __version__
from monarch_backend._dashboard import api, openapi
from monarch_backend._dashboard.guard import Guard
from monarch_backend._dashboard.problem import Problem, as_response
from monarch_backend._dashboard.source import Source
from monarch_backend._telemetry.errors import QueryError
from monarch_backend._telemetry.subject import Subject

MAX_BODY_BYTES = 64 << 10
MAX_ANSWER_BYTES = 64 << 20
THREADS = 4
"""Requests that are answered at the same time."""
MAX_WAITING = 64
"""Requests beyond this number are refused."""
TIME_LIMIT_S = 60.0
"""Seconds after which a request is answered with an error. Its thread ends by its own limits."""

_STATIC = Path(__file__).with_name("static")

Handler = Callable[[Request], Awaitable[Response]]


def application(
    source: Source,
    token: str,
    names: tuple[str, ...] = (),
    *,
    any_address: bool = False,
    on_start: Callable[[], None] = lambda: None,
) -> Guard:
    """Return the ASGI application. ``names`` and ``any_address`` are those of `Guard`.

    ``on_start`` is called when the server has started, and handles signals.
    """
    threads = _Threads(on_start)
    routes = [
        Route(f"{api.PREFIX}{each.path}", _handler(each, source, threads), methods=[each.method]) for each in api.ROUTES
    ]
    description = msgspec.json.encode(openapi.describe(__version__))

    async def describe(_: Request) -> Response:
        return Response(description, media_type="application/json")

    routes.append(Route(f"{api.PREFIX}/openapi.json", describe, methods=["GET"]))
    app = Starlette(
        routes=[*routes, Mount("/", StaticFiles(directory=_STATIC, html=True))],
        exception_handlers={HTTPException: _refused, Problem: _failed, Exception: _failed},
        lifespan=threads.lifespan,
    )
    return Guard(app, token=token, prefix="/api/", names=names, any_address=any_address)


class _Threads:
    """Threads for reads. The limiter belongs to an event loop, so the application's start makes it."""

    def __init__(self, on_start: Callable[[], None]) -> None:
        self._limiter: anyio.CapacityLimiter | None = None
        self._on_start = on_start

    @contextlib.asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self._limiter = anyio.CapacityLimiter(THREADS)
        self._on_start()
        yield

    async def run(self, call: Callable[[], bytes]) -> bytes:
        assert self._limiter is not None
        if self._limiter.statistics().tasks_waiting >= MAX_WAITING:
            raise Problem(503, f"{MAX_WAITING} requests are waiting", "ask again later", {"Retry-After": "2"})
        try:
            with anyio.fail_after(TIME_LIMIT_S):
                return await anyio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        except TimeoutError:
            hint = "ask for one program, for fewer rows, or for less time"
            raise Problem(504, f"the answer takes longer than {TIME_LIMIT_S:g} s", hint) from None


def _handler(route: api.Route, source: Source, threads: _Threads) -> Handler:
    async def handle(request: Request) -> Response:
        parameters = _of_query(route, request) if route.method == "GET" else await _of_body(route, request)
        return Response(await threads.run(lambda: _answer(route, source, parameters)), media_type="application/json")

    return handle


def _answer(route: api.Route, source: Source, parameters: msgspec.Struct) -> bytes:
    """Return the answer as JSON. Raises Problem."""
    try:
        content = msgspec.json.encode(route.call(source, parameters))
    except QueryError as error:
        raise Problem(400, str(error), "the tables are in docs/operate/telemetry.md") from None
    except NotImplementedError as error:
        raise Problem(501, str(error), "run the dashboard on the machine of the program") from None
    except LookupError as error:
        if type(error) is not LookupError:  # a fault of this package
            raise
        raise Problem(404, str(error), f"{api.PREFIX}/programs has the programs that run") from None
    if len(content) > MAX_ANSWER_BYTES:
        size = f"the answer has {len(content) >> 20} MiB, more than {MAX_ANSWER_BYTES >> 20} MiB"
        raise Problem(400, size, "ask for one program, or for less")
    return content


def _of_query(route: api.Route, request: Request) -> msgspec.Struct:
    given = request.query_params
    if len(given.multi_items()) != len(given):
        raise Problem(400, "a parameter is given twice", "give each parameter once")
    return _converted(route, dict(given), strict=False)


async def _of_body(route: api.Route, request: Request) -> msgspec.Struct:
    if request.url.query:
        raise Problem(400, "this route has no parameters in the address", "send a JSON object as the body")
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Problem(415, "the body is not JSON", "send it with 'Content-Type: application/json'")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise Problem(413, f"the body has more than {MAX_BODY_BYTES >> 10} KiB", "send a shorter one")
    try:
        content = msgspec.json.decode(bytes(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(400, f"the body is not JSON: {error}", "send a JSON object") from None
    return _converted(route, content, strict=True)


def _converted(route: api.Route, given: Any, *, strict: bool) -> msgspec.Struct:
    try:
        return msgspec.convert(given, route.parameters, strict=strict)
    except msgspec.ValidationError as error:
        known = ", ".join(route.parameters.__struct_fields__) or "none"
        hint = f"the parameters are: {known}; {api.PREFIX}/openapi.json describes them"
        raise Problem(400, f"wrong parameters: {error}", hint) from None


async def _refused(_: Request, error: Exception) -> Response:
    """Answer to what starlette has refused: an unknown path or another method."""
    assert isinstance(error, HTTPException)
    hint = f"{api.PREFIX}/openapi.json describes the routes"
    return as_response(Problem(error.status_code, error.detail, hint, error.headers))


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, Problem):
        return as_response(error)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=400)
    hint = "the terminal of the dashboard has the traceback: please report it"
    return as_response(Problem(500, f"the dashboard has failed: {type(error).__name__}: {error}", hint))


class Server:
    """A server that listens. ``address`` is the base of its URLs."""

    def __init__(
        self, there: Subject, host: str, port: int, token: str, *, remote: bool = False
    ) -> None:  # fmt: skip
        """Listen. Raises OSError if the host is unknown or the port is in use."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        name = f"[{host}]" if ":" in host else host
        self.address = f"http://{name}:{self._socket.getsockname()[1]}/"
        names = (host, socket.gethostname(), socket.getfqdn()) if remote else (host,)
        self._on_start: Callable[[], None] = lambda: None
        app = application(Source(there), token, names, any_address=remote, on_start=lambda: self._on_start())
        # Without an access log: it would repeat each request of the page, and search texts.
        config = uvicorn.Config(
            app, access_log=False, log_level="warning", server_header=False, ws="none", limit_concurrency=256,
            timeout_keep_alive=30, timeout_graceful_shutdown=2,
        )  # fmt: skip
        self._server = uvicorn.Server(config)

    def run(self, on_start: Callable[[], None]) -> None:
        """Serve until SIGINT or SIGTERM. Call ``on_start`` first."""
        self._on_start = on_start
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()


@contextlib.contextmanager
def private_page(url: str) -> Iterator[str]:
    """Yield the address of a file that only this user can read, and that leads a browser to ``url``.

    The arguments of a browser's process can be read by all users, so they must not have the token.
    """
    folder = tempfile.mkdtemp(prefix="monarch-dashboard-")
    try:
        page = Path(folder, "open.html")
        page.write_text(f'<meta http-equiv="refresh" content="0; url={html.escape(url)}">')
        yield page.as_uri()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
