"""TLS settings of connections between hosts: TLS 1.3 by the job's secret, the user's own files, or none.

_transport/network/tls.py makes the certificates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from monarch_backend._core import env

FILES = ("MONARCH_TLS_CA", "MONARCH_TLS_CERT", "MONARCH_TLS_KEY")
"""Variables that name files in PEM: the accepted authorities, this host's certificate, and its key."""


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
