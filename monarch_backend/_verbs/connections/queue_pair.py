"""Send side of one queue pair, with its posted work requests in order.

Only the last work request of a batch is signaled. Its completion means that all earlier ones on the same queue pair are
done.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from monarch_backend import _native
from monarch_backend._verbs.config import Settings
from monarch_backend._verbs.open_device import Device
from monarch_backend._verbs.providers.provider import WRITE, Path, Work, destroy
from monarch_backend._verbs.wire_format import Endpoint, Pairing, QpEndpoint
from monarch_backend._verbs.work_requests import Piece, Request

if TYPE_CHECKING:
    from monarch_backend._verbs.connections.connection import PeerConnection

QUEUE_DEPTH = 128
"""Work requests in flight on a queue pair."""

POST_BATCH = 16
"""Work requests that are posted in one call."""

BATCH_BYTES, LANE_BYTES = 2 << 20, 8 << 20
"""Bytes of a batch, and bytes in flight on a queue pair.

The second limit gives the next piece to the faster queue pair.
"""

_MIN_TIMED_BYTES = 256 << 10
"""Least bytes of a work request that is timed. With smaller ones the clock would dominate, in some guests."""

_ids = itertools.count(1)  # of work requests; never reused, because a queue may hold a closed queue pair's completion


class Posted(NamedTuple):
    """A posted work request; without a request it is the proof that the peer is reachable."""

    id: int
    request: Request | None
    piece: Piece | None


class SendQueuePair:
    """A queue pair for requests to a peer. ``place``: its index in the connect request."""

    is_stuck = False  # closed, but its queue pair was not destroyed

    def __init__(self, link: PeerConnection, device: Device, endpoint: Endpoint, place: int, psn: int) -> None:
        self.link, self.device, self.endpoint, self.place = link, device, endpoint, place
        if len(device.lanes) >= device.most_lanes:
            raise OSError(errno.EMFILE, f"its completion queue serves no more than {len(device.lanes)} queue pairs")
        self.depth = min(QUEUE_DEPTH, device.nic.limits.depth)
        self.pair = device.nic.queue_pair(self.depth)
        try:
            self.pair.initialize(endpoint.port, 0)
        except BaseException:
            destroy(self.pair, f"queue pair {self.pair.number}", device.name)
            raise
        self.number, self.psn = self.pair.number, psn
        self.posted: deque[Posted] = deque()
        self.nbytes = 0  # in flight
        self._since, self._timed = 0.0, 0  # when that work request was posted, and its number; 0: none is timed
        self._oldest, self._seen = 0, 0.0  # work request that `is_silent` has seen, and its first time
        self.their_nic = 0
        self.proved = False
        device.lanes[self.number] = self

    def end(self, endpoint: int) -> QpEndpoint:
        return QpEndpoint(endpoint, self.number, self.psn)

    def connect(self, pairing: Pairing, settings: Settings) -> None:
        """Connect to the peer, and post a proof that it is reachable. Raises OSError."""
        self.their_nic = pairing.nic
        self.pair.connect(
            Path(
                self.endpoint.port,
                pairing.number,
                self.psn,
                pairing.psn,
                min(pairing.mtu, self.endpoint.mtu),
                pairing.gid_index,
                pairing.gid,
                pairing.lid,
                pairing.is_global,
                1,
                min(pairing.reads, self.endpoint.reads_out),
                settings,
            )
        )
        # A WRITE of no bytes needs no key, and the peer's device acknowledges it.
        proof = Posted(next(_ids), None, None)
        self._post([proof], [Work(proof.id, WRITE, True, 0, 0, 0, 0, 0)])

    @property
    def room(self) -> int:
        if self.nbytes >= LANE_BYTES or not self.proved:
            return 0
        if self.device.credit < 1:
            self.device.starved = True  # posting resumes when a queue pair returns credit
        return max(0, min(self.depth - len(self.posted), self.device.credit, POST_BATCH))

    def post(self, requests: list[Request]) -> int:
        """Post a batch of the pieces of these requests, in order; return their number. Raises OSError."""
        taken: list[tuple[Request, Piece]] = []
        room, nbytes = self.room, 0
        for request in requests:
            while len(taken) < room and nbytes < BATCH_BYTES and request.has_more:
                piece = request.take(self)
                taken.append((request, piece))
                nbytes += piece.nbytes
        if taken:
            batch = [Posted(next(_ids), request, piece) for request, piece in taken]
            last = batch[-1].id
            self._post(
                batch, [self._work(p.id, r, piece, p.id == last) for p, (r, piece) in zip(batch, taken, strict=True)]
            )
        return len(taken)

    def post_one(self, request: Request) -> None:
        """Post the request's next piece; there must be `room`. Raises OSError."""
        id_, piece = next(_ids), request.take(self)
        self._post([Posted(id_, request, piece)], [self._work(id_, request, piece, True)])

    def _work(self, id_: int, request: Request, piece: Piece, signaled: bool) -> Work:
        local, lkey = request.where(piece, self.device)
        rkey = request.record.keys[self.their_nic]
        first, second = request.operands
        return Work(id_, request.opcode, signaled, local, piece.nbytes, lkey, piece.remote, rkey, first, second)

    def _post(self, batch: list[Posted], works: list[Work]) -> None:
        if (
            not self.posted
            and (first := batch[0].piece) is not None
            and first.nbytes >= _MIN_TIMED_BYTES
            and len(batch) == 1
        ):
            self._time(batch[0].id)
        for posted in batch:
            self.posted.append(posted)
            self.nbytes += posted.piece.nbytes if posted.piece else 0
        self.device.credit -= len(batch)
        self.pair.post(works)

    def _time(self, id_: int) -> None:
        if self.device.untimed:
            self.device.untimed -= 1
        else:
            self._since, self._timed = time.perf_counter(), id_

    def retire(self, id_: int) -> list[Posted]:
        """Return the work requests up to this one, which are done."""
        done, waiting = [], self.posted
        while waiting and waiting[0].id <= id_:
            done.append(self._pop())
        if self._timed and done and done[0].id == self._timed and done[0].piece is not None:
            self.device.took(time.perf_counter() - self._since, done[0].piece.nbytes)
            self._timed = 0
        return done

    def is_silent(self, now: float, patience: float) -> bool:
        """True if the device has completed nothing for ``patience`` seconds, and a work request is posted.

        Must be called regularly: it compares the oldest work request with the last call's, so that none has to be
        timed.
        """
        oldest = self.posted[0].id if self.posted else 0
        if oldest != self._oldest:
            self._oldest, self._seen = oldest, now
        return oldest != 0 and now - self._seen >= patience

    def _pop(self) -> Posted:
        posted = self.posted.popleft()
        self.device.credit += 1
        self.nbytes -= posted.piece.nbytes if posted.piece else 0
        return posted

    def close(self) -> list[Posted]:
        """Destroy the queue pair and return the work requests in flight.

        It accesses no memory then, unless it `is_stuck`.

        The device may still execute what was posted on a stuck queue pair, at any time. These requests must not be
        repeated, because an old value could overwrite the result. Their memory must not be reused, also if the caller
        releases it.
        """
        self.device.lanes.pop(self.number, None)
        left = [self._pop() for _ in range(len(self.posted))]
        self.is_stuck = not destroy(self.pair, f"queue pair {self.number}", self.device.name)
        for posted in left if self.is_stuck else ():
            if posted.request is None or posted.piece is None:
                continue
            _native.keep_for_ever(posted.request.plan)
            if posted.request.is_atomic:
                self.device.lost_slots.add(posted.request.where(posted.piece, self.device)[0])
        return left
