"""Parameters without a parallel plan are plain tensors on the workers from the first call."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch._dynamo.variables import builder
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from monarch_backend.dtensor import RemoteTensor, put_module, run, shard_batch
from monarch_backend.dtensor._compile import compile_backend
from monarch_backend.dtensor._patches import trace_installation
from monarch_backend.dtensor._patches.semantics import graph_inputs
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same, value
from tests.support.tiers import slow_except

PLAN: Any = {"block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
PLAIN = {"first.weight", "first.bias", "block.norm.weight", "block.norm.bias", "norm.weight", "norm.bias"}
"""Parameters that PLAN does not name."""
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A net with a first layer that PLAN omits and that gets a host tensor, and a last layer with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.norm = nn.Linear(6, 6), Block(), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(self.first(x))).tanh()


def pair(mesh: Any, plan: Any = PLAN) -> tuple[nn.Module, nn.Module]:
    """Return a net on the mesh, and an equal net of a single process."""
    alone = Net()
    return parallelize_module(copy.deepcopy(alone), mesh, plan), alone


def step(net: nn.Module, optimizer: Any, seed: int, clip: float | None = None) -> torch.Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def alike(ours: nn.Module, alone: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.state_dict().items(), alone.state_dict().values(), strict=True):
        torch.testing.assert_close(value(mine), theirs, atol=1e-5, rtol=1e-4, msg=lambda said, at=name: f"{at}: {said}")


class Traffic:
    """Counts of host tensors sent to the workers, of requests with replies, and of records."""

    def __init__(self, workers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = self.asked = self.records = 0
        line, write = workers.line, workers.write
        put, ask = line.put, line.ask

        def counted(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                setattr(self, name, getattr(self, name) + 1)
                return own(*args)

            return call

        monkeypatch.setattr(line, "put", counted("sent", put), raising=False)
        monkeypatch.setattr(line, "ask", counted("asked", ask), raising=False)
        monkeypatch.setattr(workers, "write", counted("records", write), raising=False)


# Placement at the first call ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_parameters_outside_the_plan_train_on_workers(mesh_of: Callable[[str], Any], options: Any) -> None:
    ours, alone = pair(mesh_of("2"))
    known = dict(ours.named_parameters())
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.01, eps=1e-3, **options) for net in (ours, alone)]
    for seed in range(3):
        same(*(step(net, optimizer, seed, 0.5) for net, optimizer in zip((ours, alone), optimizers, strict=True)))
    alike(ours, alone)
    for name, parameter in ours.named_parameters():
        assert parameter is known[name], "the optimizer would not know it"
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, RemoteTensor if name in PLAIN else DTensor)
    assert isinstance(ours.norm.running_mean, RemoteTensor)


def test_step_sends_the_batch_without_waiting(mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _ = pair(mesh_of("2"))
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.01)
    step(ours, optimizer, 0)
    traffic = Traffic(workers_of(mesh_of("2")), monkeypatch)
    step(ours, optimizer, 1)
    assert traffic.sent == 2  # the batch and its row sums
    assert traffic.asked == 0
    before = traffic.records
    step(ours, optimizer, 2)
    assert traffic.records == 2 * before


def test_each_call_of_parallelize_module_is_for_the_rest_of_its_module(mesh_of: Callable[[str], Any]) -> None:
    """As with one plan for each block: a later call distributes what earlier calls left on the controller."""
    mesh, alone = mesh_of("2"), Net()
    ours = copy.deepcopy(alone)
    parallelize_module(ours, mesh, {"first": ColwiseParallel(output_layouts=Replicate())})
    assert type(ours.block.up.weight) is nn.Parameter
    parallelize_module(ours.block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, alone)]
    for seed in range(2):
        same(*(step(net, optimizer, seed) for net, optimizer in zip((ours, alone), optimizers, strict=True)))
    alike(ours, alone)
    assert {name for name, each in ours.named_parameters() if not isinstance(each, DTensor)} == PLAIN - {
        "first.weight", "first.bias",
    }  # fmt: skip
    assert not ours._forward_pre_hooks.keys() & ours.block._forward_pre_hooks.keys()


def test_fully_shard_of_a_parallelized_module(mesh_of: Callable[[str], Any]) -> None:
    mesh, alone = mesh_of("2x2"), Net()
    ours = parallelize_module(copy.deepcopy(alone), mesh["tp"], PLAN)
    fully_shard(ours, mesh=mesh["dp"])
    x = torch.randn(4, 6)
    alone.norm.eval()  # in training mode its mean would cover the rows of one rank only
    ours.norm.eval()
    ours(shard_batch(x, mesh["dp"])).square().mean().backward()
    alone(x).square().mean().backward()
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        same(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_gradients_and_attributes_are_kept(mesh_of: Callable[[str], Any]) -> None:
    ours, alone = pair(mesh_of("2"))
    for net in (ours, alone):
        net.first.weight.grad = torch.ones(6, 6)
        net.first.bias.requires_grad_(False)
        net.first.weight.mine = "here"  # type: ignore[attr-defined]
        net(torch.randn(5, 6, generator=torch.Generator().manual_seed(3))).square().sum().backward()
    same(ours.first.weight.grad, alone.first.weight.grad)  # type: ignore[arg-type]
    assert ours.first.bias.grad is None and not ours.first.bias.requires_grad
    assert ours.first.weight.mine == "here"  # type: ignore[attr-defined]


def test_a_parameter_with_a_hook_stays(mesh_of: Callable[[str], Any], caplog: pytest.LogCaptureFixture) -> None:
    ours, alone = pair(mesh_of("2"))
    seen: list[Any] = []
    for net in (ours, alone):
        net.first.bias.register_hook(seen.append)
    for net in (ours, alone):
        step(net, torch.optim.SGD(net.parameters(), lr=0.1), 0)
    assert "first.bias stays on the controller" in caplog.text and "hooks of its own" in caplog.text
    assert type(ours.first.bias) is nn.Parameter and len(seen) == 2
    alike(ours, alone)


def test_copied_module_is_placed_separately(mesh_of: Callable[[str], Any]) -> None:
    ours, alone = pair(mesh_of("2"))
    early = copy.deepcopy(ours)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, alone)]
    for net, optimizer in zip((ours, alone), optimizers, strict=True):
        step(net, optimizer, 0)
    late = copy.deepcopy(ours)
    for copied, reference in ((early, copy.deepcopy(early)), (late, alone)):
        assert isinstance(copied.first.weight, nn.Parameter)
        same(copied(X), value(reference(X)))
        assert isinstance(copied.first.weight, RemoteTensor) and not copied._forward_pre_hooks
        assert copied.first.weight is not ours.first.weight


# Other uses of a placed module ----------------------------------------------------------------------------------


@pytest.fixture
def called(mesh_of: Callable[[str], Any]) -> tuple[nn.Module, nn.Module]:
    ours, alone = pair(mesh_of("2"))
    same(ours(X), alone(X))
    return ours, alone


def test_state_of_a_placed_module_is_saved_and_loaded(called: tuple[nn.Module, nn.Module], tmp_path: Any) -> None:
    ours, alone = called
    file = io.BytesIO()
    torch.save({name: each for name, each in ours.state_dict().items() if name in PLAIN}, file)
    file.seek(0)
    saved = torch.load(file)
    assert all(type(each) is torch.Tensor and each.equal(alone.state_dict()[name]) for name, each in saved.items())
    dcp.save(ours.state_dict(), checkpoint_id=tmp_path)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.zero_()
    state = ours.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    ours.load_state_dict(state)
    alike(ours, alone)
    ours.load_state_dict(saved, strict=False)
    assert isinstance(ours.first.weight, RemoteTensor)
    alike(ours, alone)


def test_another_dtype(called: tuple[nn.Module, nn.Module]) -> None:
    ours, alone = (net.to(torch.float64) for net in called)
    assert isinstance(ours.first.weight, nn.Parameter)
    x = X.double()
    same(ours(x), alone(x))


@pytest.mark.slow
def test_remote_calls_accept_a_placed_module(
    called: tuple[nn.Module, nn.Module], mesh_of: Callable[[str], Any]
) -> None:
    ours, alone = called

    def look(net: Any) -> Any:
        net.norm.running_mean.add_(1)
        return type(net.first.weight) is nn.Parameter, net.first.weight.tolist()

    found = run(mesh_of("2"), look, ours).get()
    assert list(found.values()) == [(True, alone.first.weight.tolist())] * 2
    same(ours.norm.running_mean, alone.norm.running_mean + 1)  # type: ignore[arg-type, operator]


def test_remote_calls_accept_a_module_before_its_first_call(mesh_of: Callable[[str], Any]) -> None:
    ours, alone = pair(mesh_of("2"))
    found = run(mesh_of("2"), lambda net: net(X).tolist(), ours).get()
    for each in found.values():
        torch.testing.assert_close(torch.tensor(each), alone(X))


WHEN: dict[str, Callable[[nn.Module, Any], Any]] = {
    "first eagerly": lambda net, _mesh: net(X),
    "first put": put_module,
    "in the trace": lambda net, _mesh: net,
}
HOW: dict[str, Callable[..., Any]] = {
    "a module": torch.compile,
    "a function of it": lambda net, **options: torch.compile(lambda x: net(x), **options),
    "itself": lambda net, **options: net.compile(**options) or net,
}


@pytest.mark.parametrize("how", slow_except(HOW, "a module"))
@pytest.mark.parametrize("when", WHEN)
def test_captured_steps_accept_a_placed_module(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, when: str, how: str
) -> None:
    torch._dynamo.reset()
    ours, alone = pair(mesh_of("2"))
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, alone)]
    WHEN[when](ours, mesh_of("2"))
    if when == "first eagerly":  # the eager call has changed the running values
        alone(X)
    captured = HOW[how](ours, backend="monarch", fullgraph=how != "itself", options={"inductor": False})
    calls = compile_backend.statistics["calls"]
    for seed in range(2):
        same(*(step(net, optimizer, seed) for net, optimizer in zip((captured, alone), optimizers, strict=True)))
    assert compile_backend.statistics["calls"] > calls
    alike(ours, alone)
    assert all(isinstance(each, RemoteTensor) for name, each in ours.named_parameters() if name in PLAIN)
    traffic = Traffic(workers_of(mesh_of("2")), monkeypatch)
    step(captured, optimizers[0], 2)
    assert traffic.asked == 0
    torch._dynamo.reset()


def test_many_parallelized_modules_in_one_trace(mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    alone = nn.Sequential(*(Block() for _ in range(6)))
    ours = copy.deepcopy(alone)
    for each in ours:
        parallelize_module(each, mesh_of("2"), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    traced = []
    begin = torch._dynamo.symbolic_convert.InstructionTranslator.run
    monkeypatch.setattr(
        torch._dynamo.symbolic_convert.InstructionTranslator, "run", lambda tx: (traced.append(tx), begin(tx))[1]
    )
    captured = torch.compile(lambda x: ours(x), backend="monarch", fullgraph=True, options={"inductor": False})
    same(captured(X), alone(X), 1e-4)
    assert len(traced) == 2, "once to find them, once with all of them there"
    assert all(isinstance(each.norm.weight, RemoteTensor) for each in ours)
    torch._dynamo.reset()


def test_gradients_that_there_were_go_to_the_workers_as_well(mesh_of: Callable[[str], Any]) -> None:
    alone = nn.Linear(6, 3)
    ours, x = copy.deepcopy(alone), torch.randn(4, 6)
    for net, given in ((ours, distribute_tensor(x, mesh_of("2"), [Shard(0)])), (alone, x)):
        net(given).square().sum().backward()
    assert isinstance(ours.weight.grad, DTensor), "of a parameter that is here"
    put_module(ours, mesh_of("2"))
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        same(mine.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_fused_step_reduces_partial_gradients(mesh_of: Callable[[str], Any], kind: Any) -> None:
    """A sharded batch gives partial gradients."""
    options = {"lr": 0.1, "fused": True, **({"momentum": 0.9} if kind is torch.optim.SGD else {})}
    alone = nn.Linear(6, 3)
    ours, x = put_module(copy.deepcopy(alone), mesh_of("2")), torch.randn(4, 6)
    for net, given in ((ours, distribute_tensor(x, mesh_of("2"), [Shard(0)])), (alone, x)):
        optimizer = kind(net.parameters(), **options)
        for _ in range(3):
            optimizer.zero_grad()
            net(given).square().mean().backward()
            optimizer.step()
    assert isinstance(ours.weight.grad, DTensor) and ours.weight.grad.placements[0].is_partial()
    alike(ours, alone)


@pytest.mark.slow
@pytest.mark.parametrize("to_none", [True, False])
def test_second_trace_with_gradients(mesh_of: Callable[[str], Any], to_none: bool) -> None:
    """Plain parameters already have DTensors as gradients when the module is traced again."""
    torch._dynamo.reset()
    alone = Block()
    ours = put_module(copy.deepcopy(alone), mesh_of("2"))
    captured = torch.compile(ours, backend="monarch", options={"inductor": False})
    for rows in (4, 6, 3):  # each size makes another graph
        x = torch.randn(rows, 6)
        same(captured(distribute_tensor(x, mesh_of("2"), [Replicate()])), alone(x))
        for net in (captured, alone):
            net(distribute_tensor(x, mesh_of("2"), [Shard(0)]) if net is captured else x).square().sum().backward()
            if rows == 6:
                net.zero_grad(set_to_none=to_none)
    for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
        same(mine.grad, theirs.grad, 1e-4)  # type: ignore[arg-type]
    torch._dynamo.reset()


def test_dynamo_has_the_table_where_plain_tensors_are_noted() -> None:
    trace_installation.install()
    kinds = builder.VariableBuilder._type_dispatch()
    assert kinds is builder.VariableBuilder._type_dispatch()
    assert kinds[torch.Tensor] is builder.VariableBuilder.wrap_tensor
    assert kinds[RemoteTensor] is graph_inputs._wrap_tensor


# Placement by put_module ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_tied_weights_stay_tied(mesh_of: Callable[[str], Any], sharded: bool) -> None:
    def shard(_name: str, module: nn.Module, mesh: Any) -> None:
        for name, each in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(distribute_tensor(each.data, mesh, [Shard(0)])))

    mesh, alone = mesh_of("2"), nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    alone[1].weight = alone[0].weight  # type: ignore[assignment]
    ours = distribute_module(copy.deepcopy(alone), mesh, shard if sharded else None)
    assert ours[1].weight is ours[0].weight and len(list(ours.parameters())) == 1
    index = torch.tensor([0, 3, 3, 5])
    for net, given in ((ours, distribute_tensor(index, mesh, [Replicate()])), (alone, index)):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            net(given).square().mean().backward()
            optimizer.step()
    same(ours[1].weight, alone[1].weight)


def test_places_of_a_tied_weight_that_are_sharded_differently(mesh_of: Callable[[str], Any]) -> None:
    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        if name:
            whole = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Shard(int(name))]))  # type: ignore[arg-type]
            module.register_parameter("weight", whole)

    net = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    net[1].weight = net[0].weight  # type: ignore[assignment]
    distribute_module(net, mesh_of("2"), shard)
    assert [each.weight.placements for each in net] == [(Shard(0),), (Shard(1),)]


def test_module_that_was_not_parallelized(mesh: Any) -> None:
    alone = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    alone[0].bias = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    ours = copy.deepcopy(alone)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.01) for net in (ours, alone)]
    assert put_module(ours, mesh) is ours
    x = torch.randn(6, 4)
    for net, optimizer in zip((ours, alone), optimizers, strict=True):
        (net(x) * x).square().sum().backward()
        optimizer.step()
    for mine, theirs in zip(ours.state_dict().values(), alone.state_dict().values(), strict=True):
        assert isinstance(mine, RemoteTensor)
        same(mine, theirs)


def test_a_mesh_of_ranks_is_none_of_a_controller(mesh_of: Callable[[str], Any]) -> None:
    class Mesh:
        _flatten_rank_map: tuple[int, ...] = ()

    with pytest.raises(ValueError, match="is no controller's mesh"):
        put_module(nn.Linear(2, 2), Mesh())  # type: ignore[arg-type]


# Gradients and modules partly on the controller -----------------------------------------------------------------


def test_gradients_go_back_to_layers_of_the_controller(mesh: Any) -> None:
    """The output of a layer on the controller becomes a DTensor, and the layer's parameters get their gradients."""
    here, alone = nn.Linear(4, 4), nn.Linear(4, 4)
    alone.load_state_dict(here.state_dict())
    x, weight = torch.randn(6, 4), torch.randn(4, 3)
    there = distribute_tensor(weight, mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(1)])
    out = DTensor.from_local(here(x), mesh, [Replicate()] * mesh.ndim) @ there
    out.square().sum().backward()
    (alone(x) @ weight).square().sum().backward()
    same(here.weight.grad, alone.weight.grad)  # type: ignore[arg-type]
    same(here.bias.grad, alone.bias.grad)  # type: ignore[arg-type]


def test_plain_tensors_beside_distributed_ones(mesh: Any) -> None:
    whole, other = torch.arange(6.0), torch.arange(6.0) + 1
    d = distribute_tensor(whole, mesh, [Shard(0), Replicate()][: mesh.ndim])
    number = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()] * mesh.ndim)
    plain = distribute_tensor(other, mesh, [Replicate()] * mesh.ndim).to_local()
    same(plain * d, other * whole)
    same(d * plain, other * whole)
    same(plain * number, other * 2)
    lists = [plain.clone(), d.clone()]
    torch._foreach_mul_(lists, number)
    assert isinstance(lists[0], RemoteTensor) and isinstance(lists[1], DTensor)
    same(lists[0], other * 2)
    same(lists[1], whole * 2)
    assert plain.mul_(d) is plain
    same(plain, other * whole)
    same(plain.div_(number), other * whole / 2)
