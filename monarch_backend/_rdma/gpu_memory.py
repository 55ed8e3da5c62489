"""Memory of GPUs as this process has it: whose it is, that what fills it is done, and what the driver is. CUDA and HIP.

Tensors, and what else has ``__cuda_array_interface__`` (CuPy, Numba). csrc/memory/gpu.h does the work; how memory gets
to other processes is the routes' part.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from monarch_backend import _native
from monarch_backend._rdma.errors import RDMAError


class DeviceMemory(NamedTuple):
    """Of one GPU; nothing that was asked of the GPU before still writes to it."""

    address: int
    nbytes: int
    writable: bool
    device: str


def of_tensor(tensor: torch.Tensor, what: str) -> DeviceMemory:
    """Of a contiguous CUDA or HIP tensor, once its device's current stream is done."""
    address = tensor.data_ptr()
    number = _number_of(address, what)
    settle(tensor.device)
    return DeviceMemory(address, tensor.nbytes, True, _name(number))


def settle(device: torch.device) -> None:
    """Wait for what this thread has asked of it, if it is a GPU, in its current stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def of_array(value: Any, what: str) -> DeviceMemory:
    """Of an object with ``__cuda_array_interface__``, once the stream that it names is done.

    Raises ValueError for what is not contiguous, or no memory of a GPU; RDMAError for a driver that fails.
    """
    described = value.__cuda_array_interface__
    address, readonly = described["data"]
    shape, itemsize = tuple(described["shape"]), _itemsize(described["typestr"], what)
    nbytes = math.prod(shape) * itemsize
    strides = described.get("strides")
    if nbytes and strides is not None and not _is_contiguous(shape, tuple(strides), itemsize):
        raise ValueError(f"{what} is not contiguous: copy it, or transfer its contiguous parts")
    if described.get("mask") is not None:
        raise ValueError(f"{what} has a mask: give its data and its mask, each for itself")
    if not nbytes:
        return DeviceMemory(0, 0, not readonly, _name(0))
    number = _number_of(address, what)
    stream = described.get("stream")
    if stream is not None:
        try:
            _native.gpu_wait_for_stream(number, stream)
        except _native.GpuFailure as error:
            raise RDMAError(f"what fills {what} has failed: {error}") from None
    return DeviceMemory(address, nbytes, not readonly, _name(number))


def api() -> str:
    """ "CUDA" or "HIP", as this process's driver is."""
    return "HIP" if "hip" in _native.gpu_library() else "CUDA"


def _name(number: int) -> str:
    return f"cuda:{number}"  # as torch calls AMD's, too


def use(what: str) -> None:
    """Open the driver, if that was not done yet. Raises RDMAError; ``what`` needs it."""
    try:
        _native.gpu_open()
    except _native.GpuFailure as error:
        raise RDMAError(
            f"{what} is memory of a GPU, whose driver can't be used: {error}. Use memory of the CPU, or see "
            "`monarch-backend doctor`"
        ) from None


def _number_of(address: int, what: str) -> int:
    use(what)
    number = _native.gpu_device_of(address)
    if number < 0:
        raise ValueError(f"{what} is at {address:#x}, which the GPU's driver does not know as memory of a GPU")
    return number


def _itemsize(typestr: str, what: str) -> int:
    digits = typestr[2:]
    if not digits.isdigit():
        raise ValueError(f"{what} is of type {typestr!r}, which has no size that is known here")
    return int(digits)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Each value follows the one before it. The stride of a dimension of one value says nothing."""
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
