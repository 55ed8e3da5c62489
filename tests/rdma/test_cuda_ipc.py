"""Functions of torch that _rdma/routes/cuda_ipc.py needs. test_gpu_memory.py and tests/gpu test their use."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from monarch_backend._rdma.registrations import Handle
from monarch_backend._rdma.routes import cuda_ipc
from monarch_backend.rdma import RDMAError


def test_reduce_tensor_returns_the_expected_arguments() -> None:
    """Both sides must have the same parameters, because `reduce_tensor` returns the values of nearly all of them."""
    assert list(inspect.signature(reductions.rebuild_cuda_tensor).parameters) == [
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip
    source = inspect.getsource(reductions.reduce_tensor)
    assert "_share_cuda_()" in source and "rebuild_cuda_tensor," in source
    assert "_new_shared_cuda(" in inspect.getsource(reductions.rebuild_cuda_tensor)
    for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"):
        assert hasattr(torch.UntypedStorage, name)


def test_counter_files_are_removed_once() -> None:
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert parameters.index("ref_counter_handle") == cuda_ipc._COUNTER_FILE
    name = f"/torch_{os.getpid()}_test"
    file = Path("/dev/shm" + name)
    file.touch()
    runtime: Any = SimpleNamespace(last=[])
    files = cuda_ipc.CounterFiles(runtime)
    files.names |= {name, "/torch_0_gone"}
    (remove,) = runtime.last
    remove()
    assert not file.exists()
    assert not files.names


@pytest.mark.parametrize("keep", [bytearray(8), torch.zeros(2).untyped_storage()], ids=["array", "cpu"])
def test_memory_not_allocated_by_torch_is_refused(keep: Any) -> None:
    with pytest.raises(RDMAError, match="no tensor's memory"):
        cuda_ipc.share(keep, 0)


def _torch_mappings(succeeds: bool) -> tuple[cuda_ipc.TorchMappings, list[Any]]:
    """Return the mappings of a fake program without peers, and the list of calls that it schedules."""
    later: list[Any] = []
    program: Any = SimpleNamespace(
        run_in_thread=lambda call: call(),
        progress=SimpleNamespace(later=lambda _, call: later.append(call)),
        router=SimpleNamespace(peer=lambda token: token),
    )
    native = SimpleNamespace(add_external_mapping=lambda *_: succeeds, take_unused_mappings=list)
    return cuda_ipc.TorchMappings(program, SimpleNamespace(native=native)), later  # type: ignore[arg-type]


def _handle(number: int) -> Handle:
    return Handle("token", 1, "host", (number, 1, 1), 0, 8, "cuda:0", True)


def test_few_refusals_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def ask(_: Any, __: Any, ___: str, question: bytes) -> bytes:
        asked.append(question)
        raise RDMAError("no")

    monkeypatch.setattr(cuda_ipc, "ask", ask)
    monkeypatch.setattr(cuda_ipc, "MAX_CACHED_REFUSALS", 3)
    mappings, later = _torch_mappings(True)
    for number in [*range(4), 3, 2, 1]:
        mappings.request(_handle(number))
    assert len(asked) == 4, "those that are remembered are not asked for again"
    assert [bool(mappings.why_not(_handle(number))) for number in range(4)] == [False, True, True, True]
    assert mappings.why_not(_handle(3)) == "RDMAError: no"
    mappings.request(_handle(0))
    assert len(asked) == 5
    assert not mappings._requested and len(mappings._refused) == 3
    mappings.forget("token")
    assert not mappings._refused and not later


def test_mappings_of_an_ended_owner_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "ask", lambda *_: b"")
    monkeypatch.setattr(cuda_ipc, "adopt", lambda _: (object(), 4096))
    mappings, later = _torch_mappings(False)
    mappings.request(_handle(1))
    assert not mappings._mapped and not mappings._requested and not later
    mappings, later = _torch_mappings(True)
    mappings.request(_handle(1))
    assert len(mappings._mapped) == len(later) == 1
    mappings.request(_handle(2))
    assert len(later) == 1, "one looks for all"
