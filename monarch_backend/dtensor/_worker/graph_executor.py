"""Captured steps on a worker: many operations in one command, compiled by Inductor or run one by one.

A rank that fails within a step still takes part in its remaining collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed import distributed_c10d as c10d

from monarch_backend.dtensor._per_rank import per_rank_op
from monarch_backend.dtensor._per_rank.output_strides import is_wrong, ordered
from monarch_backend.dtensor._protocol import COLLECTIVE_NAMESPACES, Graph, Kind, Signature, Step, Tag
from monarch_backend.dtensor._worker import op_functions
from monarch_backend.dtensor._worker.op_functions import Function, Source

NAME = "a captured step"
_log = logging.getLogger("monarch_backend")
Values = Sequence[Any]


class GraphFunction(Function):
    """Function that runs a graph. Its command has numbers between tensors and results."""

    __slots__ = (
        "_all",
        "_collectives",
        "_compiled",
        "_count",
        "_draws",
        "_groups",
        "_numbers_on",
        "_orders",
        "_plain",
        "_source",
        "_steps",
        "_wants_inductor",
        "graph",
    )

    def __init__(self, graph: Graph, rank: int, device: torch.device, group: Callable[[str], Any]) -> None:
        signature = Signature(
            graph.number, NAME, [], {}, graph.operands, Kind.MANY, len(graph.results), graph.writes, graph.ins, []
        )
        super().__init__(signature, self._run)
        self.graph = graph
        self._count = len(graph.numbers)
        self.length += self._count
        self._steps = [Step(*each) for each in graph.steps]
        self._source = Source(rank, device, group)
        self._all: Any = None
        self._plain: Any = None
        self._orders: _Orders | None = None
        self._draws = [_draw(each, self._source) for each in graph.draws]
        self._collectives = _collectives(self._steps, self._source)
        self._groups = {each.group for each in self._collectives}
        self.has_collectives = bool(self._collectives)
        # XLA compiles operations that run one by one, later.
        self._wants_inductor = graph.inductor and device.type != "xla"
        self._compiled: Callable[..., Any] | None = None
        self._numbers_on = device if device.type == "xla" else None  # its operators refuse a CPU's tensors

    def results(self, words: list[Any], i: int) -> list[int]:
        return words[i + self.length - self.signature.results : i + self.length]

    def stand_in(self, tensors: dict[int, Any], words: list[Any], i: int) -> None:
        for each in self._collectives:
            each.run_with_zeros()

    def _run(self, tensors: dict[int, Any], words: list[Any], i: int) -> None:
        first = i + 2 + self.signature.operands
        before = {group: _past(group) for group in self._groups}
        drawn = self._drawn(before)
        given = [tensors[each] for each in words[i + 2 : first]]
        failed = next((each for each in given if not isinstance(each, torch.Tensor)), None)
        if failed is not None:
            raise TypeError(f"an operand of {NAME} is no tensor: {failed!r}")
        for number, dtype in zip(words[first : first + self._count], self.graph.numbers, strict=True):
            given.append(
                torch.tensor(number, dtype=getattr(torch, dtype), device=self._numbers_on) if dtype else number
            )
        given += drawn
        if self._all is None:  # now, so that an error is this command's failure
            self._all = self._plain = _function(self.graph, self._steps, self._source)
            if self._wants_inductor:
                self._compile(given)
            if self._compiled is None:
                self._orders = _Orders(self._steps)
                self._all = _function(self.graph, self._steps, self._source, self._orders)
        try:
            found = self._all(*given) if self._compiled is None else self._compiled(*given)
        except Exception as error:
            self._run_remaining_collectives(before)
            self._tell_where(error)
            raise
        if self._orders is not None:
            orders, self._orders = self._orders, None
            self._all = _function(self.graph, self._steps, self._source, orders) if orders.found() else self._plain
        tensors.update(zip(self.results(words, i), found, strict=True))

    def _drawn(self, before: dict[str, int]) -> list[torch.Tensor]:
        """Draw before all else, as `random_ops.fill` does, so that invalid operands do not skip numbers."""
        try:
            return [draw() for draw in self._draws]
        except Exception:
            self._run_remaining_collectives(before)
            raise

    # Compiling --------------------------------------------------------------------------------------------------

    def _compile(self, given: Values) -> None:
        """Compile at the first call. If that fails, the operations run one by one, with the same results."""
        self._wants_inductor = False
        try:
            from monarch_backend.dtensor._torch_internals import inductor
            from monarch_backend.dtensor._worker import grouped_mm

            grouped_mm.install()
            self._compiled = inductor.compiled(self._all, given)
        except Exception as error:
            _log.warning(
                "Inductor can't compile a captured step of %d operations here, which run one by one instead: %s: %s",
                len(self._steps), type(error).__name__, error,
            )  # fmt: skip

    # Failing ----------------------------------------------------------------------------------------------------

    def _run_remaining_collectives(self, before: dict[str, int]) -> None:
        """Take part in the remaining collectives. ``before``: each group's count of collectives at the step's start."""
        already_run = {group: _past(group) - number for group, number in before.items()}
        for each in self._collectives:
            already_run[each.group] -= 1
            if already_run[each.group] < 0:
                each.run_with_zeros()

    def _tell_where(self, error: Exception) -> None:
        """Add the operation and the program's line to the error, if steps ran one by one, each as a line of code."""
        frame = error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code is self._all.__code__:
                step = self._steps[frame.tb_lineno - 2]
                error.args = (f"{error}\nin {step.target}, which comes from\n{step.where}", *error.args[1:])
            frame = frame.tb_next


class _Orders:
    """Puts results into the order with which the graph was traced. Before `found` it determines which need this."""

    def __init__(self, steps: list[Step]) -> None:
        self._looks = True
        self._orders = {
            k: step.orders
            for k, step in enumerate(steps)
            if any(step.orders) and not step.target.startswith(COLLECTIVE_NAMESPACES)
        }
        self._wrong: dict[int, set[int]] = {}

    def concern(self, k: int) -> bool:
        """Whether the step's results go through `put`."""
        return k in (self._orders if self._looks else self._wrong)

    def found(self) -> bool:
        """Whether there are such steps; fixes the list."""
        self._looks = False
        return bool(self._wrong)

    def put(self, k: int, found: Any) -> Any:
        """Return the results of step k with the expected strides."""
        orders = self._orders[k]
        many = [found] if isinstance(found, torch.Tensor) else found
        if self._looks:
            wrong = {at for at, (each, order) in enumerate(zip(many, orders, strict=True)) if is_wrong(each, order)}
            if wrong:
                self._wrong[k] = wrong
        wrong = self._wrong.get(k, set())
        put = [ordered(each, orders[at] or ()) if at in wrong else each for at, each in enumerate(many)]
        return put[0] if isinstance(found, torch.Tensor) else put


class _GraphCollective(NamedTuple):
    """A collective of a graph. ``run_with_zeros``: lets a failed rank take part with zeros as inputs."""

    group: str
    run_with_zeros: Callable[[], None]


def _with_zeros(step: Step, call: Callable[[Values], Any], device: torch.device) -> Callable[[], None]:
    def run() -> None:
        ins = step.ins or []
        found = call([torch.zeros(shape, dtype=getattr(torch, name), device=device) for shape, name in ins])
        for each in [found] if isinstance(found, torch.Tensor) else found:
            funcol.wait_tensor(each)

    return run


def _past(group: str) -> int:
    """Return the count of collectives in a group so far."""
    return int(c10d._resolve_process_group(group)._get_sequence_number_for_group())  # type: ignore[attr-defined, arg-type]


def by_rank(name: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Run the function of this name with this rank's numbers; per_rank_op.py has its place in a trace."""
    tensors = [each for each in [*args, *kwargs.values()] if isinstance(each, torch.Tensor)]
    return per_rank_op.tensors_of(op_functions.find(name)(*args, **kwargs), tensors)


def _function(
    graph: Graph, steps: list[Step], source: Source, orders: _Orders | None = None
) -> Callable[..., list[Any]]:
    """Return a function with a line for each step, which drops values after their last use."""
    first = graph.operands + len(graph.numbers) + len(graph.draws)
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for at in (first + k, *_operands_of([*step.args, *step.kwargs.values()])):
            last[at] = k
    lines = [f"def run({', '.join(f'v{at}' for at in range(first))}):"]
    kept = set(graph.results)
    for k, step in enumerate(steps):
        call = source.call(step.target, step.args, step.kwargs, "v{}".format)
        if orders is not None and orders.concern(k):
            source.constants["put"] = orders.put
            call = f"put({k}, {call})"
        done = [at for at, end in last.items() if end == k and at not in kept]
        lines.append(f"    v{first + k} = {call}" + "".join(f"; del v{at}" for at in done))
    lines.append(f"    return [{', '.join(f'v{at}' for at in graph.results)}]")
    exec("\n".join(lines), source.constants)
    return source.constants["run"]  # type: ignore[no-any-return]


def _draw(places: list[Any], source: Source) -> Callable[[], torch.Tensor]:
    call = source.call("monarch_backend.dtensor._worker.random_ops:drawn", places, {}, str)
    exec(f"def draw():\n    return {call}", source.constants)
    return source.constants["draw"]  # type: ignore[no-any-return]


def _operands_of(places: Any) -> list[int]:
    found: list[int] = []
    for each in places:
        if isinstance(each, list) and each:
            if each[0] == Tag.OPERAND:
                found.append(each[1])
            elif each[0] == Tag.LIST:
                found += _operands_of(each[1])
    return found


def _collectives(steps: list[Step], source: Source) -> list[_GraphCollective]:
    found = []
    for step in steps:
        if step.ins is None:
            continue
        of = {at: k for k, at in enumerate(_operands_of([*step.args, *step.kwargs.values()]))}
        call = source.call(step.target, step.args, step.kwargs, lambda at, of=of: f"z[{of[at]}]")  # type: ignore[misc]
        exec(f"def run_with_zeros(z):\n    return {call}", source.constants)
        name = next(
            each[1]
            for each in [*step.args, *step.kwargs.values()]
            if isinstance(each, list) and each[:1] == [Tag.GROUP]
        )
        found.append(
            _GraphCollective(source.group(name), _with_zeros(step, source.constants["run_with_zeros"], source.device))
        )
    return found
