"""`monarch-backend doctor`: torch, devices, routes, libraries, kernel; what is missing and how to get it.

Only looks: opens no device, makes no group, needs no privilege.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import monarch_backend
from monarch_backend import _versions
from monarch_backend.process_group._routes import survey


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``remedy`` is empty when nothing is missing."""

    subject: str
    state: str
    remedy: str = ""


def run(*, as_json: bool) -> int:
    """Print the report; returns 0 when CPU tensors have a route, else 1."""
    findings = examine()
    if as_json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
    else:
        width = max(len(f.subject) for f in findings)
        for finding in findings:
            print(f"{'--' if finding.remedy else 'ok'}  {finding.subject:<{width}}  {finding.state}")
            if finding.remedy:
                print(f"    {'':<{width}}  -> {finding.remedy}")
    return 0 if survey()["cpu"].available else 1


def examine() -> list[Finding]:
    """Everything the report says, in its order."""
    return [*_software(), *_routes(), *_libraries(), *_verbs(), *_core()]


def _software() -> list[Finding]:
    tested = f"{_versions.OLDEST[0]}.{_versions.OLDEST[1]} to {_versions.NEWEST[0]}.{_versions.NEWEST[1]}"
    inside = _versions.OLDEST <= _versions.torch_version() <= _versions.NEWEST
    known = dist.is_backend_available("monarch")
    return [
        Finding(
            "monarch_backend",
            f"{monarch_backend.__version__}, Python {platform.python_version()}, {sys.platform}",
        ),
        Finding("torch", torch.__version__, "" if inside else f"outside the tested range {tested}"),
        Finding(
            'backend="monarch"',
            "registered with torch.distributed" if known else "not registered",
            "" if known else "unset TORCH_DEVICE_BACKEND_AUTOLOAD=0, or import monarch_backend in the script",
        ),
    ]


def _routes() -> list[Finding]:
    return [
        Finding(
            f"route {route.device}",
            f"{route.backend}: {route.why}" if route.available else "none",
            route.missing,
        )
        for route in survey().values()
    ]


def _libraries() -> list[Finding]:
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    library = "RCCL" if torch.version.hip else "NCCL"
    if dist.is_nccl_available():
        nccl = Finding(library, ".".join(map(str, torch.cuda.nccl.version())))  # type: ignore[no-untyped-call]
    else:
        nccl = Finding(library, "not in this torch", "install a CUDA or ROCm build of torch to use GPUs")
    return [
        Finding("GPUs", ", ".join(gpus) or "none", "" if gpus else "only needed for tensors on 'cuda'"),
        nccl,
        _package("torch_xla", "pip install 'monarch_backend[xla]', for tensors on 'xla'"),
        _package("torch-tpu", "pip install torch-tpu, for tensors on 'tpu'", module="torch_tpu"),
    ]


def _package(name: str, remedy: str, module: str = "") -> Finding:
    if importlib.util.find_spec(module or name) is None:
        return Finding(name, "not installed", remedy)
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "installed, version unknown")


def _verbs() -> list[Finding]:
    devices = sorted(p.name for p in Path("/sys/class/infiniband").glob("*"))
    bindings = [m for m in ("pyverbs", "ibverbs") if importlib.util.find_spec(m) is not None]
    return [
        Finding(
            "verbs devices",
            ", ".join(devices) or "none",
            "" if devices else "an RDMA NIC with its driver (or rdma_rxe); only needed for RDMA",
        ),
        Finding(
            "verbs bindings",
            ", ".join(bindings) or "none",
            "" if bindings else "the distribution's python3-pyverbs, or pip install 'monarch_backend[rdma]'",
        ),
    ]


def _core() -> list[Finding]:
    try:
        from monarch_backend import _native
    except ImportError as error:
        return [
            Finding(
                "native core",
                f"does not load: {error}",
                "reinstall: pip install --force-reinstall monarch_backend",
            )
        ]
    kernel = _native.kernel_features()
    lacking = [name for name, there in kernel.items() if not there]
    return [
        Finding("native core", f"CPU: {', '.join(_native.cpu_features()) or 'baseline'}"),
        Finding(
            "kernel",
            ", ".join(name for name, there in kernel.items() if there) or "nothing that the core uses",
            f"without {', '.join(lacking)}: a newer kernel, or a container that permits it" if lacking else "",
        ),
    ]
