"""Connection to one peer: its send queue pairs, waiting requests, and recovery when a queue pair breaks.

A connection is IDLE until the first request. It is DIALING while the control plane carries the connect request and the
reply, and PROVING until the first queue pair has reached the peer. Then it is UP. When a queue pair breaks, the others
finish their posted work requests (DRAINING). If work is left, the connection is dialed again, at most once for each
request.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import secrets
import time
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any

from monarch_backend import _native
from monarch_backend._verbs import wire_format as messages
from monarch_backend._verbs.connections.queue_pair import Posted, SendQueuePair
from monarch_backend._verbs.errors import (
    FLUSHED,
    LINK_STATUS,
    NoConnectionError,
    VerbsError,
    completion_error,
    stuck_error,
)
from monarch_backend._verbs.open_device import Device
from monarch_backend._verbs.wire_format import ConnectReply, ConnectRequest

if TYPE_CHECKING:
    from monarch_backend._verbs.config import Settings
    from monarch_backend._verbs.engine_thread import EngineThread
    from monarch_backend._verbs.work_requests import Done, Request

CONNECT_TIMEOUT_S = 10.0
"""Seconds for the control plane to return the reply."""

DRAIN_TIMEOUT_S = 10.0
"""Seconds for the other queue pairs to finish their posted work requests when one has broken."""

MIN_SILENCE_S = 10.0
"""Least seconds for a device to complete any posted work request, also if settings allow less, for slow machines."""

_LOOKAHEAD_REQUESTS = 64
"""Waiting requests that are offered to a queue pair at a time."""

_SILENT, _GENERAL = 20, 21
"""ibv_wc_status of a queue pair that completes nothing, and of one that accepts nothing."""


class State(enum.Enum):
    IDLE = "idle"
    DIALING = "dialing"
    PROVING = "proving"
    UP = "up"
    DRAINING = "draining"


class PeerConnection:
    """Connection to one peer. The engine's lock is held in all methods."""

    def __init__(self, peer: Hashable, host: PeerConnections) -> None:
        self.peer, self._host = peer, host
        self.state = State.IDLE
        self.lanes: list[SendQueuePair] = []
        self.rebuilds = 0
        self.waiting: dict[Request, None] = {}  # requests with pieces that are not posted
        self._offered: list[SendQueuePair] = []
        self._nonce = b""
        self._deadline: float | None = None
        self._next_look = 0.0  # time of the next check for silent queue pairs
        self._trouble: VerbsError | None = None  # why the queue pairs are gone

    # ---- requests

    def submit(self, request: Request) -> None:
        if self.state is State.UP and not self.waiting and self._straight(request):
            return
        self.waiting[request] = None
        if self.state is State.IDLE:
            self._want()
        elif self.state is State.UP:
            self._prepare([request])
            self.progress()

    def _straight(self, request: Request) -> bool:
        """Post a request that is a single work request on the next queue pair; False if that is not possible."""
        lane = self.lanes[1 % len(self.lanes)]
        fits = request.is_for(lane.device) and lane.their_nic < len(request.record.keys)
        if not fits or not lane.room or not request.begin_on(lane):
            return False
        self.lanes.append(self.lanes.pop(0))
        try:
            lane.post_one(request)
        except OSError as error:
            self._refused(lane, error)
        return True

    def _refused(self, lane: SendQueuePair, error: OSError) -> None:
        self.broke(lane, lane.posted[0].id if lane.posted else 0, _GENERAL, error.errno or 0)

    def progress(self) -> None:
        posted = True
        while posted and self.state is State.UP and self.waiting:
            posted = False
            self.lanes.append(self.lanes.pop(0))  # small requests alternate
            for lane in list(self.lanes):
                if not lane.room:
                    continue
                try:
                    count = lane.post(self._for(lane))
                except OSError as error:
                    self._refused(lane, error)
                    return
                if count:
                    posted = True
                    for request in [r for r in itertools.islice(self.waiting, _LOOKAHEAD_REQUESTS) if not r.has_more]:
                        del self.waiting[request]
                    if not self.waiting:
                        return

    def _for(self, lane: SendQueuePair) -> list[Request]:
        first = itertools.islice(self.waiting, _LOOKAHEAD_REQUESTS)
        return [r for r in first if r.may_use(lane) and lane.their_nic < len(r.record.keys)]

    def _prepare(self, requests: Iterable[Request]) -> None:
        for request in requests:
            fit = [lane for lane in self.lanes if lane.their_nic < len(request.record.keys)]
            mine = [lane for lane in fit if request.is_for(lane.device)]
            try:
                if not fit:
                    raise VerbsError(f"the region has no key for a connected device of {self.peer}: expose it anew")
                if not mine:
                    request.register(fit[0].device)
                    mine = [lane for lane in fit if request.is_for(lane.device)]
                    if not mine:
                        raise VerbsError(f"no queue pair to {self.peer} on the device of this atomic: request it again")
            except VerbsError as error:
                self._fail(request, error)
                continue
            request.begin(mine)

    # ---- connecting

    def _want(self) -> None:
        self.state, self._deadline = State.DIALING, time.monotonic() + CONNECT_TIMEOUT_S
        if not self._host.dial(self.peer):
            reason = f": {self._trouble}" if self._trouble else ", and no control plane to connect it"
            self.fail(VerbsError(f"there is no connection to {self.peer}{reason}", *self._words()))

    def _words(self) -> tuple[str, str, str]:
        trouble = self._trouble
        return (trouble.status, trouble.device, trouble.peer) if trouble else ("", "", str(self.peer))

    def offer(self) -> bytes:
        """Make queue pairs for a connect request to the peer. Raises VerbsError."""
        if self.state in (State.PROVING, State.UP, State.DRAINING):
            raise VerbsError(f"a connection to {self.peer} exists already")
        self._drop_offer()
        settings = self._host.settings
        endpoints = [endpoint for device in self._host.devices() for endpoint in device.endpoints]
        endpoints = endpoints[: messages.MOST_ENDPOINTS]
        by_index = {device.index: device for device in self._host.devices()}
        for endpoint in endpoints * min(settings.queue_pairs, messages.MOST_LANES // len(endpoints)):
            try:
                lane = SendQueuePair(self, by_index[endpoint.nic], endpoint, len(self._offered), secrets.randbits(24))
            except OSError as error:
                if not self._offered:
                    raise VerbsError(f"{endpoint.device} makes no queue pair: {error}", "", endpoint.device) from error
                break
            self._offered.append(lane)
        self._nonce = os.urandom(8)
        ends = [lane.end(endpoints.index(lane.endpoint)) for lane in self._offered]
        self.state, self._deadline = State.DIALING, time.monotonic() + CONNECT_TIMEOUT_S
        return messages.pack(ConnectRequest(self._nonce, endpoints, ends))

    def connect(self, answer: ConnectReply) -> None:
        """Connect by the peer's reply. Raises VerbsError."""
        if not self._offered or answer.nonce != self._nonce:
            raise VerbsError(f"this answer of {self.peer} is not to the last offer: offer again")
        by_place = {lane.place: lane for lane in self._offered}
        problems = []
        for pairing in answer.pairings:
            lane = by_place.pop(pairing.lane, None)
            if lane is None:
                raise VerbsError(f"the answer of {self.peer} is about queue pair {pairing.lane}, which was not offered")
            try:
                lane.connect(pairing, self._host.settings)
            except OSError as error:
                problems.append(f"{lane.device.name}: {error}")
                by_place[lane.place] = lane
            else:
                self.lanes.append(lane)
        self._offered = list(by_place.values())
        self._drop_offer()
        self._deadline = None
        if self.lanes:
            self.state, self._next_look = State.PROVING, time.monotonic() + self._silence / 4
            return
        error_of_all = NoConnectionError(f"no way from here to {self.peer}: {'; '.join(problems)}", *self._words())
        self.fail(error_of_all)
        raise error_of_all

    def no_connection(self, offer: bytes, error: NoConnectionError) -> bool:
        if self.state not in (State.IDLE, State.DIALING):
            return False
        if offer and self._nonce not in (b"", messages.unpack(ConnectRequest, offer).nonce):
            return False
        self.fail(error)
        return True

    def _drop_offer(self) -> None:
        for lane in self._offered:
            lane.close()
        self._offered, self._nonce = [], b""

    def tick(self, now: float) -> None:
        if self.lanes and now >= self._next_look:
            self._look_for_silence(now)
        if self._deadline is None or now < self._deadline:
            return
        if self.state is State.DRAINING:
            for lane in list(self.lanes):
                self.broke(lane, 0, FLUSHED, 0)
        else:
            text = f"{self.peer} has not answered within {CONNECT_TIMEOUT_S:.0f} s"
            if self._trouble:
                text = f"{self._trouble}; and then {text}"
            self.fail(NoConnectionError(text, *self._words()))  # there are no queue pairs, so nothing is posted

    @property
    def _silence(self) -> float:
        return max(MIN_SILENCE_S, self._host.settings.silence)

    def _look_for_silence(self, now: float) -> None:
        """Break queue pairs that complete nothing for too long.

        Devices must complete each work request in some time. soft-RoCE may not do so after its cable was cut, if other
        queue pairs are in use. Waiting threads would then never return.
        """
        self._next_look = now + self._silence / 4
        for lane in list(self.lanes):
            if lane in self.lanes and lane.is_silent(now, self._silence):
                self.broke(lane, lane.posted[0].id, _SILENT, 0)

    @property
    def is_restless(self) -> bool:
        """True if completions are expected that no request waits for."""
        return self.state is State.DRAINING or any(not lane.proved for lane in self.lanes)

    @property
    def deadline(self) -> float | None:
        if not self.lanes:
            return self._deadline
        return self._next_look if self._deadline is None else min(self._deadline, self._next_look)

    # ---- completions

    def completed(self, lane: SendQueuePair, id_: int) -> None:
        """Handle the completion of all work requests on this queue pair up to ``id_``."""
        for posted in lane.retire(id_):
            if posted.request is None:
                self._proved(lane)
            else:
                posted.request.under_way -= 1
                self._settle(posted.request)
        if self.state is not State.UP:
            self._drained()
        if self.waiting:
            self.progress()

    def _proved(self, lane: SendQueuePair) -> None:
        lane.proved = True
        if self.state is State.PROVING:
            self.state, self._trouble = State.UP, None
            self._prepare(list(self.waiting))

    def broke(self, lane: SendQueuePair, id_: int, status: int, vendor: int) -> None:
        for posted in lane.retire(id_ - 1):
            if posted.request is not None:
                posted.request.under_way -= 1
                self._settle(posted.request)
        left = lane.close()
        self.lanes.remove(lane)
        what = "connecting" if not lane.proved else left[0].request.kind if left and left[0].request else "a transfer"
        error = self._trouble = completion_error(what, status, vendor, lane.device.name, self.peer)
        for posted in left:
            if posted.request is not None and lane.is_stuck:
                posted.request.under_way -= 1
                self._fail(posted.request, stuck_error(error))
            elif posted.request is not None:
                self._unfinished(posted, posted.id == id_, status, error)
        if self.state is State.UP and lane.proved:
            self.state, self._deadline = State.DRAINING, time.monotonic() + DRAIN_TIMEOUT_S
            self._close_lanes([lane for lane in self.lanes if not lane.proved])
        if self.state is State.PROVING and not self.lanes:  # only proofs were posted on them
            self.fail(NoConnectionError(str(error), error.status, error.device, error.peer))
        self._drained()

    def _unfinished(self, posted: Posted, culprit: bool, status: int, error: VerbsError) -> None:
        """Decide about a piece that was posted on a broken queue pair: post it on the next connection, or fail."""
        request, piece = posted.request, posted.piece
        assert request is not None
        assert piece is not None
        by_link = status in LINK_STATUS
        if by_link:
            request.breaks += 1 if not request.breaks or request.broken_in != self.rebuilds else 0
            request.broken_in = self.rebuilds
        if culprit and not by_link:
            reason: BaseException | None = error
        elif by_link and request.is_atomic:
            reason = VerbsError(f"{error}. It was done once or not at all: read the value to know", *self._words())
        else:
            reason = error if request.breaks > 1 else request.unwanted
        if reason is None and request.error is None:
            request.put_back(piece)
            self.waiting[request] = None
        else:
            request.under_way -= 1
            self._fail(request, reason or error)

    def _drained(self) -> None:
        if self.state is not State.DRAINING or any(lane.posted for lane in self.lanes):
            return
        self._close_lanes(list(self.lanes))
        self.state, self._deadline = State.IDLE, None
        self.rebuilds += 1
        if self.waiting:
            self._want()

    def _close_lanes(self, lanes: list[SendQueuePair]) -> None:
        for lane in lanes:
            lane.close()
            with contextlib.suppress(ValueError):
                self.lanes.remove(lane)

    # ---- ends

    def give_up(self, request: Request, error: BaseException) -> None:
        """Post no more of a request, not even for recovery; its posted work requests complete by themselves."""
        request.unwanted = error
        if request.has_more:
            self._fail(request, error)

    def _fail(self, request: Request, error: BaseException) -> None:
        request.error = request.error or error
        self.waiting.pop(request, None)
        self._settle(request)

    def _settle(self, request: Request) -> None:
        if not request.finished and request.is_over:
            self.waiting.pop(request, None)
            self._host.finish(request)

    def fail(self, error: BaseException) -> None:
        """Fail all requests at once; the next request connects anew."""
        self._drop_offer()
        requests = dict(self.waiting)
        for lane in self.lanes:
            for posted in lane.close():
                if posted.request is not None:
                    posted.request.under_way -= 1
                    requests[posted.request] = None
        self.lanes, self.waiting, self._deadline, self.state = [], {}, None, State.IDLE
        for request in requests:
            self._fail(request, error)


class PeerConnections:
    """Connections of one engine, by peer. The engine's lock is held in all methods but `tick`, which takes it.

    ``devices`` returns all open devices. ``dial``: see Engine.
    """

    def __init__(
        self,
        lock: Any,
        settings: Settings,
        dial: Callable[[Any], None] | None,
        devices: Callable[[], list[Device]],
        thread: EngineThread,
    ) -> None:
        self._lock, self._dial, self._thread = lock, dial, thread
        self.settings, self.devices = settings, devices
        self.by_peer: dict[Hashable, PeerConnection] = {}
        self.ends: Callable[[Request, Done, Any], None]
        """See Completions.ends. Set by the engine."""

    def progress(self) -> None:
        for link in self.by_peer.values():
            link.progress()

    def tick(self) -> None:
        with self._lock:
            for link in self.by_peer.values():
                link.tick(time.monotonic())

    def is_restless(self) -> bool:
        return any(link.is_restless for link in self.by_peer.values())

    def detach_after_fork(self, lock: Any) -> None:
        _native.keep_for_ever(self.by_peer)
        self.by_peer, self._lock = {}, lock

    # ---- called by the connections

    def finish(self, request: Request) -> None:
        """Complete a request without posted work requests; callbacks run on the engine's thread."""
        done, outcome = request.done, request.close()
        self.ends(request, done, outcome)

    def dial(self, peer: Hashable) -> bool:
        """Start connecting by the control plane, from the engine's thread; False if there is no control plane."""
        if self._dial is None:
            return False
        self._thread.call_soon(lambda: self._dial_now(peer))
        return True

    def _dial_now(self, peer: Hashable) -> None:
        assert self._dial is not None
        try:
            self._dial(peer)
        except Exception as error:
            failed = VerbsError(f"{peer} could not be dialed: {error}", "", "", str(peer))
            failed.__cause__ = error
            with self._lock:
                link = self.by_peer.get(peer)
                if link is not None:
                    link.fail(failed)
