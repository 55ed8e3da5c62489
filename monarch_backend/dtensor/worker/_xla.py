"""A worker whose device is torch_xla's: what is missing for it, its device, and when what was recorded there is done.

XLA compiles what was recorded since the last `sync`. It is done where a value is read, and where a collective goes
through the host; here is what bounds it for a program that does neither. May not import torch_xla before a worker is
one of these: its import takes seconds.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

MOST = 20_000
"""So many words of records, four or so an operation, are at most recorded before they are done."""


def missing() -> str:
    """Why this process has no XLA device, and what to do; or ""."""
    from monarch_backend.process_group import _xla

    try:
        why = _xla.missing()
        if not why:
            _device()
    except Exception as error:  # whatever the loader, or the client, says
        why = f"torch_xla can't be used: {type(error).__name__}: {error}"
    here = f"host {socket.gethostname()}, pid {os.getpid()}, torch {torch.__version__}"
    return why and f"{why} ({here})"


def _device() -> torch.device:
    import torch_xla

    found: torch.device = torch_xla.device()
    return found


def start() -> torch.device:
    """This process's device. From here on operations that only a controller's CPU has are done there, too."""
    from monarch_backend.dtensor import _torch_functional, _torch_spmd
    from monarch_backend.dtensor.worker import _attention, _functions, _xla_ops
    from monarch_backend.process_group import _xla_staged

    device = _device()
    world: Any = dist.group.WORLD
    world._get_backend(device)  # the way for its collectives, while nobody waits for one
    _xla_staged.functional_by_groups()
    _attention.install("XLA")
    _functions.replace(_xla_ops.REPLACED)
    _torch_spmd.leave_out_spmd()
    _torch_functional.keep_views_together()
    return device


def sync() -> None:
    """Do what was recorded."""
    import torch_xla

    torch_xla.sync()
