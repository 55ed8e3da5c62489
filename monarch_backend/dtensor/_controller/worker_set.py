"""`WorkerSet`: the processes of one ProcMesh that hold tensors for this controller, and the commands to them.

There is one for each ProcMesh, made by its first device mesh; slices share it. torch's global ranks are numbers of this
controller: the ranks of the first WorkerSet, then those of the second, and so on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch_backend import _native
from monarch_backend._core import debug_log
from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import controller_process_group, recording
from monarch_backend.dtensor._controller.command_stream import DELETE_THRESHOLD_BYTES, FIRST, MOST, Stream
from monarch_backend.dtensor._controller.operations import operations
from monarch_backend.dtensor._controller.remote_tensor import Ref, RemoteTensor
from monarch_backend.dtensor._controller.tensor_meta import MetaCache, refuse_sparse
from monarch_backend.dtensor._controller.worker_failures import WorkerFailures
from monarch_backend.dtensor._errors import MeshClosedError, RemoteTensorError
from monarch_backend.dtensor._protocol import Define, Signature
from monarch_backend.dtensor._torch_internals import custom_ops
from monarch_backend.dtensor._worker import local_functions

_serials = itertools.count(1)


class UnfinishedWork:
    """Work that the workers or other processes must finish before the workers may end."""

    def __init__(self) -> None:
        self._under_way: set[Any] = set()  # work that needs more than commands: see begin
        self._at_rest: list[Callable[[], None]] = []  # called when none of it is left
        self._settling = threading.Lock()

    def begin(self, what: Any) -> None:
        with self._settling:
            self._under_way.add(what)

    def end(self, what: Any) -> None:
        with self._settling:
            self._under_way.discard(what)
            calls = [] if self._under_way else self._at_rest[:]
            del self._at_rest[: len(calls)]
        for call in calls:
            call()

    def call_at_end(self, then: Callable[[], None]) -> None:
        """Call ``then`` when no work is left: now, or later on the thread that ends the last work."""
        with self._settling:
            if self._under_way:
                self._at_rest.append(then)
                return
        then()


class WorkerSet:
    """Location of tensors. ``line``: channel to the workers; ``first``: global rank of the first one."""

    def __init__(self, name: str, size: int, first: int, device: torch.device, line: Any) -> None:
        self.name, self.size, self.first, self.device = name, size, first, device
        self.meshes: dict[Any, Any] = {}  # meshes of these workers, by ranks, sizes and names
        self.serial = next(_serials)  # never reused in this program
        self.line = line
        self.metas = MetaCache(self)
        self.ids = itertools.count(1)
        self.kept: dict[Any, Any] = {}  # data of other modules about these workers, for their lifetime
        self.stream = Stream(line, name)
        self._words = self.stream.words
        self.unreachable = self.stream.unreachable
        self._by_rank: dict[Any, int] = {}
        self._operators: set[str] = set()  # those whose modules the workers know
        self._keys: dict[int, Any] = {}  # of `_by_rank`
        self.sink = _native.Sink(
            self._words, self.unreachable, self.ids, self.stream.wake, self._full, FIRST
        )  # for csrc/records/controller_dispatch.cpp
        self.sink.most = DELETE_THRESHOLD_BYTES
        self.sink.debug = debug_log.is_enabled()  # then a failed operation raises at its own call
        self._groups: dict[str, list[list[int]]] = {"0": [list(range(size))]}  # torch's default group: all of these
        self._defined_groups: set[str] = set()
        self._defining = threading.Lock()
        self.failures = WorkerFailures(line)
        self.unfinished = UnfinishedWork()

    @property
    def is_simulated(self) -> bool:
        return not hasattr(self.line, "procs")

    def __deepcopy__(self, _memo: Any) -> WorkerSet:
        return self  # a copy of a DTensor, or of its mesh, is on the same processes

    def __reduce__(self) -> Any:
        raise RemoteTensorError(
            f"a DTensor or mesh of {self.name} can't be pickled: its shards are in other processes. Save the values "
            "(x.full_tensor()), or write a checkpoint (torch.distributed.checkpoint)"
        )

    # Writing ----------------------------------------------------------------------------------------------------

    def write(self, record: tuple[Any, ...], nbytes: int = 0) -> None:
        """Write one command after all others. ``nbytes``: bytes that it allocates on a worker."""
        words = self._words
        self.sink.made += nbytes
        if self.sink.made >= DELETE_THRESHOLD_BYTES:
            self.sink.made = 0
            self.stream.delete()
        is_first = not words
        words += record
        if is_first or len(words) <= len(record):  # the words before these were taken meanwhile
            self.stream.wake()
        self.sink.records += 1
        if len(words) > self.sink.limit or self.sink.debug:
            self._full()

    def _full(self) -> None:
        """Return whether there are enough words for a batch, or each command is a batch."""
        self.stream.flush()
        self.sink.limit = min(2 * self.sink.limit, MOST)
        if self.sink.debug:
            self.synchronize()

    def define(
        self, target: str, args: list[Any], kwargs: dict[str, Any], operands: int, kind: int, results: int,
        writes: list[int], ins: list[Any], orders: Sequence[list[int] | None] = (),
    ) -> int:  # fmt: skip
        self.define_operator(target)
        number = next(self.stream.numbers)
        signature = Signature(number, target, args, kwargs, operands, kind, results, writes, ins, list(orders))
        self.stream.define(Define.SIGNATURE, *signature)
        return number

    def define_operator(self, target: str) -> None:
        """Send the module of a custom operator to the workers, once. They may not have imported it."""
        name = target.rpartition(".")[0]
        if name not in self._operators:
            self._operators.add(name)
            module = custom_ops.module_of(name)
            if module is not None:
                self.stream.define(Define.OPERATOR, name, module)

    def define_by_rank(self, numbers: Sequence[int], of_rank: Sequence[int]) -> int:
        """Define the signature that is ``numbers[of_rank[r]]`` on rank r, and nothing if that is -1."""
        key = (tuple(numbers), tuple(of_rank))
        number = self._by_rank.get(key)
        if number is None:
            number = self._by_rank[key] = next(self.stream.numbers)
            self._keys[number] = key
            self.stream.define(Define.BY_RANK, number, list(numbers), list(of_rank))
        return number

    def forget(self, numbers: Sequence[int]) -> None:
        if numbers:
            self._words.extend((_protocol.FORGET, len(numbers), *numbers))
            self.stream.wake()
            key = self._keys.pop(numbers[0], None)
            if key is not None:
                del self._by_rank[key]

    # Groups -----------------------------------------------------------------------------------------------------

    def add_group(self, name: str, rows: list[list[int]]) -> None:
        self._groups[name] = [[rank - self.first for rank in row] for row in rows]

    def has_group(self, name: str) -> bool:
        return name in self._groups

    def group_name(self, value: Any) -> str | None:
        """Return the name of a group, which the workers know then. Raises MeshMismatchError for one of others."""
        name = value if isinstance(value, str) else getattr(value, "group_name", None)
        if name is None and isinstance(value, torch.ScriptObject):
            name = torch.distributed.ProcessGroup.unbox(value).group_name
        if isinstance(name, str):
            controller_process_group.check_group(self, value, name)
        if name not in self._groups:
            return None
        if name not in self._defined_groups:
            with self._defining:  # no other thread's signature may overtake it
                if name not in self._defined_groups:
                    self.stream.define(Define.GROUP, name, self._groups[name])
                    self._defined_groups.add(name)
        return str(name)

    def rows(self, values: Sequence[Any]) -> list[list[int]]:
        """Return the rows of the group among these values: its ranks, for each slice."""
        return [row for name in map(self.group_name, values) if name is not None for row in self._groups[name]]

    def outside(self, values: Sequence[Any]) -> set[int]:
        """Return the ranks that are in no row of the group among these values."""
        rows = self.rows(values)
        return set(range(self.size)).difference(*rows) if rows else set()

    # Values -----------------------------------------------------------------------------------------------------

    def put(self, value: torch.Tensor, device: torch.device | None = None) -> RemoteTensor:
        """Send the same tensor to all workers."""
        if value.is_meta:
            return self.put_shape(value.detach())
        tensor = _dense(value)
        if not tensor.ndim and tensor.is_floating_point() and device is None and tensor.device.type == "cpu":
            # By a command, not by a message: fused optimizers have a new number per parameter and step.
            return self._create(torch.ops.aten.scalar_tensor.default, [tensor.item()], tensor.dtype, self.device)
        where = device or (self.device if tensor.device.type == "cpu" else tensor.device)
        number = next(self.ids)
        self.stream.flush()
        self.line.put(number, tensor)
        return RemoteTensor(self.metas.sent(tensor, where), Ref(self, number))

    def _create(self, operator: Any, args: list[Any], dtype: torch.dtype, device: torch.device) -> RemoteTensor:
        return operations.create(self, operator, args, {"dtype": dtype, "device": device})  # type: ignore[no-any-return]

    def zeros(self, size: Sequence[Any], dtype: torch.dtype) -> RemoteTensor:
        return self._create(torch.ops.aten.zeros.default, [list(size)], dtype, self.device)

    def put_shape(self, value: torch.Tensor) -> RemoteTensor:
        """Put a tensor of the meta device on all workers; its sizes may differ by rank."""
        arguments = [list(value.shape), list(value.stride())]
        return self._create(torch.ops.aten.empty_strided.default, arguments, value.dtype, torch.device("meta"))

    def put_by_rank(self, values: Sequence[torch.Tensor | None]) -> RemoteTensor:
        """Send each rank its own tensor; nothing to ranks with None."""
        dense = [None if value is None else _dense(value) for value in values]
        meta = self.metas.by_rank([None if value is None else self.metas.sent(value, self.device) for value in dense])
        number = next(self.ids)
        self.stream.flush()
        self.line.put_by_rank(number, dense)
        return RemoteTensor(meta, Ref(self, number))

    def put_on(self, value: torch.Tensor, outside: frozenset[int]) -> RemoteTensor:
        """Send a tensor to all ranks but these. Values that are on the workers already are not sent again."""
        if isinstance(value, RemoteTensor):
            return self.without(value, outside)
        if not outside or value.is_meta:
            return self.without(self.put(value), outside)
        return self.put_by_rank([None if rank in outside else value for rank in range(self.size)])

    def without(self, tensor: RemoteTensor, outside: frozenset[int]) -> RemoteTensor:
        """Return the same tensor without these ranks, which would not execute the other ranks' changes."""
        if outside <= tensor._meta.outside:
            return tensor
        key = "inside", outside
        inside = self.kept.get(key)
        if inside is None:
            mark = torch.zeros(())
            inside = self.kept[key] = self.put_by_rank([None if r in outside else mark for r in range(self.size)])
        name = f"{local_functions.__name__}:own"
        return operations.call(local_functions.own, name, (tensor, inside), {})  # type: ignore[no-any-return]

    def read(self, tensor: RemoteTensor, how: str = "tensor") -> Callable[[], Any]:
        """Return a function that waits for the first value, after all workers have come here, or raises failures."""
        meta = tensor._meta
        rank = 0 if meta.classes is None else next(i for i, each in enumerate(meta.of_rank) if each >= 0)
        self._flush_for_a_read()
        replies = self.line.ask("read", tensor._ref.id, rank, how)

        def wait(_keep: Any = tensor) -> Any:
            value = self._recorded(f"read {how}", replies, tensor._ref.id)[rank]
            if value is None:
                raise RemoteTensorError(f"rank {rank} of {self.name} has no part of this tensor, so it has no value")
            return value

        return wait

    def ask(self, what: str, *args: Any) -> list[Any]:
        """Return all ranks' replies; waits."""
        self._flush_for_a_read()
        return self._recorded(f"ask {what}", self.line.ask(what, *args))

    def _recorded(self, detail: str, replies: Callable[[], list[Any]], reference: int = 0) -> list[Any]:
        """Wait for the replies of all workers, and record the wait. Raises RemoteOpError for their failures."""
        start, has_failed = recording.monotonic_ns(), True
        try:
            values = self.failures.check(replies())
            has_failed = False
        finally:
            recording.record(self.name, detail, start, reference=reference, has_failed=has_failed)
        return values

    def _flush_for_a_read(self) -> None:
        self.sink.limit = FIRST
        self.stream.flush(wait=False)

    def synchronize(self) -> None:
        """Wait until all commands were executed. Raises RemoteOpError for a failure that was not raised yet."""
        self.ask("failed_since")

    # The end ----------------------------------------------------------------------------------------------------

    def before_stop(self, then: Callable[[], None]) -> None:
        """Send all commands, and call ``then`` when nothing is in transit."""
        self.stream.send_the_rest()
        self.unfinished.call_at_end(then)

    def close(self, why: str) -> None:
        self.stream.closed = self.stream.closed or MeshClosedError(f"the processes of {self.name} have ended: {why}")


def _dense(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor as workers receive it: without gaps, on the CPU. A tensor without gaps keeps its strides."""
    tensor = value.detach()
    refuse_sparse(tensor)
    if tensor.is_cuda:
        tensor = tensor.cpu()
    gaps = not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) != 0
    return tensor.contiguous() if gaps else tensor
