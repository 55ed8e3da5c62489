"""Geometry of shards: their boxes in the whole tensor, the overlap of two shards, and the runs of bytes to copy.

This module is integer arithmetic only. It uses neither torch nor memory nor messages.

A sequence of `ShardSpec`s shards a tensor. The part of one rank is a list of `Overlap`s: boxes of the whole tensor,
with the index in the local tensor at which each begins. torch's `Shard` makes one box; only `_StridedShard` can make
more.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Span = tuple[int, int]  # start and stop along one dimension
Segment = tuple[int, int, int]  # source position, destination position, bytes
Level = tuple[int, int, int]  # of nested loops: source stride, destination stride, iterations


class Region(NamedTuple):
    """A box of a tensor: offset and size in each dimension."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        spans = (f"{start}:{start + size}" for start, size in zip(self.offset, self.sizes, strict=True))
        return f"[{', '.join(spans)}]"


class Overlap(NamedTuple):
    """A box of the whole tensor, and the index in the local tensor at which it begins."""

    box: Region
    at: tuple[int, ...]


class ShardSpec(NamedTuple):
    """One dimension is split into `ways` parts, as `torch.chunk` does. This rank has the part at `place`.

    With a factor f, the dimension is split into f parts first, and each of them into `ways`. The rank then has its part
    of each, in order. That is torch's `_StridedShard(dim, split_factor=f)`.
    """

    dim: int
    ways: int
    place: int
    factor: int = 1


class UnevenError(ValueError):
    """`ShardSpec`s with a factor split a dimension unevenly, which is ambiguous."""


# ---- shards


@functools.lru_cache(maxsize=65536)  # cached because a model has many tensors of few shapes
def pieces(shape: tuple[int, ...], splits: tuple[ShardSpec, ...]) -> tuple[Overlap, ...]:
    """Return the boxes of a tensor of this shape that a rank has. Empty if its part is empty.

    Raises UnevenError.

    >>> pieces((5, 4), (ShardSpec(0, 2, 1), ShardSpec(1, 4, 3)))
    (Overlap(box=Region(offset=(3, 3), sizes=(2, 1)), at=(0, 0)),)
    """
    if 0 in shape:
        return ()
    return tuple(
        Overlap(
            Region(tuple(span[0] for span, _ in parts), tuple(span[1] - span[0] for span, _ in parts)),
            tuple(at for _, at in parts),
        )
        for parts in itertools.product(*(_placed(spans) for spans in _spans_by_dim(shape, splits)))
    )


@functools.lru_cache(maxsize=65536)
def local_shape(shape: tuple[int, ...], splits: tuple[ShardSpec, ...]) -> tuple[int, ...]:
    return tuple(sum(stop - start for start, stop in spans) for spans in _spans_by_dim(shape, splits))


def _spans_by_dim(shape: tuple[int, ...], splits: tuple[ShardSpec, ...]) -> list[list[Span]]:
    return [_spans(size, [split for split in splits if split.dim == dim]) for dim, size in enumerate(shape)]


def _placed(spans: list[Span]) -> Iterable[tuple[Span, int]]:
    """Pair each span with its start in the concatenation of all."""
    starts = itertools.accumulate((stop - start for start, stop in spans), initial=0)
    return zip(spans, starts, strict=False)


def _spans(size: int, splits: list[ShardSpec]) -> list[Span]:
    """Return the spans of 0:size that are left after these splits, in the rank's order."""
    found = _cut(size, splits)
    if all(split.factor == 1 for split in splits):
        return found
    # Two readings exist. By torch's documentation each split applies to the result of the split before it. FSDP2 makes
    # these placements after tensor parallelism, and splits in the order that the factors imply. Both agree on even
    # sizes. On uneven sizes torch's releases disagree with each other and with FSDP2, so bytes would arrive in wrong
    # rows.
    order = _order(splits)
    if order is not None and _cut(size, order) == found:
        return found
    if order is None and size % math.prod(split.ways * split.factor for split in splits) == 0:
        return found
    raise UnevenError(
        f"a dimension of {size} is cut unevenly by {_told(splits)}, which torch and FSDP2 do not read in the same way: "
        "choose sizes that divide, or redistribute() to Shard and Replicate"
    )


def _told(splits: list[ShardSpec]) -> str:
    return " and ".join(
        f"_StridedShard(split_factor={s.factor}) into {s.ways}" if s.factor > 1 else f"Shard into {s.ways}"
        for s in splits
    )


def _cut(size: int, splits: Iterable[ShardSpec]) -> list[Span]:
    spans: list[Span] = [(0, size)]
    for split in splits:
        total = sum(stop - start for start, stop in spans)
        # The part at `place` of each of the `factor` parts.
        parts = [_chunk((0, total), split.factor, index) for index in range(split.factor)]
        chosen = [_chunk(part, split.ways, split.place) for part in parts]
        spans = _joined(span for start, stop in chosen for span in _slice(spans, start, stop))
    return spans


def _order(splits: list[ShardSpec]) -> list[ShardSpec] | None:
    """Return the same splits as a sequence without factors, or None.

    A factor counts the parts that earlier splits make.
    """
    order: list[ShardSpec] = []
    for split in reversed(splits):
        made = list(itertools.accumulate((other.ways for other in order), lambda a, b: a * b, initial=1))
        if split.factor not in made:
            return None
        order.insert(made.index(split.factor), split._replace(factor=1))
    return order


def _chunk(span: Span, ways: int, index: int) -> Span:
    """Return one chunk as torch.chunk does: all have the same size, except the last ones, which are smaller or
    empty.
    """
    start, stop = span
    size = -(-(stop - start) // ways)
    return min(start + size * index, stop), min(start + size * (index + 1), stop)


def _slice(spans: list[Span], start: int, stop: int) -> Iterable[Span]:
    for (first, last), at in _placed(spans):
        low, high = max(first, first + start - at), min(last, first + stop - at)
        if low < high:
            yield low, high


def _joined(spans: Iterable[Span]) -> list[Span]:
    joined: list[Span] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return joined


# ---- boxes


def shared(one: Region, other: Region) -> Region | None:
    offset = tuple(map(max, one.offset, other.offset))
    sizes = tuple(
        min(a + m, b + n) - start
        for a, m, b, n, start in zip(one.offset, one.sizes, other.offset, other.sizes, offset, strict=True)
    )
    return Region(offset, sizes) if all(size > 0 for size in sizes) else None


def without(box: Region, other: Region) -> list[Region]:
    """Return one box minus the other, as boxes that do not overlap."""
    common = shared(box, other)
    if common is None:
        return [box]
    rest = []
    offset, sizes = list(box.offset), list(box.sizes)
    for dim, (start, size) in enumerate(zip(common.offset, common.sizes, strict=True)):
        before, after = start - offset[dim], offset[dim] + sizes[dim] - start - size
        if before:
            rest.append(Region(tuple(offset), (*sizes[:dim], before, *sizes[dim + 1 :])))
        if after:
            rest.append(
                Region((*offset[:dim], start + size, *offset[dim + 1 :]), (*sizes[:dim], after, *sizes[dim + 1 :]))
            )
        offset[dim], sizes[dim] = start, size  # the rest is inside the other box in this dimension
    return rest


@functools.lru_cache(maxsize=4096)
def uncovered(whole: Region, boxes: tuple[Region, ...]) -> tuple[Region, ...]:
    """Return the parts of a whole that are in none of these boxes.

    >>> uncovered(Region((0,), (6,)), (Region((0,), (2,)), Region((3,), (3,))))
    (Region(offset=(2,), sizes=(1,)),)
    """
    left = [whole] if all(whole.sizes) else []
    for box in boxes:
        left = [rest for part in left for rest in without(part, box)]
    return tuple(left)


# ---- bytes


class LayoutError(ValueError):
    """Two memory layouts differ so that no run of bytes is contiguous in both."""


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Return whether two elements of a tensor may share memory, as those of an expanded tensor do.

    >>> overlaps_itself((4, 3), (8, 1)), overlaps_itself((4, 3), (1, 4)), overlaps_itself((4, 3), (0, 1))
    (False, False, True)
    """
    if 0 in sizes:
        return False
    needed = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1):
        if stride < needed:
            return True
        needed = stride * size
    return False


def segments(
    sizes: Sequence[int],
    itemsize: int,
    there: int,
    strides_there: Sequence[int],
    here: int,
    strides_here: Sequence[int],
) -> list[Segment]:
    """Return the runs of bytes of a box of `sizes` elements, from `there` to `here`. Strides are in bytes.

    The number of runs is minimal. Raises LayoutError if the dimensions have another order on the other side: each
    element would be a run.

    >>> segments((2, 3), 4, 100, (40, 4), 0, (12, 4))
    [(100, 0, 12), (140, 12, 12)]
    """
    if not all(sizes):
        return []
    dims = zip(strides_there, strides_here, sizes, strict=True)
    levels: list[Level] = sorted((level for level in dims if level[2] > 1), reverse=True)
    if any(outer[1] < inner[1] for outer, inner in itertools.pairwise(levels)):
        raise LayoutError("their dimensions lie in memory in another order")
    run = itemsize
    while levels and levels[-1][0] == levels[-1][1] == run:
        run *= levels.pop()[2]
    starts = [(there, here)]
    for stride_there, stride_here, times in levels:
        steps = [(stride_there * i, stride_here * i) for i in range(times)]
        starts = [(a + i, b + j) for a, b in starts for i, j in steps]
    return [(a, b, run) for a, b in starts]


def merged(parts: Iterable[Segment]) -> list[Segment]:
    """Return segments in the order of their source, with those joined that are adjacent on both sides.

    >>> merged([(8, 108, 8), (0, 100, 8), (16, 0, 4)])
    [(0, 100, 16), (16, 0, 4)]
    """
    joined: list[Segment] = []
    for there, here, size in sorted(parts):
        if joined:
            last_there, last_here, last_size = joined[-1]
            if last_there + last_size == there and last_here + last_size == here:
                joined[-1] = last_there, last_here, last_size + size
                continue
        joined.append((there, here, size))
    return joined
