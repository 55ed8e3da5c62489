"""Public exceptions: their base class, the module that exports all of them, and their public paths."""

from __future__ import annotations

import importlib
import pickle
import pkgutil

import pytest
from torch.distributed import DistError

import monarch_backend
from monarch_backend import errors
from monarch_backend._core.errors import MonarchError
from monarch_backend.actor import CancelledError

FACADES = [
    module.name
    for module in pkgutil.walk_packages(monarch_backend.__path__, "monarch_backend.")
    if "._" not in module.name
]

BUILTIN_BASES = {
    "ActorError": RuntimeError,
    "CancelledError": BaseException,
    "CertificateError": ValueError,
    "CollectiveArgumentError": ValueError,
    "CollectiveTimeoutError": DistError,
    "DeadlockError": RuntimeError,
    "DeserializationError": RuntimeError,
    "HandshakeError": ConnectionError,
    "HostLostError": RuntimeError,
    "JobError": RuntimeError,
    "MeshMismatchError": ValueError,
    "NoRouteError": NotImplementedError,
    "PeerGoneError": ConnectionError,
    "PortClosedError": RuntimeError,
    "ProcessGroupError": DistError,
    "RDMAError": RuntimeError,
    "RankFailedError": DistError,
    "RemoteTensorError": RuntimeError,
    "ResourceLimitError": RuntimeError,
    "SerializationError": TypeError,
    "SharedMemoryError": MemoryError,
    "SimulationError": RuntimeError,
    "SpawnLimitError": RuntimeError,
    "SupervisionError": RuntimeError,
    "UnknownEndpointError": AttributeError,
    "VerbsError": ConnectionError,
    "WorkspaceError": ValueError,
}


def _exceptions(module: str) -> dict[str, type[BaseException]]:
    """Return the exceptions that a module exports."""
    found = importlib.import_module(module)
    kinds = {name: getattr(found, name) for name in getattr(found, "__all__", ())}
    return {name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseException)}


@pytest.mark.parametrize("module", ["monarch_backend", *FACADES])
def test_errors_has_each_public_exception(module: str) -> None:
    for name, kind in _exceptions(module).items():
        assert getattr(errors, name, None) is kind, f"monarch_backend/errors.py has no {module}.{name}"
        assert name in errors.__all__


@pytest.mark.parametrize("name", errors.__all__)
def test_public_exception_derives_from_the_base(name: str) -> None:
    kind = getattr(errors, name)
    if kind is CancelledError:  # `except Exception` must not catch it
        assert not issubclass(kind, Exception)
    else:
        assert issubclass(kind, MonarchError)


@pytest.mark.parametrize("name", errors.__all__)
def test_public_exception_has_a_public_path(name: str) -> None:
    kind = getattr(errors, name)
    assert not any(part.startswith("_") for part in kind.__module__.split("."))
    assert getattr(importlib.import_module(kind.__module__), name) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind


@pytest.mark.parametrize("name", BUILTIN_BASES)
def test_public_exception_keeps_its_builtin_base(name: str) -> None:
    assert issubclass(getattr(errors, name), BUILTIN_BASES[name])


def test_public_module_of_an_exception_is_a_facade() -> None:
    assert {getattr(errors, name).__module__ for name in errors.__all__} <= {"monarch_backend", *FACADES}
