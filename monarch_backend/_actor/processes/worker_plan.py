"""Arguments of a new process of a mesh, which its owner makes and _actor/worker_main.py reads."""

from __future__ import annotations

from typing import NamedTuple


class Plan(NamedTuple):
    """Arguments of a new process."""

    token: str
    owner: str
    rank: int
    mesh: str
    name: str
    server: str
    root: str
    labels: tuple[str, ...]
    sizes: tuple[int, ...]
    oversubscribed: bool
    gateway: str = ""  # token of its host's gateway, if there are other hosts
    die_with: str = ""  # token of the process on this host with which it ends
    local_processes: int = 0  # on a remote host: processes of the mesh there
    has_bootstrap: bool = False  # the owner waits until it has succeeded
