"""Lowering of torch's graphs to graphs of workers.

A graph has tensors of the workers and tensors of this process. For example, some optimizers count their steps in such
tensors. Steps that need only the latter run here in each call, and their results are sent in the command. Operations
without any tensor are evaluated at capture. All others form the workers' graph. This module sends no commands.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._controller import per_rank_host_tensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.tensor_meta import Meta
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import fake_tensors
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._per_rank import output_strides, per_rank_op, shard_origins
from monarch_backend.dtensor._per_rank.shard_origins import Operand, Origin
from monarch_backend.dtensor._protocol import Define, Graph
from monarch_backend.dtensor._rng import captured_random_ops, random_ops, traced_random_op
from monarch_backend.dtensor._rng.traced_random_op import TracedRandomOp
from monarch_backend.dtensor._torch_internals import tracing_state
from monarch_backend.dtensor._worker.random_ops import dropped

MEETS = ("wait_tensor", "_wrap_tensor_autograd")
"""Functional collectives in which ranks do not wait for each other."""


class Result(NamedTuple):
    """One result of a captured graph.

    ``meta``: metadata of a tensor of the workers. ``at``: position of the argument that it is, -1 if it is none.
    ``here``: its position among the results of this process, -1 if elsewhere. ``value``: all others.
    """

    meta: Meta | None
    at: int
    here: int
    value: Any


class Capture(NamedTuple):
    """Steps of a call. ``tensors``: positions of the workers' arguments; ``kept``: further tensors that it needs.

    ``here``: computes this process's part from the arguments ``own``. The first of its results are ``sent`` tensors,
    then come the numbers. ``number``: 0 if the workers have nothing to do.
    """

    number: int
    tensors: list[int]
    kept: list[RemoteTensor]
    own: list[int]
    here: Callable[..., Any] | None
    sent: int
    numbers: int
    results: list[Result]
    created: int
    writes: list[int]
    """Positions of changed tensors among the command's tensors."""
    draws: captured_random_ops.RandomOps | None
    nbytes: int
    """Bytes of the results on a worker."""


@dataclass(frozen=True, eq=False)
class _There:
    """A value of the workers' graph. ``index``: ("operand" | "sent" | "number" | "drawn" | "step", its position)."""

    index: tuple[str, int]
    fake: Any


@dataclass(frozen=True, eq=False)
class _Here:
    """A value of this process that may differ in each call. ``by_rank``: it has one value for each rank."""

    node: fx.Node
    fake: Any
    by_rank: bool = False


@dataclass(frozen=True, eq=False)
class _Factory:
    """A tensor without tensor inputs. It is made where it is used."""

    node: fx.Node


class GraphLowering:
    """Lowering of one graph to a `Capture`, for arguments of one kind as this rank has them.

    ``returned``: positions of results that are arguments and are returned as such; None: all that are arguments.
    ``by_rank``: positions of results that other ranks' graphs compute differently. The workers compute them, even if
    this process could. ``constants``: tensors of this graph and of the other ranks' graphs; the command has all of
    them.
    """

    def __init__(
        self, workers: WorkerSet, graph: fx.GraphModule, args: list[Any], *, inductor: bool, rank: int = 0,
        returned: Sequence[int] | None = None, by_rank: Sequence[int] = (),
        constants: Sequence[tuple[torch.Tensor, RemoteTensor]] = (),
    ) -> None:  # fmt: skip
        self.rank, self.returned, self.by_rank, self.shared = rank, returned, by_rank, constants
        self.constants: list[tuple[torch.Tensor, _There]] = []
        self.workers, self.graph, self.args, self.inductor = workers, graph, args, inductor
        self.values: dict[fx.Node, Any] = {}
        self.tensors: list[int] = []
        self.kept: list[RemoteTensor] = []
        self.own: list[int] = []
        self.operand_metas: list[Meta] = []
        self.sent: list[fx.Node] = []  # tensors of this process that workers need whole
        self.numbers: list[tuple[fx.Node, str]] = []
        self.steps: list[tuple[Any, Any, Any, fx.Node, Any]] = []
        self.writes: list[int] = []
        self.draws: list[TracedRandomOp] = []
        self.here = fx.Graph()
        self.here_nodes: dict[fx.Node, fx.Node] = {}
        self.arguments: dict[fx.Node, int] = {}
        self._there: dict[fx.Node, _There] = {}  # values of this process, as the workers have them
        self.origins: dict[fx.Node, Any] = {}

    def make(self) -> Capture:
        """Define the graph on the workers and return its Capture. Raises RemoteTensorError for an unsupported graph."""
        results: list[Any] = []
        inputs = [node for node in self.graph.graph.nodes if node.op == "placeholder"]
        for at, node in enumerate(inputs):
            self._argument(node, at)
        self.constants = [(here, self._kept(there)) for here, there in self.shared]
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "get_attr":
                self._attribute(node)
            elif node.op == "call_function":
                self._call(node)
                _note_origin(node, self.workers, self.origins, self._tensor_of)
            elif node.op == "output":
                results = list(node.args[0])
            else:
                raise RemoteTensorError(f"{node.format_node()}: a captured step has only calls of operators")
        return self._finish(results)

    def _tensor_of(self, node: fx.Node) -> Any:
        value = self.values[node]
        return value.fake if isinstance(value, _There) else None

    # Arguments --------------------------------------------------------------------------------------------------

    def _argument(self, node: fx.Node, at: int) -> None:
        value = self.args[at]
        self.arguments[node] = at
        if isinstance(value, RemoteTensor):
            self.tensors.append(at)
            self.values[node] = self._operand(self._meta_of(value))
            self.origins[node] = node.meta.get(shard_origins.MARK) or value._meta.origin
        elif isinstance(value, (torch.Tensor, float)):
            self.own.append(at)
            self.here_nodes[node] = self.here.placeholder(f"a{at}")
            fake = value if isinstance(value, float) else fake_tensors.fake_like(value)
            self.values[node] = _Here(node, fake)
        else:
            self.values[node] = value

    def _meta_of(self, tensor: RemoteTensor) -> Meta:
        meta = tensor._meta.on(self.rank)
        if meta is None:
            raise RemoteTensorError(f"a captured step got a tensor of which rank {self.rank} has nothing")
        return meta

    def _operand(self, meta: Meta) -> _There:
        self.operand_metas.append(meta)
        return _There(("operand", len(self.operand_metas) - 1), fake_tensors.fake_of(meta))

    def _kept(self, value: RemoteTensor) -> _There:
        self.kept.append(value)
        return self._operand(self._meta_of(value))

    def _attribute(self, node: fx.Node) -> None:
        value = operator.attrgetter(str(node.target))(self.graph)
        if isinstance(value, torch.Tensor):
            known = [operand for here, operand in self.constants if is_same(here, value)]
            there = value if isinstance(value, RemoteTensor) else None
            self.values[node] = known[0] if known else self._kept(there or self.workers.put(value))
        elif isinstance(value, torch.nn.Module):
            raise RemoteTensorError(
                f"{node.target} in a captured step: control flow and other operators with functions in them can't be "
                "sent to workers; leave them to eager code (torch.compiler.disable)"
            )
        else:
            self.values[node] = tracing_state.real(value)

    # Operations -------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> None:
        inputs = [self.values[each] for each in node.all_input_nodes]
        if self._random(node):
            return
        _check(node)
        is_collective = str(node.target).startswith(_protocol.COLLECTIVES)  # this process is not a rank of a mesh
        if any(isinstance(each, _There) for each in inputs) or is_collective:
            self._step(node)
        elif any(isinstance(each, _Here) for each in inputs):
            self._own(node)
        elif any(isinstance(each, _Factory) for each in inputs) or _makes_tensor(node):
            self.values[node] = _Factory(node)
        else:
            given = fx.map_arg((node.args, node.kwargs), lambda each: self.values[each])
            args, kwargs = pytree.tree_map(tracing_state.real, given)
            self.values[node] = _operator(node)(*args, **kwargs)

    def _random(self, node: fx.Node) -> bool:
        """Lower a random operation; its numbers are drawn before all other steps. Return whether it was one."""
        if node.target is torch.ops.monarch_backend.draw.default:
            like, number = node.args
            self.values[node] = self._draw(traced_random_op.drawn(number), self._as_there(like).fake)  # type: ignore[arg-type]
        elif node.target is torch.ops.aten.native_dropout.default and random_ops.may_draw(node.target, node.args, {}):
            x: Any = self._as_there(node.args[0])  # type: ignore[arg-type]
            p: Any = node.args[1]
            fake = fake_tensors.propagate(torch.empty_like, (x.fake,), {"dtype": torch.bool})
            origin = self.origins.get(node.args[0])  # type: ignore[arg-type]
            mask = self._draw(captured_random_ops.draw_of_dropout(fake.shape, fake.stride(), p, origin), fake)
            given = (x, mask, p)
            result = fake_tensors.propagate(dropped, tuple(map(_fake, given)), {})
            self.values[node] = self._add(node, given, {}, result, dropped)
        else:
            return False
        return True

    def _draw(self, draw: TracedRandomOp, like: Any) -> _There:
        self.draws.append(draw)
        return _There(("drawn", len(self.draws) - 1), fake_tensors.propagate(torch.empty_like, (like,), {}))

    def _step(self, node: fx.Node) -> None:
        """Add an operation of the workers to each call. Results that are not tensors are computed now."""
        args, kwargs = self._arguments_there(node)
        fake_args, fake_kwargs = pytree.tree_map(_fake, (args, kwargs))
        result = fake_tensors.propagate_there(self.workers, _operator(node), fake_args, fake_kwargs)
        has_tensor = any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(result))
        if not has_tensor and result is not None and result != []:
            self.values[node] = result
            return
        self.values[node] = self._add(node, args, kwargs, result)
        self.writes += [i for kind, i in (each.index for each in _written(node, args, kwargs)) if kind == "operand"]

    def _add(self, node: fx.Node, args: Any, kwargs: Any, fake: Any, target: Any = None) -> _There:
        self.steps.append((target or node.target, args, kwargs, node, output_strides.said(fake, self.workers.device)))
        return _There(("step", len(self.steps) - 1), fake)

    def _own(self, node: fx.Node) -> None:
        fake = _fake_here(node, {each: self._fake_of(each) for each in node.all_input_nodes})
        for each in node.all_input_nodes:
            self._copy_here(each)
        made = self.here_nodes[node] = self.here.node_copy(node, lambda each: self.here_nodes[each])
        is_by_rank = node.target is torch.ops.monarch_backend.by_rank.default
        if is_by_rank:
            made.target = _by_rank_here
        inputs = [self.values[each] for each in node.all_input_nodes]
        by_rank = is_by_rank or any(isinstance(each, _Here) and each.by_rank for each in inputs)
        self.values[node] = _Here(node, fake, by_rank)

    def _copy_here(self, node: fx.Node) -> None:
        if node in self.here_nodes:
            return
        value = self.values[node]
        if isinstance(value, _Factory):
            for each in node.all_input_nodes:
                self._copy_here(each)
            self.here_nodes[node] = self.here.node_copy(node, lambda each: self.here_nodes[each])
        else:
            self.here_nodes[node] = value  # a constant: fx takes it as an argument

    def _fake_of(self, node: fx.Node) -> Any:
        value = self.values[node]
        if isinstance(value, _Factory):
            return _fake_here(node, {each: self._fake_of(each) for each in node.all_input_nodes})
        return value.fake if isinstance(value, _Here) else value

    def _arguments_there(self, node: fx.Node) -> Any:
        """Return arguments with the workers' device in place of the trace's CPU; see `remote_tensor.on_the_cpu`."""

        def moved(value: Any) -> Any:
            return self.workers.device if isinstance(value, torch.device) and value.type == "cpu" else value

        return pytree.tree_map(moved, fx.map_arg((node.args, node.kwargs), self._as_there))

    def _as_there(self, node: fx.Node) -> Any:
        """Return a value as the workers have it. A value of this process is sent with each command."""
        value = self.values[node]
        if isinstance(value, _There) or not isinstance(value, (_Here, _Factory)):
            return value
        known = self._there.get(node)
        if known is None:
            known = self._there[node] = self._made_there(node) if isinstance(value, _Factory) else self._sent(value)
        return known

    def _made_there(self, node: fx.Node) -> _There:
        args, kwargs = self._arguments_there(node)
        fake_args, fake_kwargs = pytree.tree_map(_fake, (args, kwargs))
        fake = fake_tensors.propagate_there(self.workers, _operator(node), fake_args, fake_kwargs)
        return self._add(node, args, kwargs, fake)

    def _sent(self, value: _Here) -> _There:
        is_number = isinstance(value.fake, float) or (value.fake.ndim == 0 and not value.fake.is_complex())
        if is_number and not value.by_rank:
            dtype = "" if isinstance(value.fake, float) else _protocol.name_of(value.fake.dtype)
            self.numbers.append((value.node, dtype))
            return _There(("number", len(self.numbers) - 1), value.fake)
        self.sent.append(value.node)
        meta = self.workers.metas.like(value.fake, self.workers.device)
        return _There(("sent", len(self.sent) - 1), fake_tensors.fake_of(meta))

    # Results ----------------------------------------------------------------------------------------------------

    def _finish(self, results: list[Any]) -> Capture:
        outs: list[Result] = []
        created: list[_There] = []
        wanted: list[fx.Node] = []
        for each in results:
            value = self.values[each] if isinstance(each, fx.Node) else each
            differs = isinstance(value, _Here) and (value.by_rank or len(outs) in self.by_rank)
            value = self._as_there(each) if isinstance(value, _Factory) or differs else value
            at = self.arguments.get(each, -1) if isinstance(each, fx.Node) else -1
            if at >= 0 and (self.returned is None or len(outs) in self.returned or isinstance(value, _Here)):
                outs.append(Result(None, at, -1, None))
            elif isinstance(value, _There):
                created.append(value)
                origin = self.origins.get(each) if isinstance(each, fx.Node) else None
                outs.append(Result(self.workers.metas.like(value.fake, None, origin), -1, -1, None))
            elif isinstance(value, _Here):
                wanted.append(each)
                outs.append(Result(None, -1, len(wanted) - 1, None))
            else:
                outs.append(Result(None, -1, -1, tracing_state.real(value)))
        # Some results are sent for the graph, so numbers are known only now.
        first = len(self.sent) + len(self.numbers)
        outs = [each._replace(here=first + each.here) if each.here >= 0 else each for each in outs]
        number = self._define([self._number_of(each) for each in created]) if self.steps else 0
        return Capture(
            number, self.tensors, self.kept, self.own, self._function_here(wanted), len(self.sent), len(self.numbers),
            outs, len(created), sorted(set(self.writes)),
            captured_random_ops.RandomOps(self.workers, self.draws) if self.draws else None, nbytes_of(outs),
        )  # fmt: skip

    def _function_here(self, wanted: list[fx.Node]) -> Callable[..., Any] | None:
        if not self.own:
            return None
        nodes = [*self.sent, *(node for node, _ in self.numbers), *wanted]
        self.here.output(tuple(self.here_nodes[each] for each in nodes))
        return fx.GraphModule(self.graph, self.here)

    def _number_of(self, value: _There) -> int:
        """Return the value's number in the graph. The sent tensors come last."""
        kind, i = value.index
        before = {"operand": 0, "sent": len(self.operand_metas)}
        before["number"] = before["sent"] + len(self.sent)
        before["drawn"] = before["number"] + len(self.numbers)
        before["step"] = before["drawn"] + len(self.draws)
        return before[kind] + i

    def _define(self, results: list[int]) -> int:
        sent = [_protocol.form(self.values[node].fake) for node in self.sent]
        number = next(self.workers.stream.numbers)
        graph = Graph(
            number, len(self.operand_metas) + len(self.sent), [dtype for _, dtype in self.numbers],
            [list(self._wire_step(*each)) for each in self.steps], results, sorted(set(self.writes)),
            [_protocol.form(meta) for meta in self.operand_metas] + sent, self.inductor,
            [captured_random_ops.places(self.workers, each) for each in self.draws],
        )  # fmt: skip
        self.workers.stream.define(Define.GRAPH, *graph)
        return number

    def _wire_step(self, target: Any, args: Any, kwargs: Any, node: fx.Node, orders: Any) -> _protocol.Step:
        name = (
            str(target) if isinstance(target, torch._ops.OpOverload) else f"{target.__module__}:{target.__qualname__}"
        )
        if target is torch.ops.monarch_backend.by_rank.default:
            made, args, kwargs = per_rank_op.arguments(args[1], args[0])
            name, args = "monarch_backend.dtensor._worker.graph_executor:by_rank", [made.name, *args]
        self.workers.define_operator(name)
        ins = None
        if name.startswith(_protocol.COLLECTIVES) and not any(each in name for each in MEETS):
            leaves = pytree.tree_leaves((args, kwargs))
            ins = [_protocol.form(each.fake) for each in leaves if isinstance(each, _There)]

        def operand(value: Any) -> int | None:
            return self._number_of(value) if isinstance(value, _There) else None

        places = [_protocol.place(each, operand, self.workers.group_name) for each in args]
        named = {key: _protocol.place(each, operand, self.workers.group_name) for key, each in kwargs.items()}
        return _protocol.Step(name, places, named, _line_of(node), ins, orders)


def nbytes_of(results: Sequence[Result]) -> int:
    """Return the bytes of the workers' tensors among the results, on one worker."""
    return sum(each.meta.nbytes for each in results if each.meta is not None)


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one is other:
        return True
    return not isinstance(one, RemoteTensor) and one.dtype == other.dtype and torch.equal(one, other)


def _fake(value: Any) -> Any:
    return value.fake if isinstance(value, _There) else value


def _operator(node: fx.Node) -> Callable[..., Any]:
    if not callable(node.target):
        raise RemoteTensorError(f"{node.format_node()}: a captured step has only calls of operators")
    return node.target


def _fake_here(node: fx.Node, fakes: dict[fx.Node, Any]) -> Any:
    if node.target is torch.ops.aten._local_scalar_dense.default:
        if isinstance(node.meta.get("val"), (float, torch.SymFloat)):
            return 1.0  # any number will do
        raise RemoteTensorError(
            f"a captured step reads an int out of a tensor of this process, at\n{_line_of(node)}\n"
            "Read it eagerly, before"
        )
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: fakes[each])
    return fake_tensors.propagate(_operator(node), args, kwargs)


def _makes_tensor(node: fx.Node) -> bool:
    return any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(node.meta.get("val")))


def check(graph: fx.GraphModule, workers: WorkerSet | None) -> None:
    """Raise RemoteTensorError if a capture or its call would."""
    origins = {} if workers is None else _origins_in(graph, workers)
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.native_dropout.default:
            if workers is not None and random_ops.may_draw(node.target, node.args, {}):
                captured_random_ops.check_streams(workers)
                captured_random_ops.check_origin(origins.get(node.args[0]), str(node.target))
        elif node.op == "call_function" and node.target is not torch.ops.monarch_backend.draw.default:
            _check(node)


def _origins_in(graph: fx.GraphModule, workers: WorkerSet) -> dict[fx.Node, Any]:
    """Return the origin of each node's tensor or tensors, as far as a trace knows them."""
    found: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function":
            _note_origin(node, workers, found, lambda each: each.meta.get("val"))
        elif shard_origins.MARK in node.meta:
            found[node] = node.meta[shard_origins.MARK]
    return found


def _note_origin(
    node: fx.Node, workers: WorkerSet, found: dict[fx.Node, Any], tensor_of: Callable[[fx.Node], Any]
) -> None:
    found[node] = node.meta.get(shard_origins.MARK)
    if found[node] is not None:
        return
    if node.target is operator.getitem:
        of_all = found.get(node.args[0])  # type: ignore[arg-type]
        found[node] = of_all[int(node.args[1])] if isinstance(of_all, list) else None  # type: ignore[arg-type]
        return
    inputs = {each: _operand(found.get(each), tensor_of(each)) for each in node.all_input_nodes}
    operands = [each for each in inputs.values() if isinstance(each, Operand)]
    origins = [each.origin for each in operands if each.origin is not None]
    if str(node.target).startswith(_protocol.COLLECTIVES):
        if any(each in str(node.target) for each in MEETS):
            found[node] = origins[0] if origins else None
        else:
            rows = workers.rows(list(node.args))
            found[node] = shard_origins.of_collective(str(node.target), origins, rows, workers.size)
        return
    if origins:
        args, kwargs = fx.map_arg((node.args, node.kwargs), inputs.__getitem__)
        of_result, value = shard_origins.of_results(node.target, list(args), dict(kwargs)), tensor_of(node)
        if isinstance(value, torch.Tensor):
            found[node] = of_result(0, *_sizes(value))
        elif isinstance(value, (tuple, list)):
            found[node] = [
                of_result(at, *_sizes(each)) if isinstance(each, torch.Tensor) else None
                for at, each in enumerate(value)
            ]


def _sizes(tensor: torch.Tensor) -> tuple[Any, Any]:
    return tuple(tensor.shape), tuple(tensor.stride())


def _operand(origin: Any, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    origin = origin if isinstance(origin, Origin) else None
    if origin is not None and not all(type(size) is int for size in value.shape):  # a trace for all sizes
        origin = origin._replace(whole=None)
    return Operand(origin, *_sizes(value), value.dtype)


def _check(node: fx.Node) -> None:
    """Raise RemoteTensorError for operators whose results would differ from eager code's."""
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise RemoteTensorError(f"{target} in a captured step can't be sent to workers: leave it to eager code")
    if isinstance(target, torch._ops.OpOverload) and random_ops.may_draw(target, node.args, node.kwargs):
        raise RemoteTensorError(
            f"{target} in a captured step, at\n{_line_of(node)}\nIts random numbers would not be those of eager code: "
            "put what draws them (dropout) into a function with torch.compiler.disable"
        )


def _written(node: fx.Node, args: Any, kwargs: Any) -> list[_There]:
    schema = getattr(node.target, "_schema", None)
    found: list[_There] = []
    for i, each in enumerate(schema.arguments if schema is not None else ()):
        if each.alias_info is not None and each.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(each.name)
            leaves = pytree.tree_leaves(value)
            found += [one for one in leaves if isinstance(one, _There)]
    for each in found:
        if each.index[0] in ("sent", "number"):
            raise RemoteTensorError(
                f"a captured step changes a tensor of this process with values of the workers, at\n{_line_of(node)}\n"
                "Put it on the workers first: monarch_backend.dtensor.put_module(model, mesh) for a parameter "
                "outside all plans, distribute_tensor for any other tensor"
            )
    return found


def _line_of(node: fx.Node) -> str:
    """Return the program's line of this operation, as in a traceback."""
    lines = (node.stack_trace or "").splitlines()
    last = max((i for i, each in enumerate(lines) if each.startswith("  File ")), default=0)
    return "\n".join(lines[last : last + 2])


def _by_rank_here(tensors: Any, number: int) -> list[torch.Tensor]:
    """Run the operator of per_rank_op.py on tensors of this process; each result is a PerRankTensor."""
    made, args, kwargs = per_rank_op.arguments(number, tensors)
    result = per_rank_host_tensor.run(made.function, args, kwargs)
    return [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
