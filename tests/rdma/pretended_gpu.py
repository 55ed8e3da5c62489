"""A pretended GPU: pretended_gpu.c, compiled, and arrays in its memory.

A process that opens this driver keeps it, so tests use it in processes of their own.
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
"""What it counts."""


@functools.cache
def library() -> str:
    """The path of the driver; skips where there is no compiler."""
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
    """From now on this process has two such GPUs, whose driver refuses these functions."""
    os.environ.update(MONARCH_GPU_DRIVER=library(), PRETENDED_GPU_REFUSES=refuses)


@functools.cache
def driver() -> Any:
    """Its functions for tests."""
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
    """How many there are, or were."""
    return int(driver().pretended_count(which))


def refuse(what: str) -> None:
    """From now on it refuses these functions."""
    driver().pretended_refuse(what.encode())


class Allocation:
    """Of a GPU; freed at its end."""

    def __init__(self, nbytes: int, device: int = 0) -> None:
        self.address: int = driver().pretended_allocate(device, nbytes)
        assert self.address, "no more memory"

    def __del__(self) -> None:
        driver().pretended_free(self.address)


def share(_: Any, address: int) -> bytes:
    """As _torch_ipc.share."""
    at, nbytes = ctypes.c_uint64(), ctypes.c_uint64()
    number = driver().pretended_share(address, ctypes.byref(at), ctypes.byref(nbytes))
    return f"{os.getpid()} {number} {nbytes.value} {address - at.value}".encode()


class Adopted:
    """Another process's allocation; freed at its end."""

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
    """As _torch_ipc.adopt."""
    made = Adopted(shared)
    return made, made.address + made.offset


class Array:
    """Bytes of a GPU, as CuPy and Numba show theirs."""

    def __init__(self, nbytes: int, offset: int = 0, device: int = 0, readonly: bool = False) -> None:
        self._allocation = Allocation(nbytes + offset, device)
        self.address, self.nbytes, self.readonly = self._allocation.address + offset, nbytes, readonly
        self.other: dict[str, Any] = {}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        described = {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, self.readonly), "version": 3}
        return described | {"strides": None, "stream": 1} | self.other

    def put(self, value: torch.Tensor) -> None:
        """Its bytes from now on."""
        value = value.contiguous()
        assert value.nbytes == self.nbytes and driver().pretended_put(self.address, value.data_ptr(), self.nbytes)

    def content(self) -> torch.Tensor:
        """A copy."""
        found = torch.empty(self.nbytes, dtype=torch.uint8)
        assert driver().pretended_get(found.data_ptr(), self.address, self.nbytes)
        return found
