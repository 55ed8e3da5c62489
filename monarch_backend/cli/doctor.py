"""`monarch-backend doctor`: report on torch, devices, routes, libraries and kernel, with remedies for missing parts.

It opens no device, makes no group and needs no privilege.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

import monarch_backend
from monarch_backend import _verbs as verbs
from monarch_backend._core import env, gpu_vendor, torch_version
from monarch_backend._verbs import Diagnostic as Finding
from monarch_backend.process_group._backend_selection import survey


def run(*, as_json: bool) -> int:
    """Print the report. Return 0 when CPU tensors have a route, else 1."""
    findings = examine()
    with contextlib.suppress(BrokenPipeError):  # `doctor | head`
        print(json.dumps([asdict(f) for f in findings], indent=1) if as_json else _as_text(findings))
    return 0 if survey()["cpu"].available else 1


def _as_text(findings: Sequence[Finding]) -> str:
    width = max(len(f.subject) for f in findings)
    lines = []
    for finding in findings:
        lines.append(f"{'--' if finding.remedy else 'ok'}  {finding.subject:<{width}}  {finding.state}")
        if finding.remedy:
            lines.append(f"    {'':<{width}}  -> {finding.remedy}")
    return "\n".join(lines)


def examine() -> list[Finding]:
    """Yield the lines of the report in order."""
    return [*_software(), *_routes(), *_libraries(), *_verbs(), _memory_of_gpus(), *_core()]


def _software() -> list[Finding]:
    inside = torch_version.OLDEST <= torch_version.torch_version() <= torch_version.NEWEST
    known = dist.is_backend_available("monarch")
    return [
        Finding(
            "monarch_backend",
            f"{monarch_backend.__version__}, Python {platform.python_version()}, {sys.platform}",
        ),
        Finding("torch", torch.__version__, "" if inside else f"outside the tested range {torch_version.TESTED}"),
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
    library = gpu_vendor.vendor().collective_library
    if dist.is_nccl_available():
        nccl = Finding(library, ".".join(map(str, torch.cuda.nccl.version())))
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


_NO_PORTS = "an RDMA NIC with its driver, or `rdma link add` of soft-RoCE; only needed for RDMA"
_NO_PACKAGES = "the distribution's python3-pyverbs, or pip install 'monarch_backend[rdma]'; only needed for RDMA"
_NO_LIBRARY = "apt install libibverbs1 ibverbs-providers, dnf install libibverbs; only needed for RDMA"


def _verbs() -> list[Finding]:
    """Yield the requirements of RDMA between hosts. The last two lines give the result."""
    seen = verbs.describe()
    if not any(finding.subject.startswith("verbs port ") for finding in seen):
        seen.insert(0, Finding("verbs ports", "none", _NO_PORTS))
    library = _library("libibverbs.so.1")
    packages = [found for name in ("pyverbs", "ibverbs") if not (found := _package(name, "missing")).remedy]
    versions = ", ".join(f"{found.subject} {found.state}" for found in packages)
    seen[-1:-1] = [
        Finding("libibverbs", library, "" if library == "loads" else _NO_LIBRARY),
        Finding("verbs packages", versions or "none", "" if packages else _NO_PACKAGES),
    ]
    return [*seen, _other_hosts()]


def _library(name: str) -> str:
    try:
        ctypes.CDLL(name)  # this opens no device
    except OSError as error:
        return f"does not load: {error}"
    return "loads"


def _other_hosts() -> Finding:
    """Report the route for reads and writes of registered memory on other hosts."""
    from monarch_backend.rdma import get_rdma_backend

    subject = "memory of other hosts"
    try:
        wanted, backend = env.get("MONARCH_RDMA_TRANSPORT"), get_rdma_backend()
    except ValueError as error:
        return Finding(subject, "no route", str(error))
    if wanted not in ("", backend):
        return Finding(subject, f"by {backend}", f"MONARCH_RDMA_TRANSPORT={wanted} has no effect: see the verbs route")
    return Finding(subject, f"by {backend}" + (", as MONARCH_RDMA_TRANSPORT says" if wanted else ""))


_PEER_MEMORY = "nvidia_peermem", "nv_peer_mem", "amdgpu"
_DMA_BUF = "cuMemGetHandleForAddressRange", "hipMemGetHandleForAddressRange"


def _memory_of_gpus(modules: Path = Path("/sys/module")) -> Finding:
    """Report the routes for reads of GPU memory by other processes, as far as is known without opening a GPU."""
    subject = "memory of GPUs"
    names = gpu_vendor.driver_libraries()
    driver = next((name for name in names if _library(name) == "loads"), None)
    if driver is None:
        return Finding(
            subject, f"no route: none of {', '.join(names)} loads", "NVIDIA's or AMD's driver; only for GPUs"
        )
    try:
        ipc = "by IPC" if env.get("MONARCH_GPU_IPC") else "through the host, since MONARCH_GPU_IPC=0"
    except ValueError as error:
        return Finding(subject, "no way", str(error))
    ways = [f"{module} (peer memory)" for module in _PEER_MEMORY if (modules / module).exists()]
    if any(hasattr(ctypes.CDLL(driver), name) for name in _DMA_BUF):
        ways.append("dma-buf")
    nics = f"NICs by {' or '.join(ways)}, else " if ways else ""
    return Finding(subject, f"{driver}: on one host {ipc}; to other hosts {nics}through pinned memory")


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
    core = Finding("native core", f"CPU: {', '.join(_native.cpu_features()) or 'baseline'}")
    if _native.is_portable:
        return [core, Finding("kernel", "features that only Linux has are not used by this build")]
    kernel = _native.kernel_features()
    lacking = [name for name, there in kernel.items() if not there]
    return [
        core,
        Finding(
            "kernel",
            ", ".join(name for name, there in kernel.items() if there) or "nothing that monarch_backend uses",
            f"without {', '.join(lacking)}: a newer kernel, or a container that permits it" if lacking else "",
        ),
    ]
