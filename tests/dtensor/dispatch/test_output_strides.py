"""Results have the strides that the controller computed, for any strides that a device's kernel returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from monarch_backend.dtensor import run
from tests.dtensor.conftest import DEVICE
from tests.dtensor.values import same, value

pytestmark = pytest.mark.skipif(DEVICE == "xla", reason="XLA has orders of its own")


def batch_norm(x: Any) -> Any:
    return F.batch_norm(x, None, None, training=True)


# For a transposed input, torch's meta function of each gives other strides than CPU kernels return.
RESULTS: dict[str, Callable[[Any], Any]] = {
    "batch_norm": batch_norm,
    "logsigmoid": F.logsigmoid,
    "2 ** x": lambda x: torch.pow(2.0, x),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x[..., None].expand(-1, -1, -1, 3), 2),
    "floor_divide": lambda x: torch.floor_divide(x, torch.tensor(0.5)),
    "svd": lambda x: torch.linalg.svd(x)[2],
    "rfft": lambda x: torch.fft.rfft(x, dim=1).real,
    "replication_pad2d": lambda x: F.pad(x[..., None].movedim(1, -1), (1, 1, 1, 1), mode="replicate"),
}
GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "batch_norm": batch_norm,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "log_softmax": lambda x: x.log_softmax(-1),
    "mse_loss": lambda x: F.mse_loss(x, x.detach() * 2),
    "smooth_l1_loss": lambda x: F.smooth_l1_loss(x, x.detach() * 2),
}


def transposed() -> torch.Tensor:
    return torch.randn(6, 5, 4).transpose(1, 2)


def order_there(x: Any) -> list[int]:
    return list((x._local_tensor if isinstance(x, DTensor) else x).stride())


def check(x: Any, expected: torch.Tensor) -> None:
    """Assert that values are equal and that workers have the controller's strides, so that views agree."""
    same(x, expected, 1e-4)
    local = x._local_tensor
    for found in run(x.device_mesh, order_there, x).get().values():
        sizes = zip(found, local.stride(), local.shape, strict=True)
        assert all(there == here for there, here, size in sizes if size > 1), (found, local.stride())
    same(x.transpose(-1, -2).reshape(-1), expected.transpose(-1, -2).reshape(-1), 1e-4)


@pytest.mark.parametrize("name", RESULTS)
def test_results(mesh_of: Callable[[str], Any], name: str) -> None:
    x = transposed()
    for placement in (Shard(0), Replicate()):
        ours = distribute_tensor(x, mesh_of("2"), [placement])
        for _ in range(2):  # the first call looks at the workers' strides, the second one knows them
            check(RESULTS[name](ours), RESULTS[name](x))


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(mesh_of: Callable[[str], Any], name: str) -> None:
    x = transposed().requires_grad_()
    ours = distribute_tensor(x.detach(), mesh_of("2"), [Shard(0)]).requires_grad_()
    for each in (x, ours):
        GRADIENTS[name](each * 1).square().mean().backward()
    check(ours.grad, x.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_captured_steps(mesh_of: Callable[[str], Any], inductor: bool) -> None:
    def program(x: Any) -> list[Any]:
        y = batch_norm(x)
        return [y, y.transpose(1, 2).reshape(-1) * 2, y.reshape(-1) * 2, F.logsigmoid(x)]

    torch._dynamo.reset()
    x = transposed()
    captured = torch.compile(program, backend="monarch", options={"inductor": inductor})
    for _ in range(3):
        for found, expected in zip(captured(distribute_tensor(x, mesh_of("2"), [Shard(0)])), program(x), strict=True):
            check(found, expected) if found.ndim > 1 else same(found, expected, 1e-4)


@pytest.mark.parametrize("placement", [Shard(0), Replicate(), Shard(2)], ids=str)
def test_channels_last(mesh_of: Callable[[str], Any], placement: Any) -> None:
    """A convolution keeps the channels last, and so does its gradient."""
    x, weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last), torch.randn(2, 3, 3, 3)
    ours = distribute_tensor(x, mesh_of("2"), [placement]).requires_grad_()
    weight_there = distribute_tensor(weight, mesh_of("2"), [Replicate()])
    alone = x.clone().requires_grad_()
    found, expected = F.conv2d(ours, weight_there), F.conv2d(alone, weight)
    assert found.stride() == expected.stride()
    same(found.flatten(1), expected.flatten(1), 1e-4)
    for each in (found, expected):
        each.flatten(1).square().sum().backward()
    same(ours.grad.flatten(1), alone.grad.flatten(1), 1e-3)  # type: ignore[union-attr]


@torch.library.custom_op("monarch_tests::beside", mutates_args=())
def beside(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, 3


beside.register_fake(lambda x: (torch.empty_like(x), 3))


def defined() -> None:
    """Do nothing. The call makes a worker import this file, which defines the operator."""


def test_a_captured_operator_that_returns_no_tensor_beside_one(mesh_of: Callable[[str], Any]) -> None:
    def program(x: Any) -> Any:
        found, number = torch.ops.monarch_tests.beside(x)
        return found + number

    torch._dynamo.reset()
    run(mesh_of("2"), defined).get()
    captured = torch.compile(program, backend="monarch", fullgraph=True, options={"inductor": False})
    x = distribute_tensor(torch.ones(2, 2), mesh_of("2"), [Replicate()]).to_local()
    same(captured(x), torch.full((2, 2), 5.0))


def test_random_numbers_after_a_batch_norm_match_a_single_process(mesh_of: Callable[[str], Any]) -> None:
    x, dropout = transposed(), nn.Dropout(0.5)
    torch.manual_seed(3)
    expected = dropout(batch_norm(x))
    torch.manual_seed(3)
    found = dropout(batch_norm(distribute_tensor(x, mesh_of("2"), [Shard(0)])))
    assert found.stride() == expected.stride()
    torch.testing.assert_close(value(found), expected)
