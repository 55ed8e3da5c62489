"""Hosts that cannot be attached and daemons that cannot start are refused at once, with a remedy."""

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


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Yield the address of a plain loopback server that treats each connection as ``answer`` does."""
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
                answer(connection)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        for connection in accepted:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in accepted:
            connection.close()


def test_wrong_host_value_is_refused(loopback: World) -> None:
    """One error has the reasons of all hosts."""
    with contextlib.ExitStack() as stack:
        where = {name: stack.enter_context(server(answer)) for name, answer in ANSWERS.items()}
        parts = [
            "4 of 4 hosts can't be attached: ",
            f"{where['nothing']}: it did not answer for 3.0 s",
            f"{where['garbage']}: TLS failed: WRONG_VERSION_NUMBER: is it a host, of the same job",
            f"{where['HTTP']}: TLS failed: WRONG_VERSION_NUMBER: is it a host, of the same job",
            f"{where['the end']}: it did not answer for 3.0 s (",
            "is it a host, with the same MONARCH_TLS?",
        ]
        loopback.run("refused", list(where.values()), parts, [])


@pytest.mark.slow
def test_unreachable_host_raises(anywhere: Anywhere) -> None:
    """The reachable hosts can be attached afterwards."""
    world, workers = anywhere
    nobody = ["127.0.0.1:1", "nobody.invalid:26600", "198.18.0.99:26600"]
    parts = [
        "3 of 4 hosts can't be attached: ",
        "127.0.0.1:1: it did not answer for 3.0 s ([Errno 111] Connection refused)",
        "nobody.invalid:26600: it did not answer for 3.0 s",
        "198.18.0.99:26600: it did not answer for 3.0 s",
    ]
    world.run("refused", [*nobody, workers[0]], parts, workers)


@pytest.mark.parametrize("address", ["", "tcp://", "http://host:1", "host:port", "host:99999", "::1", "a b"])
def test_wrong_address_is_refused(address: str) -> None:
    from monarch_backend.hosts import attach_to_workers

    with pytest.raises(ValueError, match="is not an address of a host: write"):
        attach_to_workers([address])


def test_wrong_address_list_is_refused() -> None:
    from monarch_backend.hosts import attach_to_workers

    for wrong in ("tcp://host:1", [], ()):
        with pytest.raises(ValueError, match="a list of addresses"):
            attach_to_workers(wrong)


@pytest.mark.parametrize(("heartbeat", "silence"), [(1.0, 2.0), (0.0, 3.0), (-1.0, 3.0), (float("nan"), 3.0)])
def test_impossible_timeouts_are_refused(heartbeat: float, silence: float) -> None:
    from monarch_backend.hosts import attach_to_workers

    with pytest.raises(ValueError, match="silence is at least three heartbeats"):
        attach_to_workers(["127.0.0.1"], heartbeat=heartbeat, silence=silence)


def test_host_with_another_secret_is_refused(anywhere: Anywhere) -> None:
    world, workers = anywhere
    env = {"MONARCH_SECRET": "12" * 32}
    world.start("refused", workers[:1], ["secret"], [], env=env)
    try:
        run = world.controller().finish()
        assert run.returncode == 0, run.err
        assert "12" * 32 not in run.out + run.err
    finally:
        world.controller().drop()


@pytest.mark.slow
def test_host_with_another_tls_setting_is_refused(anywhere: Anywhere) -> None:
    world, workers = anywhere
    world.run("refused", workers[:1], ["the same MONARCH_TLS"], [], env={"MONARCH_TLS": "0"})


@pytest.mark.slow
def test_host_with_another_version_is_refused(anywhere: Anywhere) -> None:
    world, workers = anywhere
    source = "import monarch_backend; monarch_backend.__version__ = '0.0.7'; " + UP
    with world.daemon(3, source=source) as other:
        parts = ["1 of 2", "monarch_backend is 0.0.7 there and ", "install the same versions on both"]
        world.run("refused", [workers[0], other.address], parts, workers)


def test_daemon_refuses_wrong_options(anywhere: Anywhere, tmp_path: Path) -> None:
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
        ("nowhere:port", good, "is not an address of a host"),
        ("192.0.2.1:26600", good, "192.0.2.1"),
        ("0.0.0.0:0", {"MONARCH_SECRET_FILE": str(public)}, f"chmod 600 {public}"),
        ("0.0.0.0:0", {"MONARCH_SECRET_FILE": str(short)}, "64 hexadecimal digits"),
        ("0.0.0.0:0", {"MONARCH_SECRET_FILE": str(tmp_path / "none")}, str(tmp_path / "none")),
        ("0.0.0.0:0", {"MONARCH_SECRET": "zz" * 32}, "64 hexadecimal digits"),
    ]
    world.run("up_refused", cases)


def test_daemon_on_a_taken_port_fails(loopback: World) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        loopback.run("up_refused", [(f"127.0.0.1:{port}", {}, f"127.0.0.1:{port}: ")])


@pytest.mark.slow
def test_command_exits_with_2() -> None:
    """Run the command itself. The test above calls it as a function."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MONARCH_SECRET")}
    command = [sys.executable, "-c", UP, "up", "--address", "0.0.0.0:0"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert "openssl rand -hex 32" in ended.stderr and "Traceback" not in ended.stderr
