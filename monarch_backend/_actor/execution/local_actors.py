"""Actors in this process: their construction, their messages and their end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from monarch_backend._actor.calls.codec import HOST, pack_failure
from monarch_backend._actor.errors import Death, MeshFailure
from monarch_backend._actor.execution.async_runner import AsyncActorRunner
from monarch_backend._actor.execution.message_queue import Message
from monarch_backend._actor.execution.runner import ActorRunner
from monarch_backend._actor.meshes import named_actors
from monarch_backend._serialization.pickling import dumps
from monarch_backend._transport.local.frames import Cancel, Construct, Frame, Kind, MoreCredit, Status, Stop
from monarch_backend._transport.local.peer import Peer
from monarch_backend._transport.local.tree_multicast import ReplyAggregator

if TYPE_CHECKING:
    from monarch_backend._actor.runtime import Runtime

PENDING_ACTOR_TIMEOUT_S = 30.0
"""Seconds that messages wait for an actor that is not constructed yet."""


class LocalActors:
    """The actors of this process, by number, and messages for actors that are not constructed yet."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.runners: dict[int, ActorRunner] = {}  # also of ended actors
        self.runner_classes: tuple[type[ActorRunner], type[AsyncActorRunner]] = ActorRunner, AsyncActorRunner
        self._pending: dict[int, list[Message]] = {}

    def receive(self, peer: Peer, frame: Frame, via: ReplyAggregator | None) -> None:
        """Queue a message for its actor, or keep it for an actor that is not constructed yet."""
        runner = self.runners.get(frame.target)
        if runner is None and frame.target == named_actors.SERVICE_ACTOR_NUMBER and self._runtime.root is None:
            runner = self._start_registrar()
        if runner is not None:
            runner.put((peer, frame, via))
            return
        # A reference can overtake the owner's Construct message: this message waits for it, for a limited time.
        waiting = self._pending.get(frame.target)
        if waiting is None:
            waiting = self._pending[frame.target] = []
            self._runtime.progress.later(PENDING_ACTOR_TIMEOUT_S, lambda: self._refuse_pending(frame.target))
        waiting.append((peer, frame, via))

    def _refuse_pending(self, actor: int) -> None:
        where = (
            str(self._runtime.home_extent.point(self._runtime.home_rank))
            if self._runtime.home_extent is not None
            else "the main program"
        )
        for peer, frame, via in self._pending.pop(actor, ()):
            self._runtime.router.processed(peer, frame)
            what = f"its actor was not constructed here within {PENDING_ACTOR_TIMEOUT_S:.0f} s"
            failure = pack_failure(MeshFailure("?", [Death(frame.rank, where, HOST, self._runtime.pid, what)]))
            if frame.ref and via is not None:
                via.own(frame.rank, Status.DEAD, failure, None)
            elif frame.ref:
                self._runtime.router.send_or_keep(
                    peer.link, Kind.REPLY, 0, frame.ref, Status.DEAD, failure, None, rank=frame.rank
                )

    def _start_registrar(self) -> ActorRunner:
        body, buffers = dumps((named_actors.NamedActorService, (), {}, None))
        runner = self.runners[named_actors.SERVICE_ACTOR_NUMBER] = ActorRunner(
            self._runtime, named_actors.plan(), self._runtime.router.me, body, buffers
        )
        self._runtime.start_runner(runner)
        return runner

    def cancel(self, peer: Peer, message: Cancel, _: Frame) -> None:
        runner = self.runners.get(message.actor)
        if runner is not None:
            runner.cancel(peer, message)

    def add_credit(self, peer: Peer, message: MoreCredit, _: Frame) -> None:
        runner = self.runners.get(message.actor)
        credit = None if runner is None else runner.streams.get((peer.token, message.ref))
        if credit is not None:
            credit.more(message.count)

    def construct(self, peer: Peer, plan: Construct, frame: Frame) -> None:
        former = self.runners.get(plan.actor)
        runner = self.runner_classes[plan.is_async](self._runtime, plan, peer, frame.body, frame.buffers)
        self.runners[plan.actor] = runner
        for message in self._pending.pop(plan.actor, ()):
            runner.put(message)
        if former is not None:
            runner.take_over(former)
        else:
            self._runtime.start_runner(runner)
        if self._runtime.host_ending is not None:
            runner.announce(self._runtime.host_ending)

    def stop(self, _peer: Peer, message: Stop, _: Frame) -> None:
        """End an actor; number 0 stands for this process."""
        if message.actor == 0:
            self._runtime.on_exit(message.how, message.reason)
            return
        runner = self.runners.get(message.actor)
        if runner is not None:
            runner.end_in_time(message.how, message.reason)
