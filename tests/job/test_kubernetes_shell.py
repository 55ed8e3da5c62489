"""`monarch-backend k8s shell` against an API server that has the protocols of exec."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import os
import pty
import select
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

from monarch_backend.job import KubernetesJob
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
        elif command == ["forbidden"]:
            request.send_error(403, "pods/exec is forbidden")
        else:
            exec_server.serve(request, command, is_tty=is_tty, protocols=self.protocols)

    def run(self, *words: str, stdin: bytes | None = None) -> tuple[int, bytes, str]:
        """Return exit code, output and errors of the command."""
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        done = subprocess.run([*CLI, *words], capture_output=True, timeout=PATIENCE, check=False, **given)
        return done.returncode, done.stdout, done.stderr.decode()


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
    terminal.type(b"echo sleeps-$((1 + 1)); sleep 1000\r")
    terminal.read_until(b"sleeps-2\r\n")
    terminal.type(b"\x03")  # ends the command in the pod, not this program
    terminal.read_until(b"^C")
    terminal.type(b"echo alive-$((1 + 1))\r")
    terminal.read_until(b"alive-2\r\n")
    terminal.type(b"exit 9\r")
    assert terminal.close() == 9
    [(_, query)] = cluster.requests
    assert (query["tty"], query["stdin"], query["stderr"]) == (["true"], ["true"], ["false"])
