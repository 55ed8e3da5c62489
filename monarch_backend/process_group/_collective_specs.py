"""Table of collectives: one row for each operation of torch's ProcessGroup.

Other modules of process_group read their columns at import or when a group is made, never in a call.
docs/guides/new-collective.md shows how a row is added. tests/process_group/test_collective_specs.py checks that each
row has a method, a route for each device and a reference result.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)


class Operation(NamedTuple):
    """Operation of the compiled core. Hierarchy's algorithm for "all_reduce" is its method `_all_reduce`."""

    name: str
    has_root: bool = False
    reduces: bool = False


# The rows of csrc/shm/operation.h: collective_traits, in the same order.
OPERATIONS = (
    Operation("barrier"),
    Operation("all_reduce", reduces=True),
    Operation("reduce", has_root=True, reduces=True),
    Operation("broadcast", has_root=True),
    Operation("all_gather"),
    Operation("gather", has_root=True),
    Operation("scatter", has_root=True),
    Operation("reduce_scatter", reduces=True),
    Operation("all_to_all"),
)
BARRIER, ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER, ALL_TO_ALL = range(len(OPERATIONS))


class Form(enum.Enum):
    """Arguments of a method before its options."""

    IN_PLACE = enum.auto()  # [tensor]
    IN_PLACE_LIST = enum.auto()  # [tensor, ...]
    PAIR = enum.auto()  # output, input
    PAIR_LIST = enum.auto()  # [output, ...], [input, ...]
    TO_LIST = enum.auto()  # [[output of each rank]], [input]
    TO_LISTS = enum.auto()  # [[output of each input], ...] for each rank, [input, ...]
    FROM_LIST = enum.auto()  # [output], [[input for each rank]]
    LISTS = enum.auto()  # [output of each rank], [input for each rank]
    EXCHANGE = enum.auto()  # output, input, rows from each rank, rows for each rank
    NOTHING = enum.auto()
    SEND = enum.auto()  # [tensor], rank, tag
    RECEIVE = enum.auto()  # [tensor], rank, tag

    @property
    def is_in_place(self) -> bool:
        """True if the first argument is read and written."""
        return self in (Form.IN_PLACE, Form.IN_PLACE_LIST)

    @property
    def is_point_to_point(self) -> bool:
        return self in (Form.SEND, Form.RECEIVE)

    @property
    def writes(self) -> bool:
        """True if the first argument is written."""
        return self not in (Form.NOTHING, Form.SEND)


_TENSORS, _OUTPUT, _INPUT = ("tensors", "tensor"), ("output", "outputTensor"), ("input", "inputTensor")
_LISTS = (("output_tensors", "output_tensor", "output"), ("input_tensors", "input_tensor", "input"))
ARGUMENTS = {
    Form.IN_PLACE: (_TENSORS,),
    Form.IN_PLACE_LIST: (_TENSORS,),
    Form.PAIR: (_OUTPUT, _INPUT),
    Form.PAIR_LIST: (("outputs",), ("inputs",)),
    Form.TO_LIST: _LISTS,
    Form.TO_LISTS: (("output_lists",), ("input_list",)),
    Form.FROM_LIST: _LISTS,
    Form.LISTS: _LISTS,
    Form.EXCHANGE: (_OUTPUT, _INPUT, ("output_split_sizes",), ("input_split_sizes",)),
    Form.NOTHING: (),
}
"""For each tensor argument, its names in c10d's list form and single-tensor form."""


class Overlap(enum.Enum):
    """Result of a call whose output shares memory with its input or with another output."""

    NONE = enum.auto()  # one tensor only
    SEPARATED = enum.auto()  # as if the outputs were private and copied back in order: `_overlap.separate...`
    READ_FIRST = enum.auto()  # inputs are copied first, in the order of the ranks: `_overlap.read_in_turn`
    REFUSED = enum.auto()  # CollectiveArgumentError: `_overlap.refuse`


@dataclass(frozen=True, kw_only=True)
class CollectiveSpec:
    """One collective.

    `keywords`: arguments that may replace the options.
    `operation`: index in `OPERATIONS`; None if the method calls other collectives or messages.
    `fast_path`: True if a fast path of the core may take calls before any Python code (csrc/shm/python/fast_paths.h).
    Messages have others: _shm/messages.py.
    `xla_remedy`: advice in the error if torch_xla's group lacks the collective.
    `xla_world_only`: True if torch_xla's group (2.9) is right only for a group of all ranks. Else it calls
    XLA for all ranks, or takes a rank of the group for a global rank.
    """

    name: str  # in torch.distributed and in errors
    methods: tuple[str, ...]  # of ProcessGroup, oldest release first; backends have the first
    form: Form
    operator: str = ""  # in torch.ops.c10d
    options: type | None = None
    keywords: tuple[str, ...] = ()
    operation: int | None = None
    overlap: Overlap = Overlap.NONE
    fast_path: bool = False
    range_name: str = ""  # in the profiler; by default the operation's
    xla_remedy: str = ""
    xla_world_only: bool = False

    @property
    def key(self) -> str:
        """Name of the row: the oldest method. Completion hooks get it as ``op_type``."""
        return self.methods[0]

    @property
    def reduces(self) -> bool:
        return self.operation is not None and OPERATIONS[self.operation].reduces

    @property
    def has_root(self) -> bool:
        return self.operation is not None and OPERATIONS[self.operation].has_root

    @property
    def profiler_name(self) -> str:
        """Name of the profiler's range, after the name of the route."""
        return self.range_name or OPERATIONS[self.operation or 0].name


COLLECTIVES = (
    # Reductions
    CollectiveSpec(
        name="all_reduce",
        methods=("allreduce",),
        operator="allreduce_",
        form=Form.IN_PLACE,
        options=AllreduceOptions,
        keywords=("op", "timeout"),
        operation=ALL_REDUCE,
        fast_path=True,
    ),
    CollectiveSpec(
        name="all_reduce_coalesced",
        methods=("allreduce_coalesced",),
        operator="allreduce_coalesced_",
        form=Form.IN_PLACE_LIST,
        options=AllreduceCoalescedOptions,
        operation=ALL_REDUCE,
        overlap=Overlap.SEPARATED,
        xla_remedy="Call all_reduce for each tensor; XLA fuses them.",
    ),
    CollectiveSpec(
        name="reduce",
        methods=("reduce",),
        operator="reduce_",
        form=Form.IN_PLACE,
        options=ReduceOptions,
        keywords=("root", "op", "timeout"),
        operation=REDUCE,
        fast_path=True,
        xla_world_only=True,
    ),
    CollectiveSpec(
        name="reduce_scatter",
        methods=("reduce_scatter",),
        operator="reduce_scatter_",
        form=Form.FROM_LIST,
        options=ReduceScatterOptions,
        keywords=("op", "timeout"),
        operation=REDUCE_SCATTER,
        overlap=Overlap.READ_FIRST,
    ),
    CollectiveSpec(
        name="reduce_scatter_tensor",
        methods=("_reduce_scatter_base", "reduce_scatter_single"),
        operator="_reduce_scatter_base_",
        form=Form.PAIR,
        options=ReduceScatterOptions,
        operation=REDUCE_SCATTER,
        overlap=Overlap.SEPARATED,
        fast_path=True,
    ),
    CollectiveSpec(
        name="reduce_scatter_tensor",
        methods=("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        operator="reduce_scatter_tensor_coalesced_",
        form=Form.PAIR_LIST,
        options=ReduceScatterOptions,
        operation=REDUCE_SCATTER,
        overlap=Overlap.SEPARATED,
        xla_remedy="Call reduce_scatter_tensor for each tensor; XLA fuses them.",
    ),
    # Moves
    CollectiveSpec(
        name="broadcast",
        methods=("broadcast",),
        operator="broadcast_",
        form=Form.IN_PLACE,
        options=BroadcastOptions,
        keywords=("root", "timeout"),
        operation=BROADCAST,
        fast_path=True,
    ),
    CollectiveSpec(
        name="all_gather",
        methods=("allgather",),
        operator="allgather_",
        form=Form.TO_LIST,
        options=AllgatherOptions,
        keywords=("timeout",),
        operation=ALL_GATHER,
        overlap=Overlap.SEPARATED,
        fast_path=True,
    ),
    CollectiveSpec(
        name="all_gather_coalesced",
        methods=("allgather_coalesced",),
        operator="allgather_coalesced_",
        form=Form.TO_LISTS,
        options=AllgatherOptions,
        operation=ALL_GATHER,
        overlap=Overlap.SEPARATED,
    ),
    CollectiveSpec(
        name="all_gather_into_tensor",
        methods=("_allgather_base", "all_gather_single"),
        operator="_allgather_base_",
        form=Form.PAIR,
        options=AllgatherOptions,
        operation=ALL_GATHER,
        overlap=Overlap.SEPARATED,
        fast_path=True,
    ),
    CollectiveSpec(
        name="all_gather_into_tensor",
        methods=("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        operator="allgather_into_tensor_coalesced_",
        form=Form.PAIR_LIST,
        options=AllgatherOptions,
        operation=ALL_GATHER,
        overlap=Overlap.SEPARATED,
        xla_remedy="Call all_gather_into_tensor for each tensor; XLA fuses them.",
    ),
    CollectiveSpec(
        name="gather",
        methods=("gather",),
        operator="gather_",
        form=Form.TO_LIST,
        options=GatherOptions,
        keywords=("root", "timeout"),
        operation=GATHER,
        overlap=Overlap.SEPARATED,
        xla_world_only=True,
    ),
    CollectiveSpec(
        name="gather_single",  # torch 2.14 and later
        methods=("gather_single",),
        form=Form.PAIR,
        options=GatherOptions,
        overlap=Overlap.SEPARATED,
        xla_remedy="Use gather.",
    ),
    CollectiveSpec(
        name="scatter",
        methods=("scatter",),
        operator="scatter_",
        form=Form.FROM_LIST,
        options=ScatterOptions,
        keywords=("root", "timeout"),
        operation=SCATTER,
        overlap=Overlap.SEPARATED,
        xla_world_only=True,
    ),
    CollectiveSpec(
        name="all_to_all",
        methods=("alltoall",),
        operator="alltoall_",
        form=Form.LISTS,
        options=AllToAllOptions,
        operation=ALL_TO_ALL,
        overlap=Overlap.SEPARATED,
        xla_world_only=True,
    ),
    CollectiveSpec(
        name="all_to_all_single",
        methods=("alltoall_base", "all_to_all_single"),
        operator="alltoall_base_",
        form=Form.EXCHANGE,
        options=AllToAllOptions,
        keywords=("timeout",),
        operation=ALL_TO_ALL,
        overlap=Overlap.REFUSED,
        fast_path=True,
        xla_world_only=True,
    ),
    # Barriers and messages
    CollectiveSpec(
        name="barrier",
        methods=("barrier",),
        operator="barrier",
        form=Form.NOTHING,
        options=BarrierOptions,
        keywords=("timeout",),
        operation=BARRIER,
        fast_path=True,
    ),
    CollectiveSpec(
        name="monitored_barrier",
        methods=("monitored_barrier",),
        form=Form.NOTHING,
        xla_remedy="Use a CPU barrier: call it without device_ids.",
    ),
    CollectiveSpec(
        name="send",
        methods=("send",),
        operator="send",
        form=Form.SEND,
        range_name="send",
        xla_world_only=True,
    ),
    CollectiveSpec(
        name="recv",
        methods=("recv",),
        operator="recv_",
        form=Form.RECEIVE,
        range_name="recv",
        xla_world_only=True,
    ),
    CollectiveSpec(
        name="recv",
        methods=("recv_anysource",),
        operator="recv_any_source_",
        form=Form.RECEIVE,
        range_name="recvAnySource",
        xla_remedy="Name the source rank.",
    ),
)

BY_METHOD = {method: spec for spec in COLLECTIVES for method in spec.methods}
BY_OPERATOR = {spec.operator: spec for spec in COLLECTIVES if spec.operator}


def with_fast_path() -> Iterator[tuple[str, CollectiveSpec]]:
    """Yield each method that a fast path may replace, with its row."""
    return ((method, spec) for spec in COLLECTIVES if spec.fast_path for method in spec.methods)
