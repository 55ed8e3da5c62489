"""process_group/_c10d_internals.py finds the private parts of torch that it needs. One test per function."""

from __future__ import annotations

import inspect
import sys
from types import FrameType

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_backend.process_group import MonarchProcessGroup, Options, _c10d_internals
from tests.support.ranks import run_ranks


def _creation(rank: int, address: str) -> list[dict[str, str] | None]:
    seen = []

    def creator(options: object, pg_options: object) -> object:
        seen.append(_c10d_internals.creation())
        return MonarchProcessGroup(options, Options(), _c10d_internals.Creation())

    dist.Backend.register_backend("spy", creator, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("cpu:spy,cuda:gloo", init_method=address, rank=rank, world_size=1)
    dist.new_group([0], backend="spy")
    dist.destroy_process_group()
    assert all(c.device_id is None and c.split_from is None for c in seen)
    return [c.device_map for c in seen]


def test_group_creation_reads_the_callers_frame() -> None:
    first, second = run_ranks(_creation, 1, backend=None)[0]
    assert first == {"cpu": "spy", "cuda": "gloo"}
    assert second == {"cpu": "spy", "cuda": "spy"}


def test_group_creation_without_the_frame_is_empty() -> None:
    assert _c10d_internals.creation() == _c10d_internals.Creation(None, None, None)


def test_group_creation_names_are_locals_of_torchs_helper() -> None:
    names = c10d._new_process_group_helper.__code__.co_varnames + c10d._new_process_group_helper.__code__.co_cellvars
    assert {"backend_config", "device_id", "split_from"} <= set(names)


def _watched(rank: int) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    assert not _c10d_internals.watched()
    with Mode():
        assert _c10d_internals.watched()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _c10d_internals.watched()
    from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx

    with allow_inflight_collective_as_graph_input_ctx():
        assert _c10d_internals.watched()
    assert not _c10d_internals.watched()


def test_is_observed_sees_modes_profiler_and_hooks(pool) -> None:
    pool(1).run(_watched)


def test_unset_timeout_is_the_default_of_c10d() -> None:
    assert _c10d_internals.UNSET_TIMEOUT.total_seconds() < 0


def test_backend_types() -> None:
    kinds = dist.ProcessGroup.BackendType
    assert (_c10d_internals.backend_type("gloo"), _c10d_internals.backend_type("nccl")) == (kinds.GLOO, kinds.NCCL)
    assert _c10d_internals.backend_type("somebody's") == kinds.CUSTOM


def _detail(rank: int) -> tuple[str, bool]:
    dist.set_debug_level_from_env()
    group = dist.new_group([0, 1])
    inner = group._get_backend(torch.device("cpu"))
    dist.all_reduce(torch.ones(1), group=group)
    return type(inner).__name__, isinstance(_c10d_internals.peel(inner), dist.ProcessGroupGloo)


def test_debug_wrapper_is_added_and_removed() -> None:
    assert run_ranks(_detail, 2, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}) == [("_ProcessGroupWrapper", True)] * 2


def test_blocking_calls_of_torch_wait_for_their_work() -> None:
    """`is_waited_for` relies on this: send and recv call isend and irecv, and wait for the returned works."""
    for blocking, starts in ((dist.send, "isend"), (dist.recv, "irecv")):
        function = inspect.unwrap(blocking)
        assert function.__code__ in _c10d_internals._BLOCKING
        source = inspect.getsource(function)
        assert starts in function.__code__.co_names or "group.send" in source or "pg.recv" in source
        assert "wait()" in source
    assert {inspect.unwrap(f).__code__ for f in (dist.isend, dist.irecv)} == _c10d_internals._NON_BLOCKING


def _messages(rank: int) -> list[bool]:
    seen: list[bool] = []
    original = _c10d_internals.is_waited_for

    def spy(frame: FrameType | None) -> bool:
        seen.append(original(frame))
        return seen[-1]

    _c10d_internals.is_waited_for = spy
    dist.group.WORLD._end_fast_paths()  # their own check is in test_message_paths.py
    x = torch.zeros(3)
    for turn in range(2):
        if rank == turn:
            dist.send(x, 1 - rank)
            dist.isend(x, 1 - rank).wait()
            dist.group.WORLD.send([x], 1 - rank, 0).wait()
        else:
            dist.recv(x, 1 - rank)
            dist.irecv(x, 1 - rank).wait()
            dist.group.WORLD.recv([x], 1 - rank, 0).wait()
    return seen


@pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's")
def test_only_blocking_calls_wait() -> None:
    assert run_ranks(_messages, 2) == [[True, False, False] * 2] * 2


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.25)])
def test_factor_of_a_premultiplied_sum_is_in_its_state(factor: float | torch.Tensor) -> None:
    kind, found = dist._make_nccl_premul_sum(factor).__getstate__()
    assert float(found) == float(factor)
    assert kind == 8 or "PREMUL" in str(kind)


def test_profiled_range_has_shapes() -> None:
    with (
        torch.autograd.profiler.profile(record_shapes=True) as seen,
        _c10d_internals.profiled("shm:x", [torch.ones(2, 3)]),
    ):
        pass
    (event,) = [event for event in seen.function_events if event.name == "shm:x"]
    assert event.input_shapes == [[2, 3]]


def _files_that_dynamo_sees(rank: int) -> set[str]:
    """Call the group's methods as C++ does, with a callback that receives each Python frame as TorchDynamo would."""
    from torch._C._dynamo.eval_frame import set_eval_frame
    from torch._dynamo.types import ConvertFrameReturn

    def callback(frame: object, *_: object) -> object:
        seen.add(frame.f_code.co_filename)  # type: ignore[attr-defined]
        return ConvertFrameReturn()

    def call(x: torch.Tensor) -> None:
        group.allreduce([x]).wait()
        group.broadcast([x]).wait()
        group.barrier().wait()

    seen: set[str] = set()
    group, x = dist.group.WORLD, torch.ones(3)
    previous = set_eval_frame(callback)
    try:
        call(x)
    finally:
        set_eval_frame(previous)
    return seen


def test_dynamo_sees_no_frame_of_the_group() -> None:
    for seen in run_ranks(_files_that_dynamo_sees, 1):
        assert __file__ in seen
        assert not [file for file in seen if "monarch_backend/process_group" in file]
