"""The secret of a job: where it comes from, and how two hosts prove it to each other before anything else is said.

Everything here has a fixed size and is compared, not parsed: a stranger reaches no decoder. No sockets: bytes in, bytes
out. What is said afterwards is session.py's.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import stat
import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._core.state import make_private, state_directory

SECRET_BYTES = 32
MAGIC = b"mona"
_MAX_TEXT_BYTES = 1 << 13  # characters of a file that could still hold a secret, or a hundred, and some space around
PROTOCOL = 1
"""Of the bytes between hosts. Hosts of different protocols tell each other so, and part."""

# What is zero where one before has left a gap: those who do not know it do not look at it.
_HELLO = struct.Struct("!4sHBB8s32s16s16sQ")  # magic, protocol, resumes, lends, secret, nonce, who, session, received
_ANSWER = struct.Struct("!4sHHB7x32s16s16sQ")  # magic, protocol, refusal, lends, nonce, who, which session, received
PROOF_BYTES = 32
HELLO_BYTES, ANSWER_BYTES = _HELLO.size, _ANSWER.size + PROOF_BYTES


@public("monarch_backend.errors")
class HandshakeError(MonarchError, ConnectionError):
    """The other side is no host of this job, or speaks another version; the text says which, and what to do."""


class Refusal:
    """Why a host does not talk to another one, in its answer."""

    NONE, PROTOCOL, SECRET, SESSION, FULL = range(5)


def new_secret() -> bytes:
    """256 random bits."""
    return secrets.token_bytes(SECRET_BYTES)


def name_of(secret: bytes) -> bytes:
    """Tells secrets apart, and nothing about them: a host that serves two jobs looks up which one is meant."""
    return blake2b(secret, digest_size=8, person=b"monarch name").digest()


def user_secret(folder: Path | None = None) -> bytes:
    """The secret of this user on this machine, in a file that nobody else can read; made on first use.

    ``folder`` is ``$XDG_STATE_HOME/monarch_backend``, or the like in the home directory. Raises PermissionError if the
    file belongs to somebody else or can be read by others.
    """
    folder = make_private(folder or state_directory())
    path = folder / "secret"
    with contextlib.suppress(FileExistsError):
        _create(path, new_secret().hex() + "\n")
    return read_secret(path)


def _create(path: Path, text: str) -> None:
    """At once with its content, for whoever comes first: others may be reading already, and power may fail."""
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with open(os.open(scratch, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(scratch, path)
    finally:
        scratch.unlink()


def read_secret(path: Path) -> bytes:
    """From a file of 64 hexadecimal digits that only we can read. Raises PermissionError or ValueError."""
    return read_secrets(path)[0]


def read_secrets(path: Path) -> list[bytes]:
    """One or more of them, a line each."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(f"{path} holds a secret and must be yours alone: chown it, and chmod 600 {path}")
        text = file.read(_MAX_TEXT_BYTES).decode("ascii", "replace")
    return [parse_secret(line, str(path)) for line in text.strip().split("\n")]


def parse_secret(text: str, source: str) -> bytes:
    """Of 64 hexadecimal digits; ``source`` is for people. The text itself is never repeated."""
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"{source} does not hold a secret of {2 * SECRET_BYTES} hexadecimal digits")
    return secret


@dataclass(frozen=True)
class Hello:
    """What each side says of itself. ``who``: the token of its gateway. ``received``: of this session, so far.

    ``resumes``: this session has been agreed upon before; who does not know it any more refuses.

    ``lends``: it may have NICs, and knows what is said of them.
    """

    who: bytes
    session: bytes
    received: int = 0
    resumes: bool = False
    lends: bool = False
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(32))


def _unpack(layout: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) != layout.size:
        raise HandshakeError(f"{len(data)} bytes where a handshake has {layout.size}: it was cut off")
    return layout.unpack(data)


def _proof(secret: bytes, role: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, b"monarch " + role + b"\0" + b"".join(said), "sha256")


class HandshakeClient:
    """The side that connects. ``binding``: what both sides know of the encrypted channel below, b"" without one.

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
        """The first HELLO_BYTES."""
        mine = self._mine
        which = name_of(self._secret)
        said = (mine.resumes, mine.lends, which, mine.nonce, mine.who, mine.session, mine.received)
        return _HELLO.pack(MAGIC, PROTOCOL, *said)

    def hear(self, answer: bytes) -> bytes:
        """The proof, for the ANSWER_BYTES of the other side. Raises HandshakeError."""
        head, proof = answer[: _ANSWER.size], answer[_ANSWER.size :]
        magic, protocol, refusal, lends, nonce, who, session, received = _unpack(_ANSWER, head)
        if magic != MAGIC:
            raise HandshakeError("who answered is no host of monarch_backend: is the address right?")
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
            raise HandshakeError("it could not prove that it knows this job's secret: somebody stands in between?")
        self.other = Hello(who, session, received, lends=bool(lends), nonce=nonce)
        return _proof(self._secret, b"caller", *said)


class HandshakeServer:
    """The side that listens, and knows the secrets of one or more jobs.

    ``other`` is what a caller says of itself: nothing may follow from it before :meth:`check` has returned.
    """

    def __init__(self, known: dict[bytes, bytes], binding: bytes = b"") -> None:
        self._known, self._binding = known, binding
        self._hello = self._head = b""
        self.secret: bytes
        self.other: Hello

    def hear(self, hello: bytes) -> int:
        """Of HELLO_BYTES; the reason to refuse it, or Refusal.NONE. Raises HandshakeError for bytes of a stranger."""
        magic, protocol, resumes, lends, which, nonce, who, session, received = _unpack(_HELLO, hello)
        if magic != MAGIC:
            raise HandshakeError("bytes of a stranger")
        if protocol != PROTOCOL:
            return Refusal.PROTOCOL
        secret = self._known.get(which)
        if secret is None:
            return Refusal.SECRET
        self._hello, self.secret = hello, secret
        self.other = Hello(who, session, received, bool(resumes), bool(lends), nonce)
        return Refusal.NONE

    def answer(self, mine: Hello) -> bytes:
        """For one that is not refused."""
        said = (MAGIC, PROTOCOL, Refusal.NONE, mine.lends, mine.nonce, mine.who, mine.session, mine.received)
        self._head = _ANSWER.pack(*said)
        return self._head + _proof(self.secret, b"called", self._hello, self._head, self._binding)

    @staticmethod
    def refuse(why: int) -> bytes:
        """ANSWER_BYTES that say no more than why."""
        return _ANSWER.pack(MAGIC, PROTOCOL, why, 0, b"", b"", b"", 0) + bytes(PROOF_BYTES)

    def check(self, proof: bytes) -> None:
        """The last PROOF_BYTES of the caller. Raises HandshakeError if it does not know the secret after all."""
        said = (self._hello, self._head, self._binding)
        if not self._head or not hmac.compare_digest(proof, _proof(self.secret, b"caller", *said)):
            raise HandshakeError("it named this job's secret and could not prove that it knows it")
