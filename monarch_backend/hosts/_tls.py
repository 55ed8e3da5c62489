"""Whether connections between hosts are encrypted, and with what: TLS 1.3 by the job's secret, or none if so wanted.

The certificates themselves are made by transport/_certificates.py.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any


def tls_for() -> Callable[[bytes], Any] | None:
    """What makes the Tls of a secret; None with MONARCH_TLS=0."""
    wanted = os.environ.get("MONARCH_TLS", "1")
    if wanted not in ("0", "1", ""):
        raise ValueError(f"MONARCH_TLS={wanted!r}: 0 for none, or unset")
    if wanted == "0":
        return None
    from monarch_backend.transport._certificates import Tls

    return functools.cache(Tls.of_secret)
