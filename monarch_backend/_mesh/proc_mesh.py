"""`ProcMesh`: processes that a program has started, as one object that can be sliced, sent and stopped.

The actor layer runs code in them. _processes/spawner.py starts them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch_backend._core.extension_points import extension
from monarch_backend._mesh.extent import Extent, MeshBase, Shape, ranks_in_words
from monarch_backend._mesh.runtime_protocol import program

ERROR_GRACE_S = 10.0
"""Seconds for actors to finish their messages when an error leaves the ``with`` of their processes."""

if TYPE_CHECKING:
    from typing_extensions import Self

    from monarch_backend._transport.local.peer import Peer


class ProcReference(NamedTuple):
    """A pickled mesh of processes."""

    id: str
    name: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    owner: str
    tokens: tuple[str, ...]
    server: str
    host_names: tuple[
        tuple[str, str], ...
    ] = ()  # by number, for failures reported in processes that have not attached the hosts


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
    """Functions that send remaining operations to the processes, and call their argument when these may be told to
    stop.
    """
    groups: dict[Any, Any] = field(default_factory=dict)
    former: dict[str, int] = field(default_factory=dict)  # ranks of processes that have successors, by token
    known: list[Peer | None] = field(init=False)
    _lock: threading.RLock = field(init=False, default_factory=threading.RLock)  # tokens and known; takes no other lock

    def __post_init__(self) -> None:
        self.known = [None] * len(self.tokens)

    def peer(self, rank: int) -> Peer:
        """Return the current process of this rank."""
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

    def who(self, rank: int) -> str:
        """Return text for messages: "gpus 3 of trainers"."""
        return f"{self.where(rank)} of {self.name}"

    def where(self, rank: int) -> str:
        """Return text for messages: "gpus 3"."""
        return ranks_in_words(self.extent, [rank])

    def reference(self) -> ProcReference:
        """Return the reference that is pickled."""
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
        return "" if core is None else core.who(rank)

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
    """Processes, one for each rank. From ``host_mesh.spawn_procs(...)``, at once: messages wait until they are up.

    Slices show some of the processes; a reference may be sent to any actor.
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
        """The name given to ``spawn_procs``."""
        return self._core.name

    @property
    def initialized(self) -> Any:
        """A Future, done when all processes are up; it fails if one does not come up."""
        return program().ready(self._core)

    def spawn(self, name: str, cls: type, /, *args: Any, restart: Any = None, **kwargs: Any) -> Any:
        """Build ``cls(*args, **kwargs)`` in each process; returns the ActorMesh at once.

        A constructor that fails is a failure of the mesh, told to its owner. ``restart``: a Restart, what to do about
        actors that die. Raises TypeError for a class that is no Actor or arguments that it does not take.
        """
        return program().spawn_actors(self, name, cls, args, kwargs, restart=restart)

    def process_group(self, backend: str = "monarch", timeout: float = 300.0) -> Any:
        """Make these processes the ranks of torch's default process group, as ``torchrun`` would: a Future of None.

        Afterwards ordinary torch.distributed code runs in actors on them: collectives, DDP, FSDP. A slice is a world of
        its own. If a process dies, the groups of the others end with an error that names it; call this again after a
        restart. ``timeout``, in seconds, is the group's.
        """
        return program().process_group(self, backend, timeout)

    def device_mesh(self, device_type: str = "cpu", timeout: float = 300.0) -> Any:
        """These processes as a torch DeviceMesh of the same shape, controlled by this program.

        DTensors on it are torch's own; their shards live in the processes: see monarch_backend.dtensor.
        ``device_type``: "cpu", or "cuda" where the processes have GPUs. ``timeout``, in seconds, is that of their
        collectives. A slice is a mesh of its own, on the same processes. Raises ValueError for another device, and
        RemoteTensorError in a process that is a rank of a torch.distributed group.
        """
        return extension("dtensor").device_mesh(self, device_type, timeout)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function as SPMD code in these processes, with torch.distributed's groups: a Future of its results.

        DTensors of `device_mesh` among the arguments are genuine ones there; see `monarch_backend.dtensor.run`.
        """
        return extension("dtensor").run(self, function, *args, **kwargs)

    def stop(self, reason: str = "stopped by its owner", timeout: float | None = None) -> Any:
        """Let the actors finish the messages that they have, clean up, and end the processes. A Future of None.

        Operations of device meshes that were issued before are among these messages. What is still there after
        ``timeout`` seconds is killed. Without it a process that works is waited for, with a warning every 10 seconds.
        Killed after 10 are those that do not read their messages, and where a process of the mesh has died all that
        are left, since they may wait for it. Raises ValueError for a slice, and RuntimeError for
        a mesh that another actor or program has spawned; so do ``abort`` and ``kill``.
        """
        return program().stop_procs(whole(self, "stop"), "stop", reason, timeout)

    def abort(self, reason: str = "aborted by its owner") -> Any:
        """End the processes after the messages that run, or after 10 seconds. A Future of None.

        What runs is interrupted after 5 seconds: CancelledError is raised in it, where the interpreter can do that.
        """
        return program().stop_procs(whole(self, "abort"), "abort", reason)

    def kill(self, reason: str = "killed by its owner") -> Any:
        """End the processes at once, by SIGKILL. Return a Future of None."""
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
        """What of the processes' output the controller shows; what is not given stays as it is.

        ``aggregate_window_sec``: how long to wait for the same line from other ranks; None: not at all. ``level``: of
        ``logging`` records. ``to_files``: a folder for a file of each rank and stream.
        """
        logs = whole(self, "logging_option").owned.logs if self._core.owned is not None else None
        if logs is None:
            raise RuntimeError("the output of these processes goes to the program that has spawned them: set it there")
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
