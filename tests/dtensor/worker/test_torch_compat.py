"""Replacements, on workers with an older torch, for functions that only the controller's torch has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from monarch_backend import dtensor
from monarch_backend._core import torch_version
from monarch_backend.dtensor._worker import op_functions, torch_compat
from monarch_backend.dtensor._worker.xla import op_decompositions

SIZES = (1, 3, 4, 5, 6, 8)
SHARD, STRIDED = Shard(1), _StridedShard(1, split_factor=2)


def _padded(size: int, rank: int) -> torch.Tensor:
    """Return the shard of that rank of three."""
    return SHARD._select_split_tensor(_whole(size), 3, rank, with_padding=False)


def _whole(size: int) -> torch.Tensor:
    return torch.arange(2.0 * size).view(2, size)


CASES: dict[str, Callable[[int, int], tuple[Any, ...]]] = {
    "Shard._select_split_tensor": lambda size, rank: (SHARD, _whole(size), 3, rank),
    "_StridedShard._select_split_tensor": lambda size, rank: (STRIDED, _whole(size), 3, rank),
    "_StridedShard._select_shard": lambda size, rank: ([_whole(size), _whole(2), _whole(3)], rank),
    "Shard._maybe_pad_tensor": lambda size, rank: (SHARD, _padded(size, rank), size, 3),
    "Shard._maybe_unpad_tensor": lambda size, rank: (SHARD, _whole(-(-size // 3) * 3), size, 3),
    "Shard._maybe_unpad_tensor_with_sizes": lambda size, rank: (1, _whole(size + 2), [0, 1, 2], rank, True),
    "Shard._pad_for_new_shard_dim": lambda size, rank: ((size, size), _whole(size)[:1].expand(-(-size // 3), size)
        .narrow(0, 0, max(0, min(-(-size // 3), size - -(-size // 3) * rank))), 3, 0, 1),
    "Shard._unpad_for_new_shard_dim": lambda size, rank: ((size, size), torch.rand(-(-size // 3) * 3, -(-size // 3)),
        3, 0, 1, rank),
    "_MaskPartial._mask_tensor": lambda size, rank: (torch.tensor([0, 5, 2, 7]), rank * 2, size),
}  # fmt: skip


def _flat(result: Any) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.skipif(
    torch_version.torch_version() < torch_compat.NEWEST, reason="op_functions.find returns the replacements there"
)
@pytest.mark.parametrize("name", CASES)
def test_compat_functions_match_torch(name: str) -> None:
    place = "torch.distributed.tensor.placement_types:" + name
    own, ours = op_functions.find(place), torch_compat._REPLACED[place]
    assert own.__module__.startswith("torch.")
    for size in SIZES:
        for rank in range(3):
            args = CASES[name](size, rank)
            for one, other in zip(_flat(ours(*args)), _flat(own(*args)), strict=True):
                assert torch.equal(one, other) and one.is_contiguous() == other.is_contiguous(), (size, rank)


def test_each_replacement_has_a_test_and_new_torch_needs_none() -> None:
    assert {place.partition(":")[2] for place in torch_compat._REPLACED} == set(CASES)
    is_new = torch_version.torch_version() >= torch_compat.NEWEST
    assert torch_compat.replaced() == ({} if is_new else torch_compat._REPLACED)


@pytest.mark.parametrize(
    "options", [{}, {"with_padding": False}, {"clone": False}, {"clone": False, "contiguous": False}]
)
def test_shard_of_a_given_rank_is_chosen(options: dict[str, bool]) -> None:
    for placement, ours in ((SHARD, torch_compat.select_split), (STRIDED, torch_compat.select_strided)):
        own = type(placement)._select_split_tensor
        for rank in range(3):
            one, other = (each(placement, _whole(5), 3, rank, **options) for each in (ours, own))
            assert torch.equal(one, other) and one.is_contiguous() == other.is_contiguous()


def test_operators_of_fsdp_that_xla_can_t_take() -> None:
    assert fully_shard is not None  # its import has registered them
    assert {each.split(".")[0] for each in op_decompositions.REPLACED} == {"fsdp", "monarch_backend", "aten"}
    inputs = [torch.rand(4), torch.rand(3)]
    found = []
    for call in (torch.ops.fsdp.all_gather_copy_in, op_decompositions.all_gather_copy_in):
        mine, output = call(inputs, torch.zeros(14), [4, 3], 7, 1)
        found.append(output.clone())
        assert mine.data_ptr() == output[7:].data_ptr()
    assert torch.equal(*found)
    outs = [[torch.zeros(2, 4), torch.zeros(2, 3)] for _ in range(2)]
    torch.ops.fsdp.split_with_sizes_copy(found[0].view(2, 7), [4, 3], 1, out=outs[0])
    op_decompositions.split_with_sizes_copy(found[0].view(2, 7), [4, 3], 1, out=outs[1])
    assert all(map(torch.equal, *outs))
    gradients = [torch.rand(5, 3), torch.rand(4), torch.rand(1, 2)]
    size = 3 * 3 + 2 + 2
    rows = [torch.zeros(2, size) for _ in range(2)]
    torch.ops.fsdp.chunk_cat(gradients, 0, 2, out=rows[0])
    op_decompositions.chunk_cat(gradients, 0, 2, out=rows[1])
    assert torch.equal(*rows)


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(5,), (6, 5), (2, 5, 3, 4)])
def test_the_gradient_of_a_loss_by_the_weight_that_is_given(shape: Any, weighted: bool, reduction: int) -> None:
    x, weight = torch.rand(shape), torch.rand(5) if weighted else None
    target = torch.randint(0, 5, (*shape[:1], *shape[2:]) if len(shape) > 1 else ())
    if target.ndim:
        target.flatten()[1] = -100
    gradient = torch.rand(target.shape if reduction == 0 else ())
    forward = torch.ops.aten.nll_loss2d_forward if len(shape) == 4 else torch.ops.aten.nll_loss_forward
    found, expected = (
        call(x, target, weight, reduction, -100) for call in (op_decompositions.nll_loss_forward, forward)
    )
    torch.testing.assert_close(found[:1] if reduction == 0 else found, expected[:1] if reduction == 0 else expected)
    operator = torch.ops.aten.nll_loss2d_backward if len(shape) == 4 else torch.ops.aten.nll_loss_backward
    args = (gradient, x, target, weight, reduction, -100, torch.tensor(17.0))
    torch.testing.assert_close(op_decompositions.nll_loss_backward(*args), operator(*args))


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_the_variance_that_torch_does(training: bool) -> None:
    x, weight, bias = torch.randn(6, 4, 3), torch.rand(4), torch.rand(4)
    found = []
    for call in (torch.ops.aten.native_batch_norm, op_decompositions.native_batch_norm):
        kept = [torch.zeros(4), torch.ones(4)]
        for _ in range(2):
            results = call(x, weight, bias, *kept, training, 0.1, 1e-5)
        found.append([*results, *kept])
    for mine, own in zip(*found, strict=True):
        torch.testing.assert_close(own, mine)


@pytest.mark.parametrize("version", [(2, 9), (2, 10)], ids=str)
def test_controller_with_an_older_torch_raises(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    monkeypatch.setattr(torch_version, "torch_version", lambda: version)
    for name in ("device_mesh", "run", "RemoteTensor"):
        with pytest.raises(
            ImportError, match=rf"dtensor\.{name} is for .* needs torch 2\.11 to 2\.15; .* pip install 'torch==2\.15"
        ):
            dtensor.__getattr__(name)
    with pytest.raises(AttributeError):
        dtensor.__getattr__("nothing")
