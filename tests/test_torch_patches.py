"""Names of torch that exclude a new backend: each still exists, and its replacement works.

One test for each row of docs/reference/torch-names.md. A failure means that torch has changed. Then remove or change
the row, its replacement in process_group/_c10d_patches.py, or both.
"""

from __future__ import annotations

import datetime
import inspect
import re
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_backend._core.torch_version import torch_version
from monarch_backend.process_group import _c10d_patches
from tests.support.ranks import run_ranks

NAMES = sorted(_c10d_patches.FIXED_IN)


@pytest.mark.parametrize("name", NAMES)
def test_stand_in_exists_only_where_torch_needs_it(name: str) -> None:
    function = getattr(dist, name)
    assert function is getattr(c10d, name)
    replaced = hasattr(function, "__wrapped__") and function.__module__ == c10d.__name__
    assert replaced == (torch_version() < _c10d_patches.FIXED_IN[name])


@pytest.mark.parametrize(
    ("name", "special_case"),
    [("monitored_barrier", "!= Backend.GLOO"), ("batch_isend_irecv", "type(group) is ProcessGroup")],
)
def test_torch_still_has_the_special_case(name: str, special_case: str) -> None:
    # 2.9 compares with ==
    source = inspect.getsource(inspect.unwrap(getattr(c10d, name))).replace("type(group) ==", "type(group) is")
    assert (special_case in source) == (torch_version() < (2, 14))


def test_batch_isend_irecv_of_every_torch_has_a_stand_in() -> None:
    assert dist.batch_isend_irecv is c10d.batch_isend_irecv
    assert dist.batch_isend_irecv.__wrapped__.__module__ == c10d.__name__


def test_rendezvous_is_watched_by_the_name_that_init_process_group_calls() -> None:
    source = inspect.getsource(inspect.unwrap(dist.init_process_group))
    assert re.search(r"= rendezvous\(\s*not_none\(init_method\), rank, world_size, timeout=timeout\s*\)", source)
    assert source.index("backend = Backend(backend)") < source.index("= rendezvous(")
    assert "backend" in inspect.unwrap(dist.init_process_group).__code__.co_varnames
    assert c10d.rendezvous.__wrapped__ is dist.rendezvous
    assert not hasattr(inspect.unwrap(dist.init_process_group), "__wrapped__")


@pytest.mark.parametrize(
    ("backend", "ours"),
    [
        ("monarch", True),
        ("cpu:monarch,cuda:nccl", True),
        ("cpu:gloo,cuda:monarch", True),
        ("gloo", False),
        ("cpu:gloo,cuda:nccl", False),
        ("monarchy", False),
        ("undefined", False),
    ],
)
def test_only_our_rendezvous_leaves_torch_s_function(backend: str, ours: bool) -> None:
    def init_process_group(backend: str) -> bool:
        return _c10d_patches._initialises_ours(sys._getframe())

    assert init_process_group(dist.Backend(backend.upper())) == ours
    assert not _c10d_patches._initialises_ours(sys._getframe())


def _monitored(rank: int) -> None:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=20))
    dist.monitored_barrier(dist.group.WORLD, wait_all_ranks=True)
    with pytest.raises(TypeError, match="timedelta"):
        dist.monitored_barrier(timeout="soon")


def test_monitored_barrier(pool) -> None:
    pool(2).run(_monitored)


def _monitored_late(rank: int) -> str:
    store = dist.group.WORLD.get_group_store()
    if rank == 0:
        with pytest.raises(RuntimeError, match="Rank 1 failed to pass monitoredBarrier") as caught:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
        store.set("done", "1")
        return str(caught.value)
    store.wait(["done"], datetime.timedelta(seconds=30))
    return ""


def test_monitored_barrier_names_the_late_rank() -> None:
    run_ranks(_monitored_late, 2)


def _other_backend(rank: int) -> None:
    group = dist.new_group([0, 1], backend="gloo")
    dist.monitored_barrier(group)
    tensors = [torch.full((2,), float(rank)), torch.empty(2)]
    ops = [dist.P2POp(dist.isend, tensors[0], 1 - rank, group), dist.P2POp(dist.irecv, tensors[1], 1 - rank, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert tensors[1].tolist() == [1.0 - rank] * 2


def test_other_backends_reach_torch_s_own_function(pool) -> None:
    pool(2).run(_other_backend)


class _Recorder:
    """Replaces NCCL's group on a machine without GPUs. It supports coalescing and records the order of calls."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _start_coalescing(self) -> None:
        self.calls.append("start")

    def _end_coalescing(self) -> None:
        self.calls.append("end")

    def send(self, tensors: object, rank: int, tag: int) -> None:
        self.calls.append("send")

    def recv(self, tensors: object, rank: int, tag: int) -> None:
        self.calls.append("recv")


def _coalesced(rank: int) -> list[str]:
    group = dist.new_group([0, 1])
    recorder = _Recorder()
    group._end_fast_paths()  # NCCL's tensors take none
    group._inner["cpu"], group._shm = recorder, None
    ops = [dist.P2POp(op, torch.ones(1), 1 - rank, group) for op in (dist.isend, dist.irecv)]
    dist.batch_isend_irecv(ops)
    return recorder.calls


def test_a_batch_is_coalesced_where_the_route_can(pool) -> None:
    assert pool(2).run(_coalesced) == [["start", "send", "recv", "end"]] * 2


def _names(rank: int) -> tuple[str, str, str]:
    group = dist.group.WORLD
    return dist.get_backend(), group.name(), dist.get_backend_config()


def test_group_reports_its_backend_name(pool) -> None:
    # ProcessGroup::getBackendName returns "custom" for a compiled plugin. A subclass of ProcessGroup returns its own
    # name.
    assert pool(2).run(_names) == [("monarch", "monarch", "cpu:monarch,cuda:monarch")] * 2


def _sequence(rank: int) -> int:
    group = dist.new_group([0, 1])
    before = group._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1), group=group)
    return group._get_sequence_number_for_group() - before


def test_sequence_numbers(pool) -> None:
    # ProcessGroup::backendSupportsSequenceNumbers knows four names. Our group asks its inner group.
    assert pool(2).run(_sequence) == [1, 1]


def _timeouts(rank: int) -> None:
    group = dist.new_group([0, 1])
    set_timeout = getattr(dist, "set_timeout", c10d._set_pg_timeout)  # the function's name from torch 2.14 on
    set_timeout(datetime.timedelta(seconds=7), group)
    gloo = group._get_backend(torch.device("cpu"))
    assert gloo.options._timeout == datetime.timedelta(seconds=7)


def test_set_pg_timeout_reaches_gloo(pool) -> None:
    # distributed_c10d.py:_set_pg_timeout looks for instances of torch's own groups behind `_get_backend`.
    pool(2).run(_timeouts)


def test_torchcomms_takes_every_name_on_2_13() -> None:
    # TORCH_DISTRIBUTED_USE_TORCHCOMMS=1 sends every backend but "fake" to torchcomms.new_comm on 2.13. The README
    # documents it.
    source = inspect.getsource(c10d._new_process_group_helper)
    if torch_version() == (2, 13):
        assert "_use_torchcomms_enabled() and backend_str not in [Backend.FAKE]" in source


def test_old_autograd_all_gather_refuses_other_names() -> None:
    # torch.distributed.nn.functional is deprecated in favour of _functional_collectives. This is documented and not
    # patched.
    from torch.distributed.nn import functional

    source = inspect.getsource(functional._AllGatherBase.backward)
    assert "Backend not supported!" in source
    assert "dist.Backend.NCCL" in source


def test_default_timeout_knows_nccl_only() -> None:
    # Documented, not patched: our groups get 30 minutes by default where "nccl" gets 10. Users can pass timeout=.
    assert c10d._get_default_timeout("monarch") == dist.default_pg_timeout
    source = inspect.getsource(c10d._get_default_timeout)
    assert "Backend.NCCL" in source and "default_pg_nccl_timeout" in source
