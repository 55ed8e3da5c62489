"""GPU memory of this process: address, device and driver of CUDA and HIP objects, and waiting for work that writes to
it.

The objects are tensors and others with ``__cuda_array_interface__`` (CuPy, Numba). csrc/memory/gpu.h has the
implementation. The routes bring the bytes to other processes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from monarch_backend import _native
from monarch_backend._core import gpu_vendor
from monarch_backend._rdma.errors import RDMAError

DeviceMemory = tuple[int, int, bool, str]
"""Address and bytes of memory of one GPU, whether it is writable, and its device. Earlier work has finished there."""


def of_tensor(tensor: torch.Tensor, what: str) -> DeviceMemory:
    """Return the memory of a contiguous CUDA or HIP tensor, after its device's current stream has finished."""
    address = tensor.data_ptr()
    number = _number_of(address, what)
    settle(tensor.device)
    return address, tensor.nbytes, True, _name(number)


def settle(device: torch.device) -> None:
    """Wait for the current stream of this thread, if the device is a GPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def of_array(value: Any, what: str) -> DeviceMemory:
    """Return the memory of an object with ``__cuda_array_interface__``, after the stream that it names has finished.

    Raises ValueError if it is not contiguous or not in a GPU's memory, and RDMAError for a driver that fails.
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
        return 0, 0, not readonly, _name(0)
    number = _number_of(address, what)
    stream = described.get("stream")
    if stream is not None:
        try:
            _native.gpu_wait_for_stream(number, stream)
        except _native.GpuFailure as error:
            raise RDMAError(f"what fills {what} has failed: {error}") from None
    return address, nbytes, not readonly, _name(number)


def api() -> str:
    return "HIP" if "hip" in _native.gpu_library() else "CUDA"


def _name(number: int) -> str:
    return f"cuda:{number}"  # torch uses this name for AMD's GPUs, too


def use(what: str) -> None:
    """Load the driver, if that was not done yet. ``what`` names the object in errors. Raises RDMAError."""
    try:
        _native.gpu_open(gpu_vendor.driver_libraries())
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
    """Return whether each value follows the one before it. The stride of a dimension of size 1 is ignored."""
    step = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
