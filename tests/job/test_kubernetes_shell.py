"""`monarch-backend k8s shell` against an API server that has the protocols of exec."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import itertools
import os
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._job.kubernetes import pod_exec
from monarch_backend.job import JobError, KubernetesJob
from tests.k8s import exec_server, websocket
from tests.support.kubernetes_api import ApiServer, api_server

PATIENCE = 60.0
CLI = [sys.executable, "-m", "monarch_backend.cli", "k8s", "shell"]


class Cluster:
    """A job with two pods, in which each command runs as a process of this machine."""

    def __init__(self, api: ApiServer) -> None:
        self.api, self.protocols = api, (exec_server.V5, exec_server.V4)
        self.requests: list[tuple[str, dict[str, list[str]]]] = []
        api.on_connect = self._connect
        path = api.kubeconfig.with_name("job.json")
        self.job = KubernetesJob(name="train", path=path, kubeconfig=api.kubeconfig)
        self.job.add_mesh("loaders", 1, image="i").add_mesh("trainers", 2, image="i")
        self.job.apply(wait=False)
        [labels] = [each["metadata"]["labels"] for each in api.objects.values() if each["kind"] == "Secret"]
        for mesh, index in (("loaders", 0), ("trainers", 0), ("trainers", 1)):
            own = {**labels, "monarch-backend/mesh": mesh, "apps.kubernetes.io/pod-index": str(index)}
            api.add_pod(f"train-{mesh}-{index}", own)

    def _connect(
        self, request: http.server.BaseHTTPRequestHandler, path: str, query: dict[str, list[str]]
    ) -> None:  # fmt: skip
        self.requests.append((path, query))
        [command, is_tty] = query["command"], query["tty"] == ["true"]
        if command == ["cut"]:
            websocket.accept(request, exec_server.V4)
        elif command in (["silent"], ["pings"]):
            _answer_pings(request, 3 if command == ["pings"] else 0)
        elif command == ["forbidden"]:
            request.send_error(403, "pods/exec is forbidden")
        else:
            exec_server.serve(request, command, is_tty=is_tty, protocols=self.protocols)

    def run(self, *words: str, stdin: bytes | None = None) -> tuple[int, bytes, str]:
        """Return exit code, output and errors of the command."""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        done = subprocess.run([*CLI, *words], capture_output=True, timeout=PATIENCE, check=False, **given)
        return done.returncode, done.stdout, done.stderr.decode()


def _answer_pings(request: http.server.BaseHTTPRequestHandler, count: int) -> None:
    """Answer pings, and end the command with the last one. With 0 answer nothing until the client closes."""
    send = websocket.accept(request, exec_server.V4)
    while (frame := websocket.read(request.rfile)) is not None:
        if frame[0] == websocket.PING and count:
            send(websocket.PONG, frame[1])
            count -= 1
            if not count:
                send(websocket.BINARY, b"\3" + exec_server.status_of(6))
                send(websocket.CLOSE, b"")
                return


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with api_server(tmp_path) as api:
        made = Cluster(api)
        yield made
        assert made.job._client is not None
        made.job._client.client.rest_client.pool_manager.clear()  # pytest keeps the fixture's value


@pytest.mark.parametrize(
    ("host", "pod"),
    [("trainers[1]", "train-trainers-1"), ("1", "train-trainers-0"), ("train-loaders-0", "train-loaders-0")],
)
def test_command_runs_in_the_named_pod_with_its_exit_code(cluster: Cluster, host: str, pod: str) -> None:
    script = "echo out; echo err >&2; exit 3"
    code, out, error = cluster.run(str(cluster.job.path), host, "--", "sh", "-c", script)
    assert (code, out, error) == (3, b"out\n", "err\n")
    [(path, query)] = cluster.requests
    assert path == f"/api/v1/namespaces/team/pods/{pod}/exec"
    assert query["container"] == ["monarch"] and query["command"] == ["sh", "-c", script]
    assert (query["stdin"], query["tty"], query["stderr"]) == (["false"], ["false"], ["true"])


def test_large_output_and_success(cluster: Cluster) -> None:
    code, out, _ = cluster.run(str(cluster.job.path), "0", "--", "head", "-c", "1000000", "/dev/zero")
    assert code == 0 and out == bytes(1_000_000)


@pytest.mark.slow
def test_large_input_with_larger_output_is_passed(cluster: Cluster) -> None:
    """Both directions are full at the same time, in which case each side has to read in order to send."""
    given = os.urandom(8 << 20)
    code, out, error = cluster.run("-i", str(cluster.job.path), "0", "--", "od", "-v", "-c", stdin=given)
    assert code == 0, error
    assert out == subprocess.run(["od", "-v", "-c"], input=given, capture_output=True, check=True).stdout


def test_command_that_does_not_read_its_input_ends_with_its_exit_code(cluster: Cluster) -> None:
    command = ["-i", str(cluster.job.path), "0", "--", "sh", "-c", "echo out; exit 4"]
    code, out, error = cluster.run(*command, stdin=bytes(8 << 20))
    assert (code, out, error) == (4, b"out\n", "")


@pytest.mark.parametrize("protocol", [exec_server.V5, exec_server.V4])
def test_standard_input_is_passed_and_its_end_with_v5(cluster: Cluster, protocol: str) -> None:
    cluster.protocols = (protocol,)
    code, out, error = cluster.run("-i", str(cluster.job.path), "0", "--", "cat", stdin=b"data\n")
    if protocol == exec_server.V5:
        assert (code, out) == (0, b"data\n"), error
    else:
        assert code == 1 and "the end of input needs Kubernetes 1.30" in error


def test_shell_without_a_terminal_reads_commands(cluster: Cluster) -> None:
    code, out, _ = cluster.run(str(cluster.job.path), "0", stdin=b"echo $((6 * 7))\nexit 5\n")
    assert (code, out) == (5, b"42\n")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["7", "--", "true"], "the job has no host 7; it has loaders[0], trainers[0], trainers[1]"),
        (["0", "--", "/nowhere/x"], "pod train-loaders-0: error executing command"),
        (["0", "--", "cut"], "pod train-loaders-0: the connection ended before the command"),
        (["0", "--", "forbidden"], "pod train-loaders-0: no command can be started: Handshake status 403"),
    ],
)
def test_failure_is_named_with_the_pod(cluster: Cluster, words: Sequence[str], text: str) -> None:
    code, out, error = cluster.run(str(cluster.job.path), *words)
    assert (code, out) == (1, b"") and text in error, error


def test_connection_without_an_answer_to_a_ping_is_lost(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_exec, "PING_INTERVAL_S", 0.01)
    monkeypatch.setattr(pod_exec, "PING_TIMEOUT_S", 0.1)
    with pytest.raises(JobError, match=r"pod train-loaders-0: the connection is lost: no answer for 0.1 s"):
        cluster.job.execute("loaders", 0, ["silent"])


def test_connection_with_answers_to_pings_goes_on(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_exec, "PING_INTERVAL_S", 0.01)
    assert cluster.job.execute("loaders", 0, ["pings"]) == 6


def test_ping_is_lost_only_after_the_server_was_silent() -> None:
    interval, timeout = pod_exec.PING_INTERVAL_S, pod_exec.PING_TIMEOUT_S
    beat = pod_exec.Heartbeat(0.0)
    assert (beat.ping(0.0), beat.next_s(0.0)) == (None, interval)
    assert beat.ping(interval) == b"0"
    beat.received(interval + 1)  # output of the command
    assert not beat.is_lost(interval + timeout)
    assert beat.is_lost(interval + 1 + timeout)
    beat.received(interval + 1 + timeout, b"0")
    assert not beat.is_lost(10 * timeout)
    assert beat.ping(10 * timeout) == b"0"


def test_ping_behind_input_that_the_command_does_not_read_is_not_lost() -> None:
    end = pod_exec.PING_INTERVAL_S + pod_exec.PING_TIMEOUT_S
    beat = pod_exec.Heartbeat(0.0)
    beat.input_sent(pod_exec.MAX_UNREAD_BYTES + 1)
    asked = beat.ping(pod_exec.PING_INTERVAL_S)
    assert asked is not None and not beat.is_lost(end)
    assert beat.next_s(end) > 0
    beat.received(end, asked)  # the command has read it
    assert beat.ping(2 * end) == asked
    assert beat.is_lost(2 * end + pod_exec.PING_TIMEOUT_S)


def test_pod_of_others_that_was_replaced_meanwhile_is_named(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("ab" * 32)
    with api_server(tmp_path) as api:
        path = tmp_path / "job.json"
        job = KubernetesJob(name="theirs", path=path, kubeconfig=api.kubeconfig, secret_file=secret)
        job.attach_mesh("workers", 1, "app=x").apply(wait=False)
        api.add_pod("w-0", {"app": "x"})
        lists, answer = itertools.count(1), api.answer

        def answer_without_the_pod_at_last(
            method: str, path: str, query: dict[str, list[str]], body: Any
        ) -> tuple[int, Any]:
            if query.get("labelSelector") == ["app=x"] and next(lists) == 2:
                api.objects.clear()
            return answer(method, path, query, body)

        api.answer = answer_without_the_pod_at_last  # type: ignore[method-assign]
        with pytest.raises(JobError, match=r"pod w-0 of workers\[0\] was deleted or replaced meanwhile"):
            job.execute("workers", 0, ["true"])
        assert job._client is not None
        job._client.client.rest_client.pool_manager.clear()


class Terminal:
    """A terminal, with a program in it."""

    def __init__(self, command: Sequence[str]) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(command[0], command)
        self.output = b""

    def resize(self, lines: int, columns: int) -> None:
        """Change the size. The kernel sends SIGWINCH to the program."""
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def read_until(self, text: bytes) -> None:
        end = time.monotonic() + PATIENCE
        while text not in self.output:
            assert select.select([self.fd], [], [], max(0.0, end - time.monotonic()))[0], self.output
            self.output += os.read(self.fd, 4096)

    def type(self, data: bytes) -> None:
        os.write(self.fd, data)

    def close(self) -> int:
        """Return the exit code."""
        end = time.monotonic() + PATIENCE
        while True:  # the output must be read, so that the program can write it
            if select.select([self.fd], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):
                    self.output += os.read(self.fd, 4096)
            found, status = os.waitpid(self.pid, os.WNOHANG)
            if found:
                os.close(self.fd)
                return os.waitstatus_to_exitcode(status)
            if time.monotonic() > end:
                os.kill(self.pid, signal.SIGKILL)


def test_terminal_is_raw_and_its_size_follows(cluster: Cluster) -> None:
    terminal = Terminal([*CLI, "-t", str(cluster.job.path), "trainers[0]", "--", "sh"])
    terminal.type(b"echo ready-$((1 + 1))\r")
    terminal.read_until(b"ready-2\r\n")
    terminal.resize(44, 122)
    terminal.type(b"while [ \"$(stty size)\" != '44 122' ]; do sleep 0.05; done; echo resized-$((1 + 1))\r")
    terminal.read_until(b"resized-2\r\n")
    # A shell loses a signal between the fork and the exec of a command, so the command itself says that it runs.
    terminal.type(b"sh -c 'echo sleeps-$((1 + 1)); exec sleep 1000'\r")
    terminal.read_until(b"sleeps-2\r\n")
    terminal.type(b"\x03")  # ends the command in the pod, not this program
    terminal.read_until(b"^C")
    terminal.type(b"echo alive-$((1 + 1))\r")
    terminal.read_until(b"alive-2\r\n")
    terminal.type(b"exit 9\r")
    assert terminal.close() == 9
    [(_, query)] = cluster.requests
    assert (query["tty"], query["stdin"], query["stderr"]) == (["true"], ["true"], ["false"])


def test_terminal_is_not_raw_after_sigterm(cluster: Cluster) -> None:
    # Of another shell, since a terminal without its first program would be reset.
    command = shlex.join(
        [*CLI, "-t", str(cluster.job.path), "0", "--", "sh", "-c", "echo ready-$((1 + 1)); sleep 1000"]
    )
    inner = shlex.quote(f'echo "pid=$$="; exec {command}')
    terminal = Terminal(["/bin/sh", "-c", f'sh -c {inner}; echo "code=$?="; stty -a; echo at-the-end'])
    terminal.read_until(b"ready-2")
    found = re.search(rb"pid=(\d+)=", terminal.output)
    assert found
    os.kill(int(found[1]), signal.SIGTERM)
    terminal.read_until(b"at-the-end")
    assert terminal.close() == 0
    _, _, after = terminal.output.partition(b"code=")
    assert after.startswith(b"143=") and b" icanon" in after and b" echo " in after, after
