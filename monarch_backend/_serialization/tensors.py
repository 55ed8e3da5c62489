"""Serialization of torch's tensors: the bytes of the viewed part as one buffer. Imported only where torch is.

Dense tensors keep their strides and are not copied; others are copied to dense ones. A leaf keeps ``requires_grad``; a
tensor with a history arrives as a value, without it. Two references to one tensor stay one tensor, but two tensors on
one memory arrive as two. Tensors on a device go through host memory and back to the same device.

Subclasses and other layouts (sparse, quantized, nested, meta) are pickled by torch, which sends storages. Those are
out-of-band buffers too, and tensors of one message that share a storage still share it.
"""

from __future__ import annotations

import ctypes
import functools
import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from monarch_backend._serialization.memory_layout import is_dense

if TYPE_CHECKING:
    from typing_extensions import Buffer

_STRIDED = torch.strided
_THROUGH_HOST = frozenset({"cuda", "xpu", "hpu", "mps"})  # devices whose memory is copied to the host and back
_NAMES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.") for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}


def reduce_tensor(tensor: torch.Tensor) -> Any:
    described = _describe(tensor)
    if described is None:
        return NotImplemented
    return _with_attributes(tensor, build_tensor, (*described, tensor.requires_grad and tensor.is_leaf))


def reduce_parameter(parameter: torch.nn.Parameter) -> Any:
    described = _describe(parameter)
    if described is None:
        return NotImplemented
    return _with_attributes(parameter, build_parameter, (*described, parameter.requires_grad))


def _with_attributes(tensor: torch.Tensor, build: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if not tensor.__dict__:
        return build, arguments
    return build, arguments, tensor.__dict__, None, None, set_attributes


def set_attributes(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def _describe(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Return the arguments of `build_tensor` up to ``device``; None where torch has to pickle the tensor."""
    if tensor.layout is not _STRIDED or tensor.is_quantized or tensor.is_nested or tensor._backward_hooks:
        return None
    device = None
    if not tensor.is_cpu:
        if tensor.device.type not in _THROUGH_HOST:
            return None
        device = str(tensor.device)
    conjugate = tensor.is_conj()
    if conjugate or tensor.is_neg() or device:
        tensor = tensor.detach()
        tensor = (tensor.conj() if conjugate else tensor).resolve_neg()
    size, stride = tuple(tensor.shape), tensor.stride()
    if not tensor.is_contiguous():
        tensor, stride = _dense(tensor.detach())
    if device:
        tensor = tensor.cpu()
    buffer = _memory(tensor, tensor.nbytes) if tensor.nbytes else None
    return buffer, _NAMES[tensor.dtype], size, stride, conjugate, device


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return a tensor without repeated or missing elements, and the strides of the given one on its memory."""
    repeated = [step == 0 and length > 1 for step, length in zip(tensor.stride(), tensor.shape, strict=True)]
    for axis in (axis for axis, is_repeated in enumerate(repeated) if is_repeated):
        tensor = tensor.narrow(axis, 0, 1)
    if not is_dense(tensor.shape, tensor.stride(), 1):
        tensor = tensor.clone(memory_format=torch.preserve_format)
    strides = zip(repeated, tensor.stride(), strict=True)
    return tensor, tuple(0 if is_repeated else step for is_repeated, step in strides)


@functools.cache
def _span(doublings: int) -> Any:
    """Return an array type. ctypes keeps a type for each length, so there are powers of two only, to be cut."""
    return ctypes.c_ubyte * (1 << doublings)


def _memory(owner: torch.Tensor | torch.UntypedStorage, nbytes: int) -> pickle.PickleBuffer:
    """Return the first ``nbytes`` at the owner's address, which keep it alive. Works without NumPy and for every
    dtype.
    """
    storage = owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner
    offset = owner.data_ptr() - storage.data_ptr()
    if offset + nbytes > storage.nbytes():
        raise ValueError(
            f"the tensor has {nbytes} bytes, but its storage only {storage.nbytes()}: its memory was freed"
        )
    memory: Any = _span(nbytes.bit_length()).from_address(owner.data_ptr())
    memory.owner = owner
    return pickle.PickleBuffer(memoryview(memory)[:nbytes])


def build_tensor(
    buffer: Buffer | None,
    dtype: str,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    conjugate: bool,
    device: str | None,
    requires_grad: bool,
) -> torch.Tensor:
    """Return the tensor that `reduce_tensor` took apart, on the memory of ``buffer``."""
    kind: torch.dtype = getattr(torch, dtype)
    if buffer is None:
        tensor = torch.empty_strided(size, stride, dtype=kind)
    else:
        tensor = torch.frombuffer(buffer, dtype=kind)
        if tensor.data_ptr() % kind.itemsize:
            tensor = torch.frombuffer(bytearray(buffer), dtype=kind)  # torch's kernels crash on elements out of line
        tensor = tensor.as_strided_(size, stride)  # in place: a view would have a base, and autograd treats it so
    if device is not None:
        tensor = tensor.to(device)
    if conjugate:  # on its own device: a copy to another one resolves it
        tensor = tensor.conj()
    return tensor.requires_grad_() if requires_grad else tensor


def build_parameter(*described: Any) -> torch.nn.Parameter:
    *data, requires_grad = described
    build: Callable[..., torch.Tensor] = build_tensor
    return torch.nn.Parameter(build(*data, False), requires_grad)


def reduce_storage(storage: torch.UntypedStorage) -> Any:
    """Return the pickler's reduction of a storage, which torch's own pickling leads to."""
    device = None
    if storage.device.type != "cpu":
        if storage.device.type not in _THROUGH_HOST:
            return NotImplemented
        device, storage = str(storage.device), storage.to(device=torch.device("cpu"))
    return build_storage, (_memory(storage, storage.nbytes()) if storage.nbytes() else None, device)


def build_storage(buffer: Buffer | None, device: str | None) -> torch.UntypedStorage:
    if buffer is None:
        return torch.empty(0, dtype=torch.uint8, device=device).untyped_storage()
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    return storage if device is None else storage.to(device=torch.device(device))


def reduce_typed_storage(storage: torch.storage.TypedStorage) -> Any:
    """Return the pickler's reduction of torch's wrapper of a storage. It uses the wrapper's private attribute."""
    untyped = storage._untyped_storage
    if untyped.device.type != "cpu" and untyped.device.type not in _THROUGH_HOST:
        return NotImplemented
    return build_typed_storage, (untyped, _NAMES[storage.dtype])


def build_typed_storage(storage: torch.UntypedStorage, dtype: str) -> torch.storage.TypedStorage:
    make: Any = torch.storage.TypedStorage
    typed: torch.storage.TypedStorage = make(wrap_storage=storage, dtype=getattr(torch, dtype), _internal=True)
    return typed


REDUCERS: dict[type, Callable[[Any], Any]] = {
    torch.Tensor: reduce_tensor,
    torch.nn.Parameter: reduce_parameter,
    torch.UntypedStorage: reduce_storage,
    torch.storage.TypedStorage: reduce_typed_storage,
}
