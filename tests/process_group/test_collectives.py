"""Matrix of collectives: collective x dtype x group x layout x sync or async x world size, against reference.py.

One test is one (collective, world size, dtype). Its cells run in one call of the pool, and a failure names the cell.
A refused call is a cell too. Point-to-point operations, objects and works have their own files.
"""

from __future__ import annotations

import datetime
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from monarch_backend import CollectiveArgumentError
from monarch_backend.process_group import _cpu_validation
from monarch_backend.process_group._integer_mean import INTEGERS
from tests.process_group import reference
from tests.support.ranks import run_ranks

# torch 2.13 introduced these names and deprecates the old ones.
ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

WORLD_SIZES = (1, 2, 4)
# torch sorts the ranks of a group. The lists are unsorted because a caller may pass any order.
GROUPS: dict[int, dict[str, list[int] | None]] = {
    1: {"default": None},
    2: {"default": None, "all": [1, 0], "one": [1]},
    4: {"default": None, "all": [3, 1, 0, 2], "all but the last": [2, 1, 0], "two": [3, 1]},
}

# A layout other than "contiguous" applies to the inputs or to the outputs, never to both.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "contiguous": ((7,), (0,), (1,), (), (3, 5), (4099,), (2, 0, 3)),
    "offset in": ((7,), (3, 5)),
    "offset out": ((3, 5), (1,)),
    "strided in": ((7,), (3, 5)),
    "strided out": ((3, 5), (7,)),
    "transposed in": ((3, 5),),
    "transposed out": ((5, 3),),
}

_made: dict[str, Any] = {}


def _group(name: str) -> Any:
    """Return the group with this name, made once in each rank, or None on a rank outside it."""
    if name not in _made:
        for each, ranks in GROUPS[dist.get_world_size()].items():
            group = dist.group.WORLD if ranks is None else dist.new_group(ranks)
            inside = ranks is None or dist.get_rank() in ranks
            _made[each] = group if inside else None
    return _made[name]


@dataclass
class Cell:
    """One call of one collective, on one rank."""

    collective: str
    dtype: str
    group_name: str
    layout: str
    shape: tuple[int, ...]
    asynchronous: bool
    op: str
    number: int
    gaps: list[Tensor] = field(default_factory=list)

    def __str__(self) -> str:
        how = "async" if self.asynchronous else "sync"
        return (
            f"{self.collective}({self.op or '-'}) {self.dtype}{list(self.shape)}, {self.layout}, {how}, "
            f"group {self.group_name!r}"
        )

    @property
    def group(self) -> Any:
        return _group(self.group_name)

    @property
    def me(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def root(self) -> int:
        """The root as a rank of the group. It differs between cells."""
        return self.number % self.size

    @property
    def global_root(self) -> int:
        return dist.get_process_group_ranks(self.group)[self.root]

    def inputs(self, shape: Sequence[int] | None = None, salt: int = 0) -> list[Tensor]:
        """Return the inputs of all ranks of the group."""
        make = reference.factors if self.op else reference.values
        wanted = self.shape if shape is None else shape
        return [make(rank, self.dtype, tuple(wanted), salt + self.number % 3) for rank in range(self.size)]

    def put(self, tensor: Tensor, side: str) -> Tensor:
        """Return the values in the cell's layout if the layout applies to this ``side`` ("in" or "out"), else as a
        copy.
        """
        kind, _, about = self.layout.partition(" ")
        if about != side:
            return tensor.clone()
        if kind == "offset":
            memory = torch.ones(tensor.numel() + 3).to(tensor.dtype)
            self.gaps.append(memory[:3])
            placed = memory[3:].view(tensor.shape)
        elif kind == "strided":
            memory = torch.ones(*tensor.shape, 2).to(tensor.dtype)
            self.gaps.append(memory[..., 1])
            placed = memory[..., 0]
        else:
            memory = torch.ones(tensor.shape[::-1]).to(tensor.dtype)
            placed = memory.permute(*reversed(range(tensor.dim())))
        return placed.copy_(tensor)

    def blank(self, shape: Sequence[int] | None = None) -> Tensor:
        """Return an output tensor that contains none of the expected values."""
        wanted = self.shape if shape is None else shape
        return self.put(torch.zeros(wanted).to(getattr(torch, self.dtype)), "out")

    def call(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self.op:
            kwargs["op"] = getattr(dist.ReduceOp, self.op)
        with warnings.catch_warnings():
            # torch deprecates all_gather_coalesced and all_reduce_coalesced.
            warnings.filterwarnings("ignore", r".*_coalesced.* will be deprecated", FutureWarning)
            work = collective(*args, group=self.group, async_op=self.asynchronous, **kwargs)
        if self.asynchronous:
            work.wait()
        else:
            assert work is None


Pairs = list[tuple[Tensor, Tensor]]


# The collectives: each function makes tensors, calls the collective and returns pairs (got, expected) ----------


def _broadcast(cell: Cell) -> Pairs:
    inputs = cell.inputs()
    x = cell.put(inputs[cell.me], "in")
    cell.call(dist.broadcast, x, cell.global_root)
    return [(x, inputs[cell.root])]


def _all_reduce(cell: Cell) -> Pairs:
    inputs = cell.inputs()
    x = cell.put(inputs[cell.me], "in")
    cell.call(dist.all_reduce, x)
    return [(x, reference.reduced(cell.op, inputs))]


def _all_reduce_coalesced(cell: Cell) -> Pairs:
    first, second = cell.inputs(), cell.inputs((2, 3), salt=1)
    x, y = cell.put(first[cell.me], "in"), second[cell.me].clone()
    cell.call(dist.all_reduce_coalesced, [x, y])
    return [(x, reference.reduced(cell.op, first)), (y, reference.reduced(cell.op, second))]


def _reduce(cell: Cell) -> Pairs:
    inputs = cell.inputs()
    x = cell.put(inputs[cell.me], "in")
    cell.call(dist.reduce, x, cell.global_root)
    return [(x, reference.reduced(cell.op, inputs))] if cell.me == cell.root else []


def _all_gather(cell: Cell) -> Pairs:
    inputs = cell.inputs()
    x, outputs = cell.put(inputs[cell.me], "in"), [cell.blank() for _ in inputs]
    cell.call(dist.all_gather, outputs, x)
    return [(x, inputs[cell.me]), *zip(outputs, inputs, strict=True)]


def _all_gather_into_tensor(cell: Cell, stacked: bool) -> Pairs:
    inputs = cell.inputs()
    join = torch.stack if stacked or not cell.shape else torch.cat
    want = join(inputs)
    x, output = cell.put(inputs[cell.me], "in"), cell.blank(want.shape)
    cell.call(ALL_GATHER_SINGLE, output, x)
    return [(x, inputs[cell.me]), (output, want)]


def _all_gather_coalesced(cell: Cell) -> Pairs:
    first, second = cell.inputs(), cell.inputs((2, 3), salt=1)
    outputs = [[cell.blank(), cell.blank((2, 3))] for _ in first]
    cell.call(dist.all_gather_coalesced, outputs, [cell.put(first[cell.me], "in"), second[cell.me]])
    got = [t for row in outputs for t in row]
    return list(zip(got, itertools.chain(*zip(first, second, strict=True)), strict=True))


def _gather(cell: Cell) -> Pairs:
    inputs = cell.inputs()
    x = cell.put(inputs[cell.me], "in")
    outputs = [cell.blank() for _ in inputs] if cell.me == cell.root else []
    cell.call(dist.gather, x, outputs or None, dst=cell.global_root)
    return [(x, inputs[cell.me]), *zip(outputs, inputs, strict=False)]


def _scatter(cell: Cell) -> Pairs:
    rows = cell.inputs()
    given = [cell.put(row, "in") for row in rows] if cell.me == cell.root else []
    output = cell.blank()
    cell.call(dist.scatter, output, given or None, src=cell.global_root)
    return [(output, rows[cell.me]), *zip(given, rows, strict=False)]


def _reduce_scatter(cell: Cell) -> Pairs:
    rows = [cell.inputs(salt=to) for to in range(cell.size)]  # rows[to][rank]
    given = [cell.put(row[cell.me], "in") for row in rows]
    output = cell.blank()
    cell.call(dist.reduce_scatter, output, given)
    kept = [(tensor, row[cell.me]) for tensor, row in zip(given, rows, strict=True)]
    return [(output, reference.reduced(cell.op, rows[cell.me])), *kept]


def _reduce_scatter_tensor(cell: Cell, stacked: bool) -> Pairs:
    rows = [cell.inputs(salt=to) for to in range(cell.size)]
    join = torch.stack if stacked or not cell.shape else torch.cat
    mine = join([row[cell.me] for row in rows])
    x, output = cell.put(mine, "in"), cell.blank()
    cell.call(REDUCE_SCATTER_SINGLE, output, x)
    return [(output, reference.reduced(cell.op, rows[cell.me])), (x, mine)]


def _all_to_all(cell: Cell) -> Pairs:
    rows = [cell.inputs(salt=to) for to in range(cell.size)]  # rows[to][rank]
    sent = [[rows[to][rank] for to in range(cell.size)] for rank in range(cell.size)]
    given, outputs = [cell.put(t, "in") for t in sent[cell.me]], [cell.blank() for _ in rows]
    cell.call(dist.all_to_all, outputs, given)
    return [
        *zip(outputs, reference.exchanged(sent, cell.me), strict=True),
        *zip(given, sent[cell.me], strict=True),
    ]


def _all_to_all_single(cell: Cell, uneven: bool) -> Pairs:
    sizes = [reference.split_sizes(r, cell.size) if uneven else [1] * cell.size for r in range(cell.size)]
    whole = [cell.inputs((sum(sizes[rank]), *cell.shape))[rank] for rank in range(cell.size)]
    sent = [list(torch.split(tensor, split)) for tensor, split in zip(whole, sizes, strict=True)]
    want = torch.cat(reference.exchanged(sent, cell.me))
    x, output = cell.put(whole[cell.me], "in"), cell.blank(want.shape)
    splits = ([row[cell.me] for row in sizes], sizes[cell.me]) if uneven else ()
    cell.call(dist.all_to_all_single, output, x, *splits)
    return [(output, want), (x, whole[cell.me])]


IN_PLACE = {"broadcast", "all_reduce", "all_reduce_coalesced", "reduce"}
COLLECTIVES: dict[str, Callable[[Cell], Pairs]] = {
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": lambda cell: _all_gather_into_tensor(cell, stacked=False),
    "all_gather_into_tensor stacked": lambda cell: _all_gather_into_tensor(cell, stacked=True),
    "all_gather_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": lambda cell: _reduce_scatter_tensor(cell, stacked=False),
    "reduce_scatter_tensor stacked": lambda cell: _reduce_scatter_tensor(cell, stacked=True),
    "all_to_all": _all_to_all,
    "all_to_all_single": lambda cell: _all_to_all_single(cell, uneven=False),
    "all_to_all_single uneven": lambda cell: _all_to_all_single(cell, uneven=True),
}


# Refused calls ------------------------------------------------------------------------------------------------


def _refused(cell: Cell) -> tuple[str, ...]:
    """Return words that the error of this cell must contain, or nothing if the cell must succeed."""
    if cell.op and not reference.reduces(cell.dtype, cell.op):
        if cell.dtype in reference.COMPLEX:
            return ("complex",)
        if cell.dtype in reference.GLOO_MOVES and reference.on_gloo():
            return (cell.op, cell.dtype, "bfloat16", "int64", "bool", "complex")
        return (cell.op, cell.dtype, "bfloat16" if cell.op == "AVG" else "int64")
    works = cell.layout.startswith(("contiguous", "offset")) or _takes_strides(cell)
    return () if works else ("not contiguous", "strides", ".contiguous()")


def _takes_strides(cell: Cell) -> bool:
    """Gloo copies the tensors of some collectives. For the others it would ignore strides and access other memory."""
    name = cell.collective.split()[0]
    if name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        return True
    if name in ("scatter", "reduce_scatter"):
        return cell.layout.endswith(" in")
    # In-place collectives accept transposed tensors, because all ranks have the same memory layout.
    in_place = name in ("broadcast", "all_reduce", "reduce") and cell.layout.startswith("transposed")
    return in_place or name in ("all_gather", "gather", "all_to_all", "all_gather_coalesced", "all_reduce_coalesced")


def _cells(collective: str, dtype: str, world_size: int) -> Iterator[Cell]:
    """Yield all cells for the default group. Other groups alternate shapes, and sync with async, for every layout."""
    numbers = itertools.count()
    for (turn, group), (layout, shapes) in itertools.product(enumerate(GROUPS[world_size]), SHAPES.items()):
        if layout.endswith(" out") and collective in IN_PLACE:
            continue
        some = shapes if group == "default" else (shapes[0], *shapes[turn : turn + 1])
        for shape in some:
            number = next(numbers)
            for asynchronous in (False, True) if group == "default" else ((number + turn) % 2 == 0,):
                for op in _ops(collective, dtype, layout, shape, number):
                    yield Cell(collective, dtype, group, layout, shape, asynchronous, op, number)


def _ops(collective: str, dtype: str, layout: str, shape: tuple[int, ...], number: int) -> Sequence[str]:
    """Return all ops, supported or not, for one shape. For other shapes, return one supported op."""
    if "reduce" not in collective:
        return [""]
    if layout == "contiguous" and shape == (7,):
        return reference.OPS
    works = [op for op in reference.OPS if reference.reduces(dtype, op)]
    return [works[number % len(works)]] if works else []


def _run_cell(cell: Cell) -> str:
    """Run one cell. Return a description of the failure on this rank, or an empty string."""
    words = _refused(cell)
    if words and cell.collective == "gather" and cell.layout.endswith(" out") and cell.me != cell.root:
        return ""  # only the root has an output to refuse, and the root does not gather
    try:
        pairs = COLLECTIVES[cell.collective](cell)
    except CollectiveArgumentError as error:
        missing = [word for word in words if word not in str(error)]
        return f"refused: {error}" if missing or not words else ""
    except ValueError as error:
        # torch refuses some reductions of complex before it calls a backend.
        return "" if words == ("complex",) and "complex" in str(error) else f"refused: {error!r}"
    except RuntimeError as error:
        return f"failed: {error!r}"
    if words:
        return f"worked; the refusal should have said {words}"
    wrong = [
        f"tensor {i}: got {got.tolist()}, want {want.tolist()}"
        for i, (got, want) in enumerate(pairs)
        if not reference.same(got, want)
    ]
    if any(not reference.same(gap, torch.ones(gap.shape).to(gap.dtype)) for gap in cell.gaps):
        wrong.append("wrote between the elements of a tensor")
    return "; ".join(wrong)[:500]


def _run_cells(rank: int, collective: str, dtype: str) -> tuple[int, list[str]]:
    count, failures = 0, []
    for cell in _cells(collective, dtype, dist.get_world_size()):
        if cell.group is not None:
            count += 1
            wrong = _run_cell(cell)
            if wrong:
                failures.append(f"rank {rank}: {cell}: {wrong}")
    x = torch.ones(3)
    dist.all_reduce(x)  # the group still works after all refusals
    assert x.tolist() == [float(dist.get_world_size())] * 3
    return count, failures


DTYPES_OF_FOUR_RANKS = {"float32", "bfloat16", "int64", "bool", "complex64"}  # other dtypes are slow tests


@pytest.mark.parametrize(("world_size", "dtype"), [
    pytest.param(size, dtype, marks=pytest.mark.slow if size == 4 and dtype not in DTYPES_OF_FOUR_RANKS else ())
    for size in WORLD_SIZES
    for dtype in reference.DTYPES
])  # fmt: skip
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_collective(pool, collective: str, world_size: int, dtype: str) -> None:
    answers = pool(world_size).run(_run_cells, collective, dtype)
    failures = [text for _, texts in answers for text in texts]
    assert all(count > 10 for count, _ in answers)
    assert not failures, f"{len(failures)} cells failed; the first:\n" + "\n".join(failures[:8])


# Collectives outside the matrix ---------------------------------------------------------------------------------


def _barriers(rank: int, world_size: int) -> None:
    """Each rank writes a key before a barrier, and must find the keys of all ranks after it."""
    for turn, (name, asynchronous) in enumerate(itertools.product(GROUPS[world_size], ("sync", "async", "monitored"))):
        group = _group(name)
        if group is None:
            continue
        store, run = group.get_group_store(), _runs(group)
        store.set(f"barrier/{run}/{turn}/{group.rank()}", "here")
        if asynchronous == "monitored":
            dist.monitored_barrier(group, datetime.timedelta(seconds=20), wait_all_ranks=turn % 2 == 0)
        else:
            work = dist.barrier(group, async_op=asynchronous == "async")
            assert (work is None) == (asynchronous == "sync")
            if work is not None:
                work.wait()
        assert store.check([f"barrier/{run}/{turn}/{member}" for member in range(group.size())])


def _runs(group: Any) -> int:
    """Count this rank's calls with the group. The store of a pool is older than the test and has earlier keys."""
    group.barrier_runs = getattr(group, "barrier_runs", 0) + 1
    return group.barrier_runs


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_barrier(pool, world_size: int) -> None:
    pool(world_size).run(_barriers, world_size)


def _missing_at_barrier(rank: int) -> None:
    if rank == 1:
        dist.group.WORLD.get_group_store().wait(["given up"], datetime.timedelta(seconds=30))
        return
    with pytest.raises(RuntimeError, match=r"[Rr]ank 1"):
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.5))
    dist.group.WORLD.get_group_store().set("given up", "1")


def test_monitored_barrier_names_the_missing_rank() -> None:
    run_ranks(_missing_at_barrier, 2)


def _sparse(rank: int) -> None:
    size = dist.get_world_size()
    place = torch.tensor([[rank, rank + 1], [0, 1]])
    mine = torch.sparse_coo_tensor(place, torch.tensor([1.0, 2.0]), (size + 1, 2), check_invariants=True)
    dist.all_reduce(mine)
    want = torch.zeros(size + 1, 2)
    want[:size, 0] += 1.0
    want[1:, 1] += 2.0
    assert mine.is_sparse
    assert torch.equal(mine.to_dense(), want)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_sparse_all_reduce(pool, world_size: int) -> None:
    pool(world_size).run(_sparse)


def _channels_last(rank: int) -> None:
    inputs = [reference.values(r, "float32", (2, 3, 4, 5)) for r in range(dist.get_world_size())]
    x = inputs[rank].contiguous(memory_format=torch.channels_last)
    dist.all_reduce(x)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(x, reference.reduced("SUM", inputs))
    y = inputs[rank].contiguous(memory_format=torch.channels_last)
    dist.broadcast(y, 1)
    assert torch.equal(y, inputs[1])


def test_channels_last(pool) -> None:
    pool(2).run(_channels_last)


def _zero_dimensions(rank: int) -> None:
    with pytest.raises(CollectiveArgumentError, match="no dimensions"):
        dist.all_to_all_single(torch.ones(()), torch.ones(()))


def test_all_to_all_single_without_rows_is_refused(pool) -> None:
    pool(2).run(_zero_dimensions)


def _bool_sums(rank: int) -> None:
    """Bytes of summed bools are 0 or 1. Gloo would add the bytes, so 256 times True would be False."""
    x = torch.tensor([True, rank == 0, False])
    dist.all_reduce(x)
    assert x.view(torch.uint8).tolist() == [1, 1, 0]
    options = dist.AllreduceOptions()
    dist.group.WORLD.allreduce([torch.tensor([True])], options).wait()
    assert options.reduceOp == dist.ReduceOp.SUM  # the call does not change the caller's options


def test_sum_of_bools_is_bool(pool) -> None:
    pool(4).run(_bool_sums)


# Table of process_group/_cpu_validation.py against torch's Gloo --------------------------------------------------


def _real_gloo(rank: int, address: str) -> dict[str, dict[str, bool]]:
    """Return dtype -> op or "move" -> whether Gloo supports it, by calls to Gloo without our group."""
    store = dist.FileStore(address.removeprefix("file://"), 2)
    gloo = dist.ProcessGroupGloo(store, rank, 2, datetime.timedelta(seconds=10))
    names = {n for n, d in vars(torch).items() if isinstance(d, torch.dtype) and str(d) == f"torch.{n}"}
    # complex32 is left out: torch warns that it is experimental.
    names = {name for name in names if not name.endswith("complex32")}
    table: dict[str, dict[str, bool]] = {}
    for name in sorted(names):
        try:
            x = torch.ones(4).to(getattr(torch, name))
        except (RuntimeError, NotImplementedError):
            continue  # quantized and sub-byte dtypes have no plain tensors
        table[name] = {op: _gloo_reduces(gloo, x, op) for op in reference.OPS}
        outputs = [torch.empty_like(x), torch.empty_like(x)]
        table[name]["move"] = _works(lambda x=x, outputs=outputs: gloo.allgather([outputs], [x]).wait())
    gloo.shutdown()
    return table


def _gloo_reduces(gloo: Any, x: Tensor, op: str) -> bool:
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, op)
    return _works(lambda: gloo.allreduce([x.clone()], options).wait())


def _works(call: Callable[[], Any]) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True


def test_table_of_gloo_is_torchs(monkeypatch) -> None:
    """Fails when torch adds or removes a dtype or an op. Then update _cpu_validation.py and reference.py."""
    monkeypatch.setenv("MONARCH_SHM", "0")  # reference.py reads this variable
    table, other = run_ranks(_real_gloo, 2, backend=None)
    assert table == other
    assert {*reference.DTYPES} <= {*table}
    for name, can in table.items():
        dtype = getattr(torch, name)
        able = _cpu_validation.REDUCIBLE
        ours = {
            "move": dtype in able,
            **{op: dtype in able and dtype in _cpu_validation.taken_by(op, able) for op in reference.OPS},
        }
        if dtype.is_complex:  # both sides add pairs of floats
            ours.update(SUM=True, AVG=True)
        if dtype in INTEGERS and dtype in able:
            assert ours["AVG"]
            assert not can.pop("AVG"), f"torch's Gloo averages {name}: _cpu.integer_mean_as_sum has no use any more"
            can["AVG"] = True
        assert can == ours, f"torch's Gloo and our table differ on {name}"
        assert all(reference.reduces(name, op) == ours[op] for op in reference.OPS), f"reference.py differs on {name}"


def test_ops_of_the_cpu_route_are_torchs() -> None:
    """An op that torch adds must be in the table, or be refused by its name."""
    assert {*dist.ReduceOp.RedOpType.__members__} == {*_cpu_validation._OPS}
