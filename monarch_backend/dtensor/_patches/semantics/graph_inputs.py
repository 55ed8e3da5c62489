"""Private parts of torch that captured steps need: dynamo and AOTAutograd.

Applied with the first trace by torch.compile (`manifest.COMPILE`). _compile/lowering.py lowers a trace.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import operator
import pkgutil
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import CodeType
from typing import Any, NoReturn

import torch
from torch._C._dynamo.eval_frame import _FrameAction as FrameAction
from torch._C._dynamo.eval_frame import _FrameExecStrategy as FrameExecStrategy
from torch._C._dynamo.eval_frame import set_code_exec_strategy
from torch._dynamo import trace_rules
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import (
    RestartAnalysis,
    TensorifyScalarRestartAnalysis,
    TorchRuntimeError,
    UnsafeScriptObjectError,
    Unsupported,
    unimplemented,
)
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import tls as dynamos
from torch._dynamo.variables import TensorVariable, builder
from torch._functorch import config as functorch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.amp.autocast_mode import _enter_autocast
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, placement_types
from torch.distributed.tensor import _api as api
from torch.distributed.tensor import _collective_utils as collective_utils
from torch.distributed.tensor import _dispatch as dispatch
from torch.distributed.tensor import _redistribute as redistribute
from torch.distributed.tensor import _utils as utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils.checkpoint import CheckpointPolicy

import monarch_backend
from monarch_backend import dtensor
from monarch_backend._core import patches
from monarch_backend.dtensor._compile import rank_classes
from monarch_backend.dtensor._controller import device_methods, per_rank_int
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor, on_the_cpu
from monarch_backend.dtensor._errors import RankDependentError, RemoteTensorError
from monarch_backend.dtensor._patches import manifest
from monarch_backend.dtensor._patches.fixes import embedding_mask
from monarch_backend.dtensor._patches.semantics import (
    device_queries,
    dtensor_api,
    dtensor_methods,
    submesh_shapes,
)
from monarch_backend.dtensor._rng import shard_origins
from monarch_backend.dtensor._torch_internals import tracing_state

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def two_graphs(forward: Compiler, backward: Compiler) -> Callable[..., Any]:
    """Return a backend of torch.compile with one graph each way: local operations of DTensors, functional collectives.

    The compiled code changes inputs itself where torch allows it, without copies afterwards.
    """

    return _traced(forward, backward, min_cut_rematerialization_partition)


def _traced(forward: Compiler, backward: Compiler, partition: Callable[..., Any]) -> Callable[..., Any]:
    def boxed(compiler: Compiler) -> Any:
        return lambda graph, inputs: make_boxed_func(compiler(graph, inputs))

    def parted(joint: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        _keep_drawn(joint)
        return partition(joint, *args, **options)

    return aot_autograd(
        fw_compiler=boxed(forward), bw_compiler=boxed(backward), inference_compiler=boxed(forward),
        partition_fn=parted, keep_inference_input_mutations=True,
    )  # fmt: skip


def in_classes(compilers: Sequence[Compiler], standing_for: Callable[[int], Any]) -> Callable[..., Any]:
    """Return a backend like `two_graphs` that traces once for each class of ranks and calls the first trace's result.

    Raises RemoteTensorError if the traces differ in more than sizes. The values kept for backward do not depend on
    sizes: all classes keep the same.
    """

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        _specialize()
        known = []
        for number, compiler in enumerate(compilers):
            context = TracingContext.try_get() if number == 0 else None
            context = context or TracingContext(FakeTensorMode())
            traced = _traced(compiler, compiler, default_partition)
            with standing_for(number), tracing(context), functorch.patch(force_non_lazy_backward_lowering=True):
                made = traced(graph, inputs)
            known.append((made, _effects(context.fw_metadata)))
        if any(effects != known[0][1] for _, effects in known):
            raise RemoteTensorError("what is changed, or a view of what, is not the same on all ranks")
        compiled: Callable[..., Any] = known[0][0]
        return compiled

    return backend


def _specialize() -> None:
    """Turn each number and size that may change into a constant; another value makes a new graph."""
    context = TracingContext.try_get()
    shape_env = context.fake_mode.shape_env if context is not None and context.fake_mode is not None else None
    for tracked in (shape_env.tracked_fakes or ()) if shape_env is not None else ():
        fake = tracked.fake
        for number in (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else (fake,):
            if isinstance(number, torch.SymInt):
                int(number)


def _keep_sizes_of_shards(fake: Any) -> None:
    """Keep a shard's size constant if the whole's size is.

    torch makes it variable after another sharding in the last call, and then never asks for the whole's size.
    """
    for whole, part in zip(fake.shape, fake._local_tensor.shape, strict=True):
        if isinstance(whole, int) and isinstance(part, torch.SymInt) and per_rank_int.values_of(part) is None:
            int(part)


def _strided_again(own: Any) -> Any:
    """Restore a spec's explicit order, which torch drops when it takes a DTensor apart."""

    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        placements, meta, order, requires_grad = context
        spec = _in_order(order, inner["device_mesh"], placements, TensorMeta(size, stride, meta.dtype))
        if spec is None:
            return own(inner, context, size, stride)
        return DTensor(inner["_local_tensor"], spec, requires_grad=requires_grad)

    return __tensor_unflatten__


def _in_order(order: Any, mesh: Any, placements: Any, meta: Any) -> DTensorSpec | None:
    """Return the spec of a view of shards (``x.view(-1)`` of columns), whose placements have the order of the mesh.

    torch takes the order from the strides. None for other tensors.
    """
    if order is None or not any(isinstance(each, _StridedShard) for each in placements):
        return None
    return DTensorSpec(mesh, placements, tensor_meta=meta, shard_order=order, use_strided_shard_as_shard_order=False)


def _places_of_strided(own: Any) -> Any:
    """Return offsets that torch reads from a new tensor, which has no values in a trace."""

    def local_shard_size_and_offset(self: Any, size: Any, chunks: int, rank: Any, *rest: Any, **options: Any) -> Any:
        if isinstance(size, torch.SymInt) and per_rank_int.values_of(size) is None:
            return own(self, size, chunks, rank, *rest, **options)
        with tracing_state.outside():
            return own(self, size, chunks, rank, *rest, **options)

    return local_shard_size_and_offset


def _effects(metadata: Any) -> Any:
    """Return the effects of a trace's calls on their arguments."""
    return (
        [(each.mutates_data, each.mutates_metadata, each.requires_grad) for each in metadata.input_info],
        [(each.output_type, each.base_idx, each.requires_grad) for each in metadata.output_info],
    )


def _keep_drawn(joint: torch.fx.GraphModule) -> None:
    """Keep random numbers for backward, also in a checkpoint, which would draw them again.

    The same holds for operators that torch has only marked as random, such as attention without dropout. torch would
    wrap them in operators that keep the generator's state. These contain functions, which can't be sent.
    """
    for node in joint.graph.nodes:
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        if is_operator and torch.Tag.nondeterministic_seeded in node.target.tags:
            results = [each for each in node.users if each.target is operator.getitem]
            for each in results or [node]:
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if results:
                node.meta.pop("recompute", None)  # torch sets it to avoid keeping the tuple itself


_installed = False


def install() -> None:
    """Apply the rows of the manifest that a trace needs, after those that a mesh needs; a second call does nothing."""
    global _installed
    dtensor_api.install()
    if _installed:
        return
    _installed = True
    patches.apply(manifest.COMPILE)
    dtensor_api.before_to_local = before_to_local
    _leave_alone()
    _have_nothing_captured()
    _wrap_by_type()
    # Dynamo looks functions of torch up by name, once. It must find the replacements.
    trace_rules.clear_lru_cache()


def _have_nothing_captured() -> None:
    """Exclude our functions from capture, except replacements of torch's functions, which may be traced.

    Programs with meshes of their own may also call these, in processes that have been controllers.
    """
    for module in pkgutil.iter_modules(monarch_backend.__path__, f"{monarch_backend.__name__}."):
        if module.name != dtensor.__name__:
            trace_rules.add(module.name)
    for module in pkgutil.walk_packages(dtensor.__path__, f"{dtensor.__name__}."):
        if not module.ispkg and module.name not in (dtensor_api.__name__, device_methods.__name__):
            trace_rules.add(module.name)


def _wrap_by_type() -> None:
    """Register how dynamo takes tensors and ints of workers into a graph, in its tables by type.

    Remote tensors without a DTensor are parameters outside plans, and `to_local()`'s. Dynamo asks a class with a
    `__torch_dispatch__` for inner tensors, which these lack.
    """
    torch._dynamo.config.traceable_tensor_subclasses.add(RemoteTensor)
    for traces_numpy in (False, True):
        table = builder.VariableBuilder._type_dispatch_impl(traces_numpy)
        table.update({RemoteTensor: _wrap_tensor, DTensor: _wrap_tensor, torch.SymInt: _wrap_number})
    builder.SourcelessBuilder._type_handlers[torch.SymInt] = _wrap_number_without_source  # type: ignore[attr-defined]


def _wrap_number(self: Any, value: torch.SymInt) -> Any:
    _refuse_number(value)
    with _left_out(self._type_dispatch()):
        return self._wrap(value)


def _wrap_number_without_source(tx: Any, value: torch.SymInt) -> Any:
    _refuse_number(value)
    with _left_out(builder.SourcelessBuilder._type_handlers):  # type: ignore[attr-defined]
        return builder.SourcelessBuilder.create(tx, value)


def _refuse_number(value: torch.SymInt) -> None:
    """Break the graph at ints that differ by rank; a branch on one raises as in eager code."""
    if per_rank_int.values_of(value) is not None:
        break_graph(f"the int {value}", RankDependentError(f"the int {value}", "has another value on each rank"))


@contextlib.contextmanager
def _left_out(table: dict[Any, Any]) -> Iterator[None]:
    """Context in which a table of dynamo has nothing for a SymInt, as torch's own."""
    ours = table.pop(torch.SymInt)
    try:
        yield
    finally:
        table[torch.SymInt] = ours


def _wrap_tensor(self: Any, value: Any) -> Any:
    """Break the graph at inputs with sizes that differ by rank, or with a mask beside the tensor."""
    local = value._local_tensor if isinstance(value, DTensor) else value
    _refuse_input(value, local, getattr(self.source, "member", ""))
    with _no_word_of_grad(), on_the_cpu() if isinstance(local, RemoteTensor) else contextlib.nullcontext():
        found = self.wrap_tensor(value)
    fake = found.proxy.node.meta.get("example_value") if isinstance(found, TensorVariable) else None
    if _is_ours(fake):
        _keep_sizes_of_shards(fake)
    if _is_uneven(local):  # guarded by the DTensor's guards
        source = self.source if local is value else AttrSource(self.source, "_local_tensor")
        known = self.tx.output.input_source_to_sizes_strides.get(source)
        if known is not None:
            known.update(size=local.size(), stride=local.stride())
    return found


@contextlib.contextmanager
def _no_word_of_grad() -> Iterator[None]:
    """Silence the warning about `.grad` of tensors that are not leaves, which dynamo also reads."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
        yield


def _leave_alone() -> None:
    """Exclude the code of DTensors and its callees from compilation where it runs eagerly.

    It runs after a graph break, and in the backward pass. There dynamo would check each called function, and compile
    some with ints that differ by rank as single ints. In a trace all of it is traced as before.
    """
    alone = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
    set_code_exec_strategy(RemoteTensor.__torch_dispatch__.__func__.__code__, alone)  # type: ignore[attr-defined]
    # A hook of a compiled module is called by code that dynamo excludes, so it arrives alone.
    set_code_exec_strategy(dtensor_api._AtFirstCall.__call__.__code__, alone)
    for handler in api.DTensor._op_dispatcher._custom_op_handlers.values():
        code = getattr(handler, "__code__", None)
        if (
            isinstance(code, CodeType) and code.co_filename == dtensor_api.__file__
        ):  # for operators without a handler in torch
            set_code_exec_strategy(code, alone)
    files = (dtensor_api.__file__, dtensor_methods.__file__, device_methods.__file__)
    ours = [*DTensor.__mro__, *type(DTensor._op_dispatcher).__mro__, dtensor_api.ControllerMesh]
    for module in (api, collective_utils, dispatch, redistribute, utils, placement_types, device_mesh):
        functions = [*vars(module).values(), *ours]
        functions += [each for found in functions if inspect.isclass(found) for each in vars(found).values()]
        for found in functions:
            function = getattr(found, "__func__", found)
            while function is not None:
                code = getattr(function, "__code__", None)
                if isinstance(code, CodeType) and code.co_filename in (module.__file__, *files):
                    set_code_exec_strategy(code, alone)
                function = getattr(function, "__wrapped__", None)


def break_graph(what: str, error: Exception) -> NoReturn:
    """Let dynamo run this operation eagerly; with ``fullgraph=True`` it raises this text."""
    hint = "Without fullgraph=True it runs eagerly; or put it into a function with torch.compiler.disable."
    unimplemented(
        gb_type="What differs by rank", context=what, explanation=str(error), from_exc=error, hints=[hint]
    )  # fmt: skip


Restart = RestartAnalysis
"""Dynamo's exception for a restart of the trace, with this number as a constant; passes through a backend."""


class LeftToEagerError(UnsupportedOperatorException):
    """Raised by a backend: the code runs eagerly, which dynamo reports as a graph break."""

    def __str__(self) -> str:
        return str(self.func)


def _refuse_input(value: Any, local: Any, member: str) -> None:
    """Raise at an input that a graph cannot have. ``member``: the attribute that it is of its object."""
    is_distributed = local is not value and isinstance(local, RemoteTensor)
    if is_distributed and any(map(embedding_mask.is_masked, value._spec.placements)):
        rows = "rows that an embedding has found on each rank, not yet reduced"
        break_graph(rows, RemoteTensorError(f"{rows}: torch keeps beside them which ones those are"))
    differs = _is_uneven(value) and len(value._meta.classes) > 1  # else some ranks have no part of it
    if differs and member != "_local_tensor":
        size = f"shards of sizes {', '.join(map(str, value.shape))}"
        break_graph(size, RankDependentError(size, "differ by rank"))
    if is_distributed and submesh_shapes.numbers(value._spec):
        size = f"a DTensor of sizes {', '.join(map(str, value.shape))}"
        break_graph(size, RankDependentError(size, "has other sizes on each slice of its mesh"))
    if is_distributed and _is_uneven(local) and value._is_view():
        view = "a view, made before, of shards of unequal sizes"
        break_graph(view, RankDependentError(view, "is made once more in a graph, where no size differs by rank"))


def _view_of(own: Any) -> Any:
    """Make a result that is a view of an input outside of the graph; torch can't do it for DTensors."""

    def gen_alias_from_base(base: Any, target: Any, requires_grad: bool, *rest: Any, **options: Any) -> Any:
        if not (isinstance(base, DTensor) and isinstance(base._local_tensor, RemoteTensor)):
            return own(base, target, requires_grad, *rest, **options)
        inner = target._local_tensor
        whole = _gathered_alike(base, target).to_local()
        if _is_uneven(inner) or _is_uneven(whole):
            local = _Strided.apply(whole, inner)  # type: ignore[no-untyped-call]
        else:
            local = whole.as_strided(inner.size(), inner.stride(), inner.storage_offset())
        made = DTensor.from_local(
            local, target.device_mesh, target.placements, shape=target.shape, stride=target.stride()
        )
        spec = made._spec
        made._spec = _in_order(target._spec.shard_order, spec.mesh, spec.placements, spec.tensor_meta) or spec
        return made if requires_grad else made.detach()

    return gen_alias_from_base


class _Strided(torch.autograd.Function):
    """``as_strided`` with numbers that differ by rank: torch's own gradient of it compares strides."""

    @staticmethod
    def forward(ctx: Any, base: Any, like: Any) -> Any:
        ctx.of_base, ctx.of_view = base._meta, like._meta
        return base.as_strided(like._meta.shape, like._meta.stride, like._meta.offset)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        base, view = ctx.of_base, ctx.of_view
        count = base.offset + 1  # up to the end of its memory
        for size, stride in zip(base.shape, base.stride, strict=True):
            count = count + (size - 1) * stride
        places = gradient.new_ones((torch.sym_max(count, 0),), dtype=torch.int64).cumsum(0) - 1
        # Some elements occur several times: expand, unfold.
        seen = places.as_strided(view.shape, view.stride, view.offset).reshape(-1)
        flat = torch.zeros_like(places, dtype=gradient.dtype).index_add_(0, seen, gradient.reshape(-1))
        return flat.as_strided(base.shape, base.stride, base.offset), None


def _gathered_alike(base: DTensor, target: DTensor) -> DTensor:
    """Return the base gathered as its view (``x[1:]``) was, which is not a view of a shard.

    torch 2.14 and later may shard it by columns over ranks that all had it.
    """
    placements = []
    for old, new in zip(base.placements, target.placements, strict=True):
        if new.is_replicate():
            placements.append(new)
        else:
            placements.append(Shard(_origin(base, target, new.dim)) if old.is_replicate() else old)  # type: ignore[attr-defined]
    return base if placements == list(base.placements) else base.redistribute(placements=placements)


def _origin(base: DTensor, target: DTensor, dim: int) -> int:
    """Return the base's dimension that is sharded where this one of its view is: the outermost of its parts."""
    extent = target.stride(dim) * target.size(dim)
    for each in range(base.ndim):
        if base.size(each) > 1 and base.stride(each) * base.size(each) == extent:
            return each
    raise RemoteTensorError(
        f"a captured step returns a view of its input, {list(target.shape)} of {list(base.shape)}, whose dimension "
        f"{dim} is sharded like none of the input: return a copy, .clone()"
    )


def _is_uneven(tensor: Any) -> bool:
    return type(tensor) is RemoteTensor and tensor._meta.classes is not None


def _seen(tensor: Any) -> RemoteTensor:
    """Return a shard whose size differs by rank as the present trace sees it."""
    shown = RemoteTensor(rank_classes.meta_seen(tensor._meta), tensor._ref)
    shown.requires_grad_(tensor.requires_grad)
    return shown


def _has_gradient_of_another_kind(tensor: Any) -> bool:
    """Whether a plain parameter has a DTensor as gradient, which torch would convert as a plain one."""
    with _no_word_of_grad():
        gradient = tensor.grad
    is_there = isinstance(gradient, DTensor) and isinstance(gradient._local_tensor, RemoteTensor)
    return is_there and not isinstance(tensor, DTensor)


def _describe(own: Any) -> Any:
    def describe_tensor(self: Any, tensor: Any, **options: Any) -> Any:
        if not _is_uneven(tensor):
            described = own(self, tensor, **options)
            if described.grad is not None and _has_gradient_of_another_kind(tensor):
                return dataclasses.replace(described, grad=None)
            return described
        described = own(self, _seen(tensor), **options)
        return dataclasses.replace(described, id=self.get_tensor_id(tensor), is_leaf=tensor.is_leaf)

    return describe_tensor


def before_to_local(tensor: Any) -> None:
    """Break the graph where a program would see sizes that differ by rank: a trace has those of some ranks only."""
    if tracing_state.is_dynamos() and not rank_classes.stands_for_some() and _differs(tensor._spec):
        _refuse_sizes(tensor._spec)
    _note_origin(tensor)


def _note_origin(tensor: Any) -> None:
    """Record in the traced graph the origin of a DTensor's local tensor, on which its random numbers depend."""
    mode = get_proxy_mode()
    origin = None if mode is None or not _is_ours(tensor) else dtensor_api.origin_of(tensor._spec)
    if mode is None or origin is None:
        return
    local = tensor._local_tensor
    if isinstance(local, FunctionalTensor):
        torch._sync(local)  # type: ignore[attr-defined, no-untyped-call]
        local = torch._from_functional_tensor(local.elem)
    traced = get_proxy_slot(local, mode.tracer, None)
    if traced is not None:
        traced.proxy.node.meta[shard_origins.MARK] = origin


def _attribute(own: Any) -> Any:
    def getattr_of_tensor(self: Any, tx: Any, name: str) -> Any:
        value = self.proxy.node.meta.get("example_value") if name == "_local_tensor" else None
        if isinstance(value, DTensor) and _differs(value._spec):
            _refuse_sizes(value._spec)
        return own(self, tx, name)

    return getattr_of_tensor


def _differs(spec: DTensorSpec) -> bool:
    """Whether shards have sizes that differ by rank."""
    parts = dict.fromkeys(range(spec.ndim), 1)
    for dim, placement in enumerate(spec.placements):
        if placement.is_shard():
            parts[placement.dim % spec.ndim] *= spec.mesh.size(dim)  # type: ignore[attr-defined]
    return dtensor_api.workers_of(spec.mesh) is not None and any(spec.shape[dim] % parts[dim] for dim in parts)


def _refuse_sizes(spec: DTensorSpec) -> NoReturn:
    what = f"the local part of a DTensor of shape {list(spec.shape)}, {spec.placements} on {spec.mesh.shape}"
    break_graph(what, RankDependentError(what, "has sizes that differ by rank"))


def _between_devices(own: Any) -> Any:
    """Break the graph at moves between devices: a trace has all tensors on the CPU, where C++ has them."""

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        moves = name in ("cpu", "cuda") or (name == "to" and _names_a_device([*args, *kwargs.values()]))
        if moves and device_queries.controls_others():
            break_graph(f".{name}()", RemoteTensorError(f".{name}() moves a tensor of workers that have other devices"))
        return own(self, tx, name, args, kwargs)

    return call_method


def _names_a_device(values: Sequence[Any]) -> bool:
    """Whether the program names a device. A tensor of the trace has torch.device("cpu")."""
    constants = [each.as_python_constant() for each in values if each.is_python_constant()]
    return any(isinstance(each, str) or (isinstance(each, torch.device) and each.type != "cpu") for each in constants)


def _made_there(own: Any) -> Any:
    """Make tensors on missing devices where the trace has the tensors of such devices."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        device = kwargs.get("device")
        device = device.as_python_constant() if device is not None and device.is_python_constant() else None
        if device is not None and device_queries.is_of_workers(torch.device(device).type):
            kwargs = {**kwargs, "device": builder.SourcelessBuilder.create(tx, torch.device("cpu"))}
        return own(self, tx, args, kwargs)

    return call_function


def _number_of_the_rank(own: Any) -> Any:
    """Break the graph at a method of a mesh that returns a per-rank integer; dynamo takes the break for an error."""

    def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        try:
            return own(self, tx, name, args, kwargs)
        except UnsafeScriptObjectError as error:
            if isinstance(error.__cause__, Unsupported) and isinstance(error.__cause__.__cause__, RankDependentError):
                raise error.__cause__ from error.__cause__.__cause__
            raise

    return call_method


def _static(own: Any) -> Any:
    """Make sizes constant if they differ by rank; other sizes are traced anew.

    So are sizes of a DTensor that is a view, which torch makes once more from its base. Expressions of both symbols
    would be symbols of no input, for which dynamo can't write guards. The same holds for code of `trace_with_sizes`.
    """

    def _automatic_dynamic(tensor: Any, tx: Any, source: Any, static_shapes: bool, *rest: Any, **options: Any) -> Any:
        local = getattr(tensor, "_local_tensor", tensor)
        is_remote = type(local) is RemoteTensor
        is_view = local is not tensor and is_remote and tensor._is_view()
        shown = _seen(tensor) if _is_uneven(tensor) else tensor
        static = (
            static_shapes or is_view or _is_uneven(local) or (is_remote and tx.output.root_tx.f_code in _with_sizes)
        )
        return own(shown, tx, source, static, *rest, **options)

    return _automatic_dynamic


_with_sizes: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that could not be traced for all sizes: random numbers, caches by sizes. Each size makes a new graph."""
_in_vain: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Code that could not be traced with sizes either."""


def trace_with_sizes() -> None:
    """Restart a failed trace once, with the sizes of this call's DTensors, if it had symbols for them."""
    tx = getattr(dynamos, "current_tx", None)
    if tx is None:
        return
    code = tx.output.root_tx.f_code
    if code in _with_sizes:  # sizes were not the reason
        _with_sizes.discard(code)
        _in_vain.add(code)
    elif code not in _in_vain and any(_has_symbols(each.fake) for each in tx.output.tracked_fakes):
        _with_sizes.add(code)
        # The one that dynamo also accepts from a backend.
        raise TensorifyScalarRestartAnalysis(restart_reason="an operation wants a DTensor's sizes")


def _has_symbols(fake: Any) -> bool:
    return _is_ours(fake) and any(isinstance(each, torch.SymInt) for each in (*fake.shape, *fake._local_tensor.shape))


def _is_ours(fake: Any) -> bool:
    """Whether a tensor in a trace is a DTensor on a controller's mesh."""
    return type(fake) is DTensor and dtensor_api.workers_of(tracing_state.real(fake.device_mesh)) is not None


def _or_with_sizes(own: Any) -> Any:
    def get_fake_value(node: Any, tx: Any, *rest: Any, **options: Any) -> Any:
        try:
            return own(node, tx, *rest, **options)
        except TorchRuntimeError:
            trace_with_sizes()
            raise

    return get_fake_value


class _Before(torch.autograd.Function):
    """History of an input that has one, in a trace."""

    @staticmethod
    def forward(_ctx: Any, tensor: Any) -> Any:
        return DTensor(tensor._local_tensor, tensor._spec, requires_grad=False)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Any) -> NoReturn:
        raise RuntimeError("a trace went backward through an input of its graph")


def _with_history(own: Any) -> Any:
    """Return the input with a history; torch's operator for it has DTensors cache sizes, which fails for symbols."""

    def _backward_error(converter: Any, tensor: Any) -> Any:
        if _is_ours(tensor):
            return _Before.apply(tensor)  # type: ignore[no-untyped-call]
        return own(converter, tensor)

    return _backward_error


def _on_workers(own: Any) -> Any:
    """Compile on the workers in place of Inductor here, whose code reads memory, as backend="monarch" does."""

    def __call__(self: Any, model: Any, inputs: Any, **options: Any) -> Any:
        if type(self) is not torch._TorchCompileInductorWrapper or not any(map(_is_of_workers, inputs)):
            return own(self, model, inputs, **options)
        from monarch_backend.dtensor._compile import compile_backend  # it imports this module

        if self.config:
            warnings.warn(
                f"torch.compile() of DTensors on workers, which compile with Inductor's defaults: {self.config} is "
                'not sent there. backend="monarch" has the options that there are',
                UserWarning,
                stacklevel=2,
            )
        return compile_backend.monarch(model, inputs)

    return __call__


def _is_of_workers(value: Any) -> bool:
    real = tracing_state.real(value)
    local = real._local_tensor if isinstance(real, DTensor) else real
    return type(local) is RemoteTensor or (isinstance(real, DeviceMesh) and dtensor_api.workers_of(real) is not None)


def autocasts(graph: torch.fx.GraphModule) -> set[str]:
    """Return the device types for which a function's graph enters an autocast."""
    return {str(node.args[0]) for node in graph.graph.nodes if node.target is _enter_autocast}
