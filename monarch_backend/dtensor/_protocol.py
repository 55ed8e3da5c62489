"""What controller and workers say to each other: batches of definitions and records.

A batch is msgpack of ``[definitions, words]``. A *record* is words only: a signature's number, the number of the place
in the program that issued it, the ids of the operands (or floats, which are operands, too), the ids of the results. A
*definition* is sent once, before its first use: a signature (which function, what stands where), one that differs by
rank, a process group. Constants in it are tagged lists of plain values; what has no tag is pickled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from monarch_backend._serialization.pickling import dumps_in_band, loads
from monarch_backend.dtensor._controller import per_rank_int

DELETE = 0
"""The signature of the record ``[DELETE, count, *ids]``."""
FORGET = -1
"""The signature of the record ``[FORGET, count, *numbers]``: no record comes that has one of these."""
COLLECTIVES = ("_c10d_functional.", "_dtensor.shard_dim_alltoall")
"""How the names of operators begin in which ranks wait for each other."""
MEETINGS = (*COLLECTIVES, "monarch_backend.dtensor._worker.collectives:")
"""And those of functions in which they do."""
FIRST = 1
"""The first number of a signature that is defined."""


class Define(enum.IntEnum):
    """The first word of a definition."""

    SIGNATURE = 0
    BY_RANK = 1
    GROUP = 2
    GRAPH = 3


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
    """What a signature's results are."""

    NONE = 0
    """Nothing: it changes operands, or its result is not wanted."""
    ONE = 1
    """A tensor."""
    MANY = 2
    """A sequence; an id of 0 is for what is no tensor, or nobody wants."""


class Signature(NamedTuple):
    """How a record of this number is to be read. ``target``: an operator's name, or ``module:function``.

    ``writes``: operands that it changes. ``ins``: of a collective, shape and dtype of each operand, for who must take
    part without having it. ``orders``: the results' strides, as the controller has them; none are asked for if empty.
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

    ``where``: the program's line. ``ins``: of a collective, shape and dtype of each tensor among its arguments.
    ``orders``: as a signature's.
    """

    target: str
    args: list[Any]
    kwargs: dict[str, Any]
    where: str
    ins: list[Any] | None
    orders: list[list[int] | None]


class Graph(NamedTuple):
    """How a record of this number is to be read: many operations at once, by value.

    Its values are the tensors of the record, then its numbers, then what it draws, then the result of each step.
    ``numbers``: for each the dtype that it has as a tensor, "" if it is none. ``results``: which values come back.
    ``writes``, ``ins``: as a signature's. ``draws``: for each the arguments of `worker/_random.py`'s ``drawn``.
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
    """An int that each record has of its own, as all floats are."""


class RemoteRef:
    """In the arguments of a message to workers: the tensor that they have under this id."""

    def __init__(self, number: int) -> None:
        self.id = number


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder().decode


def place(value: Any, operand: Callable[[Any], int | None], group: Callable[[Any], str | None]) -> Any:
    """As it stands in a definition. ``operand``: the position of what is one; ``group``: the name of what is one."""
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
        return [Tag.DTYPE, str(value).removeprefix("torch.")]
    if isinstance(value, torch.device):
        return [Tag.DEVICE, value.type]
    if isinstance(value, torch.layout):
        return [Tag.LAYOUT, str(value).removeprefix("torch.")]
    if isinstance(value, torch.memory_format):
        return [Tag.MEMORY_FORMAT, str(value).removeprefix("torch.")]
    if isinstance(value, complex):
        return [Tag.COMPLEX, value.real, value.imag]
    if isinstance(value, float):
        return [Tag.FLOAT, value]
    return [Tag.PICKLED, dumps_in_band(value)]


def constant(tagged: list[Any], device: torch.device) -> Any:
    """What `place` made of a constant. ``device``: the worker's own, which stands for any of its type."""
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
    raise ValueError(f"a batch has the constant {tagged!r}, which nobody here can read")
