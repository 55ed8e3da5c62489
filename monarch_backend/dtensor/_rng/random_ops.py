"""Random operations: every mesh and placement gets the numbers of a single process, by the controller's generator.

An operation on a DTensor is one command. Each worker draws the whole tensor's numbers from the state that the
controller's generator had, and keeps those of its own shard. The controller's generator then advances as if it had
drawn them (see cpu_generator.py). So the next numbers, here or there, are those of a single process, too.

A plain RemoteTensor draws the same numbers on all ranks, those of a single process with a tensor of its shape. Values
that tensor parallelism has replicated stay the same on all ranks. A plain tensor that is a DTensor's shard
(`shard_origins.Origin`) draws as the DTensor does.

One that is computed from shards, but is not a shard, draws other numbers on ranks with other shards, with a warning.
`own_random_numbers` does the same for all plain tensors. These numbers follow from one number of the controller's
generator and the rank's stream.

_worker/random_ops.py runs the operations on a worker.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import call_sites
from monarch_backend.dtensor._controller.controller_mesh import workers_of
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import dispatch, local_results
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._per_rank import per_rank_int, shard_origins
from monarch_backend.dtensor._rng import philox, traced_random_op
from monarch_backend.dtensor._rng.traced_random_op import TracedRandomOp
from monarch_backend.dtensor._rng.worker_generators import (
    WORKER,
    Generator,
    draws_on_cpu,
    generators_of,
    generators_of_workers,
    in_step,
    members_of,
    take_generator,
)
from monarch_backend.dtensor._torch_internals import cpu_generator, tracing_state
from monarch_backend.dtensor._worker.random_ops import dropped

_aten = torch.ops.aten
Handler = Callable[[Any, Any, Any], Any]


def _local(tensor: Any) -> RemoteTensor:
    return tensor if type(tensor) is RemoteTensor else tensor._local_tensor


def _workers(tensor: Any) -> WorkerSet:
    local = _local(tensor)
    if type(local) is RemoteTensor:
        return local._meta.workers
    return workers_of(tensor.device_mesh)  # type: ignore[return-value]


# Filling a DTensor with numbers that don't depend on its values -------------------------------------------------


class Shards(NamedTuple):
    """A rank's part of the whole: dimension, start, length. ``keeps``: 0 on ranks with zeros in a Partial dimension."""

    cuts: list[tuple[int, Any, Any]]
    keeps: Any


class _Fill:
    """A known signature: this operation on tensors of this spec."""

    __slots__ = ("members", "move", "number", "numbers")

    move: cpu_generator.Move | None
    """Effect on a CPU's generator."""
    numbers: int | None
    """Advance of a GPU's generator; None until workers have reported it, which waits once."""

    def __init__(self, func: Any, tensor: Any, shards: Shards, args: tuple[Any, ...]) -> None:
        local = _local(tensor)
        whole = local._meta if tensor is local else tensor._spec.tensor_meta
        workers = local._meta.workers
        self.members = members_of(local)
        self.numbers, self.move = None, None
        if draws_on_cpu(workers):
            self.move = cpu_generator.Move((func, *_fixed(args)), whole.shape, whole.stride, whole.dtype)
        floats = [1]  # the operands: the tensor, then floats

        def place(value: Any) -> Any:
            if isinstance(value, float):
                floats.append(1)
                return [_protocol.Tag.OPERAND, len(floats) - 1, 1]
            return _protocol.place(value, lambda _: None, lambda _: None)

        draw = TracedRandomOp(
            func, tuple(whole.shape), tuple(whole.stride), whole.dtype, shards.cuts, shards.keeps, args, tensor is local
        )
        places = [[_protocol.Tag.OPERAND, 0], *places_of(workers, draw, place)]
        number = workers.define(WORKER + "fill", places, {}, len(floats), _protocol.Kind.NONE, 0, [0], [])
        if self.members is not None:
            number = workers.define_by_rank([number], [0 if each else -1 for each in self.members])
        self.number = number


def places_of(workers: WorkerSet, draw: TracedRandomOp, place: Callable[[Any], Any]) -> list[Any]:
    return [
        str(draw.func), *map(place, (draw.shape, draw.stride, draw.dtype)),
        [_protocol.Tag.DEVICE, workers.device.type], place(draw.cuts), place(draw.keeps), *map(place, draw.args),
    ]  # fmt: skip


_SAME_EVERYWHERE = ("avg", "max", "min")
"""Partial reductions for which all ranks have the value itself."""


def shards_of(spec: DTensorSpec) -> Shards | None:
    """Return the parts; None if one is not contiguous. Raises RemoteTensorError for another kind of Partial."""
    keeps: Any = 1
    for dim, placement in enumerate(spec.placements):
        if type(placement) is Partial and placement.reduce_op in ("sum", *_SAME_EVERYWHERE):
            if placement.reduce_op == "sum":
                keeps = keeps * _is_first(spec.mesh.get_coordinate()[dim])  # type: ignore[index]
        elif type(placement) is not Replicate and type(placement) is not Shard:
            if placement.is_partial():
                raise RemoteTensorError(
                    f"random numbers in place of a tensor that is {placement}: redistribute it first "
                    "(x.redistribute(mesh, placements))"
                )
            return None
    sizes, offsets = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
    dims = sorted({p.dim for p in spec.placements if isinstance(p, Shard)})
    return Shards([(dim, offsets[dim], sizes[dim]) for dim in dims], keeps)


def _is_first(coordinate: Any) -> Any:
    values = per_rank_int.values_of(coordinate)
    if values is None:
        return int(coordinate == 0)
    return per_rank_int.by_rank([None if each is None else int(each == 0) for each in values])


def _fixed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([float if type(each) is float else each for each in args])


def _fill(func: Any, tensor: Any, args: tuple[Any, ...], generator: Generator) -> Any:
    local = _local(tensor)
    if tracing_state.is_traced(local):
        return _fill_in_a_trace(func, tensor, args, generator)
    if local._meta.device.type == "meta":
        return tensor  # it has no values, and draws none
    step = generators_of(local)
    key = (func, local._meta if tensor is local else tensor._spec, *_fixed(args))
    known = step.fills.get(key)
    if known is None:
        shards = Shards([], 1) if tensor is local else shards_of(tensor._spec)
        if shards is None:
            whole = local_results.everywhere(torch.empty_like(tensor))
            return tensor.copy_(_fill(func, whole, args, generator))
        known = step.fills[key] = _Fill(func, tensor, shards, args)
    with in_step:
        before = cpu_generator.state_of(generator)
        if known.move is not None:  # first, because it refuses invalid arguments
            known.move.make(generator, lambda part: func(part, *args, generator=generator))
        step.bring(before, known.members)
        floats = [each for each in args if type(each) is float]
        step.workers.write((known.number, call_sites.here(), local._ref.id, *floats))
        if known.move is None:
            if known.numbers is None:
                known.numbers = philox.moved(before, step.agreed(func, known.members))
            cpu_generator.set_state(generator, philox.after(before, known.numbers))
        step.left(cpu_generator.state_of(generator), known.members)
    return tensor


def _fill_in_a_trace(func: Any, tensor: Any, args: tuple[Any, ...], generator: Generator) -> Any:
    if generator is not philox.default_generator(_workers(tensor).device.type):
        raise RemoteTensorError(
            f"{func} with a generator of its own in a captured step: put it into a function with torch.compiler.disable"
        )
    whole = tensor._spec.tensor_meta
    with tracing_state.outside():
        shards = shards_of(tensor._spec)
    if shards is None:
        return tensor.copy_(_fill_in_a_trace(func, local_results.everywhere(torch.empty_like(tensor)), args, generator))
    draw = TracedRandomOp(
        func, tuple(whole.shape), tuple(whole.stride), whole.dtype, shards.cuts, shards.keeps, args, False
    )
    tensor._local_tensor.copy_(traced_random_op.draw(tensor._local_tensor, draw))
    return tensor


def bernoulli_in_a_trace(p: Any) -> Any:
    """Run ``torch.bernoulli(p)`` as a CPU does: a number between 0 and 1 for each element, of the dtype of ``p``."""
    drawn = torch.empty_like(p)
    _fill_in_a_trace(_aten.uniform_.default, drawn, (0.0, 1.0), philox.default_generator(_workers(p).device.type))
    return (drawn < p).to(p.dtype)


def is_bernoulli_on_a_cpu(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether `bernoulli_in_a_trace` gives this operation's numbers."""
    p = args[0]
    known = func is _aten.bernoulli.default and kwargs.get("generator") is None and _workers(p).device.type == "cpu"
    return known and p.dtype in (torch.float32, torch.float64) and p.is_contiguous() and not _is_partial(p)


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    generator = take_generator(_workers(args[0]), kwargs)
    return _fill(func, args[0], (*args[1:], *kwargs.values()), generator)


def _like(func: Any, defaults: Callable[[Any], tuple[Any, ...]]) -> Handler:
    """Return the handler of an operation that is ``func`` of an empty tensor like its first argument."""

    def make(_func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        generator = take_generator(_workers(tensor), kwargs)
        made = (torch.zeros_like if _is_partial(tensor) else torch.empty_like)(tensor, **kwargs)  # empty: stays Partial
        return _fill(func, made, defaults(args), generator)

    return make


def _dropout(tensor: Any, p: float, train: bool | None) -> Any:
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = (torch.zeros_like if _is_partial(tensor) else torch.empty_like)(tensor, dtype=torch.bool)
    _fill(_aten.bernoulli_.float, mask, (1.0 - p,), take_generator(_workers(tensor), {}))
    return dropped(tensor, mask, p)


def _is_partial(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor._spec.placements)


# Numbers that depend on a tensor's values -----------------------------------------------------------------------


def _by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the whole operation on each worker, and wait for their generators: the count may depend on values, too."""
    first = next(each for each in args if isinstance(each, DTensor))
    mesh = first.device_mesh
    inner = [local_results.everywhere(each)._local_tensor if isinstance(each, DTensor) else each for each in args]
    result = _whole(func, _local(first), inner, kwargs, is_plain=False)
    for at in _changed(func):
        args[at].copy_(_distributed(inner[at], mesh))
        if func._schema.returns[0].alias_info is not None:
            return args[at]
    return pytree.tree_map_only(RemoteTensor, lambda each: _as_before(_distributed(each, mesh), first), result)


def _whole(func: Any, first: RemoteTensor, args: Any, kwargs: dict[str, Any], *, is_plain: bool) -> Any:
    """Run the operation on whole tensors. ``first``: one of the arguments.

    Ranks whose plain tensors have other values may draw more numbers. The controller continues with the state of the
    first rank, whose values a program reads.
    """
    step, members = generators_of(first), members_of(first)
    generator = take_generator(step.workers, kwargs)
    writes = tuple([at + 1 for at in _changed(func)])
    with in_step:
        step.bring(cpu_generator.state_of(generator), members)
        result = dispatch.call(_shapes_of(func), WORKER + "whole", (str(func), *args), kwargs, None, writes)
        state, left = step.of_the_first(members) if is_plain else (step.agreed(func, members), members)
        cpu_generator.set_state(generator, state)
        step.left(state, left)
    return result


@functools.cache
def _changed(func: Any) -> list[int]:
    infos = [each.alias_info for each in func._schema.arguments]
    return [at for at, info in enumerate(infos) if info is not None and info.is_write]


@functools.cache
def _shapes_of(func: Any) -> Callable[..., Any]:
    return lambda _name, *args, **kwargs: func(*args, **kwargs)


def _distributed(local: Any, mesh: Any) -> Any:
    meta = TensorMeta(torch.Size(local._meta.shape), tuple(local._meta.stride), local._meta.dtype)
    return local_results.of_parts(local, meta, mesh, [Replicate()] * mesh.ndim)


def _as_before(tensor: Any, like: Any) -> Any:
    if tensor.shape != like.shape or _is_partial(like):
        return tensor
    return tensor.redistribute(like.device_mesh, like.placements)


# Plain tensors --------------------------------------------------------------------------------------------------


def own_random_numbers(mesh: DeviceMesh) -> None:
    """Give plain tensors different random numbers on ranks with different coordinates in this mesh.

    Without it all ranks get the same numbers. Use it for the mesh over which a batch is split, when its parts are not
    DTensors: DTensors get the numbers of their shards, as before. It has no effect on a mesh that belongs to no
    controller.

    >>> from monarch_backend.dtensor import own_random_numbers, shard_batch, simulated_mesh
    >>> mesh = simulated_mesh((2,), ("dp",))  # procs.device_mesh() in a program
    >>> own_random_numbers(mesh)
    >>> rows = shard_batch(torch.ones(4, 3), mesh)
    >>> torch.nn.functional.dropout(rows).shape  # each rank drops other elements
    torch.Size([2, 3])
    """
    workers = workers_of(mesh)
    if workers is None:
        return
    step = generators_of_workers(workers)
    columns = [per_rank_int.values_of(each) for each in mesh.get_coordinate() or ()]
    columns = [step.streams, *(each for each in columns if each is not None)]
    places = list(zip(*(each for each in columns if each is not None), strict=True))
    if places:
        known = list(dict.fromkeys(places))
        step.differ([known.index(each) for each in places])


def _plain(func: Any) -> Handler:
    handle = _plain_by_values if func in BY_VALUES else handlers.get(func)

    def operation(_func: Any, args: Any, kwargs: Any) -> Any:
        if handle is not None:
            local = _first(args, kwargs)
            is_same = local._meta.origin is None and len(local._meta.classes or ()) <= 1
            if is_same and generators_of(local).streams is None:
                return handle(func, args, dict(kwargs))
            whole = _as_whole(func, args, kwargs)
            if whole is not None:
                return _of_shards(func, args, whole, dict(kwargs))
        if _will_draw(func, args, kwargs):
            return _by_stream(func, args, dict(kwargs))
        return dispatch.call(func, str(func), args, kwargs, func._schema)

    return operation


def _as_whole(func: Any, args: Any, kwargs: Any) -> DTensorSpec | None:
    """Return the spec of the DTensor that all arguments are shards of; None if there is no such DTensor."""
    local = _first(args, kwargs)
    origin = local._meta.origin
    if origin is None or origin.whole is None or func in _OF_OTHER_SIZES or not _will_draw(func, args, kwargs):
        return None
    if generators_of(local).streams is not None:
        return None
    tensors = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
    are_alike = all(isinstance(each, RemoteTensor) and each._meta.origin == origin for each in tensors)
    if not are_alike:
        return None
    return origin.whole.spec(local._meta.dtype)


def _of_shards(func: Any, args: Any, spec: DTensorSpec, kwargs: dict[str, Any]) -> Any:
    def whole(value: Any) -> Any:
        if not isinstance(value, RemoteTensor):
            return value
        return DTensor(RemoteTensor(value._meta, value._ref), spec, requires_grad=False)

    result = handlers[func](func, tuple(map(whole, args)), {name: whole(each) for name, each in kwargs.items()})
    changed = _changed(func)
    if changed and func._schema.returns[0].alias_info is not None:
        return args[changed[0]]
    return pytree.tree_map_only(DTensor, lambda each: each.to_local(), result)


def _plain_by_values(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run as `_by_values` does: with equal probabilities all ranks sample what one process samples."""
    if not _will_draw(func, args, kwargs):
        return dispatch.call(func, str(func), args, kwargs, func._schema)
    result = _whole(func, _first(args, kwargs), args, kwargs, is_plain=True)
    changed = _changed(func)
    return args[changed[0]] if changed and func._schema.returns[0].alias_info is not None else result


def _first(args: Any, kwargs: Any) -> RemoteTensor:
    return next(each for each in [*args, *kwargs.values()] if isinstance(each, RemoteTensor))


def _by_stream(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Draw numbers that follow from one of the controller's numbers and the rank's stream."""
    own = kwargs.pop("generator", None)
    seed = float(_seed.random_(0, _SEEDS, generator=own if own is None or own.device.type == "cpu" else None).item())
    local = _first(args, kwargs)
    origin, asked_for = local._meta.origin, generators_of(local).streams
    streams: Any = None
    if origin is not None:
        streams = per_rank_int.by_rank(shard_origins.together([each for each in (asked_for, origin.streams) if each]))
        if asked_for is None:
            _warn_of_shards(func)
    named = {**kwargs, "_name": str(func), "_seed": seed, "_own_stream": streams}
    return dispatch.call(_shapes_with_seed(func), WORKER + "own", args, named, func._schema)


_warned: set[int] = set()
"""Call sites with a warning."""


def _warn_of_shards(func: Any) -> None:
    place = call_sites.here()
    if place in _warned:
        return
    _warned.add(place)
    warnings.warn(
        f"{func} draws random numbers for a plain tensor that is a DTensor's shard, at\n{call_sites.text_of(place)}"
        "Ranks with other shards draw other numbers, which are not those of a single process. Keep the DTensor for a "
        "single process's numbers: use_local_output=False in ColwiseParallel() and other styles, or no to_local()",
        UserWarning,
        stacklevel=2,
    )


def _will_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws: not without values, and not if nothing is to be dropped."""
    return _first(args, kwargs)._meta.device.type != "meta" and may_draw(func, args, kwargs)


def may_draw(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is a random operation; an attention without dropout is none, although torch marks it as one."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = {each.name: each.default_value for each in func._schema.arguments}
    given = names | dict(zip(names, args, strict=False)) | kwargs
    return given.get("dropout_p") != 0.0 and False not in (given.get("train"), given.get("training"))


_SEEDS = 1 << 53  # floats represent all of them; ints would be part of the signature
_seed = torch.empty((), dtype=torch.int64)


@functools.cache
def _shapes_with_seed(func: Any) -> Callable[..., Any]:
    return lambda *args, _name, _seed, _own_stream, **kwargs: func(*args, **kwargs)


def _draws(func: Any) -> Handler | None:
    return _plain(func) if torch.Tag.nondeterministic_seeded in func.tags else None


dispatch.specials.append(_draws)


# Handlers by operator -------------------------------------------------------------------------------------------


_IN_PLACE = (
    _aten.uniform_.default, _aten.normal_.default, _aten.bernoulli_.float, _aten.log_normal_.default,
    _aten.exponential_.default, _aten.geometric_.default, _aten.cauchy_.default, _aten.random_.default,
    _aten.random_.to, getattr(_aten.random_, "from"),
)  # fmt: skip
BY_VALUES = (
    _aten.bernoulli.default, _aten.bernoulli_.Tensor, _aten.multinomial.default, _aten.poisson.default,
    _aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor, _aten.binomial.default,
    _aten._standard_gamma.default, _aten._sample_dirichlet.default, _aten.rrelu_with_noise.default,
)  # fmt: skip


_OF_OTHER_SIZES = (_aten.multinomial.default,)
"""Operators that sample rows: their results for a shard are not shards."""


_random_from = getattr(_aten.random_, "from")
handlers: dict[Any, Handler] = {
    **dict.fromkeys(_IN_PLACE, _in_place),
    **dict.fromkeys(BY_VALUES, _by_values),
    _aten.native_dropout.default: lambda _func, args, kwargs: _dropout(*args, **kwargs),
    _aten.bernoulli.p: _like(_aten.bernoulli_.float, lambda args: (args[1],)),
    **{
        getattr(packet, overload): _like(func, given)
        for packet, func, given, overloads in (
            (_aten.rand_like, _aten.uniform_.default, lambda _: (0.0, 1.0), ("default", "generator")),
            (_aten.randn_like, _aten.normal_.default, lambda _: (0.0, 1.0), ("default", "generator")),
            (_aten.randint_like, _random_from, lambda args: (0, args[1]), ("default", "generator")),
            (_aten.randint_like, _random_from, lambda args: (args[1], args[2]), ("low_dtype", "low_generator_dtype")),
        )
        for overload in overloads
        if hasattr(packet, overload)  # torch 2.10 added those with a generator
    },
}
"""Handlers of random operators."""
