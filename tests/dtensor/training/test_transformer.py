"""The Transformer of torch's own DTensor tests trains from the controller as in a single process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from monarch_backend.dtensor import shard_batch
from tests.dtensor.torch_test_modules import common_dtensor
from tests.dtensor.values import same
from tests.support.tiers import slow_except

ModelArgs, Transformer = common_dtensor.ModelArgs, common_dtensor.Transformer
STEPS, BATCH = 3, 4

Split = Callable[[torch.Tensor], Any]
"""Function that turns a batch of the controller into the model's input."""


def tensor_parallel(model: Any, mesh: Any, **options: Any) -> Split:
    """Parallelize by torch's own plan for this model."""
    options = {"use_seq_parallel": False, **options}
    Transformer.parallelize(model, mesh[mesh.mesh_dim_names[-1]], **options)
    return lambda batch: batch


def sequence_parallel(model: Any, mesh: Any) -> Split:
    """As tensor_parallel, with the activations between the layers sharded by tokens."""
    return tensor_parallel(model, mesh, use_seq_parallel=True)


def local_attention(model: Any, mesh: Any) -> Split:
    """As tensor_parallel, with the attention on local tensors, each rank with its own heads."""
    return tensor_parallel(model, mesh, use_seq_parallel=True, local_output_for_attn=True)


def _replicated(model: Any, mesh: Any) -> None:
    distribute_module(model, mesh)  # this makes two parameters of a tied weight
    if model.model_args.weight_tying:
        model.output.weight = model.tok_embeddings.weight


def data_parallel(model: Any, mesh: Any) -> Split:
    """Each rank has the whole model and its own part of the batch."""
    _replicated(model, mesh)
    first = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]
    return lambda batch: distribute_tensor(batch, mesh, first)


def data_parallel_on_all(model: Any, mesh: Any) -> Split:
    """As data_parallel, over both dimensions of the mesh."""
    _replicated(model, mesh)
    return lambda batch: distribute_tensor(batch, mesh, [Shard(0)] * mesh.ndim)


def fully_sharded(model: Any, mesh: Any) -> Split:
    """FSDP2: shard each layer, then the rest."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return lambda batch: shard_batch(batch, mesh)


def fully_sharded_and_tensor_parallel(model: Any, mesh: Any) -> Split:
    """FSDP2 over the first dimension of the mesh, and torch's plan over the last."""
    tensor_parallel(model, mesh)
    return fully_sharded(model, mesh[mesh.mesh_dim_names[0]])


WAYS = [
    ("2", tensor_parallel), ("2", sequence_parallel), ("2", local_attention), ("2", data_parallel),
    ("2x2", tensor_parallel), ("2x2", data_parallel), ("2x2", data_parallel_on_all),
    ("2", fully_sharded), ("2x2", fully_sharded_and_tensor_parallel),
]  # fmt: skip


def losses(model: Any, split: Split, mean: Any = None) -> list[float]:
    """Train, and return the loss of each step. All calls use the same batches.

    ``mean``: a mesh if its ranks have different losses, which are then averaged.
    """
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(STEPS):
        tokens = torch.randint(0, 8, (BATCH, 16))
        inputs, targets = split(tokens[:, :14].contiguous()), split(tokens[:, 1:15].contiguous())
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        if mean is not None:
            loss = DTensor.from_local(loss.detach(), mean, [Partial("avg")] * mean.ndim)
        found.append(loss)
    return [each.item() for each in found]


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")  # no code writes into this view
@pytest.mark.parametrize("tied", slow_except([True, False], True), ids=["tied", "untied"])
@pytest.mark.parametrize(("name", "way"), WAYS, ids=[f"{name}-{way.__name__}" for name, way in WAYS])
def test_transformer_trains_as_in_a_single_process(mesh_of: Any, name: str, way: Any, tied: bool) -> None:
    alone = Transformer(ModelArgs(dropout_p=0.0, weight_tying=tied))
    ours: nn.Module = copy.deepcopy(alone)
    mesh = mesh_of(name)
    split = way(ours, mesh)
    own = way in (fully_sharded, fully_sharded_and_tensor_parallel)
    with mesh:  # torch makes positions by device type, which several meshes share
        found = losses(ours, split, mesh if own else None)
    assert found == pytest.approx(losses(alone, lambda batch: batch), rel=1e-4)
    for (where, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
        try:
            same(mine, theirs, 1e-4)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from error


def test_experts_are_sharded_as_the_rest(mesh_of: Any) -> None:
    if not hasattr(ModelArgs, "num_experts"):
        pytest.skip("the Transformer of torch's tests has no experts before torch 2.12")
    alone = Transformer(ModelArgs(dropout_p=0.0, num_experts=4))
    ours: nn.Module = copy.deepcopy(alone)
    split = tensor_parallel(ours, mesh_of("2"))
    assert losses(ours, split) == pytest.approx(losses(alone, lambda batch: batch), rel=1e-4)


def test_activations_are_calculated_again_in_the_backward_pass(mesh_of: Any) -> None:
    alone = Transformer(ModelArgs(dropout_p=0.0, checkpoint_activations=True))
    ours: nn.Module = copy.deepcopy(alone)
    split = sequence_parallel(ours, mesh_of("2"))
    assert losses(ours, split) == pytest.approx(losses(alone, lambda batch: batch), rel=1e-4)
