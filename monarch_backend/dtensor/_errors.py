"""Errors of remote tensors. Each text says what failed, where, and what to do."""

from __future__ import annotations

from monarch_backend._core.errors import MonarchError, public


@public("monarch_backend.dtensor")
class RemoteTensorError(MonarchError, RuntimeError):
    """Base of the errors of remote tensors.

    Raised itself for a tensor, a mesh or an operation that a controller can't use; the message says which.
    """


@public("monarch_backend.dtensor")
class RankDependentError(RemoteTensorError):
    """A Python branch, or a number, would have to differ by rank. There is one controller for all ranks.

    Raised by ``bool()``, ``int()`` and ``float()`` of a number that differs by rank, by comparisons with it, and by
    operations whose result would have another form on some ranks.
    """

    def __init__(self, what: str, why: str, instead: str | None = None) -> None:
        super().__init__(
            f"{what} {why}: one controller runs this program for all ranks, and can take one way only. "
            + (
                instead
                or "Calculate with the number instead of branching on it, or run the branch on the workers: "
                "monarch_backend.dtensor.run(mesh, function, ...)"
            )
        )


@public("monarch_backend.dtensor")
class RemoteOpError(RemoteTensorError):
    """An operation raised on a worker, and the value that was read depends on it.

    ``rank``, ``host``, ``pid``: the worker. ``operation``: torch's name. ``remote_traceback``: the worker's traceback.
    ``issued_at``: the controller's lines that issued it, the innermost last.
    """

    def __init__(
        self, operation: str, rank: int, host: str, pid: int, message: str, remote_traceback: str, issued_at: str
    ) -> None:
        self.operation, self.rank, self.host, self.pid = operation, rank, host, pid
        self.remote_traceback, self.issued_at = remote_traceback, issued_at
        super().__init__(
            f"{operation} raised on rank {rank} (host {host}, pid {pid}): {message}\n\n"
            f"Issued by the controller at (most recent call last):\n{issued_at}\n"
            f"On the worker:\n{remote_traceback}"
        )


@public("monarch_backend.dtensor")
class NotReadableError(RemoteTensorError):
    """Code on the controller needs the memory of a tensor that is on workers.

    Raised by ``data_ptr()``, ``share_memory_()``, DLPack and the like, and by C++ code that asks for a pointer.
    """


@public("monarch_backend.dtensor")
class MeshMismatchError(RemoteTensorError, ValueError):
    """One operation has tensors of different meshes or processes. Also a ValueError, which torch raises in this
    case.

    Raised by the operation on the controller. `monarch_backend.dtensor.move` copies a DTensor to another mesh.
    """


@public("monarch_backend.dtensor")
class MeshClosedError(RemoteTensorError):
    """The processes of this tensor have ended. Raised by operations on it, and by reading its values."""


def not_readable(what: str) -> NotReadableError:
    """Return the error for code that needs the memory itself."""
    return NotReadableError(
        f"{what}: this tensor's memory is in other processes. Read its values (.numpy(), .tolist()), or run what needs "
        "the memory on the workers: monarch_backend.dtensor.run(mesh, function, ...)"
    )
