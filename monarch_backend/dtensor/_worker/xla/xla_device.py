"""XLA device of a worker: the check that it exists, its start, and the limit of recorded operations.

XLA compiles the operations recorded since the last `sync`. They are executed at a read of a value, and at a collective
through the host. This module limits them for a program that does neither. It must not import torch_xla before a worker
has such a device: the import takes seconds.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from monarch_backend.dtensor import _protocol
from monarch_backend.process_group._xla import graph_hash_workaround

MAX_RECORDED_WORDS = 20_000
"""Limit of words of commands, about four per operation, before the recorded operations are executed."""


def missing() -> str:
    """Return why this process has no XLA device, and what to do; or ""."""
    from monarch_backend.process_group._xla import xla_backend

    try:
        why = xla_backend.missing()
        if not why:
            _device()
    except Exception as error:  # any error of the loader or the client
        why = f"torch_xla can't be used: {type(error).__name__}: {error}"
    here = f"host {socket.gethostname()}, pid {os.getpid()}, torch {torch.__version__}"
    return why and f"{why} ({here})"


def _device() -> torch.device:
    import torch_xla

    found: torch.device = torch_xla.device()
    return found


def start() -> torch.device:
    """Return this process's device; afterwards operations that only a controller's CPU has also run on it."""
    from monarch_backend.dtensor._worker import attention, op_functions
    from monarch_backend.dtensor._worker.xla import op_decompositions, op_overrides, xla_functionalization, xla_spmd
    from monarch_backend.process_group._xla import host_staged

    device = _device()
    world: Any = dist.group.WORLD
    world._get_backend(device)  # sets up its collectives before one is needed
    host_staged.functional_by_groups()
    attention.install("XLA")
    op_functions.replace(op_decompositions.REPLACED | op_overrides.REPLACED, op_decompositions.adapted)
    xla_spmd.leave_out_spmd()
    xla_functionalization.keep_views_together()
    return device


class Recorded:
    """Key of the operations since the last execution: tensors by order of use. See graph_hash_workaround.py."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._places: dict[int, Any] = {}  # by a tensor's id
        self._memory: dict[int, int] = {}  # existing before, by its storage
        self._said: int | None = 0

    def note(self, words: list[Any], functions: dict[int, Any], tensors: dict[int, Any]) -> None:
        said: list[Any] = [self._said]
        i, places = 0, self._places
        while i < len(words):
            number = words[i]
            if number in (_protocol.DELETE, _protocol.FORGET):
                i += 2 + words[i + 1]
                continue
            function = functions[number]
            said.append(number)
            for each in function.operands(words, i):
                if each not in places:
                    places[each] = self._place_of(tensors.get(each))
                said.append(places[each])
            places.update((each, len(places)) for each in function.results(words, i))
            i += function.length
        if self._said is not None:
            self._said = hash(tuple(said))

    def _place_of(self, tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return None  # a number, or a tensor that this rank lacks
        memory = self._memory.setdefault(tensor.untyped_storage()._cdata, len(self._memory))
        return len(self._places), memory

    def lose_track(self) -> None:
        self._said = None

    def do(self, tensors: Iterable[Any]) -> None:
        """Execute all of it. ``tensors``: this worker's tensors."""
        held = [each for each in tensors if isinstance(each, torch.Tensor) and each.device.type == "xla"]
        graph_hash_workaround.sync(held, self._said)
        self._begin()
