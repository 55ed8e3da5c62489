"""Modules that processes import before a mesh is made of them."""

from __future__ import annotations

import importlib
import sys

import pytest

from monarch_backend._actor.processes.start import PRELOAD_WITH_DTENSORS
from monarch_backend.actor import Actor, endpoint, this_host


class Modules(Actor):
    """Reports the imported modules of its process."""

    @endpoint
    def has(self, name: str) -> bool:
        return name in sys.modules


def test_processes_preload_modules_before_a_mesh() -> None:
    with this_host().spawn_procs({"x": 1}) as procs:
        modules = procs.spawn("modules", Modules)
        for name in (PRELOAD_WITH_DTENSORS, "torch.distributed.tensor", "monarch_backend.dtensor._worker"):
            assert modules.has.call_one(name).get(), name
        assert not modules.has.call_one("torch._dynamo").get()


def test_preload_skips_modules_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "monarch_backend.dtensor._worker", None)
    with pytest.raises(ImportError):
        importlib.import_module("monarch_backend.dtensor._worker")
    monkeypatch.delitem(sys.modules, PRELOAD_WITH_DTENSORS, raising=False)
    importlib.import_module(PRELOAD_WITH_DTENSORS)
