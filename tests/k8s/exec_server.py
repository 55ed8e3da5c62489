"""Server of commands over a WebSocket, as a kubelet has it: protocols v5 and v4 of channel.k8s.io, with terminals."""

from __future__ import annotations

import contextlib
import fcntl
import http.server
import json
import os
import pty
import signal
import struct
import subprocess
import termios
import threading
from collections.abc import Callable, Sequence

from tests.k8s.websocket import BINARY, CLOSE, accept, received

V4, V5 = "v4.channel.k8s.io", "v5.channel.k8s.io"
_STDIN, _STDOUT, _STDERR, _STATUS, _RESIZE, _CLOSE_CHANNEL = 0, 1, 2, 3, 4, 255


def status_of(code: int) -> bytes:
    """Return the status object for an exit code."""
    if code == 0:
        return json.dumps({"metadata": {}, "status": "Success"}).encode()
    causes = [{"reason": "ExitCode", "message": str(code)}]
    message = f"command terminated with non-zero exit code {code}"
    found = {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}, "message": message}
    return json.dumps(found).encode()


def serve(
    request: http.server.BaseHTTPRequestHandler, command: Sequence[str], *, is_tty: bool,
    protocols: Sequence[str] = (V5, V4),
) -> None:  # fmt: skip
    """Run a command until it ends, or until the client closes. ``protocols``: those that the server has."""
    offered = [each.strip() for each in request.headers["Sec-WebSocket-Protocol"].split(",")]
    protocol = next(each for each in protocols if each in offered)
    send = accept(request, protocol)
    try:
        process, stdin, outputs = _start(command, is_tty)
    except OSError as error:
        failure = {"status": "Failure", "reason": "InternalError", "message": f"error executing command: {error}"}
        send(BINARY, bytes([_STATUS]) + json.dumps(failure).encode())
        send(CLOSE, b"")
        return
    copies = [threading.Thread(target=_copy, args=(send, *each), daemon=True) for each in outputs]
    for each in copies:
        each.start()

    def finish() -> None:
        code = process.wait()
        for each in copies:
            each.join()
        with contextlib.suppress(OSError, ValueError):
            send(BINARY, bytes([_STATUS]) + status_of(128 - code if code < 0 else code))
            send(CLOSE, b"")

    ending = threading.Thread(target=finish, daemon=True)
    ending.start()
    open_fds = {stdin, *(fd for _, fd in outputs)}
    try:
        _take_input(request, send, protocol, stdin, open_fds)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        ending.join()
        for fd in open_fds:
            os.close(fd)


def _start(command: Sequence[str], is_tty: bool) -> tuple[subprocess.Popen[bytes], int, list[tuple[int, int]]]:
    """Return the process, the descriptor of its input, and channels with descriptors of its output."""
    if is_tty:
        ours, theirs = pty.openpty()
        try:
            process = subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )  # fmt: skip
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return process, ours, [(_STDOUT, ours)]
    pipes = [os.pipe() for _ in range(3)]
    theirs_of_pipes = pipes[0][0], pipes[1][1], pipes[2][1]
    ours_of_pipes = pipes[0][1], pipes[1][0], pipes[2][0]
    stdin, stdout, stderr = theirs_of_pipes
    try:
        process = subprocess.Popen(command, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
    except OSError:
        for fd in ours_of_pipes:
            os.close(fd)
        raise
    finally:
        for fd in theirs_of_pipes:
            os.close(fd)
    return process, ours_of_pipes[0], [(_STDOUT, ours_of_pipes[1]), (_STDERR, ours_of_pipes[2])]


def _copy(send: Callable[[int, bytes], None], channel: int, fd: int) -> None:
    with contextlib.suppress(OSError, ValueError):  # EIO: the terminal of a process that has ended
        while data := os.read(fd, 32768):
            send(BINARY, bytes([channel]) + data)


def _take_input(
    request: http.server.BaseHTTPRequestHandler, send: Callable[[int, bytes], None], protocol: str, stdin: int,
    open_fds: set[int],
) -> None:  # fmt: skip
    with contextlib.suppress(OSError):
        for data in received(request.rfile, send):
            _handle(data, protocol, stdin, open_fds)


def _handle(data: bytes, protocol: str, stdin: int, open_fds: set[int]) -> None:
    channel, rest = data[0], data[1:]
    if stdin not in open_fds:
        return
    if channel == _STDIN:
        with contextlib.suppress(BrokenPipeError):
            os.write(stdin, rest)
    elif channel == _RESIZE:
        size = json.loads(rest)
        fcntl.ioctl(stdin, termios.TIOCSWINSZ, struct.pack("HHHH", size["Height"], size["Width"], 0, 0))
    elif channel == _CLOSE_CHANNEL and protocol == V5 and rest == bytes([_STDIN]):
        open_fds.discard(stdin)
        os.close(stdin)
