"""Random numbers equal those of a single process, on every mesh, in every placement, and mixed with host draws."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor import rand as dt_rand
from torch.distributed.tensor import randn as dt_randn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from monarch_backend._core.torch_version import torch_version
from monarch_backend.actor import this_host
from monarch_backend.dtensor import RemoteTensor, RemoteTensorError, own_random_numbers, simulated_mesh
from monarch_backend.dtensor._controller import controller_mesh
from monarch_backend.dtensor._rng import philox, random_ops
from monarch_backend.dtensor._torch_internals import cpu_generator
from monarch_backend.dtensor._worker import random_ops as worker_random
from tests.dtensor import failing_lookup
from tests.dtensor.conftest import DEVICE
from tests.dtensor.ops.test_operations import EVEN, UNEVEN, placements
from tests.dtensor.values import same, value

SMALL, LARGE = (5, 5), (37, 29)  # SMALL leaves one normal number over; for LARGE the controller skips generator words
SIZES = [EVEN, UNEVEN, SMALL, LARGE]
FILLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform": lambda x: x.uniform_(-1, 2),
    "normal": lambda x: x.normal_(1, 3),
    "bernoulli": lambda x: x.bernoulli_(0.3),
    "log_normal": lambda x: x.log_normal_(),
    "exponential": lambda x: x.exponential_(2.0),
    "geometric": lambda x: x.geometric_(0.4),
    "cauchy": lambda x: x.cauchy_(),
    "random": lambda x: x.random_(),
    "random to": lambda x: x.random_(10),
    "random from": lambda x: x.random_(-3, 40),
}


def equal(ours: Any, reference: torch.Tensor) -> None:
    """Assert equality to the last bit, because any difference means that another number was drawn."""
    torch.testing.assert_close(value(ours), reference.detach(), atol=0, rtol=0)


def same_program(program: Callable[[torch.Tensor], list[Any]], ours: torch.Tensor, plain: torch.Tensor) -> None:
    """Assert that both runs have the same values and leave the generator in the same state."""
    torch.manual_seed(5)
    mine = [value(each) for each in program(ours)]
    state = torch.get_rng_state()
    torch.manual_seed(5)
    theirs = program(plain)
    for one, other in zip(mine, theirs, strict=True):
        equal(one, other)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_inplace_random_fills_match_a_single_process(mesh: Any, size: Any) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        kept = []
        for fill in FILLS.values():
            kept += [fill(x).clone(), torch.randn(3)]
        return kept

    for here in placements(mesh):
        same_program(program, distribute_tensor(torch.zeros(size), mesh, here), torch.zeros(size))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_random_numbers_of_other_dtypes_match_a_single_process(line: Any, dtype: torch.dtype) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        return [x.uniform_().clone(), x.normal_().clone(), x.bernoulli_(0.5).clone(), torch.randint_like(x, 9)]

    for size in SIZES:
        whole = torch.zeros(size, dtype=dtype)
        same_program(program, distribute_tensor(whole, line, [Shard(0)]), whole.clone())


@pytest.mark.parametrize("size", [UNEVEN, SMALL, pytest.param(LARGE, marks=pytest.mark.slow)], ids=str)
def test_random_like_functions_match_a_single_process(mesh: Any, size: Any) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        return [
            torch.rand_like(x), torch.rand(2), torch.randn_like(x), torch.randn_like(x, dtype=torch.float64),
            torch.randint_like(x, 100), torch.randint_like(x, 5, 7, dtype=torch.int64), torch.bernoulli(x, 0.3),
            torch.randn_like(x.t()), torch.randperm(5),
        ]  # fmt: skip

    for here in placements(mesh):
        ours = distribute_tensor(torch.zeros(size), mesh, here)
        same_program(program, ours, torch.zeros(size))
        assert torch.rand_like(ours).placements == tuple(here)  # type: ignore[attr-defined]


def test_random_functions_composed_of_several_operations(line: Any) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        return [
            F.dropout1d(x), F.dropout2d(x.unsqueeze(0)), F.feature_alpha_dropout(x, 0.5, True),
            x.new_empty(x.shape).normal_(), torch.rand_like(x.unsqueeze(0), memory_format=torch.channels_last),
            F.dropout(x, 0.0), F.dropout(x, 1.0),
        ]  # fmt: skip

    whole = torch.zeros(6, 8, 10)
    for here in (Shard(0), Shard(1), Replicate()):
        same_program(program, distribute_tensor(whole, line, [here]), whole.clone())


def test_gumbel_softmax(line: Any) -> None:
    whole = torch.zeros(6, 8, 10)
    for here in (Shard(0), Shard(1), Replicate()):
        same_program(lambda x: [F.gumbel_softmax(x)], distribute_tensor(whole, line, [here]), whole.clone())


@pytest.mark.skipif(torch_version() < (2, 12), reason="torch 2.11 can't redistribute such shards")
def test_shards_in_several_pieces(line: Any) -> None:
    pieces = [_StridedShard(0, split_factor=2)]
    same_program(
        lambda x: [x.normal_(), torch.rand(1)], distribute_tensor(torch.zeros(24, 3), line, pieces), torch.zeros(24, 3)
    )


def test_attention_and_a_layer_with_dropout(line: Any) -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout=0.3, batch_first=True)
    whole = torch.randn(6, 8, 12)
    torch.manual_seed(1)
    reference = layer(whole)
    distribute_module(layer, line)
    torch.manual_seed(1)
    same(layer(distribute_tensor(whole, line, [Shard(0)])), reference)


def test_factories(mesh: Any) -> None:
    for here, size in itertools.product(placements(mesh), SIZES):
        torch.manual_seed(3)
        ours = [dt_rand(size, device_mesh=mesh, placements=here), dt_randn(size, device_mesh=mesh, placements=here)]
        torch.manual_seed(3)
        for mine, theirs in zip(ours, [torch.rand(size), torch.randn(size)], strict=True):
            equal(mine, theirs)


def test_random_fills_of_views_follow_the_memory_order(line: Any) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        return [x.t().normal_().clone(), x[:, 1:4].normal_().clone(), x.t().uniform_().clone(), x.clone()]

    for size in (UNEVEN, LARGE):
        same_program(program, distribute_tensor(torch.zeros(size), line, [Replicate()]), torch.zeros(size))
    across = torch.zeros(LARGE).t()
    same_program(lambda x: [x.normal_().clone()], distribute_tensor(across, line, [Shard(0)]), across.clone())


@pytest.mark.parametrize("training", [True, False])
def test_dropout_and_its_gradient(mesh: Any, training: bool) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        x = x.detach().requires_grad_()
        y = F.dropout(x * 2, 0.4, training)
        native, mask = torch.native_dropout(x, 0.3, training)
        (y.sum() + native.sum()).backward()
        return [y, native, mask, x.grad, torch.rand(1), F.alpha_dropout(x, 0.2, training)]

    whole = torch.randn(LARGE)
    for here in placements(mesh):
        same_program(program, distribute_tensor(whole, mesh, here), whole)


def test_random_functions_of_a_partial_tensor_match_a_single_process(line: Any) -> None:
    a, b = torch.ones(12, 6), torch.ones(6, 4)
    partial = distribute_tensor(a, line, [Shard(1)]) @ distribute_tensor(b, line, [Shard(0)])
    assert partial.placements == (Partial(),)  # type: ignore[attr-defined]
    same_program(lambda x: [F.dropout(x), torch.rand_like(x), torch.native_dropout(x, 0.5, True)[0]], partial, a @ b)
    local = partial.to_local()  # type: ignore[attr-defined]
    product = DTensor.from_local(local, line, [Partial("product")])
    with pytest.raises(RemoteTensorError, match="redistribute it first"):
        product.uniform_()


def test_where_numbers_depend_on_values(mesh: Any) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        chance = x.abs() / 4
        return [
            torch.bernoulli(chance), torch.rand(1), torch.poisson(chance * 9), torch.normal(x, 2.0),
            torch.normal(x, chance), torch.multinomial(chance, 3), torch.rand(1), F.rrelu(x, training=True),
            torch.zeros_like(x).bernoulli_(chance), torch.rand(1),
        ]  # fmt: skip

    whole = torch.rand(UNEVEN) * 4 - 2
    for here in placements(mesh):
        same_program(program, distribute_tensor(whole, mesh, here), whole)


INITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "uniform": nn.init.uniform_,
    "normal": nn.init.normal_,
    "trunc_normal": nn.init.trunc_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "kaiming_normal": nn.init.kaiming_normal_,
    "orthogonal": nn.init.orthogonal_,
    "sparse": lambda x: nn.init.sparse_(x, 0.3),
}


def test_initialisation(mesh: Any) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        return [init(x).clone() for init in INITS.values()]

    for here in placements(mesh):
        same_program(program, distribute_tensor(torch.zeros(LARGE), mesh, here), torch.zeros(LARGE))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 5))

    def reset_parameters(self) -> None:
        for each in self.layers:
            each.reset_parameters()  # type: ignore[operator]


def sharded(_name: str, module: nn.Module, mesh: Any) -> None:
    for name, each in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(distribute_tensor(each, mesh, [Shard(0)] * mesh.ndim)))


def test_a_model_that_gets_its_values_on_the_workers(line: Any) -> None:
    ours, theirs = Model(), Model()
    distribute_module(ours, line, sharded)
    for each in (ours, theirs):
        torch.manual_seed(2)
        each.reset_parameters()
    for mine, plain in zip(ours.parameters(), theirs.parameters(), strict=True):
        equal(mine, plain)


def test_random_numbers_with_controller_draws_in_between(line: Any) -> None:
    data = TensorDataset(torch.arange(12.0).view(12, 1))

    def program(x: torch.Tensor) -> list[Any]:
        kept: list[Any] = []
        for (batch,) in DataLoader(data, batch_size=5, shuffle=True):
            kept += [batch, F.dropout(x), torch.randn(3)]
        return kept

    same_program(program, distribute_tensor(torch.ones(UNEVEN), line, [Shard(0)]), torch.ones(UNEVEN))


def test_the_state_is_the_controllers(line: Any) -> None:
    x = distribute_tensor(torch.zeros(UNEVEN), line, [Shard(0)])
    state = torch.get_rng_state()
    first = value(x.normal_())
    torch.set_rng_state(state)
    equal(x.normal_(), first)
    torch.set_rng_state(state)
    with torch.random.fork_rng():
        equal(x.normal_(), first)
    equal(x.normal_(), first)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpoints_drop_the_same_again(line: Any, reentrant: bool) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        x = x.detach().requires_grad_()
        y = checkpoint(lambda v: F.dropout(v * 3, 0.5) * v, x, use_reentrant=reentrant)
        y.sum().backward()
        return [y, x.grad]

    whole = torch.randn(UNEVEN)
    same_program(program, distribute_tensor(whole, line, [Shard(0)]), whole)


def test_user_generator_matches_a_single_process(line: Any) -> None:
    def program(x: torch.Tensor) -> list[Any]:
        own = torch.Generator().manual_seed(77)
        kept = [x.normal_(generator=own).clone(), x.uniform_().clone(), x.normal_(generator=own).clone()]
        return [*kept, x.sigmoid().bernoulli(generator=own), torch.rand(3, generator=own), torch.rand(3)]

    for size in (UNEVEN, LARGE):
        same_program(program, distribute_tensor(torch.zeros(size), line, [Shard(0)]), torch.zeros(size))


def test_random_numbers_on_mesh_and_slice_match_a_single_process(all_procs: Any) -> None:
    procs = all_procs["2x2"]
    whole, half = procs.device_mesh(DEVICE), procs.slice(dp=1).device_mesh(DEVICE)

    def program(large: torch.Tensor, small: torch.Tensor) -> list[Any]:
        return [each.normal_().clone() for each in (large, small, small, large)]

    torch.manual_seed(4)
    ours = program(
        distribute_tensor(torch.zeros(UNEVEN), whole, [Shard(0), Shard(1)]),
        distribute_tensor(torch.zeros(UNEVEN), half, [Shard(0)]),
    )
    rows = distribute_tensor(torch.zeros(UNEVEN), whole["tp"], [Shard(0)]).normal_()
    torch.manual_seed(4)
    plain = program(torch.zeros(UNEVEN), torch.zeros(UNEVEN))
    for mine, theirs in zip([*ours, rows], [*plain, torch.zeros(UNEVEN).normal_()], strict=True):
        equal(mine, theirs)


def drawn(local: torch.Tensor, mesh: Any) -> list[torch.Tensor]:
    """Return each rank's draws from a plain tensor: new, by dropout, in place, and by the tensor's values."""
    draws = [
        torch.randn_like(local), F.dropout(local), local.clone().uniform_(), torch.bernoulli(local / 2),
        torch.native_dropout(local, 0.5, True)[0],
    ]  # fmt: skip
    all_of_them = value(DTensor.from_local(torch.cat(draws, 1), mesh, [Shard(0)] * mesh.ndim))
    return list(all_of_them.chunk(mesh.size()))


@pytest.fixture(scope="module")
def fresh() -> Iterator[Any]:
    """Processes for which no test has called `own_random_numbers`."""
    procs = this_host().spawn_procs({"x": 2})
    yield procs.device_mesh("cpu")
    procs.stop().get(30)


def test_plain_remote_tensors_have_the_same_numbers_on_all_ranks(fresh: Any) -> None:
    local = distribute_tensor(torch.ones(4, 3), fresh, [Replicate()]).to_local()
    assert isinstance(local, RemoteTensor)
    for mine, *others in (drawn(local, fresh), drawn(local, fresh)):
        assert all(torch.equal(mine, each) for each in others)
    same_program(lambda x: [torch.randn_like(x), torch.rand(1), F.dropout(x), torch.rand(1)], local, torch.ones(4, 3))


@pytest.fixture(scope="module")
def fresh_square() -> Iterator[Any]:
    """As `fresh`, with a mesh of two dimensions."""
    procs = this_host().spawn_procs({"dp": 2, "tp": 2})
    yield procs.device_mesh("cpu")
    procs.stop().get(30)


def drawn_of(x: Any) -> list[Any]:
    """Draw after element-wise operations and without them, in place and not, and in another memory order."""
    return [
        F.dropout(torch.relu(x) + 1), x.clone().uniform_(), torch.rand_like(x.double()), torch.randn_like(x * 2),
        torch.bernoulli(torch.sigmoid(x)), torch.zeros_like(x).bernoulli_(torch.sigmoid(x)), torch.normal(x, 2.0),
        torch.native_dropout(F.gelu(x), 0.3, True)[0], x.new_empty(x.shape).normal_(), F.dropout(x.detach() ** 2, 0.9),
        torch.empty_like(x).copy_(x).bernoulli_(0.5),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "of", [(Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(0), Shard(1)), (Shard(1),) * 2]
)
@pytest.mark.parametrize("size", [EVEN, UNEVEN], ids=str)
def test_plain_shards_draw_their_part_of_a_single_process_numbers(fresh_square: Any, size: Any, of: Any) -> None:
    x = torch.linspace(-1, 1, size[0] * size[1]).view(size)

    def program(x: Any) -> list[Any]:
        if not isinstance(x, DTensor):
            return [*drawn_of(x), torch.rand(1)]
        found = [
            DTensor.from_local(each, fresh_square, of, shape=x.shape, stride=(size[1], 1))
            for each in drawn_of(x.to_local())
        ]
        return [*found, torch.rand(1)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would mean that a draw differs from a single process
        same_program(program, distribute_tensor(x, fresh_square, of), x)


@pytest.mark.parametrize(("of", "is_sharded"), [([Shard(0)], True), ([Shard(1)], False), ([Shard(2)], False)])
def test_masks_for_each_sample_are_those_of_a_single_process(fresh: Any, of: Any, is_sharded: bool) -> None:
    """Stochastic depth draws such masks. Shards of samples have some samples, shards of features have all."""
    x = torch.ones(5, 4, 6)

    def drop_samples(x: Any) -> list[Any]:
        local = x.to_local() if isinstance(x, DTensor) else x
        mask = local.new_empty((local.shape[0], 1, 1)).bernoulli_(0.5)
        if isinstance(x, DTensor):
            where = of if is_sharded else [Replicate()]
            mask = DTensor.from_local(mask, fresh, where, shape=torch.Size((5, 1, 1)), stride=(1, 1, 1))
        return [mask, torch.rand(1)]

    same_program(drop_samples, distribute_tensor(x, fresh, of), x)
    scalar = distribute_tensor(x, fresh, of).to_local().new_empty(())
    assert scalar._meta.origin is None, "it has no part of the shard"


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_between_parallel_layers_is_that_of_a_single_process(fresh: Any, use_reentrant: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.drop, self.last = nn.Linear(8, 12), nn.Dropout(0.5), nn.Linear(12, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.drop(torch.relu(self.first(x))))  # type: ignore[no-any-return]

    alone = Net()
    ours = parallelize_module(copy.deepcopy(alone), fresh, {"first": ColwiseParallel(), "last": RowwiseParallel()})
    found = []
    for net in (alone, ours):
        torch.manual_seed(2)
        loss = checkpoint(net, torch.ones(4, 8).requires_grad_(), use_reentrant=use_reentrant).square().mean()
        loss.backward()
        found.append([loss, *(each.grad for each in net.parameters())])
    for mine, theirs in zip(found[1], found[0], strict=True):
        same(mine, theirs)


class Attention(nn.Module):
    """Attention heads between tensor parallel layers with local outputs. ``attend`` draws random numbers."""

    def __init__(self, attend: Callable[[Any, Any, Any], Any], heads: int) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.ModuleList(nn.Linear(8, 2 * heads) for _ in range(3))
        self.last = nn.Linear(2 * heads, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], -1, 2).transpose(1, 2) for layer in self.qkv)
        return self.last(self.attend(q, k, v).transpose(1, 2).reshape(*x.shape[:2], -1))  # type: ignore[no-any-return]


ATTENTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "softmax": lambda q, k, v: F.dropout((q @ k.transpose(-1, -2)).softmax(-1), 0.4) @ v,
    "scaled_dot_product": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True),
    "heads": lambda q, k, v: F.dropout(q) + F.dropout(k) * v,
}


@pytest.mark.parametrize(
    ("what", "is_captured"),
    [
        *((name, False) for name in ATTENTIONS),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ATTENTIONS),
    ],
)
def test_dropout_in_heads_of_parallel_layers_is_that_of_a_single_process(
    fresh: Any, what: str, is_captured: bool
) -> None:
    if what != "heads" and torch_version() < (2, 12):
        pytest.skip("torch 2.11 does not shard the heads in its view for a product, so ranks draw their own numbers")
    alone = Attention(ATTENTIONS[what], 6)
    plan = {**{f"qkv.{i}": ColwiseParallel() for i in range(3)}, "last": RowwiseParallel()}
    ours = parallelize_module(copy.deepcopy(alone), fresh, plan)  # type: ignore[arg-type]
    found = []
    for net in (alone, ours):
        torch.manual_seed(2)
        step = torch.compile(net, backend="monarch", fullgraph=True) if is_captured and net is ours else net
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*draws random numbers")
            loss = step(torch.linspace(-1, 1, 80).view(2, 5, 8)).square().mean()
        loss.backward()
        found.append([loss, *(each.grad for each in net.parameters())])
    for mine, theirs in zip(found[1], found[0], strict=True):
        same(mine, theirs)


FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "heads": lambda x: x.view(*x.shape[:-1], -1, 2).transpose(-3, -2),
    "heads, one dimension": lambda x: x.view(*x.shape[:-1], -1, 2).flatten(0, 1),
    "one head of a rank, viewed as it is": lambda x: (heads := x.view(*x.shape[:-1], -1, 4)).view(heads.shape),
    "sizes as numbers": lambda x: x.view(x.shape[0], x.shape[1], x.shape[2] // 2, 2),
    "transposed": lambda x: x.transpose(0, -1).contiguous(),
    "features": lambda x: x.sum(1, keepdim=True) + x.softmax(1),
    "layer": lambda x: F.linear(x.transpose(1, 2).contiguous(), torch.ones(5, 3)),
    "parts": lambda x: x.chunk(3, 1)[1].squeeze(1),
    "joined": lambda x: torch.cat([x, x * 2], 1),
    "broadcast": lambda x: x * x[:, :1],
    "expanded": lambda x: x.unsqueeze(1).expand(-1, 2, -1, -1),
    "foreach": lambda x: torch._foreach_mul([x, x + 1], 2)[1],
    "data": lambda x: x.data.detach() + 1,
}
"""Operations on the shards of a tensor of size (4, 3, 8), sharded over the first or last dimension."""


@pytest.mark.parametrize("dim", [0, 2])
@pytest.mark.parametrize("what", FOLLOWED)
def test_random_numbers_for_computed_shards_match_a_single_process(fresh: Any, what: str, dim: int) -> None:
    if what == "layer" and dim == 2 and torch_version() < (2, 12):
        pytest.skip("torch 2.11 does not shard a later dimension that a layer's view merges with the batch")
    x = torch.linspace(-1, 1, 96).view(4, 3, 8)
    expected = FOLLOWED[what](x)
    local = FOLLOWED[what](distribute_tensor(x, fresh, [Shard(dim)]).to_local())
    whole = local._meta.origin.whole
    assert (whole.shape, whole.stride) == (expected.shape, expected.stride())
    same(DTensor.from_local(local, *whole[:2], shape=expected.shape, stride=expected.stride()), expected)


NOT_FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "flipped": lambda x: x.flip(0),
    "rolled": lambda x: x.roll(1, 0),
    "summed": lambda x: x.sum(0, keepdim=True) * x,
    "counted": lambda x: x.cumsum(0),
    "exchanged": lambda x: x + x.t(),
    "in place": lambda x: x.clone().t_(),
    "unsqueezed in place": lambda x: x.clone().unsqueeze_(0),
    "some rows": lambda x: x[:1],
    "by values": lambda x: x[x > 0],
    "their places": lambda x: (x > 0).nonzero(),
    "a list's": lambda x: torch._foreach_add([torch.ones_like(x), torch.zeros_like(x).cumsum(0)], [x, x])[1],
}
"""Operations on a shard's rows whose result is not a known part of one process's result."""


@pytest.mark.parametrize("what", NOT_FOLLOWED)
def test_random_numbers_for_former_shards_differ_with_a_warning(
    fresh: Any, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_ops, "_warned", set())
    x = torch.arange(64.0).view(8, 8).remainder(5) - 1.5
    origin = NOT_FOLLOWED[what](distribute_tensor(x, fresh, [Shard(0)]).to_local()[:, :4].contiguous())._meta.origin
    assert (origin.streams, origin.whole) == ((0, 1), None)
    square = distribute_tensor(torch.cat([x, x]), fresh, [Shard(0)]).to_local()
    with pytest.warns(UserWarning, match="use_local_output=False"):
        drawn = F.dropout(torch.ones_like(NOT_FOLLOWED[what](square), dtype=torch.float32))
    one, other = value(DTensor.from_local(drawn.contiguous(), fresh, [Shard(0)])).chunk(2)
    assert not torch.equal(one, other)


def test_numbers_like_a_shard_with_gradients_do_not_warn(fresh: Any) -> None:
    local = distribute_tensor(torch.ones(4, 2), fresh, [Shard(0)]).to_local().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.rand_like(local)


def test_random_numbers_for_rank_dependent_tensors_differ_with_a_warning(
    fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_ops, "_warned", set())
    rank = fresh.get_local_rank()
    x = distribute_tensor(torch.ones(2, 64), fresh, [Replicate()]).to_local()
    for own in (x[rank], x * (rank + 1), x[:, rank * 32 : rank * 32 + 32]):
        assert own._meta.origin.streams == (0, 1)
    with pytest.warns(UserWarning, match="use_local_output=False"):
        one, other = value(DTensor.from_local(F.dropout(x[rank]), fresh, [Shard(0)])).chunk(2)
    assert not torch.equal(one, other)


def test_lists_of_tensors_have_each_its_own_origin(fresh: Any) -> None:
    shard = distribute_tensor(torch.ones(4, 2), fresh, [Shard(0)]).to_local()
    one, other, third = (distribute_tensor(torch.ones(2, 2), fresh, [Replicate()]).to_local().clone() for _ in range(3))
    torch._foreach_copy_([one, other], [shard, third])
    torch._foreach_add_([third], [one])
    assert [each._meta.origin for each in (one, other, third)] == [shard._meta.origin, None, shard._meta.origin]


def test_filled_copy_of_a_shard_keeps_its_origin(fresh: Any) -> None:
    shard = distribute_tensor(torch.ones(5, 2), fresh, [Shard(0)]).to_local()
    filled = torch.empty_like(shard).copy_(torch.tensor(2.0))
    assert filled._meta.origin == shard._meta.origin


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_dropout_of_permuted_shards_differs_with_a_warning(
    fresh: Any, use_reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a flip of the sharded dimension it is not known which elements of the whole a rank has."""
    monkeypatch.setattr(random_ops, "_warned", set())  # each line warns only once
    layer = parallelize_module(nn.Linear(8, 64), fresh, ColwiseParallel())
    masks: list[torch.Tensor] = []

    def hidden(x: torch.Tensor) -> Any:
        dropped = F.dropout(torch.ones_like(torch.relu(layer(x)).flip(-1)).clone(), 0.5)
        masks.append(value(DTensor.from_local(dropped.detach(), fresh, [Shard(1)])))
        return layer(x) * dropped

    x = torch.ones(4, 8).requires_grad_()
    torch.manual_seed(2)
    with pytest.warns(UserWarning, match=r"test_random_numbers\.py(.|\n)*use_local_output=False"):
        checkpoint(hidden, x, use_reentrant=use_reentrant).sum().backward()
    first, again = masks  # the recomputation draws the second mask
    equal(again, first)
    assert not torch.equal(first[:, :32], first[:, 32:])
    expected = DTensor.from_local(layer.bias.grad.to_local(), fresh, [Shard(0)])
    equal(expected, first.sum(0))


ORIGINS: dict[str, tuple[Callable[[Any, Any, Any, Any], Any], Any]] = {
    "shard": (lambda s, r, dp, tp: s, (0, 1, 2, 3)),
    "replica": (lambda s, r, dp, tp: r, None),
    "product with a replica": (lambda s, r, dp, tp: r @ s, (0, 1, 2, 3)),
    "sum over one dimension": (lambda s, r, dp, tp: funcol.all_reduce(s, "sum", dp), (0, 1, 0, 1)),
    "gathered over the other": (lambda s, r, dp, tp: funcol.all_gather_tensor(s, 0, tp), (0, 0, 1, 1)),
    "gathered over both": (
        lambda s, r, dp, tp: funcol.all_gather_tensor(funcol.all_gather_tensor(s, 0, tp), 0, dp), None
    ),
    "scattered": (lambda s, r, dp, tp: funcol.reduce_scatter_tensor(r, "sum", 0, dp), (0, 0, 1, 1)),
    "exchanged": (lambda s, r, dp, tp: funcol.all_to_all_single(r, None, None, tp), (0, 1, 0, 1)),
    "exchanged shards": (lambda s, r, dp, tp: funcol.all_to_all_single(s, None, None, tp), (0, 1, 2, 3)),
    "copied": (lambda s, r, dp, tp: r.copy_(s), (0, 1, 2, 3)),
    "copied over": (lambda s, r, dp, tp: s.clone().copy_(r), None),
    "added": (lambda s, r, dp, tp: r.add_(s), (0, 1, 2, 3)),
    "filled": (lambda s, r, dp, tp: torch.empty_like(s).zero_(), (0, 1, 2, 3)),
    "out": (lambda s, r, dp, tp: torch.add(s, 1, out=r), (0, 1, 2, 3)),
    "one number": (lambda s, r, dp, tp: s.new_empty(()), None),
}  # fmt: skip
"""Tensors made from a shard over both dimensions and from a replica, with the expected streams by rank."""


def written_into(s: Any, r: Any, dp: Any, tp: Any) -> dict[str, tuple[Any, Any]]:
    """Return tensors that c10d collectives and views have changed, with the expected streams by rank."""
    one, row, scattered, gathered = s.clone(), r.clone(), r.new_empty(2, 4), [r.clone(), r.clone()]
    dist.all_reduce(one, group=dp)
    row[:2] = s[:2]
    dist.reduce_scatter_tensor(scattered, r, group=tp)
    dist.all_gather(gathered, s, group=dp)
    everywhere = one.clone()
    dist.broadcast(everywhere, group_src=0, group=tp)
    return {
        "all_reduce": (one, (0, 1, 0, 1)), "row": (row, (0, 1, 2, 3)), "scattered": (scattered, (0, 1, 0, 1)),
        "gathered": (gathered[1], (0, 1, 0, 1)), "broadcast": (everywhere, None),
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_shards_that_a_plain_tensor_is_computed_from_are_known(fresh_square: Any) -> None:
    groups = fresh_square.get_group("dp"), fresh_square.get_group("tp")

    def shard_and_replica() -> tuple[Any, Any]:
        shard = distribute_tensor(torch.ones(8, 8), fresh_square, [Shard(0), Shard(1)]).to_local()
        return shard, distribute_tensor(torch.ones(4, 4), fresh_square, [Replicate()] * 2).to_local().clone()

    def streams(tensor: Any) -> Any:
        return None if tensor._meta.origin is None else tensor._meta.origin.streams

    for _ in range(2):  # the second time with known signatures
        found = {what: streams(make(*shard_and_replica(), *groups)) for what, (make, _) in ORIGINS.items()}
        assert found == {what: expected for what, (_, expected) in ORIGINS.items()}
        written = written_into(*shard_and_replica(), *groups)
        found = {what: streams(each) for what, (each, _) in written.items()}
        assert found == {what: expected for what, (_, expected) in written.items()}


def test_dropout_after_the_sum_of_shards_draws_the_same_mask_on_all_ranks(fresh: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 32))
    model = parallelize_module(model, fresh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dropped = F.dropout(torch.ones_like(model(torch.ones(4, 8)).detach()), 0.5)
    one, other = value(DTensor.from_local(dropped, fresh, [Shard(0)])).chunk(2)
    equal(one, other)
    shard = distribute_tensor(torch.ones(4, 8), fresh, [Shard(0)]).to_local()
    summed = funcol.all_reduce(shard, "sum", fresh).wait()
    one, other = value(DTensor.from_local(F.dropout(summed), fresh, [Shard(0)])).chunk(2)
    equal(one, other)


def test_sampling_from_plain_tensors_matches_a_single_process(fresh: Any) -> None:
    """As for text that is sampled from the logits of a tensor parallel model."""

    def program(x: torch.Tensor) -> list[Any]:
        changed = torch.zeros_like(x)
        assert changed.bernoulli_(x) is changed
        own = torch.Generator().manual_seed(5)
        return [
            changed, torch.multinomial(x, 2), torch.rand(1), torch.bernoulli(x), torch.poisson(x * 5), torch.rand(1),
            torch.normal(x, 2.0), torch.normal(1.0, x), torch.normal(x, x), F.rrelu(x - 0.5, training=True),
            torch.distributions.Categorical(x).sample(), torch.rand(1), torch.multinomial(x, 2, generator=own),
            F.rrelu(x - 0.5, training=False), torch.randn_like(x),
        ]  # fmt: skip

    whole = torch.rand(3, 6) / 2 + 0.25
    same_program(program, distribute_tensor(whole, fresh, [Replicate()]).to_local(), whole)


def test_generators_agree_after_ranks_draw_different_counts(fresh: Any) -> None:
    whole = torch.tensor([[0.1, 0.1], [90.0, 70.0]])
    rows = distribute_tensor(whole, fresh, [Shard(0)]).to_local()
    # Partial values differ by rank but must use the same random numbers.
    # The values determine how many numbers poisson draws.
    local = DTensor.from_local(rows, fresh, [Partial()]).to_local()
    same_program(lambda x: [torch.poisson(x), torch.rand(1), torch.randn_like(x)], local, whole[:1])
    one, other = value(DTensor.from_local(torch.randn_like(local), fresh, [Shard(0)])).chunk(2)
    assert torch.equal(one, other)


def test_a_replicated_activation_of_tensor_parallelism_stays_one(fresh: Any) -> None:
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 5), nn.Dropout(0.5))
    torch.manual_seed(3)
    ours = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 5), nn.Dropout(0.5))
    parallelize_module(ours, fresh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    whole = torch.randn(4, 6)
    torch.manual_seed(4)
    mine = ours(whole)
    torch.manual_seed(4)
    assert isinstance(mine, RemoteTensor)
    same(mine, plain(whole))


@pytest.fixture
def own_mesh() -> Iterator[Any]:
    """Processes for one test, because a call of `own_random_numbers` cannot be undone."""
    procs = this_host().spawn_procs({"dp": 2, "tp": 2})
    yield procs.device_mesh("cpu")
    procs.stop().get(30)


def test_ranks_with_other_data_draw_other_numbers_if_asked_to(own_mesh: Any) -> None:
    local = distribute_tensor(torch.ones(4, 3), own_mesh, [Replicate()] * 2).to_local()
    own_random_numbers(own_mesh["dp"])
    own_random_numbers(own_mesh["dp"])
    torch.manual_seed(1)
    first, after = drawn(local, own_mesh), torch.rand(1)
    for one, other in itertools.combinations(range(4), 2):
        assert torch.equal(first[one], first[other]) == (one // 2 == other // 2)
    second = drawn(local, own_mesh)
    assert not any(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))
    torch.manual_seed(1)
    for mine, theirs in zip(first, drawn(local, own_mesh), strict=True):
        equal(mine, theirs)
    equal(torch.rand(1), after)
    dropped = checkpoint(F.dropout, local.requires_grad_(), use_reentrant=False)
    dropped.sum().backward()
    equal(local.grad, dropped)  # type: ignore[arg-type]
    own_random_numbers(own_mesh)
    assert all(not torch.equal(*pair) for pair in itertools.combinations(drawn(local, own_mesh), 2))
    same_program(
        lambda x: [x.normal_()], distribute_tensor(torch.ones(5, 3), own_mesh, [Shard(0)] * 2), torch.ones(5, 3)
    )


def test_shards_of_ranks_with_other_data_draw_other_numbers_on_each(own_mesh: Any) -> None:
    """Ranks with other batches (`own_random_numbers`) also draw other numbers for their shards of a layer."""
    own_random_numbers(own_mesh["dp"])
    local = distribute_tensor(torch.ones(4, 64), own_mesh["tp"], [Shard(1)]).to_local()
    masks = value(DTensor.from_local(F.dropout(local), own_mesh, [Shard(0)] * 2)).chunk(4)
    assert not any(torch.equal(*pair) for pair in itertools.combinations(masks, 2))


def test_generator_state_is_sent_only_after_a_change(line: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = controller_mesh.workers_of(line)
    assert workers is not None
    x = distribute_tensor(torch.zeros(UNEVEN), line, [Shard(0)])
    written: list[Any] = []
    own = workers.write
    monkeypatch.setattr(workers, "write", lambda record: (written.append(record), own(record)))
    torch.manual_seed(9)
    x.normal_()
    assert len(written) == 2  # the state, and the operation
    for _ in range(5):
        x.uniform_()
    assert len(written) == 7
    torch.rand(1)
    x.uniform_()
    assert len(written) == 9


def test_a_tensor_that_failed_costs_no_number(line: Any) -> None:
    table, index = (distribute_tensor(each, line, [Replicate()]) for each in (torch.zeros(3, 3), torch.tensor([7])))
    failed = DTensor.from_local(failing_lookup.look_up(index.to_local(), table.to_local()), line, [Replicate()])
    x = distribute_tensor(torch.zeros(UNEVEN), line, [Shard(0)])
    torch.manual_seed(6)
    failed.normal_()
    x.normal_()
    torch.manual_seed(6)
    torch.zeros(failed.shape).normal_()
    equal(x, torch.zeros(UNEVEN).normal_())
    with pytest.raises(RuntimeError, match="index"):
        value(failed)


def test_failed_draw_is_reported_until_the_state_is_known_again() -> None:
    cpu, target, shape = torch.device("cpu"), torch.zeros(4), ([4], [1], torch.float32)
    state = cpu_generator.state_of(torch.default_generator)

    def fill(name: str) -> None:
        worker_random.fill(target, name, *shape, cpu, [], 1)

    with pytest.raises(RuntimeError, match="Expected a value of type 'float'"):
        worker_random.fill(target, "aten.normal_.default", *shape, cpu, [], 1, "no number")
    with pytest.raises(RuntimeError, match="has missed random numbers"):
        fill("aten.normal_.default")
    worker_random.set_state(state, cpu)
    fill("aten.normal_.default")


def test_workers_report_the_generator_offset_of_an_operation_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = simulated_mesh((2,), ("x",), "cuda")
    workers = controller_mesh.workers_of(mesh)
    assert workers is not None
    torch.manual_seed(7)
    beginning = torch.cuda.get_rng_state()
    replies = [philox.after(cpu_generator.state_of(philox.default), 40)] * 2
    asked: list[str] = []
    monkeypatch.setattr(workers, "ask", lambda what: (asked.append(what), replies)[1])
    x = dt_rand(UNEVEN, device_mesh=mesh, placements=[Shard(0)])
    once = torch.cuda.get_rng_state()
    assert philox.moved(bytes(beginning.tolist()), bytes(once.tolist())) == 40
    x.uniform_()
    assert philox.moved(bytes(beginning.tolist()), bytes(torch.cuda.get_rng_state().tolist())) == 80
    assert asked == ["generator_state"]
    torch.cuda.set_rng_state(once)
    equal(torch.cuda.get_rng_state(), once)
    torch.manual_seed(7)
    equal(torch.cuda.get_rng_state(), beginning)
    with pytest.raises(RemoteTensorError, match="of the same device"):
        x.uniform_(generator=torch.Generator())


@pytest.mark.parametrize("name", list(FILLS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_generator_moves_as_the_operation_would(name: str, dtype: torch.dtype) -> None:
    fill, generator = FILLS[name], torch.default_generator
    for size, kept in itertools.product([1, 15, 16, 47, 48, 49, 1000, 1003, 70001], [0, 1]):
        for whole in (torch.empty(size, dtype=dtype), torch.empty(2 * size, dtype=dtype)[::2]):
            torch.manual_seed(size)
            torch.randn(2 * kept + kept)  # an odd count, so one normal number is kept for the next draw
            before = cpu_generator.state_of(generator)
            cpu_generator.Move((name,), whole.shape, whole.stride(), dtype).make(generator, fill)
            moved = cpu_generator.state_of(generator)
            cpu_generator.set_state(generator, before)
            fill(whole)
            assert moved == cpu_generator.state_of(generator), (size, kept, whole.stride())


@pytest.mark.parametrize("drawn", [0, 1, 622, 623, 624, 625])
def test_skipping_words_is_drawing_them(drawn: int) -> None:
    generator = torch.default_generator
    for words in (0, 1, 622, 623, 624, 625, 1247, 1248, 1249, 100_000):
        torch.manual_seed(words)
        torch.empty(drawn, dtype=torch.int32).random_()
        before = cpu_generator.state_of(generator)
        torch.empty(words, dtype=torch.int32).random_()
        after = cpu_generator.state_of(generator)
        cpu_generator.set_state(generator, before)
        cpu_generator.skip(generator, words)
        assert cpu_generator.state_of(generator) == after
