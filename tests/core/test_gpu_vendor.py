"""The vendor of GPUs follows torch's build, not the libraries that a machine has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from monarch_backend._core import gpu_vendor
from monarch_backend.process_group import _backend_selection

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("hip", "cuda", "libraries"),
    [
        ("6.4", None, gpu_vendor.AMD.driver_libraries),
        (None, "12.8", ("libcuda.so.1",)),
        (None, None, ("libcuda.so.1", *gpu_vendor.AMD.driver_libraries)),
    ],
    ids=["ROCm", "CUDA", "CPU"],
)
def test_driver_libraries_follow_torchs_build(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, cuda: str | None, libraries: tuple[str, ...]
) -> None:
    monkeypatch.delenv("MONARCH_GPU_DRIVER", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert gpu_vendor.driver_libraries() == libraries


def test_named_driver_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_GPU_DRIVER", "/opt/libdriver.so")
    assert gpu_vendor.driver_libraries() == ("/opt/libdriver.so",)


@pytest.mark.parametrize(("hip", "variable"), [("6.4", "HIP_VISIBLE_DEVICES"), (None, "CUDA_VISIBLE_DEVICES")])
def test_missing_gpu_names_the_vendors_variable(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, variable: str
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    missing = _backend_selection._cuda().missing
    assert missing.endswith(f"check the driver and {variable}")


def test_required_functions_are_in_rocm_5() -> None:
    """A function that an older ROCm lacks must be optional in the core. Otherwise the core refuses the driver."""
    exported = set((ROOT / "tests/rdma/data/rocm5_exports.txt").read_text().split())
    source = (ROOT / "csrc/memory/gpu_driver.cpp").read_text()
    functions = re.findall(r'get\(\w+, "cu\w+", "(hip\w+)"(, false)?\)', source)
    assert len(functions) > 15
    assert [name for name, optional in functions if not optional and name not in exported] == []
    assert {name for name, optional in functions if optional} - exported == {
        "hipMemGetHandleForAddressRange",
        "hipDrvGetErrorString",
    }
