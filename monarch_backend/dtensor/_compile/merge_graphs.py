"""Merging of one step's graphs for classes of ranks with different sizes: consistency check, one common command.

The ranks of all classes take part in the same collectives. One command has operands and results of each graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from monarch_backend.dtensor import _protocol
from monarch_backend.dtensor._compile.lowering import MEETS, Capture, Result, is_same, nbytes_of
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import RemoteTensor
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._errors import RemoteTensorError
from monarch_backend.dtensor._rng import traced_random_op


def check(graphs: Sequence[fx.GraphModule]) -> None:
    """Raise RemoteTensorError if the graphs do not fit together."""
    for what, of in (
        ("another number of arguments", lambda graph: len(_nodes(graph, "placeholder"))),
        ("other collectives", _collectives),
        ("other random numbers", _draws),
        ("other results", _results),
    ):
        first, *others = [of(graph) for graph in graphs]
        if any(each != first for each in others):
            raise RemoteTensorError(f"ranks whose shards have other sizes have {what} in a captured step")


def made_of_arguments(graphs: Sequence[fx.GraphModule]) -> list[int]:
    """Return positions of results that are an argument, the same one in all of these graphs."""
    columns = zip(*[next(iter(_nodes(graph, "output"))).args[0] for graph in graphs], strict=True)
    places = [{node: at for at, node in enumerate(_nodes(graph, "placeholder"))} for graph in graphs]
    found = []
    for position, column in enumerate(columns):
        ats = {known.get(node, -1) for known, node in zip(places, column, strict=True)}
        if len(ats) == 1 and -1 not in ats:
            found.append(position)
    return found


def by_rank(graphs: Sequence[fx.GraphModule]) -> list[int]:
    """Return positions of results that these graphs calculate differently from the same arguments."""
    known: dict[Any, int] = {}
    columns = zip(*[_ways(graph.graph, known) for graph in graphs], strict=True)
    return [position for position, column in enumerate(columns) if len(set(column)) > 1]


def _ways(graph: fx.Graph, known: dict[Any, int]) -> list[Any]:
    """Return a number for each result's calculation: equal in all graphs that share ``known`` if it is the same."""
    numbers: dict[fx.Node, int] = {}
    for at, node in enumerate(graph.nodes):
        if node.op == "output":
            return [numbers[each] if isinstance(each, fx.Node) else repr(each) for each in node.args[0]]
        given = fx.map_arg((node.args, node.kwargs), lambda each: f"<value {numbers[each]}>")
        way = ("argument", at) if node.op == "placeholder" else (node.op, str(node.target), repr(given))
        numbers[node] = known.setdefault(way, len(known))
    return []


def constants(workers: WorkerSet, graphs: Sequence[fx.GraphModule]) -> list[tuple[torch.Tensor, RemoteTensor]]:
    """Return the tensors in any of these graphs and their copies on workers; each command has all of them."""
    found: list[tuple[torch.Tensor, RemoteTensor]] = []
    for graph in graphs:
        for node in _nodes(graph, "get_attr"):
            value = operator.attrgetter(str(node.target))(graph)
            if isinstance(value, torch.Tensor) and not any(is_same(value, here) for here, _ in found):
                found.append((value, value if isinstance(value, RemoteTensor) else workers.put(value)))
    return found


def combine(workers: WorkerSet, captures: Sequence[Capture], of_rank: Sequence[int]) -> Capture:
    """Combine captures to one, whose command each rank reads for its class; -1 in ``of_rank``: it takes no part."""
    first = captures[0]
    for each in captures[1:]:
        if _form(each) != _form(first):
            raise RemoteTensorError("ranks whose shards have other sizes have other operands in a captured step")
    if first.draws is not None and -1 in of_rank:
        first.draws.members = tuple(number >= 0 for number in of_rank)
    numbers = [each.number for each in captures]
    results = [_result(workers, each, of_rank) for each in zip(*[each.results for each in captures], strict=True)]
    return first._replace(
        number=workers.define_by_rank(numbers, of_rank) if first.number else 0,
        here=_here(workers, captures, of_rank),
        results=results,
        nbytes=nbytes_of(results),
        writes=sorted({at for each in captures for at in each.writes}),
    )


def _form(capture: Capture) -> Any:
    kept = [id(each) for each in capture.kept]
    return bool(capture.number), capture.tensors, kept, capture.own, capture.sent, capture.numbers, capture.created


def _here(workers: WorkerSet, captures: Sequence[Capture], of_rank: Sequence[int]) -> Any:
    """Return this process's part for all classes: once, except for results that classes compute differently."""
    functions: list[Any] = [each.here for each in captures]
    first = functions[0]
    if first is None:
        return None
    known: dict[Any, int] = {}
    columns = zip(*[_ways(each.graph, known) for each in functions], strict=True)
    differ = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    if not differ:
        return first
    if differ[-1] >= captures[0].sent:
        raise RemoteTensorError(
            "ranks whose shards have other sizes need other numbers out of a tensor of this process, in a captured "
            "step: make it a DTensor first (distribute_tensor)"
        )
    others = [_only(each, differ) for each in functions[1:]]

    def each_way(*own: Any) -> list[Any]:
        ways = [other(*own) for other in others]  # before the first one, which may change its arguments
        made = list(first(*own))
        for place, *rest in zip(differ, *ways, strict=True):
            values = [made[place], *rest]
            each = [None if number < 0 else _of_rank(values[number], rank) for rank, number in enumerate(of_rank)]
            made[place] = PerRankTensor(each, workers)
        return made

    return each_way


def _of_rank(value: torch.Tensor, rank: int) -> torch.Tensor | None:
    return value.by_rank[rank] if type(value) is PerRankTensor else value


def _only(function: fx.GraphModule, places: Sequence[int]) -> fx.GraphModule:
    (output,) = _nodes(function, "output")
    results: Any = output.args[0]
    wanted = [results[place] for place in places]
    needed: set[fx.Node] = set()
    waiting = [each for each in wanted if isinstance(each, fx.Node)]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in function.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = graph.node_copy(node, lambda each: copies[each])
    graph.output(tuple(copies[each] if isinstance(each, fx.Node) else each for each in wanted))
    return fx.GraphModule(function, graph)


def _result(workers: WorkerSet, results: Sequence[Result], of_rank: Sequence[int]) -> Result:
    first = results[0]
    if first.meta is not None and all(each.meta is not None for each in results):
        metas = [None if number < 0 else results[number].meta for number in of_rank]
        return first._replace(meta=workers.metas.by_rank(metas))
    if any(each != first for each in results):
        raise RemoteTensorError(f"ranks whose shards have other sizes have other results in a captured step: {results}")
    return first


def _nodes(graph: fx.GraphModule, op: str) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == op]


def _collectives(graph: fx.GraphModule) -> list[Any]:
    """Return the collectives in order: each operator with its arguments other than tensors and sizes."""
    found = []
    for node in _nodes(graph, "call_function"):
        name = str(node.target)
        if name.startswith(_protocol.COLLECTIVES) and not any(each in name for each in MEETS):
            leaves = pytree.tree_leaves((node.args, node.kwargs))
            found.append((name, [str(each) for each in leaves if not isinstance(each, (int, fx.Node))]))
    return found


def _draws(graph: fx.GraphModule) -> list[Any]:
    """Return the steps of the controller's generator. Ranks may keep different parts of the numbers."""
    found: list[Any] = []
    for node in _nodes(graph, "call_function"):
        if node.target is torch.ops.monarch_backend.draw.default:
            found.append(traced_random_op.drawn(node.args[1])._replace(cuts=[], keeps=1))  # type: ignore[arg-type]
        elif node.target is torch.ops.aten.native_dropout.default:
            found.append((node.meta["val"][0].shape, node.args[1:]))
    return found


def _results(graph: fx.GraphModule) -> list[Any]:
    (output,) = _nodes(graph, "output")
    values: Any = output.args[0]
    return [_kind(each.meta.get("val")) if isinstance(each, fx.Node) else each for each in values]


def _kind(value: Any) -> Any:
    return (value.dtype, value.ndim) if isinstance(value, torch.Tensor) else (type(value), value)
