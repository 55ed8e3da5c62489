"""`ProcMesh`: processes that a program has started, as one object that can be sliced, sent and stopped.

The actor layer runs code in them. _processes/spawner.py starts them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_backend._core.extension_points import extension
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.mesh_base import MeshBase
from monarch_backend._mesh.rank_text import ranks_in_words
from monarch_backend._mesh.runtime_protocol import program
from monarch_backend._mesh.shape import Shape

ERROR_GRACE_S = 10.0
"""Seconds for actors to finish their messages when an error leaves the ``with`` block of their processes."""

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch_backend._transport.local.peer import Peer


class ProcReference(NamedTuple):
    id: str
    name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    owner: str
    tokens: tuple[str, ...]
    server: str
    host_names: tuple[tuple[str, str], ...] = ()  # by number, for messages of processes that did not attach the hosts


@dataclass(eq=False)
class ProcMeshState:
    """Shared state of all slices of one mesh of processes, in this process."""

    id: str
    name: str
    extent: Extent
    owner: Peer
    tokens: list[str]  # current process of each rank
    find: Callable[[ProcMeshState, int], Peer]  # finds a process that has not been sent a message yet
    server: str = ""  # address of the fork server of its host
    owned: Any = None  # the owner's records, None elsewhere
    stopped: str | None = None  # why it was stopped, if it was
    before_stop: list[Callable[[Callable[[], None]], None]] = field(default_factory=list)
    """Functions that send remaining operations to the processes, and then call their argument, which stops these."""
    groups: dict[Any, Any] = field(default_factory=dict)
    former: dict[str, int] = field(default_factory=dict)  # ranks of processes that have successors, by token
    known: list[Peer | None] = field(init=False)
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)  # tokens and known; takes no other lock

    def __post_init__(self) -> None:
        self.known = [None] * len(self.tokens)

    def peer(self, rank: int) -> Peer:
        while True:
            peer = self.known[rank]
            if peer is not None:
                return peer
            found = self.find(self, rank)
            with self._lock:
                if self.tokens[rank] == found.token:  # else it has been replaced meanwhile
                    self.known[rank] = found

    @property
    def peers(self) -> list[Peer]:
        """Return all processes, for the owner, which knows them."""
        return [self.peer(rank) for rank in range(len(self.tokens))]

    def replace(self, rank: int, token: str) -> None:
        """Set another process for this rank. The end of the former one may be reported later."""
        with self._lock:
            self.former[self.tokens[rank]] = rank
            self.tokens[rank] = token
            self.known[rank] = None

    def rank_of(self, token: str) -> int | None:
        """Return the rank that this process has, or had before its restart."""
        with self._lock:
            return self.tokens.index(token) if token in self.tokens else self.former.get(token)

    def where(self, rank: int) -> str:
        """Return text for messages: "gpus 3"."""
        return ranks_in_words(self.extent, [rank])

    def reference(self) -> ProcReference:
        return ProcReference(
            self.id,
            self.name,
            tuple(self.extent.labels),
            tuple(self.extent.sizes),
            self.owner.token,
            tuple(self.tokens),
            self.server,
            program().host_names(self.tokens),
        )


def label_of(core: ProcMeshState, rank: int) -> Callable[[], str]:
    """Return a function for the label of a Peer, with a weak reference: the peer may be kept longer than the mesh."""
    known = weakref.ref(core)

    def who() -> str:
        core = known()
        return "" if core is None else f"{core.where(rank)} of {core.name}"

    return who


def _from_reference(data: ProcReference, shape: Shape) -> ProcMesh:
    return ProcMesh(program().proc_core(data), shape)


def whole(mesh: Any, what: str) -> Any:
    """Return the core of a mesh of processes or actors that is not a slice. Raises ValueError for a slice."""
    core = mesh._core
    if len(mesh._shape.ranks) != core.extent.nelements:
        raise ValueError(f"{what}() is for whole meshes, and this is a slice of {core.name!r}: {mesh.extent}")
    return core


class ProcMesh(MeshBase):
    """Processes, one for each rank. ``host_mesh.spawn_procs(...)`` returns it at once.

    Messages wait until the processes have started. Slices are ProcMeshes of some of the processes. A mesh can be sent
    to any actor. A ``with`` block stops the processes at its end, after an error at the latest 10 seconds later.

    >>> from monarch_backend.actor import Actor, current_rank, endpoint, this_host
    >>> class Rank(Actor):
    ...     @endpoint
    ...     def number(self):
    ...         return current_rank().rank
    >>> with this_host().spawn_procs({"gpus": 1}) as procs:
    ...     procs.spawn("rank", Rank).number.call_one().get()
    0
    """

    def __init__(self, core: ProcMeshState, shape: Shape | None = None) -> None:
        self._core = core
        self._shape = shape or Shape.of(core.extent)

    def _new_with_shape(self, shape: Shape) -> Self:
        return self.__class__(self._core, shape)

    def __reduce__(self) -> Any:
        return _from_reference, (self._core.reference(), self._shape)

    @property
    def name(self) -> str:
        """Name that was given to ``spawn_procs``."""
        return self._core.name

    @property
    def initialized(self) -> Any:
        """`Future` that is done when all processes have started and their ``bootstrap`` has returned.

        It raises `MeshFailure` if one does not start. Raises RuntimeError for a mesh that another process has spawned.
        """
        return program().ready(self._core)

    def spawn(self, name: str, cls: type, /, *args: Any, restart: Any = None, **kwargs: Any) -> Any:
        """Construct an actor ``cls(*args, **kwargs)`` in each process. Return its `ActorMesh` at once.

        ``restart``, a `Restart`, is the policy for actors that die. Without it a constructor or an actor that fails is
        a failure of the mesh, which is reported to the owner.

        Raises TypeError for a class that is not an `Actor` and for arguments that its constructor does not take. Raises
        ValueError for an empty name and a class whose endpoints do not fit together, SerializationError for an argument
        that cannot be pickled, and SupervisionError if the mesh was stopped.
        """
        return program().spawn_actors(self, name, cls, args, kwargs, restart=restart)

    def process_group(self, backend: str = "monarch", timeout: float = 300.0) -> Any:
        """Make these processes the ranks of torch's default process group, as ``torchrun`` does. Return a `Future` of
        None.

        Then ordinary torch.distributed code runs in actors on them: collectives, DDP, FSDP. A slice is a world of its
        own. ``timeout`` is that of the group, in seconds. If a process dies, the groups of the others end with an error
        that names it. Call this method again after a restart.

        The future raises `ActorError` if a rank cannot join, and `SupervisionError` if a process is dead. Raises
        ValueError for a negative timeout.
        """
        return program().process_group(self, backend, timeout)

    def device_mesh(self, device_type: str = "cpu", timeout: float = 300.0) -> Any:
        """Return these processes as a torch DeviceMesh of the same shape, controlled by this program.

        DTensors on it are torch's own, with their shards in the processes: see `monarch_backend.dtensor`.
        ``device_type`` is "cpu", or "cuda" if the processes have GPUs. ``timeout``, in seconds, is that of their
        collectives. A slice is a separate mesh on the same processes.

        Raises ValueError for another device, and RemoteTensorError in a process that is a rank of a torch.distributed
        group.
        """
        return extension("dtensor").device_mesh(self, device_type, timeout)

    def profile(
        self, *, seconds: float | None = None, steps: int | None = None, ranks: Iterable[int] | None = None
    ) -> Any:
        """Profile these processes with torch.profiler. Return a `Future` of a `telemetry.ProfileResult`.

        It lasts for some ``seconds``, or for some calls of `telemetry.step` in each process, at most a minute.
        ``ranks`` are those of this mesh or slice; all by default. The result merges torch's operators with what the
        processes record. Processes that do not answer, have no torch or are on other hosts are among its problems.

        Raises ValueError for wrong arguments, and NotImplementedError on systems other than Linux.
        """
        return program().profile_procs(self, seconds, steps, ranks)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function as SPMD code in these processes, with torch.distributed's groups. Return a `Future` of its
        results.

        DTensors of `device_mesh` among the arguments are ordinary DTensors there. Errors are those of
        `monarch_backend.dtensor.run`.
        """
        return extension("dtensor").run(self, function, *args, **kwargs)

    def stop(self, reason: str = "stopped by its owner", timeout: float | None = None) -> Any:
        """Stop the processes after the messages in their actors' queues. Return a `Future` of None.

        Operations on device meshes that were issued before are among these messages. Processes that still run after
        ``timeout`` seconds are killed. Without a timeout, a process at work is waited for, with a warning every 10
        seconds. Processes that do not read their messages are killed after 10 seconds. If a process of the mesh has
        died, all others are killed then, because they may wait for it.

        Raises ValueError for a slice or an invalid timeout, and RuntimeError for a mesh that another actor or program
        has spawned.
        """
        return program().stop_procs(whole(self, "stop"), "stop", reason, timeout)

    def cancel(self, reason: str = "cancelled by its owner") -> int:
        """Cancel this program's calls that wait for actors on these processes. Return their number.

        Queued messages are dropped and running endpoints are interrupted, as `Future.cancel` does. The futures raise
        CancelledError. A slice of the mesh cancels the calls that wait for one of its processes.

        >>> import time
        >>> from monarch_backend.actor import Actor, endpoint, this_host
        >>> class Sleeper(Actor):
        ...     @endpoint
        ...     def sleep(self):
        ...         time.sleep(1000)
        >>> procs = this_host().spawn_procs({"gpus": 2})
        >>> future = procs.spawn("sleeper", Sleeper).sleep.call()
        >>> procs.cancel()
        1
        >>> future.exception()
        CancelledError('cancelled by its owner')
        """
        return program().cancel_calls(self._core, self._shape.ranks, reason)

    def abort(self, reason: str = "aborted by its owner") -> Any:
        """End the processes after the running messages, at the latest after 10 seconds. Return a `Future` of None.

        Running code is interrupted after 5 seconds by CancelledError, where the interpreter can raise it. Raises as
        `stop` does.
        """
        return program().stop_procs(whole(self, "abort"), "abort", reason)

    def kill(self, reason: str = "killed by its owner") -> Any:
        """Kill the processes at once, by SIGKILL. Return a `Future` of None. Raises as `stop` does."""
        return program().stop_procs(whole(self, "kill"), "kill", reason)

    async def __aenter__(self) -> Self:
        await self.initialized
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.stop("left its `async with`", timeout=None if kind is None else ERROR_GRACE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.stop("left its `with`", timeout=None if kind is None else ERROR_GRACE_S).get()

    def logging_option(
        self,
        stream_to_client: bool | None = None,
        aggregate_window_sec: float | str | None = "",
        level: int | str | None = None,
        to_files: str | None = None,
    ) -> None:
        """Set which output of the processes the controller shows. Omitted options do not change.

        ``stream_to_client``: whether it is shown. ``aggregate_window_sec``: seconds that a line waits for the same line
        of other ranks; None shows it at once. ``level``: minimum level of ``logging`` records, a number or a name.
        ``to_files``: directory for one file of each rank and stream.

        Raises ValueError for a slice and for an invalid value, TypeError for a value of a wrong type, and RuntimeError
        for a mesh that another program has spawned.
        """
        logs = whole(self, "logging_option").owned.logs if self._core.owned is not None else None
        if logs is None:
            raise RuntimeError(
                "the output of these processes goes to the program that has spawned them: set the option there"
            )
        options: Mapping[str, Any] = {
            name: value
            for name, value in {"stream_to_client": stream_to_client, "level": level, "to_files": to_files}.items()
            if value is not None
        }
        window = {} if aggregate_window_sec == "" else {"aggregate_window_sec": aggregate_window_sec}
        logs.configure(**options, **window)
        if level is not None:
            program().set_log_level(self._core, level)

    def __repr__(self) -> str:
        return f"ProcMesh({self._core.name!r}, {self.extent})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: a table of the processes and of what they do."""
        # Imported here: readers of recordings need numpy, and few programs show a mesh.
        from monarch_backend._telemetry.mesh_html import as_html

        core = self._core
        return as_html(repr(self), [f"{core.where(rank)} of {core.name}" for rank in self._shape.ranks])
