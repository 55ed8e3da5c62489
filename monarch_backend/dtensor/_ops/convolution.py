"""Convolutions of DTensors: sharded by batch, by channels, or whole.

torch's DTensor shards them by batch, or by the last dimension with a ring of messages between ranks, which is code of
one rank. It ignores sharded weights. Here an image that is sharded by height or width is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from monarch_backend.dtensor._dispatch import local_results
from monarch_backend.dtensor._per_rank import output_strides, per_rank_int

_aten = torch.ops.aten

Way = dict[str, Any]
"""Placements of all tensors on one dimension of the mesh; "x": input, "w": weight, "b": bias, "y": result."""

WHOLE: Way = {each: Replicate() for each in "xwby"}
BY_BATCH: Way = {"x": Shard(0), "w": Replicate(), "b": Replicate(), "y": Shard(0)}


class _Options(NamedTuple):
    stride: Any
    padding: Any
    dilation: Any
    transposed: bool
    output_padding: Any
    groups: int

    def ways(self, x: Any, w: Any, has_bias: bool) -> list[Way]:
        """Return placements by dimension of the mesh; sharded tensors keep their placements if possible."""
        made, given = (1, 0) if self.transposed else (0, 1)  # the weight's dimensions of the channels
        by_made = {"x": Replicate(), "w": Shard(made), "b": Shard(0), "y": Shard(1)}
        by_given = {"x": Shard(1), "w": Shard(given), "b": Replicate(), "y": Partial()}

        def way(of_x: Any, of_w: Any) -> Way:
            if of_x.is_shard(0):
                return BY_BATCH
            if self.groups == 1 and of_w.is_shard(made) and _everywhere(w, made):
                return by_made
            if (
                self.groups == 1
                and of_w.is_shard(given)
                and _everywhere(w, given)
                and of_x.is_shard(1)
                and not has_bias
            ):
                return by_given
            return WHOLE

        return list(map(way, x.placements, w.placements))


def forward(func: Any, args: Any, _kwargs: Any) -> Any:
    mesh, (x, w, b) = local_results.on_one_mesh(args[:3])
    options = _Options(*args[3:])
    ways = options.ways(x, w, b is not None)
    locals_ = [_local(each, mesh, ways, letter) for each, letter in zip((x, w, b), "xwb", strict=True)]
    (whole,) = local_results.wholes(func, (x, w, b, *args[3:]))
    found = func(*locals_, *args[3:])
    return local_results.of_parts(found, output_strides.as_part(whole, found), mesh, [way["y"] for way in ways])


def backward(func: Any, args: Any, _kwargs: Any) -> Any:
    mesh, (y, x, w) = local_results.on_one_mesh(args[:3])
    bias_sizes, wanted = args[3], args[10]
    options = _Options(*args[4:10])
    ways = options.ways(x, w, bool(wanted[2]))
    local = [_local(each, mesh, ways, letter) for each, letter in zip((y, x, w), "yxw", strict=True)]
    sizes = None if bias_sizes is None else [local[0].size(1)]
    wholes = local_results.wholes(func, (y, x, w, *args[3:]))
    found = func(*local, sizes, *args[4:])
    return tuple(
        None
        if each is None
        else local_results.of_parts(
            each, output_strides.as_part(whole, each), mesh, [_gradient(way, letter) for way in ways]
        )
        for each, whole, letter in zip(found, wholes, "xwb", strict=True)
    )


HANDLERS: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: forward,
    _aten.convolution_backward.default: backward,
}


def _everywhere(w: Any, dim: int) -> bool:
    """Whether each rank has channels of the weight, without which torch's kernels fail."""
    size = w._local_tensor.size(dim)
    return 0 not in (per_rank_int.values_of(size) or (size,))


def _gradient(way: Way, letter: str) -> Any:
    """Return the placement of the gradient for this input: a replicated input has a partial gradient."""
    if way is WHOLE or not way[letter].is_replicate():
        return way[letter]
    return Replicate() if letter == "b" and way["y"].is_partial() else Partial()


def _local(tensor: Any, mesh: Any, ways: list[Way], letter: str) -> Any:
    if tensor is None:
        return None
    there = [Replicate() if letter == "y" and way["y"].is_partial() else way[letter] for way in ways]
    return tensor.redistribute(mesh, there)._local_tensor
