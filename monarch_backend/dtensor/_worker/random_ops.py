"""Random operations on a worker: it draws the whole tensor's numbers and keeps its shard's, or draws its own."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._torch_internals import cpu_generator as _generators
from monarch_backend.dtensor._worker import op_functions
from monarch_backend.process_group._xla import graph_hash_workaround

_lost: list[BaseException] = []
"""Error that kept this worker from drawing numbers that the others have drawn; its generator is out of step."""
_stream = 0
"""This worker's stream of numbers that differ by rank."""
_find = functools.cache(op_functions.find)
DRAWN_ON_THE_CPU = ("cpu", "xla")
"""Devices that use the CPU's generator, whose numbers are the same in any process."""


def _generator(device: torch.device) -> torch.Generator:
    if device.type in DRAWN_ON_THE_CPU:
        return torch.default_generator
    generator: torch.Generator = torch.get_device_module(device).default_generators[device.index or 0]
    return generator


def state_of(device: torch.device) -> bytes:
    """Return the state on which the next numbers depend."""
    return _generators.state_of(_generator(device))


def set_state(state: bytes, device: torch.device) -> None:
    _generators.set_state(_generator(device), state)
    _lost.clear()


def fill(
    tensor: torch.Tensor, name: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype,
    device: torch.device, cuts: Sequence[Sequence[int]], keeps: int, *args: Any,
) -> None:  # fmt: skip
    """Write a shard's part. Draws before it checks the shard: one that failed before must not skip numbers."""
    whole = _drawn(name, shape, stride, dtype, device, args)
    for dim, start, length in cuts:
        whole = whole.narrow(dim, start, length)
    tensor.copy_(whole if keeps else torch.zeros((), dtype=dtype, device=device))


def drawn(
    name: str, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device,
    cuts: Sequence[Sequence[int]], keeps: int, *args: Any,
) -> torch.Tensor:  # fmt: skip
    """Return a new tensor with the shard's numbers, as `fill` writes them."""
    whole = _drawn(name, shape, stride, dtype, device, args)
    for dim, start, length in cuts:
        whole = whole.narrow(dim, start, length)
    return whole.contiguous() if keeps else torch.zeros(whole.shape, dtype=dtype, device=device)


def dropped(tensor: Any, mask: Any, p: float) -> tuple[Any, Any]:
    """Return the results of ``native_dropout`` for this mask."""
    return (tensor * mask) * (0.0 if p == 1 else 1 / (1.0 - p)), mask


def _drawn(name: str, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device, args: Any) -> torch.Tensor:
    if _lost:
        raise RuntimeError(
            "this worker has missed random numbers that the others have drawn, because of an earlier failure "
            f"({_lost[0]!r}): call torch.manual_seed() before drawing more"
        )
    try:
        where = torch.device("cpu") if device.type in DRAWN_ON_THE_CPU else device
        whole = torch.empty_strided(shape, stride, dtype=dtype, device=where)
        _find(name)(whole, *args)
        whole = whole.to(device)
    except BaseException as error:
        _lost.append(error)
        raise
    return whole


def whole(name: str, *args: Any, **kwargs: Any) -> Any:
    """Run the operation unchanged; its arguments are whole tensors."""
    return _beside(_find(name), args, kwargs)


def _beside(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function; XLA tensors are replaced by copies on the CPU, which draws."""
    tensors = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    device = next((each.device for each in tensors if each.device.type == "xla"), None)
    if device is None:
        return function(*args, **kwargs)
    copies = dict(zip(map(id, tensors), graph_hash_workaround.on_host(tensors), strict=True))
    args, kwargs = pytree.tree_map(lambda v: copies[id(v)] if isinstance(v, torch.Tensor) else v, (args, kwargs))
    result = function(*args, **kwargs)
    moved = {id(copies[id(each)]): each.copy_(copies[id(each)]) for each in tensors}  # it may have changed them
    return pytree.tree_map_only(torch.Tensor, lambda v: moved[id(v)] if id(v) in moved else v.to(device), result)


def set_stream(stream: int) -> None:
    global _stream
    _stream = stream


def own(*args: Any, _name: str, _seed: float, _own_stream: int | None = None, **kwargs: Any) -> Any:
    """Run the operation with numbers that follow from the seed and the given stream, or this worker's."""
    device = next(each.device for each in args if isinstance(each, torch.Tensor))
    generator = _generator(device)
    before = generator.get_state()
    generator.manual_seed(_mixed(int(_seed), _stream if _own_stream is None else _own_stream))
    try:
        return _beside(_find(_name), args, kwargs)
    finally:
        generator.set_state(before)


def _mixed(seed: int, stream: int) -> int:
    """Mix seed and stream by splitmix64, so that neighbouring seeds give unrelated numbers."""
    mixed = (seed + (stream + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % (1 << 64)
    return mixed ^ (mixed >> 31)
