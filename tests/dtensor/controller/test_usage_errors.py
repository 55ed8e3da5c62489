"""Wrong use of a controller's tensors raises at once. The errors are this package's and name a remedy."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from monarch_backend._core.torch_version import torch_version
from monarch_backend.actor import this_host
from monarch_backend.dtensor import MeshMismatchError, RemoteTensorError
from monarch_backend.dtensor._controller import controller_process_group
from tests.actor.script_runner import Run
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import value

S0 = Shard(0)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # torch deprecates old names of collectives

# Collectives ----------------------------------------------------------------------------------------------------


def two(make: Callable[[int], Any]) -> list[Any]:
    return [make(2), make(2)]


INTO: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]] = {
    "all_gather": (two, lambda out, x, group: dist.all_gather(out, x, group)),
    "all_gather_into_tensor": (lambda make: make(4), lambda out, x, group: dist.all_gather_into_tensor(out, x, group)),
    "reduce_scatter": (lambda make: make(2), lambda out, x, group: dist.reduce_scatter(out, [x, x], group=group)),
    "reduce_scatter_tensor": (
        lambda make: make(1),
        lambda out, x, group: dist.reduce_scatter_tensor(out, x, group=group),
    ),
    "all_to_all": (two, lambda out, x, group: dist.all_to_all(out, [x, x], group)),
    "all_to_all_single": (lambda make: make(2), lambda out, x, group: dist.all_to_all_single(out, x, group=group)),
    "all_reduce_coalesced": (
        lambda make: make(2),
        lambda out, x, group: dist.all_reduce_coalesced([out, x], group=group),
    ),
    "all_gather_coalesced": (
        two,
        lambda out, x, group: dist.all_gather_coalesced([[each] for each in out], [x], group=group),
    ),
}
"""A function that makes the outputs, and the collective. Its input is [0, 1] on rank 0 and [2, 3] on rank 1."""
RESULTS: dict[str, Any] = {
    "all_gather": [[0, 1], [2, 3]],
    "all_gather_into_tensor": [0, 1, 2, 3],
    "reduce_scatter": [2, 4],
    "reduce_scatter_tensor": [2],
    "all_to_all": [[0, 1], [2, 3]],
    "all_to_all_single": [0, 2],
    "all_reduce_coalesced": [0, 0],
    "all_gather_coalesced": [[0, 1], [2, 3]],
}
"""Expected outputs on rank 0."""
BESIDE_OTHERS = r"of a tensor of the controller beside tensors of workers: .*Distribute the tensor first"


@pytest.fixture
def shards(mesh_of: Callable[[str], Any]) -> Any:
    """[0, 1] on rank 0 and [2, 3] on rank 1."""
    return distribute_tensor(torch.arange(4.0), mesh_of("2"), [S0]).to_local()


def here(size: int) -> torch.Tensor:
    return torch.full((size,), -1.0)


@pytest.mark.parametrize("name", INTO)
def test_collectives_into_tensors_of_the_controller(name: str, shards: Any, mesh_of: Callable[[str], Any]) -> None:
    """The collective could not change host tensors, so they are refused as outputs."""
    outputs, call = INTO[name]
    out = outputs(here)
    with pytest.raises(RemoteTensorError, match=BESIDE_OTHERS):
        call(out, shards, mesh_of("2").get_group())
    assert all(each.eq(-1).all() for each in (out if isinstance(out, list) else [out]))


@pytest.mark.parametrize("name", INTO)
def test_collectives_of_tensors_of_the_controller(name: str, shards: Any, mesh_of: Callable[[str], Any]) -> None:
    """Host tensors are refused as inputs too, if the outputs are on the workers."""
    outputs, call = INTO[name]
    with pytest.raises(RemoteTensorError, match=BESIDE_OTHERS):
        call(outputs(shards.new_zeros), here(2), mesh_of("2").get_group())


def test_collectives_into_both(shards: Any, mesh_of: Callable[[str], Any]) -> None:
    for out in ([here(2), shards.new_zeros(2)], [shards.new_zeros(2), here(2)]):
        with pytest.raises(RemoteTensorError, match=BESIDE_OTHERS):
            dist.all_gather(out, shards, mesh_of("2").get_group())
    assert shards.tolist() == [0, 1], "nothing was issued that fails"


@pytest.mark.parametrize("name", INTO)
def test_collectives_into_tensors_of_the_workers(name: str, shards: Any, mesh_of: Callable[[str], Any]) -> None:
    outputs, call = INTO[name]
    out = outputs(shards.new_zeros)
    call(out, shards, mesh_of("2").get_group())
    found = [value(each).tolist() for each in out] if isinstance(out, list) else value(out).tolist()
    assert found == RESULTS[name]


def test_send_and_recv_of_a_controller_group_are_refused(shards: Any, mesh_of: Callable[[str], Any]) -> None:
    group = mesh_of("2").get_group()
    with pytest.raises(RemoteTensorError, match=r"workers have no such collective.*dtensor\.run"):
        group.send([shards], 1, 0)
    with pytest.raises(RemoteTensorError, match=r"workers have no such collective.*dtensor\.run"):
        group.recv([shards], 1, 0)


def test_collectives_of_dtensors(shards: Any, mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.arange(4.0), mesh_of("2"), [S0])
    with pytest.raises(RemoteTensorError, match=r"of a DTensor: .*x\.to_local\(\)"):
        dist.all_reduce(x, group=mesh_of("2").get_group())
    with pytest.raises(RemoteTensorError, match=r"of a DTensor: .*x\.to_local\(\)"):
        dist.all_gather_into_tensor(x, shards, mesh_of("2").get_group())


def test_names_of_collectives_are_torchs() -> None:
    """torch must have each name. Otherwise it has renamed a collective, and the new name is not replaced."""
    missing = {name for name in controller_process_group._COLLECTIVES if not hasattr(dist.ProcessGroup, name)}
    assert missing == (set() if torch_version() >= (2, 13) else {"all_gather_single", "reduce_scatter_single"})


@pytest.mark.skipif(torch_version() >= (2, 13), reason="torch can make a group in a controller")
def test_new_group_names_the_release_that_has_it(mesh_of: Callable[[str], Any]) -> None:
    first = workers_of(mesh_of("2")).first
    for ranks in ([first], [first + 1], None):
        with pytest.raises(RemoteTensorError, match=r"needs torch 2\.13\. Use .*mesh\.get_group\(\)"):
            dist.new_group(ranks)


# Meshes ---------------------------------------------------------------------------------------------------------

TWO_MESHES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "matmul": lambda x, y: x @ y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "index": lambda x, y: x[y.long()],
    "write": lambda x, y: x.__setitem__(slice(0, 6), y),
    "equal": lambda x, y: torch.equal(x, y),
    "redistribute": lambda x, y: x.redistribute(y.device_mesh),
    "to the same placements": lambda x, y: x.redistribute(y.device_mesh, [S0] * y.device_mesh.ndim),
    "to others": lambda x, y: x.redistribute(y.device_mesh, [Replicate()] * y.device_mesh.ndim),
    "distribute": lambda x, y: distribute_tensor(x, y.device_mesh),
}


@pytest.mark.parametrize("other", ["2x2", "tp"])
@pytest.mark.parametrize("what", TWO_MESHES)
def test_two_meshes_in_one_operation(mesh_of: Callable[[str], Any], what: str, other: str) -> None:
    """The other mesh has other processes ("2x2") or the same ones ("tp")."""
    one, there = (mesh_of("2x2"), mesh_of("2x2")["tp"]) if other == "tp" else (mesh_of("2"), mesh_of(other))
    x, y = (distribute_tensor(torch.arange(6.0), each, [S0] * each.ndim) for each in (one, there))
    with pytest.raises(MeshMismatchError, match=r"of procs-\d+ and .* are different.*monarch_backend\.dtensor\.move"):
        TWO_MESHES[what](x, y)
    assert value(x).tolist() == [0, 1, 2, 3, 4, 5]


def test_an_equal_mesh_is_no_other(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    x = distribute_tensor(torch.arange(6.0), mesh["tp"], [S0])
    assert value(x.redistribute(mesh["tp"], [Replicate()]) + x).tolist() == [0, 2, 4, 6, 8, 10]


def test_as_many_placements_as_the_mesh_has_dimensions(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.arange(6.0), mesh_of("2x2"), [S0, S0])
    for placements in ([Replicate()], [Replicate()] * 3):
        with pytest.raises(ValueError, match=r"give one for each of its 2 dimensions"):
            x.redistribute(placements=placements)


def test_a_dtensor_of_another_meshs_tensors(mesh_of: Callable[[str], Any], shards: Any) -> None:
    with pytest.raises(MeshMismatchError, match=r"of procs-\d+ on a mesh of procs-.*dtensor\.move"):
        DTensor.from_local(shards, mesh_of("3"), [S0])


# The end of all meshes ------------------------------------------------------------------------------------------

AFTER_THE_LAST = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from monarch_backend.actor import this_host
from monarch_backend.dtensor import MeshClosedError, run

X = torch.arange(12.0).view(4, 3)
USES = {
    "operation": lambda x: print(x + 1),
    "print": print,
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x.sum().item(),
    "full_tensor": lambda x: x.full_tensor().tolist(),
    "redistribute": lambda x: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim).tolist(),
    "shards": lambda x: x.to_local().tolist(),
    "distribute": lambda x: distribute_tensor(X, x.device_mesh),
    "funcol": lambda x: print(funcol.all_reduce(x.to_local(), "sum", (x.device_mesh, 0))),
}

def use(when, x):
    for name, f in USES.items():
        try:
            f(x)
            print(when, name, "NO ERROR")
        except MeshClosedError as error:
            assert "have ended" in str(error)
        except Exception as error:
            print(when, name, type(error).__name__, error)

def made(sizes):
    procs = this_host().spawn_procs(sizes)
    mesh = procs.device_mesh("cpu")
    return procs, distribute_tensor(X, mesh, [Shard(0)] * mesh.ndim)

if __name__ == "__main__":
    first, x = made({"x": 2})
    (x + 1).full_tensor().tolist()
    imported = run(x.device_mesh, lambda: "torch._dynamo" in sys.modules).get()
    assert not any(imported.values()), "eager operations need no TorchDynamo, which takes each worker half a second"
    first.stop().get()
    assert not dist.is_initialized()
    use("after the only mesh", x)
    second, y = made({"a": 1, "b": 2})
    use("beside a new one", x)
    assert y.tolist() == X.tolist()
    second.stop().get()
    use("after both", x)
    use("after both", y)
    print("end")
"""


def test_values_of_the_only_mesh_after_its_end(run_script: Callable[..., Run]) -> None:
    """The script is a separate program, because this one has other meshes and torch's default group."""
    ended = run_script(AFTER_THE_LAST)
    assert ended.out.split("\n") == ["end", ""], ended.out + ended.err
    assert ended.returncode == 0, ended.err


def test_groups_go_with_their_meshes() -> None:
    """torch finds a group by its name only while a tensor or a mesh of the group exists."""
    gc.collect()
    before = set(controller_process_group._made)
    with this_host().spawn_procs({"x": 1}) as procs:
        mesh = procs.device_mesh("cpu")
        new = {group.group_name for group in set(controller_process_group._made) - before}
    assert new == {mesh.get_group().group_name}


# GPUs -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="the processes of this host have GPUs")
def test_a_mesh_of_gpus_of_processes_without() -> None:
    """After the error the program can make another mesh of these processes."""
    with this_host().spawn_procs({"x": 2}) as procs:
        with pytest.raises(RemoteTensorError) as told:
            procs.device_mesh("cuda")
        assert "2 of 2 processes have none. rank 0: torch " in str(told.value)
        assert f"(host {os.uname().nodename}, pid " in str(told.value)
        assert "procs.device_mesh('cpu')" in str(told.value)
        mesh = procs.device_mesh("cpu")
        assert workers_of(mesh).device.type == "cpu"
        assert distribute_tensor(torch.ones(4), mesh, [S0]).sum().item() == 4


def test_sizes_of_a_view_that_are_none(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.ones(4, 4), mesh_of("2"), [Shard(0)])
    with pytest.raises(RuntimeError, match=r"shape '\[-1, 0\]' is invalid|cannot reshape|unspecified dimension"):
        x.view(-1, 0)  # type: ignore[attr-defined]


SPARSE: dict[str, Callable[[Any], Any]] = {
    "to_sparse": lambda x: x.to_sparse(),
    "of a shard": lambda x: x.to_local().to_sparse(),
    "sparse_coo_tensor": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1]]), x[0], (4,)),
    "of an embedding": lambda x: F.embedding(torch.tensor([0, 1]), x, sparse=True).sum().backward(),
    "of the controller": lambda x: x.to_local() + torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE.keys())
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors(mesh_of: Callable[[str], Any], make: Callable[[Any], Any]) -> None:
    x = distribute_tensor(torch.eye(2), mesh_of("2"), [Replicate()]).requires_grad_()
    with pytest.raises(
        RemoteTensorError, match=r"layout torch\.sparse_coo.*to_dense\(\), nn\.Embedding\(sparse=False\)"
    ):
        make(x)
    assert value(x).equal(torch.eye(2))
