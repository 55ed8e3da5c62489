"""Meshes of three dimensions, their sub-meshes and slices; several meshes in one program, and their groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from monarch_backend.actor import ProcMesh, this_host
from monarch_backend.dtensor import MeshClosedError, MeshMismatchError, run
from tests.dtensor.conftest import DEVICE
from tests.dtensor.values import same, value

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
WHOLE = torch.arange(5.0 * 4 * 3).view(5, 4, 3)  # no mesh here splits all dimensions evenly
PLACEMENTS: list[list[Placement]] = [[S0, S1, S2], [S2, R, S0], [S0, S0, S1], [R, S1, S1], [S0, S0, S0]]


def shard(whole: torch.Tensor, placements: Any, sizes: Any, at: Any) -> torch.Tensor:
    """Return the shard of the process with these coordinates."""
    for placement, size, index in zip(placements, sizes, at, strict=True):
        if isinstance(placement, Shard):
            chunks = whole.chunk(size, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = chunks[index] if index < len(chunks) else empty
    return whole


def shards_are(x: Any, placements: Any, whole: torch.Tensor = WHOLE) -> None:
    """Assert that each process has the shard that the placements give it."""
    mesh = x.device_mesh
    found = run(mesh, lambda x: x.to_local(), x).get()
    places = itertools.product(*map(range, mesh.shape))
    for at, mine in zip(places, found.values(), strict=True):
        torch.testing.assert_close(mine, shard(whole, placements, mesh.shape, at), msg=f"at {at}")


# Three dimensions -----------------------------------------------------------------------------------------------


def test_each_process_has_its_part_of_three_dimensions(cube: ProcMesh) -> None:
    mesh = cube.device_mesh(DEVICE)
    assert (mesh.ndim, mesh.mesh_dim_names) == (3, cube.extent.labels)
    for placements in PLACEMENTS:
        x = distribute_tensor(WHOLE, mesh, placements)
        shards_are(x, placements)
        same(x * 2, WHOLE * 2)
        assert x.sum().item() == WHOLE.sum().item()


def test_redistribution_in_three_dimensions(cube: ProcMesh) -> None:
    mesh = cube.device_mesh(DEVICE)
    for before, after in itertools.pairwise([*PLACEMENTS, PLACEMENTS[0]]):
        moved = distribute_tensor(WHOLE, mesh, before).redistribute(mesh, after)
        assert moved.placements == tuple(after)
        shards_are(moved, after)


def test_partial_values_in_three_dimensions(cube: ProcMesh) -> None:
    mesh = cube.device_mesh(DEVICE)
    once = distribute_tensor(WHOLE, mesh, [R, R, R]).to_local()
    partial = DTensor.from_local(once, mesh, [Partial()] * 3)
    same(partial, WHOLE * mesh.size())
    shards_are(partial.redistribute(mesh, [S1, R, S0]), [S1, R, S0], WHOLE * mesh.size())


def test_gradients_in_three_dimensions(cube: ProcMesh) -> None:
    mesh = cube.device_mesh(DEVICE)
    whole, weight = torch.randn(4, 6, requires_grad=True), torch.randn(6, 4, requires_grad=True)
    x = distribute_tensor(whole.detach(), mesh, [S0, R, S1]).requires_grad_()
    w = distribute_tensor(weight.detach(), mesh, [R, S1, S0]).requires_grad_()
    (x @ w).square().sum().backward()
    (whole @ weight).square().sum().backward()
    same(x.grad, whole.grad)  # type: ignore[arg-type]
    same(w.grad, weight.grad)  # type: ignore[arg-type]


def test_one_and_two_dimensions_of_three(cube: ProcMesh) -> None:
    mesh = cube.device_mesh(DEVICE)
    a, b, c = mesh.mesh_dim_names  # type: ignore[misc]
    for names in (a, b, c, (a, b), (b, c), (a, c)):
        part = mesh[names]
        placements = [S1, S0][: part.ndim]
        x = distribute_tensor(WHOLE, part, placements)
        same(x + 1, WHOLE + 1)
        same(x.redistribute(part, [S0, R][: part.ndim]), WHOLE)
    flat = mesh[a, c]._flatten()
    assert flat.size() == mesh.size(0) * mesh.size(2)
    same(distribute_tensor(WHOLE, flat, [S1]) * 2, WHOLE * 2)


def test_slices_of_the_processes_are_meshes_of_fewer_dimensions(cube: ProcMesh) -> None:
    a, b, c = cube.extent.labels
    for fixed in ({a: 0}, {b: 0}, {c: cube.extent.sizes[2] - 1}, {a: cube.extent.sizes[0] - 1, c: 0}):
        mesh = cube.slice(**fixed).device_mesh(DEVICE)
        assert mesh.mesh_dim_names == tuple(name for name in (a, b, c) if name not in fixed)
        placements = [S0, S1][: mesh.ndim]
        shards_are(distribute_tensor(WHOLE, mesh, placements), placements)
        last = mesh[mesh.mesh_dim_names[-1]]  # type: ignore[index]
        same(distribute_tensor(WHOLE, last, [S1]) * 2, WHOLE * 2)


# Several meshes -------------------------------------------------------------------------------------------------


def sum_over(x: Any, group: Any) -> list[float]:
    local = x.to_local().clone()
    dist.all_reduce(local, group=group)
    return local.tolist()  # type: ignore[no-any-return]


def test_collectives_with_groups_of_any_mesh(mesh_of: Callable[[str], Any]) -> None:
    for name, size in (("2", 2), ("3", 3), ("2x2", 2)):
        mesh = mesh_of(name)[mesh_of(name).mesh_dim_names[-1]]
        group = mesh.get_group()
        ranks = dist.get_process_group_ranks(group)
        x = distribute_tensor(torch.arange(2.0 * size), mesh, [S0])
        total = torch.arange(2.0 * size).view(size, 2).sum(0).tolist()
        assert (dist.get_world_size(group), len(ranks)) == (size, size)
        assert sum_over(x, group) == sum_over(x, dist.new_group(ranks)) == total
        assert funcol.all_reduce(x.to_local(), "sum", mesh).tolist() == total
        sent = x.to_local().clone()
        dist.broadcast(sent, src=ranks[-1], group=group)
        assert sent.tolist() == [2.0 * size - 2, 2.0 * size - 1]


def test_groups_of_other_meshes_are_refused(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.arange(4.0), mesh_of("2"), [S0])
    others = mesh_of("3").get_group()
    with pytest.raises(MeshMismatchError, match="got a group of procs-"):
        sum_over(x, others)
    with pytest.raises(MeshMismatchError, match=r"give a group of the tensor's own mesh, .*dtensor\.move"):
        funcol.all_reduce(x.to_local(), "sum", others)
    with pytest.raises(MeshMismatchError, match=r"default group is the \d+ ranks of all meshes .* the 2 of procs-"):
        sum_over(x, None)  # otherwise an average by dist.get_world_size() would be wrong without an error
    assert sum_over(x, mesh_of("2").get_group()) == [2, 4]


def test_tensors_of_other_meshes_are_refused(mesh_of: Callable[[str], Any]) -> None:
    """Also a plain tensor of the other mesh's workers is refused, although no DTensor names its mesh."""
    theirs = distribute_tensor(torch.arange(5.0), mesh_of("3"), [S0]).full_tensor()
    for placement in (R, S0):
        with pytest.raises(
            MeshMismatchError, match=r"distribute_tensor\(\) of a tensor of procs-\d+ on a mesh of procs-"
        ):
            distribute_tensor(theirs, mesh_of("2"), [placement])
        with pytest.raises(MeshMismatchError, match=r"dtensor\.move"):
            distribute_tensor(torch.zeros(5), mesh_of("2"), [placement]).copy_(theirs)


def test_meshes_by_ranks_are_of_one_and_of_those_that_run(mesh_of: Callable[[str], Any]) -> None:
    first, world = mesh_of("3").mesh[0].item(), dist.get_world_size()
    again = DeviceMesh(DEVICE, [first, first + 1, first + 2])
    shards_are(distribute_tensor(WHOLE, again, [S0]), [S0])
    for make in (lambda: init_device_mesh(DEVICE, (world,)), lambda: DeviceMesh(DEVICE, [first - 1, first])):
        with pytest.raises(ValueError, match=r"belong to procs-\d+ and procs-.*by procs\.device_mesh\(\)"):
            make()
    with pytest.raises(ValueError, match=f"there is no rank {world}"):
        DeviceMesh(DEVICE, [world])


@pytest.fixture
def ended() -> tuple[Any, Any]:
    """Return the mesh and the group of processes that have ended."""
    with this_host().spawn_procs({"x": 1}) as procs:
        mesh = procs.device_mesh("cpu")
        group = mesh.get_group()
    return mesh, group


def test_ended_ranks_are_refused(ended: tuple[Any, Any], mesh_of: Callable[[str], Any]) -> None:
    mesh, group = ended
    with pytest.raises(MeshClosedError, match=r"ranks \[\d+\] have ended.*procs\.device_mesh\(\)"):
        DeviceMesh("cpu", mesh.mesh.tolist())
    x = distribute_tensor(torch.arange(4.0), mesh_of("2"), [S0])
    with pytest.raises(MeshMismatchError, match="got a group of processes that have ended"):
        sum_over(x, group)
    assert value(x).tolist() == [0, 1, 2, 3]


def test_init_device_mesh_is_of_the_first_mesh(mesh_of: Callable[[str], Any]) -> None:
    mesh = init_device_mesh(DEVICE, (2,), mesh_dim_names=("x",))
    assert mesh == mesh_of("2")
    x = distribute_tensor(WHOLE, mesh, [S0]) + distribute_tensor(WHOLE, mesh_of("2"), [S0])
    shards_are(x, [S0], WHOLE * 2)
