"""A cached redistribution gives the result of torch's own. Redistributions that cannot be cached use torch's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _redistribute as redistribution
from torch.distributed.tensor.debug import CommDebugMode

from monarch_backend.dtensor import simulated_mesh
from monarch_backend.dtensor._patches.caches import redistribute_cache
from monarch_backend.dtensor._patches.caches.redistribute_cache import MAX_TRIES, Recorded
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same

ONE = [Shard(0), Shard(1), Replicate()]
EVEN, UNEVEN = (12, 6), (10, 7)


def known(mesh: Any) -> dict[Any, Any]:
    """Return the mesh's cache: recorded redistributions, and the number of tries of others."""
    return workers_of(mesh).kept.setdefault("redistributions", {})  # type: ignore[no-any-return]


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of steps of each repeated redistribution."""
    seen: list[int] = []
    own = Recorded.repeat

    def repeat(self: Recorded, tensor: Any) -> Any:
        seen.append(len(self.steps))
        return own(self, tensor)

    monkeypatch.setattr(Recorded, "repeat", repeat)
    return seen


@pytest.mark.parametrize(("name", "size"), [("3", UNEVEN), ("2x2", EVEN)], ids=["uneven", "even"])
def test_repeated_redistribution_gives_the_values_of_torch(
    mesh_of: Any, name: str, size: Any, repeated: list[int]
) -> None:
    mesh = mesh_of(name)
    known(mesh).clear()
    for before, after in itertools.product(itertools.product(ONE, repeat=mesh.ndim), repeat=2):
        if before == after:
            continue
        first = distribute_tensor(torch.randn(size), mesh, before)
        for _ in range(MAX_TRIES):
            first.redistribute(mesh, after)
        times, whole = len(repeated), torch.randn(size)
        found = distribute_tensor(whole, mesh, before).redistribute(mesh, after)
        assert len(repeated) == times + 1
        assert found.placements == after
        same(found, whole, 0)


def test_partial_values(line: Any, repeated: list[int]) -> None:
    known(line).clear()
    for after, _ in itertools.product([Shard(0), Replicate()], range(MAX_TRIES + 1)):
        mine = torch.randn(UNEVEN)
        partial = DTensor.from_local(workers_of(line).put(mine), line, [Partial()])
        same(partial.redistribute(line, [after]), mine * line.size())
    assert repeated


@pytest.mark.parametrize(("name", "compiled"), [
    ("3", False), ("2x2", False), *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("3", "2x2"))
], ids=["3-eager", "2x2-eager", "3-captured", "2x2-captured"])  # fmt: skip
def test_from_one_kind_of_partial_to_another(mesh_of: Any, name: str, compiled: bool) -> None:
    """torch combines sums and averages as one kind of partial, but cannot convert the other one."""
    mesh = mesh_of(name)

    def together(x: Any) -> Any:
        return torch.cat([x.sum(0), x.mean(0)]), torch.stack([x.mean(0), x.amax(0), x.sum(0)]), x.mean(0) + x.sum(0)

    step = torch.compile(together, backend="monarch", fullgraph=True) if compiled else together
    for placements in [[Shard(0)] * mesh.ndim] if compiled else itertools.product(ONE, repeat=mesh.ndim):
        for _ in range(MAX_TRIES + 1):
            x = torch.randn(UNEVEN)
            for found, expected in zip(step(distribute_tensor(x, mesh, placements)), together(x), strict=True):
                same(found, expected)


def test_one_operation_for_even_shards_that_are_gathered(repeated: list[int]) -> None:
    mesh = simulated_mesh((4,), ("x",))
    x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    for _ in range(MAX_TRIES):
        x.redistribute(mesh, [Replicate()])
    assert repeated[-1] == 1
    before = workers_of(mesh).sink.records
    x.redistribute(mesh, [Replicate()])
    assert workers_of(mesh).sink.records == before + 1


def test_rows_of_a_table_are_those_of_each_lookup(line: Any, repeated: list[int]) -> None:
    """The mask of rows that a rank lacks is not cached."""
    words = torch.randn(7, 2)
    ours = distribute_tensor(words, line, [Shard(0)])
    for at in range(MAX_TRIES + 2):
        ids = torch.tensor([at, 6 - at, 3])
        rows = F.embedding(distribute_tensor(ids, line, [Replicate()]), ours)
        same(rows.redistribute(line, [Replicate()]), F.embedding(ids, words))
    assert repeated


def test_modes_see_every_one_and_histories_are_torchs() -> None:
    mesh = simulated_mesh((2,), ("x",))
    x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0)])
    target = x.redistribute(mesh, [Replicate()])._spec
    for _ in range(MAX_TRIES + 1):
        x.redistribute(mesh, [Replicate()])
        with CommDebugMode() as mode:
            x.redistribute(mesh, [Replicate()])
        assert mode.get_total_counts() == 1
        local = x.to_local().detach().requires_grad_()
        assert redistribution.redistribute_local_tensor(local, x._spec, target).requires_grad
        assert x.detach().requires_grad_().redistribute(mesh, [Replicate()]).grad_fn is not None


def test_an_equal_mesh_has_groups_of_its_own() -> None:
    mesh = simulated_mesh((2,), ("x",))
    other = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=("x",))
    assert other == mesh and other.get_group().group_name != mesh.get_group().group_name
    for each in (mesh, other, mesh):
        x = distribute_tensor(torch.ones(8, 2), each, [Shard(0)])
        for _ in range(MAX_TRIES):
            x.redistribute(each, [Replicate()])
        (recorded,) = known(each).values()
        assert recorded.mesh is each and each.get_group().group_name in recorded.steps[0].args


def test_a_slice_that_is_asked_for_again_is_the_same_mesh(repeated: list[int]) -> None:
    mesh = simulated_mesh((2, 2), ("dp", "tp"))
    slices = [mesh["tp"], mesh["tp"]]  # as for two layers, each with its own call of parallelize_module
    assert slices[0] is not slices[1] and slices[0] == slices[1]
    shards = [distribute_tensor(torch.ones(8, 2), each, [Shard(0)]) for each in slices]
    for _ in range(MAX_TRIES):
        shards[0].redistribute(slices[0], [Replicate()])
    times = len(repeated)
    for shard, each in zip(shards, slices, strict=True):
        assert shard.redistribute(each, [Replicate()]).device_mesh is each
    assert len(repeated) == times + 2


def test_redistribute_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redistribute_cache, "CACHE_SIZE", 2)
    mesh = simulated_mesh((2,), ("x",))
    for rows in (2, 4, 6, 8, 10):
        distribute_tensor(torch.ones(rows, 2), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        assert 1 <= len(known(mesh)) <= 2


def test_a_mesh_that_is_flattened_later_gathers_at_once() -> None:
    mesh = simulated_mesh((2, 2), ("a", "b"))
    x = distribute_tensor(torch.ones(8, 2), mesh, [Shard(0), Shard(0)])

    def records() -> int:
        before = workers_of(mesh).sink.records
        for _ in range(MAX_TRIES + 1):
            x.redistribute(mesh, [Replicate(), Replicate()])
        return int(workers_of(mesh).sink.records - before)

    before = records()
    mesh["a", "b"]._flatten("all")
    assert 0 < records() < before


@pytest.mark.parametrize("sizes", [(3, 5, 5), (4, 5, 6), (5, 6, 4), (2, 4, 7), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("by", [(1, 2), (2, 1), (1, 0), (0, 2)], ids=str)
def test_views_of_shards_that_were_exchanged(line: Any, sizes: tuple[int, ...], by: tuple[int, int]) -> None:
    """If the size is not divisible, ranks exchange more rows than they keep. The kept rows must be contiguous."""
    whole = torch.randn(sizes)
    for learns in (False, True):
        x = distribute_tensor(whole, line, [Shard(by[0])]).requires_grad_(learns)
        for each in (x, x * 1):
            moved = each.redistribute(placements=[Shard(by[1])])
            same(moved.flatten(), whole.flatten())
            same(moved.view(sizes[0], -1), whole.view(sizes[0], -1))
            same(moved.unflatten(1, (1, -1)), whole.unflatten(1, (1, -1)))
            if learns:
                moved.view(-1).square().sum().backward()
    same(x.grad, 4 * whole)
