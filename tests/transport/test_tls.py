"""TLS between hosts: which certificates are accepted, the binding to the secret's handshake, and no leftovers."""

from __future__ import annotations

import datetime
import hmac
import os
import select
import socket
import ssl
import threading
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from monarch_backend._hosts.connection_settings import FILES, tls_for
from monarch_backend._transport.network import tls as _tls
from monarch_backend._transport.network.auth import (
    HandshakeClient,
    HandshakeError,
    HandshakeServer,
    Hello,
    name_of,
    new_secret,
)
from monarch_backend._transport.network.tls import CertificateError, Tls, binding

DAY = datetime.timedelta(days=1)


class Meeting:
    """A TLS client and server connected in memory without sockets. ``errors`` has the errors of both."""

    def __init__(self, client: ssl.SSLContext, server: ssl.SSLContext, name: str | None = None) -> None:
        self.ways = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.caller = client.wrap_bio(self.ways[1], self.ways[0], server_hostname=name)
        self.called = server.wrap_bio(self.ways[0], self.ways[1], server_side=True)
        self.errors: list[ssl.SSLError | None] = [None, None]
        for _ in range(3):
            for number, side in enumerate((self.caller, self.called)):
                try:
                    side.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                except ssl.SSLError as error:
                    self.errors[number] = self.errors[number] or error

    def talk(self) -> None:
        assert self.errors == [None, None]
        self.caller.write(b"from the caller")
        assert self.called.read(100) == b"from the caller"
        self.called.write(b"from the called")
        assert self.caller.read(100) == b"from the called"


def _memories() -> list[str]:
    """Return the targets of this process's open descriptors. Anonymous memory files are among them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return sorted(found)


# Certificates derived from a secret -----------------------------------------------------------------------------------


def test_two_sides_with_the_secret_connect() -> None:
    secret = new_secret()
    meeting = Meeting(Tls.of_secret(secret).client, Tls.of_secret(secret).server)
    meeting.talk()
    assert meeting.caller.version() == meeting.called.version() == "TLSv1.3"
    assert meeting.caller.compression() is meeting.called.compression() is None


def test_a_secret_has_one_authority_and_each_process_a_key() -> None:
    secret = bytes(range(32))
    numbers = [_tls._authority_key(of).private_numbers().private_value for of in (secret, secret, bytes(32))]
    assert numbers[0] == numbers[1] != numbers[2]
    # RFC 5869 computed by hand. Hosts of other versions must derive the same number.
    extracted = hmac.digest(b"", secret, "sha256")
    block = hmac.digest(extracted, b"monarch_backend TLS CA 1\1", "sha256")
    block += hmac.digest(extracted, block + b"monarch_backend TLS CA 1\2", "sha256")
    assert numbers[0] == 1 + int.from_bytes(block[:40], "big") % (_tls._ORDER - 1)
    ec.derive_private_key(_tls._ORDER - 1, ec.SECP256R1())
    with pytest.raises(ValueError):
        ec.derive_private_key(_tls._ORDER, ec.SECP256R1())


def test_each_process_has_a_key_of_its_own() -> None:
    secret = new_secret()
    one, other = Tls.of_secret(secret), Tls.of_secret(secret)
    keys = [x509.load_der_x509_certificate(tls.certificate).public_key() for tls in (one, other)]
    assert keys[0] != keys[1]


def test_another_secret_is_refused_by_both() -> None:
    ours, others = Tls.of_secret(new_secret()), Tls.of_secret(new_secret())
    caller, _ = Meeting(ours.client, others.server).errors
    assert isinstance(caller, ssl.SSLCertVerificationError)
    trusting = others.client  # a client that accepts every certificate, so that the server must refuse
    trusting.verify_mode = ssl.CERT_NONE
    caller, called = Meeting(trusting, ours.server).errors
    assert caller is None and isinstance(called, ssl.SSLCertVerificationError)


def test_a_caller_without_a_certificate_is_refused() -> None:
    tls = Tls.of_secret(new_secret())
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
    meeting = Meeting(nobody, tls.server)
    assert meeting.errors[1] is not None and meeting.errors[1].reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE"
    with pytest.raises(ssl.SSLError, match=r"CERTIFICATE_REQUIRED|certificate required"):
        meeting.caller.read(1)


@pytest.mark.parametrize("old", ["client", "server"])
def test_tls_1_2_is_refused_by_both(old: str) -> None:
    secret = new_secret()
    one, other = Tls.of_secret(secret), Tls.of_secret(secret)
    context: ssl.SSLContext = getattr(one, old)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    caller, called = Meeting(*((one.client, other.server) if old == "client" else (other.client, one.server))).errors
    refusing = called if old == "client" else caller
    assert refusing is not None and "PROTOCOL" in refusing.reason


def test_certificates_pass_strict_verifiers() -> None:
    secret = new_secret()
    one, other = Tls.of_secret(secret), Tls.of_secret(secret)
    for context in (one.client, other.server):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    Meeting(one.client, other.server).talk()


def test_no_tickets_and_no_sessions_to_resume() -> None:
    secret = new_secret()
    one, other = Tls.of_secret(secret), Tls.of_secret(secret)
    assert other.server.num_tickets == 0
    meeting = Meeting(one.client, other.server)
    assert meeting.ways[1].pending == 0  # the server sends nothing after the handshake
    meeting.talk()
    assert meeting.caller.session is None or not meeting.caller.session.has_ticket


def test_clocks_may_differ_by_a_day_and_processes_may_be_old() -> None:
    certificate = x509.load_der_x509_certificate(Tls.of_secret(new_secret()).certificate)
    now = datetime.datetime.now(datetime.timezone.utc)
    assert certificate.not_valid_before_utc < now - 0.99 * DAY
    assert certificate.not_valid_after_utc > now + 3000 * DAY


def test_no_key_is_left_on_disk_or_in_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("TMPDIR", "HOME", "SSLKEYLOGFILE"):
        monkeypatch.setenv(variable, str(tmp_path / "keys" if variable == "SSLKEYLOGFILE" else tmp_path))
    monkeypatch.chdir(tmp_path)
    before = _memories()
    secret = new_secret()
    Meeting(Tls.of_secret(secret).client, Tls.of_secret(secret).server).talk()
    assert _memories() == before
    assert list(tmp_path.iterdir()) == []


def test_inherited_key_descriptor_is_empty_after_use() -> None:
    with _tls._in_memory(b"a key") as path:
        inherited = os.open(path, os.O_RDONLY)
        assert os.pread(inherited, 100, 0) == b"a key"
        assert os.fstat(inherited).st_mode & 0o777 == 0o600
    try:
        assert os.pread(inherited, 100, 0) == b""
    finally:
        os.close(inherited)


# With sockets ---------------------------------------------------------------------------------------------------------


def test_over_blocking_sockets() -> None:
    secret = new_secret()
    one, other = socket.socketpair()
    said = []

    def answer() -> None:
        tls = Tls.of_secret(secret)
        with tls.server.wrap_socket(other, server_side=True) as channel:
            said.append(binding(channel, True, tls))
            channel.sendall(channel.recv(100))

    thread = threading.Thread(target=answer)
    thread.start()
    tls = Tls.of_secret(secret)
    with tls.client.wrap_socket(one, server_hostname="10.0.0.1") as channel:
        channel.sendall(b"echo")
        assert channel.recv(100) == b"echo"
        mine = binding(channel, False, tls)
    thread.join()
    assert said == [mine]


def test_over_sockets_that_do_not_block() -> None:
    secret = new_secret()
    mine, theirs = Tls.of_secret(secret), Tls.of_secret(secret)
    pair = socket.socketpair()
    for end in pair:
        end.setblocking(False)
    caller = mine.client.wrap_socket(pair[0], do_handshake_on_connect=False)
    called = theirs.server.wrap_socket(pair[1], server_side=True, do_handshake_on_connect=False)
    with caller, called:
        with pytest.raises(ConnectionError, match="do_handshake"):
            binding(caller, False, mine)
        todo = [caller, called]
        while todo:
            for side in list(todo):
                try:
                    side.do_handshake()
                    todo.remove(side)
                except ssl.SSLWantReadError:
                    continue
        assert binding(caller, False, mine) == binding(called, True, theirs)
        caller.send(b"hello")
        assert select.select([called], [], [], 10)[0]
        assert called.recv(100) == b"hello"


# Binding of TLS to the handshake of the secret ------------------------------------------------------------------------


def test_channel_binding_covers_both_certificates() -> None:
    secret = new_secret()
    one, other = Tls.of_secret(secret), Tls.of_secret(secret)
    meeting = Meeting(one.client, other.server)
    bound = binding(meeting.caller, False, one)
    assert bound == binding(meeting.called, True, other)
    back = Meeting(other.client, one.server)
    assert binding(back.caller, False, other) == bound[32:] + bound[:32]


def test_man_in_the_middle_with_a_job_certificate_is_refused() -> None:
    """A man in the middle that ends TLS on both sides with its own leaf certificate can only forward bytes.

    The handshake fails.
    """
    secret = new_secret()
    one, other, middle = (Tls.of_secret(secret) for _ in range(3))
    left, right = Meeting(one.client, middle.server), Meeting(middle.client, other.server)
    here, there = binding(left.caller, False, one), binding(right.called, True, other)
    assert here != there
    caller = HandshakeClient(secret, Hello(b"a" * 16, b"s" * 16), binding=here)
    called = HandshakeServer({name_of(secret): secret}, binding=there)
    called.hear(caller.hello())
    with pytest.raises(HandshakeError, match="in between"):
        caller.hear(called.answer(Hello(b"b" * 16, b"s" * 16)))


# Certificates from files ----------------------------------------------------------------------------------------------


class Authority:
    """A user's own CA whose certificates and keys are files, as an organisation provides them."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self.path = folder, folder / f"{name}.pem"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.timezone.utc)
        self._write(self.path, self._sign(self._name, self._key, now - DAY, now + DAY, ca=True))

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        start: datetime.datetime,
        end: datetime.datetime,
        *,
        ca: bool = False,
        host: str | None = None,
    ) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .issuer_name(self._name)
            .subject_name(subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
        )
        if host is not None:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())

    @staticmethod
    def _write(path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def issue(self, host: str, *, age: datetime.timedelta = DAY, passphrase: bytes | None = None) -> tuple[Path, Path]:
        """Write a certificate that expires at ``2 * DAY - age`` from now, and its key. Return their paths."""
        key = ec.generate_private_key(ec.SECP256R1())
        start = datetime.datetime.now(datetime.timezone.utc) - age
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        paths = self.folder / f"{host}.pem", self.folder / f"{host}.key"
        self._write(paths[0], self._sign(name, key, start, start + 2 * DAY, host=host))
        lock = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
        paths[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
        return paths


def test_hosts_with_certificates_of_one_authority_connect(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one, other = (Tls.of_files(authority.path, *authority.issue(name)) for name in ("one", "other"))
    meeting = Meeting(one.client, other.server, "other")
    meeting.talk()
    assert binding(meeting.caller, False, one) == binding(meeting.called, True, other)
    assert one.certificate == ssl.PEM_cert_to_DER_cert((tmp_path / "one.pem").read_text())


def test_files_by_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    made = []
    for name in ("one", "other"):
        for variable, file in zip(FILES, (authority.path, *authority.issue(name)), strict=True):
            monkeypatch.setenv(variable, str(file))
        make = tls_for()
        assert make is not None
        made.append(make(new_secret()))
        assert make(new_secret()) is made[-1], "whatever the secret"
    Meeting(made[0].client, made[1].server).talk()
    monkeypatch.delenv("MONARCH_TLS_KEY")
    with pytest.raises(ValueError, match="MONARCH_TLS_KEY not set: a CA, a certificate and its key go together"):
        tls_for()
    monkeypatch.setenv("MONARCH_TLS", "0")
    assert tls_for() is None


def test_the_certificate_names_the_address_if_that_is_wanted(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("one")
    checking, trusting = (Tls.of_files(authority.path, *files, check_names=yes) for yes in (True, False))
    caller, _ = Meeting(checking.client, trusting.server, "somewhere").errors
    assert isinstance(caller, ssl.SSLCertVerificationError) and "Hostname mismatch" in caller.verify_message
    Meeting(trusting.client, checking.server, "somewhere").talk()


def test_hosts_of_another_authority_are_refused_by_both(tmp_path: Path) -> None:
    ours, others = Authority(tmp_path), Authority(tmp_path, "other")
    mine = Tls.of_files(ours.path, *ours.issue("one"))
    theirs = Tls.of_files(others.path, *others.issue("two"))
    assert isinstance(Meeting(mine.client, theirs.server).errors[0], ssl.SSLCertVerificationError)
    theirs.client.verify_mode = ssl.CERT_NONE
    assert isinstance(Meeting(theirs.client, mine.server).errors[1], ssl.SSLCertVerificationError)
    derived = Tls.of_secret(new_secret())
    assert isinstance(Meeting(derived.client, mine.server).errors[0], ssl.SSLCertVerificationError)


def test_a_certificate_that_has_ended_meanwhile_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    one = Tls.of_files(authority.path, *authority.issue("one"))
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    old.load_cert_chain(*authority.issue("old", age=3 * DAY))
    caller, _ = Meeting(one.client, old, "old").errors
    assert isinstance(caller, ssl.SSLCertVerificationError) and "expired" in caller.verify_message


def test_bad_files_are_named_before_connecting(tmp_path: Path) -> None:
    authority, others = Authority(tmp_path), Authority(tmp_path, "other")
    good = authority.issue("good")
    junk = tmp_path / "junk"
    junk.write_bytes(b"\xff\x00 no certificate\n")
    torn = tmp_path / "torn"
    torn.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    missing = tmp_path / "missing"
    stranger, locked = others.issue("stranger"), authority.issue("locked", passphrase=b"open sesame")
    old, early = authority.issue("old", age=3 * DAY), authority.issue("early", age=-DAY)
    for files, told in [
        ((missing, *good), f"{missing}, the file of the CAs that sign hosts, can't be read .*check the path"),
        ((authority.path, missing, good[1]), f"{missing}, this host's certificate, can't be read"),
        ((authority.path, good[0], missing), f"{missing}, the key of this host's certificate, can't be read"),
        ((tmp_path, *good), f"{tmp_path}, .*can't be read .Is a directory"),
        ((junk, *good), f"{junk} has no certificates of a CA.*give a PEM file"),
        ((torn, *good), f"{torn} has no certificates of a CA.*give a PEM file"),
        ((authority.path, junk, good[1]), f"{junk} has no certificate: give a PEM file"),
        ((authority.path, torn, good[1]), f"{torn} or .* is damaged .*create them again"),
        ((authority.path, good[0], junk), f"{junk} has no private key: give a PEM file"),
        ((authority.path, good[0], stranger[1]), f"{stranger[1]} is not the key of {good[0]}: give two files"),
        ((authority.path, *locked), f"{locked[1]} needs a passphrase.*give a key without one"),
        ((authority.path, *stranger), f"{stranger[0]} would be refused by hosts that trust {authority.path}: unable"),
        ((authority.path, *old), f"{old[0]} would be refused .*expired.* valid now"),
        ((authority.path, *early), f"{early[0]} would be refused .*not yet valid.* valid now"),
    ]:
        with pytest.raises(CertificateError, match=told):
            Tls.of_files(*files)
