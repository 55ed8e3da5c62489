"""Operators without a sharding in torch's DTensor: each rank computes the whole result, as a single process does."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor._patches.fixes import replicate_fallback
from tests.dtensor.values import same

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
PLACEMENTS = {"rows": (Shard(0), Replicate()), "both": (Shard(0), Shard(1)), "a sum": (Partial(), Shard(0))}


def placed(mesh: Any, x: torch.Tensor, placements: Any) -> Any:
    if not placements[0].is_partial():
        return distribute_tensor(x, mesh, placements)
    halves = distribute_tensor(torch.stack([x * 0.25, x * 0.75]), mesh, [Shard(0), Shard(1)]).sum(0)
    assert halves.placements == placements
    return halves


CALCULATED: dict[str, Callable[[Any], Any]] = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "rows of a mask": lambda x: x[x[:, 0] > 0],
    "values of a mask": lambda x: x[x > 0],
    "masked_select": lambda x: torch.masked_select(x, x < 0),
    "unique": lambda x: (x * 2).int().unique(),
    "bincount": lambda x: torch.bincount((x.abs() * 2).int().flatten(), minlength=12),
    "histogram": lambda x: torch.histogram(x, 4, range=(-2.0, 2.0)).hist,
    "cdist": lambda x: torch.cdist(x, x[:3]),
    "quantile": lambda x: x.quantile(0.3, dim=0),
    "renorm": lambda x: x.renorm(2, 0, 0.5),
    "transpose_": lambda x: (x * 1).transpose_(0, 1) + 1,
    "tril_": lambda x: (x * 1).tril_(),
    "a mask is written": lambda x: (x * 1).index_put_((x > 0,), torch.tensor(0.0)),
    "unfold": lambda x: x.unfold(0, 3, 2) * 2,
    "unbind": lambda x: torch.stack([row * 2 for row in x.unbind(0)] + [row + 1 for row in x[:6].T.unbind(0)]),
    "uneven rows beside each other": lambda x: (x[1:] * 2).view(-1) + (x[1:, :3] + x[:7, 3:]).flatten().sum(),
    "a diagonal is filled": lambda x: (x @ x.T).fill_diagonal_(float("-inf")) + (x * 1).fill_diagonal_(3)[0, 0],
}


@pytest.mark.parametrize("dims", [(), (1,), ((1,),)], ids=["all", "one", "some"])
def test_sizes_after_squeezing_in_place_are_those_of_the_gradient(mesh_of: Callable[[str], Any], dims: Any) -> None:
    ours, alone = distribute_tensor(X, mesh_of("2"), [Shard(0)]).requires_grad_(), X.clone().requires_grad_()
    for each in (ours, alone):
        squeezed = (each[:, :1] * 2).squeeze_(*dims)
        assert squeezed.shape == (8,)
        squeezed.square().sum().backward()
    same(ours.grad, alone.grad)


WRITTEN: dict[str, Callable[[Any], Any]] = {
    "index_copy_": lambda x: x.index_copy_(0, torch.tensor([4, 1]), torch.ones(2, 6)),
    "scatter_add_": lambda x: x.scatter_add_(0, torch.tensor([[0, 7, 2], [0, 0, 0]]), torch.ones(2, 3)),
    "rows of the last dimension": lambda x: x.scatter_add_(1, torch.tensor([[0, 0]] * 8), torch.ones(8, 2)),
    "masked_fill_": lambda x: x.masked_fill_(X > 0, torch.tensor(4.0)),
    "a mask": lambda x: x.__setitem__(X.T.T > 0.2, 0.0),
    "a mask of its own": lambda x: x.__setitem__(x > 0.2, 0.0),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([0, 0, 6]), torch.ones(3, 6)),
    "out=": lambda x: torch.exp(x, out=x),
    "diagonal": lambda x: x.fill_diagonal_(5),
    "a view": lambda x: x[:7].view(-1)[3:9].mul_(2),
    "rows": lambda x: x.unbind(0)[3].mul_(2),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_inplace_change_before_a_redistribution_is_kept(mesh_of: Callable[[str], Any], name: str) -> None:
    """torch itself would redistribute the tensor before the change."""
    for placements in (*PLACEMENTS.values(), (Shard(1), Replicate()), (Shard(0), Shard(0))):
        ours, alone = placed(mesh_of("2x2"), X, placements), X.clone()
        for each in (ours, alone):
            WRITTEN[name](each)
        if name != "out=" or torch_version() >= (2, 12):  # torch 2.11 gives an output the placements of the result
            assert ours.placements == placements
        same(ours, alone)


@pytest.mark.parametrize("name", CALCULATED)
def test_values(mesh_of: Callable[[str], Any], name: str) -> None:
    for placements in PLACEMENTS.values():
        same(CALCULATED[name](placed(mesh_of("2x2"), X, placements)), CALCULATED[name](X))


def test_inplace_change_keeps_the_placement(mesh_of: Callable[[str], Any]) -> None:
    for placements in PLACEMENTS.values():
        ours, alone = placed(mesh_of("2x2"), X, placements), X.clone()
        for each in (ours, alone):
            each[each > 0.5] = 0
            torch._foreach_clamp_min_([each], -0.5)
        assert ours.placements == placements
        same(ours, alone)


def test_write_into_a_gathered_view_changes_the_tensor(mesh_of: Callable[[str], Any]) -> None:
    ours, alone = distribute_tensor(X, mesh_of("2"), [Shard(0)]), X.clone()
    for each in (ours, alone):
        each.unfold(0, 2, 3).mul_(2)
    same(ours, alone)


def lstm() -> nn.Module:
    return nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dropout=0.0), 2)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lstm,
    "GRU": lambda: nn.GRU(6, 5, batch_first=True),
    "encoder": encoder,
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
    "pooling": lambda: nn.Sequential(nn.AvgPool1d(2), nn.AdaptiveMaxPool1d(2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(mesh_of: Callable[[str], Any], name: str) -> None:
    """Modules in training mode and in evaluation mode, where attention takes a fast path."""
    x, found = X.view(4, 2, 6), []
    for there in (False, True):
        torch.manual_seed(1)
        module = MODULES[name]()
        given = distribute_tensor(x, mesh_of("2"), [Shard(0)]) if there else x.clone()
        if there:
            module = distribute_module(module, mesh_of("2"))
        given.requires_grad_()
        result = module(given)
        result = result[0] if isinstance(result, tuple) else result
        result.square().sum().backward()
        with torch.no_grad():
            later = module.eval()(given)
        later = later[0] if isinstance(later, tuple) else later
        found.append([result, later, given.grad, *(each.grad for each in module.parameters())])
    for ours, alone in zip(found[1], found[0], strict=True):
        same(ours, alone)


def test_sequences_of_unequal_lengths(mesh_of: Callable[[str], Any]) -> None:
    module, found = nn.LSTM(3, 5, batch_first=True), []
    for x in (X.view(4, 4, 3), distribute_tensor(X.view(4, 4, 3), mesh_of("2"), [Shard(0)])):
        if isinstance(x, DTensor):
            module = distribute_module(module, mesh_of("2"))
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([4, 3, 1, 1]), batch_first=True)
        found.append([packed.data, packed.batch_sizes])
        with mesh_of("2"):  # torch makes the first state by device type, and other meshes have the same type
            result, lengths = nn.utils.rnn.pad_packed_sequence(module(packed)[0], batch_first=True)
        module.zero_grad()
        result.square().sum().backward()
        found[-1] += [result, lengths, module.weight_ih_l0.grad]
    for alone, ours in zip(*found, strict=True):
        same(ours, alone)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_mask_of_the_encoder_does_not_make_it_nested(mesh_of: Callable[[str], Any]) -> None:
    module, x = encoder().eval(), X.view(4, 2, 6)
    mask = torch.tensor([[False, True], [False, False], [False, True], [False, False]])
    with torch.no_grad():
        alone = module(x, src_key_padding_mask=mask)
        there = distribute_module(module, mesh_of("2"))
        ours = there(distribute_tensor(x, mesh_of("2"), [Shard(0)]), src_key_padding_mask=mask)
    same(ours * ~mask[..., None], alone * ~mask[..., None])


def test_distributions_look_at_their_arguments(mesh_of: Callable[[str], Any]) -> None:
    found = []
    for x in (distribute_tensor(X, mesh_of("2"), [Shard(0)]), X):
        torch.manual_seed(2)
        normal = torch.distributions.Normal(x, x.exp(), validate_args=True)
        categories = torch.distributions.Categorical(logits=x, validate_args=True)
        with mesh_of("2"):  # torch draws numbers by device type, and other meshes have the same type
            found.append([normal.rsample(), categories.sample(), categories.entropy()])
        with pytest.raises(ValueError, match="Normal"):
            torch.distributions.Normal(x, x, validate_args=True)
    for ours, alone in zip(*found, strict=True):
        same(ours, alone)


def test_fallback_is_logged_once(
    mesh_of: Callable[[str], Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicate_fallback, "_said", set())
    x = distribute_tensor(X, mesh_of("2"), [Shard(0)])
    with caplog.at_level(logging.INFO, "monarch_backend"):
        for _ in range(2):
            x.renorm(2, 0, 0.5)
    assert [each.args for each in caplog.records] == [(torch.ops.aten.renorm.default,)]


def test_wrong_arguments_without_a_sharding_rule_raise_torchs_error(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(X, mesh_of("2"), [Shard(0)])
    with pytest.raises(RuntimeError, match="same number of columns"):
        torch.cdist(x, x[:, :2])


def test_captured_steps_write_through_an_index_and_break_at_sizes_that_are_values(
    mesh_of: Callable[[str], Any],
) -> None:
    def step(x: Any) -> Any:
        y = x * 1
        y[1:3, 2:] = 0
        y[5:] += 1
        return y * 2, y[y > 0].sum()

    there = torch.compile(step, backend="monarch", options={"inductor": False})
    for ours, alone in zip(there(distribute_tensor(X, mesh_of("2"), [Shard(0)])), step(X), strict=True):
        same(ours, alone)


def test_fallback_in_captured_steps(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(X, mesh_of("2"), [Shard(0)])

    def step(x: Any) -> Any:
        return F.avg_pool1d(x, 2).renorm(2, 0, 0.5).sum()

    same(torch.compile(step, backend="monarch", fullgraph=True, options={"inductor": False})(x), step(X))


OTHER_SIZES: dict[str, Callable[[Any], Any]] = {
    "flatten": lambda x: x.flatten(), "view": lambda x: x.view(-1), "squeeze": lambda x: x.squeeze(),
    "reshape": lambda x: x.t().reshape(-1, 1), "einsum": lambda x: torch.einsum("ij,ij->i", x, x),
}  # fmt: skip


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("what", OTHER_SIZES)
def test_a_sharded_dimension_of_size_1_goes_away(mesh_of: Callable[[str], Any], what: str, captured: bool) -> None:
    torch._dynamo.reset()
    function = OTHER_SIZES[what]
    ours = torch.compile(function, backend="monarch", options={"inductor": False}) if captured else function
    for shape, dim in (((1, 4), 0), ((3, 1), 1)):
        whole = torch.randn(shape)
        x, alone = distribute_tensor(whole, mesh_of("2"), [Shard(dim)]).requires_grad_(), whole.clone().requires_grad_()
        found, expected = ours(x), function(alone)
        same(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        same(x.grad, alone.grad)


def test_write_into_a_view_without_the_sharded_dimension_changes_the_tensor(
    mesh_of: Callable[[str], Any],
) -> None:
    x = distribute_tensor(torch.ones(1, 4), mesh_of("2"), [Shard(0)])
    x.view(-1).mul_(2)
    x.squeeze(0)[1:].add_(1)
    same(x, torch.tensor([[2.0, 3.0, 3.0, 3.0]]))


VIEWS_OF_A_COPY: dict[str, Callable[[Any], Any]] = {
    "transposed": lambda x: x.chunk(2, 1)[0].t(),
    "a part of it": lambda x: x.chunk(2, 1)[0].chunk(2, 1)[0],
    "flat": lambda x: x.reshape(3, 4).flatten(),
    "as another": lambda x: x.chunk(2, 1)[1].view_as(torch.empty(2, 3)),
}


@pytest.mark.parametrize("view", VIEWS_OF_A_COPY)
def test_indexed_write_into_a_view_of_rows(mesh_of: Callable[[str], Any], view: str) -> None:
    for name in ("2", "3"):
        here = torch.arange(12.0).view(2, 6)
        there = distribute_tensor(here, mesh_of(name), [Shard(1)])
        for x in (here, there):
            VIEWS_OF_A_COPY[view](x)[:] = 100.0
        same(there, here)


def test_foreach_changes_of_rows_of_one_tensor(mesh_of: Callable[[str], Any]) -> None:
    """The list has several rows of one tensor, and is changed repeatedly. Autograd must see each change."""
    here = torch.arange(24.0).view(4, 6)
    there = distribute_tensor(here, mesh_of("3"), [Shard(0)])
    for x in (here, there):
        rows = [x[1:], x[0]]
        for _ in range(2):
            torch._foreach_mul_(rows, 2.0)
            rows[0].add_(1)
            rows[1].sub_(1)
    same(there, here)


def test_a_list_that_was_changed_is_not_differentiated(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.rand(4, 6), mesh_of("3"), [Shard(0)]).requires_grad_()
    y = x.exp()
    torch._foreach_mul_([y], 2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = x * 1.0
    view = y.t()
    torch._foreach_mul_([view], 3.0)
    [grad] = torch.autograd.grad(y.sum() + 10 * view.sum(), x)
    same(grad, torch.full((4, 6), 33.0))


def test_the_same_bytes_in_several_dtypes(mesh_of: Callable[[str], Any]) -> None:
    """Views in several dtypes, one after another: a cached view of one dtype must not be used for another."""
    here = torch.randn(4, 6)
    for placement in (Replicate(), Shard(0)):
        there = distribute_tensor(here, mesh_of("3"), [placement])
        for dtype in (torch.int16, torch.float64, torch.uint8):
            assert there.view(dtype).shape == here.view(dtype).shape
            assert torch.equal(
                there.view(dtype).full_tensor().to(torch.float64).cpu(), here.view(dtype).to(torch.float64)
            )


VIEWS_OF_NOTHING: list[Callable[[Any], Any]] = [
    lambda x: x.flatten(), lambda x: x.reshape(-1), lambda x: x.view(0), lambda x: x.view(3, 0),
    lambda x: x.reshape(0, 3), lambda x: x.unsqueeze(0).flatten(1), lambda x: x.take(torch.empty(0, dtype=torch.long)),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0, 3)])
def test_views_of_nothing(mesh_of: Callable[[str], Any], shape: tuple[int, ...]) -> None:
    """torch's own search for a view's sharding does not end."""
    for placements in ([Replicate()], [Shard(0)], [Shard(len(shape) - 1)]):
        x = distribute_tensor(torch.zeros(shape), mesh_of("3"), placements)
        for view in VIEWS_OF_NOTHING:
            same(view(x), view(torch.zeros(shape)))


@pytest.mark.parametrize("rows", [2, 4, 5])
def test_a_table_of_which_a_rank_has_no_rows(mesh_of: Callable[[str], Any], rows: int) -> None:
    """Four rows on three ranks are two, two and none."""
    table, ids = torch.randn(rows, 6), torch.tensor([[0, 1], [1, rows - 1]])
    there = distribute_tensor(table, mesh_of("3"), [Shard(0)]).requires_grad_()
    here = table.clone().requires_grad_()
    found, expected = F.embedding(ids, there), F.embedding(ids, here)
    same(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    same(there.grad, here.grad)


@pytest.mark.parametrize("name", ["mul", "mul_", "div", "div_"])
def test_a_list_by_one_number_that_is_a_sum_over_ranks(mesh_of: Callable[[str], Any], name: str) -> None:
    """Each tensor of the list has its own placement."""
    mesh, here = mesh_of("3"), [torch.rand(4, 6), torch.rand(4, 6)]
    operation = getattr(torch, f"_foreach_{name}")
    expected = [each.clone() for each in here]
    made = operation(expected, torch.tensor(3.0))
    expected = expected if name.endswith("_") else made
    for first, second in itertools.product((Replicate(), Shard(0), Partial()), repeat=2):
        there = [
            DTensor.from_local(each / 3, mesh, [placement])
            if placement.is_partial()
            else distribute_tensor(each, mesh, [placement])
            for each, placement in zip(here, (first, second), strict=True)
        ]
        number = DTensor.from_local(
            distribute_tensor(torch.ones(()), mesh, [Replicate()]).to_local(), mesh, [Partial()]
        )
        found = operation(there, number)
        for one, other in zip(there if name.endswith("_") else found, expected, strict=True):
            same(one, other, 1e-5)
