"""``torch.compile(function, backend="monarch")``: a captured step is one record for all workers.

torch traces the function on the controller, forward and backward, to local operations and functional collectives; the
workers get the graph once, compile it with Inductor and run it at each call. ``options={"inductor": False}``: they run
its operations one by one. What a call does is here; what becomes of a graph, in _capture.py.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import fx

from monarch_backend.dtensor import _signatures, _sites, _torch_compile
from monarch_backend.dtensor._capture import Capture, Capturer
from monarch_backend.dtensor._errors import MeshMismatchError, RemoteTensorError
from monarch_backend.dtensor._remote_tensor import Ref, RemoteTensor, on_the_cpu
from monarch_backend.dtensor._workers import Workers

OPTIONS = ("inductor",)
statistics = {"graphs": 0, "calls": 0}
"""Graphs that were defined on workers, and records of them that were written."""

_torch_compile.install()


def monarch(graph: fx.GraphModule, inputs: Any, *, mode: str | None = None, options: Any = None) -> Any:
    """The backend, as torch.compile calls it. Raises ValueError for options that there are not."""
    given = dict(options or {})
    if mode is not None or any(name not in OPTIONS for name in given):
        raise ValueError(
            f"torch.compile(backend='monarch') with mode={mode!r}, options={given}: the options are "
            f"{', '.join(OPTIONS)}, and there are no modes"
        )
    _refuse_autocast(graph)
    inductor = bool(given.get("inductor", True))

    def compiler(traced: fx.GraphModule, _inputs: Any) -> Any:
        return _Graph(traced, inductor=inductor)

    with on_the_cpu():
        return _torch_compile.two_graphs(compiler, compiler)(graph, inputs)


def _refuse_autocast(graph: fx.GraphModule) -> None:
    """A trace has its tensors on the CPU, where this one would do nothing without a word."""
    inside = _torch_compile.autocasts(graph)
    if "cuda" in inside or torch.is_autocast_enabled("cuda"):
        raise RemoteTensorError(
            "torch.autocast('cuda') in a captured step: give it what has the lower precision already (model.to(dtype), "
            "the MixedPrecisionPolicy of fully_shard), or leave the step to eager code"
        )


class _Graph:
    """One graph of torch's, called with whatever tensors come: captured anew for others of their kind."""

    def __init__(self, graph: fx.GraphModule, *, inductor: bool) -> None:
        self._graph, self._inductor = graph, inductor
        self._captures: weakref.WeakKeyDictionary[Workers, dict[Any, Capture]] = weakref.WeakKeyDictionary()

    def __call__(self, *args: Any) -> list[Any]:
        workers = _workers_of(args)
        if workers is None:
            with torch.no_grad():
                return list(self._graph(*args))  # only tensors of this process
        captures = self._captures.get(workers)
        if captures is None:
            captures = self._captures[workers] = {}
        key = tuple([each._meta if type(each) is RemoteTensor else _kind(each) for each in args])
        capture = captures.get(key)
        if capture is None:
            statistics["graphs"] += 1
            with _signatures.one_at_a_time:
                capture = Capturer(workers, self._graph, list(args), inductor=self._inductor).make()
            captures[key] = capture
        return _run(workers, capture, args)


def _workers_of(args: Any) -> Workers | None:
    found: Workers | None = None
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
    """What a capture is made for: another value of this kind is another call of it."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape)
    return float if type(value) is float else (type(value), value)


def _run(workers: Workers, capture: Capture, args: Any) -> list[Any]:
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
        sent = [workers.put(each) for each in here[: capture.sent]]
        numbers = [float(each) for each in here[capture.sent : capture.sent + capture.numbers]]
        statistics["calls"] += 1
        ids = [each._ref.id for each in sent]
        record = (capture.number, _sites.here(), *operands, *ids, *numbers, *created)
        if capture.draws is None:
            workers.write(record)
        else:
            capture.draws.around(lambda: workers.write(record))
    elif capture.created:
        raise RemoteTensorError("a captured step without operations has results of the workers")
    numbered = iter(created)
    return [
        RemoteTensor(meta, Ref(workers, next(numbered)))
        if meta is not None
        else args[at] if at >= 0 else here[place] if place >= 0 else value
        for meta, at, place, value in capture.results
    ]  # fmt: skip
