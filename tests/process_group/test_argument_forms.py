"""Arguments of c10d's methods: every form and parameter name of torch's signatures, and tensors with unusual memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._C import _distributed_c10d as c

from monarch_backend.process_group._collective_specs import COLLECTIVES
from tests.process_group.test_work import ALL_GATHER_SINGLE, REDUCE_SCATTER_SINGLE

METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "gather",
    "gather_single",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "all_to_all_single",
    "alltoall_base",
    "alltoall",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "barrier",
)


def _forms(method: str) -> Iterator[dict[str, str]]:
    """Yield each overload of a torch method as {parameter: type}, read from the docstring that pybind generates."""
    text = getattr(dist.ProcessGroup, method).__doc__
    for line in re.findall(rf"^(?:\d+\. )?{method}\(self: .*?, (.*)\) -> ", text, re.M):
        found = re.findall(r"(\w+): ((?:[^,\[]|\[.*?\]+)+)", re.sub(r" = <.*?>(?=, \w+:|$)", "", line))
        yield {name: kind.split(" = ")[0].strip() for name, kind in found}


ALL_FORMS = [
    pytest.param(method, form, id=f"{method}({', '.join(form)})")
    for method in METHODS
    if hasattr(dist.ProcessGroup, method)
    for form in _forms(method)
]


def _tensor_argument(method: str, name: str, kind: str, outputs: bool) -> Any:
    """Return an argument of this type for 2 ranks with 2 elements each. Inputs contain ones, outputs contain zeros."""
    fill = torch.zeros if outputs else torch.ones
    depth = kind.count("Sequence")
    large = (
        "single" in method or "base" in method or "into_tensor" in method or "reduce_scatter_tensor" in method
    ) and ("to_all" in method or "alltoall" in method or outputs != ("reduce_scatter" in method))
    one = fill(4 if large else 2)
    if depth == 0:
        return one
    if depth == 2 and method == "allgather_coalesced":
        return [[one.clone()] for _ in range(2)]
    per_rank = (
        depth == 2 or (method == "alltoall") or (depth == 1 and not name.startswith(("tensors", "inputs", "outputs")))
    )
    row = [one.clone() for _ in range(2)] if per_rank else [one]
    return [row] if depth == 2 else row


def _value(method: str, name: str, kind: str, form: dict[str, str]) -> Any:
    if name == "opts":
        opts = getattr(c, re.search(r"(\w+Options)", kind).group(1))()
        opts.timeout = timedelta(seconds=30)
        return opts
    if name == "timeout":
        return timedelta(seconds=30)
    if name == "root":
        return 1
    if name == "op":
        return dist.ReduceOp.MAX
    if name.endswith("split_sizes"):
        return [2, 2]
    outputs = name.startswith("output")
    if method in ("allgather", "gather", "scatter", "reduce_scatter") and kind.count("Sequence") == 1:
        # In the single-tensor form a list has one tensor per rank. In the list form the flat list has one tensor.
        nested = any(k.count("Sequence") == 2 for k in form.values())
        fill = torch.zeros if outputs else torch.ones
        return [fill(2)] if nested else [fill(2), fill(2)]
    if name == "input_list":
        return [torch.ones(2)]
    return _tensor_argument(method, name, kind, outputs)


def _call(rank: int, method: str, form: dict[str, str], by_name: bool) -> None:
    values = {name: _value(method, name, kind, form) for name, kind in form.items()}
    root = values.get("root", 0)
    if method in ("gather", "scatter") and rank != root:  # only the root passes the list
        listed = "output_tensors" if method == "gather" else "input_tensors"
        values[listed] = []
    call = getattr(dist.group.WORLD, method)
    (call(**values) if by_name else call(*values.values())).wait()
    if "tensor" in values or "tensors" in values:
        got = values.get("tensor", values.get("tensors"))
        got = got if isinstance(got, Tensor) else got[0]
        reduces = "reduce" in method and (method != "reduce" or rank == root)
        if reduces:
            assert got.tolist() == [1.0 if "op" in values else 2.0] * 2
    for name, value in values.items():
        if not name.startswith("output") or name.endswith("split_sizes"):
            continue
        for tensor in _flat(value):
            assert tensor.ne(0).all(), f"{name} of {method} was not written"


def _flat(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for v in value for t in _flat(v)]


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize(("method", "form"), ALL_FORMS)
def test_every_argument_form_of_torch_is_accepted(pool, method: str, form: dict[str, str], by_name: bool) -> None:
    if method == "gather_single":
        pytest.skip("a root without an output list is test_collectives.py's")
    pool(2).run(_call, method, form, by_name)


def test_torch_has_argument_forms_to_test() -> None:
    assert len(ALL_FORMS) > len(METHODS)
    assert {"tensor", "root", "timeout"} in [set(form) for form in _forms("broadcast")]


def _root_and_timeout(rank: int) -> None:
    x = torch.full((2,), float(rank))
    dist.group.WORLD.broadcast(x, 1, timedelta(seconds=30)).wait()
    assert x.tolist() == [1.0, 1.0]


def test_root_before_a_timeout_is_read_as_the_root(pool) -> None:
    pool(2).run(_root_and_timeout)


def _wrong_names(rank: int) -> None:
    world, x = dist.group.WORLD, torch.ones(2)
    for call, words in (
        (lambda: world.broadcast(x, 0, speed=3), "speed"),
        (lambda: world.broadcast(), "tensors or tensor"),
        (lambda: world.allreduce([x], c.AllreduceOptions(), op=dist.ReduceOp.SUM), "not both"),
        (lambda: world.allreduce([x], dist.ReduceOp.SUM, timedelta(seconds=1), 4), "op or timeout"),
    ):
        with pytest.raises(TypeError, match=words):
            call()


def test_unknown_argument_name_is_a_type_error(pool) -> None:
    pool(2).run(_wrong_names)


# Tensors that are not plain memory --------------------------------------------------------------------------------


def _pending() -> Tensor:
    """Return the result of a functional collective in eager mode: a subclass whose own memory must not be read."""
    made = funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
    assert type(made) is funcol.AsyncCollectiveTensor
    return made


SUBCLASS: dict[str, Callable[[int, Tensor], Tensor]] = {
    "all_gather_into_tensor": lambda rank, x: _out(torch.zeros(8), lambda out: ALL_GATHER_SINGLE(out, x)),
    "all_to_all_single": lambda rank, x: _out(torch.zeros(4), lambda out: dist.all_to_all_single(out, x)),
    "reduce_scatter_tensor": lambda rank, x: _out(torch.zeros(2), lambda out: REDUCE_SCATTER_SINGLE(out, x)) / 2,
    "all_gather": lambda rank, x: _out(torch.zeros(2, 4), lambda out: dist.all_gather(list(out.unbind()), x)),
    "scatter": lambda rank, x: _out(torch.zeros(4), lambda out: dist.scatter(out, None if rank else [x, x])),
    "gather": lambda rank, x: _out(
        torch.full((2, 4), 2.0 * rank), lambda out: dist.gather(x, None if rank else list(out.unbind()))
    ),
    "all_to_all": lambda rank, x: _out(torch.zeros(2, 4), lambda out: dist.all_to_all(list(out.unbind()), [x, x])),
}


def _out(out: Tensor, fill: Callable[[Tensor], Any]) -> Tensor:
    fill(out)
    return out


def _subclass(rank: int, name: str) -> None:
    assert SUBCLASS[name](rank, _pending()).eq(2.0).all()


@pytest.mark.parametrize("name", SUBCLASS)
def test_tensor_subclass_among_the_inputs_is_accepted(pool, name: str) -> None:
    pool(2).run(_subclass, name)


def _negated(rank: int) -> None:
    """A collective sends the negated values of a lazy view, not the memory under the view."""
    read, want = torch._neg_view(torch.tensor([2.0, 4.0])), torch.tensor([-2.0, -4.0])
    assert read.is_neg()
    assert read.is_contiguous()
    row, large, out, swapped = [torch.zeros(2) for _ in range(2)], torch.zeros(4), torch.zeros(2), torch.zeros(2)
    dist.all_gather(row, read)
    ALL_GATHER_SINGLE(large, read)
    dist.scatter(out, None if rank else [read, read])
    dist.all_to_all_single(swapped, read)
    half, whole, received = torch.zeros(1), torch.zeros(2), want.clone()
    REDUCE_SCATTER_SINGLE(half, read)
    dist.reduce_scatter(whole, [read, read])
    if rank:
        dist.send(read, 0)
    else:
        dist.recv(received.zero_(), 1)
    for got in (*row, *large.chunk(2), out, whole / 2, received):
        assert torch.equal(got, want), (got, want)
    assert torch.equal(half, want[rank : rank + 1] * 2)
    assert torch.equal(swapped, want[rank].repeat(2))


def test_lazy_negation_is_read_as_its_value(pool) -> None:
    pool(2).run(_negated)


def _conjugated(rank: int) -> None:
    read = torch.tensor([1 + 2j, 3 + 4j]).conj()
    half, whole = torch.zeros(1, dtype=read.dtype), torch.zeros(2, dtype=read.dtype)
    dist.reduce_scatter(whole, [read, read])
    dist.group.WORLD.allgather([row := [torch.zeros_like(whole), torch.zeros_like(whole)]], [read]).wait()
    dist.group.WORLD._reduce_scatter_base(half, read).wait()
    want = torch.tensor([1 - 2j, 3 - 4j])
    for got in (whole / 2, *row):
        assert torch.equal(got, want), (got, want)
    assert torch.equal(half, want[rank : rank + 1] * 2)


def test_lazy_conjugate_is_read_as_its_value(pool) -> None:
    pool(2).run(_conjugated)


def _futures(rank: int) -> None:
    world = dist.group.WORLD
    for dtype in (torch.complex64, torch.int16):
        x = torch.ones(4).to(dtype)
        (shown,) = world.broadcast([x]).get_future().wait()
        assert shown.data_ptr() == x.data_ptr()
        assert shown.dtype == dtype
        row = [torch.zeros(4).to(dtype) for _ in range(2)]
        future = dist.all_gather(row, x, async_op=True).get_future()
        assert [t.data_ptr() for t in future.wait()] == [t.data_ptr() for t in row]
    out = torch.zeros(2, dtype=torch.complex64)
    work = REDUCE_SCATTER_SINGLE(out, torch.ones(4, dtype=torch.complex64), async_op=True)
    assert work.get_future().wait()[0].dtype == torch.complex64
    assert out.tolist() == [2, 2]


def test_futures_hold_the_tensors_that_were_passed(pool) -> None:
    pool(2).run(_futures)


def _strided(rank: int, asynchronous: bool) -> None:
    """A strided output is written through a contiguous copy when the work ends."""
    memory = torch.zeros(4, 2)
    work = ALL_GATHER_SINGLE(memory[:, 0], torch.full((2,), rank + 1.0), async_op=asynchronous)
    if asynchronous:
        (shown,) = work.get_future().wait()
        assert shown.data_ptr() == memory.data_ptr()
    assert memory.tolist() == [[1, 0], [1, 0], [2, 0], [2, 0]]
    memory = torch.zeros(2, 2)
    work = REDUCE_SCATTER_SINGLE(memory[:, 1], torch.arange(4.0), async_op=asynchronous)
    if asynchronous:
        work.wait()
    assert memory[:, 1].tolist() == [4.0 * rank, 4.0 * rank + 2]
    assert memory[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_outputs_with_strides_get_results(pool, asynchronous: bool) -> None:
    pool(2).run(_strided, asynchronous)


def _strided_in_inference_mode(_rank: int) -> None:
    """A thread that is not in inference mode copies the result into the output."""
    with torch.inference_mode():
        gathered, scattered = torch.zeros(4, 2)[:, 0], torch.zeros(2, 2)[:, 0]
        works = [
            ALL_GATHER_SINGLE(gathered, torch.ones(2), async_op=True),
            REDUCE_SCATTER_SINGLE(scattered, torch.ones(4), async_op=True),
        ]
    for work in works:
        assert work is not None
        work.wait()
    assert gathered.tolist() == [1.0] * 4
    assert scattered.tolist() == [2.0] * 2


def test_strided_outputs_of_inference_mode_get_results(pool) -> None:
    pool(2).run(_strided_in_inference_mode)


def test_table_of_collectives_has_each_method() -> None:
    assert {method for spec in COLLECTIVES if spec.options is not None for method in spec.methods} == set(METHODS)
