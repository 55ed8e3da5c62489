"""The collectives of the ProcessGroup that torch sees: each finds its route and goes there.

One method per collective and what they share; no choice of a route (_routes.py), no rule about arguments
(_cpu.py), no life of a group (_group.py), no private part of torch (_torch.py).

Three ways lead through a method:
- plain tensors, nobody watching: straight to the inner group's method, past torch's dispatcher;
- a dispatch mode, the profiler or a tensor subclass: `super()`, which is torch's dispatcher and comes out at
  the same inner group, because that is registered with the C++ base as the device's backend;
- C++ callers (DDP's reducer, functional collectives) come in through torch's trampolines, or, for methods that
  have none, reach the registered inner group directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)

from monarch_backend import _versions
from monarch_backend.process_group import _cpu, _torch
from monarch_backend.process_group._errors import bad_argument
from monarch_backend.process_group._hooks import CompletionHooks, LateWork

# From torch 2.14 on the C++ base comes from _allgather_base and _reduce_scatter_base to the overrides of
# all_gather_single and reduce_scatter_single; before, only the old names are overridden from C++. An override of
# both would call each other for ever.
_NEW_NAMES = _versions.torch_version() >= (2, 14)

_PLAIN = frozenset({Tensor, torch.nn.Parameter})


def _options(cls: type, given: Any, **fields: Any) -> Any:
    """An options object from the other call forms that c10d's own methods take (root, op, timeout)."""
    if isinstance(given, cls):
        return given
    opts = cls()
    if isinstance(given, timedelta):
        fields["timeout"] = given
    elif given is not None:
        fields["reduceOp" if hasattr(opts, "reduceOp") else "rootRank"] = given
    for name, value in fields.items():
        if value is not None:
            setattr(opts, name, value)
    return opts


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


@_torch.hide_from_dynamo
class Collectives(dist.ProcessGroup):
    """Every operation on tensors that c10d has, for a group that knows its inner groups."""

    # What _group.py brings.
    _inner: dict[str, Any]
    _closed: str
    _label: str
    _observed: bool  # True once somebody hooked into torch's dispatcher for this group, torch >= 2.14
    _hooks: CompletionHooks

    def _open_route(self, device: str) -> Any:
        raise NotImplementedError

    def _find(self, collective: str, tensors: Sequence[Tensor]) -> tuple[Any, bool]:
        """The inner group for these tensors, and whether they are on the CPU (whose arguments are checked)."""
        if not tensors:
            raise bad_argument(self, collective, "the list of tensors is empty", "Give at least one tensor.")
        device = tensors[0].device.type
        inner = self._inner.get(device)
        if inner is None:
            # Meta tensors have no memory to send; torch's dispatcher makes their collectives no-ops.
            inner = self if device == "meta" and not self._closed else self._open_route(device)
        for tensor in tensors[1:]:
            if tensor.device.type != device:
                raise bad_argument(
                    self,
                    collective,
                    f"tensors on {device} and on {tensor.device.type} in one call",
                    "Move them to one device.",
                )
        return inner, device == "cpu"

    def _detour(self, inner: Any, tensor: Tensor) -> bool:
        """True if the call must go through torch's dispatcher instead of straight to the inner group."""
        if inner is self:
            return True
        return (type(tensor) not in _PLAIN or self._observed or _torch.watched()) and _torch.is_c10d_backend(inner)

    def _done(self, work: Any, op_type: str, on_cpu: bool) -> Any:
        if self._hooks and on_cpu:
            self._hooks.follow(work, op_type)
        return work

    # Reductions -------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """All-reduce in place; torch.distributed.all_reduce comes here."""
        tensors = _listed(tensors)
        opts = _options(AllreduceOptions, opts, reduceOp=op, timeout=timeout)
        inner, on_cpu = self._find("all_reduce", tensors)
        if on_cpu:
            _cpu.check_dense(self, "all_reduce", tensors)
            opts = _cpu.bool_sum_as_max(tensors, opts)
            tensors = _cpu.reducible(self, "all_reduce", tensors, opts.reduceOp)
        if self._detour(inner, tensors[0]):
            with _torch.through_dispatcher():
                return self._done(super().allreduce(tensors, opts), "allreduce", on_cpu)
        return self._done(inner.allreduce(tensors, opts), "allreduce", on_cpu)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """All-reduce of several tensors in one operation."""
        tensors = _listed(tensors)
        opts = _options(AllreduceCoalescedOptions, opts)
        inner, on_cpu = self._find("all_reduce_coalesced", tensors)
        if on_cpu:
            opts = _cpu.bool_sum_as_max(tensors, opts)
            tensors = [_cpu.reducible(self, "all_reduce_coalesced", [t], opts.reduceOp)[0] for t in tensors]
        if self._detour(inner, tensors[0]):
            with _torch.through_dispatcher():
                return self._done(super().allreduce_coalesced(tensors, opts), "allreduce_coalesced", on_cpu)
        return self._done(inner.allreduce_coalesced(tensors, opts), "allreduce_coalesced", on_cpu)

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: Any = None) -> Any:
        """Reduce to one rank; torch.distributed.reduce comes here."""
        tensors = _listed(tensors)
        opts = self._root_options(ReduceOptions, opts, reduceOp=op, timeout=timeout)
        inner, on_cpu = self._find("reduce", tensors)
        if on_cpu:
            _cpu.check_rank(self, "reduce", "destination", opts.rootRank)
            _cpu.check_dense(self, "reduce", tensors)
            opts = _cpu.bool_sum_as_max(tensors, opts)
            tensors = _cpu.reducible(self, "reduce", tensors, opts.reduceOp)
        if self._detour(inner, tensors[0]):
            with _torch.through_dispatcher():
                return self._done(super().reduce(tensors, opts), "reduce", on_cpu)
        return self._done(inner.reduce(tensors, opts), "reduce", on_cpu)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Reduce lists of tensors and scatter the result; torch.distributed.reduce_scatter comes here."""
        outputs, inputs = self._pairs(outputs, inputs)
        opts = _options(ReduceScatterOptions, opts, timeout=timeout)
        inner, on_cpu = self._find("reduce_scatter", [*outputs, *(t for row in inputs for t in row)])
        if on_cpu:
            for output, row in zip(outputs, inputs, strict=True):
                _cpu.check_count(self, "reduce_scatter", "input", row)
                _cpu.check_same_shape(self, "reduce_scatter", row, output)
            _cpu.check_contiguous(self, "reduce_scatter", outputs)
            inputs = [[t.contiguous() for t in row] for row in inputs]  # Gloo ignores strides
            opts = _cpu.bool_sum_as_max(outputs, opts)
            outputs = _cpu.reducible(self, "reduce_scatter", outputs, opts.reduceOp)
            inputs = [_cpu.reducible(self, "reduce_scatter", row, opts.reduceOp) for row in inputs]
        if self._detour(inner, outputs[0]):
            with _torch.through_dispatcher():
                work = super().reduce_scatter(outputs, inputs, opts)
        else:
            work = inner.reduce_scatter(outputs, inputs, opts)
        return self._done(LateWork(work, outputs) if on_cpu else work, "reduce_scatter", on_cpu)

    if not _NEW_NAMES:

        def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
            """Reduce one large tensor and scatter it; torch.distributed.reduce_scatter_tensor comes here."""
            inner, on_cpu, opts, output, input = self._reduced_single(output, input, opts)
            if self._detour(inner, output):
                with _torch.through_dispatcher():
                    work = super()._reduce_scatter_base(output, input, opts)
            else:
                work = inner._reduce_scatter_base(output, input, opts)
            return self._done(LateWork(work, [output]) if on_cpu else work, "_reduce_scatter_base", on_cpu)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """The name that torch 2.13 and later use for :meth:`_reduce_scatter_base`."""
        if not _NEW_NAMES:
            return self._reduce_scatter_base(output, input, opts)
        inner, on_cpu, opts, output, input = self._reduced_single(output, input, opts)
        if self._detour(inner, output):
            with _torch.through_dispatcher():
                work = super().reduce_scatter_single(output, input, opts)
        else:
            work = inner._reduce_scatter_base(output, input, opts)
        return self._done(LateWork(work, [output]) if on_cpu else work, "_reduce_scatter_base", on_cpu)

    def _reduced_single(self, output: Tensor, input: Tensor, opts: Any) -> tuple[Any, bool, Any, Tensor, Tensor]:
        opts = _options(ReduceScatterOptions, opts)
        inner, on_cpu = self._find("reduce_scatter_tensor", [output, input])
        if on_cpu:
            _cpu.check_single(self, "reduce_scatter_tensor", input, output, ("input", "output"))
            input, output = _cpu.concatenated(input, output)
            opts = _cpu.bool_sum_as_max([output], opts)
            output, input = _cpu.reducible(self, "reduce_scatter_tensor", [output, input], opts.reduceOp)
        return inner, on_cpu, opts, output, input

    # Gathering and moving ---------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, root: Any = None, timeout: Any = None) -> Any:
        """Broadcast in place; torch.distributed.broadcast comes here."""
        tensors = _listed(tensors)
        opts = self._root_options(BroadcastOptions, opts if root is None else root, timeout=timeout)
        inner, on_cpu = self._find("broadcast", tensors)
        if on_cpu:
            _cpu.check_rank(self, "broadcast", "source", opts.rootRank)
            _cpu.check_dense(self, "broadcast", tensors)
            tensors = _cpu.movable(self, "broadcast", tensors)
        if self._detour(inner, tensors[0]):
            with _torch.through_dispatcher():
                return self._done(super().broadcast(tensors, opts), "broadcast", on_cpu)
        return self._done(inner.broadcast(tensors, opts), "broadcast", on_cpu)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather tensors into lists on every rank; torch.distributed.all_gather comes here."""
        inputs, outputs = self._pairs(inputs, outputs)
        opts = _options(AllgatherOptions, opts, timeout=timeout)
        inner, on_cpu = self._find("all_gather", [*inputs, *(t for row in outputs for t in row)])
        if on_cpu:
            inputs, outputs = self._cpu_lists("all_gather", inputs, outputs, "output")
        if self._detour(inner, inputs[0]):
            with _torch.through_dispatcher():
                return self._done(super().allgather(outputs, inputs, opts), "allgather", on_cpu)
        return self._done(inner.allgather(outputs, inputs, opts), "allgather", on_cpu)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Gather lists of tensors; torch.distributed.all_gather_coalesced comes here."""
        opts = _options(AllgatherOptions, opts)
        inner, on_cpu = self._find("all_gather_coalesced", [*inputs, *(t for row in outputs for t in row)])
        if on_cpu:
            if len(outputs) != self.size():
                _cpu.check_count(self, "all_gather_coalesced", "output", outputs)
            for row in outputs:
                for tensor, like in zip(row, inputs, strict=True):
                    _cpu.check_same_shape(self, "all_gather_coalesced", [tensor], like)
            inputs = _cpu.movable(self, "all_gather_coalesced", inputs)
            outputs = [_cpu.movable(self, "all_gather_coalesced", row) for row in outputs]
        if self._detour(inner, inputs[0]):
            with _torch.through_dispatcher():
                return self._done(super().allgather_coalesced(outputs, inputs, opts), "allgather_coalesced", on_cpu)
        return self._done(inner.allgather_coalesced(outputs, inputs, opts), "allgather_coalesced", on_cpu)

    if not _NEW_NAMES:

        def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
            """Gather into one large tensor; torch.distributed.all_gather_into_tensor comes here."""
            inner, on_cpu, opts, output, input = self._gathered_single(output, input, opts)
            if self._detour(inner, output):
                with _torch.through_dispatcher():
                    work = super()._allgather_base(output, input, opts)
            else:
                work = inner._allgather_base(output, input, opts)
            return self._done(work, "_allgather_base", on_cpu)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """The name that torch 2.13 and later use for :meth:`_allgather_base`."""
        if not _NEW_NAMES:
            return self._allgather_base(output, input, opts)
        inner, on_cpu, opts, output, input = self._gathered_single(output, input, opts)
        if self._detour(inner, output):
            with _torch.through_dispatcher():
                work = super().all_gather_single(output, input, opts)
        else:
            work = inner._allgather_base(output, input, opts)
        return self._done(work, "_allgather_base", on_cpu)

    def _gathered_single(self, output: Tensor, input: Tensor, opts: Any) -> tuple[Any, bool, Any, Tensor, Tensor]:
        opts = _options(AllgatherOptions, opts)
        inner, on_cpu = self._find("all_gather_into_tensor", [output, input])
        if on_cpu:
            _cpu.check_single(self, "all_gather_into_tensor", output, input, ("output", "input"))
            output, input = _cpu.concatenated(output, input)
            output, input = _cpu.movable(self, "all_gather_into_tensor", [output, input])
        return inner, on_cpu, opts, output, input

    def gather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Gather tensors into a list on one rank; torch.distributed.gather comes here."""
        inputs = _listed(inputs)
        opts = self._root_options(GatherOptions, opts, timeout=timeout)
        outputs = [_listed(row) for row in outputs] if not _is_flat(outputs) else [list(outputs)]
        inner, on_cpu = self._find("gather", [*inputs, *(t for row in outputs for t in row)])
        if on_cpu:
            _cpu.check_rank(self, "gather", "destination", opts.rootRank)
            inputs, outputs = self._cpu_rooted("gather", inputs, outputs, "output")
        if self._detour(inner, inputs[0]):
            with _torch.through_dispatcher():
                return self._done(super().gather(outputs, inputs, opts), "gather", on_cpu)
        return self._done(inner.gather(outputs, inputs, opts), "gather", on_cpu)

    if hasattr(dist.ProcessGroup, "gather_single"):

        def gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
            """Gather into one tensor on one rank; torch.distributed.gather_single comes here, torch 2.14 and later."""
            opts = self._root_options(GatherOptions, opts)
            inner, on_cpu = self._find("gather_single", [output, input])
            if on_cpu:  # Gloo has none: gather into the parts of the output
                parts: list[list[Tensor]] = []
                if self.rank() == opts.rootRank:
                    _cpu.check_single(self, "gather_single", output, input, ("output", "input"))
                    parts = [list(output.view(self.size(), *input.shape).unbind())]
                return self.gather(parts, [input], opts)
            if self._detour(inner, input):
                with _torch.through_dispatcher():
                    return super().gather_single(output, input, opts)  # type: ignore[misc]
            return inner.gather_single(output, input, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, timeout: Any = None) -> Any:
        """Scatter a list of one rank; torch.distributed.scatter comes here."""
        outputs = _listed(outputs)
        opts = self._root_options(ScatterOptions, opts, timeout=timeout)
        inputs = [_listed(row) for row in inputs] if not _is_flat(inputs) else [list(inputs)]
        inner, on_cpu = self._find("scatter", [*outputs, *(t for row in inputs for t in row)])
        if on_cpu:
            _cpu.check_rank(self, "scatter", "source", opts.rootRank)
            _cpu.check_contiguous(self, "scatter", outputs)
            inputs = [[t.contiguous() for t in row] for row in inputs]  # Gloo ignores strides
            outputs, inputs = self._cpu_rooted("scatter", outputs, inputs, "input")
        if self._detour(inner, outputs[0]):
            with _torch.through_dispatcher():
                return self._done(super().scatter(outputs, inputs, opts), "scatter", on_cpu)
        return self._done(inner.scatter(outputs, inputs, opts), "scatter", on_cpu)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Any,
        input_splits: Any,
        opts: Any = None,
    ) -> Any:
        """Exchange slices of one tensor; torch.distributed.all_to_all_single comes here.

        torch 2.13 and later find this name from both of theirs. Overriding `alltoall_base` as well would never
        end: their C++ base looks for either override, whichever of the two called it.
        """
        inner, on_cpu, opts, args = self._exchange(output, input, output_splits, input_splits, opts)
        if self._detour(inner, output):
            with _torch.through_dispatcher():
                work = super().all_to_all_single(*args, opts)
        else:
            work = inner.alltoall_base(*args, opts)
        return self._done(work, "alltoall_base", on_cpu)

    if not hasattr(dist.ProcessGroup, "all_to_all_single"):

        def alltoall_base(
            self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
        ) -> Any:
            """The name that torch before 2.13 has for :meth:`all_to_all_single`."""
            inner, on_cpu, opts, args = self._exchange(output, input, output_splits, input_splits, opts)
            if self._detour(inner, output):
                with _torch.through_dispatcher():
                    work = super().alltoall_base(*args, opts)
            else:
                work = inner.alltoall_base(*args, opts)
            return self._done(work, "alltoall_base", on_cpu)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Exchange lists of tensors; torch.distributed.all_to_all comes here."""
        outputs, inputs = _listed(outputs), _listed(inputs)
        opts = _options(AllToAllOptions, opts)
        inner, on_cpu = self._find("all_to_all", [*outputs, *inputs])
        if on_cpu:
            _cpu.check_count(self, "all_to_all", "output", outputs)
            _cpu.check_count(self, "all_to_all", "input", inputs)
            outputs = _cpu.movable(self, "all_to_all", outputs)
            inputs = _cpu.movable(self, "all_to_all", inputs)
            if not hasattr(dist.ProcessGroup, "all_to_all_single"):
                # The Gloo of torch before 2.13 exchanges slices of one tensor, no lists.
                return _cpu.exchange_lists(self.alltoall_base, outputs, inputs, opts)
        if self._detour(inner, outputs[0]):
            with _torch.through_dispatcher():
                return self._done(super().alltoall(outputs, inputs, opts), "alltoall", on_cpu)
        return self._done(inner.alltoall(outputs, inputs, opts), "alltoall", on_cpu)

    # Functional collectives and FSDP come to these two from C++. The inner groups don't show them to Python, so
    # the way is the dispatcher's; they are here because without an override the GIL stays held (see _torch.py).
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced"):

        def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            """Gather each input into its large output, in one operation."""
            opts = _options(AllgatherOptions, opts)
            outputs, inputs, on_cpu = self._gather_pairs(outputs, inputs)
            with _torch.through_dispatcher():
                work = super().all_gather_single_coalesced(outputs, inputs, opts)
            return self._done(work, "allgather_into_tensor_coalesced", on_cpu)

        def reduce_scatter_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            """Reduce each large input and scatter it into its output, in one operation."""
            outputs, inputs, opts, on_cpu = self._scatter_pairs(outputs, inputs, _options(ReduceScatterOptions, opts))
            with _torch.through_dispatcher():
                work = super().reduce_scatter_single_coalesced(outputs, inputs, opts)
            return self._done(LateWork(work, outputs) if on_cpu else work, "reduce_scatter_tensor_coalesced", on_cpu)

    else:

        def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            """The name that torch before 2.13 has for :meth:`all_gather_single_coalesced`."""
            opts = _options(AllgatherOptions, opts)
            outputs, inputs, on_cpu = self._gather_pairs(outputs, inputs)
            with _torch.through_dispatcher():
                work = super().allgather_into_tensor_coalesced(outputs, inputs, opts)
            return self._done(work, "allgather_into_tensor_coalesced", on_cpu)

        def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
            """The name that torch before 2.13 has for :meth:`reduce_scatter_single_coalesced`."""
            outputs, inputs, opts, on_cpu = self._scatter_pairs(outputs, inputs, _options(ReduceScatterOptions, opts))
            with _torch.through_dispatcher():
                work = super().reduce_scatter_tensor_coalesced(outputs, inputs, opts)
            return self._done(LateWork(work, outputs) if on_cpu else work, "reduce_scatter_tensor_coalesced", on_cpu)

    def _gather_pairs(self, outputs: Any, inputs: Any) -> tuple[list[Tensor], list[Tensor], bool]:
        """The tensors of a coalesced all_gather_into_tensor as the route takes them; is it the CPU's."""
        name = "all_gather_into_tensor"
        _, on_cpu = self._find(name, [*outputs, *inputs])
        if on_cpu:
            for output, input in zip(outputs, inputs, strict=True):
                _cpu.check_single(self, name, output, input, ("output", "input"))
            flat = [_cpu.concatenated(*pair) for pair in zip(outputs, inputs, strict=True)]
            outputs, inputs = (_cpu.movable(self, name, list(side)) for side in zip(*flat, strict=True))
        return outputs, inputs, on_cpu

    def _scatter_pairs(self, outputs: Any, inputs: Any, opts: Any) -> tuple[list[Tensor], list[Tensor], Any, bool]:
        """The same for a coalesced reduce_scatter_tensor."""
        name = "reduce_scatter_tensor"
        _, on_cpu = self._find(name, [*outputs, *inputs])
        if on_cpu:
            for output, input in zip(outputs, inputs, strict=True):
                _cpu.check_single(self, name, input, output, ("input", "output"))
            opts = _cpu.bool_sum_as_max(inputs, opts)
            flat = [_cpu.concatenated(*pair) for pair in zip(inputs, outputs, strict=True)]
            able = [_cpu.reducible(self, name, list(pair), opts.reduceOp) for pair in flat]
            inputs, outputs = (list(side) for side in zip(*able, strict=True))
        return outputs, inputs, opts, on_cpu

    # Point to point and barriers --------------------------------------------------------------------------

    def send(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Send to a group rank; torch.distributed.send and isend come here."""
        tensors, inner = self._p2p("send", _listed(tensors), "destination", rank)
        if self._detour(inner, tensors[0]):
            with _torch.through_dispatcher():
                return super().send(tensors, rank, tag)
        return inner.send(tensors, rank, tag)

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> Any:
        """Receive from a group rank; torch.distributed.recv and irecv come here."""
        tensors, inner = self._p2p("recv", _listed(tensors), "source", rank)
        if self._detour(inner, tensors[0]):
            with _torch.through_dispatcher():
                return super().recv(tensors, rank, tag)
        return inner.recv(tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Receive from whoever sends first; torch.distributed.recv without a source comes here."""
        tensors, inner = self._p2p("recv", _listed(tensors), "source", None)
        if self._detour(inner, tensors[0]):
            with _torch.through_dispatcher():
                return super().recv_anysource(tensors, tag)
        return inner.recv_anysource(tensors, tag)

    def barrier(self, opts: Any = None, timeout: Any = None) -> Any:
        """Wait for all ranks: on the device that the options name, else on the CPU."""
        opts = _options(BarrierOptions, opts, timeout=timeout)
        device = self._barrier_device(opts)
        inner = self._inner.get(device)
        if inner is None:
            inner = self._open_route(device)
        if (self._observed or _torch.watched()) and _torch.is_c10d_backend(inner):
            with _torch.through_dispatcher():
                return self._done(super().barrier(opts), "barrier", device == "cpu")
        return self._done(inner.barrier(opts), "barrier", device == "cpu")

    def _barrier_device(self, opts: Any) -> str:
        if getattr(opts, "device", None) is not None:
            return str(opts.device.type)
        accelerators = [device for device in self._inner if device != "cpu"]
        return accelerators[0] if accelerators and opts.device_ids else "cpu"

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A CPU barrier that names the ranks that did not come in time."""
        inner = self._inner.get("cpu") or self._open_route("cpu")
        inner.monitored_barrier(_torch.UNSET_TIMEOUT if timeout is None else timeout, wait_all_ranks)

    # What the argument checks of the CPU have in common ---------------------------------------------------

    def _root_options(self, cls: type, given: Any, **fields: Any) -> Any:
        return (
            _options(cls, None, rootRank=given, **fields) if isinstance(given, int) else _options(cls, given, **fields)
        )

    def _pairs(self, flat: Any, nested: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
        """(one tensor per call, one list per call), also from the single-tensor call form."""
        return _listed(flat), [list(nested)] if _is_flat(nested) else [list(row) for row in nested]

    def _cpu_lists(
        self, collective: str, flat: list[Tensor], nested: list[list[Tensor]], what: str
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        for tensor, row in zip(flat, nested, strict=True):
            _cpu.check_count(self, collective, what, row)
            _cpu.check_same_shape(self, collective, row, tensor)
        moved = [_cpu.movable(self, collective, row) for row in nested]
        return _cpu.movable(self, collective, flat), moved

    def _cpu_rooted(
        self, collective: str, flat: list[Tensor], nested: list[list[Tensor]], what: str
    ) -> tuple[list[Tensor], list[list[Tensor]]]:
        if not nested or not nested[0]:  # a rank that is not the root brings no list
            return _cpu.movable(self, collective, flat), nested
        return self._cpu_lists(collective, flat, nested, what)

    def _exchange(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> tuple[Any, bool, Any, tuple[Tensor, Tensor, list[int], list[int]]]:
        """(inner group, is it the CPU's, options, arguments as the inner group takes them) of all_to_all_single."""
        inner, on_cpu = self._find("all_to_all_single", [output, input])
        args = (output, input, output_splits, input_splits)
        return inner, on_cpu, _options(AllToAllOptions, opts), self._cpu_exchange(*args) if on_cpu else args

    def _cpu_exchange(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Any,
        input_splits: Any,
    ) -> tuple[Tensor, Tensor, list[int], list[int]]:
        name = "all_to_all_single"
        if output.dtype != input.dtype:
            raise bad_argument(self, name, f"output is {output.dtype}, input is {input.dtype}", "Use one dtype.")
        _cpu.check_splits(self, name, "output", output, output_splits)
        _cpu.check_splits(self, name, "input", input, input_splits)
        _cpu.check_contiguous(self, name, [output, input])
        output, input = _cpu.movable(self, name, [output, input])
        return output, input, output_splits, input_splits

    def _p2p(self, collective: str, tensors: list[Tensor], role: str, rank: int | None) -> tuple[list[Tensor], Any]:
        inner, on_cpu = self._find(collective, tensors)
        if on_cpu:
            if rank is not None:
                _cpu.check_rank(self, collective, role, rank)
                if rank == self.rank():  # Gloo has no connection to itself
                    raise bad_argument(self, collective, f"{role} rank {rank} is this rank itself", "Copy the tensor.")
            _cpu.check_contiguous(self, collective, tensors)
            tensors = _cpu.movable(self, collective, tensors)
        return tensors, inner


def _is_flat(tensors: Any) -> bool:
    return len(tensors) > 0 and isinstance(tensors[0], Tensor)
