"""What the process group raises. Every message says what happened, where (rank, host, pid) and what to do next."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

from torch.distributed import DistError

from monarch_backend._core.errors import MonarchError, public

if TYPE_CHECKING:
    from monarch_backend.process_group._collectives import Collectives


@public("monarch_backend")
class ProcessGroupError(MonarchError, DistError):
    """Base of the exceptions of process groups; also a ``torch.distributed.DistError``."""


@public("monarch_backend")
class NoRouteError(ProcessGroupError, NotImplementedError):
    """No route exists for the tensor's device; the message names the routes there are and what to install."""


@public("monarch_backend")
class CollectiveArgumentError(ProcessGroupError, ValueError):
    """A collective was called with arguments that can't work; nothing was sent and the group stays usable."""


@public("monarch_backend")
class CollectiveMismatchError(ProcessGroupError):
    """The ranks called different collectives, or one with different shapes, dtypes, ops or roots."""


@public("monarch_backend")
class CollectiveTimeoutError(ProcessGroupError):
    """A rank did not enter a collective in time; the message names the rank and the collective."""


@public("monarch_backend")
class RankFailedError(ProcessGroupError):
    """A rank of the group ended while the others needed it; ``rank`` is its rank in the group."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


@public("monarch_backend")
class GroupClosedError(ProcessGroupError):
    """The process group was destroyed or aborted; make a new one."""


def where(group: Collectives) -> str:
    """``"rank 1 of 2 in group 0 (default_pg), host h, pid 42"``: the part of every message that names us."""
    name = group._label
    return f"rank {group.rank()} of {group.size()} in group {name}, host {socket.gethostname()}, pid {os.getpid()}"


_REASON_BYTES = 255  # csrc/shm/group.h: reason_bytes


def reason_of(error: BaseException | None) -> str:
    """``"raised ValueError: text"``, one line of at most 255 bytes; "" for None and for what is no failure."""
    if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return ""
    if isinstance(error, SystemExit) and error.__context__ is not None:  # as torch.multiprocessing.spawn ends a rank
        return reason_of(error.__context__)
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = " ".join(str(error).split())
    except Exception:  # a faulty __str__ must not hide the failure itself
        text = ""
    line = f"raised {name}: {text}" if text else f"raised {name}"
    encoded = line.encode(errors="replace")
    if len(encoded) <= _REASON_BYTES:
        return encoded.decode()
    return encoded[: _REASON_BYTES - 3].decode(errors="ignore") + "..."


def bad_argument(group: Collectives, collective: str, what: str, remedy: str) -> CollectiveArgumentError:
    """The error for arguments of ``collective`` that can't work: what is wrong, where, and the remedy."""
    return CollectiveArgumentError(f"{collective}: {what}. {remedy} [{where(group)}]")
