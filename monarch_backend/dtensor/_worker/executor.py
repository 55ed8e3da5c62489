"""`Executor`: the actor that holds this worker's tensors and executes the controller's commands, in order."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch_backend._actor.actor import Actor, endpoint
from monarch_backend._actor.context import current_rank
from monarch_backend._actor.errors import CancelledError
from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._protocol import RemoteRef
from monarch_backend.dtensor._worker import attention, op_functions, random_ops, remote_call_args
from monarch_backend.dtensor._worker import storage as storage_module
from monarch_backend.dtensor._worker.command_interpreter import CommandInterpreter, WorkerGroups
from monarch_backend.dtensor._worker.control_actor import CANCEL_CHECK_INTERVAL_S, inboxes, rejoin_after
from monarch_backend.dtensor._worker.failures import Failure
from monarch_backend.dtensor._worker.remote_call_args import NotThereError, RunFailed
from monarch_backend.dtensor._worker.xla import xla_device


class Executor(Actor):
    def __init__(self, device_type: str, timeout: float) -> None:
        self.rank = current_rank().rank
        self._timeout = datetime.timedelta(seconds=timeout)
        self.groups = WorkerGroups(self.rank, self._timeout)
        self.meshes: dict[str, Any] = {}
        """This worker's own meshes, by their description; see remote_call_args.py."""
        self.inbox = inboxes[device_type]
        self.commands = CommandInterpreter(self.rank, _own_device(device_type), self.groups)
        torch.set_grad_enabled(False)

    # Messages of the controller ---------------------------------------------------------------------------------

    @endpoint
    def missing(self) -> str:
        """Return why this process has no such device, and what to do; or ""."""
        return xla_device.missing() if self.commands.device.type == "xla" else ""

    @endpoint
    def start(self) -> None:
        if self.commands.device.type == "xla":
            self.commands.device, self.commands.recorded = xla_device.start(), xla_device.Recorded()

    @endpoint
    def run(self, batch: bytes) -> None:
        self.commands.run(batch)

    @endpoint
    def put(self, number: int, tensor: torch.Tensor) -> None:
        self.commands.tensors[number] = (
            tensor.to(self.commands.device) if self.commands.device.type != "cpu" else tensor
        )

    @endpoint
    def read(self, number: int, rank: int, how: str) -> Any:
        """Return the value on this rank, None on other ranks, which may lack it. Returns failures on all ranks."""
        return self.commands.failures.beside(self._read(number, rank, how))

    def _read(self, number: int, rank: int, how: str) -> Any:
        if rank != self.rank and number not in self.commands.tensors:
            return None
        found = self.commands.results.settled(number)
        self.commands.sync()
        if isinstance(found, Failure):
            return self.commands.failures.told(found)
        if rank != self.rank:
            return None
        if storage_module.is_freed(found):  # reading it would end this process
            why = (
                "the tensor's memory was freed, as FSDP frees a gathered parameter: read the module's parameter instead"
            )
            return self.commands.new_failure("reading", 0, RuntimeError(why)).report
        return found.item() if how == "item" else found.cpu().clone(memory_format=torch.contiguous_format)

    @endpoint
    def equal(self, one: int, other: int) -> Any:
        return self.commands.failures.beside(self._equal(one, other))

    def _equal(self, one: int, other: int) -> Any:
        values = self.commands.results.settled(one), self.commands.results.settled(other)
        self.commands.sync()
        failed = next((each for each in values if isinstance(each, Failure)), None)
        if failed is not None:
            return self.commands.failures.told(failed)
        return None if any(each is None for each in values) else torch.equal(*values)

    @endpoint
    def measure(self, name: str, args: Any, kwargs: Any, numbers: list[int]) -> Any:
        """Run an operator, keep its results under these ids, return their forms; None if this rank takes no part."""
        return self.commands.failures.beside(self._measure(name, args, kwargs, numbers))

    def _measure(self, name: str, args: Any, kwargs: Any, numbers: list[int]) -> Any:
        held = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteRef)]
        failed = next(
            (found for each in held if isinstance(found := self.commands.results.settled(each.id), Failure)), None
        )
        if failed is not None:
            return self.commands.failures.told(failed)
        if any(each.id not in self.commands.tensors for each in held):
            return None
        args, kwargs = pytree.tree_map(
            lambda v: self.commands.tensors[v.id] if isinstance(v, RemoteRef) else v, (args, kwargs)
        )
        self.commands.sync()
        try:
            result = op_functions.find(name)(*args, **kwargs)
        except Exception as error:
            return self.commands.new_failure(name, 0, error).report
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        self.commands.tensors.update(zip(numbers, results, strict=False))
        return [(tuple(each.shape), each.stride(), _protocol.name_of(each.dtype)) for each in results]

    @endpoint
    def failed_since(self) -> Any:
        """Wait for earlier commands; return their first unreported failure."""
        return self.commands.failures.beside(self.commands.failures.first_untold())

    @endpoint
    def raised(self, order: int) -> None:
        self.commands.failures.raised(order)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def generator_state(self) -> bytes:
        return random_ops.state_of(self.commands.device)

    @endpoint
    def inspect(self, look: Callable[[CommandInterpreter], Any]) -> Any:
        """Return what a test's function finds, after earlier commands."""
        return look(self.commands)

    # Functions --------------------------------------------------------------------------------------------------

    @endpoint
    def execute(self, run: int, number: int, site: int, meshes: list[Any], body: Any, buffers: Any) -> Any:
        """Call a function; its tensors stay here under this id. Returns the rest. Raises RunFailed."""
        self.commands.settle_all()
        if self.commands.recorded is not None:
            self.commands.recorded.lose_track()
        name = "run"
        try:
            self.inbox.begin(run)
            (function, args, kwargs), own = remote_call_args.unpack(self, meshes, body, buffers)
            name = f"run({getattr(function, '__qualname__', function)})"
            with torch.enable_grad():
                result = function(*args, **kwargs)
            body, buffers, kept = remote_call_args.pack(result, own)
        except CancelledError:  # of the actor, not the function's
            raise
        except BaseException as error:  # also KeyboardInterrupt; torch's CheckpointException is not an Exception
            failure = (
                error.failure if isinstance(error, NotThereError) else self.commands.new_failure(name, site, error)
            )
            self.commands.tensors[number] = failure
            raise RunFailed(self.commands.failures.told(failure)) from None
        finally:
            self.inbox.end()
        self.commands.tensors[number] = kept
        return body, buffers, len(kept)

    @endpoint
    def settle(self, run: int) -> None:
        """Continue once the run has ended on all ranks, with new groups if it failed on one."""
        if self.inbox.verdict(run) == "failed":
            self.rejoin_groups(run)

    @endpoint
    def rejoin_groups(self, run: int) -> None:
        """Join new groups after a run that has failed on this rank, or on others, which have closed theirs."""
        self.groups.reinitialize(run)
        try:
            self._join_again()
        finally:  # not earlier: torch can't make two groups at once
            rejoin_after(run).set()

    @endpoint
    def join_again(self, run: int) -> None:
        """Join new groups, because an executor of another device in these processes has closed the old ones."""
        joined = rejoin_after(run)
        while not joined.wait(CANCEL_CHECK_INTERVAL_S):
            pass
        self._join_again()

    def failed_check(self) -> Failure | None:
        """Return a failed check that was not raised yet."""
        beside = self.commands.failures.beside(None)
        if beside is None:
            return None
        first = beside["checks"][0]
        return Failure(first, first["order"], is_end=False)

    # Groups -----------------------------------------------------------------------------------------------------

    def _join_again(self) -> None:
        self.meshes.clear()
        self.commands.rejoin_groups()

    def __cleanup__(self, exc: BaseException | None) -> None:
        if exc is None:
            self.commands.failures.tell_at_the_end()


def _own_device(device_type: str) -> torch.device:
    if device_type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        torch.cuda.set_device(index)
        attention.install()
        return torch.device("cuda", index)
    return torch.device(device_type)
