"""Trace of the last steps of a simulation. Steps are stored as objects and formatted when they are printed."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from monarch_backend._transport.local import frames
from monarch_backend._transport.local.frames import TOKEN_LENGTH, FrameError, Kind
from monarch_backend._transport.network import envelope

if TYPE_CHECKING:
    from monarch_backend._testing.process import SimulatedProcess


class Trace:
    """The last ``steps`` steps of a simulation."""

    def __init__(self, steps: int) -> None:
        self._entries: deque[tuple[float, SimulatedProcess, Any, Any]] = deque(maxlen=steps)

    def add(self, time: float, process: SimulatedProcess, what: Any, event: tuple[Any, ...] | None) -> None:
        """Add a text, or an event and its sender."""
        self._entries.append((time, process, what, event))

    def __str__(self) -> str:
        return "\n".join(_line(*entry) for entry in self._entries)


def _line(time: float, process: SimulatedProcess, what: Any, event: tuple[Any, ...] | None) -> str:
    who = process.label
    if event is None:
        return f"{time * 1e3:12.4f} ms  {who}: {what}"
    return f"{time * 1e3:12.4f} ms  {who} <- {what.label}: {_told(event)}"


def _told(event: tuple[Any, ...]) -> str:
    if event[1] >= envelope.CARRIED:
        return _told_far(event)
    kind = Kind(event[1])
    if kind is Kind.MET:
        return "MET"
    if kind is Kind.REFUSED:
        return "REFUSED"
    if kind is Kind.HOST_GONE:
        return f"HOST_GONE {event[2]} {event[3]}"
    if kind is Kind.GONE:
        return f"GONE {event[2] or 'in an orderly way'}"
    _, _, target, ref, seq, rank, epoch, prefix, body, _ = event
    place = f"target={target} ref={ref} seq={seq} rank={rank} epoch={epoch}"
    return f"{kind.name} {place} {_content(kind, prefix)} +{len(body)} bytes"


def _told_far(event: tuple[Any, ...]) -> str:
    """Format an event of or for a process on another host."""
    if envelope.is_word(event[1]):
        name = {envelope.CALL: "CALL", envelope.MET: "MET", envelope.REFUSED: "REFUSED"}.get(event[1], "GONE")
        return f"remote {name} {event[7].decode()}"
    rest, kind = event[7], event[1] & ~(envelope.CARRIED | envelope.MANY)
    many = 0
    if envelope.is_for_many(event[1]):
        rows, rest = envelope.unpack_receivers(rest)
        many = len(rows)
    way = f"from {rest[TOKEN_LENGTH : 2 * TOKEN_LENGTH].decode()} to {many or rest[:TOKEN_LENGTH].decode()}"
    return f"remote {way}: {_told((*event[:1], kind, *event[2:7], rest[2 * TOKEN_LENGTH :], *event[8:]))}"


def _content(kind: Kind, prefix: bytes) -> str:
    try:
        if kind is Kind.CONTROL:
            return str(frames.decode_control(prefix))
        if kind is Kind.MULTICAST:
            route = frames.decode_route(prefix)
            return f"multicast {route.multicast} of {len(route)} {'combined' if route.combine else ''}"
        if kind is Kind.REPLIES:
            return str(msgspec.msgpack.decode(prefix))
    except (FrameError, msgspec.DecodeError) as error:
        return str(error)
    return repr(prefix[:24])
