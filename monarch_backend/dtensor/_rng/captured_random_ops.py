"""Random operations of a captured step, and the checks that one can be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._per_rank.shard_origins import Origin
from monarch_backend.dtensor._rng import philox
from monarch_backend.dtensor._rng.random_ops import Shards, places_of, shards_of
from monarch_backend.dtensor._rng.traced_random_op import TracedRandomOp
from monarch_backend.dtensor._rng.worker_generators import (
    Generator,
    Members,
    draws_on_cpu,
    generators_of_workers,
    in_step,
)
from monarch_backend.dtensor._torch_internals import cpu_generator


class RandomOps:
    """Random draws of each call of a captured step. ``members``: ranks that draw, as in `random_ops._Fill`."""

    def __init__(self, workers: WorkerSet, draws: list[TracedRandomOp]) -> None:
        self.members: Members = None
        self._step, self._draws = generators_of_workers(workers), draws
        self._on_cpu = draws_on_cpu(workers)
        self._moves = [cpu_generator.Move((d.func, *d.args), d.shape, d.stride, d.dtype) for d in draws if self._on_cpu]
        self._numbers: int | None = None  # as `_Fill.numbers`

    def around(self, write: Callable[[], None]) -> None:
        """Run ``write``, as `random_ops._fill` does. Raises RemoteTensorError if ranks need different numbers."""
        if any(each.is_plain for each in self._draws):
            check_streams(self._step.workers)
        generator = philox.default_generator(self._step.workers.device.type)
        with in_step:
            before = cpu_generator.state_of(generator)
            for move, draw in zip(self._moves, self._draws, strict=False):
                move.make(generator, _filling(draw, generator))
            self._step.bring(before, self.members)
            write()
            if not self._on_cpu:
                if self._numbers is None:
                    self._numbers = philox.moved(before, self._step.agreed("a captured step", self.members))
                cpu_generator.set_state(generator, philox.after(before, self._numbers))
            self._step.left(cpu_generator.state_of(generator), self.members)


def check_streams(workers: WorkerSet) -> None:
    if generators_of_workers(workers).streams is not None:
        raise RemoteTensorError(
            "a captured step draws random numbers of plain tensors, the same on all ranks, which they must not be "
            "after own_random_numbers(): put what draws them (dropout) into a function with torch.compiler.disable"
        )


def _filling(draw: TracedRandomOp, generator: Generator) -> Callable[[torch.Tensor], object]:
    return lambda part: draw.func(part, *draw.args, generator=generator)


def places(workers: WorkerSet, draw: TracedRandomOp) -> list[Any]:
    """Return the arguments of _worker/random_ops.py's ``drawn``, for the definition of a graph."""
    return places_of(workers, draw, lambda value: _protocol.place(value, lambda _: None, lambda _: None))


def draw_of_dropout(shape: Any, stride: Any, p: float, origin: Origin | None) -> TracedRandomOp:
    """Return the mask of a dropout; for a shard, its part. Raises RemoteTensorError if that is not known."""
    shards = Shards([], 1)
    if origin is not None:
        check_origin(origin, "native_dropout")
        spec = origin.whole.spec(torch.bool)  # type: ignore[union-attr]
        mask = torch.empty_like(torch.empty_strided(spec.shape, spec.stride, device="meta"))
        shape, stride, shards = mask.shape, mask.stride(), shards_of(spec)  # type: ignore[assignment]
    func = torch.ops.aten.bernoulli_.float
    return TracedRandomOp(func, tuple(shape), tuple(stride), torch.bool, *shards, (1.0 - p,), True)


def check_origin(origin: Origin | None, what: str) -> None:
    """Raise RemoteTensorError if a captured step cannot draw for a tensor of this origin."""
    if origin is not None and (origin.whole is None or origin.whole.is_strided):
        raise RemoteTensorError(
            f"{what} in a captured step draws random numbers for a plain tensor that is computed from a DTensor's "
            "shards but is not a shard itself: ranks would draw equal numbers for different shards. Keep the DTensor "
            "(use_local_output=False, no to_local()), or put it into a function with torch.compiler.disable"
        )
