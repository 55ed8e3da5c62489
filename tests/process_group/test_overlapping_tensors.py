"""Tensors of one call that share memory: a call gives Gloo's values, or raises before it moves data.

A cell is collective x layout x size x sync or async. A layout places the inputs and outputs of one call in one
vector. All cells of a world size run in one call of the pool. A Gloo group of the same ranks gives the expected
vector. If Gloo writes while it still reads, a cell expects the result of separate tensors, or the error.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

import monarch_backend
from monarch_backend import CollectiveArgumentError
from monarch_backend.process_group._errors import CollectiveTimeoutError
from tests.process_group import gloo as gloo_of_all_releases
from tests.process_group.test_hierarchical import ON, TWO_BY_TWO, three  # noqa: F401  # a fixture
from tests.support.hosts import Hosts, refusal, run_on_hosts
from tests.support.ranks import run_ranks

ALL_GATHER_SINGLE = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
REDUCE_SCATTER_SINGLE = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
ROOT = 1

Tensors = list[Tensor]


class Place(NamedTuple):
    """A rank's vector, in which a layout finds pieces of ``n`` elements."""

    memory: Tensor
    n: int
    rank: int
    size: int

    def piece(self, start: float, pieces: int = 1) -> Tensor:
        """Return ``pieces`` neighbouring pieces as one tensor. ``start`` counts pieces."""
        first = int(start * self.n)
        return self.memory[first : first + pieces * self.n]

    def row(self, start: float = 0, step: float = 1, count: int | None = None, pieces: int = 1) -> Tensors:
        return [self.piece(start + i * step, pieces) for i in range(self.size if count is None else count)]


# Layouts: name -> function from a place to (inputs, outputs) -------------------------------------------------------

Layout = Callable[[Place], tuple[Tensors, Tensors]]

# One piece on one side and a piece for each rank on the other side: all_gather and gather. With the sides swapped:
# scatter and reduce_scatter.
ONE_AND_ALL: dict[str, Layout] = {
    "own piece": lambda p: ([p.piece(p.rank)], p.row()),
    "another's piece": lambda p: ([p.piece((p.rank + 1) % p.size)], p.row()),
    "two half pieces": lambda p: ([p.piece(0.5)], p.row()),
    "one rank only": lambda p: ([p.piece(0.5 if p.rank == ROOT else 12)], p.row()),
}
LISTS_ONLY: dict[str, Layout] = {
    "one list entry repeated": lambda p: ([p.piece(8)], [p.piece(0)] * p.size),
    "list shifted by half": lambda p: ([p.piece(8)], p.row(step=0.5)),
    "list shifted back by half": lambda p: ([p.piece(8)], p.row(step=0.5)[::-1]),
    "input in a shifted list": lambda p: ([p.piece(1)], p.row(step=0.5)),
}
STRIDED: dict[str, Layout] = {
    "strided piece": lambda p: ([p.piece(0, 2)[::2]], p.row()),
    "strided list": lambda p: ([p.piece(0)], [p.piece(1 + r / 2, 2)[::2] for r in range(p.size)]),
}
IN_PLACE: dict[str, Layout] = {
    "repeated": lambda p: ([p.piece(0)] * 2, []),
    "three times": lambda p: ([p.piece(0)] * 3, []),
    "shifted by half": lambda p: (p.row(step=0.5, count=3), []),
    "strided": lambda p: ([p.piece(0, 2)[::2], p.piece(0.5)], []),
    "transposed": lambda p: ([p.memory[:16].view(4, 4), p.memory[:16].view(4, 4).t()], []),
    "one rank only": lambda p: ([p.piece(0), p.piece(0 if p.rank == 0 else 3)], []),
}
LISTS_OF_TWO: dict[str, Layout] = {
    "input repeated": lambda p: ([p.piece(0)] * 2, p.row(1, count=2 * p.size)),
    "output repeated": lambda p: (p.row(count=2), [p.piece(3)] * (2 * p.size)),
    "outputs shifted by half": lambda p: (p.row(count=2), p.row(2, 0.5, 2 * p.size)),
    "inputs in the outputs": lambda p: (p.row(0.5, count=2), p.row(count=2 * p.size)),
}
PAIRS: dict[str, Layout] = {
    "small repeated": lambda p: ([p.piece(0)] * 2, p.row(1, p.size, 2, p.size)),
    "large repeated": lambda p: (p.row(count=2), [p.piece(3, p.size)] * 2),
    "large shifted by half": lambda p: (p.row(count=2), p.row(2, 0.5, 2, p.size)),
    "large shifted by one": lambda p: (p.row(count=2), p.row(2, 1, 2, p.size)),
    "small in large": lambda p: (p.row(0.5, count=2), p.row(0, p.size, 2, p.size)),
    "small in the other large": lambda p: ([p.piece(p.size), p.piece(0)], p.row(0, p.size, 2, p.size)),
    "own pieces": lambda p: ([p.piece(p.rank), p.piece(p.size + p.rank)], p.row(0, p.size, 2, p.size)),
    "own piece of a large one used twice": lambda p: ([p.piece(p.rank), p.piece(9)], [p.piece(0, p.size)] * 2),
}
EXCHANGES: dict[str, Layout] = {
    "same lists": lambda p: (p.row(), p.row()),
    "lists shifted by one": lambda p: (p.row(), p.row(1)),
    "reversed": lambda p: (p.row(), p.row()[::-1]),
    "input repeated": lambda p: ([p.piece(0)] * p.size, p.row(1)),
    "output repeated": lambda p: (p.row(1), [p.piece(0)] * p.size),
    "outputs shifted by half": lambda p: (p.row(5), p.row(step=0.5)),
}
SINGLE_EXCHANGES: dict[str, Layout] = {
    "same": lambda p: ([p.piece(0, p.size)],) * 2,
    "shifted by one": lambda p: ([p.piece(0, p.size)], [p.piece(1, p.size)]),
    "shifted back by half": lambda p: ([p.piece(0.5, p.size)], [p.piece(0, p.size)]),
}


def _swapped(layouts: dict[str, Layout]) -> dict[str, Layout]:
    return {name: lambda p, layout=layout: layout(p)[::-1] for name, layout in layouts.items()}  # type: ignore[misc]


def _joined(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Replace the list of all ranks' pieces by one tensor."""
    return {name: lambda p, layout=layout: (layout(p)[0], [p.piece(0, p.size)]) for name, layout in layouts.items()}  # type: ignore[misc]


# Collectives -------------------------------------------------------------------------------------------------------

Call = Callable[[Tensors, Tensors, Any, bool], Any]


def _coalesced(collective: Callable[..., Any], group: Any, asynchronous: bool, calls: list[tuple[Any, ...]]) -> Any:
    with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
        for args in calls:
            collective(*args, group=group)
    return manager if asynchronous else None


def _at_root(tensors: Tensors) -> Tensors | None:
    return tensors if dist.get_rank() == ROOT else None


def _in_rows(outputs: Tensors) -> list[Tensors]:
    return [outputs[r : r + 2] for r in range(0, len(outputs), 2)]


CALLS: dict[str, tuple[Call, dict[str, Layout]]] = {
    "all_gather": (
        lambda i, o, g, a: dist.all_gather(o, i[0], group=g, async_op=a),
        {**ONE_AND_ALL, **LISTS_ONLY, **STRIDED},
    ),
    "gather": (
        lambda i, o, g, a: dist.gather(i[0], _at_root(o), ROOT, group=g, async_op=a),
        {**ONE_AND_ALL, **LISTS_ONLY, **STRIDED},
    ),
    "all_gather_into_tensor": (
        lambda i, o, g, a: ALL_GATHER_SINGLE(o[0], i[0], group=g, async_op=a),
        _joined(ONE_AND_ALL),
    ),
    "scatter": (
        lambda i, o, g, a: dist.scatter(o[0], _at_root(i), ROOT, group=g, async_op=a),
        _swapped({**ONE_AND_ALL, **LISTS_ONLY}),
    ),
    "reduce_scatter": (
        lambda i, o, g, a: dist.reduce_scatter(o[0], i, group=g, async_op=a),
        _swapped({**ONE_AND_ALL, **LISTS_ONLY}),
    ),
    "reduce_scatter_tensor": (
        lambda i, o, g, a: REDUCE_SCATTER_SINGLE(o[0], i[0], group=g, async_op=a),
        _swapped(_joined(ONE_AND_ALL)),
    ),
    "all_to_all": (lambda i, o, g, a: gloo_of_all_releases.all_to_all(o, i, group=g, async_op=a), EXCHANGES),
    "all_to_all_single": (
        lambda i, o, g, a: dist.all_to_all_single(o[0], i[0], group=g, async_op=a),
        SINGLE_EXCHANGES,
    ),
    "all_reduce_coalesced": (lambda i, _, g, a: dist.all_reduce_coalesced(i, group=g, async_op=a), IN_PLACE),
    "all_gather_coalesced": (
        lambda i, o, g, a: dist.all_gather_coalesced(_in_rows(o), i, group=g, async_op=a),
        LISTS_OF_TWO,
    ),
    "coalesced all_reduce": (lambda i, _, g, a: _coalesced(dist.all_reduce, g, a, [(x,) for x in i]), IN_PLACE),
    "coalesced all_gather": (
        lambda i, o, g, a: _coalesced(ALL_GATHER_SINGLE, g, a, list(zip(o, i, strict=True))),
        PAIRS,
    ),
    "coalesced reduce_scatter": (
        lambda i, o, g, a: _coalesced(REDUCE_SCATTER_SINGLE, g, a, list(zip(o, i, strict=True))),
        _swapped(PAIRS),
    ),
}
# Gloo writes while it still reads. We refuse some layouts of REFUSED. A scatter gives the result of separate tensors.
REFUSED = ("reduce_scatter", "all_to_all_single")
SEPARATE = ("scatter",)


def _quiet(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call a deprecated function of torch, such as all_reduce_coalesced, without its warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return function(*args, **named)


def _call(name: str, inputs: Tensors, outputs: Tensors, group: Any, asynchronous: bool) -> None:
    work = _quiet(CALLS[name][0], inputs, outputs, group, asynchronous)
    if asynchronous:
        work.wait()


def _place(n: int, salt: int = 0) -> Place:
    numbers = (torch.arange(16 * n) * 7 + dist.get_rank() * 13 + salt) % 101
    return Place(numbers.float(), n, dist.get_rank(), dist.get_world_size())


def _is_refused(name: str, inputs: Tensors, outputs: Tensors, rank: int) -> bool:
    """Return whether Gloo fails (it copies a piece to a part of itself) or gives values that depend on timing."""
    if name not in REFUSED:
        return False
    mine, output = inputs[rank if len(inputs) > 1 else 0], outputs[0]
    distance = abs(mine.data_ptr() - output.data_ptr())
    return distance < mine.nbytes and (name == "all_to_all_single" or distance > 0)


def _expected(name: str, layout: Layout, n: int, gloo: Any) -> Tensor | None:
    """Return the vector after the call on Gloo, or None if a rank must refuse the call."""
    place = _place(n)
    inputs, outputs = layout(place)
    if name in REFUSED:
        refuses = torch.tensor(float(_is_refused(name, inputs, outputs, place.rank)))
        dist.all_reduce(refuses, group=gloo)
        if refuses:
            return None
    separate = [x.clone() for x in outputs] if name in SEPARATE else outputs
    _call(name, inputs, separate, gloo, False)
    if name in SEPARATE:
        outputs[0].copy_(separate[0])
    return place.memory


def _cells(sizes: tuple[int, ...]) -> Iterator[tuple[str, str, int]]:
    for name, (_, layouts) in CALLS.items():
        yield from itertools.product([name], layouts, sizes)


def _failures(sizes: tuple[int, ...], group: Any, gloo: Any) -> list[str]:
    failures = []
    for name, kind, n in _cells(sizes):
        layout = CALLS[name][1][kind]
        want = _expected(name, layout, n, gloo)
        for asynchronous in (False, True):
            place = _place(n)
            before, cell = place.memory.clone(), f"{name}, {kind}, {n} elements, {'async' if asynchronous else 'sync'}"
            inputs, outputs = layout(place)
            if want is None and not _is_refused(name, inputs, outputs, place.rank):
                continue  # other ranks refuse the call, so this rank would wait for them
            try:
                _call(name, inputs, outputs, group, asynchronous)
            except CollectiveArgumentError as error:
                words = (" memory", "input ", "output 0", f"rank {place.rank} of {place.size}")
                if want is not None or not all(word in str(error) for word in words):
                    failures.append(f"{cell}: {error}")
                elif not torch.equal(place.memory, before):
                    failures.append(f"{cell}: data were moved")
            else:
                if want is None:
                    failures.append(f"{cell}: not refused")
                elif not torch.equal(place.memory, want):
                    failures.append(f"{cell}: wrong values")
    return failures


# Sizes for a slot, for the stage, and for direct reads of other ranks' memory.
SIZES = (8, 3000, 20_000)
_groups: dict[str, Any] = {}


def _made() -> tuple[Any, Any]:
    """Return (a group that reads other ranks' memory from 64 KiB on, a Gloo group), made once in each rank."""
    if not _groups:
        os.environ["MONARCH_CMA_MIN_BYTES"] = "65536"
        try:
            _groups["monarch"] = dist.new_group(backend="monarch")
        finally:
            del os.environ["MONARCH_CMA_MIN_BYTES"]
        _groups["gloo"] = dist.new_group(backend="gloo")
    return _groups["monarch"], _groups["gloo"]


def _matrix(rank: int, sizes: tuple[int, ...]) -> list[str]:
    return _failures(sizes, *_made())


@pytest.mark.parametrize(
    ("world_size", "sizes"),
    [
        (2, SIZES[:1]),
        (2, SIZES[2:]),
        (4, SIZES[1:2]),
        *(pytest.param(n, SIZES, marks=pytest.mark.slow) for n in (3, 4)),
    ],
)
def test_call_with_overlapping_tensors_gives_gloos_values(
    pool: Callable[[int], Any], world_size: int, sizes: tuple[int, ...]
) -> None:
    for failures in pool(world_size).run(_matrix, sizes):
        assert not failures, f"{len(failures)} cells failed; the first:\n" + "\n".join(failures[:8])


def _on_other_routes(rank: int, want: str) -> list[str]:
    assert monarch_backend.routes()["cpu"].backend == want
    return _failures((3000,), None, dist.new_group(backend="gloo"))


def test_call_with_overlapping_tensors_without_shared_memory_gives_gloos_values() -> None:
    for failures in run_ranks(_on_other_routes, 3, "gloo", env={"MONARCH_SHM": "0"}):
        assert not failures, failures[:8]


@pytest.mark.skipif(bool(refusal()), reason=refusal() or "-")
def test_call_with_overlapping_tensors_over_two_hosts_gives_gloos_values(three: Hosts) -> None:  # noqa: F811
    for failures in run_on_hosts(three, TWO_BY_TWO, _on_other_routes, "shm+gloo", env=ON):
        assert not failures, failures[:8]


def _while_profiled(rank: int) -> list[str]:
    with torch.profiler.profile():
        return _failures((8,), *_made())


def test_call_with_overlapping_tensors_under_the_profiler_gives_gloos_values(pool: Callable[[int], Any]) -> None:
    for failures in pool(2).run(_while_profiled):
        assert not failures, failures[:8]


def _in_shared_memory(rank: int) -> None:
    """Tensors in shared memory, which the other ranks map and read directly."""
    n = 70_000
    memory = monarch_backend.empty_shared(8 * n)
    want = torch.arange(8.0).repeat_interleave(n)
    memory.copy_(want)
    _quiet(dist.all_reduce_coalesced, [memory, memory[: 4 * n]])
    assert torch.equal(memory, want * 4)
    memory.fill_(float(rank))
    ALL_GATHER_SINGLE(memory[: 4 * n], memory[n : 2 * n])
    assert torch.equal(memory[: 4 * n], torch.arange(4.0).repeat_interleave(n))
    memory.fill_(float(rank))
    REDUCE_SCATTER_SINGLE(memory[n // 2 : n // 2 + n], memory[: 4 * n])
    assert memory[n // 2 : n // 2 + n].eq(6).all()
    assert memory[n // 2 + n :].eq(rank).all()


def test_overlapping_tensors_in_shared_memory_give_values_of_separate_ones(pool: Callable[[int], Any]) -> None:
    pool(4).run(_in_shared_memory)


def _by_hand(rank: int) -> dict[str, list[float]]:
    found = {}
    once = torch.tensor([float(rank)])
    _quiet(dist.all_reduce_coalesced, [once, once])
    found["twice"] = once.tolist()
    line = torch.arange(4.0) + rank
    _quiet(dist.all_reduce_coalesced, [line[:3], line[1:]])
    found["shifted"] = line.tolist()
    line = torch.arange(4.0) + rank
    dist.all_gather([line[i : i + 2] for i in (0, 1, 2, 0)], line[1:3])
    found["gathered"] = line.tolist()
    line = torch.arange(6.0) + rank
    REDUCE_SCATTER_SINGLE(line[1:2], line[:4])
    found["scattered"] = line.tolist()
    return found


def test_overlapping_tensors_give_values_computed_by_hand(pool: Callable[[int], Any]) -> None:
    for rank, found in enumerate(pool(4).run(_by_hand)):
        assert found == {
            "twice": [6.0],
            "shifted": [6.0, 10.0, 14.0, 18.0],
            "gathered": [4.0, 5.0, 3.0, 4.0],
            "scattered": [0.0 + rank, 6.0 + 4 * rank, *(float(i + rank) for i in range(2, 6))],
        }


def _premultiplied(rank: int) -> list[float]:
    line = torch.arange(3.0) + rank
    _quiet(dist.all_reduce_coalesced, [line[:2], line[1:]], op=dist._make_nccl_premul_sum(2.0))  # type: ignore[attr-defined]
    return line.tolist()


def test_premultiplied_sum_of_overlapping_tensors_scales_each_element_once(pool: Callable[[int], Any]) -> None:
    assert pool(2).run(_premultiplied) == [[2.0, 6.0, 10.0]] * 2


def _functional(rank: int) -> tuple[list[float], ...]:
    name = dist.group.WORLD.group_name
    line = torch.arange(4.0) + rank
    for done in torch.ops._c10d_functional.all_reduce_coalesced_([line[:3], line[1:]], "sum", name):
        funcol.wait_tensor(done)
    many = torch.arange(6.0) + 10 * rank
    out = torch.ops._c10d_functional.all_gather_into_tensor_out(many[1:3], 2, name, out=many[:4])
    funcol.wait_tensor(out)
    return line.tolist(), many.tolist()


def test_functional_collectives_on_overlapping_tensors_give_values_of_separate_ones(pool: Callable[[int], Any]) -> None:
    for rank, (reduced, gathered) in enumerate(pool(2).run(_functional)):
        assert reduced == [1.0, 3.0, 5.0, 7.0]
        assert gathered == [1.0, 2.0, 11.0, 12.0, 4.0 + 10 * rank, 5.0 + 10 * rank]


# Refusals ----------------------------------------------------------------------------------------------------------


def _repeated_elements(rank: int) -> None:
    expanded, whole = torch.zeros(1).expand(3), torch.arange(3.0)
    for call in (
        lambda: dist.all_gather([expanded, torch.zeros(3)], whole),
        lambda: dist.gather(whole, [torch.zeros(3), expanded] if rank == 0 else None),
        lambda: dist.all_to_all([expanded, expanded], [whole, whole]),
        lambda: _quiet(dist.all_reduce_coalesced, [whole, expanded]),
        lambda: _quiet(dist.all_gather_coalesced, [[expanded], [torch.zeros(3)]], [whole]),
        lambda: ALL_GATHER_SINGLE(torch.zeros(1).expand(6), whole),
        lambda: REDUCE_SCATTER_SINGLE(torch.zeros(1).expand(3), torch.zeros(6)),
    ):
        if rank == 0:
            with pytest.raises(CollectiveArgumentError, match=r"elements .* share memory.*rank 0 of 2"):
                call()
    total = torch.ones(1)
    dist.all_reduce(total)  # rank 1 is not left waiting in a refused call
    assert total.item() == 2.0


def test_output_whose_elements_share_memory_is_refused(pool: Callable[[int], Any]) -> None:
    pool(2).run(_repeated_elements)


def _batch(rank: int, n: int) -> None:
    memory, other = torch.full((3 * n,), float(rank)), 1 - rank
    send, receive = (lambda x: dist.P2POp(dist.isend, x, other)), (lambda x: dist.P2POp(dist.irecv, x, other))
    first, shifted, last = memory[:n], memory[n // 2 : n // 2 + n], memory[2 * n :]
    tagged = dist.P2POp(dist.irecv, first, other, tag=1)
    for batch, pair in (
        ([send(first), receive(first)], (0, 1)),
        ([receive(shifted), send(last), send(first)], (0, 2)),
        ([send(last), receive(first), tagged], (1, 2)),
    ):
        words = rf"operations {pair[0]} and {pair[1]} of the batch share memory.*rank {rank} of 2"
        with pytest.raises(CollectiveArgumentError, match=words):
            dist.batch_isend_irecv(batch)
    assert memory.eq(rank).all()
    parts = torch.arange(float(n)) + 10 * rank, torch.arange(float(n)) + 100 * rank
    # One rank's messages arrive in the order of their sends. Sends may overlap, because they only read.
    for work in dist.batch_isend_irecv([send(parts[0]), send(parts[0]), send(parts[1]), *map(receive, [first] * 3)]):
        work.wait()
    assert torch.equal(first, torch.arange(float(n)) + 100 * other)


@pytest.mark.parametrize("n", [8, 3000, 600_000])
def test_batch_that_receives_into_memory_of_another_operation_is_refused(pool: Callable[[int], Any], n: int) -> None:
    pool(2).run(_batch, n)


def _several_per_rank(rank: int) -> tuple[list[float], list[float]]:
    group, line = dist.group.WORLD, torch.arange(4.0)
    for call in (group.allreduce, group.broadcast):
        with pytest.raises(CollectiveArgumentError, match=rf"tensors 0 and 1 share .*rank {rank} of 2"):
            call([line[:3], line[1:]])
        with pytest.raises(CollectiveArgumentError, match=rf"elements of output 1 share memory.*rank {rank} of 2"):
            call([torch.zeros(3), torch.zeros(1).expand(3)])
    assert line.tolist() == [0.0, 1.0, 2.0, 3.0]
    twice, parts = torch.tensor([1.0 + rank]), torch.arange(4.0) + 10 * rank
    group.allreduce([twice, twice]).wait()
    # Outputs contain both ranks' inputs, written in list order, so the last write to an element remains.
    group.allgather([[parts[i : i + 1] for i in (0, 2, 2, 1)]] * 2, [parts[1:2], parts[3:]]).wait()
    return twice.tolist(), parts.tolist()


def test_overlapping_tensors_of_one_rank_give_gloos_values_or_are_refused(pool: Callable[[int], Any]) -> None:
    for rank, (twice, parts) in enumerate(pool(2).run(_several_per_rank)):
        assert twice == [6.0]  # the tensor counts twice on each of two ranks
        assert parts == [1.0, 13.0, 11.0, 3.0 + 10 * rank]


def _refused_on_one_rank(rank: int) -> None:
    mine, other, store = torch.ones(4), torch.ones(4), dist.group.WORLD.get_group_store()
    if rank == 1:
        with pytest.raises(CollectiveArgumentError):
            dist.all_to_all_single(mine, mine)
        store.wait(["failed"], timedelta(seconds=60))  # longer than rank 0's timeout in the group
    else:
        with pytest.raises(CollectiveTimeoutError, match=r"rank 1 .* did not enter all_to_all"):
            dist.all_to_all_single(other, mine)
        store.set("failed", "1")


def test_peer_of_a_rank_that_refuses_a_call_fails_at_its_timeout() -> None:
    run_ranks(_refused_on_one_rank, 2, group_timeout=1.5)


def test_argument_error_is_a_value_error() -> None:
    assert issubclass(CollectiveArgumentError, ValueError)
