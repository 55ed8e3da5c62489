"""Vendor of the GPUs that the installed torch was built for, and the names that its users know."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monarch_backend._core import env


@dataclass(frozen=True)
class Vendor:
    """The names of one vendor's libraries and settings."""

    name: str
    collective_library: str
    visible_devices: str
    """The environment variable that selects a process's GPUs."""
    driver_libraries: tuple[str, ...]
    """Files of the driver library. ROCm's file without a number is in its development package only."""


NVIDIA = Vendor("NVIDIA", "NCCL", "CUDA_VISIBLE_DEVICES", ("libcuda.so.1",))
AMD = Vendor(
    "AMD", "RCCL", "HIP_VISIBLE_DEVICES", ("libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so")
)


def vendor() -> Vendor:
    """Return AMD for a ROCm build of torch, and NVIDIA for all others."""
    return AMD if torch.version.hip else NVIDIA


def driver_libraries() -> tuple[str, ...]:
    """Return the driver libraries to try, in order.

    A machine can have the drivers of both vendors, so torch's build decides. A build without GPUs tries both.
    MONARCH_GPU_DRIVER names one library instead.
    """
    if given := env.get("MONARCH_GPU_DRIVER"):
        return (str(given),)
    if torch.version.hip or torch.version.cuda:
        return vendor().driver_libraries
    return NVIDIA.driver_libraries + AMD.driver_libraries
