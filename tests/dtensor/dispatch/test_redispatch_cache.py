"""The redispatch caches are used only where operation, arguments and specs are equal."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor import MeshMismatchError, simulated_mesh
from monarch_backend.dtensor._patches.caches import redispatch_cache, scalar_spec_cache
from monarch_backend.dtensor._patches.caches.redispatch_cache import RedispatchPlan
from tests.dtensor.values import same, value
from tests.support.tiers import slow_except

NUMBERS: list[Any] = [
    2, 2.0, True, 2 + 0j, 0, 0.0, -0.0, False, complex(0.0, -0.0), -3, 2.5, math.nan, math.inf, -math.inf, 1j,
    2**40, 2**53 + 1, 2**63 - 1, -(2**63), 1e300,
]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.int64, torch.int8, torch.bool, torch.bfloat16, torch.complex64]
WITH_A_NUMBER: dict[str, Callable[[Any, Any], Any]] = {
    "mul": operator.mul, "add": operator.add, "sub": operator.sub, "div": operator.truediv,
    "mul_": lambda x, n: x.clone().mul_(n), "add_": lambda x, n: x.clone().add_(n),
    "sub_": lambda x, n: x.clone().sub_(n), "rsub": lambda x, n: n - x, "gt": operator.gt, "eq": operator.eq,
    "where": lambda x, n: torch.where(x == x, x, n),
}  # fmt: skip
NOT_COMPLEX = ("rsub", "gt", "eq")
"""Operators for which torch's DTensor cannot hash a complex "Scalar"."""


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The operators that have run from a cached plan."""
    done: list[Any] = []
    own = RedispatchPlan.results

    def results(self: RedispatchPlan, args: Any, kwargs: Any) -> Any:
        found = own(self, args, kwargs)
        done.append(self.call)
        return found

    monkeypatch.setattr(RedispatchPlan, "results", results)
    return done


def attempt(function: Callable[..., Any], *args: Any) -> Any:
    """Return the result's value, or None for an error. Errors of workers are raised by the read."""
    try:
        return value(function(*args))
    except (RuntimeError, OverflowError, TypeError):
        return None


def exactly(found: Any, expected: Any) -> None:
    """Assert the same dtype and bits, including signed zeros. NaNs may have any bits."""
    assert (found is None) == (expected is None)
    if expected is None:
        return
    assert found.dtype == expected.dtype
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if found.is_floating_point():
        assert torch.equal(found.isnan(), expected.isnan())
        numbers = ~found.isnan()
        assert torch.equal(found.signbit()[numbers], expected.signbit()[numbers])
        found, expected = found[numbers], expected[numbers]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", slow_except(WITH_A_NUMBER, "mul", "eq"))
def test_equal_numbers_of_different_types_are_distinct(mesh_of: Any, name: str) -> None:
    """1, 1.0, True and 1+0j are equal and hash alike, but are four different operands. So are 0.0 and -0.0."""
    of, mesh = WITH_A_NUMBER[name], mesh_of("2")
    numbers = [each for each in NUMBERS if not (isinstance(each, complex) and name in NOT_COMPLEX)]
    for dtype in DTYPES:
        whole = torch.tensor([[0.0, 1.0], [-2.0, 3.0], [1.0, 0.0]]).to(dtype)
        x = distribute_tensor(whole, mesh, [Shard(0)])
        for number in [*numbers, *reversed(numbers)]:
            exactly(attempt(of, x, number), attempt(of, whole, number))


def test_numbers_that_are_too_large_are_errors_also_behind_others(mesh_of: Any) -> None:
    x = distribute_tensor(torch.ones(4), mesh_of("2"), [Shard(0)])
    for number in (2, 2**63, 2, 2**70):
        exactly(attempt(operator.mul, x, number), attempt(operator.mul, torch.ones(4), number))


def test_tensors_without_dimensions_are_no_python_numbers(mesh_of: Any) -> None:
    """Both have the same spec, but differ in type promotion."""
    whole = torch.ones(4, dtype=torch.float32)
    x = distribute_tensor(whole, mesh_of("2"), [Shard(0)])
    for _ in range(2):
        for number in (
            2.5,
            torch.tensor(2.5),
            torch.tensor(2.5, dtype=torch.float64),
            2,
            torch.tensor(2),
            torch.tensor(True),
        ):
            exactly(x * number, whole * number)
            exactly(x.to(torch.int32) * number, whole.to(torch.int32) * number)
    number = torch.tensor(2.0, requires_grad=True)
    for _ in range(2):
        number.grad = None
        (x * number).sum().backward()
        assert number.grad is not None and value(number.grad).item() == 4


def test_a_number_beside_each_placement_and_mesh(mesh: Any) -> None:
    whole = torch.arange(30.0).view(5, 6)
    for there in itertools.product([Shard(0), Shard(1), Replicate()], repeat=mesh.ndim):
        x = distribute_tensor(whole, mesh, there)
        for _ in range(2):
            same(x * 2, whole * 2)
            same(x + True, whole + True)
            same(1.5 - x, 1.5 - whole)
            same(x.clone().mul_(3), whole * 3)
            assert (x * 2).placements == there


def test_a_number_beside_a_sum_over_ranks(mesh_of: Any) -> None:
    """A product keeps the sum partial, and an addition does not."""
    whole = torch.arange(24.0).view(4, 6)
    for _ in range(2):
        total = distribute_tensor(whole, mesh_of("2"), [Shard(0)]).sum(0)
        same(total * 2, whole.sum(0) * 2)
        same(total + 2, whole.sum(0) + 2)
        same(total.clone().add_(2), whole.sum(0) + 2)


def test_grad_modes_between_the_same_operations(mesh_of: Any) -> None:
    mesh, whole = mesh_of("2"), torch.arange(16.0).view(4, 4)
    operations: list[Callable[[Any], Any]] = [
        lambda x: x * 2, lambda x: x.view(16), lambda x: x[0], lambda x: x[:, 1:], lambda x: torch.cat([x, x]),
        lambda x: x @ x,
    ]  # fmt: skip
    for of in operations:
        x, theirs = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_(), whole.clone().requires_grad_()
        for _ in range(2):
            with torch.no_grad():
                found = of(x)
                assert found.grad_fn is None and found.requires_grad == found._is_view()  # as in torch's DTensor
            found = of(x)
            assert found.requires_grad and found.grad_fn is not None
            assert not of(x.detach()).requires_grad
            with torch.inference_mode():
                same(of(distribute_tensor(whole, mesh, [Shard(0)]) * 1), of(whole))
            x.grad = theirs.grad = None
            found.square().sum().backward()
            of(theirs).square().sum().backward()
            assert x.grad is not None and theirs.grad is not None
            same(x.grad, theirs.grad)


def test_inplace_operation_returns_the_same_object_with_a_new_version(mesh_of: Any) -> None:
    x, other = (distribute_tensor(torch.ones(4, 4), mesh_of("2"), [Shard(0)]) for _ in range(2))
    before = x._version
    for changes in range(1, 4):
        assert x.mul_(2) is x and x.add_(other) is x and x.sub_(1.5) is x
        assert x._version == before + 3 * changes
    same(x, torch.full((4, 4), ((1 * 2 - 0.5) * 2 - 0.5) * 2 - 0.5))
    leaf = other.requires_grad_()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        leaf.mul_(2)
    kept = leaf * 1
    saved = kept.square()
    kept.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


@pytest.mark.parametrize("rows", [4, 5])
def test_views_share_their_values_each_time(mesh_of: Any, rows: int, ways: list[Any]) -> None:
    mesh = mesh_of("2")
    views: list[Callable[[Any], Any]] = [
        lambda x: x.view(rows, 2, 3), lambda x: x.view(rows, 3, 2), lambda x: x[0], lambda x: x[1:], lambda x: x[:, 1],
        lambda x: x.unsqueeze(1), lambda x: x[1:, 0], lambda x: x[1:][0],
    ]  # fmt: skip
    for of in views:
        for _ in range(3):
            theirs = torch.arange(rows * 6.0).view(rows, 6)
            x = distribute_tensor(theirs.clone(), mesh, [Shard(0)]) * 1
            mine, expected = of(x), of(theirs)
            assert mine._is_view() and mine.shape == expected.shape
            for changed, whole in ((mine, expected), (x, theirs), (mine, expected)):
                before = x._version, mine._version
                changed.mul_(2), whole.mul_(2)
                changed.add_(1), whole.add_(1)
                assert min(x._version - before[0], mine._version - before[1]) >= 2
                same(x, theirs, 0)
                same(mine, expected, 0)
    assert torch.ops.aten.view.default in ways and torch.ops.aten.select.int in ways


@pytest.mark.parametrize("name", ["2", "3", pytest.param("2x2", marks=pytest.mark.slow)])
def test_sizes_dtypes_and_placements_between_the_same_views(mesh_of: Any, name: str) -> None:
    mesh = mesh_of(name)
    for _ in range(3):
        for whole in (torch.randn(4, 6), torch.randn(8, 6), torch.randn(4, 6).double(), torch.arange(24).view(4, 6)):
            for there in itertools.product([Shard(0), Replicate(), Shard(1)], repeat=mesh.ndim):
                x = distribute_tensor(whole, mesh, there)
                same(x.view(-1, 2, 3), whole.view(-1, 2, 3), 0)
                same(x[1], whole[1], 0)
                same(x[2:], whole[2:], 0)
                assert x[1].dtype == whole.dtype


def test_cat_with_equal_and_other_placements(mesh: Any, ways: list[Any]) -> None:
    places = [*itertools.product([Shard(0), Shard(1), Replicate()], repeat=mesh.ndim)]
    whole = [torch.randn(4, 6), torch.randn(5, 6)]
    for _ in range(2):
        for one, other in itertools.product(places[:5], places[-4:]):
            a, b = distribute_tensor(whole[0], mesh, one), distribute_tensor(whole[1], mesh, other)
            same(torch.cat([a, b]), torch.cat(whole), 0)
            same(torch.cat([a, a, b]), torch.cat([whole[0], *whole]), 0)
            same(torch.stack([a, a]), torch.stack([whole[0]] * 2), 0)
    if torch_version() >= (2, 12):  # the C++ of torch 2.11 asks Python for the sharding of a list in each call
        assert torch.ops.aten.cat.default in ways


def test_plain_value_in_place_of_a_dtensor(mesh_of: Any) -> None:
    """An operand may be a host tensor, and numbers that do not affect the sharding may change."""
    whole, mesh = torch.arange(16.0).view(4, 4), mesh_of("2")
    x = distribute_tensor(whole, mesh, [Shard(0)])
    for _ in range(3):
        same(torch.cat([x, x]), torch.cat([whole, whole]))
        same(torch.cat([x, whole]), torch.cat([whole, whole]))
        same(torch.cat([whole, x]), torch.cat([whole, whole]))
        same(x @ x, whole @ whole)
        same(x @ whole, whole @ whole)
        for scale in (2, 0.5):
            same(
                torch.addmm(x, x, x, beta=scale, alpha=scale), torch.addmm(whole, whole, whole, beta=scale, alpha=scale)
            )
            same(torch.softmax(x * scale, 0), torch.softmax(whole * scale, 0))


def test_another_mesh_is_an_error_the_second_time_too(mesh_of: Any) -> None:
    one, other = (distribute_tensor(torch.ones(6, 6), mesh_of(name), [Shard(0)]) for name in ("2", "3"))
    for _ in range(2):
        torch.cat([one, one]), torch.cat([other, other])
        with pytest.raises(MeshMismatchError):
            torch.cat([one, other])


def test_explicit_redistribution_context_sees_cached_plans(mesh_of: Any, ways: list[Any]) -> None:
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh_of("2"), [Shard(0)])
    for _ in range(3):
        x[0], torch.cat([x, x])
    assert ways
    with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="Implicit redistribution"):
        torch.cat([x, x])
    with ExplicitRedistributionContext():
        same(x.view(16), torch.arange(16.0))  # this redistributes nothing
    with CommDebugMode() as counted:
        torch.cat([x, x])
    assert counted.get_total_counts() == 2
    same(torch.cat([x, x]), torch.arange(16.0).view(4, 4).repeat(2, 1))


def test_torch_accepts_the_substitute_op_info(mesh_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    make = redispatch_cache.OpInfo.torchs
    monkeypatch.setattr(redispatch_cache.OpInfo, "torchs", lambda self: asked.append(True) or make(self))
    x = distribute_tensor(torch.ones(4, 6), mesh_of("2"), [Shard(0)])
    for _ in range(2):
        x.view(4, 3, 2)
    asked.clear()
    same(x.view(4, 3, 2), torch.ones(4, 3, 2))
    assert not asked


# Specs --------------------------------------------------------------------------------------------------------------

NUMBER = TensorMeta(torch.Size([]), (), torch.int64)


def torchs(*args: Any, **options: Any) -> DTensorSpec:
    """Return a spec that torch's own constructor makes."""
    made = DTensorSpec.__new__(DTensorSpec)
    DTensorSpec.__init__.__wrapped__(made, *args, **options)  # type: ignore[attr-defined]
    return made


def test_a_spec_of_a_number_has_what_torch_gives_it() -> None:
    for mesh in (simulated_mesh((2,), ("x",)), simulated_mesh((2, 2), ("x", "y"))):
        placements = (Replicate(),) * mesh.ndim
        for dtype in [*DTYPES, *DTYPES]:
            meta = NUMBER._replace(dtype=dtype)
            mine, own = DTensorSpec(mesh, placements, meta), torchs(mesh, placements, meta)
            assert hash(mine) == hash(own) and mine == own and own == mine
            assert mine.__dict__ == own.__dict__ and mine.mesh is mesh
        assert len(mesh.__dict__[scalar_spec_cache._KNOWN]) == len(set(DTYPES))
        assert mine == DTensorSpec(mesh, placements, meta) and mine is not DTensorSpec(mesh, placements, meta)
        assert DTensorSpec(mesh, placements, NUMBER) != DTensorSpec(mesh, placements, NUMBER._replace(dtype=torch.int8))


def test_specs_of_other_things_are_torchs_own() -> None:
    mesh, other = simulated_mesh((2,), ("x",)), simulated_mesh((3,), ("x",))
    first = DTensorSpec(mesh, (Replicate(),), NUMBER)
    rows = TensorMeta(torch.Size([4]), (1,), torch.int64)
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(0,)),)
    cases: list[Any] = [
        (mesh, (Partial(),), NUMBER), (mesh, (Shard(0),), rows), (mesh, (Replicate(),), rows),
        (mesh, (Replicate(),), None), (other, (Replicate(),), NUMBER), (mesh, (Shard(0),), rows, order),
        (mesh, (Shard(0),), rows, order, False), (mesh, (Replicate(), Replicate()), NUMBER),
    ]  # fmt: skip
    for case in cases:
        mine, own = DTensorSpec(*case), torchs(*case)
        assert mine == own and hash(mine) == hash(own) and mine.__dict__ == own.__dict__
        assert mine != first and first != mine
    assert DTensorSpec(mesh, [Replicate()], NUMBER) == first  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        DTensorSpec(mesh, (Shard(0),), rows, ())


def test_a_spec_that_is_changed_changes_no_other() -> None:
    mesh = simulated_mesh((2,), ("x",))
    one, other = (DTensorSpec(mesh, (Replicate(),), NUMBER) for _ in range(2))
    one.tensor_meta = NUMBER._replace(dtype=torch.float32)
    assert one != other and hash(one) != hash(other)
    assert other.tensor_meta == NUMBER and DTensorSpec(mesh, (Replicate(),), NUMBER) == other
    one.placements = (Partial(),)
    assert other.placements == (Replicate(),)
