"""Texts about a call that takes long: the ranks that have not replied, where they are, and what they do.

They are for the log, once per long wait, and for TimeoutError. Facts of other processes take up to a second, so they
are never gathered on the thread that reads messages.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from monarch_backend._actor.calls.future import UNLABELLED, Future
from monarch_backend._core import env
from monarch_backend._core.extension_points import extension
from monarch_backend._core.limits import start_thread, within
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.rank_text import ranks_in_words
from monarch_backend._transport.local.frames import Kind
from monarch_backend._transport.local.peer import CreditWaiter
from monarch_backend._transport.tokens import host_of

if TYPE_CHECKING:
    from monarch_backend._actor.execution.runner import ActorRunner
    from monarch_backend._actor.runtime import Runtime
    from monarch_backend._transport.local.peer import Peer

log = logging.getLogger("monarch_backend")

MAX_GATHER_S = 1.0
"""Seconds in which a text's facts must be found."""

MAX_NOTICE_GATHER_S = 3.0
"""The same for the line of a long wait, which delays nothing."""

MAX_SHOWN = 4
"""Ranks whose place is shown; of the others, only the number."""


@contextlib.contextmanager
def noticed(runtime: Runtime, what: Any, runner: ActorRunner | None, waited: float) -> Iterator[None]:
    """Log a line if the wait in this block takes longer than MONARCH_WAIT_NOTICE. It has taken ``waited`` seconds."""
    after = env.get("MONARCH_WAIT_NOTICE")
    what = FullQueue.of(runtime, what) or what
    if not after or name_of(what) == UNLABELLED:
        yield
        return

    def notice() -> None:
        log_long_wait(what, runner, after, lambda: bool(what.ready))

    def start() -> None:
        start_thread(threading.Thread(target=notice, name="monarch-notice", daemon=True))

    timer = runtime.progress.later(max(0.0, after - waited), start)
    try:
        yield
    finally:
        timer.cancel()


def log_long_wait(what: Any, runner: ActorRunner | None, seconds: float, is_over: Callable[[], bool]) -> None:
    """Log the line of a wait that has taken ``seconds``, unless it is over. Called on a thread of its own."""
    try:
        text = "" if is_over() else _described(what)
    except Exception:  # no /proc, or no access to it
        log.debug("what a long wait waits for was not found", exc_info=True)
        return
    if text and not is_over():
        waiter = "" if runner is None else f"{runner.name} ({runner.point}): "
        is_call = hasattr(what, "core") and not isinstance(what, FullQueue)
        waiting = _call_name(what) if is_call else "the program" if runner is None else "it"
        log.warning("%s%s has waited %.0f s for %s", waiter, waiting, seconds, text)


def name_of(what: Any) -> str:
    """Return what a wait waits for, for people: the name of the called actors, or "a message on port 3"."""
    core = getattr(what, "core", None)
    if core is not None and not isinstance(what, FullQueue):
        return str(core.name)
    if isinstance(what, CreditWaiter):
        return f"room in the queue of {what.receiver}" if what.receiver is not None else UNLABELLED
    return what._label() if isinstance(what, (Future, FullQueue)) else UNLABELLED


def _described(what: Any) -> str:
    """Return text for what is missing, with its place as far as it is found in time."""
    if getattr(what, "core", None) is None:
        return name_of(what)
    text = describe(what, MAX_NOTICE_GATHER_S)
    return f"room in the queue of {what.core.name}: {text}" if text and isinstance(what, FullQueue) else text


class FullQueue:
    """Queue of an actor that has no room for a message. A wait for room has the methods of a call that `describe` uses.

    ``ref`` is that of no call: the message that waits was not sent, and messages without a reply have 0.
    """

    endpoint, ref = "", (1 << 63) - 1

    def __init__(self, runtime: Runtime, waiter: CreditWaiter, core: Any, rank: int, receiver: Peer) -> None:
        self.program, self.core, self.peers = runtime, core, core.bases
        self._waiter, self._rank, self._receiver = waiter, rank, receiver

    @classmethod
    def of(cls, runtime: Runtime, what: Any) -> FullQueue | None:
        """Return the queue whose room is waited for. None for another wait, and where the actor is unknown.

        Ports have numbers of their own, which can equal an actor's. So only calls have a queue here.
        """
        if not isinstance(what, CreditWaiter) or what.receiver is None or what.kind != Kind.CALL:
            return None
        core = runtime.actors.get(what.target)
        if core is None:
            return None
        rank = next((rank for rank in range(len(core.bases)) if core.peer(rank) is what.receiver), None)
        return None if rank is None else cls(runtime, what, core, rank, what.receiver)

    @property
    def ready(self) -> bool:
        return self._waiter.ready

    def missing(self) -> list[tuple[int, Peer]]:
        return [(self._rank, self._receiver)]

    def _label(self) -> str:
        where = f" ({self.core.where(self._rank)})" if self.core.extent.labels else ""
        return f"room in the queue of {self.core.name}{where}"


def late_text(what: Any, seconds: float) -> str:
    """Return the end of a TimeoutError's text: ": " and the missing ranks, or nothing if they are unknown.

    It blocks for at most a second, and for no more than the timeout of ``seconds`` itself.
    """
    try:
        if seconds < MAX_GATHER_S or not what.program.waiting.is_real:
            text = describe(what, 0.0)
        else:
            text = within(MAX_GATHER_S, lambda: describe(what, MAX_GATHER_S / 2), thread_name="monarch-notice")
    except TimeoutError:
        text = describe(what, 0.0)
    except Exception:  # the text of an error must not hide the error
        log.debug("the place of a late call was not found", exc_info=True)
        return ""
    return f": {_call_name(what)} waits for {text}" if text else ""


def expire_late(runtime: Runtime, call: Any, seconds: float, text: str) -> None:
    """Fail a call with a TimeoutError that has this text and the missing ranks. Called on the reading thread."""
    if seconds < MAX_GATHER_S or not runtime.waiting.is_real:
        call.expire(TimeoutError(text + late_text(call, seconds)))
        return
    try:
        runtime.run_in_thread(lambda: call.expire(TimeoutError(text + late_text(call, seconds))))
    except Exception:  # no thread can be started
        call.expire(TimeoutError(text))


def describe(what: Any, timeout: float) -> str:
    """Return text for the ranks that have not replied: "rank 3 of 8 (gpus 3, pid 123): it is at ...".

    With a ``timeout`` of 0 only what this process knows.
    """
    missing = list(what.missing()) if hasattr(what, "missing") else []
    if not missing:
        return ""
    facts = _Facts(what, missing[:MAX_SHOWN], timeout)
    total = len(getattr(what, "peers", (None,)))
    core = what.core
    if len(missing) == 1:
        [(rank, peer)] = missing
        host, pid, place = facts.of_rank(rank, peer)
        return (
            f"rank {rank} of {total if total > 1 else len(core.extent)} {_at(core.extent, host, place, [(rank, pid)])}"
        )
    ranks_at: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for rank, peer in missing[:MAX_SHOWN]:
        host, pid, place = facts.of_rank(rank, peer)
        ranks_at[host, place].append((rank, pid))
    places = [_at(core.extent, host, place, those) for (host, place), those in ranks_at.items()]
    more = f"; and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
    words = ranks_in_words(core.extent, [rank for rank, _ in missing])
    return f"{len(missing)} of {total} ranks ({words}): {'; '.join(places)}{more}"


class _Facts:
    """What is found of some ranks of a call within ``timeout`` seconds. Other hosts are asked at the same time."""

    def __init__(self, what: Any, ranks: Sequence[tuple[int, Peer]], timeout: float) -> None:
        self._what, self._runtime = what, what.program
        self._timeout, self._end = timeout, time.monotonic() + timeout
        self._recorded: dict[int, Any] = {}
        self._elsewhere: dict[int, str] = {}  # texts of ranks on other hosts
        if timeout > 0.0:
            from monarch_backend._telemetry import whereabouts

            if any(self._is_here(peer) for _, peer in ranks):
                self._recorded = whereabouts.processes()
            self._elsewhere = self._ask_hosts([each for each in ranks if not self._is_here(each[1])])

    def _is_here(self, peer: Peer) -> bool:
        return host_of(peer.token) == host_of(self._runtime.router.me.token)

    def _call(self, rank: int) -> Any:
        from monarch_backend._telemetry import whereabouts

        return whereabouts.Call(self._what.core.name, rank, self._runtime.router.me.identity, self._what.ref)

    def _ask_hosts(self, ranks: Sequence[tuple[int, Peer]]) -> dict[int, str]:
        by_host: dict[str, list[tuple[int, Peer]]] = defaultdict(list)
        for rank, peer in ranks:
            by_host[host_of(peer.token)].append((rank, peer))
        if not by_host:
            return {}
        calls = {host: [(peer.identity, self._call(rank)) for rank, peer in those] for host, those in by_host.items()}
        answers = extension("places on other hosts")(self._runtime, calls, self._timeout)
        silent = f"its host has not told within {self._timeout:g} s where it is"
        return {
            rank: text
            for host, those in by_host.items()
            for (rank, _), text in zip(those, answers.get(host) or [silent] * len(those), strict=True)
        }

    def of_rank(self, rank: int, peer: Peer) -> tuple[str, int, str]:
        """Return the host if it is another one, the pid or 0, and "it is at ...". What is not known is empty."""
        me = self._runtime.router.me
        if not self._is_here(peer):
            return self._runtime.hosts.name_of(peer.token), peer.pid, self._elsewhere.get(rank, "")
        process = self._recorded.get(peer.identity)
        if process is None:
            if peer is me:
                return "", self._runtime.pid, ""
            has_started = not peer.expected or peer.link >= 0
            return "", peer.pid, "" if has_started else self._of_starting(peer)
        from monarch_backend._telemetry import late_ranks, whereabouts

        place = whereabouts.describe(process, self._call(rank), max(0.05, self._end - time.monotonic()))
        return "", process.pid, place + late_ranks.collective_of(process, me.identity)

    def _of_starting(self, peer: Peer) -> str:
        from monarch_backend._telemetry import whereabouts

        if not self._timeout or not peer.pid:
            return "its process has not started"
        return whereabouts.of_starting(peer.pid, max(0.05, self._end - time.monotonic()))


def _at(extent: Extent, host: str, place: str, ranks: Sequence[tuple[int, int]]) -> str:
    """Return "(gpus 2-3, pids 123, 124): it is at ..." for ranks at one place, with their pids."""
    where = [ranks_in_words(extent, [rank for rank, _ in ranks])] if extent.labels else []
    where += [f"host {host}"] if host else []
    pids = [str(pid) for _, pid in ranks if pid]
    where += [f"pid{'s' * (len(pids) > 1)} {', '.join(pids)}"] if pids else []
    return f"({', '.join(where)})" + (f": {place}" if place else "")


def _call_name(what: Any) -> str:
    return f"{what.core.name}.{what.endpoint} of {what.core.procs.name}"
