"""TLS between hosts: certificates that a job's secret gives to all its hosts, or the user's own files; always mutual.

Contexts, and what binds them to the handshake (auth.py). No sockets, and nothing of what is said through them.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from monarch_backend._core.errors import MonarchError, public
from monarch_backend._transport.network.auth import name_of

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of P-256: private keys are below it."""

_PURPOSE = b"monarch_backend TLS CA 1"

_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)

MAX_CLOCK_SKEW = datetime.timedelta(days=1)
"""So much two hosts' clocks may differ."""

CERTIFICATE_LIFETIME = datetime.timedelta(days=3650)
"""No limit on a process: its key goes with it. A certificate has to have an end, that is all."""


@public("monarch_backend.errors")
class CertificateError(MonarchError, ValueError):
    """A file for TLS that can't be used; the text says which, why, and what to do."""


@dataclass(frozen=True)
class Tls:
    """What one process needs to call and to be called. ``certificate``: its own, as DER.

    The contexts are for blocking sockets, non-blocking ones and ``wrap_bio`` alike. With TLS 1.3 whoever calls hears
    that its certificate was refused when it first reads, not before: its handshake is over by then.

    >>> secret = bytes(32)
    >>> one, other = Tls.of_secret(secret), Tls.of_secret(secret)
    >>> one.certificate == other.certificate  # each process has its own, and they accept each other's
    False
    >>> one.server.verify_mode.name, one.client.verify_mode.name, one.server.minimum_version.name
    ('CERT_REQUIRED', 'CERT_REQUIRED', 'TLSv1_3')
    """

    server: ssl.SSLContext
    client: ssl.SSLContext
    certificate: bytes

    @classmethod
    def of_secret(cls, secret: bytes) -> Tls:
        """For hosts that know this secret, and only those. Names are not looked at: a host is one of the job, or not.

        The key of the job's CA comes out of the secret, so each process signs a certificate of its own for a key that
        only it has and that no disk has seen.
        """
        own, key, ca = _signed_by_secret(secret)
        pem = own.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        server, client = _contexts()
        with _in_memory(pem) as path:
            for context in (server, client):
                context.load_cert_chain(path)
                context.load_verify_locations(cadata=ca.public_bytes(serialization.Encoding.DER))
        return cls(server, client, own.public_bytes(serialization.Encoding.DER))

    @classmethod
    def of_files(
        cls,
        ca: str | os.PathLike[str],
        certificate: str | os.PathLike[str],
        key: str | os.PathLike[str],
        *,
        check_names: bool = False,
    ) -> Tls:
        """From PEM files: those who sign hosts, this host's certificate (with what is between them), and its key.

        Whom ``ca`` has signed may talk to us, if it then proves that it knows the secret; that is what makes it a host
        of the job, whatever it is called. ``check_names``: its certificate has to name the address, too, that it was
        called at (``server_hostname``). Raises CertificateError.
        """
        server, client = _contexts()
        for context in (server, client):
            _load_ca(context, Path(ca))
            _load_own(context, Path(certificate), Path(key))
        own = _try_out(server, client, Path(ca), Path(certificate))
        client.check_hostname = check_names
        return cls(server, client, own)


def binding(channel: ssl.SSLSocket | ssl.SSLObject, server_side: bool, tls: Tls) -> bytes:
    """What both ends of a TLS connection, and nobody in between, know of it: the SHA-256 of both their certificates.

    For auth.py, which proves that the same two processes are at the ends of the handshake. Raises ConnectionError
    before TLS's own handshake is over.
    """
    try:
        theirs = channel.getpeercert(binary_form=True)
    except ValueError:
        theirs = None
    if theirs is None:
        raise ConnectionError("there is no certificate of the other side yet: let do_handshake() come to its end first")
    server, client = (tls.certificate, theirs) if server_side else (theirs, tls.certificate)
    return hashlib.sha256(server).digest() + hashlib.sha256(client).digest()


@dataclass(frozen=True)
class Ders:
    """The same for OpenSSL without Python, as DER: what csrc/memory/ needs for its connections between hosts.

    >>> ders = Ders.of_secret(bytes(32))
    >>> [type(der).__name__ for der in (ders.certificate, ders.key, ders.ca)]
    ['bytes', 'bytes', 'bytes']
    """

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes

    @classmethod
    def of_secret(cls, secret: bytes) -> Ders:
        """A certificate and key of its own, as :meth:`Tls.of_secret` makes them, and the CA that all share."""
        own, key, ca = _signed_by_secret(secret)
        der, pkcs8, nothing = (
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cls(own.public_bytes(der), key.private_bytes(der, pkcs8, nothing), ca.public_bytes(der))


# Of a secret ----------------------------------------------------------------------------------------------------------


def _signed_by_secret(secret: bytes) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, x509.Certificate]:
    """A process's certificate, its key, and the CA of this secret, which has signed the certificate."""
    authority = _authority_key(secret)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"monarch job {name_of(secret).hex()}")])
    ca = _certificate(name, authority.public_key(), name, authority, is_ca=True)
    key = ec.generate_private_key(ec.SECP256R1())
    process = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "monarch process")])
    return _certificate(process, key.public_key(), name, authority, is_ca=False), key, ca


def _authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """The same for all who know the secret. 64 bits more than needed, so that no key is likelier than others."""
    derived = HKDF(algorithm=hashes.SHA256(), length=40, salt=None, info=_PURPOSE).derive(secret)
    return ec.derive_private_key(1 + int.from_bytes(derived, "big") % (_ORDER - 1), ec.SECP256R1())


def _certificate(
    subject: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer: x509.Name,
    authority: ec.EllipticCurvePrivateKey,
    *,
    is_ca: bool,
) -> x509.Certificate:
    """With all that strict verifiers want to see, such as Python's own from 3.13 on."""
    now = datetime.datetime.now(datetime.timezone.utc)
    usage = dict.fromkeys(_USAGES, False)
    usage["key_cert_sign" if is_ca else "digital_signature"] = True
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - MAX_CLOCK_SKEW)
        .not_valid_after(now + CERTIFICATE_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=is_ca, path_length=0 if is_ca else None), critical=True)
        .add_extension(x509.KeyUsage(**usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    if not is_ca:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    return builder.sign(authority, hashes.SHA256())


@contextmanager
def _in_memory(data: bytes) -> Iterator[str]:
    """A path for OpenSSL, which reads keys from files only: memory without a name, empty afterwards.

    Emptied, not only closed: another thread may fork meanwhile, and its child would have the descriptor.
    """
    descriptor = os.memfd_create("monarch_tls", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.ftruncate(descriptor, 0)
        os.close(descriptor)


# Contexts -------------------------------------------------------------------------------------------------------------


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For those who call us, and for those we call. Not ssl.create_default_context: it writes keys to SSLKEYLOGFILE."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # Whoever trusts one intermediate CA need not trust all that its root has signed.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    server.num_tickets = 0  # each connection shows its certificates anew: sessions are ours (session.py), not TLS's
    return server, client


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(
            f"{path}, {what}, can't be read ({error.strerror}): check the path and whether this user may read it"
        ) from error


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _read(ca, "the file of those who sign hosts")
    try:
        context.load_verify_locations(cafile=ca)
    except ssl.SSLError as error:
        raise CertificateError(
            f"{ca} has no certificates of a CA that OpenSSL understands: give a PEM file, with BEGIN CERTIFICATE"
        ) from error


def _load_own(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    chain, secret = _read(certificate, "this host's certificate"), _read(key, "the key of this host's certificate")
    if b"-----BEGIN CERTIFICATE-----" not in chain:
        raise CertificateError(f"{certificate} has no certificate: give a PEM file, with BEGIN CERTIFICATE")
    if b"PRIVATE KEY-----" not in secret:
        raise CertificateError(f"{key} has no private key: give a PEM file, with BEGIN PRIVATE KEY")

    def refuse() -> str:
        raise CertificateError(f"{key} asks for a passphrase, which nobody can type here: give a key without one")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            why = f"{key} is not the key of {certificate}: give the two that were made together"
        else:
            why = f"{certificate} or {key} is damaged ({error.reason or error}): make them anew"
        raise CertificateError(why) from error


def _try_out(server: ssl.SSLContext, client: ssl.SSLContext, ca: Path, certificate: Path) -> bytes:
    """Our own certificate as DER, after a handshake with ourselves: what is wrong is said here, not by other hosts."""
    ways = ssl.MemoryBIO(), ssl.MemoryBIO()
    called = server.wrap_bio(ways[0], ways[1], server_side=True)
    caller = client.wrap_bio(ways[1], ways[0])
    try:
        for side in (caller, called, caller, called):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLCertVerificationError as error:
        raise CertificateError(
            f"{certificate} would be refused by hosts that trust {ca}: {error.verify_message}. Give a certificate that "
            "this CA has signed, that is valid now, for servers and clients"
        ) from error
    except ssl.SSLError as error:
        raise CertificateError(f"{certificate} can't be used for TLS 1.3 ({error.reason or error})") from error
    own = caller.getpeercert(binary_form=True)
    assert own is not None
    return own
