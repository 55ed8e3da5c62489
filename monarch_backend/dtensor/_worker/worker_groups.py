"""Process groups of a worker: their names here by the controller's names, and their replacement after a failure."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_backend.dtensor._torch_internals import c10d_registry


class WorkerGroups:
    """Groups of the mesh dimensions that this rank is in."""

    def __init__(self, rank: int, timeout: datetime.timedelta) -> None:
        self._rank, self._timeout = rank, timeout
        self.names: dict[str, str] = {}  # by the controller's name of a group
        self._store: Any = None
        self._rows: dict[str, list[list[int]]] = {}  # by the controller's name
        self._joined: dict[tuple[int, ...], str] = {}  # by ranks: torch derives the name from them, and has each once

    def join(self, name: str, rows: list[list[int]]) -> None:
        self._rows[name] = rows
        mine = next((row for row in rows if self._rank in row), None)
        if mine is None:
            return
        known = self._joined.get(tuple(mine))
        if known is None:
            if len(mine) == dist.get_world_size() and mine == sorted(mine):
                group: Any = c10d._get_default_group()
            else:
                group = c10d_registry.new_group(f"{name}_{mine[0]}", mine)
            known = self._joined[tuple(mine)] = group.group_name
        self.names[name] = known

    def name_of(self, name: str) -> str:
        return self.names.get(name, name)

    def join_again(self) -> None:
        """Create all groups anew, because the default group was replaced."""
        self._joined.clear()
        for name, rows in self._rows.items():
            self.join(name, rows)

    def reinitialize(self, run: int) -> None:
        """Replace the default group after a failed run: ranks may be in different collectives of the old groups."""
        rank, size = dist.get_rank(), dist.get_world_size()
        if self._store is None:
            self._store = c10d_registry.default_store()
        dist.destroy_process_group()
        store = dist.PrefixStore(f"after_run_{run}", self._store)
        dist.init_process_group("monarch", store=store, rank=rank, world_size=size, timeout=self._timeout)
