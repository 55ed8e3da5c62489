"""Replay files: the records of one actor, from its construction on. This module runs none of their content.

A file has the mark, and records with their length and checksum. It is only appended to, so a killed process leaves a
valid file. An incomplete record at the end is left out.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._transport.local.frames import size_of

SUFFIX = ".replay"

MAX_STEP_BYTES = 4 << 20
"""Largest number of bytes that a writer adds to a folder before it reads the folder's size again."""

_MARK = b"monarch replay 2\n"
_HEAD = struct.Struct("<QI")  # bytes of the record, and their CRC-32


@public("monarch_backend.actor")
class ReplayError(MonarchError, RuntimeError):
    """A replay file cannot be used. In a replayed actor: a call raises it whose reply is not in the file.

    >>> from monarch_backend.actor import ReplayError
    >>> issubclass(ReplayError, RuntimeError)
    True
    """


class Record(msgspec.Struct, array_like=True, gc=False):
    """A record of a replay file. ``message`` counts from 1; 0 is the constructor.

    ``place`` counts what one message has done: its calls, ports, and spawned meshes.
    """


class Header(Record, tag="header"):
    """First record: the actor, its process, and what its constructor received."""

    actor: str
    rank: int
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    creator: str
    generation: int
    is_async: bool
    number: int  # of the actor
    class_name: str
    mesh: str  # name of the mesh of processes
    host: str
    pid: int
    started_at: float  # seconds since the epoch
    token: str  # of the process
    owner: str  # token of the process that has spawned the actor
    root: str  # token of the main program
    home_rank: int
    limit_bytes: int
    python: str
    torch: str
    hash_seed: str
    folder: str
    arguments: list[str]  # of the program
    path: list[str]  # sys.path
    random: bytes  # pickled states of random generators
    body: Any
    buffers: list[Any] | None


class Started(Record, tag="started"):
    """The actor begins to handle a message."""

    message: int
    at: float  # seconds since the construction began
    prefix: bytes
    rank: int
    ref: int
    token: str
    sender: str
    group: tuple[int, int] | None  # rank and size of torch's default process group
    body: Any
    buffers: list[Any] | None
    position: tuple[int, int] = (0, 0)  # in the event loop, see event_loop.py


class Sent(Record, tag="sent"):
    """The actor sends a message: a call, or a value to a port."""

    message: int
    place: int
    ref: int
    what: str
    size: int
    checksum: int
    arguments: bytes | None  # pickled, if they are short


class Opened(Record, tag="opened"):
    """The actor opens a port."""

    message: int
    place: int
    number: int


class Spawned(Record, tag="spawned"):
    """The actor spawns a mesh. ``body`` is the pickled reference to it."""

    message: int
    place: int
    what: str
    body: bytes


class Arrived(Record, tag="arrived"):
    """A reply to a call, or a value for a port, has arrived."""

    message: int
    place: int
    at: float
    rank: int
    status: bytes
    body: Any
    buffers: list[Any] | None
    position: tuple[int, int] = (0, 0)


class Fired(Record, tag="fired"):
    """A timer of the event loop has run. ``number`` counts those of the message."""

    message: int
    number: int
    at: float
    position: tuple[int, int]


class TimedOut(Record, tag="timed out"):
    """A wait for a call or port has ended without a reply."""

    message: int
    place: int
    at: float


class Expired(Record, tag="expired"):
    """A call was given up, after its limit of time or by ``Future.cancel``."""

    message: int
    place: int
    at: float
    reason: str


class Lost(Record, tag="lost"):
    """A process that a call waits for has ended. ``body`` is the packed `MeshFailure`."""

    message: int
    place: int
    at: float
    token: str
    gone: str
    body: bytes


class Refused(Record, tag="refused"):
    """A message was not sent, because its receiver had ended."""

    message: int
    place: int
    token: str
    gone: str


class Replied(Record, tag="replied"):
    """The actor has replied to a message."""

    message: int
    status: bytes
    body: Any
    buffers: list[Any] | None


class Ended(Record, tag="ended"):
    """The actor has handled a message. ``error`` is the text of the exception."""

    message: int
    error: str
    is_cancelled: bool
    has_begun: bool = True  # False: it was cancelled before its first step


class Closed(Record, tag="closed"):
    """Last record: why nothing more was recorded. A killed process leaves none."""

    reason: str
    is_complete: bool


_encoder = msgspec.msgpack.Encoder()
_RECORDS = Sent | Opened | Spawned | Arrived | Fired | TimedOut | Expired | Lost | Refused | Replied
_decoder = msgspec.msgpack.Decoder(Header | Started | _RECORDS | Ended | Closed)


def plain(body: Any, buffers: Any) -> tuple[Any, list[Any] | None]:
    """Return a payload in a form that a record can have."""
    if isinstance(body, list):
        body = b"".join(body)
    return body, None if buffers is None else [memoryview(buffer).cast("B") for buffer in buffers]


def folder_size(folder: Path) -> int:
    """Return the size of all replay files of a folder in bytes. Raises OSError."""
    size = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    size += entry.stat(follow_symlinks=False).st_size
    return size


class ReplayFile:
    """File that an actor's process appends to. Any thread may call `write`.

    ``limit_bytes`` bounds this file. ``folder_limit_bytes`` bounds all replay files of its folder. Each writer reads
    their size before its next `step` bytes, so the folder may have a step more for each other writer.
    """

    def __init__(self, path: Path, limit_bytes: int, folder_limit_bytes: int) -> None:
        """Create the file with mode 0600, and its folder with mode 0700. Raises OSError, also if the folder is full."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder_limit = folder_limit_bytes
        self._step = min(MAX_STEP_BYTES, folder_limit_bytes // 64)
        self._unchecked = 0  # bytes that may be written before the folder's size is read
        if (size := folder_size(path.parent)) >= folder_limit_bytes:
            raise OSError(
                f"the replay files in {path.parent} have {size} bytes, and the limit is {folder_limit_bytes}: delete "
                "old ones, or raise MONARCH_REPLAY_FOLDER_BYTES"
            )
        self.path = path
        self._pid = os.getpid()
        self.began = time.monotonic()
        self._limit = limit_bytes
        self._lock = threading.RLock()  # a signal handler may send a message
        self._size = len(_MARK)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        os.write(self._descriptor, _MARK)

    def now(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_open(self) -> bool:
        """Whether `write` has an effect: recording has not stopped, and this is no fork, whose parent has the file."""
        return self._descriptor >= 0 and self._pid == os.getpid()

    def write(self, record: Record, payload: Any = b"", buffers: Any = None) -> str | None:
        """Append a record. ``payload`` and ``buffers`` are those in it, for its size.

        Return None, or why nothing more is recorded: the limit is reached, or the system refuses. Later records are
        dropped.
        """
        with self._lock:
            if not self.is_open:
                return None
            try:
                full = self._full(size_of(payload, buffers))
                if not full:
                    data = _encoder.encode(record)
                    full = self._full(len(data))
                if full:
                    return self._stop(record, full)
                self._append(data)
            except (OSError, MemoryError, ValueError) as error:  # ValueError: a part of 4 GiB or more
                return self._stop(record, f"writing has failed: {error}")
        return None

    def _full(self, size: int) -> str:
        """Return which limit a record of this size exceeds, if any."""
        if self._size + size > self._limit:
            return f"the limit of {self._limit} bytes is reached (MONARCH_REPLAY_BYTES)"
        if size > self._unchecked:
            if folder_size(self.path.parent) + size > self._folder_limit:
                return f"the folder's limit of {self._folder_limit} bytes is reached (MONARCH_REPLAY_FOLDER_BYTES)"
            self._unchecked = size + self._step
        return ""

    def _append(self, data: bytes) -> None:
        head = _HEAD.pack(len(data), zlib.crc32(data))
        size = len(head) + len(data)
        try:
            written = os.writev(self._descriptor, [head, data])
            while written < size:  # a signal, or a full disk, which then raises
                written += os.write(self._descriptor, (head + data)[written:])
        except OSError:
            os.ftruncate(self._descriptor, self._size)  # else the next record would be read as a part of this one
            raise
        self._size += size
        self._unchecked -= size

    def _stop(self, record: Record, why: str) -> str:
        message = getattr(record, "message", 0)
        reason = f"{why} at message {message}" if message else f"{why} in the constructor"
        self.close(reason, is_complete=False)
        return reason

    def close(self, reason: str, *, is_complete: bool) -> None:
        """Write the last record and close the file."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                self._append(_encoder.encode(Closed(reason, is_complete)))
            except OSError:
                pass  # a full disk: the reader sees an end without this record
            finally:
                descriptor, self._descriptor = self._descriptor, -1
                os.close(descriptor)


# ---- reading


def _open(path: Path) -> int:
    """Return a descriptor of a file that only this user can have written. Raises ReplayError."""
    try:
        # A pipe is opened without a wait for its writer, and then refused.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ReplayError(f"{path} can't be read: {error.strerror}") from error
    state = os.fstat(descriptor)
    why = ""
    if not stat.S_ISREG(state.st_mode):
        why = "it is not a file"
    elif state.st_uid != os.getuid():
        why = f"it belongs to user {state.st_uid}, and a replay runs code that is in the file"
    elif state.st_mode & 0o022:
        why = (
            f"other users can write to it (mode {state.st_mode & 0o777:o}), and a replay runs code that is in the file"
        )
    if why:
        os.close(descriptor)
        raise ReplayError(f"{path} is refused: {why}")
    return descriptor


def records(path: Path, *, only_header: bool = False) -> Iterator[Record]:
    """Yield the records of a file. The first one is its `Header`. An incomplete record ends them.

    Raises ReplayError for a file that is none, is damaged, or that another user may have written.
    """
    with os.fdopen(_open(path), "rb") as file:
        if file.read(len(_MARK)) != _MARK:
            raise ReplayError(f"{path} is not a replay file of this version")
        size = os.fstat(file.fileno()).st_size
        is_first = True
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                break
            length, checksum = _HEAD.unpack(head)
            place = file.tell()
            if place + length > size:
                break
            data = file.read(length)
            if zlib.crc32(data) != checksum:
                if place + length == size:
                    break  # the system has ended while it was written
                raise ReplayError(f"{path} is damaged: the record at byte {place} does not match its checksum")
            try:
                record: Record = _decoder.decode(data)
            except msgspec.DecodeError as error:
                raise ReplayError(f"{path} is damaged: byte {place}: {error}") from error
            if is_first != isinstance(record, Header):
                raise ReplayError(f"{path} is damaged: its header is missing, or there are two")
            is_first = False
            yield record
            if only_header:
                return
        if is_first:
            raise ReplayError(f"{path} is empty: its process was killed before the actor was constructed")


def find(path: Path, actor: str | None = None, rank: int | None = None) -> list[tuple[Path, Header]]:
    """Return the replay files at ``path``, a file or folder, with their headers, the newest first.

    Files of a folder that cannot be used are left out, unless all are. Raises ReplayError if there are none.
    """
    names = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
    found, refused = [], []
    for name in names:
        try:
            header = next(records(name, only_header=True))
        except ReplayError as error:
            refused.append(error)
            continue
        assert isinstance(header, Header)
        found.append((name, header))
    if not found and refused:
        raise refused[0]
    if not found:
        raise ReplayError(f"{path} has no replay files: set MONARCH_REPLAY to a folder in the program that is recorded")
    chosen = [
        (name, header)
        for name, header in found
        if (actor is None or header.actor == actor) and (rank is None or header.rank == rank)
    ]
    if not chosen:
        there = ", ".join(sorted({f"{header.actor} {header.rank}" for _, header in found}))
        raise ReplayError(f"{path} has no actor {actor!r} with rank {rank}; it has: {there}")
    return sorted(chosen, key=lambda each: each[1].started_at, reverse=True)
