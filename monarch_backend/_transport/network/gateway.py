"""Gateway of a host: relays frames between the processes of its host and the gateways of other hosts.

It tracks the processes that have a link to it, and the pairs of processes on different hosts that are connected. It
reports the end of a process or of a host to the other side of each pair. It does not decode messages. A frame for many
hosts is sent down a tree (multicast.py). Sockets are in connection_manager.py, layouts in envelope.py.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend._transport.local.frames import CARRIED, TOKEN_LENGTH, FrameError, Kind, own, own_all
from monarch_backend._transport.local.links import LINK_PENDING
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.envelope import (
    ARRIVED,
    CALL,
    COMBINED,
    GONE,
    MANY,
    MET,
    PASS,
    REFUSED,
    Envelope,
    is_for_many,
    is_word,
)
from monarch_backend._transport.network.multicast import DEFAULT_FANOUT, Relay
from monarch_backend._transport.tokens import host_of

log = logging.getLogger("monarch_backend")

MAX_ENDED_PROCESSES = 4096
"""Ended processes that are remembered, to report their end to peers that connect late."""

RETRY_S = 0.001
"""Interval at which a send without space is retried: receivers release memory without a notification."""


class Gateway:
    """Gateway of one host; all methods may be called from any thread.

    - ``to_host(host, frame)`` sends to the gateway of a host, or to the next one on the way there, ``way(host)``. It
      returns False if that gateway is not connected.
    - ``to_me(frame)`` takes frames for the gateway's own process.
    - ``later(seconds, call)`` schedules a call on the reading thread.
    - ``branches``: fan-out of a multicast tree. A multicast to as many hosts or fewer is sent directly to each.
    """

    def __init__(
        self,
        links: Any,
        token: str,
        pid: int,
        to_host: Callable[[str, Envelope], bool],
        to_me: Callable[[Envelope], None],
        later: Callable[[float, Callable[[], None]], object],
        *,
        branches: int = DEFAULT_FANOUT,
        way: Callable[[str], str] = lambda host: host,
    ) -> None:
        self.token = token
        self._links, self._pid = links, pid
        self.to_host, self._to_me, self._later_unlocked = to_host, to_me, later
        self._lock = threading.RLock()
        # Tokens: "local" processes are on this host, "remote" ones on other hosts.
        self._by_token: dict[str, int] = {}  # links of local processes
        self._by_link: dict[int, tuple[str, int]] = {}  # tokens and pids of local processes
        self._pairs: defaultdict[str, set[str]] = defaultdict(set)  # local -> connected remote processes
        self._calling: dict[str, set[str]] = {}  # remote -> local processes that wait for its answer
        self._given_up: defaultdict[str, set[str]] = defaultdict(set)  # local -> remote processes lost before an answer
        self._asked: defaultdict[str, list[str]] = defaultdict(list)  # silent local -> remote callers with their pids
        self._ended: dict[str, tuple[str, bool]] = {}  # how local processes have ended, and whether in an orderly way
        self._kept: dict[int, deque[Callable[[], bool]]] = {}  # by link: sends without space
        self._here, self.way = host_of(token), way
        self._relay = Relay(self, branches)

    # ---- from this host

    def handle(self, events: Sequence[Any]) -> list[Any]:
        """Handle events of the links. Return those that are not for the gateway."""
        rest = []
        for event in events:
            if event[1] < CARRIED:
                rest.append(event)
            try:
                if event[1] < 0:
                    self._told(event)
                elif event[1] >= CARRIED:
                    with self._lock:
                        self._leaves(Envelope(*event[1:]), self._by_link[event[0]][0])
            except FrameError as error:
                log.error("process %s: %s; its link is closed", self._by_link.get(event[0]), error)
                self._links.drop(event[0])
            except Exception:
                log.exception("a frame for another host could not be handled; the gateway continues without it")
        return rest

    def send(self, frame: Envelope) -> bool:
        with self._lock:
            self._leaves(_owned(frame), self.token)
        return True

    def _leaves(self, frame: Envelope, sender: str) -> None:
        if is_word(frame.kind):
            if frame.kind != CALL or frame.sender != sender:
                raise FrameError(f"a control frame of kind {frame.kind}, which it may not send")
            self._calls(frame)
        elif is_for_many(frame.kind):
            self._leaves_for_many(frame)
        elif not self._relay.reply(frame):
            self.to_host(host_of(frame.to), frame)

    def _calls(self, frame: Envelope) -> None:
        to, sender = frame.to, frame.sender
        if self.to_host(host_of(to), frame):
            self._calling.setdefault(to, set()).add(sender)
        else:
            self._to_process(envelope.word(REFUSED, sender, to))

    def _leaves_for_many(self, frame: Envelope) -> None:
        """Send a frame for many: one copy to each host, or down a tree of hosts."""
        receivers, rest = envelope.unpack_receivers(frame.prefix)
        by_host: defaultdict[str, list[tuple[str, int, int, int]]] = defaultdict(list)
        for receiver in receivers:
            by_host[host_of(receiver[0])].append(receiver)
        rows = {host: envelope.pack_rows(those) for host, those in by_host.items()}
        if len(rows) > self._relay.branches or any(self.way(host) != host for host in rows):
            self._relay.send(frame, rows, rest)
            return
        for host, those in rows.items():
            self.to_host(host, frame._replace(prefix=envelope.for_many(those, rest)))

    def _told(self, event: Any) -> None:
        """Handle the event that a local process is up, can't be reached, or has ended."""
        link, kind = event[0], event[1]
        with self._lock:
            if kind == Kind.MET:
                token, pid = event[2], event[3]
                self._by_link[link] = token, pid
                self._by_token.setdefault(token, link)  # the first of two links, if both sides have connected
                self._ended.pop(token, None)
                for caller, its_pid in self._waiting_for(token):
                    self._meet(token, caller, its_pid)
            elif kind == Kind.REFUSED:
                for caller, _ in self._waiting_for(event[2]):
                    self.to_host(host_of(caller), envelope.word(REFUSED, caller, event[2]))
            elif kind == Kind.GONE and link in self._by_link:
                token, _ = self._by_link.pop(link)
                self._kept.pop(link, None)
                if self._by_token.get(token) == link:
                    del self._by_token[token]
                    self._has_ended(token, event[2] or "it ended", bool(event[3]))

    def _has_ended(self, token: str, how: str, orderly: bool) -> None:
        self._ended[token] = how, orderly
        self._given_up.pop(token, None)
        if len(self._ended) > MAX_ENDED_PROCESSES:
            del self._ended[next(iter(self._ended))]
        self._relay.ends(token)
        for other in sorted(self._pairs.pop(token, ())):  # sorted, so that simulations are reproducible
            self._tell_end(token, other)

    def _tell_end(self, token: str, other: str) -> None:
        how, orderly = self._ended.get(token, ("it is gone", False))
        self.to_host(host_of(other), envelope.word(GONE, other, token, text=how)._replace(rank=int(orderly)))

    def _waiting_for(self, token: str) -> list[tuple[str, int]]:
        return [(entry[:TOKEN_LENGTH], int(entry[TOKEN_LENGTH:])) for entry in self._asked.pop(token, ())]

    def local_processes(self) -> list[str]:
        """Return the tokens of the processes of this host that are connected."""
        with self._lock:
            return list(self._by_token)

    def unread(self, pid: int) -> bool:
        with self._lock:
            links = [link for link, (_, its) in self._by_link.items() if its == pid]
            return any(link in self._kept or self._links.unread(link) > 0 for link in links)

    # ---- from another host

    def arrived(self, prefix: bytes, body: memoryview, on_call: Callable[[str], None] | None = None) -> None:
        """Handle a frame of another gateway. ``on_call`` gets a caller's host before the answer. Raises FrameError."""
        frame = envelope.unpack(prefix, body)
        with self._lock:
            if frame.kind == CALL and on_call is not None:
                on_call(host_of(frame.sender))
            if frame.kind in (PASS, ARRIVED, COMBINED):
                self._relay.handle(frame)
            elif (host := envelope.to_host(frame)) != self._here:
                self._goes_on(frame, host)
            elif is_word(frame.kind):
                self._heard(frame)
            elif is_for_many(frame.kind):
                self.deliver_to_many(frame)
            else:
                self._relay.saw(frame)
                self._to_process(frame)

    def _goes_on(self, frame: Envelope, host: str) -> None:
        """Forward a frame to another host, which its sender reaches through this one."""
        if frame.kind == GONE:
            self._relay.hurry()
        if not self.to_host(host, _owned(frame)) and frame.kind == CALL:
            self.to_host(host_of(frame.sender), envelope.word(REFUSED, frame.sender, frame.to))

    def _heard(self, frame: Envelope) -> None:
        to, sender = frame.to, frame.sender
        if frame.kind == CALL:
            self._is_called(to, sender, frame.ref)
            return
        callers = self._calling.get(sender)
        if callers is not None:
            callers.discard(to)
            if not callers:
                del self._calling[sender]
        if to != self.token and to not in self._by_token:
            if frame.kind == MET:  # the local process has ended meanwhile
                self._tell_end(to, sender)
            return
        if frame.kind == MET:
            self._pairs[to].add(sender)
        elif frame.kind == GONE:
            self._relay.hurry()
            if to in self._pairs:
                self._pairs[to].discard(sender)
        self._to_process(frame)

    def _is_called(self, token: str, caller: str, pid: int) -> None:
        if caller in self._given_up.get(token, ()):  # the local process would not answer it
            why = "it has given up this process, because the connection between the hosts was lost"
            self.to_host(host_of(caller), envelope.word(GONE, caller, token, text=why))
            return
        if token == self.token or token in self._by_token:
            self._meet(token, caller, pid)
            return
        link = self._links.connect(token)
        if link == LINK_PENDING or link >= 0:  # MET or REFUSED follows as an event
            self._asked[token].append(f"{caller}{pid}")
        else:
            self.to_host(host_of(caller), envelope.word(REFUSED, caller, token))

    def _meet(self, token: str, caller: str, pid: int) -> None:
        mine = self._pid if token == self.token else self._by_link[self._by_token[token]][1]
        self._pairs[token].add(caller)
        self._to_process(envelope.word(MET, token, caller, pid))
        self.to_host(host_of(caller), envelope.word(MET, caller, token, mine))

    def deliver_to_many(self, frame: Envelope) -> int:
        """Deliver a frame for many with one copy in shared memory. Return the number of receivers on this host."""
        rows, rest = envelope.unpack_receivers(frame.prefix)
        kind = frame.kind & ~MANY | CARRIED
        there, mine = [], 0
        for token, seq, rank, epoch in rows:
            one = frame._replace(kind=kind, seq=seq, rank=rank, epoch=epoch, prefix=rest)
            if token == self.token:
                self._to_me(_owned(one))
                mine += 1
            elif (link := self._by_token.get(token)) is not None:
                there.append((link, one))
        receivers = [(link, one.seq, one.rank, one.epoch) for link, one in there]
        free = receivers and not any(link in self._kept for link, *_ in receivers)
        multicast = self._links.multicast
        if not free or not multicast(receivers, kind, frame.target, frame.ref, rest, [frame.body], frame.buffers):
            for link, one in there:
                self._put(link, one)
        return len(there) + mine

    def answer(self, token: str, frame: Envelope) -> None:
        """Send a frame of the gateway itself to a process of this host."""
        if (link := self._by_token.get(token)) is not None:
            self._put(link, frame)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Schedule a call under the lock."""

        def locked() -> None:
            with self._lock:
                call()

        self._later_unlocked(seconds, locked)

    def _to_process(self, frame: Envelope) -> None:
        token = frame.to
        if token == self.token:
            self._to_me(_owned(frame))
        elif (link := self._by_token.get(token)) is not None:
            self._put(link, frame)

    def _put(self, link: int, frame: Envelope) -> None:
        """Send on a link, in order, now or when there is space."""
        kept = self._kept.get(link)
        if kept is None and self._links.send(link, *frame._replace(body=[frame.body])):
            return
        mine = _owned(frame)

        def send() -> bool:
            return bool(self._links.send(link, *mine))

        if kept is not None:
            kept.append(send)
        else:
            self._kept[link] = deque([send])
            self.later(RETRY_S, lambda: self._retry(link))

    def _retry(self, link: int) -> None:
        kept = self._kept.get(link)
        while kept:
            try:
                if not kept[0]():
                    self.later(RETRY_S, lambda: self._retry(link))
                    return
            except Exception:
                log.exception("a frame of another host could not be relayed; the gateway continues without it")
            kept.popleft()
        self._kept.pop(link, None)

    # ---- hosts

    def lost_host(self, host: str, why: str) -> None:
        """Report the loss of a host to the local processes that are connected or connecting to processes there."""
        with self._lock:
            self._relay.lost_host(host)
            for token, others in list(self._pairs.items()):
                for other in sorted(other for other in others if host_of(other) == host):
                    others.discard(other)
                    if not others:
                        del self._pairs[token]
                    self._to_process(envelope.word(GONE, token, other, text=why)._replace(rank=envelope.HOST_LOST))
            for other in [other for other in self._calling if host_of(other) == host]:
                for caller in sorted(self._calling.pop(other)):
                    self._given_up[caller].add(other)
                    self._to_process(envelope.word(GONE, caller, other, text=why)._replace(rank=envelope.HOST_LOST))
            for token, entries in list(self._asked.items()):
                left = [entry for entry in entries if host_of(entry) != host]
                if left:
                    self._asked[token] = left
                else:
                    del self._asked[token]


def _owned(frame: Envelope) -> Envelope:
    return frame._replace(body=own(frame.body), buffers=own_all(frame.buffers))
