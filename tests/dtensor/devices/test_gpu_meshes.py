"""Meshes of "cuda" from a controller without a GPU.

Workers that execute "cuda" on the CPU run the records, and a single process gives the expected values. `make
test-gpu` runs the same tests on GPUs. Tests that read no values use a simulated mesh.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import monarch_backend.dtensor._worker as worker
from monarch_backend._core.torch_version import torch_version
from monarch_backend.actor import this_host
from monarch_backend.dtensor import (
    RemoteOpError,
    RemoteTensor,
    RemoteTensorError,
    move,
    put_module,
    run,
    shard_batch,
    simulated_mesh,
)
from monarch_backend.dtensor._controller import controller_process_group
from monarch_backend.dtensor._ops import autocast_rules
from monarch_backend.dtensor._patches.semantics import autocast
from monarch_backend.dtensor._worker import attention as attention_module
from tests.dtensor import worker_functions
from tests.dtensor.conftest import workers_of
from tests.dtensor.values import same, value
from tests.dtensor.worker_functions import ExecutorWithoutGpu

_GPUS = torch.cuda.device_count() if torch.backends.cuda.is_built() else 0
without_gpu = pytest.mark.skipif(_GPUS > 0, reason="this process has a GPU, which torch's own functions then mean")
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(_GPUS == 0, reason="no GPU that torch can use: run `make test-gpu` on a machine with one"),
]


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=without_gpu), pytest.param("gpu", marks=gpu)])
def mesh(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh of two processes that execute "cuda" on the CPU, or of one process for each GPU."""
    with pytest.MonkeyPatch.context() as patch, this_host().spawn_procs({"x": _GPUS or 2}) as procs:
        if request.param == "cpu":
            patch.setattr(worker, "Executor", ExecutorWithoutGpu)
        yield procs.device_mesh("cuda")


@pytest.fixture(scope="module", params=[pytest.param("cpu", marks=without_gpu), pytest.param("gpu", marks=gpu)])
def grid(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A mesh as `mesh`, but two by two. With fewer than four GPUs it is two by one or one by one."""
    sizes = {"a": min(2, _GPUS or 2), "b": 2 if not _GPUS or _GPUS >= 4 else 1}
    with pytest.MonkeyPatch.context() as patch, this_host().spawn_procs(sizes) as procs:
        if request.param == "cpu":
            patch.setattr(worker, "Executor", ExecutorWithoutGpu)
        yield procs.device_mesh("cuda")


@pytest.fixture
def gpu_mesh(mesh: Any) -> Any:
    """A mesh of GPUs, for functions that get local DTensors: those on "cuda" need a GPU."""
    if not _GPUS:
        pytest.skip("no GPU that torch can use: run `make test-gpu` on a machine with one")
    return mesh


@pytest.fixture
def simulated() -> Iterator[Any]:
    """A simulated mesh of GPUs that is removed after the test."""
    made = simulated_mesh((2,), ("x",), "cuda")
    yield made
    controller_process_group._owners.remove(workers_of(made))


@pytest.fixture
def recorded(simulated: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Target and named arguments of each new signature on `simulated`."""
    workers, found = workers_of(simulated), []
    own = workers.define
    monkeypatch.setattr(
        workers, "define", lambda target, *rest: (found.append((target, rest[1])), own(target, *rest))[1]
    )
    return found  # type: ignore[return-value]


def is_on_gpu(*tensors: Any) -> bool:
    return all(each.device.type == "cuda" for each in tensors)


# Attention ------------------------------------------------------------------------------------------------------


def attention(q: Any, k: Any, v: Any, gradient: Any, **options: Any) -> list[Any]:
    out = F.scaled_dot_product_attention(q, k, v, **options)
    out.backward(gradient)
    return [out, q.grad, k.grad, v.grad]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_attention(mesh: Any, is_causal: bool, dim: int | None) -> None:
    values = [torch.randn(2, 4, 6, 8) for _ in range(4)]
    placement = Replicate() if dim is None else Shard(dim)
    there = [distribute_tensor(each, mesh, [placement]) for each in values]
    found = attention(*(each.requires_grad_() for each in there[:3]), there[3], is_causal=is_causal)
    expected = attention(*(each.requires_grad_() for each in values[:3]), values[3], is_causal=is_causal)
    assert is_on_gpu(*found)
    for ours, reference in zip(found, expected, strict=True):
        same(ours, reference, 1e-4)


@pytest.mark.parametrize("kind", ["mask", "scale", "transposed", "chunks", "math", "efficient", "grouped"])
def test_attention_of_local_tensors(mesh: Any, kind: str) -> None:
    sizes = {"transposed": (2, 6, 4, 8), "chunks": (2, 4, 6, 32)}
    values = [torch.randn(sizes.get(kind, (2, 4, 6, 8))) for _ in range(4)]
    there = [distribute_tensor(each, mesh, [Replicate()]).to_local() for each in values]

    def given(tensors: list[Any]) -> list[Any]:
        if kind == "transposed":
            return [each.transpose(1, 2) for each in tensors]
        if kind == "chunks":  # with gaps between the rows
            return list(tensors[0].chunk(4, -1))
        return [tensors[0], *(each[:, :2] for each in tensors[1:3]), tensors[3]] if kind == "grouped" else tensors

    values, there = given(values), given(there)
    options: dict[str, Any] = {
        "mask": {"attn_mask": torch.rand(6, 6) > 0.3}, "scale": {"scale": 0.3}, "grouped": {"enable_gqa": True},
    }.get(kind, {})  # fmt: skip
    kernel = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION}.get(kind)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION] if kernel is None else kernel):
        found = attention(*(each.detach().requires_grad_() for each in there[:3]), there[3], **options)
    expected = attention(*(each.detach().requires_grad_() for each in values[:3]), values[3], **options)
    assert is_on_gpu(*found)
    for ours, reference in zip(found, expected, strict=True):
        same(ours, reference, 1e-4)
        same(ours.transpose(1, 2).flatten(2), reference.transpose(1, 2).flatten(2), 1e-4)


@without_gpu
def test_a_gpus_worker_knows_the_operators() -> None:
    names = [f"aten::_scaled_dot_product_flash_attention_for_cpu{name}" for name in ("", "_backward")]
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert not any(has(name, "CUDA") for name in names), "torch has them: dtensor/_worker/attention.py is not wanted"
    attention_module.install()
    try:
        assert all(has(name, "CUDA") for name in names)
    finally:
        attention_module._libraries.pop()._destroy()


def test_a_worker_does_attention_again_where_the_graph_was_lost() -> None:
    """The backward pass of attention recomputes if the graph of the forward pass is missing.

    The test calls the forward operator below autograd, as torch does.
    """
    library = torch.library.Library("monarch_test", "DEF")
    library.define("forward(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
    library.impl("forward", lambda q, k, v: attention_module.forward(q, k, v, 0.0, True), "CPU")
    q, k, v, gradient = (torch.randn(2, 4, 6, 8) for _ in range(4))
    _, *expected = attention(*(each.clone().requires_grad_() for each in (q, k, v)), gradient, is_causal=True)
    with torch.no_grad():
        out, sums = torch.ops.monarch_test.forward(q, k, v)
        assert sums.shape == (2, 4, 6)
        for again in (sums, sums.clone()):
            found = attention_module.backward(gradient, q, k, v, out, again, 0.0, True)
            for ours, reference in zip(found, expected, strict=True):
                same(ours, reference)
                assert ours.stride() == torch.empty(2, 6, 4, 8).transpose(1, 2).stride()
    library._destroy()


# Optimizers -----------------------------------------------------------------------------------------------------

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {}), (torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.Adagrad, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"), OPTIMIZERS, ids=[f"{o.__name__}{i}" for i, (o, _) in enumerate(OPTIMIZERS)]
)
@pytest.mark.parametrize("how", ["fused", "foreach"])
def test_optimizers(mesh: Any, kind: Any, options: dict[str, Any], how: str) -> None:
    if kind is torch.optim.Adagrad and how == "fused" and torch_version() < (2, 12):
        pytest.skip("torch 2.11 has the fused Adagrad for CPUs only")
    value, gradients = torch.randn(5, 3), [torch.randn(5, 3) for _ in range(3)]
    ours = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)]))
    alone = nn.Parameter(value.clone())
    theirs = kind([alone], lr=0.1, **options)
    optimizer = kind([ours], lr=0.1, **{how: True}, **options)
    for gradient in gradients:
        ours.grad, alone.grad = distribute_tensor(gradient, mesh, [Shard(0)]), gradient.clone()
        nn.utils.clip_grad_norm_([ours], 1.0)
        nn.utils.clip_grad_norm_([alone], 1.0)
        optimizer.step()
        theirs.step()
    same(ours, alone)
    assert all(each.device.type == "cuda" for each in optimizer.state[ours].values() if isinstance(each, DTensor))


def test_fused_optimizer_sends_only_records(simulated: Any, recorded: Any, monkeypatch: Any) -> None:
    parameter = nn.Parameter(distribute_tensor(torch.randn(4, 3), simulated, [Shard(0)]))
    parameter.grad = torch.ones_like(parameter)
    monkeypatch.setattr(workers_of(simulated).line, "put", lambda *_: pytest.fail("a message"))
    optimizer = torch.optim.AdamW([parameter], fused=True)
    for _ in range(2):
        with simulated:  # several meshes of GPUs exist
            optimizer.step()
    assert is_on_gpu(optimizer.state[parameter]["step"])
    assert "aten._fused_adamw_.default" in [target for target, _ in recorded]


# Devices --------------------------------------------------------------------------------------------------------


def test_ways_to_the_cpu_and_back(mesh: Any) -> None:
    value = torch.randn(4, 3)
    there = distribute_tensor(value, mesh, [Shard(0)])
    for x in (there, there.to_local()):
        here = x.cpu()
        assert type(here) is type(x) and here.device.type == "cpu"
        assert not here.is_cuda and x.is_cuda and not x.is_cpu
        assert x.get_device() == 0 and here.get_device() == -1
        back = here.to(x.device)
        assert is_on_gpu(back, here.cuda(), here.to("cuda"), here.to("cuda:0"), here.to(x), here.type_as(x))
        assert x.to(x.device) is x and x.cuda() is x and x.to("cuda") is x and here.cpu() is here
        assert x.to("cpu", torch.float64).dtype == torch.float64 and x.half().to(x).dtype == x.dtype
        assert x.to(x.device, copy=True) is not x
    same(there.cpu().pin_memory(), value)
    same(there.cpu().cuda() * 2, value * 2)
    with pytest.raises(RuntimeError, match="can't be pinned"):
        there.pin_memory()
    with pytest.raises(RemoteTensorError, match="make the mesh of such devices"):
        there.to("xla")


def test_a_gradient_goes_back_to_where_the_tensor_is(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]).requires_grad_()
    x.cpu().sum().backward()
    assert x.grad is not None and is_on_gpu(x.grad)
    same(x.grad, torch.ones(4, 3))


DEVICES_DIFFER = "on the same device|found two different devices"  # the second one before torch 2.13


def test_an_embedding_that_fails_leaves_no_mask_to_the_next_one(mesh: Any) -> None:
    values, numbers = torch.randn(8, 3), torch.arange(5)
    table, words = distribute_tensor(values, mesh, [Shard(0)]), distribute_tensor(numbers, mesh, [Replicate()])
    for weight, fails in ((table.cpu(), True), (table, False), (table.cpu(), True)):
        with pytest.raises(RuntimeError, match=DEVICES_DIFFER) if fails else contextlib.nullcontext():
            rows = F.embedding(words, weight)
            same(rows, values[:5])
    assert type(rows._spec.placements[0]) is Partial  # the mask has been used


def test_tensors_that_cpp_code_makes_for_the_cpu_are_on_the_gpu(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)]).requires_grad_()
    x.sum().backward()  # C++ makes the expanded gradient dense, on the device where it believes the parameter is
    local = x.to_local().detach()
    assert is_on_gpu(x.grad, local.new_zeros(3), torch.zeros_like(local), local.half().type_as(local))
    made = torch.autograd.grad(local.requires_grad_().expand(2, *local.shape).sum(), local)
    assert is_on_gpu(*made)
    same(x.grad, torch.ones(4, 3))  # type: ignore[arg-type]


@without_gpu
def test_a_program_makes_tensors_by_their_device(mesh: Any) -> None:
    x = distribute_tensor(torch.ones(4), mesh, [Replicate()]).to_local()
    with mesh:
        made: dict[str, torch.Tensor] = {
            "zeros": torch.zeros(4, device=x.device), "ones": torch.ones(4, device="cuda"),
            "arange": torch.arange(4, device=x.device), "full": torch.full((4,), 2, device="cuda:0"),
            "empty": torch.empty(4, device="cuda").zero_(), "tensor": torch.tensor([1.0, 2.0], device=x.device),
            "eye": torch.eye(2, device="cuda"), "tril": torch.ones(2, 2, device="cuda").tril(),
            "linspace": torch.linspace(0, 1, 4, device="cuda"), "sent": torch.ones(3).to(x.device),
        }  # fmt: skip
    expected = {
        "zeros": torch.zeros(4), "ones": torch.ones(4), "arange": torch.arange(4), "full": torch.full((4,), 2),
        "empty": torch.zeros(4), "tensor": torch.tensor([1.0, 2.0]), "eye": torch.eye(2),
        "tril": torch.ones(2, 2).tril(), "linspace": torch.linspace(0, 1, 4), "sent": torch.ones(3),
    }  # fmt: skip
    for name, tensor in made.items():
        assert isinstance(tensor, RemoteTensor) and is_on_gpu(tensor), name
        assert tensor.dtype == expected[name].dtype, name
        same(tensor, expected[name])


@without_gpu
def test_a_module_goes_there_by_the_name_of_the_device(mesh: Any) -> None:
    alone, x = nn.Linear(3, 2), torch.randn(4, 3)
    expected = alone(x)
    with mesh:
        for there in (nn.Linear(3, 2).cuda(), nn.Linear(3, 2).to("cuda"), nn.Linear(3, 2, device="cuda")):
            assert is_on_gpu(there.weight, there.bias) and there.weight.requires_grad
        there = alone.to(torch.device("cuda"), torch.float64)
        assert there.weight.dtype == torch.float64
        same(there(x.to(there.weight.device, torch.float64)).float(), expected)
        with torch.cuda.device(0):
            assert there.cpu().weight.device.type == "cpu"


def test_tensors_of_this_process_go_to_where_the_others_are(mesh: Any) -> None:
    x, here = torch.randn(6, 4), torch.randn(6, 4).requires_grad_()
    there = distribute_tensor(x, mesh, [Replicate()]).to_local()
    for ours in (there.cpu(), there):
        found = ours * here * torch.tensor(2.0)
        assert found.device == ours.device
        same(found, x * here * 2)
    (there.cpu() * here).sum().backward()
    same(here.grad, x)


@without_gpu
def test_ambiguous_mesh_of_a_factory_is_an_error(mesh: Any, simulated: Any) -> None:
    assert torch.zeros(1, device="cuda")._meta.workers is workers_of(mesh)  # type: ignore[attr-defined]
    with simulated:
        assert torch.zeros(1, device="cuda")._meta.workers is workers_of(simulated)  # type: ignore[attr-defined]
    first, second = (simulated_mesh((2,), ("x",), "cuda") for _ in range(2))
    real = controller_process_group._owners[:]
    controller_process_group._owners[:] = [workers_of(first), workers_of(second)]
    try:
        with pytest.raises(RemoteTensorError, match="Say which one"):
            torch.zeros(1, device="cuda")
        with second:
            assert torch.zeros(1, device="cuda")._meta.workers is workers_of(second)  # type: ignore[attr-defined]
        rows = distribute_tensor(torch.zeros(4), second, [_StridedShard(0, split_factor=2)])
        if torch_version() >= (2, 12):  # torch 2.11 can't redistribute such shards
            assert rows.full_tensor()._meta.workers is workers_of(second)  # torch makes its offsets by device type only
        controller_process_group._owners.clear()
        with pytest.raises(RemoteTensorError, match="no mesh has one"):
            torch.zeros(1, device="cuda")
    finally:
        controller_process_group._owners[:] = [
            each for each in real if each not in (workers_of(first), workers_of(second))
        ]


@without_gpu
def test_streams_and_events_have_nothing_to_wait_for(mesh: Any) -> None:
    stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        event.record(torch.cuda.current_stream())
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.default_stream().wait_event(event)
    assert event.query() and stream.query() and torch.cuda.current_device() == 0
    torch.cuda.set_device(0)
    distribute_tensor(torch.ones(4), mesh, [Shard(0)]).record_stream(stream)
    torch.cuda.synchronize()


# Mixed precision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(mesh: Any, dtype: torch.dtype) -> None:
    layer, norm = nn.Linear(3, 4), nn.LayerNorm(4)
    weight, bias, x = layer.weight.detach().clone(), layer.bias.detach().clone(), torch.randn(6, 3)
    put_module(nn.Sequential(layer, norm), mesh)
    there = distribute_tensor(x, mesh, [Replicate()]).to_local()
    with torch.autocast("cuda", dtype):
        assert F.linear(x, weight).dtype == torch.float32  # a tensor of this process's CPU
        product = layer(there)
        assert product.dtype == dtype and is_on_gpu(product)
        assert {each.dtype for each in (product.softmax(-1), norm(product), product.pow(2))} == {torch.float32}
        loss = F.cross_entropy(product, torch.arange(6) % 4)
        assert loss.dtype == torch.float32
        with torch.autocast("cuda", enabled=False):
            assert layer(there).dtype == torch.float32
    assert layer(there).dtype == torch.float32
    loss.backward()
    assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
    same(product.float(), F.linear(x, weight, bias), 0.03)


@pytest.mark.slow
@without_gpu
def test_what_a_captured_step_leaves_to_eager_code(mesh: Any) -> None:
    """Copies between devices, autocast and attention with dropout have values, devices and dtypes of eager code."""
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])

    def in_half(x: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return (x @ x.t()).sin()

    def dropped(x: Any) -> Any:
        q = x.view(1, 2, 2, 8)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    for program in (
        lambda x: (x * 2).cpu(),
        lambda x: (x * 2).to("cpu", torch.float64),
        lambda x: (x * 2).cpu().cuda(),
        lambda x: (x * 2).to("cuda"),
        in_half,
        dropped,
    ):
        for there in (x.redistribute(placements=[Replicate()]), x.redistribute(placements=[Replicate()]).to_local()):
            torch._dynamo.reset()
            results = []
            for step in (torch.compile(program, backend="monarch", options={"inductor": False}), program):
                torch.manual_seed(0)
                results.append(step(there))
            assert results[0].device == results[1].device and results[0].dtype == results[1].dtype
            assert value(results[0]).equal(value(results[1]))


@without_gpu
def test_autocast_of_a_captured_step_as_a_whole(simulated: Any) -> None:
    x = distribute_tensor(torch.ones(4, 4), simulated, [Replicate()]).to_local()
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.compile(lambda x: x @ x, backend="monarch")(x).dtype == torch.bfloat16
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="leave the step to eager code"):
            torch.compile(lambda x: x @ x, backend="monarch", fullgraph=True)(x)


@without_gpu
def test_what_a_captured_step_makes_is_made_on_the_workers_gpu(mesh: Any) -> None:
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    step = torch.compile(
        lambda x: x + torch.arange(8, device="cuda") + torch.ones(8).to(x.device),
        backend="monarch", fullgraph=True, options={"inductor": False},
    )  # fmt: skip
    found = step(x)
    assert is_on_gpu(found)
    same(found, value(x) + torch.arange(8) + 1)


def test_autocast_casts_for_each_operator(simulated: Any) -> None:
    names = {each._schema.name.removeprefix("aten::") for each in autocast.operators("cuda")}
    rules = autocast_rules.CUDA
    assert names >= rules.lower | rules.widest | rules.refused
    others = names - rules.lower - rules.widest - rules.refused
    assert others >= {"softmax", "log_softmax", "layer_norm", "exp", "pow", "sum", "prod", "cumsum", "nll_loss", "norm"}
    there = [distribute_tensor(torch.rand(2, 2), simulated, [Replicate()]).to_local().detach() for _ in range(2)]
    with torch.autocast("cuda", torch.float16):
        lower = there[0] @ there[1]
        assert torch.atan2(lower, lower).dtype == torch.float16
        assert torch.atan2(lower, there[0]).dtype == torch.float32
        assert (there[0].double() @ there[1].double()).dtype == torch.float64
        with pytest.raises(RuntimeError, match="unsafe in autocast"):
            F.binary_cross_entropy(there[0], there[1])


def test_the_loss_is_scaled_and_what_overflows_is_not_done(mesh: Any) -> None:
    value = torch.randn(4, 3)
    ours, alone = nn.Parameter(distribute_tensor(value, mesh, [Shard(0)])), nn.Parameter(value.clone())
    options: list[tuple[Any, Any]] = [(ours, torch.amp.GradScaler("cuda")), (alone, torch.amp.GradScaler("cpu"))]
    assert options[0][1].is_enabled()
    for parameter, scaler in options:
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for factor in (1.0, float("inf"), 2.0):
            scaler.scale((parameter * factor).sum()).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert options[0][1].get_scale() == options[1][1].get_scale() == 2.0**15
    same(ours, alone)


# Whole models ---------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a feed-forward net. Each process may have some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.ModuleList([nn.Linear(8, 8, bias=False) for _ in range(3)])
        self.out, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, 4)).transpose(1, 2) for each in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + checkpoint(lambda x: self.down(F.gelu(self.up(x))), x, use_reentrant=False)  # type: ignore[no-any-return]


PLAN: dict[str, Any] = {
    **{f"qkv.{i}": ColwiseParallel() for i in range(3)}, "out": RowwiseParallel(),
    "up": ColwiseParallel(), "down": RowwiseParallel(),
}  # fmt: skip


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, PLAN)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("way", [tensor_parallel, sharded])
def test_training(mesh: Any, way: Callable[[nn.Module, Any], nn.Module]) -> None:
    if way is tensor_parallel and mesh.size() > 2:
        pytest.skip("two heads are for two GPUs at most")
    models, batch = [Block(), Block()], torch.randn(2, 5, 8)
    models[1].load_state_dict(models[0].state_dict())
    models[0] = way(models[0], mesh)
    found: list[Any] = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for _ in range(3):
            given = batch
            if way is tensor_parallel and model is models[0]:
                given = distribute_tensor(batch, mesh, [Replicate()]).to_local()
            loss = model(given).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        found.append(loss.item())
    assert found[0] == pytest.approx(found[1], abs=1e-4)
    for ours, reference in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert is_on_gpu(ours)
        same(ours, reference, 1e-3)


@without_gpu
def test_an_activation_checkpoint_keeps_the_state_of_the_workers_generator(simulated: Any) -> None:
    x = distribute_tensor(torch.ones(4), simulated, [Replicate()]).to_local().requires_grad_()
    states: list[list[int]] = []

    def draws(x: Any) -> Any:
        states.append(torch.cuda.get_rng_state().tolist())
        torch.cuda.manual_seed(len(states))  # as if it had drawn numbers
        return x.sin()

    torch.cuda.manual_seed(5)
    loss = checkpoint(draws, x, use_reentrant=False).sum()
    after = torch.cuda.get_rng_state().tolist()
    loss.backward()
    assert states[0] == states[1] != after
    assert torch.cuda.get_rng_state().tolist() == after


def test_parameters_that_wait_in_the_workers_memory(mesh: Any) -> None:
    models, batch = [nn.Linear(4, 3), nn.Linear(4, 3)], torch.randn(5, 4)
    models[1].load_state_dict(models[0].state_dict())
    models[0] = fully_shard(models[0], mesh=mesh, offload_policy=CPUOffloadPolicy())
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, reference in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert ours.device.type == "cpu"
        same(ours, reference)


@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=gpu)])
def test_attention_in_a_captured_step(mesh: Any, inductor: bool) -> None:
    values = [torch.randn(2, 4, 6, 8) for _ in range(4)]
    there = [distribute_tensor(each, mesh, [Shard(1)]) for each in values]

    def step(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) * 2

    captured = torch.compile(step, backend="monarch", options={"inductor": inductor})
    results = []
    for function, (q, k, v, gradient) in ((captured, there), (step, values)):
        leaves = [each.requires_grad_() for each in (q, k, v)]
        out = function(*leaves)
        out.backward(gradient)
        results.append([out, *(each.grad for each in leaves)])
    assert is_on_gpu(*results[0])
    for ours, reference in zip(*results, strict=True):
        same(ours, reference, 1e-4)


def test_random_numbers(mesh: Any) -> None:
    x = distribute_tensor(torch.ones(2, 4, 6, 8), mesh, [Replicate()])
    x = x.to_local().requires_grad_()

    def drawn(call: Any) -> list[Any]:
        torch.manual_seed(3)
        out = F.scaled_dot_product_attention(x, x, F.dropout(x, 0.5), dropout_p=0.5)
        kept = call(lambda out: F.dropout(out, 0.3).sin(), out)
        return [out, kept, *torch.autograd.grad(kept.sum(), x)]

    first = drawn(lambda function, *args: function(*args))
    again = drawn(lambda *args: checkpoint(*args, use_reentrant=False))
    for one, other in zip(first, again, strict=True):
        same(one - other, torch.zeros(one.shape), 0)
    assert len(first[0].unique()) > 2
    torch.cuda.manual_seed(4)
    assert not torch.equal(F.dropout(x, 0.5), F.dropout(x, 0.5))


# Checkpoints, errors, transfers and functions -------------------------------------------------------------------


def test_a_checkpoint(gpu_mesh: Any, tmp_path: Path) -> None:
    models = [fully_shard(Block(), mesh=gpu_mesh) for _ in range(2)]
    states = []
    for model in models:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model(torch.randn(2, 5, 8)).square().mean().backward()
        optimizer.step()
        states.append(get_state_dict(model, optimizer))
    first, second = ({"model": model, "optimizer": optimizer} for model, optimizer in states)
    dcp.save(first, checkpoint_id=tmp_path)
    dcp.load(second, checkpoint_id=tmp_path)
    for ours, reference in zip(second["model"].values(), first["model"].values(), strict=True):
        assert is_on_gpu(ours)
        assert value(ours).equal(value(reference))
    kept = [each["exp_avg"] for each in (state["optimizer"]["state"]["down.weight"] for state in (first, second))]
    assert is_on_gpu(*kept)
    assert value(kept[0]).equal(value(kept[1]))


def test_a_whole_tensor_in_a_file(mesh: Any) -> None:
    whole, file = torch.randn(5, 3), io.BytesIO()
    torch.save(distribute_tensor(whole, mesh, [Shard(0)]).full_tensor().cpu(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).equal(whole)


def test_error_on_the_workers_names_the_line_and_the_mesh_stays_usable(mesh: Any) -> None:
    x = distribute_tensor(torch.tensor([[2.0, 3.0], [3.0, 2.0]]), mesh, [Replicate()])
    y, failed = x + 1, torch.linalg.cholesky(x)
    with pytest.raises(RemoteOpError, match=r"test_gpu_meshes\.py"):
        failed.sum().item()
    same(y * 2, torch.tensor([[6.0, 8.0], [8.0, 6.0]]))


def test_a_model_on_a_grid_of_replicas_and_shards(grid: Any) -> None:
    models, batch = [Block(), Block()], torch.randn(4, 5, 8)
    models[1].load_state_dict(models[0].state_dict())
    models[0] = fully_shard(models[0], mesh=grid)
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(shard_batch(batch, grid) if model is models[0] else batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, reference in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert is_on_gpu(ours)
        same(ours, reference, 1e-4)


def test_tensors_go_from_mesh_to_mesh(gpu_mesh: Any, grid: Any) -> None:
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, gpu_mesh, [Shard(0)]).requires_grad_()
    moved = move(x * 2, grid, [Shard(1), Shard(0)])
    assert is_on_gpu(moved)
    same(moved, whole * 2)
    moved.square().sum().backward()
    assert x.grad is not None and is_on_gpu(x.grad)
    same(x.grad, whole * 8)


def test_functions_of_the_workers_with_plain_tensors(mesh: Any) -> None:
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, mesh, [Shard(0)])
    sums = run(mesh, worker_functions.doubled_plain, x.to_local()).get().values()
    assert sum(sums) == pytest.approx(whole.sum().item() * 2, abs=1e-4)
    same(x, whole * 2)


def test_functions_of_the_workers(gpu_mesh: Any) -> None:
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, gpu_mesh, [Shard(0)])
    devices = {device for device, *_ in run(gpu_mesh, worker_functions.where_it_is, x).get().values()}
    assert devices == {f"cuda:{rank}" for rank in range(gpu_mesh.size())} or devices == {"cuda:0"}
    run(gpu_mesh, worker_functions.doubled_in_place, x).get()
    same(x, whole * 2)
    with pytest.raises(RemoteOpError, match="on purpose"):
        run(gpu_mesh, worker_functions.fails).get()
    same(x + 1, whole * 2 + 1)
