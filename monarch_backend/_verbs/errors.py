"""Exceptions of verbs: the text of the work completion, where it happened, and what to do."""

from __future__ import annotations

import errno
import os

from monarch_backend._core.errors import MonarchError, public

SUCCESS, FLUSHED, RETRY_EXCEEDED = 0, 5, 12
"""Values of ibv_wc_status."""

_STATUS = (
    "success",
    "local length error",
    "local QP operation error",
    "local EE context operation error",
    "local protection error",
    "Work Request Flushed Error",
    "memory management operation error",
    "bad response error",
    "local access error",
    "remote invalid request error",
    "remote access error",
    "remote operation error",
    "transport retry counter exceeded",
    "RNR retry counter exceeded",
    "local RDD violation error",
    "remote invalid RD request",
    "aborted error",
    "invalid EE context number",
    "invalid EE context state",
    "fatal error",
    "response timeout error",
    "general error",
)
"""Texts of ibv_wc_status_str, so that a web search finds them."""

LINK_STATUS = frozenset({2, FLUSHED, RETRY_EXCEEDED, 13, 16, 19, 20, 21})
"""Statuses that are the connection's fault: the request may succeed on another one.

soft-RoCE reports "local QP operation error" when its interface is down.
"""

_NEXT = {
    1: "the memory registered here is shorter than the request: report this, it is a bug",
    2: "the device could not send: is its link up? See `monarch-backend doctor`",
    4: "memory that is not registered here, or is gone: keep its owner alive until the transfer is done",
    8: "memory that is not registered here, or is gone: keep its owner alive until the transfer is done",
    9: "the peer's device does not support such a request: is the address aligned, for an atomic?",
    10: "the region was released, or does not allow this: ask its owner for a new one",
    11: "the peer's device could not do it: look at its kernel log",
    12: "nothing answers: is the peer alive, its link up? See `monarch-backend doctor` on both sides",
    13: "the peer's queue pair never becomes ready: report this, it is a bug",
    20: "the device has neither done it nor failed for longer than it may take: look at the kernel logs of both sides",
}


@public("monarch_backend.errors")
class VerbsError(MonarchError, ConnectionError):
    """A transfer, a connection or a registration on a NIC has failed.

    Raised by operations of NICs. Transfers of an RDMABuffer fail with an RDMAError of the same text instead.

    ``status``: the work completion's text, such as "remote access error"; empty if there was no completion. ``device``
    and ``peer`` name both sides; they may be empty.
    """

    def __init__(self, message: str, status: str = "", device: str = "", peer: str = "") -> None:
        super().__init__(message, status, device, peer)
        self.message, self.status, self.device, self.peer = message, status, device, peer

    def __str__(self) -> str:
        return self.message


@public("monarch_backend.errors")
class UnreachableMemoryError(VerbsError):
    """NICs can't access this memory, here or at its owner; another route may. Raised as VerbsError is."""


@public("monarch_backend.errors")
class NoConnectionError(VerbsError):
    """There is no connection, and nothing is in progress; another route may carry the data. Raised as VerbsError is."""


def status_text(status: int) -> str:
    return _STATUS[status] if 0 <= status < len(_STATUS) else f"status {status}"


def completion_error(what: str, status: int, vendor: int, device: str, peer: object) -> VerbsError:
    text = status_text(status)
    vendor_part = f", vendor code {vendor:#x}" if vendor else ""
    advice = _NEXT.get(status, "look at the kernel logs of both sides for this device")
    return VerbsError(
        f"{what} failed: {text} (peer {peer}, device {device}{vendor_part}); {advice}", text, device, str(peer)
    )


def stuck_error(error: VerbsError) -> VerbsError:
    """Return the error for work requests on a queue pair that can't be destroyed."""
    return VerbsError(
        f"{error}. Its queue pair cannot be destroyed (was the device removed or reset?), so it is unknown what was "
        "done, or will be: memory here that was to be read into may still change. Leave it alone, and restart this "
        "process",
        error.status,
        error.device,
        error.peer,
    )


def registration_error(error: OSError, nbytes: int, device: str, limit: int | None) -> VerbsError:
    """Return the error for memory that can't be registered; ``limit``: of locked memory in bytes, None if unlimited."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    advice = "is that memory of this process, and mapped?"
    if error.errno in (errno.ENOMEM, errno.EAGAIN, errno.EPERM):
        now = "unlimited" if limit is None else f"{limit} bytes"
        advice = (
            f"registered memory is locked into RAM, and the limit is {now}: raise it (`ulimit -l unlimited`; "
            "LimitMEMLOCK=infinity in a systemd unit, `--ulimit memlock=-1` for a container), or expose less at once"
        )
        if limit is None:
            advice = (
                "the limit for locked memory is not the reason (it is unlimited): the device or the machine is short "
                "of memory or of registrations; expose less at once"
            )
    elif error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
        advice = "the device cannot register such memory: is it ordinary, mapped, and writable if it is to be written?"
    return VerbsError(f"cannot register {nbytes} bytes with {device}: {reason}; {advice}", "", device)
