"""Actors on meshes of processes: endpoints, futures, ports, supervision and restarts.

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

from monarch_backend import _wiring as _wiring
from monarch_backend._actor.actor import Actor, concurrent_endpoint, endpoint
from monarch_backend._actor.calls.endpoint import Accumulator, Endpoint, as_endpoint, send
from monarch_backend._actor.calls.future import Future, gather
from monarch_backend._actor.calls.pending_calls import Stream
from monarch_backend._actor.calls.port import Channel, Port, PortClosedError, PortReceiver
from monarch_backend._actor.context import (
    Context,
    context,
    current_actor_name,
    current_rank,
    current_size,
    this_proc,
)
from monarch_backend._actor.errors import (
    ActorError,
    CancelledError,
    DeadlockError,
    Death,
    MeshFailure,
    SupervisionError,
    UnknownEndpointError,
)
from monarch_backend._actor.host_ending import HostEnding
from monarch_backend._actor.meshes.actor_mesh import ActorMesh
from monarch_backend._actor.meshes.named_actors import get_or_spawn_controller
from monarch_backend._actor.restart_policy import Restart
from monarch_backend._actor.supervision import end_program as unhandled_fault_hook
from monarch_backend._hosts.attach import attach, attach_to_workers
from monarch_backend._hosts.daemon import run_worker_loop_forever
from monarch_backend._mesh.extent import Extent, Point
from monarch_backend._mesh.host_mesh import HostMesh, this_host
from monarch_backend._mesh.proc_mesh import ProcMesh
from monarch_backend._mesh.shape import Shape
from monarch_backend._mesh.value_mesh import ValueMesh
from monarch_backend._processes.resource_limits import SpawnLimitError
from monarch_backend._replay.replay_file import ReplayError
from monarch_backend._serialization.pickling import DeserializationError, SerializationError
from monarch_backend._telemetry.metrics import get_meter
from monarch_backend._telemetry.spans import span, traced
from monarch_backend._transport.local.peer import PeerGoneError

__all__ = [
    "Accumulator",
    "Actor",
    "ActorError",
    "ActorMesh",
    "CancelledError",
    "Channel",
    "Context",
    "DeadlockError",
    "Death",
    "DeserializationError",
    "Endpoint",
    "Extent",
    "Future",
    "HostEnding",
    "HostMesh",
    "MeshFailure",
    "PeerGoneError",
    "Point",
    "Port",
    "PortClosedError",
    "PortReceiver",
    "ProcMesh",
    "ReplayError",
    "Restart",
    "SerializationError",
    "Shape",
    "SpawnLimitError",
    "Stream",
    "SupervisionError",
    "UnknownEndpointError",
    "ValueMesh",
    "as_endpoint",
    "attach",
    "attach_to_workers",
    "concurrent_endpoint",
    "context",
    "current_actor_name",
    "current_rank",
    "current_size",
    "endpoint",
    "gather",
    "get_meter",
    "get_or_spawn_controller",
    "run_worker_loop_forever",
    "send",
    "span",
    "this_host",
    "this_proc",
    "traced",
    "unhandled_fault_hook",
]
