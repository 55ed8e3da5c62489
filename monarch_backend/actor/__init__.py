"""One program, many processes: actors on meshes of processes, messages to them, and what happens when they fail.

>>> from monarch_backend.actor import Actor, endpoint, this_host
>>> class Counter(Actor):
...     def __init__(self, start):
...         self.value = start
...     @endpoint
...     def add(self, n):
...         self.value += n
...         return self.value
>>> procs = this_host().spawn_procs({"gpus": 2})
>>> counters = procs.spawn("counters", Counter, 40)
>>> list(counters.add.call(2).get().values())
[42, 42]
>>> procs.stop().get()
"""

from monarch_backend._public import name_exceptions
from monarch_backend.actor._actor import Actor, concurrent_endpoint, endpoint
from monarch_backend.actor._actor_mesh import ActorMesh
from monarch_backend.actor._calls import Stream
from monarch_backend.actor._context import Context, context, current_actor_name, current_rank, current_size
from monarch_backend.actor._errors import (
    ActorError,
    CancelledError,
    Death,
    MeshFailure,
    SupervisionError,
    UnknownEndpointError,
)
from monarch_backend.actor._future import Future, gather
from monarch_backend.actor._hosts import get_or_spawn_controller, this_proc
from monarch_backend.actor._port import Channel, Port, PortClosedError, PortReceiver
from monarch_backend.actor._supervision import Restart
from monarch_backend.actor._supervision import end_program as unhandled_fault_hook
from monarch_backend.actor._verbs import Accumulator, Endpoint, as_endpoint, send
from monarch_backend.mesh._extent import Extent, Point, Shape
from monarch_backend.mesh._hosts import HostMesh, this_host
from monarch_backend.mesh._limits import SpawnLimitError
from monarch_backend.mesh._procs import ProcMesh
from monarch_backend.mesh._value_mesh import ValueMesh
from monarch_backend.transport._peer import PeerGoneError
from monarch_backend.transport._serialize import DeserializationError, SerializationError

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "CancelledError",
    "Channel",
    "Context",
    "Death",
    "DeserializationError",
    "Endpoint",
    "Extent",
    "Future",
    "HostMesh",
    "MeshFailure",
    "PeerGoneError",
    "Point",
    "Port",
    "PortClosedError",
    "PortReceiver",
    "ProcMesh",
    "Restart",
    "SerializationError",
    "Shape",
    "SpawnLimitError",
    "Stream",
    "SupervisionError",
    "UnknownEndpointError",
    "ValueMesh",
    "as_endpoint",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "gather",
    "get_or_spawn_controller",
    "send",
    "this_host",
    "this_proc",
    "unhandled_fault_hook",
]

name_exceptions(__name__, globals())
