"""Losses of sharded tensors have the values and the gradients of a single process, for any shard sizes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same

X, TARGET, WEIGHT = (torch.rand(5, 6) * 0.8 + 0.1 for _ in range(3))
SIGNS, LABELS = torch.tensor([1.0, -1, 1, 1, -1])[:, None].expand(5, 6), torch.tensor([1, 0, -100, 2, 5])

LOSSES: dict[str, Callable[[Any, str], Any]] = {
    "mse": lambda x, how: F.mse_loss(x, TARGET[: len(x)], reduction=how),
    "smooth_l1": lambda x, how: F.smooth_l1_loss(x, TARGET[: len(x)], reduction=how, beta=0.3),
    "huber": lambda x, how: F.huber_loss(x, TARGET[: len(x)], reduction=how, delta=0.3),
    "l1": lambda x, how: F.l1_loss(x, TARGET[: len(x)], reduction=how),
    "soft_margin": lambda x, how: F.soft_margin_loss(x, SIGNS[: len(x)], reduction=how),
    "bce": lambda x, how: F.binary_cross_entropy(x, TARGET[: len(x)], WEIGHT[: len(x)], reduction=how),
    "bce_logits": lambda x, how: F.binary_cross_entropy_with_logits(
        x, TARGET[: len(x)], reduction=how, pos_weight=WEIGHT[0]
    ),
    "kl_div": lambda x, how: F.kl_div(x.log(), TARGET[: len(x)], reduction="batchmean" if how == "mean" else how),
    "nll": lambda x, how: F.nll_loss(x, LABELS[: len(x)], reduction=how),
    "cross_entropy": lambda x, how: F.cross_entropy(x, LABELS[: len(x)], reduction=how),
    "weighted": lambda x, how: F.cross_entropy(
        x, LABELS[: len(x)], weight=WEIGHT[0], reduction=how, label_smoothing=0.1
    ),
    "of_pixels": lambda x, how: F.cross_entropy(
        x[:, :, None, None].expand(-1, -1, 1, 2), LABELS[: len(x), None, None].expand(-1, 1, 2), reduction=how
    ),
    "cosine": lambda x, how: F.cosine_embedding_loss(x, TARGET[: len(x)], SIGNS[: len(x), 0], 0.5, reduction=how),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_match_a_single_process(mesh_of: Callable[[str], Any], name: str) -> None:
    mesh, loss = mesh_of("2"), LOSSES[name]
    for rows in (4, 5):
        for how in ("mean", "sum", "none"):
            alone = X[:rows].clone().requires_grad_()
            expected = loss(alone, how)
            weights = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape)
            (expected * weights).sum().backward()
            for placement in (Shard(0), Shard(1), Replicate()):
                x = distribute_tensor(X[:rows], mesh, [placement]).requires_grad_()
                found = loss(x, how)
                same(found, expected)
                (found * weights).sum().backward()
                same(x.grad, alone.grad)


@pytest.mark.parametrize("name", ["3", "2x2"])
@pytest.mark.parametrize("how", ["mean", "none"])
def test_loss_of_sharded_sequences_matches_a_single_process(mesh_of: Callable[[str], Any], name: str, how: str) -> None:
    """As in a language model: flattening batch and length makes strided shards."""
    mesh = mesh_of(name)
    for batch, length in ((2, 4), (7, 3), (1, 2)):
        logits, labels = torch.randn(batch, length, 5), torch.randint(0, 5, (batch, length))
        labels[0, 0] = -100
        alone = logits.clone().requires_grad_()
        expected = F.cross_entropy(alone.flatten(0, 1), labels.flatten(), reduction=how)
        expected.square().sum().backward()
        for places in itertools.product((Shard(0), Shard(1)), repeat=mesh.ndim):
            x = distribute_tensor(logits, mesh, places).requires_grad_()
            for of_labels in (places, [Replicate()] * mesh.ndim):
                target = distribute_tensor(labels, mesh, of_labels)
                found = F.cross_entropy(x.flatten(0, 1), target.flatten(), reduction=how)  # type: ignore[attr-defined]
                same(found, expected)
                x.grad = None
                found.square().sum().backward()
                same(x.grad, alone.grad)


def test_loss_of_weighted_sharded_classes_matches_a_single_process(mesh_of: Callable[[str], Any]) -> None:
    mesh, labels = mesh_of("2x2"), torch.tensor([1, 0, -100, 2, 5])
    weight, alone = WEIGHT[0], X.clone().requires_grad_()
    expected = F.cross_entropy(alone, labels, weight)
    expected.backward()
    for of_x, of_labels, of_weight in itertools.product(
        ([Shard(0), Replicate()], [Shard(1), Shard(1)], [Shard(0), Shard(1)]),
        ([Shard(0), Replicate()], [Replicate(), Replicate()]),
        ([Replicate(), Shard(0)], [Shard(0), Shard(0)]),
    ):
        x = distribute_tensor(X, mesh, of_x).requires_grad_()
        found = F.cross_entropy(
            x, distribute_tensor(labels, mesh, of_labels), distribute_tensor(weight, mesh, of_weight)
        )
        same(found, expected)
        found.backward()
        same(x.grad, alone.grad)


def test_losses_on_two_mesh_dimensions_match_a_single_process(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    for loss in (LOSSES["mse"], LOSSES["cross_entropy"]):
        alone = X.clone().requires_grad_()
        loss(alone, "mean").backward()
        for placements in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(0)]):
            x = distribute_tensor(X, mesh, placements).requires_grad_()
            loss(x, "mean").backward()
            same(x.grad, alone.grad)


def test_losses_after_loss_parallel_match_a_single_process(mesh_of: Callable[[str], Any]) -> None:
    """`loss_parallel` registers its own handlers, and at its end removes the handlers of these operators."""
    mesh, loss = mesh_of("2"), LOSSES["cross_entropy"]
    with loss_parallel():
        x = distribute_tensor(X[:4], mesh, [Shard(1)])
        labels = distribute_tensor(LABELS[:4], mesh, [Replicate()])
        same(F.cross_entropy(x, labels), F.cross_entropy(X[:4], LABELS[:4]))
    same(loss(distribute_tensor(X, mesh, [Shard(0)]), "mean"), loss(X, "mean"))


def test_loss_of_replicated_tensors_is_one_operation(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2")
    x, target = (distribute_tensor(each, mesh, [Replicate()]) for each in (X, TARGET))
    sink = workers_of(mesh).sink

    def records(calculate: Callable[[Any, Any], Any]) -> int:
        calculate(x, target)
        before = sink.records
        calculate(x, target)
        return sink.records - before

    assert records(F.mse_loss) == records(torch.add)


def test_fill_into_a_partial_sum(mesh_of: Callable[[str], Any]) -> None:
    total = distribute_tensor(X, mesh_of("3"), [Shard(1)]).sum(1)
    assert total.placements == (Partial(),)
    same(torch.empty_like(total).fill_(3), torch.full((5,), 3.0))
    for value in (2, torch.tensor(3.0)):
        total.fill_(value)  # if each rank wrote the value, the sum would be a multiple of it
        assert total.placements == (Partial(),)
        same(total, torch.full((5,), float(value)))


@pytest.mark.parametrize("how", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 0, 2])
def test_loss_parallel_with_weights_and_ignored_labels(mesh_of: Callable[[str], Any], ignored: int, how: str) -> None:
    """torch looks up the weight even of the label -100."""
    labels = torch.where(LABELS == -100, ignored, LABELS)
    for rows in (2, 5):
        alone = X[:rows].clone().requires_grad_()
        options: Any = {"weight": WEIGHT[0], "reduction": how, "ignore_index": ignored}
        F.cross_entropy(alone, labels[:rows], **options).sum().backward()
        mesh = mesh_of("2")
        x = distribute_tensor(X[:rows], mesh, [Shard(1)]).requires_grad_()
        given = {**options, "weight": distribute_tensor(WEIGHT[0], mesh, [Replicate()])}
        with mesh, loss_parallel():
            found = F.cross_entropy(x, distribute_tensor(labels[:rows], mesh, [Replicate()]), **given)
            found.sum().backward()
        same(found, F.cross_entropy(alone, labels[:rows], **options))
        same(x.grad, alone.grad)
