"""Generators of workers, kept in step with the controller's."""

from __future__ import annotations

import threading
from typing import Any

import torch

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import call_sites
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._rng import philox
from monarch_backend.dtensor._worker import random_ops as _worker

WORKER = "monarch_backend.dtensor._worker.random_ops:"
Generator = torch.Generator | philox.Philox
Members = tuple[bool, ...] | None
"""Whether each rank takes part; None: all do."""
in_step = threading.RLock()  # a command and the state before it must stay together


class WorkerGenerators:
    """State that keeps the generators of a set of workers in step with the controller's."""

    def __init__(self, workers: WorkerSet) -> None:
        self.workers = workers
        self.fills: dict[Any, Any] = {}
        """Known signatures of random_ops.py."""
        places = [[_protocol.Tag.OPERAND, 0, 1], [_protocol.Tag.DEVICE, workers.device.type]]
        self._number = workers.define(WORKER + "set_state", places, {}, 1, _protocol.Kind.NONE, 0, [], [])
        self._state = b""
        self._members: Members = None
        self.streams: tuple[int, ...] | None = None
        """Stream of each rank for plain tensors. Ranks of one stream have the same numbers; None: one for all."""

    def bring(self, state: bytes, members: Members) -> None:
        """Set these workers' generators to this state for the next command."""
        if self._state != state or self._members not in (None, members):
            self.workers.write((self._number, call_sites.here(), state))

    def left(self, state: bytes, members: Members) -> None:
        """Record the state of the workers' generators after the last command, and these workers."""
        self._state, self._members = state, members

    def differ(self, streams: list[int]) -> None:
        if self.streams != tuple(streams):
            self.streams = tuple(streams)
            place = [_protocol.Tag.BY_RANK, streams]
            number = self.workers.define(WORKER + "set_stream", [place], {}, 0, _protocol.Kind.NONE, 0, [], [])
            self.workers.write((number, call_sites.here()))

    def agreed(self, func: Any, members: Members) -> bytes:
        """Return the state that all workers report after this operation. Waits."""
        states = self.workers.ask("generator_state")
        those = {state: rank for rank, state in enumerate(states) if members is None or members[rank]}
        if len(those) > 1:
            raise RemoteTensorError(
                f"{func} has drawn more numbers on some ranks than on others (ranks {sorted(those.values())} differ): "
                "its argument has other values there, or it failed there. Make it from values that all ranks have"
            )
        return bytes(next(iter(those)))

    def of_the_first(self, members: Members) -> tuple[bytes, Members]:
        """Return the state that the first worker reports, and the workers in this state. Waits."""
        states = self.workers.ask("generator_state")
        those = [members is None or members[rank] for rank in range(len(states))]
        state = states[those.index(True)]
        alike = [is_one and its == state for is_one, its in zip(those, states, strict=True)]
        return bytes(state), members if alike == those else tuple(alike)


def generators_of(local: RemoteTensor) -> WorkerGenerators:
    return generators_of_workers(local._meta.workers)


def generators_of_workers(workers: WorkerSet) -> WorkerGenerators:
    known: WorkerGenerators | None = workers.kept.get("random")
    if known is None:
        known = workers.kept["random"] = WorkerGenerators(workers)
    return known


def draws_on_cpu(workers: WorkerSet) -> bool:
    """Return whether the workers' CPUs draw. XLA's own numbers differ, and its generator's position is not known."""
    return workers.device.type in _worker.DRAWN_ON_THE_CPU


def members_of(local: RemoteTensor) -> Members:
    of_rank = local._meta.of_rank
    return tuple(each >= 0 for each in of_rank) if -1 in of_rank else None


def take_generator(workers: WorkerSet, kwargs: dict[str, Any]) -> Generator:
    """Remove the generator argument and return it. Raises RemoteTensorError for the generator of another device."""
    found = kwargs.pop("generator", None)
    if found is None:
        return philox.default_generator(workers.device.type)
    drawn_on = "cpu" if draws_on_cpu(workers) else workers.device.type
    if found.device.type != drawn_on:
        raise RemoteTensorError(
            f"a generator of {found.device} for a tensor of {workers.name}, whose device is {workers.device}: torch "
            f"takes one of the same device only, torch.Generator({drawn_on!r})"
        )
    return found  # type: ignore[no-any-return]
