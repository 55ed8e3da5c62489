"""Frames that are larger than one piece of shared memory: cut by the sender, assembled by the receiver."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from monarch_backend._transport.local import frames, tuning
from monarch_backend._transport.local.buffers import Assembly, cut
from monarch_backend._transport.local.flow_control import SharedMemoryWait
from monarch_backend._transport.local.frames import Frame, FrameError, Kind
from monarch_backend._transport.local.peer import Peer

if TYPE_CHECKING:
    from monarch_backend._transport.local.router import Router


class Fragmenter:
    def __init__(self, router: Router) -> None:
        self._router = router
        self.assemblies: dict[tuple[int, int], Assembly] = {}  # by link and the sender's number of the frame

    def send(
        self, peer: Peer, kind: int, target: int, ref: int, seq: int, rank: int, prefix: bytes, body: Any,
        buffers: Any, keep: bool = False,
    ) -> None:  # fmt: skip
        """Send a frame in pieces. Waits for space without the lock; with ``keep`` it queues the rest instead.

        With ``keep`` the payload must be a copy that the caller no longer changes.
        """
        sizes, pieces = cut(body, buffers, tuning.MOST_IN_ONE // 4)
        count, whole = len(pieces), next(self._router.ids)
        head = frames.encode([kind, target, ref, seq, rank, prefix, sizes, count])

        def send() -> bool:
            while pieces and peer.gone is None:
                number = count - len(pieces)
                first = head if number == 0 else b""
                of_buffer, piece = pieces[0]
                what = (b"", [piece]) if of_buffer else ([piece], None)
                if not self._router.links.send(peer.link, Kind.PART, number, whole, 0, rank, peer.epoch, first, *what):
                    return False
                pieces.popleft()
            return True

        if keep:
            if not send():
                self._router.keep(send, peer.link)
        else:
            with contextlib.closing(SharedMemoryWait(self._router, [peer], whole=True)) as full:
                while not send():
                    full.wait()

    def receive(self, frame: Frame) -> tuple[Any, ...] | None:
        """Take a piece; return the event of the frame that it completes. Raises FrameError if the frame is unknown."""
        key = frame.link, frame.ref
        assembly = self.assemblies.get(key)
        if frame.target == 0:
            assembly = self.assemblies[key] = Assembly(frame.prefix)
        piece = frame.buffers[0] if frame.buffers else frame.body
        if assembly is None or not assembly.add(frame.target, piece):
            raise FrameError("a piece that belongs to no known frame")
        if not assembly.complete:
            return None
        del self.assemblies[key]
        return assembly.frame(frame.link, frame.epoch)

    def drop_link(self, link: int) -> None:
        for key in [key for key in self.assemblies if key[0] == link]:
            del self.assemblies[key]
