"""Where the shards of a tensor lie in the whole, what two of them share, and the runs of bytes that this makes.

Arithmetic only: integers in, integers out. No torch, no memory and no message here.

A tensor is cut by `ShardSpec`s, one after the other. What one rank holds is then a list of `Overlap`s: boxes of the
whole tensor, and where each begins in the rank's own. With torch's `Shard` it is a single box; only `_StridedShard` can
make more of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Span = tuple[int, int]  # start and stop along one dimension
Segment = tuple[int, int, int]  # where it is read, where it goes, how many bytes
Level = tuple[int, int, int]  # of a nest of loops: stride where it is read, stride where it goes, how often


class Region(NamedTuple):
    """A rectangular part of a tensor, one number of each per dimension."""

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
    """One dimension is cut like `torch.chunk` does, into `ways` parts, of which this rank has the one at
    `place`.

    With a factor f it is cut into f parts first, and each of them into `ways`: the rank has its part of each, one after
    the other. That is torch's `_StridedShard(dim, split_factor=f)`.
    """

    dim: int
    ways: int
    place: int
    factor: int = 1


class UnevenError(ValueError):
    """A dimension that `ShardSpec`s with a factor cut unevenly, which has no one meaning."""


# ---- shards


@functools.lru_cache(maxsize=65536)  # a model has few kinds of tensors and many of each
def pieces(shape: tuple[int, ...], splits: tuple[ShardSpec, ...]) -> tuple[Overlap, ...]:
    """What a rank holds of a tensor of this shape; nothing where its part is empty.

    Raises UnevenError.

    >>> pieces((5, 4), (ShardSpec(0, 2, 1), ShardSpec(1, 4, 3)))
    (Piece(box=Box(offset=(3, 3), sizes=(2, 1)), at=(0, 0)),)
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
    """The shape of what a rank holds. Raises UnevenError."""
    return tuple(sum(stop - start for start, stop in spans) for spans in _spans_by_dim(shape, splits))


def _spans_by_dim(shape: tuple[int, ...], splits: tuple[ShardSpec, ...]) -> list[list[Span]]:
    return [_spans(size, [split for split in splits if split.dim == dim]) for dim, size in enumerate(shape)]


def _placed(spans: list[Span]) -> Iterable[tuple[Span, int]]:
    """Each with where it begins when they lie one after the other."""
    starts = itertools.accumulate((stop - start for start, stop in spans), initial=0)
    return zip(spans, starts, strict=False)


def _spans(size: int, splits: list[ShardSpec]) -> list[Span]:
    """The parts of 0:size that are left after these splits, in the order in which a rank has them."""
    found = _cut(size, splits)
    if all(split.factor == 1 for split in splits):
        return found
    # Two readings: by torch's own words each split is applied to what the one before has left; FSDP2, which makes these
    # placements after tensor parallelism, cuts in the order that the factors stand for. On even sizes both are the
    # same. Elsewhere torch's releases disagree with each other and with FSDP2, so bytes would land in wrong rows.
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
        # Of each of the `factor` parts, the one at `place`.
        chosen = [_chunk(part, split.ways, split.place) for part in _chunks((0, total), split.factor)]
        spans = _joined(span for start, stop in chosen for span in _slice(spans, start, stop))
    return spans


def _order(splits: list[ShardSpec]) -> list[ShardSpec] | None:
    """The same cuts as a sequence without factors, if there is one: a factor counts the parts that are made before."""
    order: list[ShardSpec] = []
    for split in reversed(splits):
        made = list(itertools.accumulate((other.ways for other in order), lambda a, b: a * b, initial=1))
        if split.factor not in made:
            return None
        order.insert(made.index(split.factor), split._replace(factor=1))
    return order


def _chunks(span: Span, ways: int) -> list[Span]:
    return [_chunk(span, ways, index) for index in range(ways)]


def _chunk(span: Span, ways: int, index: int) -> Span:
    """As torch.chunk: all have the same size but the last ones, which are smaller or empty."""
    start, stop = span
    size = -(-(stop - start) // ways)
    return min(start + size * index, stop), min(start + size * (index + 1), stop)


def _slice(spans: list[Span], start: int, stop: int) -> Iterable[Span]:
    """Elements start:stop of these, counted from the beginning of the first."""
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
    """What both have, or None."""
    offset = tuple(map(max, one.offset, other.offset))
    sizes = tuple(
        min(a + m, b + n) - start
        for a, m, b, n, start in zip(one.offset, one.sizes, other.offset, other.sizes, offset, strict=True)
    )
    return Region(offset, sizes) if all(size > 0 for size in sizes) else None


def without(box: Region, other: Region) -> list[Region]:
    """What of a box is not in the other, in boxes that do not overlap."""
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
        offset[dim], sizes[dim] = start, size  # what is left to look at is inside the other in this dimension
    return rest


@functools.lru_cache(maxsize=4096)
def uncovered(whole: Region, boxes: tuple[Region, ...]) -> tuple[Region, ...]:
    """What of a whole is in none of these boxes.

    >>> uncovered(Region((0,), (6,)), (Region((0,), (2,)), Region((3,), (3,))))
    (Box(offset=(2,), sizes=(1,)),)
    """
    left = [whole] if all(whole.sizes) else []
    for box in boxes:
        left = [rest for part in left for rest in without(part, box)]
    return tuple(left)


# ---- bytes


class LayoutError(ValueError):
    """Two layouts in memory between which there are no runs of bytes."""


def overlaps_itself(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may lie in the same place, as those of an expanded one do.

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
    """The runs of bytes of a box of `sizes` elements that begins at `there` and goes to `here`; strides in bytes.

    As few runs as there can be. Raises LayoutError where the dimensions lie in another order on the other side, so
    that there would be a run for each element.

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
    """In order of where they are read; those that follow each other on both sides are one.

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
