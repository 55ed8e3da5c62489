"""``torch.compile(function, backend="monarch")``: a captured step is one command for all workers.

torch traces the function on the controller, forward and backward, to local operations and functional collectives. The
workers get the graph once, compile it with Inductor, and run it at each call. With ``options={"inductor": False}`` they
run its operations one by one. lowering.py turns a graph into definitions.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor._compile import lowering, merge_graphs
from monarch_backend.dtensor._compile.lowering import Capture, GraphLowering
from monarch_backend.dtensor._controller import call_sites, recording
from monarch_backend.dtensor._controller.per_rank_host_tensor import PerRankTensor
from monarch_backend.dtensor._controller.remote_tensor import Ref, RemoteTensor, on_the_cpu
from monarch_backend.dtensor._controller.tensor_meta import Meta
from monarch_backend.dtensor._controller.worker_set import WorkerSet
from monarch_backend.dtensor._dispatch import fake_tensors, op_signatures
from monarch_backend.dtensor._errors import MeshMismatchError, RankDependentError, RemoteTensorError
from monarch_backend.dtensor._patches import manifest, trace_installation
from monarch_backend.dtensor._patches.semantics import aot_tangents, graph_breaks, graph_inputs, trace_backends
from monarch_backend.dtensor._per_rank import rank_classes
from monarch_backend.dtensor._per_rank.rank_classes import Classes
from monarch_backend.dtensor._torch_internals import recompilation

OPTIONS = ("inductor",)
statistics = {"graphs": 0, "calls": 0}
"""Graphs that were defined on workers, and commands that call them."""

if torch_version() >= manifest.CAPTURED.since:  # else a trace in a controller is refused, and is torch's own elsewhere
    trace_installation.install()


def monarch(graph: fx.GraphModule, inputs: Any, *, mode: str | None = None, options: Any = None) -> Any:
    """Compile a graph for workers, as torch.compile calls it. Raises ValueError for unknown options."""
    given = dict(options or {})
    if mode is not None or any(name not in OPTIONS for name in given):
        raise ValueError(
            f"torch.compile(backend='monarch') with mode={mode!r}, options={given}: the options are "
            f"{', '.join(OPTIONS)}; modes are not supported"
        )
    inductor = bool(given.get("inductor", True))
    start = recording.monotonic_ns()
    try:
        _refuse_autocast(graph)
        with on_the_cpu():
            traced = aot_tangents.with_hooks(_traced(graph, inputs, inductor))
        reason = recompilation.reason()
        recording.record(recording.COMPILER, "compile" if reason is None else f"recompile: {reason}", start)
        return traced
    except graph_breaks.Restart:
        raise
    except Exception as error:
        graph_inputs.trace_with_sizes()
        # Eager code runs what has no graph, for our reasons or torch's (DTensors that share memory, say), or raises its
        # own error.
        ours = isinstance(error, RemoteTensorError)
        why = str(error) if ours else f"{type(error).__name__}: {error}"
        recording.record(recording.COMPILER, f"left to eager code: {why}", start, has_failed=True)
        raise graph_breaks.LeftToEagerError(why) from error  # type: ignore[arg-type]


def _traced(graph: fx.GraphModule, inputs: Any, inductor: bool) -> Any:
    """Return one graph for all ranks, or one for each class of ranks. Tracing finds the classes."""
    found = {id(meta.workers): meta for meta in map(_meta_of, inputs) if meta is not None}
    if len(found) != 1:
        return _one_graph(None, graph, inputs, inductor)
    workers = next(iter(found.values())).workers
    classes = rank_classes.of(workers, [meta for meta in map(_meta_of, inputs) if meta is not None])
    while len(classes.members) <= rank_classes.MAX_GRAPHS:
        with rank_classes.standing_for(workers, classes.members[0]) as trace:
            try:
                if classes.is_one:
                    return _one_graph(workers, graph, inputs, inductor)
                return _graph_for_each(classes, graph, inputs, inductor)
            except Exception as error:
                keys = trace.parted
                if keys is None and isinstance(error, RankDependentError) and len(classes.members) < workers.size:
                    keys = range(workers.size)  # the differing ranks are not known
                if keys is None:
                    raise
                classes = classes.parted(keys)
    raise RankDependentError(
        f"{len(classes.members)} different graphs", f"are too many, more than {rank_classes.MAX_GRAPHS}"
    )


def _meta_of(value: Any) -> Meta | None:
    local = value._local_tensor if isinstance(value, DTensor) else value
    return local._meta if type(local) is RemoteTensor else None


def _one_graph(workers: WorkerSet | None, graph: fx.GraphModule, inputs: Any, inductor: bool) -> Any:
    def compiler(traced: fx.GraphModule, _inputs: Any) -> Any:
        lowering.check(traced, workers)
        return _Graph([traced], None, inductor=inductor)

    return trace_backends.two_graphs(compiler, compiler)(graph, inputs)


def _graph_for_each(classes: Classes, graph: fx.GraphModule, inputs: Any, inductor: bool) -> Any:
    made: list[list[_Graph]] = [[] for _ in classes.members]

    def compiler(number: int) -> Any:
        def take(traced: fx.GraphModule, _inputs: Any) -> Any:
            lowering.check(traced, classes.workers)
            made[number].append(_Graph([traced], classes, inductor=inductor))
            return made[number][-1]

        return take

    def standing_for(number: int) -> Any:
        return rank_classes.standing_for(classes.workers, classes.members[number])

    compiled = trace_backends.in_classes([compiler(number) for number in range(len(made))], standing_for)(graph, inputs)
    for ways in zip(*made, strict=True):
        graphs = [graph for each in ways for graph in each.graphs]
        merge_graphs.check(graphs)
        ways[0].graphs = graphs
    return compiled


def _refuse_autocast(graph: fx.GraphModule) -> None:
    """Raise for CPU autocast within a trace. Traces have their tensors on the CPU, and it would have no effect."""
    inside = trace_backends.autocasts(graph)
    found = [kind for kind in ("cuda", "xla") if kind in inside or torch.is_autocast_enabled(kind)]
    if found:
        raise RemoteTensorError(
            f"torch.autocast({found[0]!r}) in a captured step: give it what has the lower precision already "
            "(model.to(dtype), the MixedPrecisionPolicy of fully_shard), or leave the step to eager code"
        )


class _Graph:
    """One traced graph, captured anew for each kind of tensors. ``graphs``: one for each of the ``classes``."""

    def __init__(self, graphs: list[fx.GraphModule], classes: Classes | None, *, inductor: bool) -> None:
        self.graphs, self._classes, self._inductor = graphs, classes, inductor
        self._captures: weakref.WeakKeyDictionary[WorkerSet, dict[Any, Capture]] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any) -> list[Any]:
        workers = _workers_of(args)
        if workers is None:
            with torch.no_grad():
                return list(self.graphs[0](*args))  # only tensors of this process
        captures = self._captures.get(workers)
        if captures is None:
            captures = self._captures[workers] = {}
        key = tuple([each._meta if type(each) is RemoteTensor else _kind(each) for each in args])
        capture = captures.get(key)
        if capture is None:
            statistics["graphs"] += 1
            start = recording.monotonic_ns()
            with fake_tensors.one_at_a_time:
                capture = self._capture(workers, list(args))
            detail = f"capture again: {_difference(next(reversed(captures)), key)}" if captures else "capture"
            recording.record(workers.name, detail, start, reference=capture.number)
            captures[key] = capture
        return _run(workers, capture, args)

    def _capture(self, workers: WorkerSet, args: list[Any]) -> Capture:
        """Capture the graph for these arguments. Ranks of one class are split if their arguments' metadata differ."""
        classes = rank_classes.of(workers, [each._meta for each in args if type(each) is RemoteTensor])
        # With one graph, the arguments alone define the ranks that take part. dynamo knows plain tensors by their
        # sizes, and uses the graph for those of another slice, too.
        several = self._classes if len(self.graphs) > 1 else None
        if several is not None:
            classes = several.parted(classes.of_rank).without(classes)
        elif classes.is_one:
            return GraphLowering(workers, self.graphs[0], args, inductor=self._inductor).make()
        returned, by_rank = merge_graphs.made_of_arguments(self.graphs), merge_graphs.by_rank(self.graphs)
        constants = merge_graphs.constants(workers, self.graphs)
        captures = []
        for rank, *_ in classes.members:
            graph = self.graphs[0 if several is None else several.of_rank[rank]]
            capturer = GraphLowering(
                workers, graph, args, inductor=self._inductor, rank=rank, returned=returned, by_rank=by_rank,
                constants=constants,
            )  # fmt: skip
            captures.append(capturer.make())
        for each in captures:
            operands = [*(args[at] for at in each.tensors), *each.kept]
            changed = [operands[at] for at in each.writes]
            op_signatures.refuse_old_values("a captured step", changed, classes.of_rank)
        return merge_graphs.combine(workers, captures, classes.of_rank)


def _workers_of(args: Any) -> WorkerSet | None:
    found: WorkerSet | None = None
    for each in args:
        if type(each) is RemoteTensor:
            mine = each._meta.workers
            if found is None:
                found = mine
            elif found is not mine:
                raise MeshMismatchError(
                    f"a captured step got a tensor of {found.name} and one of {mine.name}: compile what is done on "
                    "each of them as a function of its own"
                )
    return found


def _kind(value: Any) -> Any:
    """Return the key of a capture: values with an equal key use the same one."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    return float if type(value) is float else (type(value), value)


def _difference(before: tuple[Any, ...], now: tuple[Any, ...]) -> str:
    """Return the first argument that differs between two keys of captures."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((f"argument {at} is {new}, and was {old}" for at, (old, new) in pairs if old != new), "other arguments")


def _run(workers: WorkerSet, capture: Capture, args: Any) -> list[Any]:
    start = recording.monotonic_ns()
    here: Any = ()
    if capture.here is not None:
        with torch.no_grad():
            here = capture.here(*[args[at] for at in capture.own])
    created: list[int] = []
    if capture.number:
        created = [next(workers.ids) for _ in range(capture.created)]
        operands = [args[at]._ref.id for at in capture.tensors]
        operands += [each._ref.id for each in capture.kept]
        is_given_twice = len(set(operands)) < len(operands)
        for at in capture.writes:
            if is_given_twice and operands.count(operands[at]) > 1:
                raise RemoteTensorError(
                    f"a captured step changes argument {at}, and has the same tensor as another argument: torch "
                    "could not see that they are one. Give it once, or leave this step to eager code"
                )
        sent = [
            each.sent(workers) if type(each) is PerRankTensor else workers.put(each) for each in here[: capture.sent]
        ]
        numbers = [float(each) for each in here[capture.sent : capture.sent + capture.numbers]]
        statistics["calls"] += 1
        ids = [each._ref.id for each in sent]
        record = (capture.number, call_sites.here(), *operands, *ids, *numbers, *created)
        if capture.draws is None:
            workers.write(record, capture.nbytes)
        else:
            capture.draws.around(lambda: workers.write(record, capture.nbytes))
        recording.record(workers.name, "captured step", start, reference=capture.number)
    elif capture.created:
        raise RemoteTensorError("a captured step without operations has results of the workers")
    numbered = iter(created)
    return [
        RemoteTensor(meta, Ref(workers, next(numbered)))
        if meta is not None
        else args[at] if at >= 0 else here[place] if place >= 0 else value
        for meta, at, place, value in capture.results
    ]  # fmt: skip
