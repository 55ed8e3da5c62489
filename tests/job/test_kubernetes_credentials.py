"""Requests of a program whose token was replaced in its kubeconfig while it ran."""

from __future__ import annotations

import contextlib
import http.server
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_backend._job.kubernetes.api import Api
from monarch_backend._job.kubernetes.pod_exec import Execution
from monarch_backend.job import JobError
from tests.k8s import exec_server, websocket
from tests.support.kubernetes_api import ApiServer, api_server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with api_server(tmp_path) as made, echo() as port:
        made.objects["/api/v1/namespaces/team/pods/p/log"] = {"kind": "Log", "metadata": {"name": "text"}}

        def connect(request: http.server.BaseHTTPRequestHandler, path: str, query: dict[str, list[str]]) -> None:
            if path.endswith("/exec"):
                exec_server.serve(request, query["command"], is_tty=False, protocols=(exec_server.V4,))
            else:
                websocket.forward(request, "127.0.0.1", [port])

        made.on_connect = connect
        yield made


@contextlib.contextmanager
def echo() -> Iterator[int]:
    """Yield the port of a listener, which accepts connections without serving them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def read_log(api: Api) -> None:
    assert '"text"' in api.log("p", 3)


def execute(api: Api) -> None:
    connection = api.execute("p", "monarch", [sys.executable, "-c", "raise SystemExit(3)"], stdin=False, is_tty=False)
    assert Execution(connection, "pod p", is_tty=False).run(None) == 3


def forward(api: Api) -> None:
    forwarded = api.port_forward("p", 1)
    forwarded.socket(1).close()


def request(api: Api) -> None:
    api.request("GET", "/api/v1/namespaces/team/pods/p/log")


USES = [read_log, execute, forward, request]


@pytest.mark.parametrize("use", USES)
def test_renewed_token_is_taken_by_each_kind_of_request(server: ApiServer, use: Callable[[Api], None]) -> None:
    api = Api(None, str(server.kubeconfig), None, False)
    server.token = "renewed"
    server.write_kubeconfig("renewed")
    use(api)


@pytest.mark.parametrize("use", USES)
def test_expired_token_without_a_renewed_one_is_an_error(server: ApiServer, use: Callable[[Api], None]) -> None:
    api = Api(None, str(server.kubeconfig), None, False)
    server.token = "renewed"
    with pytest.raises(JobError, match="does not accept the credentials, or they have expired"):
        use(api)
