"""FSDP2 from the controller: torch's `fully_shard` trains as a single process does, and frees unsharded parameters."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor import RemoteOpError, RemoteTensor, RemoteTensorError, shard_batch, simulated_mesh
from monarch_backend.dtensor._dispatch import dispatch
from monarch_backend.dtensor._patches import manifest
from tests.dtensor import worker_functions
from tests.dtensor.conftest import DEVICE, workers_of
from tests.dtensor.values import same
from tests.support.tiers import slow_except

NEEDED = ".".join(map(str, manifest.FSDP2.since))
pytestmark = pytest.mark.skipif(
    torch_version() < manifest.FSDP2.since, reason=f"FSDP2 in a controller needs torch {NEEDED}"
)

WIDTH, HIDDEN = 8, 15  # no mesh that uses HIDDEN splits it evenly
ROWS = 24
STEPS = 3
FOREACH = None if DEVICE == "xla" else True  # torch has no foreach for XLA tensors


class Block(nn.Module):
    """A transformer block without the attention."""

    def __init__(self, hidden: int = HIDDEN, *, saves: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.saves = saves

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (checkpoint(self._inner, x, use_reentrant=False) if self.saves else self._inner(x))


class Net(nn.Module):
    """Blocks between a first and a last layer."""

    def __init__(self, blocks: int = 2, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(blocks))
        self.last = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)  # type: ignore[no-any-return]


def sharded(model: Any, mesh: Any, **options: Any) -> Any:
    """Shard each block, then the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def mean(loss: torch.Tensor, mesh: Any) -> Any:
    """Return the mean of the ranks' losses."""
    return DTensor.from_local(loss.detach(), mesh, [Partial("avg")] * mesh.ndim).full_tensor()


def loss_of(model: Any, x: Any) -> Any:
    """Return the loss that the tests train."""
    return model(x).square().mean()


def adam(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def train(
    model: Any,
    mesh: Any,
    reference: Any,
    optimizer: Callable[[Any], torch.optim.Optimizer] = adam,
    tolerance: float = 1e-5,
) -> None:
    """Train both on the same batches. They must have equal losses, gradients and, at the end, parameters."""
    ours, theirs = optimizer(model), optimizer(reference)
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH)
        loss = loss_of(model, shard_batch(x, mesh))
        expected = loss_of(reference, x)
        loss.backward()
        expected.backward()
        assert mean(loss, mesh).item() == pytest.approx(expected.item(), rel=1e-4)
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            same(mine.grad, other.grad, tolerance)
        for each in (ours, theirs):
            each.step()
            each.zero_grad()
    alike(model, reference, tolerance)


def alike(model: Any, reference: Any, tolerance: float = 1e-5) -> None:
    """Assert that the parameters are equal."""
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        same(mine, other, tolerance)


# Results ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        lambda model: adam(model, foreach=True),
        lambda model: adam(model, foreach=False),
        lambda model: adam(model, fused=True),
    ],
    ids=["sgd", "adamw-foreach", "adamw-loop", "adamw-fused"],
)
def test_values_are_those_of_a_single_process(mesh_of: Any, optimizer: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    train(sharded(copy.deepcopy(reference), mesh), mesh, reference, optimizer)


def test_three_ranks_of_which_some_have_less_or_nothing(mesh_of: Any) -> None:
    mesh, reference = mesh_of("3"), Net(hidden=4)
    model = sharded(copy.deepcopy(reference), mesh)
    assert str(model.blocks[0].up.weight._local_tensor.shape[0]) == "{2 2 0}"
    train(model, mesh, reference)


def test_sharded_and_replicated(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2x2"), Net()
    model = sharded(copy.deepcopy(reference), mesh)
    assert model.last.weight.placements == (Replicate(), Shard(0))
    train(model, mesh, reference)


def test_replicas_whose_gradients_are_reduced_later(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2x2"), Net()
    model = sharded(copy.deepcopy(reference), mesh)
    x = torch.randn(2, ROWS, WIDTH)
    for i, last in ((0, False), (1, True)):
        model.set_requires_all_reduce(last)
        loss_of(model, shard_batch(x[i], mesh)).backward()
        loss_of(reference, x[i]).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        same(mine.grad, other.grad)


@pytest.mark.parametrize("hidden", slow_except([12, HIDDEN, 3], 12), ids=["even", "uneven", "a rank has nothing"])
def test_with_tensor_parallelism(mesh_of: Any, hidden: int) -> None:
    mesh, reference = mesh_of("2x2"), Net(hidden=hidden)
    model = copy.deepcopy(reference)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded(model, mesh["dp"])
    assert model.blocks[0].up.weight.device_mesh.ndim == 2
    train(model, mesh["dp"], reference, lambda model: adam(model, foreach=False))


@pytest.mark.slow
def test_replicated_sharded_and_tensor_parallel(cube: Any) -> None:
    """fully_shard uses two of the three dimensions, parallelize_module uses the third."""
    mesh, reference = cube.device_mesh(DEVICE), Net(hidden=12)
    *data, tp = mesh.mesh_dim_names
    model = copy.deepcopy(reference)
    for block in model.blocks:
        parallelize_module(block, mesh[tp], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    sharded(model, mesh[tuple(data)])
    assert model.blocks[0].up.weight.device_mesh == mesh
    assert model.last.weight.placements == (Replicate(), Shard(0))
    train(model, mesh[tuple(data)], reference, lambda model: adam(model, foreach=False))


@pytest.mark.parametrize("reshard", [True, False, None])
def test_parameters_are_resharded_after_forward_or_not(mesh_of: Any, reshard: bool | None) -> None:
    mesh, reference = mesh_of("2"), Net()
    model = sharded(copy.deepcopy(reference), mesh, reshard_after_forward=reshard)
    loss_of(model, shard_batch(torch.randn(ROWS, WIDTH), mesh))
    stays = model.blocks[0].up.weight
    assert isinstance(stays, DTensor if reshard is not False else RemoteTensor)
    model.reshard()
    for block in model.blocks:
        block.reshard()
    train(model, mesh, reference)


def test_resharded_to_fewer_ranks_after_forward(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2x2")._flatten("all"), Net()
    train(sharded(copy.deepcopy(reference), mesh, reshard_after_forward=2), mesh, reference)


def test_a_slice_can_not_be_resharded_to_fewer_ranks() -> None:
    mesh = simulated_mesh((4, 2), ("dp", "tp"))["dp"]
    with pytest.raises(RemoteTensorError, match="first slice only"):
        fully_shard(Net(), mesh=mesh, reshard_after_forward=2)


def test_resharding_to_fewer_ranks_needs_dimension_0() -> None:
    mesh = simulated_mesh((4,), ("dp",))
    with pytest.raises(RemoteTensorError, match="by another dimension than 0"):
        fully_shard(Net(), mesh=mesh, reshard_after_forward=2, shard_placement_fn=lambda param: Shard(param.ndim - 1))


def test_parameters_sharded_by_another_dimension(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net(hidden=12)
    model = sharded(
        copy.deepcopy(reference), mesh, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None
    )
    assert model.last.weight.placements == (Shard(1),)
    train(model, mesh, reference)


def test_made_on_no_device_and_filled_on_the_workers(mesh_of: Any) -> None:
    mesh = mesh_of("2")
    with torch.device("meta"):
        model = Net()
    sharded(model, mesh)
    assert all(param.is_meta and param.device.type == "meta" for param in model.parameters())
    model.to_empty(device=DEVICE)
    torch.manual_seed(7)
    reference = Net()
    torch.manual_seed(7)
    for module in model.modules():  # in the order of construction
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    alike(model, reference, 0)
    train(model, mesh, reference)


def test_mixed_precision(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(copy.deepcopy(reference), mesh, mp_policy=policy)
    x = torch.randn(ROWS, WIDTH)
    loss_of(model, shard_batch(x, mesh)).backward()
    for half in x.chunk(2):  # the calculation of each rank
        params = {name: param.bfloat16() for name, param in reference.named_parameters()}
        functional_call(reference, params, half.bfloat16()).square().mean().backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        same(mine.grad, other.grad / 2, 1e-4)  # type: ignore[operator]


def test_gradients_are_accumulated_without_being_reduced(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    model = sharded(copy.deepcopy(reference), mesh)
    x = torch.randn(3, ROWS, WIDTH)
    for i in range(3):
        model.set_requires_gradient_sync(i == 2)
        loss_of(model, shard_batch(x[i], mesh)).backward()
        loss_of(reference, x[i]).backward()
        assert (model.last.weight.grad is not None) == (i == 2)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        same(mine.grad, other.grad)


def test_an_own_factor_for_the_gradients(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    model = sharded(copy.deepcopy(reference), mesh)
    for each in (model, *model.blocks):
        each.set_gradient_divide_factor(1.0)
    x = torch.randn(ROWS, WIDTH)
    loss_of(model, shard_batch(x, mesh)).backward()
    loss_of(reference, x).backward()
    same(model.last.weight.grad, reference.last.weight.grad * 2)  # type: ignore[operator]


@pytest.mark.parametrize("name", ["2", "2x2"])
def test_clipped_gradients(mesh_of: Any, name: str) -> None:
    mesh, reference = mesh_of(name), Net()
    model = sharded(copy.deepcopy(reference), mesh)
    x = torch.randn(ROWS, WIDTH)
    loss_of(model, shard_batch(x, mesh)).backward()
    loss_of(reference, x).backward()
    ours = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    theirs = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    assert ours.full_tensor().item() == pytest.approx(theirs.item(), rel=1e-4)  # type: ignore[attr-defined]
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        same(mine.grad, other.grad)


def test_activation_checkpoints(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net(saves=True)
    train(sharded(copy.deepcopy(reference), mesh), mesh, reference)


def test_explicit_prefetching(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net(blocks=3)
    model = sharded(copy.deepcopy(reference), mesh)
    for before, after in zip(model.blocks, model.blocks[1:], strict=False):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    train(model, mesh, reference)


class Tied(nn.Module):
    """A model with a token table, attention, and the table again as its output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.out.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the same tokens."""
        x = self.table(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return F.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


def test_a_parameter_with_two_names(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Tied()
    model = fully_shard(copy.deepcopy(reference), mesh=mesh)
    tokens = torch.randint(0, 11, (8, 6))
    model(shard_batch(tokens, mesh)).backward()
    reference(tokens).backward()
    assert model.out.weight is model.table.weight
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        same(mine.grad, other.grad)


def test_parameters_without_gradients(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    reference.blocks[0].requires_grad_(False)
    reference.first.weight.requires_grad_(False)
    model, x = sharded(copy.deepcopy(reference), mesh), torch.randn(ROWS, WIDTH)
    loss_of(model, shard_batch(x, mesh)).backward()
    loss_of(reference, x).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            same(mine.grad, other.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_training(mesh_of: Any, mode: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    model, x = sharded(copy.deepcopy(reference), mesh), torch.randn(ROWS, WIDTH)
    for _ in range(2):
        with mode():
            rows = model(shard_batch(x, mesh))
        same(DTensor.from_local(rows, mesh, [Shard(0)]), reference(x))
    model.reshard()  # otherwise the optimizer would get the whole parameters, as in torch itself
    train(model, mesh, reference)


def test_offloaded_parameters(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    model = sharded(copy.deepcopy(reference), mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    train(model, mesh, reference)


def test_whole_parameters_when_the_user_wants_them(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    model = sharded(copy.deepcopy(reference), mesh)
    block = model.blocks[0]
    block.unshard(async_op=True).wait()
    same(block.up.weight, reference.blocks[0].up.weight)
    assert isinstance(block.up.weight, RemoteTensor)
    block.reshard()
    assert isinstance(block.up.weight, DTensor)


def test_parameters_that_are_distributed_already(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    model = distribute_module(copy.deepcopy(reference), mesh)
    fully_shard(model, mesh=mesh, dp_mesh_dims=torch.distributed.fsdp.DataParallelMeshDims(shard="x"))
    x = torch.randn(ROWS, WIDTH)
    out = model(distribute_tensor(x, mesh, [Shard(0)]))
    same(out, reference(x))
    assert model.last.weight.to_local().shape == model.last.weight._local_tensor.shape


# Transfers to the workers ----------------------------------------------------------------------------------------


def test_buffers_are_changed_on_the_workers(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6))
    model = fully_shard(copy.deepcopy(reference), mesh=mesh)
    x = torch.randn(ROWS, WIDTH)
    model(x)  # all ranks get the whole batch
    reference(x)
    same(model[1].running_mean, reference[1].running_mean)  # type: ignore[arg-type,index]
    assert model[1].num_batches_tracked.item() == 1  # type: ignore[index,union-attr,operator]


def test_a_hosts_batch_is_the_same_for_all_ranks_and_sent_once(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, reference = mesh_of("2"), Net()
    model, line = sharded(copy.deepcopy(reference), mesh), workers_of(mesh).line
    sent: list[Any] = []
    own = line.put
    monkeypatch.setattr(line, "put", lambda number, tensor: (sent.append(tensor.shape), own(number, tensor)))
    x = torch.randn(ROWS, WIDTH)
    same(model(x), reference(x))
    assert sent == [x.shape]


def test_the_batch_by_rank(mesh_of: Any) -> None:
    for name in ("2", "2x2"):
        mesh, x = mesh_of(name), torch.arange(8.0).view(8, 1)
        mine = shard_batch({"x": x, "y": [x + 1, 3]}, mesh)
        assert type(mine["x"]) is RemoteTensor
        assert mine["x"].shape == (8 // mesh.size(), 1)
        assert mine["y"][1] == 3
        same(DTensor.from_local(mine["y"][0], mesh, [Shard(0)] * mesh.ndim), x + 1, 0)


def test_each_worker_gets_its_shard_and_no_more(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of("2")
    line, sent = workers_of(mesh).line, [0, 0]
    own = line.put_by_rank

    def put_by_rank(number: int, tensors: Any) -> None:
        for rank, tensor in enumerate(tensors):
            sent[rank] += tensor.numel()
        own(number, tensors)

    monkeypatch.setattr(line, "put_by_rank", put_by_rank)
    monkeypatch.setattr(line, "put", lambda *_: pytest.fail("something was sent whole"))
    model = Net()
    total = sum(param.numel() for param in model.parameters())
    sharded(model, mesh)
    assert sum(sent) == total
    assert min(sent) > 0.4 * total


def test_state_is_loaded(mesh_of: Any) -> None:
    mesh, reference = mesh_of("2"), Net()
    model, other = sharded(copy.deepcopy(reference), mesh), sharded(Net(), mesh)
    loss_of(other, shard_batch(torch.randn(ROWS, WIDTH), mesh)).backward()
    other.zero_grad()
    other.load_state_dict(model.state_dict())
    train(other, mesh, reference)
    again = sharded(Net(), mesh)
    again.load_state_dict(other.state_dict(), assign=True)
    train(again, mesh, reference)


# Memory and messages ---------------------------------------------------------------------------------------------


def bytes_of(workers: Any) -> int:
    """Return the bytes of live storages on the worker that has the most."""
    return max(workers.ask("inspect", worker_functions.live_bytes))


def bytes_before(workers: Any) -> int:
    """Return bytes_of after freeing other tests' models, whose hooks keep them alive until Python collects garbage."""
    gc.collect()
    return bytes_of(workers)


LARGE = 4096


@pytest.mark.parametrize("reshard", [True, False], ids=["freed", "kept"])
def test_workers_have_the_memory_of_one_layer(mesh_of: Any, reshard: bool) -> None:
    mesh, blocks = mesh_of("2"), 5
    workers = workers_of(mesh)
    before = bytes_before(workers)
    model = sharded(Net(blocks, hidden=LARGE), mesh, reshard_after_forward=reshard)
    layer = sum(param.numel() * 4 for param in model.blocks[0].parameters())
    assert bytes_of(workers) - before == pytest.approx(blocks * layer / 2, rel=0.1)
    forward, backward = [], []
    for block in model.blocks:
        block.norm.register_forward_hook(lambda *_: forward.append(bytes_of(workers) - before))
        block.norm.register_full_backward_hook(lambda *_: backward.append(bytes_of(workers) - before))
    for step in range(2):
        del forward[:], backward[:]
        loss_of(model, shard_batch(torch.randn(2, WIDTH), mesh)).backward()
        gradients = sum(param.grad is not None for param in model.parameters())
        assert gradients == len(list(model.parameters()))
        own = blocks * layer / 2 * (1 if step == 0 else 2)  # the second step also has the gradients of the first
        whole = [(each - own) / layer for each in forward]
        assert len(whole) == len(backward) == blocks
        if reshard:  # a gathered layer, and its gather buffer, which FSDP keeps until the next gather
            assert max(whole) < 2.7  # an activation is a tenth of a layer here
            assert whole[-1] - whole[0] < 0.6
            # Backward also holds the next gathered layer, its gradient and the reduced gradient.
            assert max(each - own for each in backward) / layer < blocks / 2 + 4
        else:
            assert whole[-1] - whole[0] > blocks - 1.5
    model.zero_grad()
    if reshard:
        assert bytes_of(workers) - before == pytest.approx(blocks * layer / 2, rel=0.2)


def test_freed_parameters_cannot_be_read(mesh_of: Any) -> None:
    mesh = mesh_of("2")
    model, held = sharded(Net(), mesh), []
    model.blocks[0].norm.register_forward_hook(lambda module, *_: held.append(module.weight))
    loss_of(model, shard_batch(torch.randn(ROWS, WIDTH), mesh))
    assert type(held[0]) is not DTensor
    with pytest.raises(RemoteOpError, match="memory was freed"):
        held[0].tolist()
    same(model.blocks[0].norm.weight, torch.ones(WIDTH))


def test_the_memory_is_freed_with_the_model(mesh_of: Any) -> None:
    mesh = mesh_of("2")
    workers = workers_of(mesh)
    before = bytes_before(workers)
    model = sharded(Net(hidden=LARGE), mesh)
    loss_of(model, shard_batch(torch.randn(2, WIDTH), mesh)).backward()
    assert bytes_of(workers) > before + LARGE * WIDTH
    del model
    gc.collect()  # hooks and states of FSDP refer to each other
    assert bytes_of(workers) <= before


class Records:
    """Counts the records that are written to the workers of a mesh."""

    def __init__(self, mesh: Any) -> None:
        self._sink, self._before = workers_of(mesh).sink, 0

    def __call__(self) -> int:
        """Return the number since the last call."""
        before, self._before = self._before, self._sink.records
        return self._before - before


def steps(mesh: Any, records: Records, **options: Any) -> list[tuple[int, int]]:
    """Return the number of records and of new signatures in each step."""
    model = sharded(Net(), mesh, **options)
    optimizer, found = adam(model), []
    for _ in range(5):
        records()
        misses = dispatch.statistics["misses"]
        loss_of(model, shard_batch(torch.randn(ROWS, WIDTH), mesh)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=FOREACH)
        optimizer.step()
        optimizer.zero_grad()
        found.append((records(), dispatch.statistics["misses"] - misses))
    return found


@pytest.mark.parametrize("name", ["2", "2x2"])
def test_a_step_has_the_same_records_each_time_and_no_new_signature(mesh_of: Any, name: str) -> None:
    mesh = mesh_of(name)
    found = steps(mesh, Records(mesh))
    # In the second step, parameters are gathered again that the first step had never freed.
    assert [misses for _, misses in found[2:]] == [0, 0, 0]
    assert found[2][0] == found[3][0] == found[4][0] > 0


def test_records_do_not_depend_on_how_many_ranks_there_are() -> None:
    few, many = simulated_mesh((2,), ("dp",)), simulated_mesh((4,), ("dp",))
    assert steps(few, Records(few))[-1] == steps(many, Records(many))[-1]


def test_a_fused_optimizer_sends_no_message_for_a_parameter(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = mesh_of("2")
    model = sharded(Net(), mesh)
    optimizer = adam(model, fused=True)
    loss_of(model, shard_batch(torch.randn(ROWS, WIDTH), mesh)).backward()
    monkeypatch.setattr(workers_of(mesh).line, "put", lambda *_: pytest.fail("a message"))
    optimizer.step()


def test_a_mesh_of_gpus_needs_none_here() -> None:
    mesh = simulated_mesh((2,), ("dp",), "cuda")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = steps(mesh, Records(mesh), mp_policy=policy)
    assert found[-1][0] > 0
    assert found[-1][1] == 0
    model = sharded(Net(), mesh)
    assert {param.device.type for param in model.parameters()} == {"cuda"}
    assert model(torch.randn(ROWS, WIDTH)).device.type == "cuda"
