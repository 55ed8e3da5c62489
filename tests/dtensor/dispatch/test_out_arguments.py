"""An ``out=`` tensor on the workers has the sizes of the result after the operation, or the operation raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from monarch_backend.dtensor import RemoteTensorError
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same

WHOLE = torch.arange(6.0).view(3, 2)
FLOATS = [torch.float32]

WAYS: dict[str, tuple[Callable[..., Any], list[torch.dtype]]] = {
    "add": (lambda x, out: torch.add(x, 1, out=out), FLOATS),
    "cat": (lambda x, out: torch.cat([x, x], out=out), FLOATS),
    "a number": (lambda x, out: torch.sum(x, (0, 1), out=out), FLOATS),
    "two": (lambda x, *out: torch.sort(x, dim=0, descending=True, out=out), [torch.float32, torch.long]),
}


def given(x: Any, dtypes: list[torch.dtype], sizes: Any) -> list[Any]:
    return [x.new_zeros(sizes, dtype=dtype) for dtype in dtypes]


@pytest.mark.parametrize("sizes", [0, (0, 7), None], ids=["empty", "empty rows", "the right ones"])
@pytest.mark.parametrize("way", WAYS)
def test_the_result_has_its_sizes(line: Any, way: str, sizes: Any) -> None:
    call, dtypes = WAYS[way]
    expected = given(WHOLE, dtypes, 0)
    call(WHOLE, *expected)
    x = workers_of(line).put(WHOLE)
    for _ in range(2):
        ours = given(x, dtypes, expected[0].shape if sizes is None else sizes)
        before = [each.detach() for each in ours]
        call(x, *ours)
        for found, wanted, earlier in zip(ours, expected, before, strict=True):
            assert found.shape == wanted.shape
            same(found, wanted)
            same(found * 2, wanted * 2)
            assert earlier.shape == (wanted.shape if sizes is None else torch.empty(sizes).shape)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_argument_of_another_size_is_refused(line: Any, way: str) -> None:
    call, dtypes = WAYS[way]
    x = workers_of(line).put(WHOLE)
    ours = given(x, dtypes, (5, 5))
    for _ in range(2):
        with pytest.raises(RemoteTensorError, match=r"the result has the shape \(.*\), and `out`.* \(5, 5\): give it"):
            call(x, *ours)
    assert [each.shape for each in ours] == [(5, 5)] * len(ours)
    same(ours[0], torch.zeros(5, 5))


def test_sizes_that_differ_by_rank_are_no_empty_ones(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(WHOLE, mesh_of("2"), [Shard(0)]).to_local()
    with pytest.raises(RemoteTensorError, match="give it one of the result's sizes"):
        torch.add(x, 1, out=x.new_empty(0))
    out = torch.empty_like(x)
    torch.add(x, 1, out=out)
    same(out, WHOLE[:2] + 1)


MATRIX = torch.tensor([[4.0, 1.0], [1.0, 3.0]])
ALSO: dict[str, tuple[torch.Tensor, Callable[..., Any], list[tuple[Any, torch.dtype]]]] = {
    # C++ makes another tensor, in this process, for a second result.
    "inv": (MATRIX, lambda x, out: torch.linalg.inv(x, out=out), [((2, 2), torch.float32)]),
    "cholesky": (MATRIX, lambda x, out: torch.linalg.cholesky(x, out=out), [((2, 2), torch.float32)]),
    "eigvalsh": (MATRIX, lambda x, out: torch.linalg.eigvalsh(x, out=out), [(2, torch.float32)]),
    # Sizes that depend on values.
    "nonzero": (WHOLE, lambda x, out: torch.nonzero(x, out=out), [((5, 2), torch.long)]),
    "masked_select": (WHOLE, lambda x, out: torch.masked_select(x, x > 3, out=out), [(2, torch.float32)]),
    # Lists of tensors for operators that return nothing.
    "split": (
        WHOLE,
        lambda x, *out: torch.split_with_sizes_copy(x, [1, 2], out=list(out)),
        [((1, 2), torch.float32), ((2, 2), torch.float32)],
    ),
    "unbind": (WHOLE, lambda x, *out: torch.unbind_copy(x, 1, out=list(out)), [(3, torch.float32)] * 2),
    # With host tensors as other arguments.
    "a number of the host": (WHOLE, lambda x, out: torch.mul(x, torch.tensor(2.0), out=out), [((3, 2), torch.float32)]),
    "an index of the host": (
        WHOLE,
        lambda x, out: torch.index_select(x, 0, torch.tensor([0, 2]), out=out),
        [((2, 2), torch.float32)],
    ),
    "batch norm": (
        WHOLE,
        lambda x, *out: torch.ops.aten.native_batch_norm.out(
            x,
            None,
            None,
            x.new_zeros(2),
            x.new_ones(2),
            True,
            0.1,
            1e-5,
            out=out[0],
            save_mean=out[1],
            save_invstd=out[2],
        ),
        [((3, 2), torch.float32), (2, torch.float32), (2, torch.float32)],
    ),
}
BY_VALUES = {"nonzero", "masked_select"}


@pytest.mark.parametrize("is_empty", [False, True], ids=["the right sizes", "empty"])
@pytest.mark.parametrize("way", ALSO)
def test_operators_of_other_forms(line: Any, way: str, is_empty: bool) -> None:
    whole, call, outs = ALSO[way]
    expected = [torch.zeros(sizes, dtype=dtype) for sizes, dtype in outs]
    call(whole, *expected)
    x = workers_of(line).put(whole)
    for _ in range(2):
        ours = [x.new_zeros(0 if is_empty else sizes, dtype=dtype) for sizes, dtype in outs]
        result = call(x, *ours)
        for found, wanted in zip(ours, expected, strict=True):
            same(found, wanted)
            if way not in BY_VALUES or not is_empty:
                assert found.shape == wanted.shape
        if result is not None:
            assert [id(each) for each in (result if isinstance(result, tuple) else [result])] == list(map(id, ours))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_list_of_other_sizes_is_refused(line: Any) -> None:
    x = workers_of(line).put(WHOLE)
    with pytest.raises(RemoteTensorError, match="give it one of that shape"):
        torch.split_with_sizes_copy(x, [1, 2], out=[x.new_zeros(7), x.new_zeros(7)])
