"""Messages between a spawner and the fork server, and the socket that carries them.

Messages are typed, framed and bounded, and may carry open files. This module unpickles nothing: payloads for the new
process are bytes to both sides. spawner.py and fork_server.py handle the messages.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from monarch_backend._core import platform

# Size of one message. A function with its closure has kilobytes; larger payloads are data and are sent otherwise.
MESSAGE_LIMIT = 64 << 20
_RECEIVE_BYTES = 256 << 10
_MAX_DESCRIPTORS = 253  # of one sendmsg, by the kernel

Method: TypeAlias = Literal["fork", "spawn"]
T = TypeVar("T")


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Start a process. Paths and variables are bytes, because not all of them are UTF-8."""

    id: int
    label: str
    main: bytes
    environment: dict[bytes, bytes]
    path: list[bytes]
    argv: list[bytes]
    cwd: bytes
    bootstrap: bytes | None
    cpus: list[int] | None
    threads: int | None
    stdout: bool  # whether the message carries a file for it
    stderr: bool
    method: Method | None  # None: fork where that is safe
    imports: list[str] = []  # modules of this package, which the server has before it forks
    main_module: tuple[str, bytes] = ("", b"")  # name and path of the program's main module, see main_module.py
    stdin: bool = False  # whether the message carries a file for it, after the other two
    recording: tuple[int, int, int] | None = None  # the owner's pid, its descriptor of the area, and the slot
    ignores_sigterm: bool = False  # the server sets it, see its Configuration


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """Send ``signal`` to the process, or, if it is not started yet, do not start it.

    ``group``: also send it to its process group, which has all its descendants without a group of their own.
    """

    id: int
    signal: int
    group: bool = False


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The process exists. ``reason`` says why it could not be forked, if that was not asked for."""

    id: int
    pid: int
    method: Method
    reason: str = ""


class SpawnFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The process does not exist and will not; ``reason`` says why."""

    id: int
    reason: str


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The process has ended. ``returncode`` is as in subprocess: negative for a signal.

    ``oom_killed``: as far as is known, the kernel killed it for lack of memory. ``reason`` is set if its end was not
    observed but follows from another event, like the death of the fork server. ``messages``: what it was doing, which
    only its starter can read, from an agent to its controller.
    """

    id: int
    pid: int
    returncode: int
    core_dumped: bool = False
    oom_killed: bool = False
    reason: str = ""
    messages: tuple[str, ...] = ()


Request: TypeAlias = Spawn | Kill
Event: TypeAlias = Started | SpawnFailed | Exited

_encoder = msgspec.msgpack.Encoder()
_checker = msgspec.msgpack.Decoder(Request)


class BadMessageError(Exception):
    """The other side sent an invalid message. The text describes the error."""


def frame(message: Request | Event) -> bytes:
    """Return the message as it is sent over the socket. Raises ValueError if it is larger than MESSAGE_LIMIT."""
    payload = _encoder.encode(message)
    if len(payload) > MESSAGE_LIMIT:
        raise ValueError(f"{len(payload)} bytes, and {MESSAGE_LIMIT} are the limit")
    return len(payload).to_bytes(4, "little") + payload


def check(data: bytes) -> None:
    """Raise ValueError, with the field's name, if a frame holds values that the other side would reject."""
    _checker.decode(memoryview(data)[4:])


class Channel(Generic[T]):
    """A Unix socket that never blocks: whole messages, received as ``T``, and open files, in the order of `put`."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._decoder = decoder
        self._received = bytearray()
        self._descriptors: deque[int] = deque()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def put(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Queue a frame and its files, which are closed once they are sent."""
        self._unsent.append((memoryview(data), descriptors))

    def flush(self) -> None:
        """Send what the socket takes now. Raises OSError if the other side is gone."""
        while self._unsent:
            data, descriptors = self._unsent[0]
            try:
                sent = socket.send_fds(self.socket, [data], descriptors) if descriptors else self.socket.send(data)
            except BlockingIOError:
                return
            close_all(descriptors)  # they go with the first byte
            if sent < len(data):
                self._unsent[0] = data[sent:], ()
            else:
                self._unsent.popleft()

    def receive(self) -> list[T]:
        """Return the messages that have arrived, perhaps none. Raises EOFError at the end, BadMessageError, OSError."""
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(_RECEIVE_BYTES, room, _close_on_exec())
        except BlockingIOError:
            return []
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files = array.array("i")
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
                self._descriptors.extend(files)
                if not _close_on_exec():
                    for file in files:
                        os.set_inheritable(file, False)
        if flags & socket.MSG_CTRUNC:
            raise BadMessageError("files were sent, and this process has too many open files to receive them")
        if not data:
            raise EOFError
        self._received += data
        return list(self._whole_messages())

    def _whole_messages(self) -> Iterable[T]:
        start, data = 0, self._received
        while len(data) - start >= 4:
            size = int.from_bytes(data[start : start + 4], "little")
            if size > MESSAGE_LIMIT:
                raise BadMessageError(f"a message of {size} bytes, and {MESSAGE_LIMIT} are the limit")
            end = start + 4 + size
            if len(data) < end:
                break
            try:
                yield self._decoder.decode(data[start + 4 : end])
            except msgspec.DecodeError as error:
                raise BadMessageError(f"an invalid message: {error}") from None
            start = end
        del data[:start]

    def take_descriptor(self) -> int:
        """Return the next file that has arrived; the caller owns it. Raises BadMessageError if there is none."""
        if not self._descriptors:
            raise BadMessageError("a message promises a file that did not come with it")
        return self._descriptors.popleft()

    def drop_unsent(self) -> None:
        for _, descriptors in self._unsent:
            close_all(descriptors)
        self._unsent.clear()

    def close(self) -> None:
        """Close the socket and all files in transit."""
        self.drop_unsent()
        close_all(self._descriptors)
        self._descriptors.clear()
        self.socket.close()


def _close_on_exec() -> int:
    return 0 if platform.IS_PORTABLE else socket.MSG_CMSG_CLOEXEC


def close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
