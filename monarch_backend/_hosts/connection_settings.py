"""Settings of connections between hosts: addresses as users write them, the secret, and TLS.

TLS is 1.3 by the job's secret, the user's own files, or none. _transport/network/tls.py makes the certificates.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from monarch_backend._core import env
from monarch_backend._transport.network.auth import parse_secret, read_secrets, user_secret

DEFAULT_PORT = 26600

FILES = ("MONARCH_TLS_CA", "MONARCH_TLS_CERT", "MONARCH_TLS_KEY")
"""Variables that name files in PEM: the accepted authorities, this host's certificate, and its key."""


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of "tcp://10.0.0.2:26600", "node7", "[::1]:26600" and similar texts. Raises ValueError.

    >>> parse_address("tcp://node7:1234"), parse_address("[::1]"), parse_address("10.0.0.2")
    (('node7', 1234), ('::1', 26600), ('10.0.0.2', 26600))
    """
    found = re.fullmatch(r"(?:tcp://)?(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\[\]:/\s]+))(?::(\d{1,5}))?/?", text)
    if found is None or not 0 <= int(found[3] or DEFAULT_PORT) <= 65535:
        raise ValueError(f"{text!r} is not an address of a host: write tcp://HOST:PORT, HOST:PORT or [IPv6]:PORT")
    return found[1] or found[2], int(found[3] or DEFAULT_PORT)


def given_secrets() -> list[bytes]:
    """Return the secrets of MONARCH_SECRET or of MONARCH_SECRET_FILE, which may be of several jobs.

    Raises ValueError, OSError.
    """
    if text := env.get("MONARCH_SECRET"):
        return [parse_secret(text, "MONARCH_SECRET")]
    if path := env.get("MONARCH_SECRET_FILE"):
        return read_secrets(Path(path))
    return []


def given_secret() -> bytes | None:
    return next(iter(given_secrets()), None)


def find_secret(given: bytes | None) -> tuple[bytes, str]:
    """Return the secret for a connection, and a sentence about its source for errors. Raises ValueError, OSError."""
    if given is not None:
        return given, "the secret is that of secret="
    if secret := given_secret():
        name = "MONARCH_SECRET" if env.get("MONARCH_SECRET") else "MONARCH_SECRET_FILE"
        return secret, f"the secret is that of {name}"
    return user_secret(), (
        "no secret of the job is given: set MONARCH_SECRET_FILE, MONARCH_SECRET or secret=. This user's own secret of "
        "this machine was tried"
    )


def tls_for() -> Callable[[bytes], Any] | None:
    """Return a function from a secret to its Tls; None with MONARCH_TLS=0. Raises ValueError, CertificateError."""
    wanted, files = env.get("MONARCH_TLS"), [env.get(name) for name in FILES]
    if not wanted:
        return None
    from monarch_backend._transport.network.tls import Tls

    if not any(files):
        return functools.cache(Tls.of_secret)
    if not all(files):
        missing = [name for name, file in zip(FILES, files, strict=True) if not file]
        raise ValueError(f"{' and '.join(missing)} not set: a CA, a certificate and its key go together")
    own = Tls.of_files(*files)
    return lambda _: own
