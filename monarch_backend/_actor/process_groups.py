"""torch.distributed's process groups inside actors: one default group for each mesh or slice of processes.

This module does the rendezvous only; torch and process_group/ make the group. When a process dies, its owner ends the
groups of the survivors (see runtime.py).
"""

from __future__ import annotations

import datetime
import os
import sys
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.actor import Actor, endpoint
from monarch_backend._actor.calls.codec import supervision_error
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.context import current_rank
from monarch_backend._actor.current_runtime import program
from monarch_backend._core.addresses import address_towards, is_loopback, numeric_address
from monarch_backend._core.timeouts import check_bounded
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._mesh.proc_mesh import ProcMesh

MEETING_HOST = "127.0.0.1"


class World(Actor):
    """Makes its process a rank of torch's default group."""

    def __init__(self) -> None:
        self._store: Any = None

    @endpoint
    def has_started(self) -> None:
        """Return once the process has started and earlier calls have ended, in every rank."""

    @endpoint
    def listen(self, host: str, seconds: float) -> int:
        """Return the port of a new store, in rank 0."""
        import torch._C._distributed_c10d as c10d

        size, timeout = current_rank().extent.nelements, datetime.timedelta(seconds=seconds)
        self._store = c10d.TCPStore(host, 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        return int(self._store.port)

    @endpoint
    def join(self, backend: str, host: str, port: int, seconds: float, homes: list[str], tokens: list[str]) -> None:
        """Join the group, in every rank. ``homes`` has the host of each rank, ``tokens`` its process."""
        import torch._C._distributed_c10d as c10d
        import torch.distributed as dist

        rank = current_rank()
        size, timeout = rank.extent.nelements, datetime.timedelta(seconds=seconds)
        if dist.is_initialized():
            dist.destroy_process_group()
        home = homes[rank.rank]
        os.environ.update(
            RANK=str(rank.rank), WORLD_SIZE=str(size), LOCAL_RANK=str(homes[: rank.rank].count(home)),
            LOCAL_WORLD_SIZE=str(homes.count(home)), MASTER_ADDR=host, MASTER_PORT=str(port),
        )  # fmt: skip
        store = self._store or c10d.TCPStore(host, port, size, timeout=timeout, wait_for_workers=False)
        dist.init_process_group(backend, store=store, rank=rank.rank, world_size=size, timeout=timeout)
        program().group_tokens = tokens
        if rank.rank != 0:
            self._store = None

    def __cleanup__(self, exc: BaseException | None) -> None:
        """Leave the group, unless this actor failed: then the other ranks have left it, too.

        If the process ends, its other actors end first, because they may still use the group.
        """
        store, self._store = self._store, None

        def leave(_store: Any = store) -> None:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

        if exc is None:
            current = program()
            if current.leaving:
                current.last.append(leave)
            else:
                leave()


class _Meeting(Future[None]):
    """Future that is done when all processes of a mesh are in the group."""

    __slots__ = ()

    def _label(self) -> str:
        return "process_group"


def meet(program: Any, procs: ProcMesh, backend: str, timeout: float) -> Future[None]:
    """Return a Future that is done when every process of the mesh or slice is in the group."""
    timeout = check_bounded(timeout)
    core = procs._core
    key = tuple(procs._shape.ranks)
    for rank in key:
        if core.peer(rank).gone is not None:
            failed: Future[None] = Future(program.wait)
            failure = program.death_of(core, rank, core.peer(rank))
            failed._fail(supervision_error(failure, "process_group", "not sent"))
            return failed
    world = core.groups.get(key)
    if world is None or world.failed_ranks:
        world = core.groups[key] = procs.spawn("world", World)
    done = _Meeting(program.wait)
    home = program.hosts.of(core.tokens[key[0]])
    host, homes = MEETING_HOST if home is None else home.address[0], [host_of(core.tokens[rank]) for rank in key]
    known = [program.hosts.of(core.tokens[rank]) for rank in key]
    others = sorted({each.address[0] for each in known if each is not None})
    first = world if len(world) == 1 else world.flatten("rank").slice(rank=0)

    def join() -> None:
        try:
            # A call fails with its first rank. Another rank may still connect to the store that `listen` replaces, and
            # would try until its timeout.
            world.has_started.call().get()
            master = _master_address(host, others)
            port = first.listen.call_one(master, timeout).get()
            world.join.call(backend, master, port, timeout, homes, [core.tokens[rank] for rank in key]).get()
            done._set(None)
        except BaseException as error:
            done._fail(error)

    program.run_in_thread(join)
    return done


def _master_address(host: str, others: list[str]) -> str:
    """Return the address of rank 0's host for all ranks. ``others`` are addresses of the mesh's hosts.

    It is resolved here, because on the host itself its name may resolve to loopback. A host that this program reaches
    by loopback is this one. Other hosts reach it at its address on the route to them.
    """
    own = numeric_address(host)
    if is_loopback(own):
        return next(filter(None, map(address_towards, others)), own)
    return own


def waited_in(thread: int) -> int:
    """Return the identity of the group in whose collective a thread of this process waits, 0 if it waits in none."""
    groups: Any = sys.modules.get("monarch_backend.process_group._process_group")
    return 0 if groups is None else int(groups.waited_in(thread))


def abort_groups(why: str) -> None:
    """End the groups of this process after another process has died, whatever its actors do with them."""
    groups = sys.modules.get("monarch_backend.process_group")
    if groups is not None:
        groups.abort_all(why)
