"""Runtime of one process: its meshes, pending calls and actors.

Each process, of the controller or of a mesh, has one `Runtime`, made at its first use. It connects frames
(_transport/), processes (_mesh/) and actors (this package). processes/exits.py has the owner of processes,
supervision.py the policy.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend import _native
from monarch_backend._actor import current_runtime, host_ending, notebook, process_groups, program_exit
from monarch_backend._actor.actor_mesh_owner import ActorMeshOwner, living_owner
from monarch_backend._actor.awaits import Awaits
from monarch_backend._actor.calls.future import Future
from monarch_backend._actor.calls.pending_calls import STREAM_WINDOW, cancel_calls
from monarch_backend._actor.calls.port import PortReceiver
from monarch_backend._actor.calls.waiting import Waiting, log_wait
from monarch_backend._actor.current_runtime import is_of_parent, program
from monarch_backend._actor.deadlocks import DeadlockDetector
from monarch_backend._actor.errors import MeshFailure
from monarch_backend._actor.execution.local_actors import LocalActors
from monarch_backend._actor.execution.runner import ActorRunner
from monarch_backend._actor.meshes import named_actors
from monarch_backend._actor.meshes.actor_mesh import ActorMesh
from monarch_backend._actor.meshes.known_hosts import KnownHosts
from monarch_backend._actor.meshes.mesh_references import MeshReferences, alive
from monarch_backend._actor.meshes.mesh_state import ActorMeshState
from monarch_backend._actor.processes.exits import ProcessOwner
from monarch_backend._actor.restart_policy import Restart
from monarch_backend._actor.runtime_extension import Extensions
from monarch_backend._actor.shutdown import Shutdown
from monarch_backend._actor.sigint import Interrupts
from monarch_backend._actor.supervision import Supervision
from monarch_backend._core import env, fork
from monarch_backend._core.extension_points import extension, has_extension
from monarch_backend._core.limits import start_thread
from monarch_backend._logs.worker_logging import install_worker_logging
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.proc_mesh import ProcMesh, ProcMeshState
from monarch_backend._telemetry import recorder
from monarch_backend._transport.local.event_loop import ProgressLoop
from monarch_backend._transport.local.frames import (
    REPORT_BUSY,
    Cancel,
    Construct,
    Constructed,
    Deadlock,
    Failed,
    Frame,
    Kind,
    MoreCredit,
    Replaced,
    Setting,
    Stop,
    Stopped,
)
from monarch_backend._transport.local.links import Clock, Links, LocalLinks, RealClock
from monarch_backend._transport.local.peer import Peer
from monarch_backend._transport.local.router import Router
from monarch_backend._transport.local.tree_multicast import ReplyAggregator
from monarch_backend._transport.tokens import identity_of

log = logging.getLogger("monarch_backend")


class Runtime:
    def __init__(self, links: Links, progress: Any, clock: Clock, _epoch: int = 0) -> None:
        self.links, self.progress, self.clock = links, progress, clock
        self.pid = os.getpid()
        self.ids = itertools.count(1)
        self.pending: dict[int, Any] = {}  # calls without replies yet, by number
        # A receiver without references cannot be read any more, unless a callback waits for its next value.
        self.expecting: set[PortReceiver[Any]] = set()
        self.ports: weakref.WeakValueDictionary[int, PortReceiver[Any]] = weakref.WeakValueDictionary()
        self.local_actors, self.actor_owner = LocalActors(self), ActorMeshOwner(self)
        self.runners = self.local_actors.runners
        self.references = references = MeshReferences(self)
        self.procs, self.actors, self.naming = references.procs, references.actors, references.naming
        self.proc_core, self.actor_core = references.proc_core, references.actor_core
        self.failure_of, self.death_of = references.failure_of, references.death_of
        self.this_proc: ProcMeshState | None = None
        self.main_children: list[Any] = []  # meshes that the main program has spawned
        self.closing = False
        self.leaving = False  # this process is to end
        self.host_ending: host_ending.HostEnding | None = None  # the notice of this host's end
        self.last: list[Callable[[], None]] = []  # called when all actors of this process have ended
        self.disowned = False  # this process is a fork of the runtime's process
        self.home_extent: Extent | None = None  # extent of this process's mesh; None in the main program
        self.home_rank = 0
        self.group_tokens: list[str] = []  # processes of this process's default group, if a mesh has made it
        self.root: Peer | None = None  # the main program; None if this is it
        self.registry = named_actors.Registry(self)
        self.interrupts = Interrupts(self)
        self.server_address = ""  # address of the fork server, in a process of a mesh
        self.gateway = ""  # token of this host's gateway, once there are other hosts
        self.extensions = Extensions()
        self.hosts = KnownHosts(self)
        self.host_names = self.hosts.names_of
        self.deadlocks = DeadlockDetector(self)
        self.waiting = Waiting(self)
        self.awaits = Awaits(self)
        self.wait: Callable[..., bool] = self.waiting.wait
        self.shutdown = Shutdown(self)
        self.start_runner: Callable[[ActorRunner], None] = self.start_runner_thread
        self.on_exit: Callable[[str, str], None] = self._leave
        self.supervision = Supervision(self)
        self.router = Router(links, self.waiting.wait_for_room)
        self.router.wake = progress.wake  # type: ignore[method-assign]
        self.router.later = progress.later  # type: ignore[method-assign]
        self.router.on_gone = self._gone
        self.router.before_host_gone = self.references.find_peers_on
        self.router.on_met = self._met
        self.router.on_wait = self.waiting.on_wait
        self.router.has_notices = self.waiting.is_real
        self.router.on_full = log_wait
        self.router.handlers.update(
            {Kind.CALL: self.local_actors.receive, Kind.REPLY: self._replied, Kind.PORT: self._ported}
        )
        self.router.control.update(
            {
                Construct: self.local_actors.construct,
                Constructed: self.actor_owner.on_constructed,
                Cancel: self.local_actors.cancel,
                MoreCredit: self.local_actors.add_credit,
                Stop: self.local_actors.stop,
                Stopped: self.actor_owner.on_stopped,
                Failed: self.actor_owner.on_failed,
                Replaced: references.on_replaced,
                Setting: self._set,
                Deadlock: self.deadlocks.receive,
            }
        )
        self.owner = ProcessOwner(self)
        self.ready, self.flush_logs = self.owner.readiness.ready, self.owner.starter.flush_logs
        self.stop_procs, self.stop_actors = self.owner.stops.stop, self.actor_owner.stop
        self.router.on_asked = self.owner.restarts.tell_successor

    # ---- threads

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call a function later on the reading thread."""
        self.progress.later(0.0, call)

    def run_in_thread(self, call: Callable[[], object]) -> None:
        """Call a function that may wait, on a new thread."""
        start_thread(threading.Thread(target=call, name="monarch-thread", daemon=True))

    def without_waiting(self, call: Callable[[], None]) -> None:
        """Call a function that may wait: now, or on a new thread if this is the reading thread."""
        if self.progress.reading:
            self.run_in_thread(call)
        else:
            call()

    def start_runner_thread(self, runner: ActorRunner) -> None:
        start_thread(threading.Thread(target=runner.run, name=f"actor {runner.name}", daemon=True))

    # ---- spawning

    def children_of(self, owner_runner: Any) -> list[Any]:
        """Return the list of meshes that an actor has spawned; for None, the main program."""
        return self.main_children if owner_runner is None else owner_runner.children

    def spawn_procs(self, hosts: Any, extent: Extent, **options: Any) -> ProcMesh:
        program_exit.prepare()
        return self.owner.starter.spawn(extent, living_owner("processes"), hosts=hosts.hosts, **options)

    def spawn_actors(
        self, procs: ProcMesh, name: str, cls: type, args: Any, kwargs: Any, restart: Restart | None
    ) -> ActorMesh:
        """Construct an actor in each process. A simulator refuses some classes."""
        return self.actor_owner.spawn(procs, name, cls, args, kwargs, restart)

    def profile_procs(self, procs: ProcMesh, seconds: Any, steps: Any, ranks: Any) -> Future[Any]:
        """Profile processes on this host. Return a Future of the result."""
        from monarch_backend._actor.processes.profile import profile

        return profile(self, procs, seconds, steps, ranks)

    def process_group(self, procs: ProcMesh, backend: str, timeout: float) -> Future[None]:
        """Make the processes the ranks of a torch process group. Return a Future."""
        return process_groups.meet(self, procs, backend, timeout)

    def set_log_level(self, core: ProcMeshState, level: int | str) -> None:
        """Set the level of ``logging`` in the processes. The log collector filters what is shown."""
        for peer in core.peers:
            self.router.tell(peer, Setting("log_level", level))

    def cancel_calls(self, procs: ProcMeshState, ranks: Sequence[int], reason: str) -> int:
        """Cancel this process's calls that wait for these processes. Return their number."""
        return cancel_calls(self, reason, procs=procs, ranks=ranks)

    # ---- stopping

    def end_child(self, child: Any, failure: MeshFailure | None, how: str) -> None:
        """End a mesh whose owner has ended. Waits at most 10 s for it, unless on the reading thread."""
        reason = ("its owner has ended" if failure is None else f"its owner has ended: {failure}")[:4096]
        stop = self.stop_procs if isinstance(child, ProcMeshState) else self.stop_actors
        future = stop(child, how, reason)
        if not self.progress.reading:
            self.wait(future, 10.0)

    # ---- messages

    def _replied(self, peer: Peer, frame: Frame, _: ReplyAggregator | None) -> None:
        call = self.pending.get(frame.ref)
        if call is not None:
            call.on_reply(frame)

    def _ported(self, peer: Peer, frame: Frame, _: ReplyAggregator | None) -> None:
        receiver = self.ports.get(frame.target)
        if receiver is not None:
            receiver._take(peer, frame)
        else:
            self.router.processed(peer, frame)

    def withdraw(self, core: ActorMeshState, ref: int, peers: Sequence[Peer], reason: str) -> None:
        for peer in peers:
            if peer.gone is None:
                self.router.tell(peer, Cancel(core.actor, ref, reason))
        self.progress.wake()  # a thread that waits for the call may be the reader

    # ---- actors of this process

    def _set(self, peer: Peer, message: Setting, _: Frame) -> None:
        if message.name == "oversubscribed":
            self.links.mailbox.set_oversubscribed(bool(message.value))  # type: ignore[attr-defined]
        elif message.name == "gateway":
            self.run_in_thread(lambda: extension("gateway")(self, str(message.value)))
        elif message.name == REPORT_BUSY:
            for runner in list(self.runners.values()):
                runner.code.report_busy()
        elif message.name == host_ending.SETTING:
            host_ending.announce(self, *message.value)
        elif message.name == "log_level":
            install_worker_logging(message.value)
        elif message.name == "abort_groups":
            self.run_in_thread(lambda: process_groups.abort_groups(str(message.value)))
        elif has_extension(name := f"setting {message.name.partition('.')[0]}"):
            self.run_in_thread(lambda: extension(name)(self, peer, message.name, message.value))

    def exit_now(self, reason: str) -> None:
        """Kill this process at once, after a line on stderr."""
        sys.stderr.write(f"monarch_backend: {reason}\n")
        sys.stderr.flush()
        os.kill(os.getpid(), 9)

    def _leave(self, how: str, reason: str) -> None:
        """Do nothing: worker_main.py sets the function of a process of a mesh."""

    # ---- start and end of processes

    def _met(self, peer: Peer) -> None:
        self.owner.readiness.met(peer)
        if peer.owner is None:  # it has connected to this process: a known mesh may name its owner
            for core in alive(self.procs):
                rank = core.rank_of(peer.token)
                if rank is not None:
                    core.peer(rank)

    def _gone(self, peer: Peer) -> None:
        for part in self.extensions:
            part.on_disconnected(peer)
        owned = self.owner.records.by_token.get(peer.token)
        if owned is not None:
            self.owner.exits.ended(peer)  # calls on_process_lost when the exit status is known
        else:
            self.on_process_lost(peer, None)
            if not peer.orderly and peer.owner is not None and peer.owner.link < 0:
                self.router.ask_owner(peer)

    def on_process_lost(self, peer: Peer, failure: MeshFailure | None) -> None:
        """Fail calls, transfers and actors that need a process which has ended."""
        if failure is None:
            failure = self.references.exit_of(peer)
        for call in list(self.pending.values()):
            call.on_gone(peer, failure)
        self.deadlocks.on_process_lost(peer)
        for part in self.extensions:
            part.on_process_lost(peer)
        for runner in list(self.runners.values()):
            for (token, _), credit in list(runner.streams.items()):
                if token == peer.token:
                    credit.more(STREAM_WINDOW)  # its generators run to their end
            if runner.owner is peer and runner.failure is None:
                runner.end("abort", f"its owner, {peer}, is gone")
        for core in alive(self.actors):
            if core.owned is not None and core.procs.owned is None:
                for rank in [rank for rank, home in core.owned.homes.items() if home is peer]:
                    self.actor_owner.lost_rank(core, rank, failure)

    # ---- the end

    def detach_after_fork(self) -> None:
        """Make this runtime unusable in a fork of its process."""
        self.disowned, pid = True, self.pid

        def refuse(*_: Any, **__: Any) -> Any:
            raise RuntimeError(
                f"this mesh belongs to process {pid}, and process {os.getpid()} is a fork of it: spawn a mesh here"
            )

        router: Any = self.router
        router.send = router.multicast = router.tell = router.reply = refuse
        self.wait = self.call_soon = self.stop_procs = self.progress.wait = refuse  # type: ignore[method-assign]


def start(token: str = "", oversubscribed: bool = False) -> Runtime:
    """Start the runtime of this process, over shared memory."""
    _native.park_threads_at_exit()  # threads of actors wait in C++ code when the interpreter ends
    links = LocalLinks(token, oversubscribed=oversubscribed)
    holder: list[Runtime] = []
    progress = ProgressLoop(links.mailbox, lambda events: holder[0].router.handle(links.translate(events)))
    recorder.set_identity(identity_of(links.token))
    if not token:  # the starter of another process records it
        recorder.area()
    made = Runtime(links, progress, RealClock())
    if env.get("MONARCH_REPLAY"):
        extension("replay recording")(made)
    holder.append(made)
    progress.start()
    current_runtime.set_program(made)
    return made


def start_main() -> None:
    """Start the runtime of the main program, at its first use."""
    env.check()
    runtime = start()
    runtime.shutdown.register()
    if env.get("MONARCH_CANCEL_ON_INTERRUPT"):
        notebook.cancel_interrupted_cells(runtime)


def _in_forked_child() -> None:
    """Drop the runtime in a fork: its meshes are the parent's."""
    dropped = current_runtime.drop_program()
    if dropped is not None:
        atexit.unregister(dropped.shutdown.run)
        dropped.links.host.abandon()  # type: ignore[attr-defined]
        for part in dropped.extensions:
            part.abandon()
        dropped.detach_after_fork()
        _native.keep_for_ever(dropped)


fork.register(fork.Step.RUNTIME, after_in_child=_in_forked_child)

__all__ = ["Runtime", "is_of_parent", "program", "start"]
