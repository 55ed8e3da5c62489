"""Choice of the route for each device type, with its reason or what it lacks.

A route is one inner group for one device type of a process group: torch's Gloo, NCCL or RCCL, torch_xla's, a plugin's.
`choose()` makes the choice. What a collective does on a route is in other modules.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from monarch_backend._core import debug_log, gpu_vendor
from monarch_backend.process_group._xla import xla_backend

if TYPE_CHECKING:
    from monarch_backend.process_group._process_group import MonarchProcessGroup

OURS = "monarch"


@dataclass(frozen=True)
class Route:
    """The route of tensors of one device type.

    ``device``: the device type, such as "cpu". ``backend``: the name of the backend that moves its tensors, such as
    "shm" or "nccl". ``why``: the reason for this choice. ``missing``: what to install or to change before the route
    works; empty if it works.

    >>> from monarch_backend import routes
    >>> route = routes()["cpu"]
    >>> route.device, route.available, route.missing
    ('cpu', True, '')
    """

    device: str
    backend: str
    why: str
    missing: str = ""

    @property
    def available(self) -> bool:
        """Whether the route works on this machine now."""
        return not self.missing

    def __str__(self) -> str:
        """Return ``cpu -> gloo (reason)``, or the same with what is missing."""
        return f"{self.device} -> {self.backend} ({self.missing or self.why})"


def choose(device: str, device_map: dict[str, str] | None = None) -> Route:
    named = (device_map or {}).get(device, OURS)
    if named != OURS:
        missing = _cuda().missing if (device, named) == ("cuda", "nccl") else ""
        return Route(device, named, f'"{device}:{named}" was asked for', missing)
    if device == "cpu":
        return _cpu()
    if device == "cuda":
        return _cuda()
    if device == "xla":
        return Route("xla", "xla", "XLA tensors take torch_xla's own group", xla_backend.missing())
    return _plugin(device)


def was_named(device: str, device_map: dict[str, str] | None) -> bool:
    return (device_map or {}).get(device, OURS) != OURS


def _cpu() -> Route:
    # The route at the start of a group. Only its ranks together can find out that they share memory.
    missing = "" if dist.is_gloo_available() else "this torch was built without Gloo; install a build with it"
    return Route("cpu", "gloo", "TCP through torch's Gloo works between any hosts", missing)


def _cuda() -> Route:
    vendor = gpu_vendor.vendor()
    missing = ""
    if not torch.backends.cuda.is_built():
        missing = "this torch has no GPU support; install a CUDA or ROCm build of torch"
    elif not torch.cuda.is_available():
        missing = f"torch sees no {vendor.name} GPU; check the driver and {vendor.visible_devices}"
    elif not dist.is_nccl_available():
        missing = f"this torch was built without {vendor.collective_library}; install a build with it"
    return Route(
        "cuda",
        "nccl",
        f"{vendor.name} GPUs take {vendor.collective_library} through torch's own ProcessGroupNCCL",
        missing,
    )


def _plugin(device: str) -> Route:
    """Return the route to the backend that the device's own package registered as its default ("tpu", "xpu")."""
    name = dist.Backend.default_device_backend_map.get(device, "")
    if name and name not in (OURS, "fake"):  # torch itself registers its test backend as the default of "hpu"
        missing = "" if _is_seen(device) else f"torch sees no {device!r} device on this machine"
        return Route(device, str(name), f"{device!r} tensors take the group registered for them", missing)
    return Route(device, "none", "", f"no package registered a backend for {device!r}; {_remedy(device)}")


def _is_seen(device: str) -> bool:
    # Not torch.<device>.is_available(): torch-tpu lets only torch call its function.
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type == device:
        return torch.accelerator.is_available()
    return not hasattr(torch, device)  # torch knows the device but this build lacks it, or it is not torch's


def _remedy(device: str) -> str:
    if device != "tpu":
        return f"import the package that brings {device!r} devices before init_process_group"
    if importlib.util.find_spec("torch_tpu") is None:
        return "install torch-tpu (pip install torch-tpu), which torch loads by itself"
    return "torch-tpu is installed and found no TPU on this machine"


def _is_device(name: str) -> bool:
    # torch_xla registers with `devices="xla"`. torch < 2.14 takes its letters for device types.
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def survey(device_map: dict[str, str] | None = None) -> dict[str, Route]:
    """Return the routes of all device types known here; unavailable ones say what is missing."""
    registered = filter(_is_device, dist.Backend.default_device_backend_map)
    known = dict.fromkeys(["cpu", "cuda", "xla", "tpu", *registered])
    found = {device: choose(device, device_map) for device in known}
    if not was_named("cpu", device_map):
        found["cpu"] = _cpu_without_group(found["cpu"])
    return found


def _cpu_without_group(route: Route) -> Route:
    """Return the CPU's route as far as one process knows it; only a group's ranks know which of them share a host."""
    from monarch_backend.process_group import _bootstrap  # its imports are slow

    refusal = _bootstrap.refusal()
    if refusal:
        return replace(route, why=f"{route.why}; no shared memory: {refusal}")
    return replace(route, backend="shm+gloo", why="shared memory between ranks of one host, torch's Gloo between hosts")


def announce(group: MonarchProcessGroup, route: Route) -> None:
    """Print the choice of a route under MONARCH_DEBUG=1; called once per group and device."""
    begin = debug_line(group)
    if begin:
        debug_log.write(f"{begin}{route}")


def debug_line(group: MonarchProcessGroup) -> str:
    """Return the prefix of debug lines about the group; "" without MONARCH_DEBUG=1, when nothing is to be printed."""
    if not debug_log.is_enabled():
        return ""
    return f"[monarch rank {group.rank()}/{group.size()} pid {os.getpid()}] group {group._label}: "
