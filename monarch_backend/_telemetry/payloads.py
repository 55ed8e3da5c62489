"""Dtype and route of a recorded collective, as one number: ``trace`` of an event, ``waiting`` of an activity.

The numbers are those of csrc/telemetry/recording.h. They are in histories, too: append, never renumber.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

# csrc/shm/reduce.h: Dtype, after "", which is an operation without data.
DTYPES = (
    "", "float64", "float32", "bfloat16", "float16", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64",
    "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "bytes",
)  # fmt: skip
"""Names of dtypes by their number. "bytes" are those of any other dtype."""

ROUTES = "", "shm", "shm+gloo", "gloo", "nccl", "xla", "xccl", "other"
"""Names of routes by their number, as `monarch_backend.routes` has them."""

# Routes whose collectives are recorded until their end. On the others a call only enqueues the collective.
_WAITED_FOR = frozenset({"shm", "shm+gloo", "gloo"})

_ROUTE_SHIFT = 16


class Route(enum.IntEnum):
    """Number of a route in `ROUTES`."""

    SHM = 1
    SHM_GLOO = 2
    GLOO = 3
    NCCL = 4
    XLA = 5
    XCCL = 6
    OTHER = 7


class Payload(NamedTuple):
    """What a collective moved, and how. Each is None where it is unknown, the dtype also where there are no data."""

    dtype: str | None = None
    route: str | None = None

    @property
    def is_only_enqueued(self) -> bool:
        """Whether the recorded end is that of the call, not of the collective.

        >>> Payload("float32", "nccl").is_only_enqueued, Payload("float32", "gloo").is_only_enqueued
        (True, False)
        """
        return self.route is not None and self.route not in _WAITED_FOR


def route_named(name: str) -> Route:
    """Return the number of a route, that of "other" for the backend of a plugin.

    >>> route_named("gloo"), route_named("lava")
    (<Route.GLOO: 3>, <Route.OTHER: 7>)
    """
    return Route(ROUTES.index(name)) if name in ROUTES[1:] else Route.OTHER


def encode(dtype: str, route: Route) -> int:
    """Return the number of a dtype and a route. An unknown dtype is "bytes", no dtype is "".

    >>> encode("float32", Route.SHM) == 1 << 16 | 2, decode(encode("quint8", Route.SHM))
    (True, Payload(dtype='bytes', route='shm'))
    """
    return _NUMBERS.get(dtype, _BYTES) | route << _ROUTE_SHIFT


def decode(number: int) -> Payload:
    """Return the dtype and the route of a number. One of a later or earlier release may have neither.

    >>> decode(encode("float32", Route.SHM_GLOO)), decode(1 << 60)
    (Payload(dtype='float32', route='shm+gloo'), Payload(dtype=None, route=None))
    """
    dtype, route = number & ((1 << _ROUTE_SHIFT) - 1), number >> _ROUTE_SHIFT
    if not 0 < route < len(ROUTES):
        return Payload()
    return Payload(DTYPES[dtype] or None if dtype < len(DTYPES) else None, ROUTES[route])


_NUMBERS = {name: number for number, name in enumerate(DTYPES)}
_BYTES = _NUMBERS["bytes"]
