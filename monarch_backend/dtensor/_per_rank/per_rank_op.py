"""Operator in traces for a function that each worker calls with its own numbers.

While torch.compile traces, torch's functions for "the rank that I am" (see
dtensor/_patches/semantics/rank_functions.py) meet tensors without values and ints that differ by rank. Such a call
becomes one node here; a captured step has in its place the function itself and each rank's numbers. On real tensors,
which are this process's, it runs for each rank (see _compile/lowering.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from monarch_backend.dtensor._errors import RankDependentError
from monarch_backend.dtensor._per_rank import per_rank_int, rank_classes
from monarch_backend.dtensor._torch_internals import tracing_state


class Call(NamedTuple):
    """``name``: the function's name on workers. ``leaves``: its arguments, with `_TENSOR` in place of tensors."""

    function: Callable[..., Any]
    name: str
    leaves: tuple[Any, ...]
    spec: Any


_TENSOR = object()
_numbers: dict[Any, int] = {}
_calls: list[Call] = []
_forms: dict[int, tuple[Any, list[Any]]] = {}  # of a call's result: its structure, and its leaves that are not tensors


def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    flat, spec = pytree.tree_flatten((args, kwargs))
    tensors = [each for each in flat if isinstance(each, torch.Tensor)]
    leaves = tuple(_TENSOR if isinstance(each, torch.Tensor) else each for each in flat)
    key = (id(function), tuple(_key(each) for each in leaves), spec)
    number = _numbers.get(key)
    if number is None:
        number = _numbers[key] = len(_calls)
        _calls.append(Call(function, f"{function.__module__}:{function.__qualname__}", leaves, spec))
    try:
        results = iter(torch.ops.monarch_backend.by_rank(tensors, number))
    except RankDependentError as error:
        if rank_classes.stands_for_some():
            raise  # the ranks are traced again, in classes
        if not tracing_state.is_dynamos():
            raise  # make_fx() and torch.export have no eager code to fall back to
        from monarch_backend.dtensor._torch_internals import graph_break  # needs dynamo, which is imported now

        graph_break.break_graph(_calls[number].name, error)
    form, kept = _forms[number]
    return pytree.tree_unflatten([next(results) if each is _TENSOR else each for each in kept], form)


def arguments(number: int, tensors: Any) -> tuple[Call, Any, Any]:
    made = _calls[number]
    mine = iter(tensors)
    args, kwargs = pytree.tree_unflatten([next(mine) if each is _TENSOR else each for each in made.leaves], made.spec)
    return made, args, kwargs


def tensors_of(result: Any, inputs: Any) -> list[torch.Tensor]:
    """Return the operator's results from a function's result: tensors with own memory, as a trace has them."""
    found = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor)]
    return [
        each.clone(memory_format=torch.contiguous_format) if tracing_state.share_memory(each, inputs) else each
        for each in found
    ]


def _key(leaf: Any) -> Any:
    values = per_rank_int.values_of(leaf)
    return (type(leaf), leaf) if values is None else values


def _without_values(tensors: list[torch.Tensor], number: int) -> list[torch.Tensor]:
    """Return the result's tensors for all ranks. Raises RankDependentError if their shapes differ."""
    made = _calls[number]
    columns = [per_rank_int.values_of(each) for each in made.leaves]
    known: dict[Any, Any] = {}
    for mine in zip(*[each for each in columns if each is not None], strict=True):
        if None in mine or mine in known:
            continue
        numbers = iter(mine)
        given = [each if column is None else next(numbers) for each, column in zip(made.leaves, columns, strict=True)]
        inner = iter(tensors)
        given = [next(inner) if each is _TENSOR else each for each in given]
        args, kwargs = pytree.tree_unflatten(given, made.spec)
        known[mine] = made.function(*args, **kwargs)
    flats = {mine: pytree.tree_flatten(each) for mine, each in known.items()}
    leaves, form = next(iter(flats.values()))
    for others, _ in flats.values():
        for one, other in zip(leaves, others, strict=True):
            alike = one.shape == other.shape if isinstance(one, torch.Tensor) else one == other
            if not alike:
                _part(columns, flats)
                raise RankDependentError(
                    f"{made.name} in torch.compile",
                    f"has another result on each rank ({_text(one)} and {_text(other)}), which one graph can't have",
                    "Choose sizes that the number of ranks divides, leave it to eager code, or run it on the workers: "
                    "monarch_backend.dtensor.run(mesh, function, ...)",
                )
    _forms[number] = form, [_TENSOR if isinstance(each, torch.Tensor) else each for each in leaves]
    return tensors_of(leaves, tensors)


def _part(columns: Any, flats: Any) -> None:
    """Divide ranks into classes by the result's sizes and non-tensor values."""
    of_rank = zip(*[each for each in columns if each is not None], strict=True)
    shown = {mine: tuple(map(_text, leaves)) for mine, (leaves, _) in flats.items()}
    rank_classes.part([shown.get(mine) for mine in of_rank])


def _text(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _of_constants(_tensors: list[torch.Tensor], _call: int) -> list[torch.Tensor]:
    """Kernel for a trace's constants (``torch.tensor([])``), with which FakeTensorMode calculates.

    A result on the meta device is not taken for a constant: each rank has another one.
    """
    return [torch.empty((), device="meta")]


torch.library.define("monarch_backend::by_rank", "(Tensor[] tensors, int call) -> Tensor[]")
torch.library.register_fake("monarch_backend::by_rank")(_without_values)
torch.library.impl("monarch_backend::by_rank", "CPU")(_of_constants)
