"""torch's default process group in a replay: it has the recorded rank and size, and each collective raises."""

from __future__ import annotations

import re
import sys
from typing import Any

from monarch_backend._replay.replay_file import ReplayError

_BACKEND = "monarch_replay"
_COLLECTIVE = re.compile(r"all|gather|reduce|scatter|broadcast|send|recv|barrier")
"""Names of the methods of a group that communicate, in each release of torch."""


def recorded_group() -> tuple[int, int] | None:
    """Return rank and size of the default group, None if there is none."""
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def set_group(group: tuple[int, int] | None) -> None:
    """Make or destroy the default group, so that it is as recorded."""
    if group == recorded_group():
        return
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    if group is not None:
        if not hasattr(dist.Backend, _BACKEND.upper()):
            dist.Backend.register_backend(_BACKEND, _make, devices=["cpu", "cuda"])
        dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=group[0], world_size=group[1])


def _make(_store: Any, rank: int, size: int, _timeout: Any) -> Any:
    from torch.distributed import ProcessGroup

    def refusal(name: str) -> Any:
        def refuse(*_: Any, **__: Any) -> Any:
            raise ReplayError(f"the collective {name} is not recorded, so a replay cannot answer it")

        return refuse

    names = [name for name in dir(ProcessGroup) if not name.startswith("__") and _COLLECTIVE.search(name)]
    methods: dict[str, Any] = {name: refusal(name.strip("_")) for name in names}
    methods["getBackendName"] = lambda _: _BACKEND
    return type("_ReplayGroup", (ProcessGroup,), methods)(rank, size)
