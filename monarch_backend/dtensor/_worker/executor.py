"""`Executor`: the actor that holds this worker's tensors and executes the controller's commands, in order.

A failed operation's `Failure` is stored in place of its results, and of results that depend on them, until a read.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections import ChainMap
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch_backend import _native
from monarch_backend._actor.actor import Actor, endpoint
from monarch_backend._actor.context import current_rank
from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._protocol import Define, Graph, RemoteRef, Signature
from monarch_backend.dtensor._torch_internals import c10d_registry
from monarch_backend.dtensor._worker import attention, failures, graph_executor, op_functions, random_ops, remote_call
from monarch_backend.dtensor._worker import storage as storage_module
from monarch_backend.dtensor._worker.control_actor import boards, meetings
from monarch_backend.dtensor._worker.failures import Failure
from monarch_backend.dtensor._worker.op_functions import Function
from monarch_backend.dtensor._worker.pending_results import PendingResults
from monarch_backend.dtensor._worker.worker_groups import WorkerGroups
from monarch_backend.dtensor._worker.xla import xla_device
from monarch_backend.process_group._errors import GroupClosedError, RankFailedError


class Executor(Actor):
    """Executor in one process of a device mesh."""

    def __init__(self, device_type: str, timeout: float) -> None:
        self._rank = current_rank().rank
        self._timeout = datetime.timedelta(seconds=timeout)
        self.groups = WorkerGroups(self._rank, self._timeout)
        self.meshes: dict[str, Any] = {}
        """This worker's own meshes, by their description; see remote_call_args.py."""
        self.board = boards[device_type]
        self._device = _own_device(device_type)
        self._tensors: dict[int, Any] = {}
        self._functions: dict[int, Function | None] = {}
        self._calls: dict[int, Any] = {}  # of functions that the compiled core can execute by itself
        self._results = PendingResults(self._tensors, self._failure)
        self._pending = self._results.pending
        self._failures = failures.Failures()
        self._before = 0  # words in finished batches
        self._waiting = 0  # words since XLA last executed
        self._recorded: xla_device.Recorded | None = None  # XLA's recorded operations
        torch.set_grad_enabled(False)

    # Messages of the controller ---------------------------------------------------------------------------------

    @endpoint
    def missing(self) -> str:
        """Return why this process has no such device, and what to do; or ""."""
        return xla_device.missing() if self._device.type == "xla" else ""

    @endpoint
    def start(self) -> None:
        """Start; nothing is missing."""
        if self._device.type == "xla":
            self._device, self._recorded = xla_device.start(), xla_device.Recorded()

    @endpoint
    def run(self, batch: bytes) -> None:
        """Execute a batch."""
        self._run(batch)

    @endpoint
    def run_counted(self, batch: bytes) -> None:
        """Execute a batch and reply."""
        self._run(batch)

    @endpoint
    def put(self, number: int, tensor: torch.Tensor) -> None:
        """Store a tensor under this id."""
        self._tensors[number] = tensor.to(self._device) if self._device.type != "cpu" else tensor

    @endpoint
    def read(self, number: int, rank: int, how: str) -> Any:
        """Return the value on this rank, None on other ranks, which may lack it. Returns failures on all ranks."""
        return self._failures.beside(self._read(number, rank, how))

    def _read(self, number: int, rank: int, how: str) -> Any:
        if rank != self._rank and number not in self._tensors:
            return None
        found = self._results.settled(number)
        self._sync()
        if isinstance(found, Failure):
            return self.told(found)
        if rank != self._rank:
            return None
        if storage_module.is_freed(found):  # reading it would end this process
            why = (
                "the tensor's memory was freed, as FSDP frees a gathered parameter: read the module's parameter instead"
            )
            return self.new_failure("reading", 0, RuntimeError(why)).report
        return found.item() if how == "item" else found.cpu().clone(memory_format=torch.contiguous_format)

    @endpoint
    def equal(self, one: int, other: int) -> Any:
        """Return whether two tensors have the same values; None if this rank has none."""
        return self._failures.beside(self._equal(one, other))

    def _equal(self, one: int, other: int) -> Any:
        values = self._results.settled(one), self._results.settled(other)
        self._sync()
        failed = next((each for each in values if isinstance(each, Failure)), None)
        if failed is not None:
            return self.told(failed)
        return None if any(each is None for each in values) else torch.equal(*values)

    @endpoint
    def measure(self, name: str, args: Any, kwargs: Any, numbers: list[int]) -> Any:
        """Run an operator and keep its results under these ids; return their sizes, strides and dtypes.

        None if this rank takes no part.
        """
        return self._failures.beside(self._measure(name, args, kwargs, numbers))

    def _measure(self, name: str, args: Any, kwargs: Any, numbers: list[int]) -> Any:
        held = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, RemoteRef)]
        failed = next((found for each in held if isinstance(found := self._results.settled(each.id), Failure)), None)
        if failed is not None:
            return self.told(failed)
        if any(each.id not in self._tensors for each in held):
            return None
        args, kwargs = pytree.tree_map(lambda v: self._tensors[v.id] if isinstance(v, RemoteRef) else v, (args, kwargs))
        self._sync()
        try:
            result = op_functions.find(name)(*args, **kwargs)
        except Exception as error:
            return self.new_failure(name, 0, error).report
        results = [result] if isinstance(result, torch.Tensor) else list(result)
        self._tensors.update(zip(numbers, results, strict=False))
        return [(tuple(each.shape), each.stride(), str(each.dtype).removeprefix("torch.")) for each in results]

    @endpoint
    def failed_since(self) -> Any:
        """Wait for earlier commands; return their first unreported failure."""
        return self._failures.beside(self._failures.first_untold())

    @endpoint
    def raised(self, order: int) -> None:
        """Record that failed checks up to this one were raised by a read."""
        self._failures.raised(order)

    @endpoint
    def pid(self) -> int:
        """Return this process's id."""
        return os.getpid()

    @endpoint
    def generator_state(self) -> bytes:
        """Return the state of this worker's random generator after the last operation."""
        return random_ops.state_of(self._device)

    @endpoint
    def count(self) -> int:
        """Return the number of tensors held here."""
        return len(self._tensors)

    @endpoint
    def known(self) -> int:
        """Return the number of signatures known here."""
        return len(self._functions)

    @endpoint
    def live_bytes(self) -> int:
        """Return the bytes of their storages, each storage once."""
        return storage_module.live_bytes(self._tensors.values())

    # Functions --------------------------------------------------------------------------------------------------

    @endpoint
    def execute(self, run: int, number: int, site: int, meshes: list[Any], body: Any, buffers: Any) -> Any:
        """Call a function; its tensors stay here under this id. Returns the rest. Raises RunFailed."""
        for each in list(self._pending):
            self._results.settled(each)
        if self._recorded is not None:
            self._recorded.lose_track()
        return remote_call.execute(self, run, number, site, meshes, body, buffers)

    @endpoint
    def settle(self, run: int) -> None:
        """Continue once the run has ended on all ranks, with new groups if it failed on one."""
        if self.board.verdict(run) == "failed":
            self._meet_again(run)

    @endpoint
    def meet_again(self, run: int) -> None:
        """Join new groups after a run in which other ranks have closed theirs."""
        self._meet_again(run)

    @endpoint
    def join_again(self, run: int) -> None:
        """Join new groups, because an executor of another device in these processes has closed the old ones."""
        meetings.wait(run)
        self._join_again()

    @property
    def rank(self) -> int:
        """Return this worker's rank."""
        return self._rank

    def held(self, number: int) -> Any:
        """Return the tensor or Failure under this id."""
        return self._results.settled(number)

    def failed_check(self) -> Failure | None:
        """Return a failed check that was not raised yet."""
        beside = self._failures.beside(None)
        if beside is None:
            return None
        first = beside["checks"][0]
        return Failure(first, first["order"], is_end=False)

    def keep(self, number: int, value: Any) -> None:
        """Store a value under this id."""
        self._tensors[number] = value

    def new_failure(self, operation: str, site: int, error: BaseException) -> Failure:
        """Return a new failure; the caller reports it."""
        return self._new_failure(operation, site, self._before, error)

    def _new_failure(self, operation: str, site: int, order: int, error: BaseException) -> Failure:
        is_end = isinstance(error, (GroupClosedError, RankFailedError)) or c10d_registry.says_gone(error)
        return Failure(failures.report_of(operation, site, self._rank, error), order, is_end=is_end)

    def told(self, failure: Failure) -> dict[str, Any]:
        """Return a failure's report for the controller, and mark it as reported."""
        return self._failures.told(failure)

    # Batches ----------------------------------------------------------------------------------------------------

    def _run(self, batch: bytes) -> None:
        definitions, words = _protocol.decode(batch)
        for definition in definitions:
            self._define(*definition)
        if self._recorded is not None:
            self._recorded.note(words, self._functions, self._tensors)
        self._execute(words)
        self._before += len(words)
        self._waiting += len(words)
        if self._waiting > xla_device.MAX_RECORDED_WORDS:
            self._sync()

    def _sync(self) -> None:
        self._waiting = 0
        if self._recorded is not None:
            self._recorded.do(self._tensors.values())

    def _execute(self, words: list[Any]) -> None:
        i, end, cursor = 0, len(words), [0]
        while True:
            try:
                i = _native.execute(words, i, self._calls, self._tensors, self._pending, cursor)
            except Exception as error:
                i = cursor[0]
                i += self._failed(self._functions[words[i]], words, i, error)  # type: ignore[arg-type]
                continue
            if i == end:
                return
            i = self._run_one(words, i)

    def _run_one(self, words: list[Any], i: int) -> int:
        """Execute the command at ``i``; return the position of the next one."""
        number = words[i]
        if number == _protocol.DELETE:
            return self._delete(words, i)
        if number == _protocol.FORGET:
            return self._forget(words, i)
        function: Function = self._functions[number]  # type: ignore[assignment]
        if self._pending:
            self._results.wait_for_operands(function, words, i)
            self._results.wait_for_readers(function, words, i)
        try:
            function.run(self._tensors, words, i)
            if function.orders:
                function.put_in_order(self._tensors, words, i)
            call = function.quick(self._tensors, words, i) if number not in self._calls else None
        except Exception as error:
            call = None
            self._failed(function, words, i, error)
        if call is not None:
            self._calls[number] = call
        if function.is_collective:
            origin = function.signature, words[i + 1], self._order(i)
            written = [function.operands(words, i)[at] for at in function.signature.writes]
            under_way = [*function.results(words, i), *written]
            self._pending.update(dict.fromkeys(under_way, origin))
            self._results.note_readers(under_way, self._results.memory_of(function.operands(words, i)))
            for each in written:  # other tensors may share the memory, and would not wait for it
                self._results.settled(each)
        return i + function.length

    def _delete(self, words: list[Any], i: int) -> int:
        end: int = i + 2 + words[i + 1]
        for number in words[i + 2 : end]:
            if number in self._pending:
                self._results.settled(number)
            self._tensors.pop(number, None)
        return end

    def _forget(self, words: list[Any], i: int) -> int:
        end: int = i + 2 + words[i + 1]
        for number in words[i + 2 : end]:
            self._functions.pop(number, None)
            self._calls.pop(number, None)
        return end

    def _define(self, what: int, *definition: Any) -> None:
        if what == Define.SIGNATURE:
            signature = Signature(*definition)
            self._functions[signature.number] = self._made(signature)
        elif what == Define.BY_RANK:
            number, numbers, of_rank = definition
            mine = of_rank[self._rank]
            known = self._functions[numbers[mine if mine >= 0 else 0]]
            self._functions[number] = known if mine >= 0 else op_functions.skip(known)  # type: ignore[arg-type]
        elif what == Define.GROUP:
            self.groups.join(*definition)
        elif what == Define.GRAPH:
            graph = Graph(*definition)
            self._functions[graph.number] = graph_executor.make(graph, self._rank, self._device, self.groups.name_of)

    def _made(self, signature: Signature) -> Function:
        try:
            return op_functions.make(signature, self._rank, self._device, self.groups.names.get)
        except Exception as error:
            return op_functions.refuse(signature, error)

    # Groups -----------------------------------------------------------------------------------------------------

    def _meet_again(self, run: int) -> None:
        self.groups.reinitialize(run)
        try:
            self._join_again()
        finally:  # not earlier: torch can't make two groups at once
            meetings.note(run)

    def _join_again(self) -> None:
        """Join all groups again after the default group was replaced."""
        self.meshes.clear()
        self._calls.clear()
        self.groups.join_again()
        for number, function in list(self._functions.items()):  # functions that name groups
            if isinstance(function, graph_executor.GraphFunction):
                self._functions[number] = graph_executor.make(
                    function.graph, self._rank, self._device, self.groups.name_of
                )
            elif function is not None and function.signature.number == number:
                made = self._made(function.signature)
                function.run, function.call, function.orders = made.run, made.call, made.orders

    # Failures ---------------------------------------------------------------------------------------------------

    def _failed(self, function: Function, words: list[Any], i: int, error: Exception) -> int:
        """Store the first cause in all results. Return the command's length."""
        signature = function.signature
        operands = function.operands(words, i)
        ids = [each for each in operands if each]  # the others are numbers themselves
        causes = [found for each in ids if isinstance(found := self._tensors.get(each), Failure)]
        if not causes and isinstance(error, KeyError) and any(each not in self._tensors for each in ids):
            return function.length  # this rank takes no part in the operand, nor in the result
        written = [number for at in signature.writes if (number := operands[at])]
        made = [number for number in function.results(words, i) if number]
        if causes:
            failure = min(causes, key=lambda each: each.order)
            if function.meets_others:
                self._stand_in(function, words, i)
        else:
            is_check = not written and not made
            failure = self._failure(signature, words[i + 1], self._order(i), error, is_check=is_check)
        for number in written:
            self._spoil(number, failure)
        self._tensors.update(dict.fromkeys(made, failure))
        return function.length

    def _spoil(self, number: int, failure: Failure) -> None:
        """Store the failure in all tensors that share memory with a result that was to be written."""
        written = self._tensors.get(number)
        self._tensors[number] = failure
        if isinstance(written, torch.Tensor):
            for each, other in self._tensors.items():
                if isinstance(other, torch.Tensor) and storage_module.overlap(written, other):
                    self._tensors[each] = failure

    def _order(self, i: int) -> int:
        """Return the position of word ``i`` among all words ever sent, the same on every rank."""
        return self._before + i + 1

    def _failure(
        self, signature: Signature, site: int, order: int, error: Exception, *, is_check: bool = False
    ) -> Failure:
        failure = self._new_failure(signature.target, site, order, error)
        self._failures.add(failure, is_check=is_check)
        return failure

    def __cleanup__(self, exc: BaseException | None) -> None:
        """Print failures that no read has reported."""
        if exc is None:
            self._failures.tell_at_the_end()

    def _stand_in(self, function: Function, words: list[Any], i: int) -> None:
        """Take part in a collective with zeros, because other ranks are in it.

        A read gets the failure, since it asks all ranks.
        """
        operands = {}
        for at, number in enumerate(function.operands(words, i)):
            if isinstance(self._tensors.get(number), Failure):
                shape, dtype = function.signature.ins[at]
                operands[number] = torch.zeros(shape, dtype=getattr(torch, dtype), device=self._device)
        held = ChainMap(operands, self._tensors)
        with contextlib.suppress(Exception):  # the failure has been reported
            function.stand_in(held, words, i)  # type: ignore[arg-type]


def _own_device(device_type: str) -> torch.device:
    if device_type == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
        torch.cuda.set_device(index)
        attention.install()
        return torch.device("cuda", index)
    return torch.device(device_type)
