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
import threading
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import call_sites, per_rank_int
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._dispatch import dispatch, local_results
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._rng import cpu_generator, philox, shard_origins, traced_random_op
from monarch_backend.dtensor._rng.traced_random_op import TracedRandomOp
from monarch_backend.dtensor._torch_internals import tracing_state
from monarch_backend.dtensor._worker import random_ops as _worker

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from monarch_backend.dtensor._controller.worker_set import WorkerSet
    from monarch_backend.dtensor._rng.shard_origins import Origin

_aten = torch.ops.aten
_WORKER = "monarch_backend.dtensor._worker.random_ops:"

Handler = Callable[[Any, Any, Any], Any]


# The generator on the controller and on workers -----------------------------------------------------------------


class _Step:
    """State that keeps the generators of a set of workers in step with the controller's."""

    def __init__(self, workers: WorkerSet) -> None:
        self.workers = workers
        self.fills: dict[Any, _Fill] = {}
        places = [[_protocol.Tag.OPERAND, 0, 1], [_protocol.Tag.DEVICE, workers.device.type]]
        self._number = workers.define(_WORKER + "set_state", places, {}, 1, _protocol.Kind.NONE, 0, [], [])
        self._state = b""
        self._members: Members = None
        self.streams: tuple[int, ...] | None = None
        """Stream of each rank for plain tensors; ranks of one stream have the same numbers.

        None: one stream for all.
        """

    def bring(self, state: bytes, members: Members) -> None:
        """Set these workers' generators to this state for the next command."""
        if self._state != state or self._members not in (None, members):
            self.workers.write((self._number, call_sites.here(), state))

    def left(self, state: bytes, members: Members) -> None:
        """Record the state of the workers' generators after the last command, and these workers."""
        self._state, self._members = state, members

    def differ(self, streams: list[int]) -> None:
        """Set each rank's stream."""
        if self.streams != tuple(streams):
            self.streams = tuple(streams)
            place = [_protocol.Tag.BY_RANK, streams]
            number = self.workers.define(_WORKER + "set_stream", [place], {}, 0, _protocol.Kind.NONE, 0, [], [])
            self.workers.write((number, call_sites.here()))

    def agreed(self, func: Any, members: Members) -> bytes:
        """Return the state that all workers report after this operation. Waits."""
        states = self.workers.ask("generator_state")
        those = {state: rank for rank, state in enumerate(states) if members is None or members[rank]}
        if len(those) > 1:
            raise RemoteTensorError(
                f"{func} has drawn more numbers on some ranks than on others (ranks {sorted(those.values())} differ): "
                "its argument has other values there, or it failed there. Make it from values that all ranks have"
            )
        return bytes(next(iter(those)))

    def of_the_first(self, members: Members) -> tuple[bytes, Members]:
        """Return the state that the first worker reports, and the workers in this state. Waits."""
        states = self.workers.ask("generator_state")
        those = [members is None or members[rank] for rank in range(len(states))]
        state = states[those.index(True)]
        alike = [is_one and its == state for is_one, its in zip(those, states, strict=True)]
        return bytes(state), members if alike == those else tuple(alike)


Generator = torch.Generator | philox.Philox
Members = tuple[bool, ...] | None
"""Whether each rank takes part; None: all do."""
_in_step = threading.RLock()  # a command and the state before it must stay together


def _step_of(local: RemoteTensor) -> _Step:
    return _step_of_workers(local._meta.workers)


def _step_of_workers(workers: WorkerSet) -> _Step:
    step: _Step | None = workers.kept.get("random")
    if step is None:
        step = workers.kept["random"] = _Step(workers)
    return step


def _local(tensor: Any) -> RemoteTensor:
    """Return a DTensor's local tensor, or the tensor itself."""
    return tensor if type(tensor) is RemoteTensor else tensor._local_tensor


def _workers(tensor: Any) -> WorkerSet:
    local = _local(tensor)
    if type(local) is RemoteTensor:
        return local._meta.workers
    from monarch_backend.dtensor._patches.semantics.controller_mesh import workers_of  # it imports this module

    return workers_of(tensor.device_mesh)  # type: ignore[return-value]


def _on_cpu(workers: WorkerSet) -> bool:
    """Return whether the workers' CPUs draw.

    XLA's own numbers differ, and the position of its generator is not known.
    """
    return workers.device.type in _worker.DRAWN_ON_THE_CPU


def _members(local: RemoteTensor) -> Members:
    of_rank = local._meta.of_rank
    return tuple(each >= 0 for each in of_rank) if -1 in of_rank else None


def _generator_of(workers: WorkerSet, kwargs: dict[str, Any]) -> Generator:
    """Remove the generator argument and return it.

    Raises RemoteTensorError for the generator of another device than the numbers'.
    """
    found = kwargs.pop("generator", None)
    if found is None:
        return philox.default_generator(workers.device.type)
    drawn_on = "cpu" if _on_cpu(workers) else workers.device.type
    if found.device.type != drawn_on:
        raise RemoteTensorError(
            f"a generator of {found.device} for a tensor of {workers.name}, whose device is {workers.device}: torch "
            f"takes one of the same device only, torch.Generator({drawn_on!r})"
        )
    return found  # type: ignore[no-any-return]


# Filling a DTensor with numbers that don't depend on its values -------------------------------------------------


class _Shards(NamedTuple):
    """A rank's part of the whole: dimensions with start and length.

    ``keeps``: 0 on ranks that have zeros, so that the sum over a Partial dimension is the whole.
    """

    cuts: list[tuple[int, Any, Any]]
    keeps: Any


class _Fill:
    """A known signature: this operation on tensors of this spec."""

    __slots__ = ("members", "move", "number", "numbers")

    move: cpu_generator.Move | None
    """Effect on a CPU's generator."""
    numbers: int | None
    """Advance of a GPU's generator; None until workers have reported it, which waits once."""

    def __init__(self, func: Any, tensor: Any, shards: _Shards, args: tuple[Any, ...]) -> None:
        local = _local(tensor)
        whole = local._meta if tensor is local else tensor._spec.tensor_meta
        workers = local._meta.workers
        self.members = _members(local)
        self.numbers, self.move = None, None
        if _on_cpu(workers):
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
        places = [[_protocol.Tag.OPERAND, 0], *_places(workers, draw, place)]
        number = workers.define(_WORKER + "fill", places, {}, len(floats), _protocol.Kind.NONE, 0, [0], [])
        if self.members is not None:
            number = workers.define_by_rank([number], [0 if each else -1 for each in self.members])
        self.number = number


def _places(workers: WorkerSet, draw: TracedRandomOp, place: Callable[[Any], Any]) -> list[Any]:
    """Return the arguments of _worker/random_ops.py's functions that draw."""
    return [
        str(draw.func), *map(place, (draw.shape, draw.stride, draw.dtype)),
        [_protocol.Tag.DEVICE, workers.device.type], place(draw.cuts), place(draw.keeps), *map(place, draw.args),
    ]  # fmt: skip


_SAME_EVERYWHERE = ("avg", "max", "min")
"""Partial reductions for which all ranks have the value itself."""


def _shards(spec: DTensorSpec) -> _Shards | None:
    """Return the ranks' parts, None if a part is not contiguous.

    Raises RemoteTensorError for tensors that can't be filled with random numbers.
    """
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
    return _Shards([(dim, offsets[dim], sizes[dim]) for dim in dims], keeps)


def _is_first(coordinate: Any) -> Any:
    values = per_rank_int.values_of(coordinate)
    if values is None:
        return int(coordinate == 0)
    return per_rank_int.by_rank([None if each is None else int(each == 0) for each in values])


def _fixed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments that belong to the signature."""
    return tuple([float if type(each) is float else each for each in args])


def _fill(func: Any, tensor: Any, args: tuple[Any, ...], generator: Generator) -> Any:
    """Run ``func(tensor, *args)``, which changes the tensor."""
    local = _local(tensor)
    if tracing_state.is_traced(local):
        return _fill_in_a_trace(func, tensor, args, generator)
    if local._meta.device.type == "meta":
        return tensor  # it has no values, and draws none
    step = _step_of(local)
    key = (func, local._meta if tensor is local else tensor._spec, *_fixed(args))
    known = step.fills.get(key)
    if known is None:
        shards = _Shards([], 1) if tensor is local else _shards(tensor._spec)
        if shards is None:
            whole = local_results.everywhere(torch.empty_like(tensor))
            return tensor.copy_(_fill(func, whole, args, generator))
        known = step.fills[key] = _Fill(func, tensor, shards, args)
    with _in_step:
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
        shards = _shards(tensor._spec)
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


class RandomOps:
    """Random draws of each call of a captured step. ``members``: ranks that draw, as in `_Fill`."""

    def __init__(self, workers: WorkerSet, draws: list[TracedRandomOp], members: Members = None) -> None:
        self.members = members
        self._step, self._draws = _step_of_workers(workers), draws
        self._on_cpu = _on_cpu(workers)
        self._moves = [cpu_generator.Move((d.func, *d.args), d.shape, d.stride, d.dtype) for d in draws if self._on_cpu]
        self._numbers: int | None = None  # as `_Fill.numbers`

    def around(self, write: Callable[[], None]) -> None:
        """Run ``write``, which sends the command, as `_fill` does.

        Raises RemoteTensorError if ranks need different numbers.
        """
        if any(each.is_plain for each in self._draws):
            check_streams(self._step.workers)
        generator = philox.default_generator(self._step.workers.device.type)
        with _in_step:
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
    """Raise RemoteTensorError if a captured step cannot draw numbers of plain tensors."""
    if _step_of_workers(workers).streams is not None:
        raise RemoteTensorError(
            "a captured step draws random numbers of plain tensors, the same on all ranks, which they must not be "
            "after own_random_numbers(): put what draws them (dropout) into a function with torch.compiler.disable"
        )


def _filling(draw: TracedRandomOp, generator: Generator) -> Callable[[torch.Tensor], object]:
    return lambda part: draw.func(part, *draw.args, generator=generator)


def places(workers: WorkerSet, draw: TracedRandomOp) -> list[Any]:
    """Return the arguments of _worker/random_ops.py's ``drawn``, for the definition of a graph."""
    return _places(workers, draw, lambda value: _protocol.place(value, lambda _: None, lambda _: None))


def draw_of_dropout(shape: Any, stride: Any, p: float, origin: Origin | None) -> TracedRandomOp:
    """Return the mask of a dropout of a plain tensor; for a shard, its part of the whole's mask.

    Raises RemoteTensorError if the tensor's part of the whole is not known.
    """
    shards = _Shards([], 1)
    if origin is not None:
        check_origin(origin, "native_dropout")
        spec = origin.whole.spec(torch.bool)  # type: ignore[union-attr]
        mask = torch.empty_like(torch.empty_strided(spec.shape, spec.stride, device="meta"))
        shape, stride, shards = mask.shape, mask.stride(), _shards(spec)  # type: ignore[assignment]
    return TracedRandomOp(
        _aten.bernoulli_.float, tuple(shape), tuple(stride), torch.bool, shards.cuts, shards.keeps, (1.0 - p,), True
    )


def check_origin(origin: Origin | None, what: str) -> None:
    """Raise RemoteTensorError if a captured step cannot draw for a tensor of this origin."""
    if origin is not None and (origin.whole is None or origin.whole.is_strided):
        raise RemoteTensorError(
            f"{what} in a captured step draws random numbers for a plain tensor that is computed from a DTensor's "
            "shards but is not a shard itself: ranks would draw equal numbers for different shards. Keep the DTensor "
            "(use_local_output=False, no to_local()), or put it into a function with torch.compiler.disable"
        )


def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    generator = _generator_of(_workers(args[0]), kwargs)
    return _fill(func, args[0], (*args[1:], *kwargs.values()), generator)


def _like(func: Any, defaults: Callable[[Any], tuple[Any, ...]]) -> Handler:
    """Return the handler of an operation that is ``func`` of an empty tensor like its first argument."""

    def make(_func: Any, args: Any, kwargs: Any) -> Any:
        tensor = args[0]
        generator = _generator_of(_workers(tensor), kwargs)
        made = (torch.zeros_like if _is_partial(tensor) else torch.empty_like)(tensor, **kwargs)  # empty: stays Partial
        return _fill(func, made, defaults(args), generator)

    return make


def _native_dropout(_func: Any, args: Any, kwargs: Any) -> Any:
    return _dropout(*args, **kwargs)


def _dropout(tensor: Any, p: float, train: bool | None) -> Any:
    if train is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = (torch.zeros_like if _is_partial(tensor) else torch.empty_like)(tensor, dtype=torch.bool)
    _fill(_aten.bernoulli_.float, mask, (1.0 - p,), _generator_of(_workers(tensor), {}))
    return _worker.dropped(tensor, mask, p)


def _is_partial(tensor: Any) -> bool:
    return isinstance(tensor, DTensor) and any(each.is_partial() for each in tensor._spec.placements)


# Numbers that depend on a tensor's values -----------------------------------------------------------------------


def _by_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Run the whole operation on each worker, and wait for the states of their generators.

    The count of its numbers may depend on values, too.
    """
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
    step, members = _step_of(first), _members(first)
    generator = _generator_of(step.workers, kwargs)
    writes = tuple([at + 1 for at in _changed(func)])
    with _in_step:
        step.bring(cpu_generator.state_of(generator), members)
        result = dispatch.call(_shapes_of(func), _WORKER + "whole", (str(func), *args), kwargs, None, writes)
        state, left = step.of_the_first(members) if is_plain else (step.agreed(func, members), members)
        cpu_generator.set_state(generator, state)
        step.left(state, left)
    return result


@functools.cache
def _changed(func: Any) -> list[int]:
    """Return the positions of changed arguments."""
    infos = [each.alias_info for each in func._schema.arguments]
    return [at for at, info in enumerate(infos) if info is not None and info.is_write]


@functools.cache
def _shapes_of(func: Any) -> Callable[..., Any]:
    return lambda _name, *args, **kwargs: func(*args, **kwargs)


def _distributed(local: Any, mesh: Any) -> Any:
    meta = TensorMeta(torch.Size(local._meta.shape), tuple(local._meta.stride), local._meta.dtype)
    return local_results.of_parts(local, meta, mesh, [Replicate()] * mesh.ndim)


def _as_before(tensor: Any, like: Any) -> Any:
    """Return the result with the argument's placements, if it has its shape."""
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
    from monarch_backend.dtensor._patches.semantics.controller_mesh import workers_of  # it imports this module

    workers = workers_of(mesh)
    if workers is None:
        return
    step = _step_of_workers(workers)
    columns = [per_rank_int.values_of(each) for each in mesh.get_coordinate() or ()]
    columns = [step.streams, *(each for each in columns if each is not None)]
    places = list(zip(*(each for each in columns if each is not None), strict=True))
    if places:
        known = list(dict.fromkeys(places))
        step.differ([known.index(each) for each in places])


def _plain(func: Any) -> Handler:
    """Run a random operation on plain tensors."""
    handle = _plain_by_values if func in BY_VALUES else handlers.get(func)

    def operation(_func: Any, args: Any, kwargs: Any) -> Any:
        if handle is not None:
            local = _first(args, kwargs)
            is_same = local._meta.origin is None and len(local._meta.classes or ()) <= 1
            if is_same and _step_of(local).streams is None:
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
    if _step_of(local).streams is not None:
        return None
    tensors = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
    are_alike = all(isinstance(each, RemoteTensor) and each._meta.origin == origin for each in tensors)
    if not are_alike:
        return None
    return origin.whole.spec(local._meta.dtype)


def _of_shards(func: Any, args: Any, spec: DTensorSpec, kwargs: dict[str, Any]) -> Any:
    """Run the operation on the DTensor and return this rank's shard of the result."""

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
    origin, asked_for = local._meta.origin, _step_of(local).streams
    streams: Any = None
    if origin is not None:
        streams = per_rank_int.by_rank(shard_origins.together([each for each in (asked_for, origin.streams) if each]))
        if asked_for is None:
            _warn_of_shards(func)
    named = {**kwargs, "_name": str(func), "_seed": seed, "_own_stream": streams}
    return dispatch.call(_shapes_with_seed(func), _WORKER + "own", args, named, func._schema)


_warned: set[int] = set()
"""Call sites with a warning."""


def _warn_of_shards(func: Any) -> None:
    """Warn once for each call site."""
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


def _uniform(_args: Any) -> tuple[Any, ...]:
    return (0.0, 1.0)


def _from_zero(args: Any) -> tuple[Any, ...]:
    return (0, args[1])


def _from_to(args: Any) -> tuple[Any, ...]:
    return (args[1], args[2])


_random_from = getattr(_aten.random_, "from")
handlers: dict[Any, Handler] = {
    **dict.fromkeys(_IN_PLACE, _in_place),
    **dict.fromkeys(BY_VALUES, _by_values),
    _aten.native_dropout.default: _native_dropout,
    _aten.bernoulli.p: _like(_aten.bernoulli_.float, lambda args: (args[1],)),
    **{
        getattr(packet, overload): _like(func, given)
        for packet, func, given, overloads in (
            (_aten.rand_like, _aten.uniform_.default, _uniform, ("default", "generator")),
            (_aten.randn_like, _aten.normal_.default, _uniform, ("default", "generator")),
            (_aten.randint_like, _random_from, _from_zero, ("default", "generator")),
            (_aten.randint_like, _random_from, _from_to, ("low_dtype", "low_generator_dtype")),
        )
        for overload in overloads
        if hasattr(packet, overload)  # torch 2.10 added those with a generator
    },
}
"""Handlers of random operators."""
