"""Exceptions of process groups. Each message says what failed, where (rank, host, pid) and what to do."""

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
    """Base of the exceptions of process groups; also a ``torch.distributed.DistError``.

    Raised itself when this process may not read the memory of another rank on its host.
    """


@public("monarch_backend")
class NoRouteError(ProcessGroupError, NotImplementedError):
    """No route exists for the tensor's device, or for this operation on it. Also a NotImplementedError.

    Raised by the first operation on such a device. The message names the routes of the group and what to install.
    """


@public("monarch_backend")
class CollectiveArgumentError(ProcessGroupError, ValueError):
    """A collective was called with arguments that can't work. Also a ValueError.

    Raised by the call itself: no data is sent, and the group stays usable.
    """


@public("monarch_backend")
class CollectiveMismatchError(ProcessGroupError):
    """The ranks called different collectives, or one collective with different shapes, dtypes, ops or roots.

    Raised on each rank that took part, by the call or by ``wait()`` of its work. No data is moved, and the group
    stays usable.
    """


@public("monarch_backend")
class CollectiveTimeoutError(ProcessGroupError):
    """A rank did not enter a collective in time; the message names the rank and the collective.

    Raised when the group's timeout ends, by the call or by ``wait()`` of its work. The group can't be used afterwards.
    ``wait(timeout)`` also raises it when its own timeout ends; the operation then goes on.
    """


@public("monarch_backend")
class RankFailedError(ProcessGroupError):
    """A rank of the group ended while others needed it.

    Raised by the call or by ``wait()`` of its work, as soon as the end is seen. The group can't be used afterwards.
    ``rank`` is the rank in the group, -1 if it is unknown.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank


@public("monarch_backend")
class GroupClosedError(ProcessGroupError):
    """The process group was destroyed or aborted; make a new one.

    Raised by operations on such a group, and by operations that are under way when it is closed.
    """


def where(group: Collectives) -> str:
    """Return ``"rank 1 of 2 in group 0 (default_pg), host h, pid 42"``, the part of each message that says where."""
    name = group._label
    return f"rank {group.rank()} of {group.size()} in group {name}, host {socket.gethostname()}, pid {os.getpid()}"


_REASON_BYTES = 255  # csrc/shm/group.h: reason_bytes


def reason_of(error: BaseException | None) -> str:
    """Return ``"raised ValueError: text"``, one line of at most 255 bytes; "" for None and for a normal exit."""
    if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return ""
    if isinstance(error, SystemExit) and error.__context__ is not None:  # from torch.multiprocessing.spawn
        return reason_of(error.__context__)
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = " ".join(str(error).split())
    except Exception:  # a faulty __str__ must not hide the failure itself
        text = ""
    return cut_reason(f"raised {name}: {text}" if text else f"raised {name}")


def cut_reason(text: str) -> str:
    """Return ``text`` as one line of at most 255 bytes; "..." replaces the end of a longer one."""
    encoded = " ".join(text.split()).encode(errors="replace")
    if len(encoded) <= _REASON_BYTES:
        return encoded.decode()
    return encoded[: _REASON_BYTES - 3].decode(errors="ignore") + "..."


def bad_argument(group: Collectives, collective: str, what: str, remedy: str) -> CollectiveArgumentError:
    """Return the error for invalid arguments of ``collective``: what is wrong, where, and the remedy."""
    return CollectiveArgumentError(f"{collective}: {what}. {remedy} [{where(group)}]")
