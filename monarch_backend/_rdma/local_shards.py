"""A rank's shards of a state dict: their flat names, and the position of their bytes in memory.

sharded_state.py registers and sends them.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from monarch_backend._rdma import dtensor_layout
from monarch_backend._rdma.local_memory import refuse_subclass
from monarch_backend._rdma.shard_geometry import Overlap, Region, local_shape, overlaps_itself, pieces

MAX_VALUE_BYTES = 1 << 16  # bytes of a pickled value that is not a tensor; it is sent with every description


class StateEntry(NamedTuple):
    """One value of a state dict, with the mapping and key that hold it."""

    name: str
    value: Any
    holder: MutableMapping[Any, Any]
    key: Any


class LocalShard(NamedTuple):
    tensor: Tensor  # plain, with the memory of the part
    shape: tuple[int, ...]  # of the whole tensor
    pieces: tuple[Overlap, ...]
    strides: tuple[int, ...]  # bytes


def leaves(state_dict: Mapping[str, Any]) -> dict[str, StateEntry]:
    """Return the values of a nested state dict by flat names such as ``"optimizer/state/0/exp_avg"``.

    Raises TypeError for an object that is not a mapping and for tensors in lists, ValueError for two equal names.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict is a mapping of names to tensors, not {type(state_dict).__name__}")
    found: dict[str, StateEntry] = {}
    for leaf in _walk("", state_dict):
        if leaf.name in found:
            raise ValueError(f"{leaf.name}: two entries of the state dict have this name once it is flat; rename one")
        found[leaf.name] = leaf
    return found


def _walk(prefix: str, holder: Any) -> Iterator[StateEntry]:
    for key, value in holder.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _walk(f"{name}/", value)
        else:
            if _holds_tensors(value):
                raise TypeError(f"{name}: tensors in a {type(value).__name__} have no names; put them into a dict")
            yield StateEntry(name, value, holder, key)


def _holds_tensors(value: Any) -> bool:
    if not isinstance(value, (list, tuple, set)):
        return False
    parts = [part for item in value for part in (item.values() if isinstance(item, Mapping) else (item,))]
    return any(isinstance(part, Tensor) or _holds_tensors(part) for part in parts)


def check_value(name: str, value: Any) -> bytes:
    """Return the pickle of a value that is not a tensor.

    Raises ValueError if it is too large, TypeError if it can't be pickled.
    """
    try:
        pickled = pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{name}: {type(value).__name__} is no tensor and can't be pickled: leave it out ({error})"
        ) from error
    if len(pickled) > MAX_VALUE_BYTES:
        raise ValueError(
            f"{name}: {type(value).__name__} of {len(pickled)} bytes is no tensor, and values travel with every "
            f"description: make it a tensor, or leave it out (the limit is {MAX_VALUE_BYTES})"
        )
    return pickled


def local(name: str, tensor: Tensor) -> LocalShard:
    """Return the position of this rank's part of a tensor in memory.

    Raises ValueError, with the tensor's name, if the part has no memory that can be shared.
    """
    try:
        return _local(tensor)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _local(tensor: Tensor) -> LocalShard:
    shape = tuple(tensor.shape)
    with torch.no_grad():  # else a view would record autograd history
        mine = tensor.to_local() if dtensor_layout.is_dtensor(tensor) else tensor
    _refuse_what_is_no_memory(mine)
    mine = mine.detach()
    held: tuple[Overlap, ...] = ()
    if not dtensor_layout.is_dtensor(tensor):
        held = pieces(shape, ())
    elif (splits := dtensor_layout.splits(tensor)) is not None:
        held, expected = pieces(shape, splits), local_shape(shape, splits)
        if tuple(mine.shape) != expected:
            raise ValueError(
                f"the local tensor has shape {tuple(mine.shape)}, and {tensor.placements} of {shape} make {expected} "
                "on this rank: shards must be cut as torch.chunk cuts"
            )
    if not mine.numel():
        held = ()
    if held and overlaps_itself(mine.shape, mine.stride()):
        raise ValueError(
            f"some of its elements share their place in memory (shape {tuple(mine.shape)}, strides {mine.stride()}, as "
            "expand() makes them): use a copy, .contiguous()"
        )
    return LocalShard(mine, shape, held, tuple(stride * mine.element_size() for stride in mine.stride()))


def _refuse_what_is_no_memory(mine: Tensor) -> None:
    try:
        refuse_subclass(mine, "its local tensor")
    except TypeError as error:
        raise ValueError(str(error)) from None
    if not (mine.is_cpu or mine.is_cuda) or mine.layout != torch.strided or mine.is_quantized:
        kind = "quantized" if mine.is_quantized else str(mine.layout).removeprefix("torch.")
        raise ValueError(
            f"only strided tensors in memory of the CPU, or of GPUs, can be shared, and this one is {kind} on "
            f"{mine.device}"
        )
    if mine.is_conj() or mine.is_neg():
        raise ValueError("it is a conjugate or negated view: use .resolve_conj() or .resolve_neg(), which copy it")
    last = mine.storage_offset() + sum((n - 1) * stride for n, stride in zip(mine.shape, mine.stride(), strict=True))
    if mine.numel() and mine.untyped_storage().nbytes() < (last + 1) * mine.element_size():
        raise ValueError("the memory of its storage was freed (is it an unsharded parameter of FSDP2?)")


def offset_in(box: Region, piece: Overlap, strides: tuple[int, ...]) -> int:
    """Return the bytes from a local tensor's first element to the first element of a box in this piece."""
    return sum(
        (start - first + at) * stride
        for start, first, at, stride in zip(box.offset, piece.box.offset, piece.at, strides, strict=True)
    )
