"""Bad arguments raise a clear error on every rank that passed them, and the group keeps working.

This module tests errors in arguments. It does not test ranks that disagree with each other, or that die.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

import monarch_backend
from monarch_backend import CollectiveArgumentError, GroupClosedError, NoRouteError, RankFailedError
from tests.support.ranks import run_ranks

ONES = torch.ones


def _cases(rank: int) -> dict[str, tuple[Callable[[], Any], type[BaseException], tuple[str, ...]]]:
    """Return name -> (call with a mistake, type of the error, words that the message must contain)."""
    wrong = CollectiveArgumentError
    return {
        "short output list": (lambda: dist.all_gather([ONES(4)], ONES(4)), wrong, ("1 tensors", "2 ranks")),
        "long output list": (lambda: dist.all_gather([ONES(4)] * 3, ONES(4)), wrong, ("3 tensors", "2 ranks")),
        "uneven output list": (lambda: dist.all_gather([ONES(4), ONES(5)], ONES(4)), wrong, ("tensor 1", "[5]", "[4]")),
        "other dtype in list": (
            lambda: dist.all_gather([ONES(4), ONES(4).int()], ONES(4)),
            (wrong, ValueError),
            ("dtype",),
        ),
        "short input list": (lambda: dist.reduce_scatter(ONES(4), [ONES(4)]), wrong, ("1 tensors",)),
        "short exchange": (lambda: dist.all_to_all([ONES(4)], [ONES(4)]), wrong, ("output list",)),
        "gather size": (lambda: _gather_single(ONES(9), ONES(4)), wrong, ("[9]", "[4]", "2")),
        "scatter size": (lambda: _scatter_single(ONES(9), ONES(4)), wrong, ("[9]", "[4]")),
        "non-contiguous output": (
            lambda: dist.all_to_all_single(ONES(4, 8).t(), ONES(8, 4)),
            wrong,
            ("not contiguous",),
        ),
        "lazy conjugate": (
            lambda: dist.group.WORLD.broadcast(ONES(4).cfloat().conj(), 0),
            wrong,
            ("conjugate", "resolve_conj"),
        ),
        "lazy negation": (lambda: dist.all_reduce(ONES(4).cfloat().conj().imag), wrong, ("negation", "resolve_neg")),
        "subclass in a list": (lambda: dist.all_gather([_pending()] * 2, ONES(4)), wrong, ("AsyncCollectiveTensor",)),
        "unpaired lists": (
            lambda: dist.group.WORLD.reduce_scatter([ONES(4)], [[ONES(4)] * 2] * 2),
            wrong,
            ("1 and 2 entries",),
        ),
        "unpaired rows": (
            lambda: dist.group.WORLD.allgather_coalesced([[ONES(4)], [ONES(4)]], [ONES(4), ONES(4)]),
            wrong,
            ("1 and 2 entries",),
        ),
        "non-contiguous send": (lambda: dist.send(ONES(4, 4).t(), 1 - rank), (wrong, ValueError), ("contiguous",)),
        "splits": (lambda: dist.all_to_all_single(ONES(4), ONES(4), [1, 1], [3, 1]), wrong, ("[1, 1]", "4")),
        "uneven rows": (lambda: dist.all_to_all_single(ONES(3), ONES(3)), wrong, ("3 rows", "split sizes")),
        "dtype": (lambda: dist.all_reduce(ONES(4).to(torch.float8_e8m0fnu)), wrong, ("e8m0fnu", "bfloat16", "int64")),
        "op for floats": (lambda: dist.all_reduce(ONES(4), dist.ReduceOp.BXOR), wrong, ("BXOR", "float32", "int32")),
        "op for bools": (lambda: dist.all_reduce(ONES(4).bool(), dist.ReduceOp.AVG), wrong, ("AVG", "bool", "cast")),
        "scaled integers": (
            lambda: dist.all_reduce(ONES(2).int(), dist._make_nccl_premul_sum(2.0)),  # type: ignore[attr-defined]
            wrong,
            ("PREMUL_SUM", "int32"),
        ),
        "destination": (lambda: dist.group.WORLD.send([ONES(4)], 7, 0), wrong, ("rank 7", "0 to 1")),
        "source": (lambda: dist.group.WORLD.recv([ONES(4)], -2, 0), wrong, ("rank -2",)),
        "global destination": (lambda: dist.send(ONES(4), 7), (wrong, ValueError), ("7",)),
        "root": (lambda: dist.broadcast(ONES(4), 9), (wrong, ValueError), ("9",)),
        "unknown device": (lambda: dist.all_reduce(_stranger()), NoRouteError, ("'hpu'", "cpu -> shm", "doctor")),
        "second init": (lambda: dist.init_process_group("monarch"), ValueError, ("twice",)),
        "options": (lambda: dist.new_group([0, 1], pg_options=object()), TypeError, ("pg_options", "Options")),
        "not ours": (lambda: monarch_backend.routes(_gloo_group()), TypeError, ("monarch",)),
    }


def _pending() -> torch.Tensor:
    return funcol.all_reduce(ONES(4), "sum", dist.group.WORLD)


def _gather_single(output: torch.Tensor, input: torch.Tensor) -> None:
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(output, input)


def _scatter_single(output: torch.Tensor, input: torch.Tensor) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(output, input)


def _stranger() -> torch.Tensor:
    """Return a tensor on a device for which the group has no route."""

    class Stranger(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{func} reached the device")

    return torch.Tensor._make_wrapper_subclass(Stranger, (4,), device="hpu")  # type: ignore[attr-defined]


def _gloo_group() -> Any:
    return dist.new_group([0, 1], backend="gloo")


CASES = list(_cases(0))


def _make_mistake(rank: int, name: str) -> str:
    mistake, error, words = _cases(rank)[name]
    with pytest.raises(error) as info:
        mistake()
    caught, text = info.value, str(info.value)
    for word in words:
        assert word in text, f"{name}: {word!r} is missing in: {text}"
    if isinstance(caught, monarch_backend.MonarchError):
        for word in (f"rank {rank} of 2", socket.gethostname(), f"pid {os.getpid()}"):
            assert word in text, f"{name}: {word!r} is missing in: {text}"
    # The group keeps working.
    x = ONES(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3
    return text


@pytest.mark.parametrize("name", CASES)
def test_wrong_argument_raises_and_group_keeps_working(pool, name: str) -> None:
    pool(2).run(_make_mistake, name)


def _two_devices(rank: int) -> None:
    with pytest.raises(CollectiveArgumentError, match="on cpu and on meta"):
        dist.all_gather([ONES(4), ONES(4, device="meta")], ONES(4))


def test_tensor_on_a_wrong_device_is_refused(pool) -> None:
    pool(2).run(_two_devices)


def _outside_rank(rank: int) -> str:
    group = dist.new_group([0])
    if rank == 0:
        with pytest.raises(ValueError, match="1"):
            dist.send(ONES(1), dst=1, group=group)
        return ""
    with pytest.warns(UserWarning, match="not belong|not in group|does not"):
        dist.all_reduce(ONES(1), group=group)
    return ""


def test_rank_outside_the_group_is_refused(pool) -> None:
    pool(2).run(_outside_rank)


def _no_memory(rank: int) -> None:
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    for call in (dist.all_reduce, lambda x: dist.all_gather([torch.ones(4)] * 2, x), lambda x: dist.send(x, 1 - rank)):
        for tensor in (freed, torch._efficientzerotensor(4)):
            with pytest.raises(CollectiveArgumentError, match=r"shape \[4\] has no memory"):
                call(tensor)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2.0


def test_tensor_with_freed_memory_is_refused() -> None:
    run_ranks(_no_memory, 2)


def _use_after_destroy(rank: int) -> None:
    group = dist.group.WORLD
    dist.barrier()  # the other rank may still be connecting
    dist.destroy_process_group()
    with pytest.raises(GroupClosedError, match="destroyed; make a new one"):
        group.allreduce([ONES(1)])
    with pytest.raises(GroupClosedError, match="destroyed"):
        group.barrier()
    with pytest.raises(GroupClosedError):
        group.monitored_barrier()
    with pytest.raises(ValueError, match="not been initialized"):
        dist.all_reduce(ONES(1))


def test_use_after_destroy_raises() -> None:
    run_ranks(_use_after_destroy, 2)


def _use_after_abort(rank: int) -> None:
    group = dist.group.WORLD
    dist.barrier()  # the other rank may still be connecting
    dist.distributed_c10d._abort_process_group()
    with pytest.raises(GroupClosedError, match="aborted"):
        group.allreduce([ONES(1)])


def test_use_after_abort_raises() -> None:
    run_ranks(_use_after_abort, 2)


def _unreachable_store(rank: int, address: str) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # the socket is closed below, so the port has no listener
    start = time.monotonic()
    with pytest.raises(dist.DistError) as caught:
        dist.init_process_group(
            "monarch",
            init_method=f"tcp://127.0.0.1:{port}",
            rank=1,
            world_size=2,
            timeout=datetime.timedelta(seconds=2),
        )
    assert time.monotonic() - start < 3
    assert "127.0.0.1" in str(caught.value)
    assert str(port) in str(caught.value)
    assert not dist.is_initialized()
    return str(caught.value)


def test_unreachable_store_raises() -> None:
    run_ranks(_unreachable_store, 1, backend=None)


def _late(rank: int) -> None:
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed? ?out|[Tt]imeout"):
            dist.all_reduce(ONES(1))
        dist.group.WORLD.get_group_store().set("given-up", "1")
    else:
        dist.group.WORLD.get_group_store().wait(["given-up"], datetime.timedelta(seconds=30))


def test_missing_rank_hits_the_timeout() -> None:
    run_ranks(_late, 2, group_timeout=1.0)


def _only_the_root(rank: int, again: bool) -> str:
    """A wrong list on the root: the other ranks cannot detect the error, so they wait."""
    x, row = torch.full((4,), float(rank)), [ONES(4)] * 2
    if rank == 0:
        with pytest.raises(CollectiveArgumentError, match="3 tensors"):
            dist.gather(x, [ONES(4)] * 3, dst=0)
        if again:
            row = [torch.zeros(4), torch.zeros(4)]
            dist.gather(x, row, dst=0)
            assert row[1].eq(1).all()
        return ""
    if again:
        dist.gather(x, None, dst=0)
        return ""
    with pytest.raises(
        RankFailedError, match=r"rank 0 \(host \S+, pid \d+\) (closed the group|ended) without gather"
    ) as info:
        dist.gather(x, None, dst=0)
    return str(info.value)


@pytest.mark.skipif(sys.platform != "linux", reason="over Gloo the others wait until the connection closes")
def test_wrong_argument_of_the_root_only_raises_on_the_root() -> None:
    """The root may repeat the call with correct arguments. If the root exits, the other ranks fail before the
    timeout.
    """
    run_ranks(_only_the_root, 2, True)
    start = time.monotonic()
    run_ranks(_only_the_root, 2, False)
    assert time.monotonic() - start < 30  # the group's timeout is 60
