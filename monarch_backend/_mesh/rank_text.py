"""Short text for a set of ranks, for logs and errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from monarch_backend._mesh.extent import Extent, checked_rank

_WORDS = 120  # characters that a set of ranks may take in a message
_MORE = len(" ... and 100000 more")

_Box: TypeAlias = tuple[tuple[int, ...], ...]  # for each dimension the coordinates; the box is their product
_Runs: TypeAlias = list[list[tuple[int, int]]]  # the same, as first and last of consecutive coordinates


def ranks_in_words(extent: Extent, ranks: Iterable[int]) -> str:
    """Return a short text for a set of ranks, for logs and errors. It has about 120 characters at most.

    Raises IndexError for a rank outside the extent.

    >>> ranks_in_words(Extent.of({"gpus": 8}), [1, 3, 4, 5])
    'gpus 1,3-5'
    >>> hosts = Extent.of({"hosts": 2, "gpus": 4})
    >>> ranks_in_words(hosts, range(8)), ranks_in_words(hosts, [0, 1, 2, 3, 6])
    ('hosts 0-1 gpus 0-3', 'hosts 0 gpus 0-3; hosts 1 gpus 2')
    >>> ranks_in_words(Extent.of({"gpus": 1000}), range(0, 1000, 2))[-28:]
    '58,60,62,64 ... and 467 more'
    """
    chosen = sorted({checked_rank(rank, extent) for rank in ranks})
    if not chosen:
        return "no ranks"
    if not extent.labels:
        return "rank 0"
    boxes = [[_runs(coords) for coords in box] for box in _boxes(extent, chosen)]
    if sum(len(runs) for box in boxes for runs in box) <= _WORDS:  # else it is too long with any labels
        words = "; ".join(_box_in_words(extent.labels, box) for box in boxes)
        if len(words) <= _WORDS:
            return words
    return _shortened(extent.labels, boxes, len(chosen))


def _boxes(extent: Extent, ranks: list[int]) -> list[_Box]:
    if len(ranks) == len(extent):
        return [tuple(tuple(range(size)) for size in extent.sizes)]
    points = {tuple(rank // stride % size for stride, size in extent._places.values()) for rank in ranks}
    return sorted(_products(points, len(extent.labels)), key=lambda box: [coords[0] for coords in box])


def _products(points: set[tuple[int, ...]], dims: int) -> list[_Box]:
    """Return few products of coordinates that together are exactly these points."""
    if dims == 1:
        return [(tuple(sorted(index for (index,) in points)),)]
    best: dict[frozenset[tuple[int, ...]], list[int]] = {}
    best_dim = -1
    for dim in range(dims):  # greedy: the dimension along which the fewest different slices occur
        slices: dict[int, set[tuple[int, ...]]] = {}
        for point in points:
            slices.setdefault(point[dim], set()).add(point[:dim] + point[dim + 1 :])
        groups: dict[frozenset[tuple[int, ...]], list[int]] = {}
        for index, rest in slices.items():
            groups.setdefault(frozenset(rest), []).append(index)
        if best_dim < 0 or len(groups) < len(best):
            best, best_dim = groups, dim
    return [
        (*box[:best_dim], tuple(sorted(indices)), *box[best_dim:])
        for rest, indices in best.items()
        for box in _products(set(rest), dims - 1)
    ]


def _runs(coords: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for index in coords:
        if runs and runs[-1][1] == index - 1:
            runs[-1] = (runs[-1][0], index)
        else:
            runs.append((index, index))
    return runs


def _box_in_words(labels: tuple[str, ...], box: _Runs) -> str:
    named = zip(labels, box, strict=True)
    return " ".join(
        f"{label} " + ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)
        for label, runs in named
    )


def _shortened(labels: tuple[str, ...], boxes: list[_Runs], left: int) -> str:
    """Return as many boxes as fit, and the number of ranks that are not among them."""
    words = ""
    for box in boxes:
        room = _WORDS - _MORE - len(words) - len("; ")
        part = [runs[:room] if room > 0 else runs[:1] for runs in box]
        while len(text := _box_in_words(labels, part)) > room and max(map(len, part)) > 1:
            max(part, key=len).pop()
        if len(text) > room and words:
            break
        words += "; " * bool(words) + text
        left -= math.prod(sum(last - first + 1 for first, last in runs) for runs in part)
    return f"{words} ... and {left} more" if left else words
