"""Actor meshes that this process has spawned: construction, restart and end."""

from __future__ import annotations

import contextlib
import inspect
import logging
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from monarch_backend._actor import context
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.errors import Death, MeshFailure, SupervisionError
from monarch_backend._actor.execution.interruption import KILL_AFTER_S
from monarch_backend._actor.meshes.actor_mesh import ActorMesh, blueprint
from monarch_backend._actor.meshes.mesh_state import ActorMeshState
from monarch_backend._actor.processes import stop as process_stop
from monarch_backend._actor.processes import stuck_readers
from monarch_backend._actor.restart_policy import Restart, RestartLimiter, check_policy
from monarch_backend._core.timeouts import check_timeout
from monarch_backend._mesh.proc_mesh import ProcMesh
from monarch_backend._serialization.exceptions import unpack_exception
from monarch_backend._serialization.pickling import dumps
from monarch_backend._telemetry import kinds, recorder, texts
from monarch_backend._transport.local.frames import Construct, Constructed, Failed, Frame, Stop, Stopped
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

log = logging.getLogger("monarch_backend")


class OwnedActors:
    def __init__(
        self,
        core: ActorMeshState,
        owner_runner: Any,
        siblings: list[Any],
        body: bytes,
        buffers: Any,
        limiter: RestartLimiter | None,
        built: Future[None],
    ) -> None:
        self.core, self.owner_runner, self._siblings = core, owner_runner, siblings
        self.body, self.buffers = body, buffers  # the constructor's arguments
        self.limiter, self.built = limiter, built
        self.generations = [0] * len(core.bases)
        self.left = set(range(len(core.bases)))  # ranks that have not ended
        self._unbuilt = set(range(len(core.bases)))
        self.constructing: set[int] = set()
        self.homes: dict[int, Peer] = {}  # process that constructs each rank; it may be replaced meanwhile
        self.ended: Future[None] = Future(built._wait)

    def is_built(self, rank: int) -> None:
        self._unbuilt.discard(rank)
        self.constructing.discard(rank)
        if not self._unbuilt:
            if not self.built.ready:
                texts.life(kinds.Kind.MESH, self.core.name, "ready")
            self.built._set(None)
            below = self.core.procs.owned
            if self.limiter is None and (below is None or below.limiter is None):
                self.body, self.buffers = b"", None  # it is never constructed again

    def is_gone(self, rank: int) -> None:
        self.left.discard(rank)
        self.settle()

    def settle(self) -> None:
        """Finish the future of `stop` when all ranks have ended."""
        if not self.left and self.core.stopped is not None:
            self.ended._set(None)
            self.let_go()

    def let_go(self) -> None:
        """Drop the records of an ended mesh, so that only its references keep it alive."""
        self.body, self.buffers = b"", None
        below = self.core.procs.owned
        for holder in (self._siblings, below.actors if below is not None else []):
            with contextlib.suppress(ValueError):
                holder.remove(self.core)


class ActorMeshOwner:
    """Owner of actor meshes. `ProcessOwner` is the same for processes."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def spawn(
        self, procs: ProcMesh, name: str, cls: type, args: Any, kwargs: Any, restart: Restart | None
    ) -> ActorMesh:
        """Construct an actor in each process. Return its `ActorMesh` at once. Raises as `ProcMesh.spawn` does."""
        plan = blueprint(cls)
        if procs._core.stopped is not None:
            raise SupervisionError(
                f"{name!r} can't be spawned on mesh {procs._core.name!r}: it was stopped: {procs._core.stopped}",
                "spawn",
            )
        if not isinstance(name, str) or not name:
            raise ValueError(f"the name of an actor mesh must be a string that is not empty, not {name!r}")
        _check_constructor(cls, args, kwargs)
        check_policy(restart)
        body, buffers = dumps((cls, args, kwargs, procs))
        owner_runner = living_owner(f"the mesh {name!r}")
        core = ActorMeshState(
            secrets.randbits(63) | 1,
            name,
            plan,
            procs._core,
            procs.extent,
            tuple(procs._shape.ranks),
            self._runtime.router.me,
        )
        limiter = RestartLimiter(restart, self._runtime.clock) if restart is not None else None
        built: Future[None] = Future(self._runtime.wait)
        siblings = self._runtime.children_of(owner_runner)
        core.owned = OwnedActors(core, owner_runner, siblings, _joined(body), _copied(buffers), limiter, built)
        self._runtime.actors[core.actor] = core
        siblings.append(core)
        if procs._core.owned is not None:
            procs._core.owned.actors.append(core)
        recorder.mesh(name, cls.__qualname__, core.extent, core.actor, procs=procs._core.name, shape=procs._shape)
        for rank in range(len(core.bases)):
            self.construct(core, rank)
        return ActorMesh(core)

    def construct(self, core: ActorMeshState, rank: int) -> None:
        owned = core.owned
        owned.left.add(rank)
        owned.constructing.add(rank)
        peer = owned.homes[rank] = core.peer(rank)
        if peer.gone is not None:
            self._runtime.call_soon(
                lambda: self.lost_rank(core, rank, self._runtime.death_of(core.procs, core.bases[rank], peer))
            )
            return
        runner = owned.owner_runner
        plan = Construct(
            core.actor, core.name, rank, tuple(core.extent.labels), tuple(core.extent.sizes),
            runner.name if runner else "main",
            owned.generations[rank], owned.limiter is not None, core.blueprint.is_async,
        )  # fmt: skip
        self._runtime.router.tell(peer, plan, owned.body, owned.buffers)

    def stop(self, core: ActorMeshState, how: str, reason: str, timeout: float | None = None) -> Future[None]:
        """End actors, interrupted after ``timeout`` seconds. Return a Future that is done when they have ended."""
        timeout = check_timeout(timeout)
        if core.owned is None:
            raise RuntimeError(
                "only the program or actor that has spawned an actor mesh can stop it; "
                "an actor can stop itself: context().actor_instance"
            )
        if core.stopped is None:
            peer = core.peer(0)
            host = self._runtime.hosts.name_of(peer.token)
            death = Death(0, core.where(0), host, peer.pid, f"it was stopped: {reason}")
            core.stopped = MeshFailure(core.name, [death])
            texts.life(kinds.Kind.MESH, core.name, "stopped", reason)
            core.owned.built._fail(core.stopped)
            for rank in range(len(core.bases)):
                if core.dead.get(rank) is not None or core.peer(rank).gone is not None:
                    core.owned.left.discard(rank)
        self._tell_to_end(core, how, reason)
        core.owned.settle()
        future: Future[None] = core.owned.ended
        if how == "abort":
            self._end_late(core, future, None, reason)
        elif timeout is not None:
            self._end_late(core, future, timeout, reason)
        return future

    def _tell_to_end(self, core: ActorMeshState, how: str, reason: str) -> None:
        for rank in list(core.owned.left):
            if core.peer(rank).gone is None:
                self._runtime.router.tell(core.peer(rank), Stop(core.actor, how, reason))

    def _end_late(self, core: ActorMeshState, ended: Future[None], timeout: float | None, reason: str) -> None:
        """Interrupt actors that have not ended after ``timeout`` seconds. An abort was sent to all of them at once.

        A process kills itself if the interruption fails. This process kills those that do not read their messages, and
        does not wait for those that have not started yet.
        """

        def interrupt() -> None:
            if not ended.ready:
                self._tell_to_end(core, "interrupt", f"{reason}; {timeout:g} s have passed")

        def give_up() -> None:
            for rank in list(core.owned.left):
                peer = core.peer(rank)
                if peer is not self._runtime.router.me and not self._runtime.owner.stuck.kill_if_unresponsive(peer):
                    log.warning(
                        "%s of %s counts as ended: its process has not started yet, and will end the actor when it has",
                        core.where(rank), core.name,
                    )  # fmt: skip
                    core.owned.is_gone(rank)
            if not ended.ready:
                timers.append(self._runtime.progress.later(stuck_readers.CHECK_INTERVAL_S, give_up))

        timers = [
            self._runtime.progress.later(
                process_stop.SHUTDOWN_GRACE_S if timeout is None else timeout + KILL_AFTER_S, give_up
            )
        ]
        if timeout is not None:
            timers.append(self._runtime.progress.later(timeout, interrupt))

        def cancel(_: Future[None]) -> None:
            for timer in timers:
                timer.cancel()

        ended.add_done_callback(cancel)

    def on_constructed(self, peer: Peer, message: Constructed, _: Frame) -> None:
        """Note that an actor is constructed, or, for number 0, that a process is ready."""
        if message.actor == 0:
            self._runtime.owner.readiness.bootstrapped(peer)
            return
        core = self._runtime.actors.get(message.actor)
        if core is not None and core.owned is not None:
            core.owned.is_built(message.rank)

    def on_stopped(self, _peer: Peer, message: Stopped, _: Frame) -> None:
        core = self._runtime.actors.get(message.actor)
        if core is not None and core.owned is not None and message.generation == core.owned.generations[message.rank]:
            core.owned.is_gone(message.rank)

    def on_failed(self, peer: Peer, message: Failed, frame: Frame) -> None:
        """Handle the failure of an actor, or, for number 0, of a process at its start."""
        if message.actor == 0:
            self._runtime.owner.readiness.bootstrap_failed(peer, unpack_exception(bytes(frame.body)))
            return
        core = self._runtime.actors.get(message.actor)
        if core is None or core.owned is None or message.generation != core.owned.generations[message.rank]:
            return
        failure = unpack_exception(bytes(frame.body))
        if isinstance(failure, MeshFailure):
            self.lost_rank(core, message.rank, failure)

    def lost_rank(self, core: ActorMeshState, rank: int, failure: MeshFailure) -> None:
        owned = core.owned
        if owned.homes[rank].gone is not None:
            owned.is_gone(rank)
        if core.stopped is not None or core.procs.stopped is not None or self._runtime.closing:
            return
        if core.dead.get(rank) is not None:
            return  # reported already, by its process's end or by itself
        delay = owned.limiter.allow() if owned.limiter is not None else None
        gone = core.peer(rank).gone is not None
        if delay is not None and gone and core.procs.owned is not None:
            return  # the mesh of its process reports and restarts it
        cause = failure.deaths[0].what if failure.deaths else str(failure)
        if delay is not None and not gone:
            log.info("%s of %s: %s; %s", core.where(rank), core.name, cause, owned.limiter.last_restart(delay))
            restart = f"{core.where(rank)}: {cause}; {owned.limiter.last_restart(delay)}"
            texts.life(kinds.Kind.MESH, core.name, "restarted", restart)
            again = range(len(core.bases)) if owned.limiter.policy.strategy == "all" else [rank]
            for other in again:
                owned.generations[other] += 1
                if other != rank:
                    self._runtime.router.tell(
                        core.peer(other), Stop(core.actor, "restart", "the whole mesh is restarted")
                    )
            homes = [(other, owned.generations[other], core.peer(other)) for other in again]
            self._runtime.progress.later(delay, lambda: self._construct_again(core, homes))
            return
        if owned.limiter is not None and not gone:
            cause = f"{cause}; {owned.limiter.used_up()}"
        deaths = [replace(death, rank=rank, where=core.where(rank), what=cause) for death in failure.deaths[:1]]
        mesh_failure = MeshFailure(core.name, deaths, ActorMesh(core))
        mesh_failure.__cause__ = failure.__cause__
        core.dead[rank] = mesh_failure
        texts.life(kinds.Kind.MESH, core.name, "failed", f"{core.where(rank)}: {cause}", is_failure=True)
        if owned.limiter is not None and core.peer(rank).gone is None:
            self._runtime.router.tell(core.peer(rank), Stop(core.actor, "stop", "it has died too often"))
        owned.built._fail(mesh_failure)
        if not self._runtime.owner.readiness.failed_to_start(core.peer(rank)) or self._runtime.supervision.is_asked(
            owned.owner_runner
        ):
            self._runtime.supervision.failed(owned.owner_runner, mesh_failure)

    def _construct_again(self, core: ActorMeshState, homes: Sequence[tuple[int, int, Peer]]) -> None:
        if core.stopped is not None:
            for rank, generation, _ in homes:
                if core.owned.generations[rank] == generation:
                    core.owned.is_gone(rank)  # its predecessor has ended and gets no successor
        if core.stopped is not None or core.procs.stopped is not None:
            return
        for rank, generation, peer in homes:
            # Otherwise its process has ended, which is reported separately, or another restart has replaced it.
            if core.peer(rank) is peer and peer.gone is None and core.owned.generations[rank] == generation:
                self.construct(core, rank)


def living_owner(what: str) -> Any:
    """Return the runner of the actor that spawns; None in the main program. Raises SupervisionError if it has ended."""
    runner = context.runner.get()
    if runner is not None and runner.failure is not None:
        text = f"{runner.name} has ended and can't spawn {what}: {runner.failure}"
        raise SupervisionError(text, "spawn", runner.failure)
    return runner


def _check_constructor(cls: type, args: Any, kwargs: Any) -> None:
    if cls.__init__ is object.__init__ and (args or kwargs):  # type: ignore[misc]
        raise TypeError(f"{cls.__name__} has no __init__, so it takes no arguments")
    try:
        inspect.signature(cls.__init__).bind(None, *args, **kwargs)  # type: ignore[misc]
    except TypeError as error:
        raise TypeError(
            f"{cls.__name__} is constructed by __init__{inspect.signature(cls.__init__)}: {error}"  # type: ignore[misc]
        ) from None


def _joined(body: Any) -> bytes:
    return body if isinstance(body, bytes) else b"".join(body)


def _copied(buffers: Any) -> list[bytes] | None:
    return [bytes(buffer) for buffer in buffers] if buffers else None
