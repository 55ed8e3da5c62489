"""Collectives of per-rank tensors: a controller gets the values of a program on each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Shard, distribute_tensor

from monarch_backend.dtensor import MeshMismatchError, RemoteOpError, run
from monarch_backend.dtensor._compile import compile_backend
from monarch_backend.dtensor._dispatch import collectives as collectives_module
from tests.dtensor import failing_lookup
from tests.dtensor.conftest import workers_of
from tests.dtensor.dispatch import collective_programs
from tests.dtensor.values import same
from tests.support.tiers import slow_except

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # torch deprecates old names of collectives
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),  # dynamo cannot trace some of them
]

MESHES = ("2", "3", "2x2 dp", "2x2 tp")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int64": torch.int64}


def made(mesh_of: Callable[[str], Any], name: str) -> Any:
    whole, *of = name.split()
    return mesh_of(whole)[of[0]] if of else mesh_of(whole)


def shards(mesh: Any, dtype: torch.dtype = torch.float32) -> Any:
    """Return 12 rows on each rank, with numbers that no other rank has."""
    whole = torch.arange(12.0 * 2 * mesh.size()).view(-1, 2).to(dtype)
    return distribute_tensor(whole, mesh, [Shard(0)]).to_local()


def by_rank(case: Callable[..., list[Any]], x: Any, mesh: Any) -> list[Any]:
    results = case(x, mesh.get_group(), mesh.get_local_rank(), mesh.size())
    return list(run(mesh, collective_programs.values, *results).get().values())


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("case", collective_programs.CASES)
def test_collectives_give_the_values_of_ranks(mesh_of: Callable[[str], Any], case: str, name: str) -> None:
    mesh = made(mesh_of, name)
    for dtype in DTYPES.values():
        x = shards(mesh, dtype)
        expected = list(run(mesh, collective_programs.by_rank, case, x, mesh).get().values())
        assert by_rank(collective_programs.CASES[case], shards(mesh, dtype), mesh) == expected


CAPTURED = set(collective_programs.CASES) - {
    "all_to_all_single_uneven", "functional_all_to_all_uneven", "nothing_to_the_first",  # sizes differ by rank
    "all_reduce_coalesced", "all_reduce_coalesced_max", "all_gather_coalesced",  # torch traces none of these
}  # fmt: skip
"""Cases with a collective that a captured step contains."""


@pytest.mark.parametrize("case", slow_except(collective_programs.CASES, "in_place", "functional_coalesced"))
def test_collectives_in_a_captured_step_give_the_values_of_ranks(mesh_of: Callable[[str], Any], case: str) -> None:
    mesh = mesh_of("2")
    expected = list(run(mesh, collective_programs.by_rank, case, shards(mesh), mesh).get().values())
    torch._dynamo.reset()
    calls = compile_backend.statistics["calls"]
    step = torch.compile(collective_programs.CASES[case], backend="monarch", options={"inductor": False})
    for _ in range(2):
        assert by_rank(step, shards(mesh), mesh) == expected
    if case in CAPTURED:
        assert compile_backend.statistics["calls"] >= calls + 2


def test_ranks_outside_of_a_group(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("3")
    first = workers_of(mesh).first
    x = shards(mesh)
    expected = list(run(mesh, collective_programs.all_reduced_in_part, x, [0, 2]).get().values())
    out = x.clone()
    dist.all_reduce_coalesced([out], group=dist.new_group([first, first + 2]))
    assert list(run(mesh, collective_programs.values, out).get().values()) == expected


def test_rank_without_the_operand_does_not_block_others(mesh_of: Callable[[str], Any]) -> None:
    """The other ranks receive zeros from it, and a read of the result raises."""
    mesh = mesh_of("2")
    workers = workers_of(mesh)
    table = workers.put(torch.ones(3, 2))
    rows = workers.put_by_rank([torch.tensor([0, 0]), torch.tensor([5])])
    failed = failing_lookup.look_up(rows, table)
    total, out = table.clone(), failed.new_zeros(3, 2)
    dist.all_reduce_coalesced([total, failed[:1]], group=mesh.get_group())
    dist.all_to_all_single(out, failed, [2, 1], [failed.shape[0] - 1, 1], group=mesh.get_group())
    for each in (total, out):
        with pytest.raises(RemoteOpError, match=f"{failing_lookup.OPERATION} raised on rank 1 "):
            each.tolist()
    same(table, torch.ones(3, 2))


def test_splits_that_do_not_match_name_the_line(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = shards(mesh)
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x, [5, 7], [5, 7], group=mesh.get_group())
    with pytest.raises(RemoteOpError, match="make the ranks' calls agree") as caught:
        out.tolist()
    assert "dist.all_to_all_single(out, x, [5, 7]" in caught.value.issued_at
    same(x, shards(mesh), 0)  # the sent tensor is unchanged


def test_signature_cache_of_collectives_is_bounded(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of("2")
    workers = workers_of(mesh)
    monkeypatch.setattr(collectives_module, "SIGNATURE_CACHE_SIZE", 8)
    monkeypatch.setitem(workers.kept, "collectives", {})
    for _ in range(2):
        for size in range(1, 20):
            x = workers.put_by_rank([torch.ones(size), torch.ones(size)])
            dist.all_reduce_coalesced([x], group=mesh.get_group())
            assert x.tolist() == [2.0] * size
            assert len(workers.kept["collectives"]) <= 8


def test_functional_collective_of_workers_tensors_has_wait(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x = shards(mesh)  # rows 0..23 and 24..47
    assert funcol.all_reduce(x, "sum", mesh).wait().tolist()[0] == [24.0, 26.0]
    assert funcol.all_gather_tensor(x, 0, mesh).wait().shape == (24, 2)


def test_distribute_tensor_of_dtensor_on_another_mesh_raises_value_error(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    x = distribute_tensor(torch.ones(4, 4), mesh["dp"], [Shard(0)])
    with pytest.raises(ValueError, match="different meshes") as raised:
        distribute_tensor(x, mesh["tp"], [Shard(0)])
    assert isinstance(raised.value, MeshMismatchError)
