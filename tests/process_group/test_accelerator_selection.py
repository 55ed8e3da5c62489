"""Selection, options and refusals of the accelerator routes, without an accelerator.

tests/gpu, tests/xla and tests/tpu run the groups themselves.
"""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import monarch_backend
from monarch_backend import Options
from monarch_backend.process_group import _backend_selection, _c10d_internals


@pytest.mark.parametrize(
    ("built", "gpus", "nccl", "hip", "words"),
    [
        (False, False, False, None, "install a CUDA or ROCm build"),
        (True, False, True, None, "torch sees no NVIDIA GPU"),
        (True, False, True, "6.4", "torch sees no AMD GPU"),
        (True, True, False, None, "without NCCL"),
        (True, True, False, "6.4", "without RCCL"),
    ],
)
def test_cuda_selection_without_cuda_names_the_missing_part(
    monkeypatch: pytest.MonkeyPatch, built: bool, gpus: bool, nccl: bool, hip: str | None, words: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    monkeypatch.setattr(torch.version, "hip", hip)
    route = _backend_selection.choose("cuda")
    assert not route.available
    assert words in route.missing


@pytest.mark.parametrize(("hip", "library"), [(None, "NCCL"), ("6.4", "RCCL")])
def test_gpu_tensors_take_the_library_of_their_vendor(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, library: str
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", hip)
    route = _backend_selection.choose("cuda")
    assert route.available
    assert route.backend == "nccl"  # torch calls RCCL's group by the same name
    assert library in route.why


def test_backend_named_by_the_user_is_taken() -> None:
    device_map = {"cpu": "monarch", "cuda": "gloo"}
    assert _backend_selection.choose("cuda", device_map).backend == "gloo"
    assert "asked for" in _backend_selection.choose("cuda", device_map).why
    assert _backend_selection.choose("cpu", device_map).backend == "gloo"


class _FakeNccl:
    """Accepts ProcessGroupNCCL's arguments. The real class cannot be constructed without a GPU."""

    class Options:
        def __init__(self) -> None:
            self.is_high_priority_stream = True

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.options, self.sequence = options, False

    def _set_sequence_number_for_group(self) -> None:
        self.sequence = True


def _opts() -> SimpleNamespace:
    seconds = datetime.timedelta(seconds=5)
    return SimpleNamespace(
        store=None, group_rank=0, group_size=2, timeout=seconds, group_id="g", global_ranks_in_group=[0, 1]
    )


@pytest.mark.parametrize("split", [None, object()])
def test_nccl_gets_the_options_that_torch_would_give(monkeypatch: pytest.MonkeyPatch, split: object) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", _FakeNccl, raising=False)
    made = _c10d_internals._make_nccl(_opts(), None, split)
    options = vars(made.options)
    assert made.sequence
    assert options["_timeout"] == datetime.timedelta(seconds=5)
    assert (options["group_name"], options["global_ranks_in_group"]) == ("g", [0, 1])
    assert options["is_high_priority_stream"] is False
    assert options.get("split_from") is split
    assert ("split_color" in options) == (split is not None)


def test_nccl_options_of_the_user_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "ProcessGroupNCCL", _FakeNccl, raising=False)
    given = _FakeNccl.Options()
    assert _c10d_internals._make_nccl(_opts(), given, None).options is given
    assert given.is_high_priority_stream is True


def test_options_go_to_the_route_of_their_device() -> None:
    given = object()
    assert Options.parse(Options(by_device={"cuda": given})).for_device("cuda") is given
    assert Options.parse(None).for_device("cuda") is None
    named = type("Options", (), {"__qualname__": "ProcessGroupNCCL.Options"})()
    assert Options.parse(named).for_device("cuda") is named
    with pytest.raises(TypeError, match="pg_options of type int"):
        Options.parse(3)


def test_machine_routes_without_a_group() -> None:
    routes = monarch_backend.routes()
    assert routes["cpu"].available
    assert all(r.available for r in routes.values())
    assert {"cpu", "cuda", "xla", "tpu"} <= set(_backend_selection.survey())
