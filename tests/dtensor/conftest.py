"""Worker meshes that the DTensor tests share: one controller and as many processes as a test needs.

If MONARCH_TEST_XLA_PYTHON names a Python with torch_xla (`make test-xla`), workers run there and hold XLA tensors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import monarch_backend.actor as ma
from monarch_backend._core import patches
from monarch_backend._core.torch_version import torch_version
from monarch_backend.actor import MeshFailure, ProcMesh, this_host
from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._patches import manifest
from monarch_backend.dtensor._patches.semantics import rank_functions
from tests.actor.script_runner import Run, WarmInterpreter, with_meshes
from tests.dtensor import xla_selection
from tests.support import xla
from tests.support.tiers import slow_except

FOLDER = Path(__file__).parent
DEVICE = "xla" if xla.PYTHON else "cpu"
"""Device type of all worker meshes that the fixtures here make."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the DTensor tests that xla_selection.py leaves out on XLA devices.

    pytest passes the tests of all folders to each conftest.py, so tests outside this folder are kept.
    """
    if not xla.PYTHON:
        return
    chosen = {id(each) for each in xla_selection.choose([each for each in items if FOLDER in each.path.parents])}
    left_out = [each for each in items if FOLDER in each.path.parents and id(each) not in chosen]
    config.hook.pytest_deselected(items=left_out)
    out = set(map(id, left_out))
    items[:] = [each for each in items if id(each) not in out]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Skip a test if it fails because the running release of torch lacks a feature.

    After a failed test, also read the failures of its operations. Otherwise a later test would raise them.
    """
    try:
        return (yield)
    except pytest.fail.Exception:
        read_failures(item)
        raise
    except Exception as error:
        read_failures(item)
        reason = next((each for each in _too_old() if each in str(error)), None)
        if reason is None:
            raise
        raise pytest.skip.Exception(reason) from error


def read_failures(item: pytest.Item) -> None:
    """Wait for the workers of the shared meshes, and drop the failures of their operations."""
    procs: dict[str, ProcMesh] = getattr(item, "funcargs", {}).get("all_procs", {})
    for each in procs.values():
        with contextlib.suppress(Exception):  # the test's own error is reported
            workers_of(each.device_mesh(DEVICE)).synchronize()


def _too_old() -> list[str]:
    """Return the error texts for features that need a newer release of torch than the running one."""
    found = [rank_functions.NO_NEW_GROUP] if torch_version() < (2, 13) else []
    for feature in (manifest.CHECKPOINTS, manifest.FSDP2, manifest.CAPTURED):
        if torch_version() < feature.since:
            with pytest.raises(patches.FeatureUnavailableError) as refused:
                patches.require(feature)
            found.append(str(refused.value))
    return found


SIZES: dict[str, dict[str, int]] = {"2": {"x": 2}, "3": {"x": 3}, "2x2": {"dp": 2, "tp": 2}}

ORDINARY = tuple(SIZES) if xla.PYTHON else ("3", "2x2")
"""Shapes of the ordinary run; the slow run has the others too.

On XLA devices the ordinary run keeps all shapes, because xla_selection.py then selects one parametrization of each
test.
"""

LAST_ROW = "last row"
"""Name of a sub-mesh with two of four processes. It excludes the first process, from which values are usually read."""

# Three-dimensional meshes of the four processes of "2x2".
CUBES: dict[str, dict[str, Any]] = {
    "2x1x2": {"dp": ("dp", "cp"), "cp": 1},
    "1x2x2": {"dp": ("pp", "dp"), "pp": 1},
    "2x2x1": {"tp": ("tp", "ep"), "ep": 1},
}


@pytest.fixture(scope="package", autouse=True)
def all_procs() -> Iterator[dict[str, ProcMesh]]:
    """Processes by the name of their mesh shape. A failure that no test waits for makes the last test fail."""
    strays: list[MeshFailure] = []
    ending, ma.unhandled_fault_hook = ma.unhandled_fault_hook, strays.append
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(xla.xla_host()) if xla.PYTHON else None
        made = {name: (hosts or this_host()).spawn_procs(sizes) for name, sizes in SIZES.items()}
        procs = made if hosts is None else {name: each.slice(hosts=0) for name, each in made.items()}
        for each in procs.values():
            each.device_mesh(DEVICE)
        yield procs
        for each in made.values():
            each.stop().get(30)
    assert not dist.is_initialized(), (
        "the controller has left torch's default group behind, which forked ranks would have"
    )
    ma.unhandled_fault_hook = ending
    assert not strays, "failures that no test has waited for: " + "; ".join(failure.report() for failure in strays)


@pytest.fixture
def mesh_of(all_procs: dict[str, ProcMesh]) -> Callable[[str], Any]:
    """``mesh_of("2x2")`` returns a device mesh of that shape; ``mesh_of(LAST_ROW)`` returns the last row of "2x2"."""

    def made(name: str) -> Any:
        of = "2x2" if name == LAST_ROW else name
        if of not in all_procs:
            pytest.skip(f"there are no {of} processes in this run")
        procs = all_procs[of]
        return (procs.slice(dp=1) if name == LAST_ROW else procs).device_mesh(DEVICE)

    return made


def part_of(mesh_of: Callable[[str], Any], name: str) -> Any:
    """``part_of(mesh_of, "2x2 tp")`` returns dimension "tp" of that mesh; without a dimension, as ``mesh_of``."""
    size, *of = [name] if name == LAST_ROW else name.split()
    return mesh_of(size)[of[0]] if of else mesh_of(size)


@pytest.fixture(params=slow_except([*SIZES, LAST_ROW], *ORDINARY))
def mesh(request: pytest.FixtureRequest, mesh_of: Callable[[str], Any]) -> Any:
    """A device mesh, parametrized over the shapes."""
    return mesh_of(request.param)


@pytest.fixture(params=slow_except(["2", "3", LAST_ROW], *(name for name in ORDINARY if name != "2x2")))
def line(request: pytest.FixtureRequest, mesh_of: Callable[[str], Any]) -> Any:
    """A device mesh of one dimension."""
    return mesh_of(request.param)


@pytest.fixture(params=["2x1x2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1x2x2", "2x2x1", "2x2x2"))])
def cube(request: pytest.FixtureRequest, all_procs: dict[str, ProcMesh]) -> Iterator[ProcMesh]:
    """Processes in three dimensions. The slow run has all arrangements of four processes, and 2x2x2 with eight."""
    if request.param in CUBES:
        yield all_procs["2x2"].split(**CUBES[request.param])
        return
    with this_host().spawn_procs({"dp": 2, "cp": 2, "tp": 2}) as procs:
        yield procs


@pytest.fixture(autouse=True)
def _same_numbers(all_procs: Any) -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="package")
def interpreter(all_procs: dict[str, ProcMesh]) -> Iterator[WarmInterpreter]:
    with with_meshes() as interpreter:
        yield interpreter


@pytest.fixture
def run_script(interpreter: WarmInterpreter, tmp_path: Path) -> Callable[..., Run]:
    """``run_script(source, env={...})`` runs a program to its end."""
    return functools.partial(interpreter.complete, tmp_path / "script.py")


def workers_of(mesh: Any) -> Any:
    """Return the worker set of a mesh, for tests of the controller's internals."""
    return controller_mesh.workers_of(mesh)
