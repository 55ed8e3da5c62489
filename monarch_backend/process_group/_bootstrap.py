"""Detection and proof of shared memory among the ranks of a new group.

Each rank writes its kernel, its IPC namespace and its socket name to the group's store. Ranks with equal kernels and
namespaces connect and pass each other a descriptor of their memory. Only that proves shared memory. A rank that can't
be reached (another network namespace, another user) counts as one of another host.

Every rank then reads which ranks the others have reached. All come to the same answer: which ranks make up a host.
_shm/shm_backend.py uses the memory of one host, _hierarchical/hierarchical_backend.py that of several.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from monarch_backend import _native
from monarch_backend._core import env
from monarch_backend._telemetry import recorder
from monarch_backend._verbs import eligibility
from monarch_backend.process_group import _c10d_internals
from monarch_backend.process_group._handshake import Deadline, exchange
from monarch_backend.process_group._hierarchical.hierarchical_backend import Hierarchy
from monarch_backend.process_group._rdma.p2p import RdmaP2P
from monarch_backend.process_group._shm.segment import read_from, this_process
from monarch_backend.process_group._shm.shm_backend import SharedMemory

_PEER_TIMEOUT_S = (
    30.0  # seconds for a peer to reply, or to appear here after it has connected; only a stopped one is late
)


def wanted() -> bool:
    """True unless MONARCH_SHM=0, which must be equal on all ranks of a job."""
    return bool(env.get("MONARCH_SHM"))


def refusal() -> str:
    """Return why this process can't share memory at all, or ''."""
    if not wanted():
        return "MONARCH_SHM=0"
    if not hasattr(_native, "Host"):
        return "the compiled core has no shared memory on this system"
    if _c10d_internals.debug_detail():
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every call over gloo"
    return ""


@dataclass(frozen=True)
class BootstrapResult:
    """Result of the bootstrap: the backend for CPU tensors, if any, the name of its route, and the reason."""

    memory: SharedMemory | None
    route: str
    why: str
    here: Sequence[int] = ()  # ranks of the group that share memory with this one
    rdma_p2p: RdmaP2P | None = None  # where NICs carry large messages between hosts


@dataclass(frozen=True)
class _Table:
    """Exchange of values among the group's ranks through the store, until the deadline."""

    store: Store
    rank: int
    size: int
    deadline: Deadline
    who: str

    def exchange(self, name: str, mine: Any) -> list[Any]:
        """Return the values that the ranks give as ``mine``.

        Raises DistStoreError that names the ranks without a value in time.
        """
        return exchange(self.store, name, self.rank, self.size, mine, self.deadline, self.who)


def connect_ranks(
    store: Store,
    rank: int,
    size: int,
    deadline: Deadline,
    timeout: Callable[[], timedelta],
    gloo: Any,
    who: str,
    label: str = "",
    name: str = "",
) -> BootstrapResult:
    """Find out which ranks share memory, the same on every rank, and make the backend for CPU tensors.

    If all ranks share memory, it is shared memory; if some do, a hierarchy with ``gloo`` between hosts; else only
    ``gloo``. The ranks have until ``deadline``; each later operation asks for its ``timeout``. Raises TimeoutError and
    DistStoreError.
    """
    table = _Table(store, rank, size, deadline, who)
    me: dict[str, Any] = {"refusal": refusal(), "member": f"host {socket.gethostname()}, pid {os.getpid()}"}
    host: Any = None
    if not me["refusal"]:
        try:
            host = this_process().host
            me |= {"kernel": _native.boot_id(), "ipc": _native.ipc_namespace(), "token": host.token}
            me["nics"] = eligibility.least()
            me["identity"] = secrets.randbits(64)
        except OSError as error:
            me["refusal"] = f"no shared memory: {error}"
    everyone = table.exchange("shm", me)
    why_not = next((f"rank {r}: {said['refusal']}" for r, said in enumerate(everyone) if said["refusal"]), "")
    if not why_not and len({said["token"] for said in everyone}) < size:
        why_not = "several ranks are one process"
    if why_not:
        return BootstrapResult(None, "gloo", why_not)
    hosts, peers, remark = _hosts(table, host, everyone)
    rdma_p2p = _nics_between(rank, everyone, hosts, timeout, gloo, label)
    try:
        if len(hosts) == size > 1:
            result = BootstrapResult(None, "gloo", f"no two ranks share memory{remark}")
        else:
            result = _share(table, host, everyone, hosts, peers, timeout, gloo, rdma_p2p, remark, label, name)
    except BaseException:
        if rdma_p2p is not None:
            rdma_p2p.close()
        raise
    if rdma_p2p is None:
        return result
    return replace(
        result,
        rdma_p2p=rdma_p2p,
        why=f"{result.why}; verbs for {rdma_p2p.least} bytes and more between hosts with NICs",
    )


def _nics_between(
    rank: int,
    everyone: list[dict[str, Any]],
    hosts: list[list[int]],
    timeout: Callable[[], timedelta],
    gloo: Any,
    label: str,
) -> RdmaP2P | None:
    """Return the group of large messages if ranks of two hosts have NICs. All ranks get the same answer."""
    able = [bool(said["nics"]) for said in everyone]
    if sum(any(able[r] for r in ranks) for ranks in hosts) < 2:
        return None
    here = next(ranks for ranks in hosts if rank in ranks)
    tokens = [said["token"] if able[rank] and able[r] and r not in here else "" for r, said in enumerate(everyone)]
    least = max(said["nics"] for said in everyone)
    return RdmaP2P(gloo, [said["member"] for said in everyone], rank, timeout, tokens, least, label)


def _hosts(table: _Table, host: Any, everyone: list[dict[str, Any]]) -> tuple[list[list[int]], dict[int, Any], str]:
    """Connect the ranks; return (ranks of each host, our peers by rank, remark). The smaller token connects.

    The peers are kept, because a rank that has made its group may end before this one has made its own.
    """
    rank, size, me = table.rank, table.size, everyone[table.rank]
    tokens = [said["token"] for said in everyone]
    alike = [said["kernel"] and (said["kernel"], said["ipc"]) == (me["kernel"], me["ipc"]) for said in everyone]
    patience = min(_PEER_TIMEOUT_S, table.deadline.seconds())
    peers = {r: _connect(host, tokens[r], patience) for r in range(size) if alike[r] and tokens[r] > me["token"]}
    result = table.exchange("met", [r for r, peer in peers.items() if peer])
    hosts, remark = _cliques({frozenset((a, b)) for a in range(size) for b in result[a]}, size)
    for other in next(ranks for ranks in hosts if rank in ranks):
        if tokens[other] < me["token"]:
            patience = min(_PEER_TIMEOUT_S, table.deadline.seconds())
            peers[other] = host.accepted(tokens[other], patience)
            if peers[other] is None:
                raise TimeoutError(f"rank {other} connected to this one and was not seen within {patience:.3g} s")
    return hosts, peers, remark


def _connect(host: Any, token: str, seconds: float) -> Any:
    """Return the peer, or None if it refuses or does not reply in time. Waits in slices, so that Ctrl-C works."""
    end = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        peer = host.connect(token, max(0.0, min(1.0, end - began)))
        now = time.monotonic()
        if peer is not None or now >= end or now - began < min(0.5, end - began):
            return peer


def _cliques(pairs: set[frozenset[int]], size: int) -> tuple[list[list[int]], str]:
    """Return sets of ranks that are all connected pairwise; other connected ranks stay alone, with a remark."""
    hosts: list[list[int]] = []
    remark = ""
    seen: set[int] = set()
    for first in range(size):
        if first in seen:
            continue
        together, todo = {first}, [first]
        while todo:
            here = todo.pop()
            found = {r for r in range(size) if frozenset((here, r)) in pairs} - together
            together |= found
            todo += found
        seen |= together
        ranks = sorted(together)
        apart = next((pair for pair in itertools.combinations(ranks, 2) if frozenset(pair) not in pairs), None)
        hosts += [ranks] if apart is None else [[r] for r in ranks]
        if apart is not None:
            a, b = apart
            remark += f"; ranks {a} and {b} share no memory, though both do with others of {ranks}: each stays alone"
    return sorted(hosts), remark


def _share(
    table: _Table,
    host: Any,
    everyone: list[dict[str, Any]],
    hosts: list[list[int]],
    peers: dict[int, Any],
    timeout: Callable[[], timedelta],
    gloo: Any,
    rdma_p2p: RdmaP2P | None,
    remark: str,
    label: str,
    name: str,
) -> BootstrapResult:
    """Make the memory of each host's ranks, if all of them can."""
    rank = table.rank
    here = next(ranks for ranks in hosts if rank in ranks)
    mine: int = host.allocate_control_block(len(here))
    control_blocks = table.exchange("control_blocks", mine)
    full = [r for r, offset in enumerate(control_blocks) if not offset]
    if full:
        if mine:
            host.free_control_block(mine)
        return BootstrapResult(None, "gloo", f"rank {full[0]}: MONARCH_SHM_ARENA_BYTES are used up by other groups")
    members = [said["member"] for said in everyone]
    others = [peers.get(r) for r in here]
    native = _native.ShmGroup(host, here.index(rank), others, [control_blocks[r] for r in here], read_from(), label)
    recorder.start_rank(os.environ.get("RANK", str(rank)))
    identity = everyone[0]["identity"]  # of the group
    if len(hosts) == 1:
        memory = SharedMemory(native, lambda: this_process().engine, members, rank, timeout)
        memory.record_as(name, identity)
        return BootstrapResult(memory, "shm", "all ranks share memory", here)
    hierarchy = Hierarchy(native, members, rank, timeout, hosts, gloo, rdma_p2p, table.store)
    hierarchy.record_as(name, identity)
    return BootstrapResult(hierarchy, "shm+gloo", f"shared memory + gloo: {_in_words(hosts)}{remark}", here)


def _in_words(hosts: list[list[int]]) -> str:
    sizes = [len(ranks) for ranks in hosts]
    if len(set(sizes)) == 1:
        return f"{len(hosts)} hosts x {sizes[0]} ranks"
    return f"{len(hosts)} hosts, {' + '.join(map(str, sizes))} ranks"
