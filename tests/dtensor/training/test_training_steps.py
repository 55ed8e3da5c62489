"""Training from the controller: three steps have the losses and parameters of a single process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from tests.dtensor.conftest import DEVICE
from tests.dtensor.torch_test_modules import common_dtensor
from tests.dtensor.values import same, value

STEPS = 3
WORDS, WIDTH = 12, 12  # divisible by 2, 3 and 4

Loss = Callable[[nn.Module, torch.Tensor], Any]


class Net(nn.Module):
    """Predicts the next word from each word, by all kinds of layers that a plan can name."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.again = again

    def block(self, x: Any) -> Any:
        """Return the output of the layers that may be recomputed in backward."""
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, words: Any) -> Any:
        """Return for each word the logits of all words."""
        x = self.embedding(words)
        x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return self.out(x)


def words(seed: int) -> torch.Tensor:
    """Return a batch with a number of tokens that all meshes split evenly."""
    return torch.randint(0, WORDS, (12, 13), generator=torch.Generator().manual_seed(seed))


def cross_entropy(net: nn.Module, batch: torch.Tensor) -> Any:
    """Return the loss of predicting the next word."""
    return F.cross_entropy(net(batch[:, :-1].contiguous()).flatten(0, 1), batch[:, 1:].flatten())


def train(net: nn.Module, optimizer: Any, loss: Loss = cross_entropy, between: Any = None) -> list[Any]:
    """Return the losses of STEPS steps. ``between`` gets the net before each change of its parameters."""
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        value = loss(net, words(step))
        value.backward()
        if between is not None:
            between(net)
        optimizer.step()
        losses.append(value)
    return [each.item() for each in losses]


def equally(ours: nn.Module, mine: list[Any], alone: nn.Module, theirs: list[Any], tolerance: float = 1e-4) -> None:
    """Assert that both trainings had equal losses and parameters."""
    assert mine == pytest.approx(theirs, rel=tolerance)
    assert mine[0] != mine[-1]
    for (name, one), other in zip(ours.named_parameters(), alone.parameters(), strict=True):
        try:
            same(one, other, tolerance)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def both(
    ours: nn.Module, alone: nn.Module, optimizer: Any = None, loss: Loss = cross_entropy, between: Any = None
) -> None:
    """Train both, and compare them."""
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    mine = train(ours, make(ours.parameters()), loss, between)
    equally(ours, mine, alone, train(alone, make(alone.parameters()), loss, between))


def last(mesh: Any) -> Any:
    """Return the mesh's dimension for tensor parallelism."""
    return mesh[mesh.mesh_dim_names[-1]]


SEQUENCE_PLAN: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
PLAIN_PLAN: dict[str, Any] = {
    "embedding": ColwiseParallel(output_layouts=Replicate()),  # shards the other dimension of the table
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "out": ColwiseParallel(output_layouts=Replicate()),
}


# Plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [SEQUENCE_PLAN, PLAIN_PLAN], ids=["sequence", "plain"])
def test_plans(mesh: Any, plan: Any) -> None:
    alone = Net()
    both(parallelize_module(copy.deepcopy(alone), last(mesh), plan), alone)


@pytest.mark.parametrize("bias", [True, False])
def test_the_mlp_of_torchs_own_tests(mesh: Any, bias: bool) -> None:
    alone = common_dtensor.MLPModule("cpu", bias)
    ours = parallelize_module(
        copy.deepcopy(alone), last(mesh),
        {"net1": ColwiseParallel(use_local_output=False), "net2": RowwiseParallel(input_layouts=Shard(-1))},
    )  # fmt: skip
    both(ours, alone, loss=lambda net, batch: net(batch.float()[:, :10] / WORDS).square().mean())


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, *, scale: Any = None) -> Any:
        out = self.linear(x)
        return out if scale is None else out * scale


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = _Inner(), _Inner(), _Inner()

    def forward(self, x: Any) -> Any:
        return self.third(self.second(self.first(x), scale=x))


def test_inputs_and_outputs_are_prepared(mesh: Any) -> None:
    alone = _Outer()
    plan: dict[str, Any] = {
        "first": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=False),
        "second": PrepareModuleInputOutput(
            input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),),
            input_kwarg_layouts={"scale": Replicate()}, desired_input_kwarg_layouts={"scale": Replicate()},
            use_local_input=False, output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False,
        ),
        "third": PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=Replicate()),
        **{f"{name}.linear": ColwiseParallel(use_local_output=False) for name in ("first", "second")},
    }  # fmt: skip
    plan.pop("first.linear"), plan.pop("second.linear")
    ours = copy.deepcopy(alone)
    distribute_module(ours, last(mesh))
    parallelize_module(ours, last(mesh), plan)
    both(ours, alone, loss=lambda net, batch: net(batch.float()[:, :WIDTH] / WORDS).square().mean())


def test_a_batch_in_parts(mesh: Any) -> None:
    """Data parallel without a wrapper: each rank has all parameters, and its part of the batch."""
    alone = Net()
    ours = copy.deepcopy(alone)
    distribute_module(ours, mesh)
    here = [Shard(0), *[Replicate()] * (mesh.ndim - 1)]

    def loss(net: nn.Module, batch: torch.Tensor) -> Any:
        return cross_entropy(net, distribute_tensor(batch, mesh, here) if net is ours else batch)

    both(ours, alone, loss=loss)


def test_parameters_of_uneven_shards(mesh: Any) -> None:
    alone = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 5))

    def by_rows(_name: str, module: nn.Module, where: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, where, [Shard(0)] * where.ndim)))

    ours = distribute_module(copy.deepcopy(alone), mesh, by_rows)
    both(ours, alone, loss=lambda net, batch: net(batch.float()[:, :WIDTH] / WORDS).square().mean())


# Losses and precision -------------------------------------------------------------------------------------------


def test_the_loss_of_sharded_classes(mesh: Any) -> None:
    alone = Net()
    plan = {**SEQUENCE_PLAN, "out": ColwiseParallel(input_layouts=Shard(1), use_local_output=False)}
    ours = parallelize_module(copy.deepcopy(alone), last(mesh), plan)

    def loss(net: nn.Module, batch: torch.Tensor) -> Any:
        found = cross_entropy(net, batch)
        assert net is alone or isinstance(found, DTensor)
        return found

    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, alone)]
    with loss_parallel(), mesh:  # loss_parallel makes a tensor by device type, which several meshes share
        mine = train(ours, optimizers[0], loss)
    equally(ours, mine, alone, train(alone, optimizers[1], loss))


def test_autocast(line: Any) -> None:
    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), line, PLAIN_PLAN)

    def loss(net: nn.Module, batch: torch.Tensor) -> Any:
        with torch.autocast(DEVICE if net is ours else "cpu", torch.bfloat16):
            out = net(batch[:, :-1].contiguous())
        assert out.dtype is torch.bfloat16
        return F.cross_entropy(out.float().flatten(0, 1), batch[:, 1:].flatten())

    mine, theirs = (train(net, torch.optim.SGD(net.parameters(), lr=0.1), loss) for net in (ours, alone))
    equally(ours, mine, alone, theirs, 1e-2)


@pytest.mark.parametrize("plan", [SEQUENCE_PLAN, PLAIN_PLAN], ids=["sequence", "plain"])
def test_activation_checkpointing(line: Any, plan: Any) -> None:
    alone = Net(again=True)
    both(parallelize_module(copy.deepcopy(alone), line, plan), alone)


# Optimizers -----------------------------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 1e-2}),
    (torch.optim.Adagrad, {"lr": 1e-2}),
    (torch.optim.Adadelta, {"lr": 1.0}),
    (torch.optim.Adamax, {"lr": 1e-2}),
    (torch.optim.NAdam, {"lr": 1e-2}),
    (torch.optim.RAdam, {"lr": 1e-2}),
    (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    (torch.optim.ASGD, {"lr": 1e-2}),
]
"""All of torch's optimizers that DTensor supports.

Rprop is left out, because it writes into elements that a mask selects. LBFGS is left out, because it gets other
losses than in a single process.
"""
FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
CASES = [
    pytest.param(kind, {**options, how: on}, id=f"{kind.__name__}{i}-{how if on else 'for-loop'}")
    for i, (kind, options) in enumerate(OPTIMIZERS)
    for how, on in (("foreach", False), ("foreach", True), ("fused", True))
    if how != "fused" or kind in FUSED
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_optimizers(mesh_of: Any, kind: Any, options: Any) -> None:
    alone, mesh = Net(), mesh_of("2")
    ours = parallelize_module(copy.deepcopy(alone), mesh, SEQUENCE_PLAN)
    for parameter in ours.parameters():
        assert isinstance(parameter, DTensor)  # torch's foreach cannot mix DTensors with plain tensors
    # ASGD makes its step count by device type, which several meshes share.
    with mesh if kind is torch.optim.ASGD else contextlib.nullcontext():
        both(ours, alone, lambda parameters: kind(parameters, **options))


PLACES = (Replicate(), Shard(0), Shard(1))


@pytest.mark.parametrize("kind", FUSED)
def test_fused_step_with_padded_gradients(mesh_of: Any, kind: Any) -> None:
    mesh, options = mesh_of("3"), {"lr": 0.1} | ({"momentum": 0.9} if kind is torch.optim.SGD else {})
    weight, x = torch.arange(64.0).view(8, 8) / 64, torch.randn(6, 8)
    ours = distribute_tensor(weight, mesh, [Shard(1)])
    found = _weight_after(kind, options, ours, distribute_tensor(x, mesh, [Shard(0)]))
    assert found.grad.placements == (Partial(),), "scattered along the second dimension, whose shards are uneven"
    same(found, _weight_after(kind, options, weight.clone(), x))


def _weight_after(kind: Any, options: Any, weight: Any, x: Any, move: Callable[[Any], Any] = lambda x: x) -> Any:
    """Return the weight after three steps. After the first one ``move`` redistributes the optimizer's states."""
    parameter = nn.Parameter(weight)
    optimizer = kind([parameter], fused=True, **options)
    for number in range(3):
        optimizer.zero_grad()
        (x @ parameter.T).square().mean().backward()
        optimizer.step()
        if number == 0:
            state = optimizer.state[parameter]
            state.update({name: move(each) for name, each in state.items() if each.ndim == 2})
    return parameter


@pytest.mark.parametrize("there", PLACES, ids=str)
@pytest.mark.parametrize("kind", FUSED)
def test_fused_step_changes_state_in_place(mesh_of: Any, kind: Any, there: Any) -> None:
    """torch makes a momentum like the first gradient, which may have another placement than its parameter."""
    mesh, options = mesh_of("2"), {"lr": torch.tensor(0.1) if kind is torch.optim.AdamW else 0.1}
    if kind is torch.optim.SGD:
        options |= {"momentum": 0.9, "nesterov": True}
    weight, x = torch.randn(4, 6), torch.randn(2, 6)
    expected = _weight_after(kind, options, weight.clone(), x)
    for of_x in PLACES:
        ours, batch = distribute_tensor(weight, mesh, [there]), distribute_tensor(x, mesh, [of_x])
        same(_weight_after(kind, options, ours, batch), expected)
    for moved in PLACES:
        ours = distribute_tensor(weight, mesh, [there])

        def move(state: Any, where: Any = moved) -> Any:
            return state.redistribute(mesh, [where])

        same(_weight_after(kind, options, ours, distribute_tensor(x, mesh, [Replicate()]), move), expected)


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_are_clipped(mesh: Any, norm: float, foreach: bool) -> None:
    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), last(mesh), SEQUENCE_PLAN)
    seen: dict[bool, list[Any]] = {True: [], False: []}

    def clip(net: nn.Module) -> None:
        total = nn.utils.clip_grad_norm_(net.parameters(), 0.05, norm_type=norm, foreach=foreach)
        seen[net is ours].append(total)

    both(ours, alone, lambda parameters: torch.optim.SGD(parameters, lr=1.0), between=clip)
    for mine, theirs in zip(seen[True], seen[False], strict=True):
        same(mine, theirs)


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [True, False])
def test_gradients_on_several_meshes_are_clipped_by_one_norm(
    mesh_of: Any, all_procs: Any, norm: float, foreach: bool
) -> None:
    """Gradients on sub-meshes of one mesh, also with disjoint ranks, and beside plain tensors."""
    mesh, values = mesh_of("2x2"), [torch.randn(4, 4), torch.randn(6), torch.randn(5, 3)]
    rows = [all_procs["2x2"].slice(dp=at).device_mesh(DEVICE) for at in range(2)]
    places = {
        "dimensions": [(mesh["dp"], [Shard(0)]), (mesh["tp"], [Shard(0)]), (mesh, [Shard(0), Shard(1)])],
        "with a plain tensor": [(mesh["dp"], [Shard(0)]), (mesh["tp"], [Replicate()]), None],
        "rows": [(rows[0], [Shard(0)]), (rows[1], [Shard(0)]), (rows[0], [Replicate()])],
    }
    for what, where in places.items():
        alone = [nn.Parameter(torch.zeros_like(each)) for each in values]
        ours = [
            nn.Parameter(each if there is None else distribute_tensor(each, *there))
            for each, there in zip([torch.zeros_like(each) for each in values], where, strict=True)
        ]
        for one, other, value_, there in zip(alone, ours, values, where, strict=True):
            one.grad = value_.clone()
            other.grad = value_.clone() if there is None else distribute_tensor(value_, *there)
        total = nn.utils.clip_grad_norm_(alone, 0.5, norm, foreach=foreach)
        same(nn.utils.get_total_norm([each.grad for each in ours], norm, foreach=foreach), total)
        same(nn.utils.clip_grad_norm_(ours, 0.5, norm, foreach=foreach), total)
        for one, other in zip(alone, ours, strict=True):
            assert one.grad is not None, what
            same(other.grad, one.grad)


def scaled_on(mesh: Any) -> Any:
    """Return a context for GradScaler, which makes tensors by the gradients' device type. Meshes may share the type."""
    return mesh if DEVICE != "cpu" else contextlib.nullcontext()


@pytest.mark.parametrize("fused", [False, True], ids=["for-loop", "fused"])
def test_overflow_in_one_shard_skips_the_step_on_all(mesh: Any, fused: bool) -> None:
    """As in a single process, an overflow in any gradient leaves the shards of all parameters unchanged."""
    names = {"bias": [Replicate()] * mesh.ndim, "first": [Shard(0)] * mesh.ndim, "second": [Shard(1)] * mesh.ndim}
    values = {"bias": torch.randn(5), "first": torch.randn(8, 5), "second": torch.randn(5, 8)}
    overflows = [None, ("first", (7, 0)), None, ("second", (0, 7)), ("bias", (2,)), None]

    def trained(parameters: dict[str, Any]) -> tuple[list[float], Any]:
        optimizer = torch.optim.AdamW(list(parameters.values()), lr=0.1, fused=fused)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2), []
        for overflow in overflows:
            optimizer.zero_grad()
            factors = {name: torch.ones(each.shape) for name, each in values.items()}
            if overflow is not None:
                factors[overflow[0]][overflow[1]] = float("inf")
            before = {name: value(each).clone() for name, each in parameters.items()}
            loss = sum((each * each * factors[name]).sum() for name, each in parameters.items())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            for name, each in parameters.items():
                assert torch.equal(value(each), before[name]) == (overflow is not None), name
        return scales, optimizer

    ours = {name: nn.Parameter(distribute_tensor(each, mesh, names[name])) for name, each in values.items()}
    alone = {name: nn.Parameter(each.clone()) for name, each in values.items()}
    with scaled_on(mesh):
        scales = trained(ours)[0]
    assert scales == trained(alone)[0] == [64.0, 32.0, 32.0, 16.0, 8.0, 8.0]
    for name, each in ours.items():
        same(each, alone[name])


@pytest.mark.parametrize(
    "fused", [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE == "xla", reason="torch has none for XLA"))]
)
@pytest.mark.parametrize("overflows", ["norm.weight", "up.weight", "down.bias"])
@pytest.mark.parametrize("is_put", [True, False])
def test_overflow_with_plain_and_distributed_gradients(mesh_of: Any, overflows: str, is_put: bool, fused: bool) -> None:
    """Some gradients are DTensors, others plain tensors.

    The plain ones are on the workers (``is_put``), or on the controller if only parts of the model were parallelized.
    """
    alone, mesh = Net(), mesh_of("2")
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    ours = copy.deepcopy(alone)
    if is_put:
        ours = parallelize_module(ours, mesh, plan)
    else:
        for name, style in plan.items():
            parallelize_module(getattr(ours, name), mesh, style)

    def trained(net: Any) -> list[float]:
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, fused=fused)
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1), []
        for step in range(STEPS):
            scaler.scale(cross_entropy(net, words(step))).backward()
            if step == 1:
                net.get_parameter(overflows).grad.mul_(float("inf"))
            before = {name: value(each).clone() for name, each in net.named_parameters()}
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
            for name, each in net.named_parameters():
                assert torch.equal(value(each), before[name]) == (step == 1), name
        return scales

    with scaled_on(mesh):
        scales = trained(ours)
    assert scales == trained(alone) == [128.0, 64.0, 128.0]
    kinds = {type(each.grad if each.grad is not None else each) for each in (ours.norm.weight, ours.up.weight)}
    assert len(kinds) == 2, "one of each kind"
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        same(mine, theirs, 1e-4)


def test_a_sum_that_overflows_where_no_part_does(mesh: Any) -> None:
    """The gradient of a replicated weight stays partial until an operation needs the sum."""
    weight, x = torch.full((2, 1), 1.0), torch.full((12, 2), 2e38 / 6)
    ours, alone = nn.Parameter(distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim)), nn.Parameter(weight.clone())
    rows = distribute_tensor(x, mesh, [Shard(0)] * mesh.ndim)

    def trained(parameter: Any, batch: Any) -> None:
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1.0), torch.optim.SGD([parameter], lr=2e-38)
        for factor, scale in ((0.5, 1.0), (1.0, 0.5)):
            optimizer.zero_grad()
            scaler.scale((batch @ parameter).sum() * factor).backward()
            if parameter is ours:
                assert parameter.grad.placements == (Partial(),) * mesh.ndim
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            same(parameter, torch.full((2, 1), -3.0))

    with scaled_on(mesh):
        trained(ours, rows)
    trained(alone, x)


SCHEDULES: list[Callable[[Any], Any]] = [
    lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS),
    lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        [2],
    ),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=["cosine", "one-cycle", "lambda", "sequence"])
def test_learning_rates_change(mesh_of: Any, schedule: Any) -> None:
    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), mesh_of("2"), SEQUENCE_PLAN)
    rates: list[list[float]] = []
    losses = []
    for net in (ours, alone):
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        steps = schedule(optimizer)
        rates.append([])

        def step(_: Any, steps: Any = steps, optimizer: Any = optimizer) -> None:
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer._opt_called = True  # here the schedule steps before the optimizer
            steps.step()

        losses.append(train(net, optimizer, between=step))
    assert rates[0] == rates[1]
    assert len(set(rates[0])) > 1
    equally(ours, losses[0], alone, losses[1])


def test_the_state_of_an_optimizer_goes_to_another(mesh_of: Any) -> None:
    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), mesh_of("2"), SEQUENCE_PLAN)
    losses = []
    for net in (ours, alone):
        first = torch.optim.AdamW(net.parameters(), lr=1e-2)
        train(net, first)
        second = torch.optim.AdamW(net.parameters(), lr=1.0)
        second.load_state_dict(first.state_dict())
        losses.append(train(net, second))
    equally(ours, losses[0], alone, losses[1])


# Modules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1])
def test_embeddings_by_words_and_by_width(mesh: Any, dim: int) -> None:
    alone = nn.Embedding(11, WIDTH, padding_idx=3)
    ours = distribute_module(copy.deepcopy(alone), mesh, lambda _n, module, where: module.register_parameter(
        "weight", nn.Parameter(distribute_tensor(module.weight, where, [*[Replicate()] * (where.ndim - 1), Shard(dim)]))
    ))  # fmt: skip

    def loss(net: nn.Module, batch: torch.Tensor) -> Any:
        found = net(batch % 11)
        if net is ours and dim == 0:  # torch keeps the mask of missing rows for one use only
            found = found.redistribute(mesh, [Replicate()] * mesh.ndim)
        return found.square().mean()

    both(ours, alone, loss=loss)


def test_a_copy_trains_on_its_own(mesh: Any) -> None:
    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), last(mesh), SEQUENCE_PLAN)
    before = [value(parameter) for parameter in ours.parameters()]
    copied = copy.deepcopy(ours)
    both(copied, alone)
    for parameter, expected in zip(ours.parameters(), before, strict=True):
        same(parameter, expected, 0)


def test_weights_are_made_on_the_workers(mesh: Any) -> None:
    """Parameters start on the meta device. Memory is allocated only on the workers, and only for their shards."""
    alone = Net()
    with torch.device("meta"):
        ours = Net()
    parallelize_module(ours, last(mesh), SEQUENCE_PLAN)
    assert all(parameter.is_meta for parameter in ours.parameters())
    ours.to_empty(device=mesh.device_type)
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
            mine.copy_(distribute_tensor(theirs, mine.device_mesh, mine.placements))  # type: ignore[attr-defined]
    both(ours, alone)


def test_weights_are_loaded(mesh: Any) -> None:
    alone, other = Net(), Net()
    ours = parallelize_module(other, last(mesh), SEQUENCE_PLAN)
    with torch.no_grad():
        state = {
            name: distribute_tensor(value, ours.state_dict()[name].device_mesh, ours.state_dict()[name].placements)
            for name, value in alone.state_dict().items()
        }
    ours.load_state_dict(state)
    both(ours, alone)


@pytest.mark.parametrize("accumulated", [2])
def test_gradients_add_up(line: Any, accumulated: int) -> None:
    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), line, SEQUENCE_PLAN)
    for net in (ours, alone):
        for step in range(accumulated):
            cross_entropy(net, words(step)).backward()
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        same(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_without_gradients(mesh: Any) -> None:
    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), last(mesh), SEQUENCE_PLAN)
    for quiet in (torch.no_grad, torch.inference_mode, contextlib.nullcontext):
        with quiet():
            same(cross_entropy(ours, words(0)), cross_entropy(alone, words(0)))
