"""Secret of a job, and the messages with which two hosts prove that they know it.

All messages have a fixed size and are compared, not parsed: an unauthenticated peer reaches no decoder. The module
uses no sockets: bytes in, bytes out. session.py defines the frames that follow.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._core.state import make_private, state_directory

SECRET_BYTES = 32
MAGIC = b"mona"
_MAX_TEXT_BYTES = 1 << 13  # enough for a hundred secrets and some space around them
PROTOCOL = 1
"""Version of the protocol between hosts. Hosts of different versions refuse each other."""

# A field that an earlier version left as padding is zero there. A version that does not have the field ignores it.
_HELLO = struct.Struct(
    "!4sHBB8s32s16s16sQ"
)  # magic, protocol, resumes, offers_rdma, secret, nonce, token, session, received
_ANSWER = struct.Struct("!4sHHB7x32s16s16sQ")  # magic, protocol, refusal, offers_rdma, nonce, token, session, received
PROOF_BYTES = 32
HELLO_BYTES, ANSWER_BYTES = _HELLO.size, _ANSWER.size + PROOF_BYTES


@public("monarch_backend.errors")
class HandshakeError(MonarchError, ConnectionError):
    """The peer is not a host of this job, or has another version; the text says which, and what to do.

    Raised in the handshake between two hosts. The called side logs the text; on the calling side
    the host is lost for this reason.
    """


class Refusal:
    NONE, PROTOCOL, SECRET, SESSION, FULL = range(5)


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def name_of(secret: bytes) -> bytes:
    """Return the public name of a secret. A host that serves several jobs looks up the secret by its name."""
    return blake2b(secret, digest_size=8, person=b"monarch name").digest()


def user_secret(folder: Path | None = None) -> bytes:
    """Return the secret of this user on this machine, from a private file that is created on first use.

    ``folder`` defaults to ``$XDG_STATE_HOME/monarch_backend``, or its equivalent in the home directory. Raises
    PermissionError if the file belongs to another user or can be read by others.
    """
    folder = make_private(folder or state_directory())
    path = folder / "secret"
    with contextlib.suppress(FileExistsError):
        write_private(path, new_secret().hex().encode() + b"\n", os.link)
    return read_secret(path)


def write_private(path: Path, data: bytes, put: Callable[[Path, Path], None] = os.replace) -> None:
    """Put a file that only this user can read into place together with its content: others may read it already."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        put(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def read_secret(path: Path) -> bytes:
    """Return the first secret of a file. Raises as `read_secrets`."""
    return read_secrets(path)[0]


def read_secrets(path: Path) -> list[bytes]:
    """Return the secrets of a file: 64 hexadecimal digits on each line.

    Raises PermissionError if the file does not belong to this user alone, ValueError for other content.
    """
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{path} holds a secret and must be yours alone: chown it, and chmod 600 {path}")
        text = file.read(_MAX_TEXT_BYTES).decode("ascii", "replace")
    return [parse_secret(line, str(path)) for line in text.strip().split("\n")]


def parse_secret(text: str, source: str) -> bytes:
    """Parse 64 hexadecimal digits. An error names ``source``, and never the text."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{source} does not hold a secret of {2 * SECRET_BYTES} hexadecimal digits")
    return secret


@dataclass(frozen=True)
class Hello:
    """Introduction of one side of a handshake.

    ``who``: the token of its gateway. ``received``: the number of the last frame of this session that it has received.
    ``resumes``: the session exists already, and a peer that has forgotten it refuses. ``offers_rdma``: the host may
    have NICs, and understands messages about them.
    """

    who: bytes
    session: bytes
    received: int = 0
    resumes: bool = False
    offers_rdma: bool = False
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))


def _unpack(layout: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) != layout.size:
        raise HandshakeError(f"{len(data)} bytes where a handshake has {layout.size}: it was cut off")
    return layout.unpack(data)


def _proof(secret: bytes, role: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, b"monarch " + role + b"\0" + b"".join(said), "sha256")


class HandshakeClient:
    """Handshake of the side that connects. ``binding``: the channel binding of TLS, b"" without TLS.

    >>> secret = new_secret()
    >>> caller = HandshakeClient(secret, Hello(b"a" * 16, b"s" * 16))
    >>> called = HandshakeServer({name_of(secret): secret})
    >>> hello = called.hear(caller.hello())
    >>> proof = caller.hear(called.answer(Hello(b"b" * 16, b"s" * 16)))
    >>> called.check(proof)
    >>> caller.other.who, called.other.who
    (b'bbbbbbbbbbbbbbbb', b'aaaaaaaaaaaaaaaa')
    """

    def __init__(self, secret: bytes, mine: Hello, binding: bytes = b"") -> None:
        self._secret, self._mine, self._binding = secret, mine, binding
        self.other: Hello

    def hello(self) -> bytes:
        mine = self._mine
        which = name_of(self._secret)
        said = (mine.resumes, mine.offers_rdma, which, mine.nonce, mine.who, mine.session, mine.received)
        return _HELLO.pack(MAGIC, PROTOCOL, *said)

    def hear(self, answer: bytes) -> bytes:
        """Check the answer, of ANSWER_BYTES, and return the proof. Raises HandshakeError."""
        head, proof = answer[: _ANSWER.size], answer[_ANSWER.size :]
        magic, protocol, refusal, offers_rdma, nonce, who, session, received = _unpack(_ANSWER, head)
        if magic != MAGIC:
            raise HandshakeError("the address does not belong to a host of monarch_backend: is it right?")
        if refusal == Refusal.PROTOCOL or protocol != PROTOCOL:
            raise HandshakeError(
                f"it speaks protocol {protocol} between hosts, and this side {PROTOCOL}: install the same "
                "monarch_backend on both"
            )
        if refusal == Refusal.SECRET:
            raise HandshakeError("it does not know this job's secret: give both sides the same file or variable")
        if refusal == Refusal.FULL:
            raise HandshakeError(
                "it has as many sessions as it accepts: end controllers that are not needed, then attach again"
            )
        if refusal == Refusal.SESSION:
            raise HandshakeError(
                "its process has ended, or has given up this connection, which was broken for too long"
            )
        said = (self.hello(), head, self._binding)
        if refusal or not hmac.compare_digest(proof, _proof(self._secret, b"called", *said)):
            raise HandshakeError("it could not prove that it knows this job's secret: is another machine in between?")
        self.other = Hello(who, session, received, offers_rdma=bool(offers_rdma), nonce=nonce)
        return _proof(self._secret, b"caller", *said)


class HandshakeServer:
    """Handshake of the side that listens. ``other``, the caller, is unproven before :meth:`check` returns."""

    def __init__(self, known: dict[bytes, bytes], binding: bytes = b"") -> None:
        self._known, self._binding = known, binding
        self._hello = self._head = b""
        self.secret: bytes
        self.other: Hello

    def hear(self, hello: bytes) -> int:
        """Read the first message; return the Refusal. Raises HandshakeError for another program's bytes."""
        magic, protocol, resumes, offers_rdma, which, nonce, who, session, received = _unpack(_HELLO, hello)
        if magic != MAGIC:
            raise HandshakeError("its first bytes are not those of a host of monarch_backend")
        if protocol != PROTOCOL:
            return Refusal.PROTOCOL
        secret = self._known.get(which)
        if secret is None:
            return Refusal.SECRET
        self._hello, self.secret = hello, secret
        self.other = Hello(who, session, received, bool(resumes), bool(offers_rdma), nonce)
        return Refusal.NONE

    def answer(self, mine: Hello) -> bytes:
        said = (MAGIC, PROTOCOL, Refusal.NONE, mine.offers_rdma, mine.nonce, mine.who, mine.session, mine.received)
        self._head = _ANSWER.pack(*said)
        return self._head + _proof(self.secret, b"called", self._hello, self._head, self._binding)

    @staticmethod
    def refuse(why: int) -> bytes:
        """Return an answer, of ANSWER_BYTES, that has only the reason of the refusal."""
        return _ANSWER.pack(MAGIC, PROTOCOL, why, 0, b"", b"", b"", 0) + bytes(PROOF_BYTES)

    def check(self, proof: bytes) -> None:
        """Check the caller's last message, of PROOF_BYTES. Raises HandshakeError if it does not know the secret."""
        said = (self._hello, self._head, self._binding)
        if not self._head or not hmac.compare_digest(proof, _proof(self.secret, b"caller", *said)):
            raise HandshakeError("it named this job's secret, and could not prove that it knows it")
