"""Verbs devices in /sys, and whether verbs can be used. Opens no device and imports no provider."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

from monarch_backend._verbs.config import Settings, from_environment
from monarch_backend._verbs.errors import VerbsError
from monarch_backend._verbs.providers import provider
from monarch_backend._verbs.wire_format import INFINIBAND, ROCE_V1, ROCE_V2, Gid

SYSFS = Path("/sys/class/infiniband")
_DEVICE_FILES = Path("/dev/infiniband")
_NODES = Path("/sys/devices/system/node")
_MAX_GIDS = 64
_MAX_EMPTY_GIDS = 16
"""Empty entries of a port's table of GIDs after which the rest is taken for empty: it has up to thousands."""

_MORE_LOCKED_MEMORY = (
    "only needed for RDMA, whose memory stays in RAM: `ulimit -l unlimited`, LimitMEMLOCK=infinity in a systemd unit, "
    "--ulimit memlock=-1 for a container"
)

_KINDS = {"RoCE v2": ROCE_V2, "IB/RoCE v1": ROCE_V1}
_GET_MEMPOLICY = 239  # x86-64's number; other machines skip the call
_NODE_OF_ADDRESS = 1 | 2  # MPOL_F_NODE | MPOL_F_ADDR


@dataclass(frozen=True)
class PortFacts:
    device: str
    port: int
    state: str  # ACTIVE, DOWN, ...
    ethernet: bool
    gids: tuple[Gid, ...]
    node: int  # NUMA node; -1 if unknown

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"


@dataclass(frozen=True)
class Diagnostic:
    """A line about verbs on this machine. ``remedy`` is empty if nothing is missing."""

    subject: str
    state: str
    remedy: str = ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):  # an empty entry of a table can't be read
        return ""


def survey(root: Path = SYSFS) -> list[PortFacts]:
    found = []
    for device in sorted(root.glob("*")):
        node = _read(device / "device" / "numa_node")
        for port in sorted(device.glob("ports/*"), key=lambda path: int(path.name)):
            found.append(
                PortFacts(
                    device.name,
                    int(port.name),
                    _read(port / "state").partition(": ")[2] or "unknown",
                    _read(port / "link_layer") == "Ethernet",
                    tuple(gids(device.name, int(port.name), root)),
                    int(node) if node.lstrip("-").isdigit() else -1,
                )
            )
    return found


def gids(device: str, port: int, root: Path = SYSFS) -> list[Gid]:
    table = root / device / "ports" / str(port)
    ethernet = _read(table / "link_layer") == "Ethernet"
    found: list[Gid] = []
    gap = index = 0
    while gap < _MAX_EMPTY_GIDS and len(found) < _MAX_GIDS:
        raw = bytes.fromhex(_read(table / "gids" / str(index)).replace(":", ""))
        if len(raw) == 16 and any(raw[8:]):
            kind = _KINDS.get(_read(table / "gid_attrs" / "types" / str(index)), ROCE_V1)
            found.append(Gid(index, kind if ethernet else INFINIBAND, raw))
            gap = 0
        else:
            gap += 1
        index += 1
    return found


def usable(settings: Settings, root: Path = SYSFS) -> list[PortFacts]:
    return [facts for facts in survey(root) if facts.active and settings.permits(facts.device, facts.port)]


def available(root: Path = SYSFS, device_files: Path = _DEVICE_FILES, *, up: bool = True) -> str | None:
    """Return why verbs can't be used here; None if they can, as far as is known without opening a device.

    ``up``: whether a port must be ACTIVE now.
    """
    ports = survey(root)
    if not ports:
        return "this machine has no verbs device (an RDMA NIC with its driver, or `rdma link add` of soft-RoCE)"
    try:
        settings = from_environment()
    except VerbsError as error:
        return str(error)
    if not any((port.active or not up) and settings.permits(port.device, port.port) for port in ports):
        seen = ", ".join(f"{p.device}:{p.port} {p.state}" for p in ports)
        return f"no port is both ACTIVE and permitted by MONARCH_RDMA_DEVICES: {seen}"
    if not any(os.access(path, os.R_OK | os.W_OK) for path in device_files.glob("uverbs*")):
        return f"{device_files}/uverbs* cannot be opened: give the container its devices (--device={device_files})"
    if not provider.installed():
        return "neither pyverbs nor ibverbs is installed: the distribution's python3-pyverbs, or pip install ibverbs"
    return None


def locked_memory() -> int | None:
    """Return this process's limit of locked memory in bytes; None if there is none, or a privilege lifts it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return None
    with contextlib.suppress(OSError, IndexError, ValueError):
        capabilities = Path("/proc/self/status").read_text().split("CapEff:")[1].split()[0]
        if int(capabilities, 16) >> 14 & 1:  # CAP_IPC_LOCK
            return None
    return soft


def describe(root: Path = SYSFS, device_files: Path = _DEVICE_FILES) -> list[Diagnostic]:
    """Return lines for `monarch-backend doctor`: ports and their addresses, packages, limits."""
    facts = []
    for port in survey(root):
        addresses = ", ".join(f"{gid.index}: {_gid_text(gid)}" for gid in port.gids) or "no GID"
        near = f", memory node {port.node}" if port.node >= 0 else ""
        kind = "Ethernet" if port.ethernet else "InfiniBand"
        remedy = "" if port.active else f"bring the link up: `rdma link show {port.device}`, `ip link`"
        facts.append(
            Diagnostic(f"verbs port {port.device}:{port.port}", f"{port.state}, {kind}{near}; {addresses}", remedy)
        )
    nodes = sorted(path.name for path in device_files.glob("uverbs*"))
    if facts and not nodes:
        facts.append(
            Diagnostic(str(device_files), "absent", f"give the container its devices: --device={device_files}")
        )
    limit = locked_memory()
    facts.append(
        Diagnostic(
            "locked memory",
            "unlimited" if limit is None else f"{limit >> 10} KiB",
            "" if limit is None or limit >= 1 << 30 else _MORE_LOCKED_MEMORY,
        )
    )
    reason = available(root, device_files)
    facts.append(Diagnostic("verbs route", "can be used" if reason is None else "none", reason or ""))
    return facts


def _gid_text(gid: Gid) -> str:
    kind = {ROCE_V1: "RoCEv1", ROCE_V2: "RoCEv2", INFINIBAND: "InfiniBand"}[gid.kind]
    if gid.raw.startswith(bytes(10) + b"\xff\xff"):
        return f"{kind} {'.'.join(map(str, gid.raw[12:]))}"
    return f"{kind} {gid.raw.hex(':', 2)}"


def node_of_memory(address: int) -> int:
    """Return the NUMA node of a page; -1 if unknown."""
    if os.uname().machine != "x86_64":
        return -1
    node = ctypes.c_int(-1)
    try:
        failed = ctypes.CDLL(None, use_errno=True).syscall(
            _GET_MEMPOLICY, ctypes.byref(node), None, 0, ctypes.c_void_p(address), _NODE_OF_ADDRESS
        )
    except OSError:
        return -1
    return -1 if failed else node.value


def distance(one: int, other: int, root: Path = _NODES) -> int:
    """Return the distance of two NUMA nodes from the machine's firmware. 10 is the same node, or unknown."""
    if one < 0 or other < 0 or one == other:
        return 10
    with contextlib.suppress(IndexError, ValueError):
        return int(_read(root / f"node{one}" / "distance").split()[other])
    return 20
