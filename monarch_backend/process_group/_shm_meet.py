"""How the ranks of a new group find out whether they share memory, and prove it.

Each rank tells the others through the group's store which kernel and IPC namespace it runs in and under which name it
listens. Ranks that agree on the first two connect and pass each other a descriptor of their memory: only that proves
it, and a rank that can't be reached (another network namespace, another user) is on another host for our purposes.
Every rank then reads what all have reached and comes to the same answer. What is done with the memory is _shm.py's.
"""

from __future__ import annotations

import atexit
import itertools
import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from monarch_backend import _native
from monarch_backend.process_group import _torch
from monarch_backend.process_group._shm import SharedMemory

# What one rank offers to its peers for all of its groups together; pages of it that nobody has used cost nothing.
ARENA_BYTES = 256 << 20

_PATIENCE = 30.0  # seconds for a peer that has connected to show up here: it has already


@dataclass
class _Process:
    """This process among those of its host, made with its first group."""

    host: Any
    engine: Any

    def stop(self) -> None:
        self.host.leave()
        self.engine.stop()


_process: _Process | None = None


def _this_process() -> _Process:
    global _process
    if _process is None:
        host = _native.Host(arena_bytes())
        _process = _Process(host, _native.Engine(host))
        atexit.register(_process.stop)
    return _process


def _in_forked_child() -> None:
    global _process
    if _process is not None:
        atexit.unregister(_process.stop)
        _process.host.abandon()
        _native.keep_for_ever(_process)  # its threads are the parent's: nothing here can join them
        _process = None


os.register_at_fork(after_in_child=_in_forked_child)


def arena_bytes() -> int:
    """MONARCH_SHM_BYTES, or the default. Raises ValueError for what is no number of bytes."""
    text = os.environ.get("MONARCH_SHM_BYTES", "")
    if not text:
        return ARENA_BYTES
    if not text.isdigit() or int(text) < 1 << 20:
        raise ValueError(f"MONARCH_SHM_BYTES={text!r}: give a number of bytes, 1048576 or more, or leave it unset")
    return int(text)


def wanted() -> bool:
    """Whether the route is switched on, which all ranks of a job must be alike in. Off until issue 3 is finished."""
    return os.environ.get("MONARCH_SHM", "0") not in ("", "0")


def _refusal() -> str:
    """Why this rank can't take the route at all, or ''."""
    if not hasattr(_native, "Host"):
        return "this system has no memfd"
    if _torch.debug_detail():
        return "TORCH_DISTRIBUTED_DEBUG=DETAIL checks every call over gloo"
    return ""


def meet(store: Store, rank: int, size: int, timeout: Callable[[], timedelta]) -> tuple[SharedMemory | None, str]:
    """(the shared memory of all ranks, why), or (None, why not); the same answer on every rank."""
    refusal = _refusal()
    me: dict[str, Any] = {"refusal": refusal, "member": f"host {socket.gethostname()}, pid {os.getpid()}"}
    host: Any = None
    if not refusal:
        try:
            host = _this_process().host
            me |= {"kernel": _native.boot_id(), "ipc": _native.ipc_namespace(), "token": host.token}
            me["board"] = host.make_board(size)
            if not me["board"]:
                me["refusal"] = "MONARCH_SHM_BYTES are used up by other groups"
        except OSError as error:
            me["refusal"] = f"no shared memory: {error}"
    everyone = _exchange(store, "shm", rank, size, me, timeout())
    why_not = next((f"rank {r}: {said['refusal']}" for r, said in enumerate(everyone) if said["refusal"]), "")
    if not why_not:
        why_not = _separate(store, host, rank, everyone, timeout())
    if why_not:
        if me.get("board"):
            host.drop_board(me["board"])
        return None, why_not
    tokens = [said["token"] for said in everyone]
    native = _native.ShmGroup(host, rank, tokens, [said["board"] for said in everyone])
    members = [said["member"] for said in everyone]
    return SharedMemory(native, lambda: _this_process().engine, members, rank, timeout), "all ranks share memory"


def _separate(store: Store, host: Any, rank: int, everyone: list[dict[str, Any]], timeout: timedelta) -> str:
    """Connect the ranks; which two of them share no memory, or ''. The smaller token connects to the larger."""
    size, me = len(everyone), everyone[rank]
    tokens = [said["token"] for said in everyone]
    if len(set(tokens)) < size:
        return "several ranks are one process"
    neighbours = [said["kernel"] and (said["kernel"], said["ipc"]) == (me["kernel"], me["ipc"]) for said in everyone]
    reached = [r for r in range(size) if neighbours[r] and tokens[r] > me["token"] and host.connect(tokens[r])]
    table = _exchange(store, "met", rank, size, reached, timeout)
    for a, b in itertools.permutations(range(size), 2):
        if tokens[a] < tokens[b] and b not in table[a]:
            return f"ranks {a} and {b} share no memory"
    for token in tokens:
        if token < me["token"] and not host.accepted(token, _PATIENCE):
            raise TimeoutError(f"a peer on this host connected and was not seen within {_PATIENCE:g} s")
    return ""


def _exchange(store: Store, name: str, rank: int, size: int, mine: Any, timeout: timedelta) -> list[Any]:
    store.set(f"{name}/{rank}", json.dumps(mine))
    keys = [f"{name}/{other}" for other in range(size)]
    store.wait(keys, timeout)
    return [json.loads(value) for value in store.multi_get(keys)]
