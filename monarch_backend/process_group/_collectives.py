"""Methods for the collectives of torch's ProcessGroup: each finds its route and calls the inner group.

This module has no choice of a route (_backend_selection.py) and no rule about arguments (_cpu_arguments.py and
_cpu_validation.py). The life of a group is in _process_group.py, private parts of torch are in _c10d_internals.py.

A call takes one of three ways:

- Plain tensors without observers go to the inner group's method and bypass torch's dispatcher. The fast paths of shared
  memory bypass even these methods (installed by _process_group.py, made by _shm/shm_backend.py).
- With a dispatch mode, the profiler or a tensor subclass, `super()` calls torch's dispatcher. It reaches the same inner
  group, which is registered with the C++ base as the device's backend.
- C++ callers (DDP's reducer, functional collectives) come through torch's trampolines. Methods without one reach the
  registered inner group directly.

A `super()` call must be in a function of the same name with `self` first. By this, pybind11 detects that an override
calls its base. Else it calls the override again, without end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from monarch_backend._core import torch_version
from monarch_backend._telemetry.kinds import Status
from monarch_backend.process_group import _c10d_internals, _cpu_arguments, _cpu_validation, _overlap, _tensor_lists
from monarch_backend.process_group._argument_forms import call_forms
from monarch_backend.process_group._errors import bad_argument
from monarch_backend.process_group._gloo_work import GlooWork
from monarch_backend.process_group._hooks import AliasedOutputWork, CompletionHooks, DeferredWork
from monarch_backend.process_group._host_guard import HostGuard
from monarch_backend.process_group._rdma import p2p_protocol
from monarch_backend.process_group._rdma.p2p import RdmaP2P
from monarch_backend.process_group._route_recording import (
    UNRECORDED,
    EnqueuedCall,
    RecordedCall,
    RouteRecording,
    Unrecorded,
)
from monarch_backend.process_group._shm.shm_backend import SharedMemory, call_by_operator

# From torch 2.14 on, the C++ base calls the overrides of all_gather_single and reduce_scatter_single from
# _allgather_base and _reduce_scatter_base. Before, C++ calls only the old names. Overrides of both would recurse
# without end.
_NEW_NAMES = torch_version.torch_version() >= (2, 14)

# An operation with several names before its call, and what is done with its work.
_End = Callable[[Any, RecordedCall | None], Any]
_Prepared = tuple[Any, bool, tuple[Any, ...], _End]


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


@_c10d_internals.hide_from_dynamo
class Collectives(dist.ProcessGroup):
    """The collectives of c10d, for a group with an inner group for each device type."""

    # Set by _process_group.py.
    _inner: dict[str, Any]
    _closed: str
    _label: str
    # Devices whose operations have observers: hooks in torch's dispatcher for this group (torch >= 2.14).
    _observed: set[str]
    _hooks: CompletionHooks
    _kernel: Any = None  # CPU backend that torch finds where hooks must see operations that are not Gloo's
    _shm: SharedMemory | None  # replaces _inner["cpu"] where all ranks are on one host
    _guard: HostGuard | None = None  # of a group with ranks on several hosts
    _rdma_p2p: RdmaP2P | None  # replaces it for large messages where hosts are connected by NICs
    _recordings: dict[int, RouteRecording]  # by the `id` of the inner group

    @functools.cached_property
    def _own_rank(self) -> int:
        return self.rank()  # a call into C++ takes half a microsecond

    def _open_route(self, device: str) -> Any:
        raise NotImplementedError

    def _find(self, collective: str, tensors: Sequence[Tensor]) -> tuple[Any, bool, bool]:
        """Return (inner group for these tensors, whether they are on the CPU, whether torch's dispatcher must be used).

        _cpu_validation.py checks CPU arguments. Other devices' arguments are checked by their inner group.
        """
        if not tensors:
            raise bad_argument(self, collective, "the list of tensors is empty", "Give at least one tensor.")
        self._check_hosts()
        device = tensors[0].device.type
        inner = self._inner.get(device)
        if inner is None:
            # Meta tensors have no memory to send; torch's dispatcher makes their collectives no-ops.
            inner = self if device == "meta" and not self._closed else self._open_route(device)
        plain = not (device in self._observed or _c10d_internals.watched())
        for tensor in tensors:
            plain = plain and type(tensor) in _cpu_validation.PLAIN
            if tensor.device.type != device:
                what = f"tensors on {device} and on {tensor.device.type} in one call"
                raise bad_argument(self, collective, what, "Move them to one device.")
        if plain and device == "cpu":
            _cpu_validation.check_storage(self, collective, tensors)
        use_dispatcher = inner is self or (not plain and _c10d_internals.is_c10d_backend(inner))
        if device == "cpu" and self._shm is not None and tensors[0].layout is torch.strided:
            inner = self._shm
        return inner, device == "cpu", use_dispatcher

    def _check_hosts(self) -> None:
        """Raise RankFailedError if a host of the group was lost."""
        if self._guard is not None and (error := self._guard.error()) is not None:
            raise error

    def _guarded(self, work: Any, inner: Any, message_bytes: int) -> Any:
        """Return the work for the caller of a message on ``inner``: if Gloo's, one whose error names a lost host."""
        if self._guard is None or inner is not self._inner.get("cpu"):
            return work
        return GlooWork(work, self._guard, message_bytes=message_bytes)

    def _recorded(
        self, operation: str, inner: Any, tensors: Sequence[Tensor]
    ) -> RecordedCall | EnqueuedCall | Unrecorded:
        """Return the context in which ``inner`` is called: it records the operation, unless ``inner`` does so."""
        recording = self._recordings.get(id(inner))
        return UNRECORDED if recording is None else recording.enter(operation, tensors)

    def _dispatched(self, inner: Any, opts: Any) -> AbstractContextManager[Any]:
        """Return the context of a `super()` call.

        It ends at the registered group, or at one of our backends instead.
        """
        if isinstance(inner, (SharedMemory, RdmaP2P)):
            run = functools.partial(inner.dispatched, opts)
        elif self._kernel is not None and opts is None and inner is self._inner.get("cpu"):
            # The kernel would lose what a receive knows of its sender.
            run = functools.partial(call_by_operator, inner, opts)
        else:
            return _c10d_internals.through_dispatcher()
        return _c10d_internals.beneath_dispatch_modes(run, self._kernel)

    def _reduced(self, inner: Any, work: Any, given: list[Tensor], finish: Callable[[], object] | None = None) -> Any:
        """Return the work of a reduce_scatter on the CPU."""
        if inner is not self._shm:
            return DeferredWork(work, given, finish)
        return _cpu_validation.with_outputs(work, given, finish)

    def _done(
        self,
        work: Any,
        op_type: str,
        on_cpu: bool,
        call: RecordedCall | None,
        given: Sequence[Tensor] = (),
        finish: Callable[[], object] | None = None,
    ) -> Any:
        """Return the work for the caller, whose tensors are ``given``; see `_cpu_validation.with_outputs`."""
        try:
            if on_cpu and given:
                work = _cpu_validation.with_outputs(work, given, finish)
            if on_cpu and self._hooks:
                self._hooks.follow(work, op_type)
        except BaseException:
            if call is not None:
                call.end(Status.ERROR)
            raise
        guard = self._guard if on_cpu and self._shm is None else None
        is_under_way = call is not None and call.status is None
        return GlooWork(work, guard, call) if is_under_way or guard is not None else work

    # Reductions -------------------------------------------------------------------------------------------

    @call_forms
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce in place on all ranks, for torch.distributed.all_reduce.

        Shape and dtype are the same on all ranks. Several tensors have one shape, and each gets the reduction of all.
        """
        given = tensors = _listed(tensors)
        if len(tensors) > 1 and _is_strided_on_cpu(tensors):
            return _tensor_lists.all_reduce(self, Collectives.allreduce, tensors, opts)
        finish = None
        inner, on_cpu, use_dispatcher = self._find("all_reduce", tensors)
        if on_cpu:
            _cpu_validation.check_dense(self, "all_reduce", tensors)
            opts = _cpu_validation.bool_sum_as_max(tensors, opts)
            if inner is not self._shm:
                opts, finish = _cpu_validation.integer_mean_as_sum(self, tensors, opts)
            tensors, opts = _cpu_validation.premultiplied(self, "all_reduce", tensors, opts, in_place=True)
            tensors = _cpu_validation.reducible(self, "all_reduce", tensors, opts.reduceOp, inner)
        with self._recorded("all_reduce", inner, tensors) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().allreduce(tensors, opts)
            else:
                work = inner.allreduce(tensors, opts)
        return self._done(work, "allreduce", on_cpu, call, given, finish)

    @call_forms
    def allreduce_coalesced(self, tensors: Any, opts: Any) -> Any:
        """Reduce each tensor in place on all ranks, in one operation; for torch.distributed.all_reduce_coalesced.

        Shapes may differ between tensors, the dtype may not.
        """
        given = tensors = _listed(tensors)
        finish = None
        inner, on_cpu, use_dispatcher = self._find("all_reduce_coalesced", tensors)
        if on_cpu:
            _tensor_lists.check_same_dtype(self, "all_reduce_coalesced", tensors)
            _cpu_validation.check_settled(self, "all_reduce_coalesced", tensors)
            tensors, put_back = _overlap.separate_in_place(self, "all_reduce_coalesced", tensors)
            opts = _cpu_validation.bool_sum_as_max(tensors, opts)
            if inner is not self._shm:
                opts, finish = _cpu_validation.integer_mean_as_sum(self, tensors, opts)
            finish = _cpu_validation.in_turn(finish, put_back)
            tensors, opts = _cpu_validation.premultiplied(self, "all_reduce_coalesced", tensors, opts, in_place=True)
            tensors = _cpu_validation.reducible(self, "all_reduce_coalesced", tensors, opts.reduceOp, inner)
        with self._recorded("all_reduce", inner, tensors) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().allreduce_coalesced(tensors, opts)
            else:
                work = inner.allreduce_coalesced(tensors, opts)
        return self._done(work, "allreduce_coalesced", on_cpu, call, given, finish)

    @call_forms
    def reduce(self, tensors: Any, opts: Any) -> Any:
        """Reduce in place to one rank, for torch.distributed.reduce. Shape and dtype are the same on all ranks."""
        given = tensors = _listed(tensors)
        finish = None
        inner, on_cpu, use_dispatcher = self._find("reduce", tensors)
        if on_cpu:
            _cpu_validation.check_rank(self, "reduce", "destination", opts.rootRank)
            if len(tensors) > 1 or opts.rootTensor:
                _tensor_lists.check_one(self, "reduce", "tensor", tensors)
                _tensor_lists.check_root_tensor(self, "reduce", tensors, opts)
            _cpu_validation.check_dense(self, "reduce", tensors)
            opts = _cpu_validation.bool_sum_as_max(tensors, opts)
            at_root = opts.rootRank == self._own_rank
            if inner is not self._shm:
                opts, divide = _cpu_validation.integer_mean_as_sum(self, tensors, opts)
                finish = divide if at_root else None
            tensors, opts = _cpu_validation.premultiplied(self, "reduce", tensors, opts, in_place=at_root)
            tensors = _cpu_validation.reducible(self, "reduce", tensors, opts.reduceOp, inner)
        with self._recorded("reduce", inner, tensors) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().reduce(tensors, opts)
            else:
                work = inner.reduce(tensors, opts)
        return self._done(work, "reduce", on_cpu, call, given, finish)

    @call_forms
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Reduce lists of N tensors and scatter the result, for torch.distributed.reduce_scatter.

        ``outputs``: one tensor, which gets the reduction of entry ``rank`` of all lists. All have one size and dtype.
        """
        outputs, inputs = self._pairs(outputs, inputs)
        given, finish = outputs, None
        inner, on_cpu, use_dispatcher = self._find("reduce_scatter", [*outputs, *(t for row in inputs for t in row)])
        if on_cpu:
            _cpu_validation.check_pairs(self, "reduce_scatter", outputs, inputs)
            _tensor_lists.check_one(self, "reduce_scatter", "output", outputs)
            for output, row in zip(outputs, inputs, strict=True):
                _cpu_validation.check_count(self, "reduce_scatter", "input", row)
                _cpu_validation.check_same_shape(self, "reduce_scatter", row, output)
            _cpu_validation.check_contiguous(self, "reduce_scatter", outputs)
            pairs = zip(outputs, [_cpu_validation.readable(row) for row in inputs], strict=True)
            inputs = [_overlap.read_in_turn(self, "reduce_scatter", row, output) for output, row in pairs]
            opts = _cpu_validation.bool_sum_as_max(outputs, opts)
            if inner is not self._shm:
                opts, finish = _cpu_validation.integer_mean_as_sum(self, outputs, opts)
            rows = [_cpu_validation.premultiplied(self, "reduce_scatter", row, opts, in_place=False) for row in inputs]
            inputs, opts = [row for row, _ in rows], rows[0][1]
            outputs = _cpu_validation.reducible(self, "reduce_scatter", outputs, opts.reduceOp, inner)
            inputs = [_cpu_validation.reducible(self, "reduce_scatter", row, opts.reduceOp, inner) for row in inputs]
        with self._recorded("reduce_scatter", inner, outputs) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().reduce_scatter(outputs, inputs, opts)
            else:
                work = inner.reduce_scatter(outputs, inputs, opts)
        return self._done(self._reduced(inner, work, given, finish) if on_cpu else work, "reduce_scatter", on_cpu, call)

    if not _NEW_NAMES:

        @call_forms
        def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
            """Reduce a large tensor and scatter it, for torch.distributed.reduce_scatter_tensor.

            ``input`` has N times the elements of ``output``, and its dtype.
            """
            inner, use_dispatcher, args, end = self._reduce_scatter_one(output, input, opts)
            with self._recorded("reduce_scatter", inner, [args[0]]) as call:
                if use_dispatcher:
                    with self._dispatched(inner, opts):
                        work = super()._reduce_scatter_base(*args)
                else:
                    work = inner._reduce_scatter_base(*args)
            return end(work, call)

    @call_forms
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """Reduce a large tensor and scatter it, for torch 2.13's torch.distributed.reduce_scatter_tensor.

        ``input`` has shape (N * k, ...) or (N, k, ...), ``output`` (k, ...) and the same dtype.
        """
        if not _NEW_NAMES:
            return self._reduce_scatter_base(output, input, opts)
        inner, use_dispatcher, args, end = self._reduce_scatter_one(output, input, opts)
        with self._recorded("reduce_scatter", inner, [args[0]]) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().reduce_scatter_single(*args)
            else:
                work = inner._reduce_scatter_base(*args)
        return end(work, call)

    def _reduce_scatter_one(self, output: Tensor, input: Tensor, opts: Any) -> _Prepared:
        name, given, finish = "reduce_scatter_tensor", output, None
        inner, on_cpu, use_dispatcher = self._find(name, [output, input])
        if on_cpu:
            _cpu_validation.check_single(self, name, input, output, ("input", "output"))
            input = _cpu_validation.readable([input])[0]
            output, finish = _cpu_arguments.writable(self, name, output, input)
            input, output = _cpu_validation.concatenated(input, output)
            opts = _cpu_validation.bool_sum_as_max([output], opts)
            if inner is not self._shm:
                opts, divide = _cpu_validation.integer_mean_as_sum(self, [output], opts)
                finish = _cpu_validation.in_turn(divide, finish)
            (input,), opts = _cpu_validation.premultiplied(self, name, [input], opts, in_place=False)
            output, input = _cpu_validation.reducible(self, name, [output, input], opts.reduceOp, inner)

        def end(work: Any, call: RecordedCall | None) -> Any:
            work = self._reduced(inner, work, [given], finish) if on_cpu else work
            return self._done(work, "_reduce_scatter_base", on_cpu, call)

        return inner, use_dispatcher, (output, input, opts), end

    # Gathering and moving ---------------------------------------------------------------------------------

    @call_forms
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        """Broadcast in place, for torch.distributed.broadcast. Shape and dtype are the same on all ranks.

        Several tensors have one shape, and each gets the values of the root's tensor number ``rootTensor``.
        """
        given = tensors = _listed(tensors)
        if (len(tensors) > 1 or opts.rootTensor) and _is_strided_on_cpu(tensors):
            return _tensor_lists.broadcast(self, Collectives.broadcast, tensors, opts)
        inner, on_cpu, use_dispatcher = self._find("broadcast", tensors)
        if on_cpu:
            _cpu_validation.check_rank(self, "broadcast", "source", opts.rootRank)
            _cpu_validation.check_dense(self, "broadcast", tensors)
            tensors = _cpu_validation.movable(self, "broadcast", tensors)
        with self._recorded("broadcast", inner, tensors) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().broadcast(tensors, opts)
            else:
                work = inner.broadcast(tensors, opts)
        return self._done(work, "broadcast", on_cpu, call, given)

    @call_forms
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather tensors into a list of N on each rank, for torch.distributed.all_gather.

        All have the size and dtype of the input. With k inputs on each rank, which then have one shape, there are k
        lists of N * k tensors.
        """
        inputs, outputs = self._pairs(inputs, outputs)
        if len(inputs) > 1 and _is_strided_on_cpu(inputs):
            return _tensor_lists.all_gather(self, Collectives.allgather, outputs, inputs, opts)
        given, finish = outputs[0] if outputs else [], None
        inner, on_cpu, use_dispatcher = self._find("all_gather", [*inputs, *(t for row in outputs for t in row)])
        if on_cpu:
            _cpu_validation.check_memory(self, "all_gather", outputs)
            for row in outputs:
                _cpu_validation.check_settled(self, "all_gather", row)
            inputs, outputs = _cpu_arguments.lists(
                self, "all_gather", _cpu_validation.settled(inputs), outputs, "output"
            )
            own = [row[self.rank()] for row in outputs]
            outputs, finish = _overlap.separate(self, "all_gather", inputs, outputs, own.__getitem__)
        with self._recorded("all_gather", inner, inputs) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().allgather(outputs, inputs, opts)
            else:
                work = inner.allgather(outputs, inputs, opts)
        return self._done(work, "allgather", on_cpu, call, given, finish)

    @call_forms
    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather a list of tensors from each rank, for torch.distributed.all_gather_coalesced.

        ``outputs`` has N lists, each with tensors of the sizes and dtypes of ``inputs``.
        """
        name, given, finish = "all_gather_coalesced", [tensor for row in outputs for tensor in row], None
        inner, on_cpu, use_dispatcher = self._find(name, [*inputs, *(t for row in outputs for t in row)])
        if on_cpu:
            if len(outputs) != self.size():
                _cpu_validation.check_count(self, name, "output", outputs)
            _cpu_validation.check_memory(self, name, outputs)
            for row in outputs:
                _cpu_validation.check_pairs(self, name, row, inputs)
                _cpu_validation.check_settled(self, name, row)
                for tensor, like in zip(row, inputs, strict=True):
                    _cpu_validation.check_same_shape(self, name, [tensor], like)
            inputs = _cpu_validation.movable(self, name, _cpu_validation.settled(inputs))
            outputs = [_cpu_validation.movable(self, name, row) for row in outputs]
            outputs, finish = _overlap.separate(self, name, inputs, outputs, outputs[self.rank()].__getitem__)
        with self._recorded("all_gather", inner, inputs) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().allgather_coalesced(outputs, inputs, opts)
            else:
                work = inner.allgather_coalesced(outputs, inputs, opts)
        work = AliasedOutputWork(work, given, finish) if finish else work
        return self._done(work, "allgather_coalesced", on_cpu, call)

    if not _NEW_NAMES:

        @call_forms
        def _allgather_base(self, output: Tensor, input: Tensor, opts: Any) -> Any:
            """Gather into a large tensor on each rank, for torch.distributed.all_gather_into_tensor.

            ``output`` has N times the elements of ``input``, and its dtype.
            """
            inner, use_dispatcher, args, end = self._all_gather_one(output, input, opts)
            with self._recorded("all_gather", inner, [args[1]]) as call:
                if use_dispatcher:
                    with self._dispatched(inner, opts):
                        work = super()._allgather_base(*args)
                else:
                    work = inner._allgather_base(*args)
            return end(work, call)

    @call_forms
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        """Gather into a large tensor on each rank, for torch 2.13's torch.distributed.all_gather_into_tensor.

        ``input`` has shape (k, ...), ``output`` (N * k, ...) or (N, k, ...) and the same dtype.
        """
        if not _NEW_NAMES:
            return self._allgather_base(output, input, opts)
        inner, use_dispatcher, args, end = self._all_gather_one(output, input, opts)
        with self._recorded("all_gather", inner, [args[1]]) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().all_gather_single(*args)
            else:
                work = inner._allgather_base(*args)
        return end(work, call)

    def _all_gather_one(self, output: Tensor, input: Tensor, opts: Any) -> _Prepared:
        name, given, finish = "all_gather_into_tensor", output, None
        inner, on_cpu, use_dispatcher = self._find(name, [output, input])
        if on_cpu:
            _cpu_validation.check_single(self, name, output, input, ("output", "input"))
            input = _cpu_validation.readable([input])[0]
            output, finish = _cpu_arguments.writable(self, name, output, input)
            output, input = _cpu_validation.concatenated(output, input)
            output, input = _cpu_validation.movable(self, name, [output, input])

        def end(work: Any, call: RecordedCall | None) -> Any:
            return self._done(work, "_allgather_base", on_cpu, call, [given], finish)

        return inner, use_dispatcher, (output, input, opts), end

    @call_forms
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Gather tensors into a list on one rank, for torch.distributed.gather.

        Only the root gives ``outputs``: N tensors of the input's size and dtype.
        """
        inputs = _listed(inputs)
        outputs = [_listed(row) for row in outputs] if not _is_flat(outputs) else [list(outputs)]
        given, finish = outputs[0] if outputs else [], None
        inner, on_cpu, use_dispatcher = self._find("gather", [*inputs, *(t for row in outputs for t in row)])
        if on_cpu:
            _cpu_validation.check_rank(self, "gather", "destination", opts.rootRank)
            _cpu_validation.check_memory(self, "gather", outputs)
            for row in outputs:
                _cpu_validation.check_settled(self, "gather", row)
            inputs, outputs = _cpu_arguments.rooted(
                self, "gather", opts, _cpu_validation.settled(inputs), outputs, ("input", "output")
            )
            if opts.rootRank == self.rank():
                own = [row[self.rank()] for row in outputs]
                outputs, finish = _overlap.separate(self, "gather", inputs, outputs, own.__getitem__)
        with self._recorded("gather", inner, inputs) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().gather(outputs, inputs, opts)
            else:
                work = inner.gather(outputs, inputs, opts)
        return self._done(work, "gather", on_cpu, call, given, finish)

    if hasattr(dist.ProcessGroup, "gather_single"):

        @call_forms
        def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
            """Gather into a large tensor on one rank, for torch.distributed.gather_single of torch 2.14 and later.

            ``output`` has N times the elements of ``input`` on the root, and its dtype.
            """
            inner, on_cpu, use_dispatcher = self._find("gather_single", [output, input])
            if on_cpu:  # Gloo lacks it: gather into the parts of the output
                parts: list[list[Tensor]] = []
                if self._own_rank == opts.rootRank:
                    _cpu_validation.check_single(self, "gather_single", output, input, ("output", "input"))
                    _cpu_validation.check_contiguous(self, "gather_single", [output])
                    parts = [list(output.view(self.size(), *input.shape).unbind())]
                return self.gather(parts, [input], opts)
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    return super().gather_single(output, input, opts)  # type: ignore[misc]
            return inner.gather_single(output, input, opts)

    @call_forms
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Scatter a list of one rank, for torch.distributed.scatter.

        Only the root gives ``inputs``: N tensors of the output's size and dtype.
        """
        given, finish = (outputs := _listed(outputs)), None
        inputs = [_listed(row) for row in inputs] if not _is_flat(inputs) else [list(inputs)]
        inner, on_cpu, use_dispatcher = self._find("scatter", [*outputs, *(t for row in inputs for t in row)])
        if on_cpu:
            _cpu_validation.check_rank(self, "scatter", "source", opts.rootRank)
            _cpu_validation.check_contiguous(self, "scatter", outputs)
            inputs = [_cpu_validation.readable(row) for row in inputs]
            outputs, inputs = _cpu_arguments.rooted(self, "scatter", opts, outputs, inputs, ("output", "input"))
            if opts.rootRank == self.rank():
                pieces = [tensor for row in inputs for tensor in row]
                own = {row * self.size() + self.rank(): output for row, output in enumerate(outputs)}
                (outputs,), finish = _overlap.separate(self, "scatter", pieces, [outputs], own.get)
        with self._recorded("scatter", inner, outputs) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().scatter(outputs, inputs, opts)
            else:
                work = inner.scatter(outputs, inputs, opts)
        return self._done(work, "scatter", on_cpu, call, given, finish)

    if hasattr(dist.ProcessGroup, "all_to_all_single"):

        @call_forms
        def all_to_all_single(self, output: Tensor, input: Tensor, outputs: Any, inputs: Any, opts: Any) -> Any:
            """Exchange slices of one tensor, for torch.distributed.all_to_all_single.

            ``input`` and ``output`` have one dtype. ``inputs`` and ``outputs`` are their rows for each rank: N integers
            whose sum is the size of the first dimension, or empty for N equal parts.

            torch 2.13 and later call this name for both of theirs. An override of `alltoall_base` as well would recurse
            without end, because their C++ base looks for either override.
            """
            inner, use_dispatcher, args, end = self._all_to_all_one(output, input, outputs, inputs, opts)
            with self._recorded("all_to_all", inner, [args[1]]) as call:
                if use_dispatcher:
                    with self._dispatched(inner, opts):
                        work = super().all_to_all_single(*args)
                else:
                    work = inner.alltoall_base(*args)
            return end(work, call)

    else:

        @call_forms
        def alltoall_base(self, output: Tensor, input: Tensor, outputs: Any, inputs: Any, opts: Any) -> Any:
            """Same as :meth:`all_to_all_single`, by its name before torch 2.13."""
            inner, use_dispatcher, args, end = self._all_to_all_one(output, input, outputs, inputs, opts)
            with self._recorded("all_to_all", inner, [args[1]]) as call:
                if use_dispatcher:
                    with self._dispatched(inner, opts):
                        work = super().alltoall_base(*args)
                else:
                    work = inner.alltoall_base(*args)
            return end(work, call)

    def _all_to_all_one(self, output: Tensor, input: Tensor, outputs: Any, inputs: Any, opts: Any) -> _Prepared:
        """``outputs`` and ``inputs`` are rows for each rank."""
        given = output
        inner, on_cpu, use_dispatcher = self._find("all_to_all_single", [output, input])
        if on_cpu:
            output, input = _cpu_arguments.exchange(self, output, input, outputs, inputs)

        def end(work: Any, call: RecordedCall | None) -> Any:
            return self._done(work, "alltoall_base", on_cpu, call, [given])

        return inner, use_dispatcher, (output, input, outputs, inputs, opts), end

    @call_forms
    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        """Exchange lists of N tensors, for torch.distributed.all_to_all. They have one dtype; sizes may differ."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        given, finish = outputs, None
        inner, on_cpu, use_dispatcher = self._find("all_to_all", [*outputs, *inputs])
        if on_cpu:
            _cpu_validation.check_count(self, "all_to_all", "output", outputs)
            _cpu_validation.check_count(self, "all_to_all", "input", inputs)
            _tensor_lists.check_same_dtype(self, "all_to_all", [*outputs, *inputs])
            _cpu_validation.check_settled(self, "all_to_all", outputs)
            outputs = _cpu_validation.movable(self, "all_to_all", outputs)
            inputs = _cpu_validation.movable(self, "all_to_all", _cpu_validation.settled(inputs))
            if not hasattr(dist.ProcessGroup, "all_to_all_single"):
                # Gloo of torch before 2.13 exchanges slices of one tensor but no lists.
                _overlap.refuse_expanded(self, "all_to_all", outputs)
                return _cpu_validation.exchange_lists(self.alltoall_base, outputs, inputs, opts)
            own = {self.rank(): outputs[self.rank()]}
            (outputs,), finish = _overlap.separate(self, "all_to_all", inputs, [outputs], own.get)
        with self._recorded("all_to_all", inner, inputs) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().alltoall(outputs, inputs, opts)
            else:
                work = inner.alltoall(outputs, inputs, opts)
        return self._done(work, "alltoall", on_cpu, call, given, finish)

    # C++ calls these two for functional collectives and FSDP. The inner groups don't export them to Python, so they use
    # torch's dispatcher. The overrides exist because without them the GIL stays held (see _c10d_internals.py).
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced"):

        @call_forms
        def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
            """Gather each input into its large output, in one operation. Shapes are those of `all_gather_single`."""
            inner, args, end = self._all_gather_many(outputs, inputs, opts)
            with self._recorded("all_gather", inner, args[1]) as call, self._dispatched(inner, opts):
                work = super().all_gather_single_coalesced(*args)
            return end(work, call)

        @call_forms
        def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
            """Reduce each large input and scatter it, in one operation. Shapes are those of `reduce_scatter_single`."""
            inner, args, end = self._reduce_scatter_many(outputs, inputs, opts)
            with self._recorded("reduce_scatter", inner, args[0]) as call, self._dispatched(inner, opts):
                work = super().reduce_scatter_single_coalesced(*args)
            return end(work, call)

    else:

        @call_forms
        def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
            """Same as :meth:`all_gather_single_coalesced`, by its name before torch 2.13."""
            inner, args, end = self._all_gather_many(outputs, inputs, opts)
            with self._recorded("all_gather", inner, args[1]) as call, self._dispatched(inner, opts):
                work = super().allgather_into_tensor_coalesced(*args)
            return end(work, call)

        @call_forms
        def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any) -> Any:
            """Same as :meth:`reduce_scatter_single_coalesced`, by its name before torch 2.13."""
            inner, args, end = self._reduce_scatter_many(outputs, inputs, opts)
            with self._recorded("reduce_scatter", inner, args[0]) as call, self._dispatched(inner, opts):
                work = super().reduce_scatter_tensor_coalesced(*args)
            return end(work, call)

    def _all_gather_many(self, outputs: Any, inputs: Any, opts: Any) -> tuple[Any, tuple[Any, ...], _End]:
        name, given, finish = "all_gather_into_tensor", list(outputs), None
        inner, on_cpu, _ = self._find(name, [*outputs, *inputs])
        if on_cpu:
            _cpu_validation.check_pairs(self, name, outputs, inputs)
            inputs = _cpu_validation.readable(inputs)
            _cpu_validation.check_contiguous(self, name, outputs)
            for output, input in zip(outputs, inputs, strict=True):
                _cpu_validation.check_single(self, name, output, input, ("output", "input"))
            flat = [_cpu_validation.concatenated(*pair) for pair in zip(outputs, inputs, strict=True)]
            outputs, inputs = (_cpu_validation.movable(self, name, list(side)) for side in zip(*flat, strict=True))
            outputs, finish = _overlap.separate_slices(self, inputs, outputs)

        def end(work: Any, call: RecordedCall | None) -> Any:
            return self._done(work, "allgather_into_tensor_coalesced", on_cpu, call, given, finish)

        return inner, (outputs, inputs, opts), end

    def _reduce_scatter_many(self, outputs: Any, inputs: Any, opts: Any) -> tuple[Any, tuple[Any, ...], _End]:
        name, given, finish = "reduce_scatter_tensor", list(outputs), None
        inner, on_cpu, _ = self._find(name, [*outputs, *inputs])
        if on_cpu:
            _cpu_validation.check_pairs(self, name, outputs, inputs)
            inputs = _cpu_validation.readable(inputs)
            _cpu_validation.check_contiguous(self, name, outputs)
            for output, input in zip(outputs, inputs, strict=True):
                _cpu_validation.check_single(self, name, input, output, ("input", "output"))
            opts = _cpu_validation.bool_sum_as_max(inputs, opts)
            divide = None
            if inner is not self._shm:
                opts, divide = _cpu_validation.integer_mean_as_sum(self, given, opts)
            inputs, opts = _cpu_validation.premultiplied(self, name, list(inputs), opts, in_place=False)
            flat = [_cpu_validation.concatenated(*pair) for pair in zip(inputs, outputs, strict=True)]
            able = [_cpu_validation.reducible(self, name, list(pair), opts.reduceOp, inner) for pair in flat]
            inputs, outputs = (list(side) for side in zip(*able, strict=True))
            outputs, put_back = _overlap.separate_slices(self, inputs, outputs)
            if divide:  # before outputs that share memory are put back
                divide = functools.partial(_cpu_validation.divide_all, outputs, self.size())
            finish = _cpu_validation.in_turn(divide, put_back)

        def end(work: Any, call: RecordedCall | None) -> Any:
            work = self._reduced(inner, work, given, finish) if on_cpu else work
            return self._done(work, "reduce_scatter_tensor_coalesced", on_cpu, call)

        return inner, (outputs, inputs, opts), end

    # Point to point and barriers --------------------------------------------------------------------------

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Any:
        """Send one contiguous tensor to a rank of the group, for torch.distributed.send and isend."""
        tensors, inner, use_dispatcher = self._p2p("send", _listed(tensors), "destination", dstRank, tag)
        if use_dispatcher:
            with self._dispatched(inner, None):
                return self._guarded(super().send(tensors, dstRank, tag), inner, tensors[0].nbytes)
        return self._guarded(inner.send(tensors, dstRank, tag), inner, tensors[0].nbytes)

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Any:
        """Receive into one contiguous tensor from a rank of the group, for torch.distributed.recv and irecv.

        It has the size and dtype of the tensor that is sent.
        """
        tensors, inner, use_dispatcher = self._p2p("recv", _listed(tensors), "source", srcRank, tag)
        if use_dispatcher:
            with self._dispatched(inner, None):
                return self._guarded(super().recv(tensors, srcRank, tag), inner, tensors[0].nbytes)
        return self._guarded(inner.recv(tensors, srcRank, tag), inner, tensors[0].nbytes)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from the first rank that sends, for torch.distributed.recv without a source."""
        tensors, inner, use_dispatcher = self._p2p("recv", _listed(tensors), "source", None, tag)
        if use_dispatcher:
            with self._dispatched(inner, None):
                return self._guarded(super().recv_anysource(tensors, tag), inner, tensors[0].nbytes)
        return self._guarded(inner.recv_anysource(tensors, tag), inner, tensors[0].nbytes)

    @call_forms
    def barrier(self, opts: Any) -> Any:
        """Wait for all ranks, on the device that the options name, else on the CPU; for torch.distributed.barrier."""
        self._check_hosts()
        device = self._barrier_device(opts)
        inner = self._inner.get(device)
        if inner is None:
            inner = self._open_route(device)
        use_dispatcher = (device in self._observed or _c10d_internals.watched()) and _c10d_internals.is_c10d_backend(
            inner
        )
        if device == "cpu" and self._shm is not None:
            inner = self._shm
        with self._recorded("barrier", inner, ()) as call:
            if use_dispatcher:
                with self._dispatched(inner, opts):
                    work = super().barrier(opts)
            else:
                work = inner.barrier(opts)
        return self._done(work, "barrier", device == "cpu", call)

    def _barrier_device(self, opts: Any) -> str:
        if getattr(opts, "device", None) is not None:
            return str(opts.device.type)
        accelerators = [device for device in self._inner if device != "cpu"]
        return accelerators[0] if accelerators and opts.device_ids else "cpu"

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks on the CPU, for torch.distributed.monitored_barrier.

        Raises RuntimeError if ranks have not come within ``timeout``. With ``wait_all_ranks`` the message of rank 0
        names all of them, else the first.
        """
        inner = self._inner.get("cpu") or self._open_route("cpu")
        inner.monitored_barrier(_c10d_internals.UNSET_TIMEOUT if timeout is None else timeout, wait_all_ranks)

    # Common parts ------------------------------------------------------------------------------------------

    def _pairs(self, flat: Any, nested: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return (one tensor per call, one list per call), also for the single-tensor call form."""
        return _listed(flat), [list(nested)] if _is_flat(nested) else [list(row) for row in nested]

    def _p2p(
        self, collective: str, tensors: list[Tensor], role: str, rank: int | None, tag: int
    ) -> tuple[list[Tensor], Any, bool]:
        inner, on_cpu, use_dispatcher = self._find(collective, tensors)
        if on_cpu:
            if len(tensors) != 1:
                _tensor_lists.check_one(self, collective, "tensor", tensors)
            if not getattr(inner, "sends", True):
                inner = self._inner["cpu"]
            if rank is not None:
                _cpu_validation.check_rank(self, collective, role, rank)
                if rank == self._own_rank:  # Gloo has no connection to itself
                    raise bad_argument(self, collective, f"{role} rank {rank} is this rank itself", "Copy the tensor.")
            if collective == "send":
                tensors = _cpu_validation.settled(tensors)
            _cpu_validation.check_contiguous(self, collective, tensors)
            tensors = _cpu_validation.movable(self, collective, tensors)
            if self._rdma_p2p is not None:
                if tag >= p2p_protocol.OWN_TAGS:
                    what = f"the group reserves tags from {p2p_protocol.OWN_TAGS} on, for large messages by NICs"
                    raise bad_argument(self, collective, f"tag {tag}: {what}", "Use a smaller one.")
                if self._rdma_p2p.takes(tensors, tag):
                    inner = self._rdma_p2p
        return tensors, inner, use_dispatcher


def _is_strided_on_cpu(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_cpu and tensor.layout is torch.strided for tensor in tensors)


def _is_flat(tensors: Any) -> bool:
    return len(tensors) > 0 and isinstance(tensors[0], Tensor)
