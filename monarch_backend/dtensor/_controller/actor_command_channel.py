"""Channel of commands from the controller to the executors in the processes of a mesh, by messages to actors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch_backend._actor.errors import SupervisionError
from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.shape import Shape

if TYPE_CHECKING:
    from monarch_backend._mesh.proc_mesh import ProcMesh
    from monarch_backend.dtensor._controller.worker_set import WorkerSet


class ActorCommandChannel:
    """`CommandChannel` of the executors. `later` calls on the thread that reads messages."""

    def __init__(
        self, procs: ProcMesh, executors: Any, program: Any, device_type: str, made: dict[str, WorkerSet]
    ) -> None:
        self.procs, self._executors, self._program, self._device_type = procs, executors, program, device_type
        self._made = made  # in these processes, by the type of their devices
        self._ranks = [_those(executors, [rank]) for rank in range(len(executors))]

    def send(self, batch: bytes) -> None:
        self._executors.run.broadcast(batch)

    def send_counted(self, batch: bytes) -> Callable[[], object]:
        future = self._executors.run.call(batch)
        return lambda: future.get()

    def send_at_the_end(self, batch: bytes) -> None:
        self._executors.run.push(batch)

    def has_room(self) -> bool:
        room: bool = self._executors.run.has_room()
        return room

    def raised(self, order: int) -> None:
        self._executors.raised.broadcast(order)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._program.progress.later(seconds, call)

    def put(self, number: int, tensor: torch.Tensor) -> None:
        self._executors.put.broadcast(number, tensor)

    def put_by_rank(self, number: int, tensors: Sequence[torch.Tensor | None]) -> None:
        for mine, tensor in zip(self._ranks, tensors, strict=True):
            if tensor is not None:
                mine.put.broadcast(number, tensor)

    def ask(self, what: str, *args: Any) -> Callable[[], list[Any]]:
        """Start to ask, and return a function that waits for all replies, by rank."""
        future = getattr(self._executors, what).call(*args)
        return lambda: list(future.get().values())

    # Functions --------------------------------------------------------------------------------------------------

    @functools.cached_property
    def control_actors(self) -> Any:
        """The control actors beside the executors; see _worker/control_actor.py."""
        from monarch_backend.dtensor._worker import ControlActor

        self._executors.initialized.get()  # two threads that import these modules at once would deadlock
        return self.procs.spawn("dtensor_control", ControlActor, self._device_type)

    def control_actors_of(self, ranks: Sequence[int]) -> Any:
        return _those(self.control_actors, ranks)

    def execute(self, ranks: Sequence[int], run: int, *args: Any) -> Any:
        """Call a function on these ranks, which then wait for the verdict; return a future of their results."""
        assert self.control_actors is not None  # set before any wait for them
        executors = _those(self._executors, ranks)
        call = executors.execute.call(run, *args)
        with contextlib.suppress(SupervisionError):  # the call's future reports it
            executors.settle.broadcast(run)
        return call

    def send_verdict(self, ranks: Sequence[int], run: int, verdict: str, why: str) -> None:
        """Report the end of a run to the workers: "done", or "failed", after which all workers make new groups."""
        dead = set(self._executors.failed_ranks)
        if dead:  # the others can't make groups without them
            verdict = "dead"
        alive = [rank for rank in ranks if rank not in dead]
        if not alive:
            return
        try:
            _those(self.control_actors, alive).tell.broadcast("set_verdict", run, verdict, why)
        except SupervisionError:  # another one has died
            if not set(self._executors.failed_ranks) - dead:
                raise
            self.send_verdict(ranks, run, verdict, why)
            return
        others = [rank for rank in range(len(self._ranks)) if rank not in set(ranks)]
        if verdict == "failed" and others:
            _those(self._executors, others).rejoin_groups.broadcast(run)
        if verdict == "failed":
            for each in list(self._made.values()):
                if each.line is not self:
                    each.stream.flush()
                    each.line.join_again(run)

    def join_again(self, run: int) -> None:
        """Make new groups, after earlier messages: executors of another device have closed the groups in this run."""
        self._executors.join_again.broadcast(run)

    def run_in_thread(self, call: Callable[[], None]) -> None:
        self._program.run_in_thread(call)


def _those(actors: Any, ranks: Sequence[int]) -> Any:
    if list(ranks) == list(range(len(actors))):
        return actors
    return actors._new_with_shape(Shape.from_ranks(Extent.of({"rank": len(ranks)}), ranks))
