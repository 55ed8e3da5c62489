"""Memory behind a user's object: its address, its size, and whether it is writable.

Objects are tensors, NumPy arrays and others with the buffer protocol; gpu_memory.py handles those on GPUs. Objects that
can't be transferred are refused here, in the caller's thread. This module registers and copies nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from monarch_backend import _native
from monarch_backend._rdma import gpu_memory
from monarch_backend._rdma.dtensor_layout import is_dtensor

CPU = "cpu"

_NO_NUMPY = ("Numpy is not available", "PyTorch was compiled without NumPy support")
"""Errors of a torch that can't use NumPy."""


class LocalMemory(NamedTuple):
    """A range of memory of this process. Its address stays valid while ``keep`` and ``hold`` live."""

    address: int
    nbytes: int
    writable: bool
    device: str
    keep: Any  # the storage of a tensor, an array, or another object with the buffer protocol
    hold: Any = None  # prevents a resize


def memory_of(value: Any, what: str) -> LocalMemory:
    """Return the memory of a contiguous tensor, array or buffer. ``what`` names it in errors.

    Raises TypeError for an object without memory of its own, or with Python objects in it. Raises ValueError for memory
    that is not contiguous or is empty, and RDMAError for GPU memory whose driver can't be used.
    """
    if isinstance(value, torch.Tensor):
        found = _of_tensor(value, what)
    elif hasattr(value, "__cuda_array_interface__"):
        if _has_objects(value.__cuda_array_interface__):
            _refuse_objects(value, what, value.__cuda_array_interface__["typestr"])
        address, nbytes, may_write, device = gpu_memory.of_array(value, what)
        found = LocalMemory(operator.index(address), operator.index(nbytes), may_write, device, value)
    else:
        found = _of_buffer(value, what)
    if found.nbytes == 0:
        raise ValueError(f"{what} has no bytes: there is nothing to transfer")
    return found


def frozen(memory: LocalMemory) -> LocalMemory:
    """Return the same memory, protected against a resize, because torch would free what other processes read.

    A NumPy array on the storage prevents the resize.
    """
    if not isinstance(memory.keep, torch.UntypedStorage) or memory.device != CPU:
        return memory  # torch has no way to prevent a resize of GPU memory
    try:
        # Name the device, because the program may have another default.
        held = torch.empty(0, dtype=torch.uint8, device=CPU).set_(memory.keep).numpy()
    except RuntimeError as error:
        if not str(error).startswith(_NO_NUMPY):
            raise
        return memory
    return memory._replace(hold=held)


def watch(value: Any, memory: LocalMemory) -> Callable[[], bool] | None:
    """Return a function that tells whether a tensor still has all of this memory. None where only `memory_of` could
    tell.

    The function runs before each small copy, which takes microseconds, so attributes are looked up here.
    """
    keep, address, nbytes = memory.keep, memory.address, memory.nbytes
    if not isinstance(keep, torch.UntypedStorage):
        return None
    data_ptr, is_contiguous, start, size = value.data_ptr, value.is_contiguous, keep.data_ptr, keep.nbytes
    is_conj, is_neg = value.is_conj, value.is_neg
    return lambda: (
        data_ptr() == address
        and value.nbytes == nbytes
        and is_contiguous()
        and size() - (address - start()) >= nbytes
        and not (is_conj() or is_neg())
    )


def writable(memory: LocalMemory, what: str) -> LocalMemory:
    """Return the same memory. Raises ValueError if it is read-only."""
    if not memory.writable:
        raise ValueError(f"{what} is read-only: give memory that may be written to")
    return memory


def _of_tensor(tensor: torch.Tensor, what: str) -> LocalMemory:
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        refuse_subclass(tensor, what)
    if tensor.is_quantized:
        raise TypeError(
            f"{what} is a quantized tensor ({tensor.dtype}), whose numbers mean nothing without their scale: give "
            ".int_repr(), which copies them, and send the scale"
        )
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} is a tensor of layout {tensor.layout}, whose values are not in one piece of memory")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{what} is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): call .contiguous(), "
            "which copies it, or transfer its contiguous parts"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{what} is a conjugate or negated view: call .resolve_conj() or .resolve_neg(), which copy it"
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        raise TypeError(
            f"{what} is on {tensor.device}: only memory of the CPU, and of GPUs with CUDA or HIP, can be registered, "
            "read and written; copy it there, and back"
        )
    nbytes, storage = tensor.nbytes, tensor.untyped_storage()
    if nbytes and storage.nbytes() < tensor.storage_offset() * tensor.itemsize + nbytes:
        raise ValueError(f"{what} has {nbytes} bytes, but the memory of its storage was freed")
    if tensor.is_cuda and nbytes:
        return LocalMemory(*gpu_memory.of_tensor(tensor, what), storage)
    return LocalMemory(tensor.data_ptr() if nbytes else 0, nbytes, True, CPU, storage)


def refuse_subclass(tensor: torch.Tensor, what: str) -> None:
    """Raise TypeError for a tensor subclass that may have no memory of its own. Others are accepted."""
    if is_dtensor(tensor):
        raise TypeError(
            f"{what} is a DTensor, whose values are in many processes: each registers its own, tensor.to_local(), or "
            "all of a state dict, see ShardedState"
        )
    if (
        hasattr(type(tensor), "__tensor_flatten__")
        or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    ):
        raise TypeError(
            f"{what} is a {type(tensor).__name__}, which may have no memory of its own: give the tensor in it"
        )


def _of_buffer(value: Any, what: str) -> LocalMemory:
    try:
        view, letters = _native.View(value), memoryview(value).format
    except (BufferError, TypeError, ValueError) as error:
        return _of_array(value, what, error)
    if "O" in letters and "O" in re.sub(":[^:]*:", "", letters):  # without the names of fields
        _refuse_objects(value, what, letters)
    if not view.contiguous:
        raise ValueError(f"{what} is not contiguous: copy it, or transfer its contiguous parts")
    return LocalMemory(view.address, view.nbytes, not view.readonly, CPU, value, view)


def _of_array(value: Any, what: str, error: Exception) -> LocalMemory:
    """Return the memory of a NumPy array whose dtype has no format in the buffer protocol."""
    described = getattr(value, "__array_interface__", None)
    if not isinstance(described, dict):
        raise TypeError(
            f"{what} is a {type(value).__name__}, which lends no memory ({error}): give a tensor, a NumPy array or a "
            "memoryview"
        ) from None
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "hasobject", False) or getattr(dtype, "kind", "") == "T" or _has_objects(described):
        _refuse_objects(value, what, described.get("typestr"))
    if described.get("strides") is not None:
        raise ValueError(f"{what} is not contiguous: copy it, or transfer its contiguous parts")
    address, readonly = described["data"]
    return LocalMemory(operator.index(address), operator.index(value.nbytes), not readonly, CPU, value)


def _has_objects(described: dict[str, Any]) -> bool:
    def is_object(kind: Any) -> bool:  # "|O8", or the fields of a structure
        return kind[1:2] == "O" if isinstance(kind, str) else any(is_object(field[1]) for field in kind)

    return is_object(described.get("typestr", "")) or is_object(described.get("descr", ()))


def _refuse_objects(value: Any, what: str, letters: Any) -> NoReturn:
    """Raise TypeError: pointers of one process are invalid in another, and a copy would be an uncounted reference."""
    kind = getattr(value, "dtype", None) or f"format {letters!r}"
    raise TypeError(
        f"{what} is a {type(value).__name__} of {kind}, which holds pointers to Python's objects or strings, and not "
        "their values: give arrays of numbers or bytes, or send it in a message"
    )
