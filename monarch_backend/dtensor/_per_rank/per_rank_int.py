"""Ints that differ by rank: one `torch.SymInt` on the controller, a plain number on each worker.

A coordinate in a mesh and the size of an uneven shard are such ints. They support arithmetic. A branch on one where
ranks disagree would run one side for all ranks, so it raises.

torch's own check whether sizes are equal is an exception. It compares every size with 0, 1 and other sizes, to find a
shortcut. If a shortcut applies on some ranks only, the answer is no, as in torch's LocalTensorMode, and all ranks take
the general path.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental._constant_symnode import ConstantIntNode

from monarch_backend.dtensor._errors import RankDependentError

Values = tuple[int | None, ...]
"""Values by rank; None for a rank that takes no part."""


def by_rank(values: Sequence[int | None], *, sizes: bool = False) -> int | torch.SymInt:
    """Return these values as one number: a plain int if all ranks that take part have the same.

    ``sizes``: the values are sizes of tensors or offsets in them; else they identify ranks, as coordinates do.

    >>> by_rank([3, 3, None])
    3
    >>> by_rank([0, 1]) * 4
    {0 4}
    """
    node = _node(tuple(values), sizes)
    return torch.SymInt(node) if isinstance(node, PerRankInt) else node.val


def values_of(number: Any) -> Values | None:
    """Return the values by rank of a result of `by_rank`; None for any other int."""
    node = number.node if isinstance(number, torch.SymInt) else None
    return node.values if isinstance(node, PerRankInt) else None


INSTEAD = (
    "Index or slice a tensor of the workers with it: distribute_tensor(x, mesh).to_local()[number] is each rank's own "
    "part; a list is torch.stack(...) first. Calculate with it instead of branching on it, or run the branch on the "
    "workers: monarch_backend.dtensor.run(mesh, function, ...)"
)
CACHE_SIZE = 1024
"""Limit of cached results of calculations with one int."""


class _Node:
    """Answers of torch's interface of nodes that most kinds of them share."""

    __slots__ = ()

    def is_symbolic(self) -> bool:
        return False

    is_int = is_float = is_bool = is_nested_int = is_constant = is_symbolic
    has_hint = is_symbolic  # torch asks for it before it branches; without a hint it asks `guard_or_false`

    def clone(self) -> Any:
        return self  # it is immutable

    def __repr__(self) -> str:
        return str(self)

    _graph_repr = __repr__


setattr(_Node, "str", _Node.__repr__)  # noqa: B010  (torch's C++ asks for it; inside a class it would hide Python's own)

Operation = Callable[[int, int], int]
Result = Callable[[Values, bool, tuple[Any, str, Any]], Any]
"""Function from an operation's values by rank, whether they are sizes, and the operation to its node."""


def _number(values: Values, are_sizes: bool, _operation: Any) -> Any:
    return _node(values, are_sizes)


def _answer(values: Values, are_sizes: bool, operation: tuple[Any, str, Any]) -> Any:
    """Return the answer of all ranks. If they do not agree, its use raises RankDependentError."""
    answers = {bool(each) for each in values if each is not None}
    if len(answers) > 1:
        mine, sign, theirs = operation
        return PerRankBool(f"{mine} {sign} {theirs}", _LONG_WAYS.get(sign) if are_sizes else None)
    return AgreedBool(True in answers)


def _operator(name: str, of: Operation, result: Result = _number) -> Callable[..., Any]:
    """Return the method that calculates ``of(mine, theirs)``, rank by rank. Results are cached: each takes a loop."""

    def operate(self: PerRankInt, other: Any = 0) -> Any:
        theirs = other if isinstance(other, PerRankInt) else _constant(other)
        found = self._known.get((name, theirs))
        if found is None:
            are_sizes = self.are_sizes and (isinstance(theirs, int) or theirs.are_sizes)
            found = result(_zip(self, theirs, of), are_sizes, (self, name, theirs))
            if len(self._known) >= CACHE_SIZE:  # a program may calculate with ever new numbers
                self._known.clear()
            self._known[name, theirs] = found
        return found

    return operate


class PerRankInt(_Node):
    """Node of a SymInt that differs by rank. Interned: the same values are the same object."""

    __slots__ = ("__weakref__", "_known", "are_sizes", "values")

    def __init__(self, values: Values, are_sizes: bool) -> None:
        self.values, self.are_sizes = values, are_sizes
        self._known: dict[tuple[str, Any], Any] = {}  # cached results, by operation

    def is_int(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        """Return None: there is no single int."""

    def __deepcopy__(self, _memo: Any) -> PerRankInt:
        return self

    def __str__(self) -> str:
        return "{" + " ".join("-" if each is None else str(each) for each in self.values) + "}"

    def wrap_int(self, number: int) -> ConstantIntNode:
        return _wrapped(number)

    add = _operator("add", operator.add)
    sub = _operator("sub", operator.sub)
    mul = _operator("mul", operator.mul)
    floordiv = int_floordiv = _operator("floordiv", operator.floordiv)
    mod = _operator("mod", operator.mod)
    sym_max = _operator("max", max)
    sym_min = _operator("min", min)
    neg = _operator("neg", lambda mine, _: -mine)
    ceil_div = _operator("ceil", lambda above, below: -(-above // below))
    eq = _operator("==", operator.eq, _answer)
    ne = _operator("!=", operator.ne, _answer)
    lt = _operator("<", operator.lt, _answer)
    le = _operator("<=", operator.le, _answer)
    gt = _operator(">", operator.gt, _answer)
    ge = _operator(">=", operator.ge, _answer)

    def int_truediv(self, other: Any) -> PerRankFloat:
        """Return the node of the quotient, which torch then rounds to an int."""
        return PerRankFloat(self, other)

    def sym_sum(self, others: Sequence[Any]) -> Any:
        total: Any = ConstantIntNode(0)
        for each in others:
            total = each.add(total) if isinstance(each, PerRankInt) else total.add(each)
        return total

    def bool_(self, *_: Any) -> bool:
        """Return whether it is not 0, if all ranks agree."""
        answers = {bool(each) for each in self.values if each is not None}
        if len(answers) > 1:
            raise RankDependentError(f"bool({self})", "is true on some ranks and false on others")
        return True in answers

    guard_bool = bool_

    def int_(self, *_: Any) -> int:
        raise RankDependentError(f"int({self})", "has another value on each rank", INSTEAD)

    guard_int = int_


class PerRankFloat(_Node):
    """Node of a SymFloat: the quotient of an int that differs by rank. It can only be rounded."""

    __slots__ = ("_above", "_below")

    def __init__(self, above: PerRankInt, below: Any) -> None:
        self._above, self._below = above, below

    def is_float(self) -> bool:
        return True

    def maybe_as_float(self) -> None:
        """Return None: there is no single float."""

    def __str__(self) -> str:
        return f"{self._above} / {self._below}"

    def ceil(self) -> Any:
        return self._above.ceil_div(self._below)

    def floor(self) -> Any:
        return self._above.floordiv(self._below)

    def float_(self, *_: Any) -> float:
        raise RankDependentError(f"float({self})", "has another value on each rank")

    guard_float = wrap_float = wrap_int = float_


class _BoolNode(_Node):
    __slots__ = ()

    def is_bool(self) -> bool:
        return True

    def wrap_bool(self, value: bool) -> AgreedBool:
        return AgreedBool(value)


class AgreedBool(_BoolNode):
    """Node of a SymBool on which all ranks agree. torch's own constants can't be combined with a `PerRankBool`."""

    __slots__ = ("value",)

    def __init__(self, value: bool) -> None:
        self.value = value

    is_constant = has_hint = _BoolNode.is_bool

    def maybe_as_bool(self, *_: Any) -> bool:
        return self.value

    bool_ = constant_bool = guard_bool = expect_true = maybe_as_bool
    guard_or_false = guard_or_true = guard_size_oblivious = statically_known_true = maybe_as_bool

    def __str__(self) -> str:
        return str(self.value)

    def sym_not(self) -> AgreedBool:
        return AgreedBool(not self.value)

    not_ = sym_not

    def sym_and(self, other: Any) -> Any:
        return other if self.value else self

    and_ = sym_and

    def sym_or(self, other: Any) -> Any:
        return self if self.value else other

    or_ = sym_or


class PerRankBool(_BoolNode):
    """Node of a SymBool that is true on some ranks and false on others. A branch on it raises.

    Where torch asks for a hint only (is a tensor of no elements contiguous?), it gets the answer that it uses for
    unknown sizes.
    """

    __slots__ = ("long_way", "what")

    def __init__(self, what: str, long_way: bool | None = None) -> None:
        self.what, self.long_way = what, long_way

    def maybe_as_bool(self) -> None:
        """Return None: there is no single answer."""

    def __str__(self) -> str:
        return self.what

    def sym_not(self) -> PerRankBool:
        """Return another node of this kind: the negation differs by rank as well."""
        return PerRankBool(f"not ({self.what})", None if self.long_way is None else not self.long_way)

    not_ = sym_not

    def sym_or(self, other: Any) -> Any:
        """Return True where the other one is true on all ranks."""
        return other if getattr(other, "maybe_as_bool", lambda: None)() is True else self

    or_ = sym_or

    def sym_and(self, other: Any) -> Any:
        """Return False where the other one is false on all ranks."""
        return other if getattr(other, "maybe_as_bool", lambda: None)() is False else self

    and_ = sym_and

    def bool_(self) -> bool:
        """Raise for a branch in Python; torch's own code gets False."""
        return self._decided(torchs=_asked_by_torch())

    def guard_bool(self, _file: str, _line: int) -> bool:
        """Raise for a branch in torch's C++."""
        return self._decided(torchs=True)

    expect_true = guard_bool

    def _decided(self, *, torchs: bool) -> bool:
        if torchs and self.long_way is not None:
            return self.long_way
        raise RankDependentError(self.what, "is true on some ranks and false on others")

    def guard_or_false(self, _file: str, _line: int) -> bool:
        """Return the answer for unknown sizes."""
        return False

    guard_size_oblivious = statically_known_true = guard_or_false

    def guard_or_true(self, _file: str, _line: int) -> bool:
        """Return the answer for unknown sizes."""
        return True


_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_ASKING = (_TORCH + "__init__.py", os.path.join(_TORCH, "fx", "experimental", "sym_node.py"))
"""Frames between bool() of a SymInt or a SymBool and its caller."""


def _asked_by_torch() -> bool:
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _ASKING and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_TORCH)


_LONG_WAYS = {"==": False, "!=": True}
"""Answers for torch's own code about sizes that are equal on some ranks only."""

_interned: weakref.WeakValueDictionary[tuple[Values, bool], PerRankInt] = weakref.WeakValueDictionary()
_wrapped = functools.lru_cache(1024)(ConstantIntNode)


def _node(values: Values, are_sizes: bool) -> Any:
    found = _interned.get((values, are_sizes))
    if found is None:
        present = {each for each in values if each is not None}
        if len(present) <= 1:
            return ConstantIntNode(present.pop() if present else 0)
        found = _interned[values, are_sizes] = PerRankInt(values, are_sizes)
    return found


def _constant(other: Any) -> int:
    return other if isinstance(other, int) else other.maybe_as_int()


def _zip(mine: PerRankInt, theirs: PerRankInt | int, of: Callable[[int, int], int]) -> Values:
    if isinstance(theirs, int):
        return tuple(None if a is None else of(a, theirs) for a in mine.values)
    if len(theirs.values) != len(mine.values):
        raise RankDependentError(f"{mine} and {theirs}", "belong to meshes of other processes")
    return tuple(None if a is None or b is None else of(a, b) for a, b in zip(mine.values, theirs.values, strict=True))
