"""A running program and a client of the dashboard's application."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from monarch_backend._core import platform
from monarch_backend._telemetry.subject import ThisMachine
from tests.dashboard.training_program import training_program

TOKEN = "secret-of-the-tests"
BASE = "http://127.0.0.1:8000"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not platform.HAS_MEMFD:
        for item in items:
            if "tests/dashboard" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="programs are found in /proc"))


def ask(address: str, path: str, token: str = "") -> tuple[int, bytes]:
    """Return the status and the content of an answer."""
    request = urllib.request.Request(address + path, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with training_program(tmp_path_factory.mktemp("program")) as process:
        yield process


@pytest.fixture(scope="module")
def served(running: subprocess.Popen[str]) -> Iterator[dict[str, str]]:
    """Run the command for the program. Yield its url, address and token."""
    words = ["dashboard", str(running.pid), "--no-open", "--json"]
    command = [sys.executable, "-m", "monarch_backend.cli", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()
        assert process.wait(30) == 0


@pytest.fixture(scope="module")
def client(running: subprocess.Popen[str]) -> Iterator[object]:
    from starlette.testclient import TestClient

    from monarch_backend._dashboard.server import application
    from monarch_backend._dashboard.source import Source

    app = application(Source(ThisMachine(str(running.pid))), TOKEN)
    with TestClient(app, BASE, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
        yield client
