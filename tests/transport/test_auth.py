"""Secret of a job and its proof: which peers are accepted, and the error that each gets."""

from __future__ import annotations

import os
import stat
import traceback
from pathlib import Path

import pytest

from monarch_backend._transport.network import auth
from monarch_backend._transport.network.auth import (
    ANSWER_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    HandshakeClient,
    HandshakeError,
    HandshakeServer,
    Hello,
    Refusal,
    name_of,
    new_secret,
    parse_secret,
    read_secret,
    read_secrets,
    user_secret,
)
from tests.support.ranks import run_ranks
from tests.transport.mailbox_processes import Flags

SECRET = bytes(range(32))
ONE, OTHER = b"a" * 16, b"b" * 16
SESSION = b"s" * 16


def _pair(binding: bytes = b"") -> tuple[HandshakeClient, HandshakeServer]:
    return HandshakeClient(SECRET, Hello(ONE, SESSION, 7), binding), HandshakeServer({name_of(SECRET): SECRET}, binding)


def _mine() -> Hello:
    return Hello(OTHER, SESSION, 9)


# Sources of the secret ------------------------------------------------------------------------------------------------


def test_the_user_secret_is_made_once_and_is_the_users_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "monarch_backend"
    old = os.umask(0)  # the file modes must not depend on the user's umask
    try:
        secret = user_secret(folder)
    finally:
        os.umask(old)
    assert len(secret) == 32 and user_secret(folder) == secret
    assert os.listdir(folder) == ["secret"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "secret").stat().st_mode) == 0o600


def test_user_secret_is_in_the_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert user_secret() == read_secret(tmp_path / "xdg" / "monarch_backend" / "secret")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_secret() == read_secret(tmp_path / ".local" / "state" / "monarch_backend" / "secret")


ROUNDS = 20


def _make(rank: int, _: str, flags: Flags, folder: Path) -> list[bytes]:
    made = []
    for number in range(ROUNDS):
        flags.raise_(2 * number + rank)
        flags.wait(2 * number, 2 * number + 1)
        made.append(user_secret(folder / str(number)))
    return made


def test_concurrent_creation_gives_one_secret(tmp_path: Path) -> None:
    flags = Flags()
    try:
        one, other = run_ranks(_make, 2, flags, tmp_path, backend=None)
    finally:
        flags.close()
    assert one == other == [user_secret(tmp_path / str(number)) for number in range(ROUNDS)]
    assert len(set(one)) == ROUNDS
    assert {name for number in range(ROUNDS) for name in os.listdir(tmp_path / str(number))} == {"secret"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o611, 0o622])
def test_a_file_that_others_can_open_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(new_secret().hex())
    path.chmod(mode)
    with pytest.raises(PermissionError, match=f"chmod 600 {path}"):
        read_secret(path)
    path.chmod(0o400)
    assert len(read_secret(path)) == 32


def test_secret_file_holds_several_secrets(tmp_path: Path) -> None:
    known = [new_secret() for _ in range(3)]
    path = tmp_path / "secret"
    path.write_text("".join(f"{secret.hex()}\n" for secret in known))
    path.chmod(0o600)
    assert read_secrets(path) == known
    assert read_secret(path) == known[0]
    path.write_text(f"{known[0].hex()}\n\n{known[1].hex()}")
    with pytest.raises(ValueError, match="does not hold a secret"):
        read_secrets(path)


def test_secret_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_text(new_secret().hex())
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="must be yours alone"):
        read_secret(path)


MALFORMED = [
    b"",
    b"hunter2",
    b"c0ffee" * 10,
    b"c0ffee" * 11,
    b"z" * 64,
    b"c0ffee\xff\xfe" * 8,
    "geheim\u00e4".encode() * 8,
    b"c0ffee\0" * 9,
    b"c0ffee" * 100_000,
]


@pytest.mark.parametrize("text", MALFORMED, ids=range(len(MALFORMED)))
def test_invalid_secret_is_refused_without_showing_it(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(text)
    path.chmod(0o600)
    with pytest.raises(ValueError, match="does not hold a secret of 64 hexadecimal digits") as caught:
        read_secret(path)
    told = "".join(traceback.format_exception(caught.value))
    assert str(path) in str(caught.value) and caught.value.__context__ is None
    for word in ("hunter2", "c0ffee", "zzz", "geheim", "0xff"):
        assert word not in told


def test_whitespace_around_a_secret_is_ignored() -> None:
    assert parse_secret(f"  {SECRET.hex().upper()}\n", "a variable") == SECRET
    with pytest.raises(ValueError, match="MONARCH_SECRET does not hold"):
        parse_secret("12", "MONARCH_SECRET")


def test_names_of_secrets_tell_them_apart() -> None:
    assert len({name_of(new_secret()) for _ in range(100)}) == 100
    assert name_of(SECRET) == name_of(SECRET) and len(name_of(SECRET)) == 8


# Accepted peers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("binding", [b"", b"x" * 64])
def test_handshake_authenticates_both_sides(binding: bytes) -> None:
    caller, called = _pair(binding)
    hello = caller.hello()
    assert hello == caller.hello() and len(hello) == HELLO_BYTES
    assert called.hear(hello) == Refusal.NONE
    answer = called.answer(_mine())
    assert len(answer) == ANSWER_BYTES
    proof = caller.hear(answer)
    assert len(proof) == PROOF_BYTES
    called.check(proof)
    assert (called.other.who, called.other.session, called.other.received) == (ONE, SESSION, 7)
    assert (caller.other.who, caller.other.session, caller.other.received) == (OTHER, SESSION, 9)
    assert SECRET not in hello + answer + proof


def test_server_selects_the_secret_of_the_client() -> None:
    both = [new_secret(), new_secret()]
    for secret in both:
        caller, called = HandshakeClient(secret, _mine()), HandshakeServer({name_of(known): known for known in both})
        called.hear(caller.hello())
        called.check(caller.hear(called.answer(_mine())))
        assert called.secret == secret


# Refused peers --------------------------------------------------------------------------------------------------------


def test_an_unknown_secret_is_refused_with_a_reason() -> None:
    caller, called = HandshakeClient(new_secret(), _mine()), HandshakeServer({name_of(SECRET): SECRET})
    assert called.hear(caller.hello()) == Refusal.SECRET
    with pytest.raises(HandshakeError, match="does not know this job's secret: give both sides the same"):
        caller.hear(HandshakeServer.refuse(Refusal.SECRET))
    with pytest.raises(HandshakeError):
        called.check(bytes(PROOF_BYTES))


def test_another_protocol_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    caller, called = _pair()
    hello = caller.hello()
    monkeypatch.setattr(auth, "PROTOCOL", 2)
    assert called.hear(hello) == Refusal.PROTOCOL
    answer = HandshakeServer.refuse(Refusal.PROTOCOL)
    monkeypatch.undo()
    with pytest.raises(HandshakeError, match="speaks protocol 2 between hosts, and this side 1: install the same"):
        caller.hear(answer)


def test_a_session_that_was_given_up_is_refused_with_a_reason() -> None:
    caller, _ = _pair()
    with pytest.raises(HandshakeError, match="has given up this connection"):
        caller.hear(HandshakeServer.refuse(Refusal.SESSION))


def test_unknown_refusal_ends_the_handshake() -> None:
    caller, _ = _pair()
    with pytest.raises(HandshakeError, match="could not prove"):
        caller.hear(HandshakeServer.refuse(77))


def test_other_protocols_are_recognised() -> None:
    caller, called = _pair()
    with pytest.raises(HandshakeError, match="its first bytes are not those of a host of monarch_backend"):
        called.hear(b"GET / HTTP/1.1".ljust(HELLO_BYTES))
    with pytest.raises(HandshakeError, match="does not belong to a host of monarch_backend: is it right"):
        caller.hear(b"HTTP/1.1 400 Bad Request".ljust(ANSWER_BYTES))


def test_name_of_the_secret_alone_is_no_proof() -> None:
    caller, called = _pair()
    liar = HandshakeClient(new_secret(), _mine())
    lied = bytearray(liar.hello())
    lied[8:16] = name_of(SECRET)
    assert called.hear(bytes(lied)) == Refusal.NONE
    answer = called.answer(_mine())
    with pytest.raises(HandshakeError, match="could not prove"):
        liar.hear(answer)
    with pytest.raises(HandshakeError, match="could not prove"):
        called.check(bytes(PROOF_BYTES))
    # a server without the secret is refused by the client, too
    imposter = HandshakeServer({name_of(SECRET): new_secret()})
    imposter.hear(caller.hello())
    with pytest.raises(HandshakeError, match="is another machine in between"):
        caller.hear(imposter.answer(_mine()))


def test_replayed_proof_is_refused() -> None:
    caller, called = _pair()
    hello = caller.hello()
    called.hear(hello)
    answer = called.answer(_mine())
    proof = caller.hear(answer)
    called.check(proof)
    _, again = _pair()  # a new connection on which the recorded messages are replayed
    assert again.hear(hello) == Refusal.NONE
    assert again.answer(_mine()) != answer
    with pytest.raises(HandshakeError):
        again.check(proof)
    fresh, _ = _pair()
    with pytest.raises(HandshakeError):
        fresh.hear(answer)


def test_reflected_proof_is_refused() -> None:
    caller, called = _pair()
    with pytest.raises(HandshakeError):
        caller.hear(caller.hello().ljust(ANSWER_BYTES, b"\0"))
    called.hear(caller.hello())
    answer = called.answer(_mine())
    with pytest.raises(HandshakeError):
        called.check(answer[-PROOF_BYTES:])
    with pytest.raises(HandshakeError):
        called.hear(answer[:HELLO_BYTES]) and called.check(answer[-PROOF_BYTES:])
    # Two handshakes of one server: the proof from one is sent to the other.
    oracle = HandshakeServer({name_of(SECRET): SECRET})
    oracle.hear(caller.hello())
    proof = oracle.answer(Hello(ONE, SESSION))[-PROOF_BYTES:]
    with pytest.raises(HandshakeError):
        called.check(proof)


def test_proof_before_the_answer_is_refused() -> None:
    caller, called = _pair()
    with pytest.raises(HandshakeError):
        called.check(bytes(PROOF_BYTES))
    called.hear(caller.hello())
    with pytest.raises(HandshakeError):
        called.check(auth._proof(SECRET, b"caller", caller.hello(), b"", b""))


def test_handshake_with_any_changed_byte_fails() -> None:
    """A change of any byte in transit makes one of the two sides refuse the handshake."""
    for place in range(HELLO_BYTES):
        caller, called = _pair()
        hello = bytearray(caller.hello())
        hello[place] ^= 1
        try:
            refusal = called.hear(bytes(hello))
        except HandshakeError:
            continue
        if refusal == Refusal.NONE:
            with pytest.raises(HandshakeError):
                caller.hear(called.answer(_mine()))
    for place in range(ANSWER_BYTES):
        caller, called = _pair()
        called.hear(caller.hello())
        answer = bytearray(called.answer(_mine()))
        answer[place] ^= 1
        with pytest.raises(HandshakeError):
            caller.hear(bytes(answer))
    for place in range(PROOF_BYTES):
        caller, called = _pair()
        called.hear(caller.hello())
        proof = bytearray(caller.hear(called.answer(_mine())))
        proof[place] ^= 1
        with pytest.raises(HandshakeError):
            called.check(bytes(proof))


def test_another_channel_below_is_refused_by_both() -> None:
    caller, called = (
        HandshakeClient(SECRET, _mine(), b"one" * 10),
        HandshakeServer({name_of(SECRET): SECRET}, b"two" * 10),
    )
    called.hear(caller.hello())
    with pytest.raises(HandshakeError, match="in between"):
        caller.hear(called.answer(_mine()))
    caller, called = HandshakeClient(SECRET, _mine()), HandshakeServer({name_of(SECRET): SECRET})
    called.hear(caller.hello())
    proof = caller.hear(called.answer(_mine()))
    called._binding = b"another"
    with pytest.raises(HandshakeError):
        called.check(proof)


def test_truncated_or_long_message_is_a_handshake_error() -> None:
    caller, called = _pair()
    hello = caller.hello()
    for wrong in [hello[:n] for n in range(HELLO_BYTES)] + [hello + b"\0"]:
        with pytest.raises(HandshakeError):
            HandshakeServer({name_of(SECRET): SECRET}).hear(wrong)
    called.hear(hello)
    answer = called.answer(_mine())
    for wrong in [answer[:n] for n in range(ANSWER_BYTES)] + [answer + b"\0"]:
        with pytest.raises(HandshakeError):
            caller.hear(wrong)
    proof = caller.hear(answer)
    for wrong in [proof[:n] for n in range(PROOF_BYTES)] + [proof + b"\0"]:
        with pytest.raises(HandshakeError):
            called.check(wrong)
    called.check(proof)
