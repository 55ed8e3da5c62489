"""Links to processes on other hosts, through this host's gateway.

`RemoteLinks` wraps a process's LocalLinks: frames for this host are sent there, frames for other hosts to the gateway
(gateway.py). Links to other hosts have numbers from FIRST_REMOTE_LINK on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from monarch_backend._transport.local.frames import CARRIED, TOKEN_LENGTH, FrameError, Kind, own, own_all
from monarch_backend._transport.local.links import FIRST_REMOTE_LINK, LINK_PENDING, Receiver
from monarch_backend._transport.network import envelope
from monarch_backend._transport.network.envelope import CALL, GONE, HOST_LOST, MANY, MET, REFUSED, Envelope
from monarch_backend._transport.tokens import host_of

log = logging.getLogger("monarch_backend")

Event = tuple[Any, ...]


class RemoteLinks:
    """Links to this host and to others.

    - ``gateway``, ``gateway_link``: the gateway's token, and the link to it.
    - ``to_gateway(frame)`` returns False if there is no space now, as `Links.send`.
    - ``keep(send)`` retries a send until it returns True.
    - ``early(gateway)`` returns the links to the gateway that the router knows, and the gateway's frames that came
      before this object was installed. It is called once, on the reading thread.
    """

    def __init__(
        self,
        native: Any,
        pid: int,
        gateway: str,
        gateway_link: int,
        to_gateway: Callable[[Envelope], bool],
        keep: Callable[[Callable[[], bool]], None],
        early: Callable[[str], tuple[set[int], list[Event]]] | None = None,
    ) -> None:
        self.token: str = native.token
        self.native = native.mailbox  # the methods of LocalLinks are replaced by those of this object
        self.pid = pid
        self._to_gateway, self._keep = to_gateway, keep
        self._here = host_of(native.token)
        self._lock = threading.Lock()
        self._tokens: list[str] = []  # by number
        self._known: set[str] = set()  # the same tokens
        self._numbers: dict[str, int] = {}  # of connected and connecting processes
        self._met: set[int] = set()  # numbers of connected processes
        self._early: dict[int, list[Event]] = {}  # frames that came down a tree before their sender was connected
        self._take_early = early
        self._gateways = {gateway_link}  # links to the gateway: two if both sides have connected
        self._gateway = gateway
        self._dead = False  # whether the gateway has ended: no other host can be reached

    # ---- Links

    def connect(self, token: str) -> int:
        """As Links.connect. The first call for a process on another host returns LINK_PENDING."""
        if host_of(token) == self._here:
            return int(self.native.connect(token))
        with self._lock:
            if self._dead:
                return -1
            number = self._numbers.get(token)
            if number is None:
                self._number(token)
                self._put(envelope.word(CALL, token, self.token, self.pid))
                return LINK_PENDING
        return number if number in self._met else LINK_PENDING

    def _number(self, token: str) -> int:
        number = self._numbers.get(token)
        if number is None:
            number = self._numbers[token] = FIRST_REMOTE_LINK + len(self._tokens)
            self._tokens.append(token)
            self._known.add(token)
        return number

    def _put(self, frame: Envelope) -> None:
        if not self._to_gateway(frame):
            self._keep(lambda: self._to_gateway(frame))

    def send(
        self, link: int, kind: int, target: int, ref: int, seq: int, rank: int, epoch: int, prefix: bytes, body: Any,
        buffers: Sequence[Any] | None,
    ) -> bool:  # fmt: skip
        if link < FIRST_REMOTE_LINK:
            return bool(self.native.send(link, kind, target, ref, seq, rank, epoch, prefix, body, buffers))
        prefix = (self._tokens[link - FIRST_REMOTE_LINK] + self.token).encode() + prefix
        return self._to_gateway(Envelope(kind | CARRIED, target, ref, seq, rank, epoch, prefix, body, buffers))

    def multicast(
        self, to: list[Receiver], kind: int, target: int, ref: int, prefix: bytes, body: Any,
        buffers: Sequence[Any] | None,
    ) -> bool:  # fmt: skip
        """As Links.multicast. The gateway receives one frame for all receivers on other hosts."""
        remote = [receiver for receiver in to if receiver[0] >= FIRST_REMOTE_LINK]
        if not remote:
            return bool(self.native.multicast(to, kind, target, ref, prefix, body, buffers))
        near = [receiver for receiver in to if receiver[0] < FIRST_REMOTE_LINK]
        if near and not self.native.multicast(near, kind, target, ref, prefix, body, buffers):
            return False
        rows = [(self._tokens[link - FIRST_REMOTE_LINK], seq, rank, epoch) for link, seq, rank, epoch in remote]
        prefix = envelope.for_many(envelope.pack_rows(rows), ("0" * TOKEN_LENGTH + self.token).encode() + prefix)
        frame = Envelope(kind | MANY, target, ref, 0, 0, 0, prefix, body, buffers)
        if self._to_gateway(frame):
            return True
        if not near:
            return False
        self._put(frame._replace(body=own(body), buffers=own_all(buffers)))
        return True

    def drop(self, link: int) -> None:
        if link < FIRST_REMOTE_LINK:
            self.native.drop(link)

    def unread(self, link: int) -> int:
        """As Links.unread. 0 for a link to another host: only the gateway there knows."""
        return int(self.native.unread(link)) if link < FIRST_REMOTE_LINK else 0

    # ---- events

    def translate(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events of the local links; frames from the gateway become events on the links of their senders."""
        if self._take_early is not None:
            links, held = self._take_early(self._gateway)
            self._take_early = None
            self._gateways |= links
            events = [*held, *events]
        if not any(event[1] >= CARRIED or event[1] < 0 for event in events):
            return events
        result: list[Event] = []
        for event in events:
            if event[1] >= CARRIED and event[0] in self._gateways:
                try:
                    self._on_remote_frame(Envelope(*event[1:]), result)
                except (FrameError, ValueError) as error:
                    log.error("a frame of this host's gateway is dropped: %s", error)
                continue
            if event[1] == Kind.MET and event[2] == self._gateway:
                self._gateways.add(event[0])
            elif event[1] == Kind.GONE and event[0] in self._gateways:
                self._gateways.discard(event[0])
                if not self._gateways:
                    self._lose_all(event[2], result)
            result.append(event)
        return result

    def _on_remote_frame(self, frame: Envelope, result: list[Event]) -> None:
        sender, kind = frame.sender, frame.kind
        with self._lock:
            if kind == MET:
                number = self._number(sender)
                if number not in self._met:
                    self._met.add(number)
                    result.append((number, int(Kind.MET), sender, frame.ref))
                    result.extend(self._early.pop(number, ()))
            elif kind == REFUSED:
                if self._numbers.get(sender) not in self._met:
                    self._early.pop(self._numbers.pop(sender, -1), None)
                    result.append((0, int(Kind.REFUSED), sender))
            elif kind == GONE:
                how = str(frame.prefix[2 * TOKEN_LENGTH :], "utf-8", "replace")
                if frame.rank & HOST_LOST:
                    self._lose_host(host_of(sender), how, result)
                else:
                    self._lose(sender, how, bool(frame.rank), result)
            elif kind & CARRIED and (number := self._numbers.get(sender, -1)) >= 0:
                rest = frame.prefix[2 * TOKEN_LENGTH :]
                event = (number, kind & ~CARRIED, *frame[1:6], rest, frame.body, frame.buffers)
                (result if number in self._met else self._early.setdefault(number, [])).append(event)
            elif sender in self._known:
                return  # the end of its sender has been reported
            else:
                raise FrameError(f"a frame of {sender[:8]}, which was never connected to this process")

    def _lose(self, token: str, how: str, orderly: bool, result: list[Event]) -> None:
        number = self._numbers.pop(token, None)
        if number is None:
            return
        self._early.pop(number, None)
        if number in self._met:
            self._met.discard(number)
            result.append((number, int(Kind.GONE), how, orderly))
        else:
            result.append((0, int(Kind.REFUSED), token, how))

    def _lose_host(self, host: str, how: str, result: list[Event]) -> None:
        tokens = [token for token in self._numbers if host_of(token) == host]
        if tokens:
            result.append((0, int(Kind.HOST_GONE), host, how))
        for token in tokens:
            self._lose(token, how, False, result)

    def _lose_all(self, how: str, result: list[Event]) -> None:
        with self._lock:
            self._dead = True
            for host in {host_of(token): None for token in self._numbers}:
                self._lose_host(host, f"the gateway of this host has ended: {how}", result)
