"""What the dashboard refuses: requests without its token, of other sites and hosts, and bodies that are no JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from monarch_backend._dashboard.api import ROUTES
from monarch_backend._dashboard.server import MAX_BODY_BYTES, application
from monarch_backend._dashboard.source import Source
from monarch_backend._telemetry.subject import ThisMachine
from tests.dashboard.conftest import BASE, TOKEN

AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
PATHS = [f"/api/v1{route.path}" for route in ROUTES] + ["/api/v1/openapi.json", "/api/v1/nothing", "/api/"]
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Bearer {TOKEN[:-1]}"},
        {"Authorization": f"Bearer {TOKEN} "},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer \xff"},
        {"Cookie": f"token={TOKEN}"},
    ],
)
def test_request_without_the_token_is_refused(path: str, headers: dict[str, str], client: TestClient) -> None:
    own = client.headers.pop("Authorization")
    try:
        method = "POST" if path.endswith("/sql") else "GET"
        raw = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        answer = client.request(method, path, headers=raw)
    finally:
        client.headers["Authorization"] = own
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert TOKEN not in answer.text and "token" in answer.json()["error"]


def test_token_in_the_address_does_not_count(client: TestClient) -> None:
    own = client.headers.pop("Authorization")
    try:
        assert client.get(f"/api/v1/programs?token={TOKEN}").status_code == 401
    finally:
        client.headers["Authorization"] = own


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "10.0.0.1", "", "[::2]", "a:b:c"]
)
@pytest.mark.parametrize("path", ["/", "/app.js", "/api/v1/programs"])
def test_request_for_another_host_is_refused(host: str, path: str, client: TestClient) -> None:
    answer = client.get(path, headers={"Host": host})
    assert answer.status_code == 403 and "host" in answer.json()["error"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:9000", "[::1]:8000", "127.0.0.2", "LOCALHOST"])
def test_loopback_names_with_any_port_are_accepted(host: str, client: TestClient) -> None:
    """The port differs behind `ssh -L`."""
    assert client.get("/api/v1/programs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://127.0.0.1:9999", "null", "http://localhost:8000", "http://["]
)
@pytest.mark.parametrize("path", ["/api/v1/sql", "/api/v1/programs"])
def test_request_of_another_origin_is_refused(origin: str, path: str, client: TestClient) -> None:
    answer = client.request("POST" if path.endswith("sql") else "GET", path, headers={"Origin": origin})
    assert answer.status_code == 403 and "site" in answer.json()["error"]


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)]
)
def test_request_that_a_browser_marks_as_of_another_site_is_refused(site: str, status: int, client: TestClient) -> None:
    assert client.get("/api/v1/programs", headers={"Sec-Fetch-Site": site}).status_code == status


def test_own_origin_is_accepted(client: TestClient) -> None:
    answer = client.post("/api/v1/sql", json={"query": "select 1"}, headers={"Origin": BASE})
    assert answer.status_code == 200


def test_no_answer_allows_other_origins(client: TestClient) -> None:
    preflight = {"Origin": BASE, "Access-Control-Request-Method": "POST"}
    answers = [client.get("/"), client.get("/api/v1/programs"), client.options("/api/v1/sql", headers=preflight)]
    for answer in answers:
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/", "/app.js", "/api/v1/programs", "/api/v1/nothing", "/nothing"])
def test_each_answer_has_the_headers(path: str, client: TestClient) -> None:
    headers = client.get(path).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert "set-cookie" not in headers


@pytest.mark.parametrize(
    "path", ["/../server.py", "/%2e%2e/server.py", "/..%2fserver.py", "//etc/passwd", "/static/../api.py"]
)
def test_files_outside_of_the_page_are_not_served(path: str, client: TestClient) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_body_of_another_type_is_refused(kind: str, client: TestClient) -> None:
    """A form of another site can send these types without being asked for leave."""
    answer = client.post("/api/v1/sql", content=json.dumps({"query": "select 1"}), headers={"Content-Type": kind})
    assert answer.status_code == 415 and "application/json" in answer.json()["hint"]


BODIES: list[bytes] = [
    b"", b"{", b"\xff\xfe", b"[]", b"1", b'"select 1"', b"{}", b'{"query": 1}', b'{"query": ""}', b'{"query": null}',
    b'{"query": "select 1", "limit": 0}', b'{"query": "select 1", "limit": 1e99}', b'{"query": "select 1", "x": 1}',
    b'{"query": "select 1", "limit": "5"}', b"[" * 60_000, b'{"query": "' + b"x" * 20_001 + b'"}', b"nan",
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:30]))
def test_wrong_body_is_refused(body: bytes, client: TestClient) -> None:
    answer = client.post("/api/v1/sql", content=body, headers=JSON)
    assert answer.status_code == 400 and answer.json()["hint"]


def test_huge_body_is_refused_before_it_is_read(client: TestClient) -> None:
    sent = 0

    def parts() -> Any:
        nonlocal sent
        for _ in range(64):
            sent += 1
            yield b" " * (MAX_BODY_BYTES // 4)

    answer = client.post("/api/v1/sql", content=parts(), headers=JSON)
    assert answer.status_code == 413 and "KiB" in answer.json()["error"]


@pytest.mark.parametrize(("host", "status"), [("10.1.2.3:80", 200), ("trainer-7", 200), ("evil.example", 403)])
def test_remote_server_accepts_addresses_and_its_own_names(host: str, status: int) -> None:
    app = application(Source(ThisMachine(None)), TOKEN, ("trainer-7",), any_address=True)
    with TestClient(app, BASE, headers=AUTHORIZED) as client:
        assert client.get("/api/v1/openapi.json", headers={"Host": host}).status_code == status
