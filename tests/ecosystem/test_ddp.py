"""DistributedDataParallel and features built on it: "monarch" equals "gloo" bit by bit.

The tests cover graph modes, communication hooks, uneven inputs, the sharded optimizer and local SGD. A DDP step under
torch.compile is tested in test_compile.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import Join
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.ecosystem.support import WIDTH, batch, learns, mlp, on_both, train_step

STEPS = 5


class Branches(nn.Module):
    """A model with two branches, one of them unused in every step, and running statistics that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = mlp()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.left, self.right = mlp(layers=1), mlp(layers=1)

    def forward(self, x: Tensor, left: bool) -> Tensor:
        x = self.norm(self.trunk(x))
        return self.left(x) if left else self.right(x)


def _outcome(losses: list[float], model: nn.Module) -> dict[str, Any]:
    return {"losses": losses, "state": model.state_dict()}


def _train(ddp: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: int = STEPS) -> list[float]:
    losses = []
    for _ in range(steps):
        losses.append(train_step(ddp, optimizer, *batch(0, rank)))
    return losses


def _check(results: list[Any], *, same_state: bool = True) -> None:
    assert all(learns(result["losses"]) for result in results)
    assert results[0]["losses"] != results[1]["losses"], "the ranks saw the same data"
    if same_state:
        assert all(result["state"] == results[0]["state"] for result in results)


def _plain(rank: int, options: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(mlp(), **options)
    losses = _train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), rank)
    return _outcome(losses, ddp)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"gradient_as_bucket_view": True, "static_graph": True},
        {"bucket_cap_mb": 0.0001},  # one bucket for each parameter
        {"find_unused_parameters": True, "bucket_cap_mb": 0.0001, "gradient_as_bucket_view": True},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
# torch warns once in a run if find_unused_parameters is on and no parameter is unused.
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified:UserWarning")
def test_ddp(options: dict[str, Any]) -> None:
    _check(on_both(_plain, 2, options))


@pytest.mark.slow
def test_ddp_on_three_ranks() -> None:
    _check(on_both(_plain, 3, {"bucket_cap_mb": 0.001}))


def _subgroups(rank: int) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(mlp(), process_group=groups[rank // 2])
    return _outcome(_train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank), ddp)


def test_ddp_in_subgroups() -> None:
    results = on_both(_subgroups, 4)
    assert results[0]["state"] == results[1]["state"] != results[2]["state"] == results[3]["state"]


def _unused(rank: int, options: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(Branches(), find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        x, y = batch(0, rank)
        optimizer.zero_grad()
        # In two of three steps both ranks take the same branch; in the third they take different ones.
        loss = nn.functional.mse_loss(ddp(x, left=step % 3 == 0 or (step % 3 == 2 and rank == 0)), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for buffer in ddp.module.buffers():
        dist.broadcast(buffer, 0)  # DDP does this only at the next forward pass, and there is none after the last step
    return _outcome([losses[0], losses[3]], ddp)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["plain", "bucket-view"])
def test_unused_parameters_and_buffers(options: dict[str, Any]) -> None:
    _check(on_both(_unused, 2, options))


def _accumulate(rank: int) -> Any:
    ddp = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    losses, silent = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with ddp.no_sync():
            x, y = batch(0, rank)
            nn.functional.mse_loss(ddp(x), y).backward()
        silent.append([p.grad.clone() for p in ddp.parameters()])
        x, y = batch(1, rank)
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {**_outcome(losses, ddp), "silent": silent}


def test_no_sync() -> None:
    results = on_both(_accumulate, 2)
    _check(results)
    assert results[0]["silent"] != results[1]["silent"], "no_sync reduced gradients"


# Hooks ----------------------------------------------------------------------------------------------------


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _bf16(_state, bucket):
    # No annotations: DDP checks them, and here they are strings.
    # DDP refuses default_hooks.bf16_compress_hook by name on a machine without NCCL, so this is another function.
    return default_hooks._compress_hook(torch.bfloat16, _world(), bucket)


# name -> (state, hook); made inside the ranks, because some states hold a group.
# Two hooks are left out, because they fail in torch itself before any communication. batched_powerSGD_hook asserts a
# third dimension, and quantization_pertensor_hook expects a list in a future that holds a tensor.
HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (None, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, _bf16),
    "fp16-wrapper": lambda: (_world(), default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "local-sgd": lambda: (
        post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 2),
        post_localSGD_hook.post_localSGD_hook,
    ),
}

POWER_SGD: dict[str, dict[str, Any]] = {
    "rank-2": {"matrix_approximation_rank": 2},
    "rank-3": {"matrix_approximation_rank": 3},
    "cold": {"warm_start": False, "use_error_feedback": False, "orthogonalization_epsilon": 1e-6},
}


def _hooked(rank: int, name: str) -> Any:
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
    ddp.register_comm_hook(*HOOKS[name]())
    return _outcome(_train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank), ddp)


@pytest.mark.parametrize("name", HOOKS)
def test_comm_hook(name: str) -> None:
    # After its first steps local SGD averages only inside its subgroup. Here each subgroup is one rank.
    _check(on_both(_hooked, 2, name), same_state=name != "local-sgd")


def _power_sgd(rank: int, name: str, half: bool) -> Any:
    # One bucket only. PowerSGD starts its second collective in the callback of the first, on any thread of Gloo.
    # With more buckets the ranks would start these collectives in different orders and hang, also on "gloo".
    ddp = DistributedDataParallel(mlp(width=16), bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(_world(), start_powerSGD_iter=2, min_compression_rate=0.5, **POWER_SGD[name])
    hook = powerSGD_hook.powerSGD_hook
    ddp.register_comm_hook(state, default_hooks.fp16_compress_wrapper(hook) if half else hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        losses.append(train_step(ddp, optimizer, *batch(0, rank, width=16)))
    return {**_outcome(losses, ddp), "compressed": state.compression_stats()}


@pytest.mark.parametrize(("name", "half"), [("rank-2", False), ("rank-3", False), ("cold", False), ("rank-2", True)])
def test_power_sgd(name: str, half: bool) -> None:
    results = on_both(_power_sgd, 2, name, half)
    _check(results)
    rate, before, after = results[0]["compressed"]
    assert rate > 1 and before > after > 0, "PowerSGD compressed nothing"


def _built_in(rank: int, name: str) -> Any:
    ddp = DistributedDataParallel(mlp())
    ddp._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, name))
    return _outcome(_train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), rank), ddp)


@pytest.mark.parametrize("name", ["ALLREDUCE", "FP16_COMPRESS"])
def test_built_in_comm_hook(name: str) -> None:
    """Built-in hooks are C++ only: they call no Python method of the group."""
    _check(on_both(_built_in, 2, name))


def _overlapped(rank: int) -> Any:
    ddp = DistributedDataParallel(mlp(), bucket_cap_mb=0.0005)
    params = list(ddp.parameters())

    def hook(_state, bucket):  # no annotations, for the same reason as in _bf16
        def step(future: Any) -> Tensor:
            for param, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
                with torch.no_grad():
                    param.sub_(grad, alpha=0.1)
            return bucket.buffer()

        return default_hooks.allreduce_hook(None, bucket).then(step)

    ddp.register_comm_hook(None, hook)
    return _outcome(_train(ddp, torch.optim.SGD(params, lr=0.0), rank), ddp)


def test_hook_that_steps_the_optimizer() -> None:
    _check(on_both(_overlapped, 2))


# Optimizers and uneven inputs -----------------------------------------------------------------------------


def _uneven(rank: int, zero: bool) -> Any:
    ddp = DistributedDataParallel(mlp())
    if zero:
        optimizer: Any = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    losses = []
    with Join([ddp, optimizer] if zero else [ddp]):
        for _ in range(STEPS + 2 * rank):
            losses.append(train_step(ddp, optimizer, *batch(0, rank)))
    return _outcome(losses, ddp)


@pytest.mark.parametrize("zero", [False, True], ids=["ddp", "ddp-and-zero"])
def test_join_with_uneven_inputs(zero: bool) -> None:
    results = on_both(_uneven, 2, zero)
    _check(results)
    assert [len(result["losses"]) for result in results] == [STEPS, STEPS + 2]


def _join_that_throws(rank: int) -> str:
    ddp = DistributedDataParallel(mlp())
    try:
        with ddp.join(throw_on_early_termination=True):
            for _ in range(2 + rank):
                ddp(batch(0, rank)[0]).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_join_that_throws() -> None:
    assert all("exhausted" in text for text in on_both(_join_that_throws, 2))


def _zero(rank: int, options: dict[str, Any]) -> Any:
    ddp = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.01, **options)
    losses = _train(ddp, optimizer, rank)
    optimizer.consolidate_state_dict(to=1)
    mine = sum(p.numel() for group in optimizer.optim.param_groups for p in group["params"])
    whole = optimizer.state_dict() if rank == 1 else {}
    return {**_outcome(losses, ddp), "optimizer": whole.get("state"), "mine": mine}


@pytest.mark.parametrize("options", [{}, {"parameters_as_bucket_view": True}], ids=["plain", "bucket-view"])
def test_zero_redundancy_optimizer(options: dict[str, Any]) -> None:
    results = on_both(_zero, 2, options)
    _check(results)
    whole = sum(p.numel() for p in mlp().parameters())
    assert results[0]["mine"] + results[1]["mine"] == whole and results[1]["optimizer"]


def _local_sgd(rank: int) -> Any:
    ddp = DistributedDataParallel(mlp())
    state = post_localSGD_hook.PostLocalSGDState(None, dist.new_subgroups(1)[0], 1)
    ddp.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(ddp.parameters(), lr=0.1), PeriodicModelAverager(period=2, warmup_steps=2)
    )
    return _outcome(_train(ddp, optimizer, rank), ddp)


def test_post_local_sgd_optimizer() -> None:
    _check(on_both(_local_sgd, 2))


# Errors ---------------------------------------------------------------------------------------------------


def _sync_batch_norm(rank: int) -> list[str]:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Branches())
    texts = []
    for call in (lambda: DistributedDataParallel(model), lambda: model(batch(0, rank)[0], left=True)):
        with pytest.raises(ValueError) as caught:
            call()
        texts.append(str(caught.value))
    return texts


def test_sync_batch_norm_is_refused_in_the_same_words() -> None:
    assert all("GPU" in text for text in on_both(_sync_batch_norm, 2)[0])
