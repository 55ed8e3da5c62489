"""Hosts that can't be attached, and daemons that can't be started: refused at once, and what to do is said."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.support import UP, World

Anywhere = tuple[World, list[str]]

ANSWERS: dict[str, Callable[[socket.socket], None]] = {
    "nothing": lambda connection: connection.recv(1 << 16) and None,
    "garbage": lambda connection: connection.sendall(os.urandom(1 << 12)),
    "HTTP": lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"),
    "the end": lambda connection: connection.close(),
}


@pytest.fixture
def other_server(loopback: World, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a plain server, which answers in one of these ways."""
    listener = socket.create_server(("127.0.0.1", 0))
    accepted: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            accepted.append(connection)
            with contextlib.suppress(OSError):
                ANSWERS[request.param](connection)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in accepted:
        connection.close()
    thread.join()


@pytest.mark.parametrize(
    ("other_server", "part"),
    [("nothing", "did not answer"), ("garbage", "TLS"), ("HTTP", "TLS"), ("the end", "is it a host")],
    indirect=["other_server"],
)
def test_what_is_no_host(other_server: str, part: str, loopback: World) -> None:
    loopback.run("refused", [other_server], [other_server, part], [])


def test_nobody_listens(anywhere: Anywhere) -> None:
    """All that can't be reached are named."""
    world, workers = anywhere
    nobody = ["127.0.0.1:1", "tcp://127.0.0.1:2"]
    parts = ["2 of 3 hosts can't be attached", "127.0.0.1:1: ", "127.0.0.1:2: ", "Connection refused"]
    world.run("refused", [nobody[0], workers[0], nobody[1]], parts, workers)


def test_a_name_that_nobody_has(anywhere: Anywhere) -> None:
    world, _ = anywhere
    world.run("refused", ["nobody.invalid:26600"], ["nobody.invalid:26600"], [])


def test_a_host_that_is_off(world: World, workers: list[str]) -> None:
    world.run("refused", ["198.18.0.99:26600", workers[0]], ["1 of 2", "198.18.0.99:26600: "], workers)


@pytest.mark.parametrize("address", ["", "tcp://", "http://host:1", "host:port", "host:99999", "::1", "a b"])
def test_what_is_no_address(address: str) -> None:
    from monarch_backend.hosts import attach_to_workers

    with pytest.raises(ValueError, match="is no address of a host: write"):
        attach_to_workers([address])


def test_what_is_no_list_of_addresses() -> None:
    from monarch_backend.hosts import attach_to_workers

    for wrong in ("tcp://host:1", [], ()):
        with pytest.raises(ValueError, match="a list of addresses"):
            attach_to_workers(wrong)


@pytest.mark.parametrize(("heartbeat", "silence"), [(1.0, 2.0), (0.0, 3.0), (-1.0, 3.0), (float("nan"), 3.0)])
def test_bounds_that_nobody_could_keep(heartbeat: float, silence: float) -> None:
    from monarch_backend.hosts import attach_to_workers

    with pytest.raises(ValueError, match="silence is at least three heartbeats"):
        attach_to_workers(["127.0.0.1"], heartbeat=heartbeat, silence=silence)


def test_another_secret(anywhere: Anywhere) -> None:
    world, workers = anywhere
    env = {"MONARCH_SECRET": "12" * 32}
    world.start("refused", workers[:1], ["secret"], [], env=env)
    try:
        run = world.controller().finish()
        assert run.returncode == 0, run.err
        assert "12" * 32 not in run.out + run.err
    finally:
        world.controller().drop()


def test_another_idea_of_tls(anywhere: Anywhere) -> None:
    world, workers = anywhere
    world.run("refused", workers[:1], ["the same MONARCH_TLS"], [], env={"MONARCH_TLS": "0"})


def test_another_version(anywhere: Anywhere) -> None:
    world, workers = anywhere
    source = "import monarch_backend; monarch_backend.__version__ = '0.0.7'; " + UP
    with world.daemon(3, source=source) as other:
        parts = ["1 of 2", "monarch_backend", "0.0.7", "install the same versions on both"]
        world.run("refused", [workers[0], other.address], parts, workers)


def test_what_a_daemon_refuses(anywhere: Anywhere, tmp_path: Path) -> None:
    world, _ = anywhere
    public, short = tmp_path / "public", tmp_path / "short"
    public.write_text("ab" * 32)
    public.chmod(0o644)
    short.write_text("abcd")
    short.chmod(0o600)
    good = {"MONARCH_SECRET_FILE": str(world.secret)}
    cases = [
        ("0.0.0.0:0", {}, "MONARCH_SECRET_FILE"),
        ("[::]:0", {}, "MONARCH_SECRET_FILE"),
        ("198.18.0.10:0", {}, "MONARCH_SECRET_FILE"),
        ("nowhere:port", good, "is no address of a host"),
        ("192.0.2.1:26600", good, "192.0.2.1"),
        ("0.0.0.0:0", {"MONARCH_SECRET_FILE": str(public)}, f"chmod 600 {public}"),
        ("0.0.0.0:0", {"MONARCH_SECRET_FILE": str(short)}, "64 hexadecimal digits"),
        ("0.0.0.0:0", {"MONARCH_SECRET_FILE": str(tmp_path / "none")}, str(tmp_path / "none")),
        ("0.0.0.0:0", {"MONARCH_SECRET": "zz" * 32}, "64 hexadecimal digits"),
    ]
    world.run("up_refused", cases)


def test_a_port_that_is_taken(loopback: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        loopback.run("up_refused", [(f"127.0.0.1:{port}", {}, f"127.0.0.1, port {port}")])


def test_the_command_ends_with_2() -> None:
    """Once from the shell."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MONARCH_SECRET")}
    command = [sys.executable, "-c", UP, "up", "--address", "0.0.0.0:0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert "openssl rand -hex 32" in ended.stderr and "Traceback" not in ended.stderr
