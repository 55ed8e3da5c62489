"""GPU memory of processes on NVIDIA's GPUs, as the driver counts it, by NVIDIA's management library (NVML).

The processes do not answer for it, so it works while they hang. AMD's GPUs are not asked.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import Counter
from collections.abc import Iterable, Iterator

from monarch_backend._telemetry.programs import Program

LIBRARY = "libnvidia-ml.so.1"

_OK, _INSUFFICIENT_SIZE = 0, 7
_NOT_AVAILABLE = (1 << 64) - 1
_MORE = 16  # processes that may start between the two calls


class _ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_t of nvml.h, in the form of the functions with _v3."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used_bytes", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


def add_to(programs: Iterable[Program]) -> None:
    """Set the GPU memory of the running processes of programs of this machine. Without NVML it stays None."""
    used = of_processes()
    if used is not None:
        for process in (process for program in programs for process in program.processes):
            if process.exit_code is None:
                process.gpu_memory = used.get(process.pid)


def of_processes(library: str = LIBRARY) -> dict[int, int] | None:
    """Return the bytes that each process uses on all GPUs, by its pid. Return None without NVML or a GPU.

    In a container, the driver may know the processes by the pids of its host.
    """
    nvml = _load(library)
    if nvml is None or nvml.nvmlInit_v2() != _OK:
        return None
    try:
        used = Counter[int]()
        for device in _devices(nvml):
            for each in _running(nvml, device):
                if each.used_bytes != _NOT_AVAILABLE:
                    used[each.pid] += each.used_bytes
        return dict(used)
    finally:
        nvml.nvmlShutdown()


@functools.cache
def _load(library: str) -> ctypes.CDLL | None:
    with contextlib.suppress(OSError):
        nvml = ctypes.CDLL(library)
        if hasattr(nvml, "nvmlDeviceGetComputeRunningProcesses_v3"):  # since driver 510
            return nvml
    return None


def _devices(nvml: ctypes.CDLL) -> Iterator[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == _OK:
        for number in range(count.value):
            device = ctypes.c_void_p()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(number), ctypes.byref(device)) == _OK:
                yield device


def _running(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> list[_ProcessInfo]:
    """Return the processes that compute on a device, with one entry for each of its partitions."""
    count = ctypes.c_uint(_MORE)
    for _ in range(3):
        found = (_ProcessInfo * count.value)()
        result = nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), found)
        if result == _OK:
            return list(found[: count.value])
        if result != _INSUFFICIENT_SIZE:
            break
        count = ctypes.c_uint(count.value + _MORE)
    return []
