"""Selection of the XLA route and its rules for several devices, without torch_xla.

A recorder replaces torch_xla's group. tests/xla/test_xla_backend.py tests with the real group.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend import CollectiveArgumentError, NoRouteError
from monarch_backend.process_group import _backend_selection
from monarch_backend.process_group._xla import xla_backend
from tests.support.ranks import run_ranks


class _Recorder:
    """Replaces torch_xla's ProcessGroupXla and records the called methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._mesh: list[list[int]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append(name)


def _group(size: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: 0, _label="g")


@pytest.fixture
def world_of_4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)


def _make(ranks: list[int], size: int, options: Any = None) -> tuple[xla_backend.XlaGroup, _Recorder]:
    recorder = _Recorder()
    return xla_backend.XlaGroup(recorder, _group(size), ranks, options), recorder


@pytest.mark.parametrize(
    ("ranks", "options", "mesh"),
    [
        ([], None, [[0, 1, 2, 3]]),  # torch passes no list of ranks for the default group
        ([0, 1, 2, 3], None, [[0, 1, 2, 3]]),
        ([1, 3], None, [[1, 3]]),
        ([2], None, [[0], [1], [2], [3]]),
        ([0, 2], {"mesh": [[0, 2], [1, 3]]}, [[0, 2], [1, 3]]),
    ],
)
@pytest.mark.usefixtures("world_of_4")
def test_mesh_defines_the_participants(ranks: list[int], options: Any, mesh: list[list[int]]) -> None:
    # The meshes that torch_xla's own new_group sets. An empty mesh would mean all devices, for every group.
    assert _make(ranks, len(ranks) or 4, options)[1]._mesh == mesh


@pytest.mark.parametrize("name", ["gather", "scatter", "alltoall", "send", "recv"])
@pytest.mark.usefixtures("world_of_4")
def test_collectives_that_ignore_the_subgroup_are_refused_there(name: str) -> None:
    whole, recorder = _make([0, 1, 2, 3], 4)
    getattr(whole, name)([], [])
    assert recorder.calls == [name]
    part, recorder = _make([1, 3], 2)
    with pytest.raises(NoRouteError, match=f"{name} on route xla -> xla: torch_xla's group does it for all ranks only"):
        getattr(part, name)
    assert recorder.calls == []


@pytest.mark.usefixtures("world_of_4")
def test_reduce_and_all_to_all_single_on_a_subgroup_are_refused() -> None:
    part, recorder = _make([1, 3], 2)
    total = SimpleNamespace(reduceOp=dist.ReduceOp.SUM)
    for call in (lambda: part.reduce([], total), lambda: part.alltoall_base(None, None, [], [], None)):
        with pytest.raises(NoRouteError, match="Use the default group"):
            call()
    part.allreduce([], total)
    part.reduce_scatter([], [], total)
    part._reduce_scatter_base(None, None, total)
    part.allgather([], [], None)
    assert recorder.calls == ["allreduce", "reduce_scatter", "_reduce_scatter_base", "allgather"]
    with pytest.raises(CollectiveArgumentError, match="no reduce op AVG"):
        part.allreduce([], SimpleNamespace(reduceOp=dist.ReduceOp.AVG))


@pytest.mark.usefixtures("world_of_4")
def test_a_group_without_its_ranks_is_refused() -> None:
    with pytest.raises(NoRouteError, match="made by split_group"):
        _make([], 2)


@pytest.mark.usefixtures("world_of_4")
def test_unknown_attributes_are_absent() -> None:
    # c10d asks for optional methods with hasattr. Forwarding would offer methods that ProcessGroup only inherits.
    group, _ = _make([], 4)
    assert not hasattr(group, "supports_coalescing")
    assert not hasattr(group, "_register_on_completion_hook")


def _forget(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    monkeypatch.delitem(sys.modules, "torch_xla", raising=False)
    monkeypatch.delitem(sys.modules, "torch_xla.runtime", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: version and object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)


def test_missing_torch_xla_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    _forget(monkeypatch, None)
    assert _backend_selection.choose("xla").missing.startswith(
        "torch_xla is not installed; pip install 'monarch_backend[xla]'"
    )
    _forget(monkeypatch, "2.5.0")
    assert "torch_xla 2.5.0 was built for another torch than" in _backend_selection.choose("xla").missing
    _forget(monkeypatch, torch.__version__)
    assert _backend_selection.choose("xla").available
    monkeypatch.setitem(sys.modules, "torch_xla.runtime", SimpleNamespace(is_spmd=lambda: True))
    assert "torch_xla is in SPMD mode" in _backend_selection.choose("xla").missing


def _broken_import(rank: int) -> str:
    sys.modules["torch_xla.distributed.xla_backend"] = None  # type: ignore[assignment] # makes its import fail
    with pytest.raises(NoRouteError) as caught:
        xla_backend.make(dist.group.WORLD, _Recorder, [], None)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_torch_xla_that_can_t_be_imported_is_named() -> None:
    [text] = run_ranks(_broken_import, 1)
    assert "torch_xla is installed and can't be imported with torch" in text
