"""Geometry of shards, compared with torch.chunk, and copies of their overlaps, compared byte by byte."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from monarch_backend._rdma.shard_geometry import (
    LayoutError,
    Overlap,
    Region,
    ShardSpec,
    UnevenError,
    local_shape,
    merged,
    overlaps_itself,
    pieces,
    segments,
    shared,
    uncovered,
    without,
)

MESHES = [(1,), (2,), (3,), (5,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (3, 1, 2)]
SHAPES = [(), (1,), (4,), (7,), (13,), (6, 4), (5, 7), (1, 9), (0, 3), (4, 3, 5)]


def chunk(tensor: Tensor, split: ShardSpec) -> Tensor:
    """Shard a tensor as torch does for `Shard` and for `_StridedShard`."""

    def part(tensor: Tensor) -> Tensor:
        parts = torch.chunk(tensor, split.ways, split.dim)
        return parts[split.place] if split.place < len(parts) else tensor.narrow(split.dim, 0, 0)

    first = torch.chunk(tensor, split.factor, split.dim)
    return torch.cat([part(one) for one in first], split.dim)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


def filled(whole: Tensor, held: tuple[Overlap, ...], shape: tuple[int, ...]) -> Tensor:
    """Return the local tensor that consists of these pieces."""
    local = torch.full(shape, -1)
    for box, at in held:
        source = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes, strict=True))]
        local[tuple(slice(o, o + n) for o, n in zip(at, box.sizes, strict=True))] = source
    return local


def placements(mesh: tuple[int, ...], ndim: int) -> Iterator[tuple[int | None, ...]]:
    """Yield, for each dimension of the mesh, the dimension of the tensor that it shards, or None."""
    return itertools.product([None, *range(ndim)], repeat=len(mesh))


def splits_of(mesh: tuple[int, ...], chosen: tuple[int | None, ...]) -> Iterator[tuple[ShardSpec, ...]]:
    """Yield the shard specs of each rank."""
    for coordinate in itertools.product(*map(range, mesh)):
        yield tuple(
            ShardSpec(dim, ways, place)
            for dim, ways, place in zip(chosen, mesh, coordinate, strict=True)
            if dim is not None
        )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_pieces_match_torch_chunk(shape: tuple[int, ...]) -> None:
    whole = numbered(shape)
    for mesh in MESHES:
        for chosen in placements(mesh, len(shape)):
            for splits in splits_of(mesh, chosen):
                expected = whole
                for split in splits:
                    expected = chunk(expected, split)
                held = pieces(shape, splits)
                assert len(held) == bool(expected.numel())
                if expected.numel():
                    assert local_shape(shape, splits) == tuple(expected.shape)
                    assert torch.equal(filled(whole, held, tuple(expected.shape)), expected), splits


def test_all_ranks_together_have_every_element_once() -> None:
    for mesh, shape in itertools.product(MESHES, SHAPES):
        for chosen in placements(mesh, len(shape)):
            found = torch.zeros(shape, dtype=torch.int64)
            for splits in splits_of(mesh, chosen):
                for box, _ in pieces(shape, splits):
                    found[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes, strict=True))] += 1
            replicas = math.prod(ways for ways, dim in zip(mesh, chosen, strict=True) if dim is None)
            assert bool((found == replicas).all())


# _StridedShard -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dp", "tp", "differ"), [(2, 2, False), (3, 2, True), (2, 4, False), (4, 3, True)])
def test_strided_shards_match_fsdp_after_tensor_parallelism(dp: int, tp: int, differ: bool) -> None:
    """Under FSDP2, rank (d, t) has the d-th part of the t-th part. torch's placements name the two in reverse order."""
    refused = 0
    for size in range(1, 40):
        whole = numbered((size, 2))
        for d, t in itertools.product(range(dp), range(tp)):
            splits = (ShardSpec(0, dp, d, factor=tp), ShardSpec(0, tp, t))
            expected = chunk(chunk(whole, ShardSpec(0, tp, t)), ShardSpec(0, dp, d))
            as_torch_says = chunk(chunk(whole, splits[0]), splits[1])
            if torch.equal(expected, as_torch_says):
                held = pieces((size, 2), splits)
                assert len(held) <= 1
                assert torch.equal(filled(whole, held, tuple(expected.shape)), expected)
            else:
                assert size % tp
                refused += 1
                with pytest.raises(UnevenError, match="choose sizes that divide"):
                    pieces((size, 2), splits)
    assert bool(refused) == differ


def test_a_strided_shard_alone_has_several_boxes() -> None:
    splits = (ShardSpec(0, 2, 1, factor=3),)
    whole = numbered((12, 2))
    held = pieces((12, 2), splits)
    assert [(box.offset, box.sizes, at) for box, at in held] == [
        ((2, 0), (2, 2), (0, 0)),
        ((6, 0), (2, 2), (2, 0)),
        ((10, 0), (2, 2), (4, 0)),
    ]
    assert torch.equal(filled(whole, held, (6, 2)), chunk(whole, splits[0]))
    with pytest.raises(UnevenError):
        pieces((13, 2), splits)


def test_three_cuts_of_one_dimension() -> None:
    """Split by hand for a pipeline, then by tensor parallelism, then by FSDP2, on meshes (x, dp, tp)."""
    whole = numbered((48,))
    for x, d, t in itertools.product(range(2), range(3), range(4)):
        splits = (ShardSpec(0, 2, x), ShardSpec(0, 3, d, factor=4), ShardSpec(0, 4, t))
        expected = chunk(chunk(chunk(whole, ShardSpec(0, 2, x)), ShardSpec(0, 4, t)), ShardSpec(0, 3, d))
        assert torch.equal(filled(whole, pieces((48,), splits), (2,)), expected)


# Boxes -------------------------------------------------------------------------------------------------------------


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Region:
    offset = tuple(rng.randrange(size) for size in shape)
    return Region(offset, tuple(rng.randint(1, size - start) for size, start in zip(shape, offset, strict=True)))


def marked(shape: tuple[int, ...], boxes: list[Region]) -> Tensor:
    found = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        found[tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes, strict=True))] += 1
    return found


@pytest.mark.parametrize("seed", range(20))
def test_overlap_and_remainder_of_boxes(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        one, other = random_box(rng, shape), random_box(rng, shape)
        common = shared(one, other)
        both = marked(shape, [one]) * marked(shape, [other])
        assert torch.equal(marked(shape, [common] if common else []), both)
        assert shared(other, one) == common
        rest = without(one, other)
        # all counts are 0 or 1, so the rest has no overlaps
        assert torch.equal(marked(shape, rest), marked(shape, [one]) - both)
        many = [random_box(rng, shape) for _ in range(5)]
        left = uncovered(Region((0,) * len(shape), shape), tuple(many))
        assert torch.equal(marked(shape, list(left)), (marked(shape, many) == 0).long())


def test_empty_region_has_no_uncovered_part() -> None:
    assert uncovered(Region((0, 0), (0, 4)), ()) == ()
    assert uncovered(Region((), ()), ()) == (Region((), ()),)
    assert uncovered(Region((), ()), (Region((), ()),)) == ()


# Bytes -------------------------------------------------------------------------------------------------------------


def laid_out(rng: random.Random, shape: tuple[int, ...], order: list[int]) -> Tensor:
    """Return zeros of this shape with dimensions in this memory order. Rows may have gaps between them."""
    padded = [shape[dim] + rng.choice((0, 0, 3)) for dim in order]
    tensor = torch.zeros(padded, dtype=torch.int16)
    back = [order.index(dim) for dim in range(len(order))]
    return tensor.permute(back)[tuple(slice(0, size) for size in shape)]


def copy(source: Tensor, target: Tensor, runs: list[tuple[int, int, int]]) -> Tensor:
    """Copy the runs. Return how often each byte of the target's memory was written."""
    there, here = (memory(tensor) for tensor in (source, target))
    written = torch.zeros(len(here), dtype=torch.int64)
    for a, b, size in runs:
        assert size > 0
        here[b : b + size] = there[a : a + size]
        written[b : b + size] += 1
    return written


def memory(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def in_bytes(tensor: Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]


@pytest.mark.parametrize("seed", range(30))
def test_runs_copy_a_box_and_write_each_byte_once(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(0, 4)))
        order = rng.sample(range(len(shape)), len(shape))
        source, target = laid_out(rng, shape, order), laid_out(rng, shape, order)
        source.copy_(torch.randint(1, 1000, shape))
        box = random_box(rng, shape)
        part = tuple(slice(o, o + n) for o, n in zip(box.offset, box.sizes, strict=True))
        there, here = (2 * tensor[part].storage_offset() for tensor in (source, target))
        runs = segments(box.sizes, 2, there, in_bytes(source), here, in_bytes(target))
        joined = merged(runs)
        assert len(joined) <= len(runs)
        written = copy(source, target, joined)
        assert torch.equal(target[part], source[part])
        assert int(written.sum()) == 2 * math.prod(box.sizes) and int(written.max()) == 1
        assert int((target != 0).sum()) == math.prod(box.sizes), "nothing beside it"


def test_contiguous_runs_are_merged() -> None:
    assert segments((4, 6), 4, 0, (24, 4), 1000, (24, 4)) == [(0, 1000, 96)]
    assert segments((4, 3), 4, 12, (24, 4), 1000, (12, 4)) == [(12 + 24 * i, 1000 + 12 * i, 12) for i in range(4)]
    assert segments((2, 4, 6), 4, 0, (480, 24, 4), 0, (96, 24, 4)) == [(0, 0, 96), (480, 96, 96)]
    assert segments((), 8, 16, (), 32, ()) == [(16, 32, 8)]
    assert segments((3, 0), 8, 0, (8, 8), 0, (8, 8)) == []
    # One column: each element is a run. The stride of a dimension with one element is ignored.
    assert segments((3, 1), 2, 0, (10, 2), 0, (2, 2)) == [(0, 0, 2), (10, 2, 2), (20, 4, 2)]
    assert segments((1, 3), 2, 0, (0, 2), 0, (9999, 2)) == [(0, 0, 6)]


def test_another_order_of_dimensions_is_refused() -> None:
    with pytest.raises(LayoutError, match="another order"):
        segments((3, 4), 4, 0, (16, 4), 0, (4, 12))
    assert segments((3, 1), 4, 0, (16, 4), 0, (4, 12)) == [(16 * i, 4 * i, 4) for i in range(3)]


def test_tensors_that_overlap_themselves() -> None:
    x = torch.zeros(4, 6)
    for tensor in (x, x.t(), x[1:3], x[:, 2:5], x[:1, 2:3], x[:, ::2], x[:, 3], x[0, 0], x[:, :0], x[:1].expand(1, 6)):
        assert not overlaps_itself(tensor.shape, tensor.stride())
    for tensor in (x[:1].expand(4, 6), x.as_strided((3, 4), (2, 1)), x[:, :1].expand(4, 6)):
        assert overlaps_itself(tensor.shape, tensor.stride())
