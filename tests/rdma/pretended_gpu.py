"""A fake GPU driver: pretended_gpu.c, compiled, and arrays in the memory of its GPUs.

A process that loads this driver cannot unload it, so tests use it in separate processes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).with_name("pretended_gpu.c")
COPIES, PINNED, IMPORTED, STREAMS, COPIED_BYTES = range(5)
"""Indexes of the driver's counters."""


@functools.cache
def library() -> str:
    """Compile the driver and return its path. Skips if there is no compiler."""
    folder = Path(__file__).resolve().parents[2] / "build" / "pretended"
    target = folder / f"gpu-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        made = folder / f"{target.name}.{os.getpid()}"
        command = [os.environ.get("CC", "cc"), "-O1", "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(made)]
        try:
            subprocess.run(command, check=True, timeout=120)
        except FileNotFoundError:
            pytest.skip("no C compiler for a pretended GPU")
        made.replace(target)
    return str(target)


def take(refuses: str = "") -> None:
    """Give this process two fake GPUs, whose driver refuses the functions in ``refuses``."""
    os.environ.update(MONARCH_GPU_DRIVER=library(), PRETENDED_GPU_REFUSES=refuses)


@functools.cache
def driver() -> Any:
    """Load the driver's functions for tests."""
    found = ctypes.CDLL(library())
    for name in ("pretended_allocate", "pretended_count"):
        getattr(found, name).restype = ctypes.c_uint64
    found.pretended_allocate.argtypes = ctypes.c_int, ctypes.c_size_t
    found.pretended_share.argtypes = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p
    found.pretended_adopt.restype = ctypes.c_uint64
    found.pretended_adopt.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_uint64
    found.pretended_free.argtypes = (ctypes.c_uint64,)
    found.pretended_put.argtypes = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t
    found.pretended_get.argtypes = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t
    return found


def count(which: int) -> int:
    """Return one of the driver's counters."""
    return int(driver().pretended_count(which))


def refuse(what: str) -> None:
    """Make the driver refuse these functions from now on."""
    driver().pretended_refuse(what.encode())


class Allocation:
    """An allocation on a fake GPU, freed with the object."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.address: int = driver().pretended_allocate(device, nbytes)
        assert self.address, "no more memory"

    def __del__(self) -> None:
        driver().pretended_free(self.address)


def share(_: Any, address: int) -> bytes:
    """Replacement for _torch_ipc.share."""
    at, nbytes = ctypes.c_uint64(), ctypes.c_uint64()
    number = driver().pretended_share(address, ctypes.byref(at), ctypes.byref(nbytes))
    return f"{os.getpid()} {number} {nbytes.value} {address - at.value}".encode()


class Adopted:
    """A mapping of another process's allocation, freed with the object."""

    living = 0

    def __init__(self, shared: bytes) -> None:
        pid, number, nbytes, self.offset = map(int, shared.split())
        self.address = driver().pretended_adopt(pid, number, nbytes)
        if not self.address:
            raise RuntimeError("there is no such allocation")
        Adopted.living += 1

    def __del__(self) -> None:
        if self.address:
            driver().pretended_free(self.address)
            Adopted.living -= 1


def adopt(shared: bytes) -> tuple[Adopted, int]:
    """Replacement for _torch_ipc.adopt."""
    made = Adopted(shared)
    return made, made.address + made.offset


class Array:
    """An array of bytes on a fake GPU, with the interface that CuPy and Numba arrays have."""

    def __init__(self, nbytes: int, offset: int = 0, device: int = 0, readonly: bool = False) -> None:
        self._allocation = Allocation(nbytes + offset, device)
        self.address, self.nbytes, self.readonly = self._allocation.address + offset, nbytes, readonly
        self.other: dict[str, Any] = {}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        described = {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, self.readonly), "version": 3}
        return described | {"strides": None, "stream": 1} | self.other

    def put(self, value: torch.Tensor) -> None:
        """Replace the array's bytes."""
        value = value.contiguous()
        assert value.nbytes == self.nbytes and driver().pretended_put(self.address, value.data_ptr(), self.nbytes)

    def content(self) -> torch.Tensor:
        """Return a copy of the array's bytes."""
        found = torch.empty(self.nbytes, dtype=torch.uint8)
        assert driver().pretended_get(found.data_ptr(), self.address, self.nbytes)
        return found
