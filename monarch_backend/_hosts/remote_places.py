"""Where processes of other hosts are in their code: asked of the agents there, for the texts about long waits.

Each process of a program may ask. Its request goes to the gateway of its host, from there to the other host's agent,
which reads what the processes have recorded and asks them for their stacks. So a process that hangs need not answer.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from monarch_backend._actor.runtime_extension import RuntimeExtension
from monarch_backend._core.errors import first_line
from monarch_backend._core.limits import start_thread
from monarch_backend._core.parallel import in_parallel
from monarch_backend._hosts import protocol
from monarch_backend._hosts.protocol import AskPlaces, PlaceOfCall, Places
from monarch_backend._transport.local.frames import Agent as AgentFrame
from monarch_backend._transport.local.frames import Frame
from monarch_backend._transport.local.peer import Peer
from monarch_backend._transport.tokens import host_of

log = logging.getLogger("monarch_backend")

MAX_AT_ONCE = 8
"""Requests that an agent answers at the same time. It refuses further ones."""

_answering = threading.BoundedSemaphore(MAX_AT_ONCE)


@dataclass
class _Waiting:
    texts: tuple[str, ...] | None = None
    arrived: threading.Event = field(default_factory=threading.Event)


class RemotePlaces(RuntimeExtension):
    """Requests of this process to the agents of other hosts. Its thread that reads messages must not wait for them."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._ids = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        runtime.router.control.setdefault(AgentFrame, self._heard)  # a controller's HostRegistry has its own

    def ask(self, calls: Mapping[str, Sequence[PlaceOfCall]], timeout: float) -> dict[str, tuple[str, ...]]:
        """Return what the receivers of calls do about them, as texts in the order of the calls of each host.

        It takes at most ``timeout`` seconds. A host that has not answered by then is missing.
        """
        router, end = self._runtime.router, time.monotonic() + timeout
        asked = {host: (next(self._ids), _Waiting()) for host in calls}
        self._waiting.update(asked.values())
        try:
            for host, (number, _) in asked.items():
                request = AskPlaces(number, router.me.token, host, timeout, tuple(calls[host]))
                router.tell(router.peer(self._runtime.gateway), AgentFrame(), protocol.encode(request))
            for _, waiting in asked.values():
                waiting.arrived.wait(max(0.0, end - time.monotonic()))
        finally:
            for number, _ in asked.values():
                self._waiting.pop(number, None)
        return {host: waiting.texts for host, (_, waiting) in asked.items() if waiting.texts is not None}

    def heard(self, answer: Places) -> None:
        """Take the answer of an agent. Called on the thread that reads messages."""
        waiting = self._waiting.get(answer.id)
        if waiting is not None:
            waiting.texts = answer.texts
            waiting.arrived.set()

    def _heard(self, _peer: Peer, _message: AgentFrame, frame: Frame) -> None:
        try:
            answer = protocol.decode(frame.body)
        except msgspec.DecodeError:  # of an agent of another release
            return
        if isinstance(answer, Places):
            self.heard(answer)


def of_runtime(runtime: Any) -> RemotePlaces:
    """Return the requests of a process's runtime."""
    made: RemotePlaces = runtime.extensions.extend(RemotePlaces, lambda: RemotePlaces(runtime))
    return made


def ask(runtime: Any, calls: Mapping[str, Sequence[tuple[int, Any]]], timeout: float) -> dict[str, tuple[str, ...]]:
    """Return what `RemotePlaces.ask` does. A call is the identity of its receiver and a `whereabouts.Call`."""
    wanted = {
        host: [PlaceOfCall(identity, each.actor, each.rank, each.caller, each.number) for identity, each in those]
        for host, those in calls.items()
    }
    return of_runtime(runtime).ask(wanted, timeout)


class Answers:
    """An agent's side: it answers requests about its own host, and sends others on to the agents of their hosts."""

    def __init__(self, router: Any, agent_of: Mapping[str, tuple[str, int, str, str]], asker: str) -> None:
        """``agent_of``: `Hosts.known`. ``asker``: the gateway nearer to the controller, "" on the controller's host."""
        self._router, self._agent_of, self._asker = router, agent_of, asker

    def take(self, request: AskPlaces) -> None:
        """Answer a request on a thread, or send it on. Called on the thread that reads messages."""
        if host_of(self._router.token) == request.host:
            self._start(request)
            return
        known = self._agent_of.get(request.host)
        if nearer := self._asker if known is None else known[2]:  # agents do not know the controller's host
            self._router.tell(self._router.peer(nearer), AgentFrame(), protocol.encode(request))

    def _start(self, request: AskPlaces) -> None:
        if not _answering.acquire(blocking=False):
            self._refuse(request, "its host answers many such requests at the moment")
            return
        try:
            start_thread(threading.Thread(target=self._answer, args=(request,), name="monarch-places", daemon=True))
        except Exception as error:  # no thread can be started
            _answering.release()
            self._refuse(request, f"its host can't tell where it is: {first_line(error)}")

    def _refuse(self, request: AskPlaces, why: str) -> None:
        self._send(request, (why,) * len(request.calls))

    def _answer(self, request: AskPlaces) -> None:
        try:
            texts = tuple(_texts(request))
        except Exception as error:  # no /proc, or no access to it
            log.debug("places of processes were not found", exc_info=True)
            self._refuse(request, f"its host can't tell where it is: {type(error).__name__}")
        else:
            self._send(request, texts)
        finally:
            _answering.release()

    def _send(self, request: AskPlaces, texts: tuple[str, ...]) -> None:
        self._router.tell(self._router.peer(request.asker), AgentFrame(), protocol.encode(Places(request.id, texts)))


def _texts(request: AskPlaces) -> list[str]:
    from monarch_backend._telemetry import late_ranks, whereabouts

    end = time.monotonic() + request.timeout / 2  # the other half is for the way
    recorded = whereabouts.processes()

    def text(each: PlaceOfCall) -> str:
        process = recorded.get(each.identity)
        if process is None:
            return "its process records nothing, or has ended"
        call = whereabouts.Call(each.actor, each.rank, each.caller, each.number)
        place = whereabouts.describe(process, call, max(0.05, end - time.monotonic()))
        return f"{place}{late_ranks.collective_of(process, each.caller)}"

    return in_parallel(text, request.calls)
