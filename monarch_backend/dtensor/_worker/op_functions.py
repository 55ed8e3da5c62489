"""Functions that execute commands, made from the definitions of signatures.

Each is a `Call` of the compiled core (csrc/records/worker_execute.cpp). It executes some hundred thousand commands in a
second, so lookups are done once, at the definition.
"""

from __future__ import annotations

import importlib
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol

from monarch_backend._native import Call
from monarch_backend.dtensor._per_rank import output_strides
from monarch_backend.dtensor._protocol import COLLECTIVE_NAMESPACES, COLLECTIVES, Signature, Tag, constant
from monarch_backend.dtensor._torch_internals import fast_op_lookup
from monarch_backend.dtensor._worker import collectives, local_functions, torch_compat

Run = Callable[[dict[int, Any], list[Any], int], None]


class Function:
    """``run(tensors, words, i)`` executes the command at ``words[i]``, which has ``length`` words."""

    __slots__ = ("_floats", "call", "has_collectives", "is_collective", "length", "orders", "run", "signature")

    def __init__(self, signature: Signature, run: Run, call: Call | None = None) -> None:
        self.signature, self.run, self.call = signature, run, call
        self._floats = _floats(signature)
        self.length = 2 + signature.operands + signature.results
        self.is_collective = signature.target.startswith(COLLECTIVES)
        self.has_collectives = signature.target.startswith(COLLECTIVE_NAMESPACES)
        self.orders = signature.orders if call is not None and not self.has_collectives else []
        """Strides of its results, until they were compared once."""

    def operands(self, words: list[Any], i: int) -> list[Any]:
        """Return the command's tensors; 0, which is not a tensor's id, for an operand that is a number."""
        found = words[i + 2 : i + 2 + self.signature.operands]
        return [0 if at in self._floats else each for at, each in enumerate(found)] if self._floats else found

    def results(self, words: list[Any], i: int) -> list[int]:
        return words[i + 2 + self.signature.operands : i + self.length]

    def quick(self, tensors: dict[int, Any], words: list[Any], i: int) -> Call | None:
        """Return the compiled call for commands after this one, if only operands have to be checked and waited for."""
        if self.call is None or self.is_collective:
            return None
        self.call.function = fast_op_lookup.quickest(self.call.function, *self.call.given(tensors, words, i))
        return self.call

    def put_in_order(self, tensors: dict[int, Any], words: list[Any], i: int) -> None:
        """Put the results of the first command in order after its execution, and from then on all others'."""
        wrong = {
            at: order
            for at, (number, order) in enumerate(zip(self.results(words, i), self.orders, strict=True))
            if order is not None and output_strides.is_wrong(tensors.get(number), order)
        }
        self.orders = []
        if not wrong:
            return
        as_it_is = self.run

        def put(tensors: dict[int, Any], words: list[Any], i: int) -> None:
            results = self.results(words, i)
            for at, order in wrong.items():
                tensors[results[at]] = output_strides.ordered(tensors[results[at]], order)

        def run(tensors: dict[int, Any], words: list[Any], i: int) -> None:
            as_it_is(tensors, words, i)
            put(tensors, words, i)

        self.run, self.call = run, None
        put(tensors, words, i)

    def stand_in(self, tensors: dict[int, Any], words: list[Any], i: int) -> None:
        """Take part in its collective. ``tensors``: those of its operands."""
        self.run(tensors, words, i)
        operands = self.operands(words, i)
        for number in [*self.results(words, i), *(operands[at] for at in self.signature.writes)]:
            funcol.wait_tensor(tensors[number])


def skip(other: Function) -> Function:
    """Return a function of the same length that does nothing, for a rank that takes no part."""
    made = Function(other.signature, lambda _tensors, _words, _i: None)
    made.length = other.length
    made.is_collective = made.has_collectives = False
    return made


def refuse(signature: Signature, error: Exception) -> Function:
    """Return a function whose commands fail, such as for an operator that only the controller has."""

    def run(_tensors: dict[int, Any], _words: list[Any], _i: int) -> None:
        raise error

    return Function(signature, run)


def make(signature: Signature, rank: int, device: torch.device, group: Callable[[str], Any]) -> Function:
    """Return a signature's function. ``group``: maps the controller's name of a group to this worker's or None."""
    source = Source(rank, device, group)
    arguments = [source.argument(each) for each in [*signature.args, *signature.kwargs.values()]]
    names = tuple(signature.kwargs)
    call = Call(
        find(signature.target), arguments, names, signature.operands, signature.results, int(signature.kind),
        bool(signature.writes),
    )  # fmt: skip
    made = Function(signature, call.run, call)
    return skip(made) if source.is_absent else made


class Source:
    """Builder of calls, as Python code or as `Call` has them, with their constants."""

    def __init__(self, rank: int, device: torch.device, group: Callable[[str], Any]) -> None:
        self.constants: dict[str, Any] = {}
        self.is_absent = False  # from a group that a call is for
        self._rank, self.device, self.group = rank, device, group

    def call(self, target: str, args: list[Any], kwargs: dict[str, Any], operand: Callable[[int], str]) -> str:
        """Return an expression. ``operand``: function from an operand's position to its expression."""
        named = [f"{name}={self._expression(each, operand)}" for name, each in kwargs.items()]
        given = ", ".join([*(self._expression(each, operand) for each in args), *named])
        return f"{self._constant(find(target))}({given})"

    def _expression(self, place: Any, operand: Callable[[int], str]) -> str:
        if isinstance(place, list) and place[0] == Tag.OPERAND:
            return operand(place[1])
        if isinstance(place, list) and place[0] == Tag.LIST:
            return "[" + ", ".join(self._expression(each, operand) for each in place[1]) + "]"
        return self._constant(self._value(place))

    def argument(self, place: Any) -> tuple[str, Any]:
        if isinstance(place, list) and place[0] == Tag.OPERAND:
            return ("tensor" if len(place) == 2 else "number"), place[1]
        if isinstance(place, list) and place[0] == Tag.LIST:
            return "list", [self.argument(each) for each in place[1]]
        return "constant", self._value(place)

    def _value(self, place: Any) -> Any:
        if not isinstance(place, list):
            return place
        if place[0] == Tag.BY_RANK:
            return place[1][self._rank]
        if place[0] == Tag.GROUP:
            name = self.group(place[1])
            self.is_absent = self.is_absent or name is None
            return name
        return constant(place, self.device)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


def _floats(signature: Signature) -> set[int]:
    found = set()

    def look(place: Any) -> None:
        if isinstance(place, list):
            if place[0] == Tag.OPERAND and len(place) == 3:
                found.add(place[1])
            elif place[0] == Tag.LIST:
                for each in place[1]:
                    look(each)

    for each in [*signature.args, *signature.kwargs.values()]:
        look(each)
    return found


def find(target: str) -> Any:
    """Return an operator of torch, or a function by module and name."""
    if target in _REPLACED:
        return _REPLACED[target]
    module, _, name = target.partition(":")
    if name:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = inspect.getattr_static(found, part)
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
        return inspect.unwrap(found)
    if target.startswith("prims."):
        importlib.import_module("torch._inductor.inductor_prims")  # registers them
    importlib.import_module(_DEFINED_IN.get(target.split(".")[0], "torch"))
    found = _operator(target)
    return found if _adapted is None else _adapted(found)


def _operator(target: str) -> Any:
    get = operator.attrgetter(target)
    try:
        return get(torch.ops)
    except AttributeError as missing:
        module = _MODULES.get(target.rpartition(".")[0])
        remedy = (
            "put it into a module that workers can import, or import its module there before its first use: "
            'procs.run(importlib.import_module, "name").get()'
        )
        if module in (None, "__main__"):
            raise RuntimeError(f"this worker has no operator {target}: {remedy}") from missing
        try:
            importlib.import_module(module)
            return get(torch.ops)
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"this worker has no operator {target}, which {module} registers on the controller "
                f"({type(error).__name__}: {error}): {remedy}"
            ) from error


def note_module(name: str, module: str) -> None:
    """Keep the module that registers a custom operator, which this process may not have imported."""
    _MODULES[name] = module


def replace(targets: dict[str, Callable[..., Any]], adapted: Callable[[Any], Any]) -> None:
    """Set replacements that `find` returns for these targets, and a function that adapts operators."""
    global _adapted
    _REPLACED.update(targets)
    _adapted = adapted


_adapted: Callable[[Any], Any] | None = None
_MODULES: dict[str, str] = {}
"""Modules of the controller's custom operators, by the operator's name without its overload."""
_DEFINED_IN = {"fsdp": "torch.distributed.fsdp"}
"""Operators of torch that exist after an import."""
_REPLACED: dict[str, Callable[..., Any]] = {
    "_dtensor.shard_dim_alltoall.default": collectives.shard_dim_alltoall,
    "aten._weight_norm_interface.default": local_functions.weight_norm,
    "aten._weight_norm_interface_backward.default": local_functions.weight_norm_backward,
    **torch_compat.replaced(),
}
"""Replacements of operators that CPU groups lack or that fail for empty tensors, and of newer torch's functions."""
