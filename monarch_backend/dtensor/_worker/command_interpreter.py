"""Interpreter of the controller's commands: it executes batches, in order, on this worker's tensors.

A command is some words: a function's number, its call site, ids of operands and results (_protocol.py). The compiled
core executes the functions that it knows by itself. A failed operation's `Failure` is stored in place of its results,
and of results that depend on them. `PendingResults` are of collectives in flight, `WorkerGroups` their groups.
"""

from __future__ import annotations

import contextlib
import datetime
from collections import ChainMap
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

from monarch_backend import _native
from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._protocol import Define, Graph, Signature
from monarch_backend.dtensor._torch_internals import c10d_registry
from monarch_backend.dtensor._worker import failures, op_functions
from monarch_backend.dtensor._worker import storage as storage_module
from monarch_backend.dtensor._worker.failures import Failure
from monarch_backend.dtensor._worker.graph_executor import GraphFunction
from monarch_backend.dtensor._worker.op_functions import Function
from monarch_backend.dtensor._worker.xla import xla_device
from monarch_backend.process_group._errors import GroupClosedError, RankFailedError


class PendingResults:
    """Waits for collectives when their results or their operands' memory are used. ``tensors``: by number."""

    def __init__(
        self, tensors: dict[int, Any], new_failure: Callable[[Signature, int, int, Exception], Failure]
    ) -> None:
        self._tensors, self._new_failure = tensors, new_failure
        self.pending: dict[int, tuple[Signature, int, int]] = {}  # by result: arguments of ``new_failure``
        self._sources: dict[int, frozenset[int]] = {}  # by result: the storages that the collective reads
        self._readers: dict[int, set[int]] = {}  # by storage: the results

    def wait_for_operands(self, function: Function, words: list[Any], i: int) -> None:
        for each in function.operands(words, i):
            if each in self.pending:
                self.settled(each)

    def wait_for_readers(self, function: Function, words: list[Any], i: int) -> None:
        """Wait for collectives that still read memory which a command writes."""
        writes = function.signature.writes
        if not writes:
            return
        operands = function.operands(words, i)
        written = self.memory_of([operands[at] for at in writes])
        for each in [each for storage in written for each in self._readers.get(storage, ())]:
            self.settled(each)

    def note_readers(self, results: list[int], storages: frozenset[int]) -> None:
        """Record the storages that the collective of these results reads."""
        self._sources.update(dict.fromkeys(results, storages))
        for storage in storages:
            self._readers.setdefault(storage, set()).update(results)

    def _forget_reader(self, result: int) -> None:
        for storage in self._sources.pop(result, ()):
            self._readers[storage].discard(result)
            if not self._readers[storage]:
                del self._readers[storage]

    def memory_of(self, numbers: list[int]) -> frozenset[int]:
        found = [storage_module.identity(self._tensors.get(each)) for each in numbers]
        return frozenset(each for each in found if each is not None)

    def settled(self, number: int) -> Any:
        """Wait for a result; return it, a `Failure`, or None if this rank has no part in it."""
        found = self._tensors.get(number)  # None: this rank takes no part in it
        origin = self.pending.pop(number, None)
        self._forget_reader(number)
        if origin is not None and not isinstance(found, Failure):
            try:
                found = funcol.wait_tensor(found)
            except Exception as error:  # such as the death of another rank
                found = self._new_failure(*origin, error)
            self._tensors[number] = found
        return found


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


class CommandInterpreter:
    """The commands' state in one worker: tensors by id, functions by number, and failures."""

    def __init__(self, rank: int, device: torch.device, groups: WorkerGroups) -> None:
        self._rank, self._groups, self.device = rank, groups, device
        self.tensors: dict[int, Any] = {}
        self.functions: dict[int, Function | None] = {}
        self._calls: dict[int, Any] = {}  # of functions that the compiled core can execute by itself
        self.results = PendingResults(self.tensors, self._failure)
        self._pending = self.results.pending
        self.failures = failures.Failures()
        self._before = 0  # words in finished batches
        self._waiting = 0  # words since XLA last executed
        self.recorded: xla_device.Recorded | None = None
        """XLA's recorded operations."""

    def run(self, batch: bytes) -> None:
        definitions, words = _protocol.decode(batch)
        for definition in definitions:
            self._define(*definition)
        if self.recorded is not None:
            self.recorded.note(words, self.functions, self.tensors)
        self._execute(words)
        self._before += len(words)
        self._waiting += len(words)
        if self._waiting > xla_device.MAX_RECORDED_WORDS:
            self.sync()

    def sync(self) -> None:
        """Have XLA execute what it has recorded."""
        self._waiting = 0
        if self.recorded is not None:
            self.recorded.do(self.tensors.values())

    def _execute(self, words: list[Any]) -> None:
        i, end, cursor = 0, len(words), [0]
        while True:
            try:
                i = _native.execute(words, i, self._calls, self.tensors, self._pending, cursor)
            except Exception as error:
                i = cursor[0]
                i += self._failed(self.functions[words[i]], words, i, error)  # type: ignore[arg-type]
                continue
            if i == end:
                return
            i = self._run_one(words, i)

    def _run_one(self, words: list[Any], i: int) -> int:
        """Execute the command at ``i``; return the position of the next one."""
        number = words[i]
        if number < _protocol.FIRST:
            return self._drop(words, i)
        function: Function = self.functions[number]  # type: ignore[assignment]
        if self._pending:
            self.results.wait_for_operands(function, words, i)
            self.results.wait_for_readers(function, words, i)
        try:
            function.run(self.tensors, words, i)
            if function.orders:
                function.put_in_order(self.tensors, words, i)
            call = function.quick(self.tensors, words, i) if number not in self._calls else None
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
            self.results.note_readers(under_way, self.results.memory_of(function.operands(words, i)))
            for each in written:  # other tensors may share the memory, and would not wait for it
                self.results.settled(each)
        return i + function.length

    def _drop(self, words: list[Any], i: int) -> int:
        """Drop tensors, or the functions of signatures; return the position of the next command."""
        end: int = i + 2 + words[i + 1]
        numbers = words[i + 2 : end]
        if words[i] == _protocol.FORGET:
            for number in numbers:
                self.functions.pop(number, None)
                self._calls.pop(number, None)
            return end
        for number in numbers:
            if number in self._pending:
                self.results.settled(number)
            self.tensors.pop(number, None)
        return end

    def _define(self, what: int, *definition: Any) -> None:
        if what == Define.SIGNATURE:
            signature = Signature(*definition)
            self.functions[signature.number] = self._made(signature)
        elif what == Define.BY_RANK:
            number, numbers, of_rank = definition
            mine = of_rank[self._rank]
            known = self.functions[numbers[mine if mine >= 0 else 0]]
            self.functions[number] = known if mine >= 0 else op_functions.skip(known)  # type: ignore[arg-type]
        elif what == Define.GROUP:
            self._groups.join(*definition)
        elif what == Define.OPERATOR:
            op_functions.note_module(*definition)
        elif what == Define.GRAPH:
            graph = Graph(*definition)
            self.functions[graph.number] = GraphFunction(graph, self._rank, self.device, self._groups.name_of)

    def _made(self, signature: Signature) -> Function:
        try:
            return op_functions.make(signature, self._rank, self.device, self._groups.names.get)
        except Exception as error:
            return op_functions.refuse(signature, error)

    def settle_all(self) -> None:
        for each in list(self._pending):
            self.results.settled(each)

    # Groups -----------------------------------------------------------------------------------------------------

    def rejoin_groups(self) -> None:
        """Join all groups again after the default group was replaced, and make the functions that name them anew."""
        self._calls.clear()  # the compiled core's calls use the old groups
        self._groups.join_again()
        for number, function in list(self.functions.items()):  # functions that name groups
            if isinstance(function, GraphFunction):
                self.functions[number] = GraphFunction(function.graph, self._rank, self.device, self._groups.name_of)
            elif function is not None and function.signature.number == number:
                made = self._made(function.signature)
                function.run, function.call, function.orders = made.run, made.call, made.orders

    # Failures ---------------------------------------------------------------------------------------------------

    def new_failure(self, operation: str, site: int, error: BaseException, order: int | None = None) -> Failure:
        order = self._before if order is None else order
        is_end = isinstance(error, (GroupClosedError, RankFailedError)) or c10d_registry.says_gone(error)
        return Failure(failures.report_of(operation, site, self._rank, error), order, is_end=is_end)

    def _failed(self, function: Function, words: list[Any], i: int, error: Exception) -> int:
        """Store the first cause in all results. Return the command's length."""
        signature = function.signature
        operands = function.operands(words, i)
        ids = [each for each in operands if each]  # the others are numbers themselves
        causes = [found for each in ids if isinstance(found := self.tensors.get(each), Failure)]
        if not causes and isinstance(error, KeyError) and any(each not in self.tensors for each in ids):
            return function.length  # this rank takes no part in the operand, nor in the result
        written = [number for at in signature.writes if (number := operands[at])]
        made = [number for number in function.results(words, i) if number]
        if causes:
            failure = min(causes, key=lambda each: each.order)
            if function.has_collectives:
                self._stand_in(function, words, i)
        else:
            is_check = not written and not made
            failure = self._failure(signature, words[i + 1], self._order(i), error, is_check=is_check)
        for number in written:
            self._spoil(number, failure)
        self.tensors.update(dict.fromkeys(made, failure))
        return function.length

    def _spoil(self, number: int, failure: Failure) -> None:
        """Store the failure in all tensors that share memory with a result that was to be written."""
        written = self.tensors.get(number)
        self.tensors[number] = failure
        if isinstance(written, torch.Tensor):
            for each, other in self.tensors.items():
                if isinstance(other, torch.Tensor) and storage_module.overlap(written, other):
                    self.tensors[each] = failure

    def _order(self, i: int) -> int:
        """Return the position of word ``i`` among all words ever sent, the same on every rank."""
        return self._before + i + 1

    def _failure(
        self, signature: Signature, site: int, order: int, error: Exception, *, is_check: bool = False
    ) -> Failure:
        failure = self.new_failure(signature.target, site, error, order)
        self.failures.add(failure, is_check=is_check)
        return failure

    def _stand_in(self, function: Function, words: list[Any], i: int) -> None:
        """Take part in a collective with zeros: other ranks are in it. A read asks all ranks and gets the failure."""
        operands = {}
        for at, number in enumerate(function.operands(words, i)):
            if isinstance(self.tensors.get(number), Failure):
                shape, dtype = function.signature.ins[at]
                operands[number] = torch.zeros(shape, dtype=getattr(torch, dtype), device=self.device)
        held = ChainMap(operands, self.tensors)
        with contextlib.suppress(Exception):  # the failure has been reported
            function.stand_in(held, words, i)  # type: ignore[arg-type]
