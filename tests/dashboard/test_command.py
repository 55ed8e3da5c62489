"""`monarch-backend dashboard`: what it prints, where it listens, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._dashboard.guard import is_loopback
from monarch_backend._dashboard.server import private_page
from tests.dashboard.conftest import ask

Program = subprocess.Popen[str]


@contextlib.contextmanager
def _start(*words: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "monarch_backend.cli", "dashboard", "--no-open", *words]
    env = {**os.environ, **environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_a_signal_and_logs_no_secret(number: int, running: Program) -> None:
    with _start(str(running.pid), "--json") as process:
        try:
            assert process.stdout is not None
            about = json.loads(process.stdout.readline())
            assert about["url"] == f"{about['address']}#token={about['token']}" and len(about["token"]) >= 40
            assert about["address"].startswith("http://127.0.0.1:")
            assert ask(about["address"], "")[0] == 200
            assert ask(about["address"], "api/v1/programs")[0] == 401
            status, content = ask(about["address"], "api/v1/programs", about["token"])
            assert status == 200 and json.loads(content)["programs"][0]["pid"] == running.pid
        finally:
            process.send_signal(number)
        out, errors = process.communicate(timeout=30)
    assert (process.returncode, out, errors) == (0, "", "")


def test_command_prints_its_address(running: Program) -> None:
    with _start(str(running.pid)) as process:
        try:
            assert process.stdout is not None
            first, second = process.stdout.readline(), process.stdout.readline()
        finally:
            process.terminate()
        assert process.wait(30) == 0
    assert first.startswith("Dashboard: http://127.0.0.1:") and "#token=" in first
    assert second == "The address has a secret. Ctrl-C ends the dashboard.\n"


def test_tokens_differ(running: Program) -> None:
    tokens = set()
    for _ in range(2):
        with _start(str(running.pid), "--json") as process:
            assert process.stdout is not None
            tokens.add(json.loads(process.stdout.readline())["token"])
            process.terminate()
            process.wait(30)
    assert len(tokens) == 2


def test_unknown_program_is_an_error(running: Program, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", "no-such-program", "--no-open"]) == 1
    assert "no running program is 'no-such-program'" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_host_that_others_reach_is_refused(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["dashboard", "--no-open", "--host", host]) == 1
    error = capsys.readouterr().err
    assert "without encryption" in error and "--allow-remote" in error and "ssh -L" in error


def test_host_that_others_reach_is_served_with_a_warning_if_asked(running: Program) -> None:
    with _start(str(running.pid), "--json", "--host", "0.0.0.0", "--allow-remote") as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            about = json.loads(process.stdout.readline())
            assert "warning: other machines can reach this address" in process.stderr.readline()
            port = about["address"].rpartition(":")[2]
            assert ask(f"http://127.0.0.1:{port}", "api/v1/programs", about["token"])[0] == 200
        finally:
            process.terminate()
        process.communicate(timeout=30)


def test_port_in_use_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["dashboard", "--no-open", "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "65536", "x"])
def test_wrong_port_is_an_error(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["dashboard", "--port", port])
    assert ended.value.code == 2 and "port" in capsys.readouterr().err


def test_missing_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "uvicorn.py").write_text("raise ModuleNotFoundError('no uvicorn', name='uvicorn')")
    with _start(PYTHONPATH=str(tmp_path)) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors == (
        "monarch-backend dashboard: it needs uvicorn, which is not installed: "
        "pip install 'monarch_backend[dashboard]'\n"
    )


def test_page_that_leads_to_the_token_is_private_and_deleted() -> None:
    with private_page("http://127.0.0.1:1/#token=x&y") as address:
        path = Path(address.removeprefix("file://"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert "url=http://127.0.0.1:1/#token=x&amp;y" in path.read_text()
    assert not path.parent.exists()


def test_loopback_is_recognised() -> None:
    assert is_loopback("localhost") and is_loopback("::1") and not is_loopback("0.0.0.0")


def test_other_commands_do_not_import_the_server() -> None:
    code = "import sys; from monarch_backend import cli; cli.main(['ps']); print({'uvicorn'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.endswith("set()\n")
