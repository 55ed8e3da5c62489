"""Lists of several tensors per rank in the methods of a ProcessGroup, compared with torch's Gloo in the same ranks."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c
from torch._subclasses import FakeTensorMode
from torch.distributed import ReduceOp

from monarch_backend import CollectiveArgumentError
from tests.process_group import gloo, reference
from tests.support.ranks import run_ranks

SIZE, ROOT = 2, 1
Call = Callable[[Any], list[Tensor]]


def _read(rank: int, index: int, elements: int = 2) -> Tensor:
    return torch.arange(elements, dtype=torch.float32) + 10 * rank + 100 * index


def _write(elements: int = 2) -> Tensor:
    return torch.full((elements,), -1.0)


def _options(kind: Any, asynchronous: bool, **fields: Any) -> Any:
    options = kind()
    options.asyncOp = asynchronous
    for name, value in fields.items():
        setattr(options, name, value)
    return options


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for part in value for t in _flat(part)]


def _calls(rank: int, count: int, asynchronous: bool) -> Iterator[tuple[str, Call]]:
    """Yield every method that takes a list of tensors, with ``count`` on each rank. A call returns what it wrote."""

    def inputs(elements: int = 2) -> list[Tensor]:
        return [_read(rank, i, elements) for i in range(count)]

    def outputs(elements: int = 2) -> list[Tensor]:
        return [_write(elements) for _ in range(count)]

    def rows(make: Callable[[int], Tensor], lists: int, length: int) -> list[list[Tensor]]:
        return [[make(row * 10 + i) for i in range(length)] for row in range(lists)]

    def call(method: str, given: Callable[[], tuple[Any, ...]], kind: Any, **fields: Any) -> Call:
        def run(group: Any) -> list[Tensor]:
            args = given()
            getattr(group, method)(*args, _options(kind, asynchronous, **fields)).wait()
            return _flat(args[0])

        return run

    for op in ("SUM", "MAX", "PRODUCT", "AVG"):
        yield (
            f"allreduce {op}",
            call("allreduce", lambda: (inputs(),), c.AllreduceOptions, reduceOp=getattr(ReduceOp, op)),
        )
    yield "allreduce_coalesced", call("allreduce_coalesced", lambda: (inputs(),), c.AllreduceCoalescedOptions)
    for index in (0, 1, 2, -1):
        fields = {"rootRank": ROOT, "rootTensor": index}
        yield f"broadcast of {index}", call("broadcast", lambda: (inputs(),), c.BroadcastOptions, **fields)
        yield f"reduce of {index}", call("reduce", lambda: (inputs(),), c.ReduceOptions, **fields)
    for lists, length in itertools.product({1, count}, {SIZE, SIZE * count}):
        form, at_root = f"{lists} x {length}", rank == ROOT

        def written(lists: int = lists, length: int = length) -> list[list[Tensor]]:
            return rows(lambda _: _write(), lists, length)

        def read(lists: int = lists, length: int = length) -> list[list[Tensor]]:
            return rows(lambda i: _read(rank, i), lists, length)

        yield f"allgather {form}", call("allgather", lambda w=written: (w(), inputs()), c.AllgatherOptions)
        gathered = lambda w=written, here=at_root: (w() if here else [], inputs())  # noqa: E731
        yield f"gather {form}", call("gather", gathered, c.GatherOptions, rootRank=ROOT)
        scattered = lambda r=read, here=at_root: (outputs(), r() if here else [])  # noqa: E731
        yield f"scatter {form}", call("scatter", scattered, c.ScatterOptions, rootRank=ROOT)
        yield f"reduce_scatter {form}", call("reduce_scatter", lambda r=read: (outputs(), r()), c.ReduceScatterOptions)
    every_rank = lambda: ([outputs() for _ in range(SIZE)], inputs())  # noqa: E731
    yield "allgather_coalesced", call("allgather_coalesced", every_rank, c.AllgatherOptions)
    exchange = call("alltoall", lambda: (outputs(), inputs()), c.AllToAllOptions)

    def exchange_lists(group: Any) -> list[Tensor]:
        if gloo.exchanges_lists(group):
            return exchange(group)
        written = outputs()
        gloo.all_to_all(written, inputs(), group)
        return written

    yield "alltoall", exchange_lists
    # Before torch 2.13 these methods had other names.
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced"):
        gather, scatter = "all_gather_single_coalesced", "reduce_scatter_single_coalesced"
    else:
        gather, scatter = "allgather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced"
    yield gather, call(gather, lambda: (outputs(4), inputs()), c.AllgatherOptions)
    yield scatter, call(scatter, lambda: (outputs(), inputs(4)), c.ReduceScatterOptions)

    def message(group: Any, any_source: bool) -> list[Tensor]:
        sent, received = inputs(), outputs()
        if rank == ROOT:
            work = group.send(sent, 1 - ROOT, 7)
        else:
            work = group.recv_anysource(received, 7) if any_source else group.recv(received, ROOT, 7)
        work.wait()
        return received

    yield "send and recv", lambda group: message(group, False)
    yield "send and recv_anysource", lambda group: message(group, True)


def _compare(rank: int) -> list[str]:
    theirs = dist.new_group(range(SIZE), backend="gloo", timeout=timedelta(seconds=20))
    wrong, refused, several = [], 0, 0
    for count, asynchronous in itertools.product((0, 1, 2, 3), (False, True)):
        for name, call in _calls(rank, count, asynchronous):
            case = f"{name}, {count} tensors, {'async' if asynchronous else 'sync'}"
            try:
                want = call(theirs)
            except (RuntimeError, ValueError):
                want = None
            if name == "allreduce AVG" and count > 1:
                want = None  # Gloo divides only the first tensor
            try:
                got = call(dist.group.WORLD)
            except CollectiveArgumentError as error:
                got = None
                text = str(error)
                if not all(w in text for w in (f"rank {rank} of {SIZE}", socket.gethostname(), f"pid {os.getpid()}")):
                    wrong.append(f"{case}: the error does not say where: {text}")
            refused += want is None
            several += want is not None and count > 1
            undefined = name.startswith("reduce of") and rank != ROOT
            if (got is None) != (want is None):
                wrong.append(f"{case}: Gloo {'refuses' if want is None else 'accepts'}, and not the group")
            elif got is not None and not undefined and [t.tolist() for t in got] != [t.tolist() for t in want]:
                wrong.append(f"{case}: {got}, Gloo {want}")
            x = torch.ones(1)
            dist.all_reduce(x)
            assert x.item() == SIZE, case
    assert refused > 40
    assert several > 20
    dist.destroy_process_group(theirs)
    return wrong


def test_lists_of_zero_to_three_tensors_agree_with_gloo(pool) -> None:
    assert pool(SIZE).run(_compare) == [[], []]


def test_lists_over_gloo_agree_with_gloo() -> None:
    assert run_ranks(_compare, SIZE, env={"MONARCH_SHM": "0"}) == [[], []]


def _several(rank: int) -> None:
    """Check values of several tensors per rank in all dtypes. The ranks have lists of different lengths."""
    count = 2 + rank
    for dtype in reference.DTYPES:
        inputs = [[reference.factors(r, dtype, (3, 2), salt) for salt in range(2 + r)] for r in range(SIZE)]
        for op in ("SUM", "MAX", "BXOR"):
            if not reference.reduces(dtype, op):
                continue
            mine = [x.clone() for x in inputs[rank]]
            mine[1] = mine[1].t().contiguous().t()  # strides that differ from those of the other tensors
            work = dist.group.WORLD.allreduce(mine, getattr(ReduceOp, op))
            shown = work.get_future().wait()
            assert [t.data_ptr() for t in shown] == [t.data_ptr() for t in mine]
            want = reference.reduced(op, [x for row in inputs for x in row])
            assert all(reference.same(x, want) for x in mine), (dtype, op)
        options = _options(c.BroadcastOptions, True, rootRank=ROOT, rootTensor=1)
        mine = [reference.values(rank, dtype, (3, 2), salt).clone() for salt in range(count)]
        dist.group.WORLD.broadcast(mine, options).wait()
        assert all(reference.same(x, reference.values(ROOT, dtype, (3, 2), 1)) for x in mine), dtype
        outs = [[torch.zeros_like(mine[0]) for _ in range(2 * SIZE)] for _ in range(2)]
        dist.group.WORLD.allgather(outs, [reference.values(rank, dtype, (3, 2), salt) for salt in range(2)]).wait()
        want_all = [reference.values(r, dtype, (3, 2), salt) for r in range(SIZE) for salt in range(2)]
        assert all(reference.same(x, y) for row in outs for x, y in zip(row, want_all, strict=True)), dtype


def test_several_tensors_of_every_dtype_have_their_values(pool) -> None:
    pool(SIZE).run(_several)


def _unusual(rank: int) -> None:
    group = dist.group.WORLD
    x = torch.ones(2)
    group.allreduce([x, x]).wait()  # a tensor that the list contains twice counts twice
    assert x.tolist() == [4.0, 4.0]
    leaf = torch.ones(2, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.ones(2)
    group.allreduce([leaf, inferred]).wait()
    assert leaf.tolist() == inferred.tolist() == [4.0, 4.0]
    bools = [torch.tensor([False, rank == 1]), torch.tensor([False, False])]
    group.allreduce(bools).wait()
    assert [b.tolist() for b in bools] == [[False, True]] * 2
    scaled = [torch.ones(2), torch.ones(2)]
    group.allreduce(scaled, dist._make_nccl_premul_sum(0.5)).wait()  # type: ignore[attr-defined]
    assert [s.tolist() for s in scaled] == [[2.0, 2.0]] * 2
    with torch.profiler.profile():
        group.allreduce([x, x]).wait()
    assert x.tolist() == [16.0, 16.0]
    with FakeTensorMode():
        fakes = [torch.ones(2), torch.ones(2)]
        group.allreduce(fakes).wait()
        group.broadcast(fakes).wait()
    sparse = [torch.eye(2).to_sparse(), torch.eye(2).to_sparse()]
    group.allreduce(sparse).wait()  # Gloo runs this: it accepts lists of sparse tensors
    assert all(s.to_dense().equal(torch.eye(2) * 4) for s in sparse)


def test_lists_of_unusual_tensors_have_their_values(pool) -> None:
    pool(SIZE).run(_unusual)


def _refusals(rank: int) -> list[str]:
    group: Any = dist.group.WORLD
    f, d, i = torch.ones(2), torch.ones(2).double(), torch.ones(2).int()
    one = _options(c.BroadcastOptions, False, rootRank=0, rootTensor=1)
    many = [torch.zeros(2) for _ in range(2 * SIZE)]
    cases: dict[str, tuple[Callable[[], Any], str]] = {
        "dtypes": (lambda: group.allreduce([f, d]), "tensor 1 is float64, tensor 0 is float32"),
        "shapes": (lambda: group.allreduce([f, torch.ones(3)]), r"tensor 1 has shape \[3\], tensor 0 has \[2\]"),
        "same count": (lambda: group.allreduce([torch.ones(4), torch.ones(2, 2)]), r"shape \[2, 2\]"),
        "sparse and dense": (lambda: group.allreduce_coalesced([f, f.to_sparse()]), "sparse_coo float32"),
        "coalesced": (lambda: group.allreduce_coalesced([f, d]), "tensor 1 is float64"),
        "same size": (lambda: group.allreduce_coalesced([f, i]), "tensor 1 is int32"),
        "broadcast of dtypes": (lambda: group.broadcast([f, d]), "tensor 1 is float64"),
        "root tensor": (lambda: group.broadcast([f], one), "rootTensor 1 is outside the list of 1"),
        "gathered dtypes": (lambda: group.allgather([many, many], [f, d]), "tensor 1 is float64"),
        "gathered shapes": (lambda: group.allgather([many, many], [f, torch.ones(3)]), r"shape \[3\]"),
        "fewer lists": (lambda: group.allgather([many], [f, f]), "outputs and inputs have 1 and 2 entries"),
        "short lists": (
            lambda: group.allgather([many[:2]] * 2, [f, f]),
            "2 tensors, 2 ranks with 2 inputs each give 4",
        ),
        "no lists": (lambda: group.allgather([], [f]), "outputs and inputs have 0 and 1 entries"),
        "exchanged dtypes": (lambda: group.alltoall([f, i], [f, i]), "tensor 1 is int32"),
        "nowhere to gather": (lambda: group.gather([[f, f]] if rank == 0 else [[]], [f], 1 - rank), "list is"),
        "no mean": (lambda: group.allreduce([f, f], ReduceOp.AVG), "AVG of 2 tensors per rank"),
        "integer mean": (lambda: group.allreduce([i, i], ReduceOp.AVG), "AVG of 2 tensors per rank"),
        "bitwise": (lambda: group.allreduce([f, f], ReduceOp.BOR), "BOR can't combine torch.float32"),
    }
    if rank == 1:  # the root passes no list, and another rank passes one
        cases["nowhere to gather"] = (lambda: group.gather([], [f], 1), "the output list is missing on rank 1")
    else:
        cases["nowhere to gather"] = (lambda: group.gather([[f, f]], [f], 1), "the output list is given on rank 0")
    for name, (call, text) in cases.items():
        with pytest.raises(CollectiveArgumentError, match=text) as info:
            call().wait()
        assert f"rank {rank} of {SIZE}" in str(info.value), name
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == SIZE
    return list(cases)


def test_lists_that_gloo_refuses_are_argument_errors(pool) -> None:
    assert len(pool(SIZE).run(_refusals)[0]) > 15
