"""Messages between controller and workers: batches of definitions and commands.

A batch is msgpack of ``[definitions, words]``. A command (in csrc/ a record) consists of words: a signature's number,
the number of the program's place that issued it, the ids of the operands, the ids of the results. Floats are operands,
too, in place of ids.

A *definition* is sent once, before its first use. It describes a signature (its function and arguments), one that
differs by rank, or a process group. Constants in it are tagged lists of plain values; a value without a tag is pickled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from monarch_backend._serialization.pickling import dumps_in_band, loads
from monarch_backend.dtensor._per_rank import per_rank_int

DELETE = 0
"""Signature of the command ``[DELETE, count, *ids]``, which deletes tensors."""
FORGET = -1
"""Signature of the command ``[FORGET, count, *numbers]``: no later command has one of these signatures."""
COLLECTIVES = ("_c10d_functional.", "_dtensor.shard_dim_alltoall")
"""Prefixes of the names of operators in which ranks wait for each other."""
COLLECTIVE_NAMESPACES = (*COLLECTIVES, "monarch_backend.dtensor._worker.collectives:")
"""Functions in which ranks wait for each other."""
FIRST = 1
"""The number of the first defined signature."""


class Define(enum.IntEnum):
    """The first word of a definition."""

    SIGNATURE = 0
    BY_RANK = 1
    GROUP = 2
    GRAPH = 3
    OPERATOR = 4
    """A custom operator's name, and the Python module that registers it."""


class Tag(enum.IntEnum):
    """The first word of a constant, or of a place: ``[OPERAND, i]`` is a tensor, ``[OPERAND, i, 1]`` a number."""

    OPERAND = 0
    LIST = 1
    BY_RANK = 2
    DTYPE = 3
    DEVICE = 4
    LAYOUT = 5
    MEMORY_FORMAT = 6
    COMPLEX = 7
    GROUP = 8
    PICKLED = 9
    FLOAT = 10


class Kind(enum.IntEnum):
    NONE = 0
    """No result: it changes operands, or its result is not used."""
    ONE = 1
    """A tensor."""
    MANY = 2
    """A sequence. An id of 0 stands for a value that is not a tensor, or that is not used."""


class Signature(NamedTuple):
    """Layout of the commands of one number. ``target``: an operator's name, or ``module:function``.

    ``writes``: operands that it changes. ``ins``: for a collective, shape and dtype of each operand, for ranks that
    take part without having it. ``orders``: the results' strides on the controller; empty if any strides are accepted.
    """

    number: int
    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    operands: int
    kind: int
    results: int
    writes: list[int]
    ins: list[Any]
    orders: list[list[int] | None]


class Step(NamedTuple):
    """One operation of a graph. ``args``: as a signature's; [OPERAND, i] is value i of the graph.

    ``where``: the program's line. ``ins``: for a collective, shape and dtype of each tensor among its arguments.
    ``orders``: as a signature's.
    """

    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    where: str
    ins: list[Any] | None
    orders: list[list[int] | None]


class Graph(NamedTuple):
    """Layout of the commands of one captured step: many operations at once.

    Its values are the tensors of the command, then its numbers, then its random draws, then the result of each step.
    ``numbers``: for each the dtype that it has as a tensor, "" if it is not one. ``results``: the values that are
    returned. ``writes``, ``ins``: as a signature's. ``draws``: for each the arguments of ``drawn`` in
    _worker/random_ops.py.
    """

    number: int
    operands: int
    numbers: list[str]
    steps: list[Any]
    results: list[int]
    writes: list[int]
    ins: list[Any]
    inductor: bool
    draws: list[Any]


class Number(int):
    """An int that each command contains, as it does all floats."""


class RemoteRef:
    """Reference to a worker's tensor by its id, in the arguments of a message to workers."""

    def __init__(self, number: int) -> None:
        self.id = number


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


def name_of(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    return str(value).removeprefix("torch.")


def form(tensor: Any) -> list[Any]:
    """Return shape and dtype of a tensor, or of metadata, as messages have them."""
    return [list(tensor.shape), name_of(tensor.dtype)]


def place(value: Any, operand: Callable[[Any], int | None], group: Callable[[Any], str | None]) -> Any:
    """Return an argument as it is in a definition.

    ``operand``: function from an operand to its position. ``group``: function from a process group to its name.
    """
    if value is None or isinstance(value, bool) or type(value) is int:
        return value
    values = per_rank_int.values_of(value)
    if values is not None:
        return [Tag.BY_RANK, list(values)]
    at = operand(value)
    if at is not None:
        return [Tag.OPERAND, at, 1] if isinstance(value, (float, Number)) else [Tag.OPERAND, at]
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return [Tag.LIST, [place(each, operand, group) for each in value]]
    name = group(value)
    if name is not None:
        return [Tag.GROUP, name]
    return value if isinstance(value, str) else _constant(value)


def _constant(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return [Tag.DTYPE, name_of(value)]
    if isinstance(value, torch.device):
        return [Tag.DEVICE, value.type]
    if isinstance(value, torch.layout):
        return [Tag.LAYOUT, name_of(value)]
    if isinstance(value, torch.memory_format):
        return [Tag.MEMORY_FORMAT, name_of(value)]
    if isinstance(value, complex):
        return [Tag.COMPLEX, value.real, value.imag]
    if isinstance(value, float):
        return [Tag.FLOAT, value]
    return [Tag.PICKLED, dumps_in_band(value)]


def constant(tagged: list[Any], device: torch.device) -> Any:
    """Return the constant that `place` encoded. ``device``: the worker's own, which replaces any device of its type."""
    tag, *rest = tagged
    if tag in (Tag.DTYPE, Tag.LAYOUT, Tag.MEMORY_FORMAT):
        return getattr(torch, rest[0])
    if tag == Tag.DEVICE:
        return device if device.type == rest[0] else torch.device(rest[0])
    if tag == Tag.COMPLEX:
        return complex(*rest)
    if tag == Tag.FLOAT:
        return rest[0]
    if tag == Tag.PICKLED:
        return loads(rest[0], None)
    raise ValueError(f"a batch has the constant {tagged!r}, which this version cannot decode")
