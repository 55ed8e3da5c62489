"""Registration of GPU memory with a NIC, which then accesses it without a copy in host memory.

Drivers offer two ways. With peer memory the NIC's driver asks the GPU's driver about an address (nvidia_peermem,
amdgpu). With dma-buf the GPU's driver exports the range as a file. If both fail, the data are staged
(_rdma/routes/gpu_staged.py).
"""

from __future__ import annotations

import os

from monarch_backend import _native
from monarch_backend._core import debug_log
from monarch_backend._verbs.errors import UnreachableMemoryError
from monarch_backend._verbs.providers.provider import Nic, Registration

_PAGE = os.sysconf("SC_PAGESIZE")


def is_of_gpu(address: int) -> bool:
    return _native.gpu_device_of(address) >= 0


def register(nic: Nic, address: int, nbytes: int, access: int) -> Registration:
    """Register GPU memory with a device. Raises UnreachableMemoryError with the reasons if both ways fail."""
    try:
        made = nic.register(address, nbytes, access)
        _say(nic, nbytes, "by peer memory")
        return made
    except OSError as error:
        peer_memory = os.strerror(error.errno) if error.errno else str(error)
    try:
        made = _by_dma_buf(nic, address, nbytes, access)
        _say(nic, nbytes, f"by dma-buf (by peer memory: {peer_memory})")
        return made
    except (OSError, _native.GpuFailure) as failure:
        dma_buf = str(failure)
    raise UnreachableMemoryError(
        f"cannot register {nbytes} bytes of a GPU with {nic.name}, so they go through pinned memory of the hosts: by "
        f"peer memory: {peer_memory} (is nvidia_peermem loaded?); by dma-buf: {dma_buf}",
        "",
        nic.name,
    ) from None


def _by_dma_buf(nic: Nic, address: int, nbytes: int, access: int) -> Registration:
    first = address // _PAGE * _PAGE
    last = -(-(address + nbytes) // _PAGE) * _PAGE
    descriptor = _native.gpu_dma_buf(first, last - first)
    try:
        return nic.register_dmabuf(descriptor, address - first, nbytes, address, access)
    finally:
        os.close(descriptor)  # the registration has its own reference


def _say(nic: Nic, nbytes: int, how: str) -> None:
    debug_log.write(f"monarch: {nbytes} bytes of a GPU are registered with {nic.name} {how}")
