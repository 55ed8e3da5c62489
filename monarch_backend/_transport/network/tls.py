"""Mutual TLS between hosts, with certificates derived from the job's secret or from the user's files.

The module makes contexts and the channel binding for the handshake (auth.py). It uses no sockets.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from monarch_backend._core import platform
from monarch_backend._core.errors import MonarchError, public
from monarch_backend._transport.network.auth import name_of

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Order of P-256: private keys are below it."""

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
"""Difference of two hosts' clocks that certificates allow."""

CERTIFICATE_LIFETIME = datetime.timedelta(days=3650)
"""A certificate must have an end. It is far beyond the life of a process, whose key is never stored."""


@public("monarch_backend.errors")
class CertificateError(MonarchError, ValueError):
    """A file for TLS can't be used; the text says which, why, and what to do.

    Raised by calls that connect to hosts, such as ``attach``, and when a daemon starts. Also a ValueError.
    """


@dataclass(frozen=True)
class Tls:
    """Contexts of one process as server and as client. ``certificate``: its own, as DER.

    The contexts work for blocking and non-blocking sockets and for ``wrap_bio``. With TLS 1.3 a client's handshake ends
    before the server has checked the client's certificate: a refusal is an error of the client's first read.

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
        """Make contexts that accept the hosts that know this secret, and only those, by any name.

        The key of the job's CA is derived from the secret. Each process signs a certificate for a key of its own,
        which is never written to a disk.
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
        """Make contexts from PEM files: the CAs, this host's certificate with intermediate ones, and its key.

        A peer needs a certificate that ``ca`` has signed. It must also prove the job's secret, which makes it a host of
        the job under any name. With ``check_names`` a server's certificate must also contain the address to which the
        client connects (``server_hostname``). Raises CertificateError.
        """
        server, client = _contexts()
        for context in (server, client):
            _load_ca(context, Path(ca))
            _load_own(context, Path(certificate), Path(key))
        own = _try_out(server, client, Path(ca), Path(certificate))
        client.check_hostname = check_names
        return cls(server, client, own)


def binding(channel: ssl.SSLSocket | ssl.SSLObject, server_side: bool, tls: Tls) -> bytes:
    """Return the channel binding of a TLS connection: the SHA-256 of both certificates.

    A machine in between can't have the same value, so the proofs of auth.py detect it. Raises ConnectionError before
    the TLS handshake is complete.
    """
    try:
        theirs = channel.getpeercert(binary_form=True)
    except ValueError:
        theirs = None
    if theirs is None:
        raise ConnectionError("there is no certificate of the peer yet: complete do_handshake() first")
    server, client = (tls.certificate, theirs) if server_side else (theirs, tls.certificate)
    return hashlib.sha256(server).digest() + hashlib.sha256(client).digest()


@dataclass(frozen=True)
class Ders:
    """Certificate, key and CA as DER, for OpenSSL in csrc/memory/.

    >>> ders = Ders.of_secret(bytes(32))
    >>> [type(der).__name__ for der in (ders.certificate, ders.key, ders.ca)]
    ['bytes', 'bytes', 'bytes']
    """

    certificate: bytes
    key: bytes = field(repr=False)
    ca: bytes

    @classmethod
    def of_secret(cls, secret: bytes) -> Ders:
        """Make a new certificate and key, as :meth:`Tls.of_secret`, and the CA that all hosts share."""
        own, key, ca = _signed_by_secret(secret)
        der, pkcs8, nothing = (
            serialization.Encoding.DER,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return cls(own.public_bytes(der), key.private_bytes(der, pkcs8, nothing), ca.public_bytes(der))


# Certificates of a secret ---------------------------------------------------------------------------------------------


def _signed_by_secret(secret: bytes) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new certificate of a process, its key, and the CA of this secret that has signed it."""
    authority = _authority_key(secret)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"monarch job {name_of(secret).hex()}")])
    ca = _certificate(name, authority.public_key(), name, authority, is_ca=True)
    key = ec.generate_private_key(ec.SECP256R1())
    process = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "monarch process")])
    return _certificate(process, key.public_key(), name, authority, is_ca=False), key, ca


def _authority_key(secret: bytes) -> ec.EllipticCurvePrivateKey:
    """Derive the CA's key from a secret. HKDF returns 64 bits more than needed, so that all keys are equally likely."""
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
    """Sign a certificate with all extensions that strict verifiers require, such as Python's from 3.13 on."""
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
    """Provide data under a path, because OpenSSL reads keys from files only. The file is anonymous memory.

    It is truncated before it is closed: another thread may fork meanwhile, and the child inherits the descriptor.
    Systems without such memory get a temporary file that only this user can read.
    """
    if not platform.HAS_MEMFD:
        with tempfile.NamedTemporaryFile(prefix="monarch-") as file:
            file.write(data)
            file.flush()
            yield file.name
            file.truncate(0)
        return
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
    """Return a server's and a client's context. ssl.create_default_context would write keys to SSLKEYLOGFILE."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    for context in (server, client):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        # Trust in an intermediate CA does not require trust in its root.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
    server.num_tickets = 0  # no TLS resumption: each connection presents its certificates
    return server, client


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(
            f"{path}, {what}, can't be read ({error.strerror}): check the path and whether this user may read it"
        ) from error


def _load_ca(context: ssl.SSLContext, ca: Path) -> None:
    _read(ca, "the file of the CAs that sign hosts")
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
        raise CertificateError(f"{key} needs a passphrase, which can't be entered here: give a key without one")

    try:
        context.load_cert_chain(certificate, key, refuse)
    except ssl.SSLError as error:
        if "MISMATCH" in (error.reason or ""):
            why = f"{key} is not the key of {certificate}: give two files that belong together"
        else:
            why = f"{certificate} or {key} is damaged ({error.reason or error}): create them again"
        raise CertificateError(why) from error


def _try_out(server: ssl.SSLContext, client: ssl.SSLContext, ca: Path, certificate: Path) -> bytes:
    """Return this host's certificate as DER after a handshake with itself, which finds errors before any other host."""
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
