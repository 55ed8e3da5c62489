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


class PerRankInt:
    """Node of a SymInt that differs by rank. Interned: the same values are the same object."""

    __slots__ = ("__weakref__", "_known", "are_sizes", "values")

    def __init__(self, values: Values, are_sizes: bool) -> None:
        self.values, self.are_sizes = values, are_sizes
        self._known: dict[tuple[str, Any], Any] = {}  # cached results: each takes a loop over all ranks

    def is_int(self) -> bool:
        """Part of torch's interface of nodes, like the methods below."""
        return True

    def is_float(self) -> bool:
        """Part of torch's interface of nodes."""
        return False

    is_bool = is_nested_int = is_symbolic = is_constant = is_float
    has_hint = is_float  # torch asks for it before it branches; without a hint it asks `guard_or_false`

    def maybe_as_int(self) -> None:
        """Return None: there is no single int."""

    def __deepcopy__(self, _memo: Any) -> PerRankInt:
        return self

    def clone(self) -> PerRankInt:
        """Return itself: it is immutable."""
        return self

    def _str(self) -> str:
        return "{" + " ".join("-" if each is None else str(each) for each in self.values) + "}"

    __str__ = __repr__ = _graph_repr = _str

    def wrap_int(self, number: int) -> ConstantIntNode:
        """Return the node for the other side of a calculation."""
        return _wrapped(number)

    # Arithmetic -------------------------------------------------------------------------------------------------

    def _each(self, name: str, other: Any, of: Callable[[int, int], int]) -> Any:
        """Return the node of ``of(mine, theirs)``, rank by rank."""
        theirs = other if isinstance(other, PerRankInt) else _constant(other)
        found = self._known.get((name, theirs))
        if found is None:
            are_sizes = self.are_sizes and (isinstance(theirs, int) or theirs.are_sizes)
            found = self._remember(name, theirs, _node(_zip(self, theirs, of), are_sizes))
        return found

    def _remember(self, name: str, theirs: PerRankInt | int, found: Any) -> Any:
        """Cache a result, which takes a loop over all ranks.

        The cache is bounded, because a program may calculate with ever new numbers.
        """
        if len(self._known) >= CACHE_SIZE:
            self._known.clear()
        self._known[name, theirs] = found
        return found

    def add(self, other: Any) -> Any:
        """Add rank by rank. The other operators work in the same way."""
        return self._each("add", other, operator.add)

    def sub(self, other: Any) -> Any:
        """See `add`."""
        return self._each("sub", other, operator.sub)

    def mul(self, other: Any) -> Any:
        """See `add`."""
        return self._each("mul", other, operator.mul)

    def floordiv(self, other: Any) -> Any:
        """See `add`."""
        return self._each("floordiv", other, operator.floordiv)

    int_floordiv = floordiv

    def mod(self, other: Any) -> Any:
        """See `add`."""
        return self._each("mod", other, operator.mod)

    def int_truediv(self, other: Any) -> PerRankFloat:
        """Return the node of the quotient, which torch then rounds to an int."""
        return PerRankFloat(self, other)

    def sym_max(self, other: Any) -> Any:
        """See `add`."""
        return self._each("max", other, max)

    def sym_min(self, other: Any) -> Any:
        """See `add`."""
        return self._each("min", other, min)

    def neg(self) -> Any:
        """See `add`."""
        return self._each("neg", 0, lambda mine, _: -mine)

    def sym_sum(self, others: Sequence[Any]) -> Any:
        """Return the node of the sum of these."""
        total: Any = ConstantIntNode(0)
        for each in others:
            total = each.add(total) if isinstance(each, PerRankInt) else total.add(each)
        return total

    # Comparisons ------------------------------------------------------------------------------------------------

    def _agreed(self, sign: str, other: Any, of: Callable[[int, int], bool]) -> Any:
        """Return the answer of all ranks. If they do not agree, its use raises RankDependentError."""
        theirs = other if isinstance(other, PerRankInt) else _constant(other)
        found = self._known.get((sign, theirs))
        if found is None:
            found = self._remember(sign, theirs, self._answer(sign, theirs, of))
        return found

    def _answer(self, sign: str, theirs: PerRankInt | int, of: Callable[[int, int], bool]) -> Any:
        answers = {bool(each) for each in _zip(self, theirs, of) if each is not None}
        if len(answers) > 1:
            both = self.are_sizes and (isinstance(theirs, int) or theirs.are_sizes)
            return PerRankBool(f"{self} {sign} {theirs}", _LONG_WAYS.get(sign) if both else None)
        return AgreedBool(True in answers)

    def eq(self, other: Any) -> Any:
        """Compare on all ranks. The other comparisons work in the same way."""
        return self._agreed("==", other, operator.eq)

    def ne(self, other: Any) -> Any:
        """See `eq`."""
        return self._agreed("!=", other, operator.ne)

    def lt(self, other: Any) -> Any:
        """See `eq`."""
        return self._agreed("<", other, operator.lt)

    def le(self, other: Any) -> Any:
        """See `eq`."""
        return self._agreed("<=", other, operator.le)

    def gt(self, other: Any) -> Any:
        """See `eq`."""
        return self._agreed(">", other, operator.gt)

    def ge(self, other: Any) -> Any:
        """See `eq`."""
        return self._agreed(">=", other, operator.ge)

    def bool_(self) -> bool:
        """Return whether it is not 0, if all ranks agree."""
        answers = {bool(each) for each in self.values if each is not None}
        if len(answers) > 1:
            raise RankDependentError(f"bool({self})", "is true on some ranks and false on others")
        return True in answers

    def guard_bool(self, _file: str, _line: int) -> bool:
        """See `bool_`."""
        return self.bool_()

    def int_(self) -> int:
        """Raise: there is no single int."""
        raise RankDependentError(f"int({self})", "has another value on each rank", INSTEAD)

    def guard_int(self, _file: str, _line: int) -> int:
        """See `int_`."""
        return self.int_()


class PerRankFloat:
    """Node of a SymFloat: the quotient of an int that differs by rank. It can only be rounded."""

    __slots__ = ("_above", "_below")

    def __init__(self, above: PerRankInt, below: Any) -> None:
        self._above, self._below = above, below

    def is_float(self) -> bool:
        """Part of torch's interface of nodes."""
        return True

    def is_int(self) -> bool:
        """Part of torch's interface of nodes."""
        return False

    is_bool = is_nested_int = is_symbolic = is_constant = has_hint = is_int

    def maybe_as_float(self) -> None:
        """Return None: there is no single float."""

    def _str(self) -> str:
        return f"{self._above} / {self._below}"

    __str__ = __repr__ = _graph_repr = _str

    def ceil(self) -> Any:
        """Return the node of the ints above."""
        return self._above._each("ceil", self._below, lambda above, below: -(-above // below))

    def floor(self) -> Any:
        """Return the node of the ints below."""
        return self._above.floordiv(self._below)

    def float_(self) -> float:
        """Raise: there is no single float."""
        raise RankDependentError(f"float({self})", "has another value on each rank")

    def guard_float(self, _file: str, _line: int) -> float:
        """See `float_`."""
        return self.float_()

    def wrap_float(self, _number: float) -> float:
        """Return the other side of a calculation; there is none."""
        return self.float_()

    wrap_int = wrap_float


class AgreedBool:
    """Node of a SymBool on which all ranks agree.

    torch's own constants cannot be combined with one on which ranks differ.
    """

    __slots__ = ("value",)

    def __init__(self, value: bool) -> None:
        self.value = value

    def is_bool(self) -> bool:
        """Part of torch's interface of nodes."""
        return True

    is_constant = has_hint = is_bool

    def is_int(self) -> bool:
        """Part of torch's interface of nodes."""
        return False

    is_float = is_nested_int = is_symbolic = is_int

    def maybe_as_bool(self) -> bool:
        """Return the answer."""
        return self.value

    bool_ = constant_bool = maybe_as_bool

    def guard_bool(self, _file: str, _line: int) -> bool:
        """Return the answer."""
        return self.value

    expect_true = guard_or_false = guard_or_true = guard_size_oblivious = statically_known_true = guard_bool

    def clone(self) -> AgreedBool:
        """Return itself: it is immutable."""
        return self

    def _str(self) -> str:
        return str(self.value)

    __str__ = __repr__ = _graph_repr = _str

    def wrap_bool(self, value: bool) -> AgreedBool:
        """Return the node for the other side of a combination."""
        return AgreedBool(value)

    def sym_not(self) -> AgreedBool:
        """Return the node of the other answer."""
        return AgreedBool(not self.value)

    not_ = sym_not

    def sym_and(self, other: Any) -> Any:
        """Combine as Python's `and`."""
        return other if self.value else self

    and_ = sym_and

    def sym_or(self, other: Any) -> Any:
        """Combine as Python's `or`."""
        return self if self.value else other

    or_ = sym_or


class PerRankBool:
    """Node of a SymBool that is true on some ranks and false on others. A branch on it raises.

    Where torch asks for a hint only (is a tensor of no elements contiguous?), it gets the answer that it uses for
    unknown sizes.
    """

    __slots__ = ("long_way", "what")

    def __init__(self, what: str, long_way: bool | None = None) -> None:
        self.what, self.long_way = what, long_way

    def is_bool(self) -> bool:
        """Part of torch's interface of nodes."""
        return True

    def is_int(self) -> bool:
        """Part of torch's interface of nodes."""
        return False

    is_float = is_nested_int = is_symbolic = is_constant = has_hint = is_int

    def maybe_as_bool(self) -> None:
        """Return None: there is no single answer."""

    def clone(self) -> PerRankBool:
        """Return itself: it is immutable."""
        return self

    def _str(self) -> str:
        return self.what

    __str__ = __repr__ = _graph_repr = _str

    def wrap_bool(self, value: bool) -> AgreedBool:
        """Return the node for the other side of a combination."""
        return AgreedBool(value)

    def sym_not(self) -> PerRankBool:
        """Return itself: the negation differs by rank as well."""
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

    def _decided(self, *, torchs: bool) -> bool:
        if torchs and self.long_way is not None:
            return self.long_way
        raise RankDependentError(self.what, "is true on some ranks and false on others")

    expect_true = guard_bool

    def guard_or_false(self, _file: str, _line: int) -> bool:
        """Return the answer for unknown sizes."""
        return False

    def guard_size_oblivious(self, _file: str, _line: int) -> bool:
        """Return the answer for unknown sizes."""
        return False

    def guard_or_true(self, _file: str, _line: int) -> bool:
        """Return the answer for unknown sizes."""
        return True

    def statically_known_true(self, _file: str, _line: int) -> bool:
        """Return the answer for unknown sizes."""
        return False


for _kind in (
    PerRankInt,
    PerRankFloat,
    AgreedBool,
    PerRankBool,
):  # torch's C++ asks for it; inside a class it would hide Python's own
    setattr(_kind, "str", _kind._str)  # noqa: B010  (mypy knows of no such attribute)


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
