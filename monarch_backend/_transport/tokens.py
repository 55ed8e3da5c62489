"""Parts of the token of a process: its host, the number of its restarts, and its identity."""

from __future__ import annotations

HOST_ID_LENGTH = 8
"""Characters at the start of a token that name its host."""


def host_of(token: str) -> str:
    """Return the host of the process with this token. The token contains it, so no directory is needed."""
    return token[:HOST_ID_LENGTH]


def epoch_of(token: str) -> int:
    """Return the epoch in a token: how often the process has been restarted. Frames carry the epoch.

    The epoch of a program has no meaning.

    >>> epoch_of("0123456789abcdef0123456789ab" + "0002")
    2
    """
    try:
        return int(token[-4:], 16)
    except ValueError:
        return 0


def identity_of(token: str) -> int:
    """Return 64 bits of a token that identify its process in recorded events.

    >>> hex(identity_of("0123456789abcdef0123456789ab" + "0002"))
    '0x123456789ab0002'
    """
    try:
        return int(token[-16:], 16)
    except ValueError:
        return 0
