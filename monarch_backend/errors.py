"""Public exceptions of the package. All but `CancelledError` derive from `MonarchError`.

>>> from monarch_backend import errors
>>> issubclass(errors.ActorError, errors.MonarchError), issubclass(errors.ActorError, RuntimeError)
(True, True)
"""

from monarch_backend._actor.calls.port import PortClosedError
from monarch_backend._actor.errors import (
    ActorError,
    CancelledError,
    DeadlockError,
    MeshFailure,
    SupervisionError,
    UnknownEndpointError,
)
from monarch_backend._core.errors import MonarchError
from monarch_backend._core.limits import ResourceLimitError
from monarch_backend._hosts.workspace_tree import WorkspaceError
from monarch_backend._job.errors import JobError
from monarch_backend._processes.resource_limits import SpawnLimitError
from monarch_backend._processes.spawner import HostLostError
from monarch_backend._rdma.errors import DroppedError, OwnerLostError, RDMAError
from monarch_backend._replay.replay_file import ReplayError
from monarch_backend._serialization.pickling import DeserializationError, SerializationError
from monarch_backend._telemetry.errors import QueryError
from monarch_backend._testing.simulator import SimulationError
from monarch_backend._transport.local.peer import PeerGoneError
from monarch_backend._transport.network.auth import HandshakeError
from monarch_backend._transport.network.tls import CertificateError
from monarch_backend._verbs.errors import NoConnectionError, UnreachableMemoryError, VerbsError
from monarch_backend.dtensor._errors import (
    MeshClosedError,
    MeshMismatchError,
    NotReadableError,
    RankDependentError,
    RemoteOpError,
    RemoteTensorError,
)
from monarch_backend.process_group._errors import (
    CollectiveArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    NoRouteError,
    ProcessGroupError,
    RankFailedError,
)
from monarch_backend.process_group._shm.segment import SharedMemoryError

__all__ = [
    "ActorError",
    "CancelledError",
    "CertificateError",
    "CollectiveArgumentError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DeserializationError",
    "DroppedError",
    "GroupClosedError",
    "HandshakeError",
    "HostLostError",
    "JobError",
    "MeshClosedError",
    "MeshFailure",
    "MeshMismatchError",
    "MonarchError",
    "NoConnectionError",
    "NoRouteError",
    "NotReadableError",
    "OwnerLostError",
    "PeerGoneError",
    "PortClosedError",
    "ProcessGroupError",
    "QueryError",
    "RDMAError",
    "RankDependentError",
    "RankFailedError",
    "RemoteOpError",
    "RemoteTensorError",
    "ReplayError",
    "ResourceLimitError",
    "SerializationError",
    "SharedMemoryError",
    "SimulationError",
    "SpawnLimitError",
    "SupervisionError",
    "UnknownEndpointError",
    "UnreachableMemoryError",
    "VerbsError",
    "WorkspaceError",
]
