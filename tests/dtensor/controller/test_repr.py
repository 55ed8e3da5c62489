"""The text of a DTensor shows its values as torch prints them, and fetches only the values that it shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from monarch_backend.dtensor._controller import fetch
from tests.support.tiers import slow_except


def filled(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) / 7


def with_a_giant_beside_what_is_shown() -> torch.Tensor:
    whole = filled(2000)
    whole[3] = whole[1000] = 1e20
    return whole


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: filled(2, 3),
    "uneven": lambda: filled(5, 3),
    "large": lambda: filled(40, 50),
    "long": lambda: filled(1001),
    "narrow": lambda: filled(1000, 2),
    "flat": lambda: filled(1, 1500),
    "just not large": lambda: filled(10, 100),
    "of four dimensions": lambda: filled(3, 10, 20, 7),
    "giant in the middle": with_a_giant_beside_what_is_shown,
    "giant at the end": lambda: torch.cat([filled(1500), torch.tensor([1e20])]),
    "wide numbers": lambda: torch.tensor([1e-8, 1e8, torch.nan, torch.inf, -torch.inf, -0.0]),
    "scalar": lambda: torch.tensor(3.5),
    "int scalar": lambda: torch.tensor(3),
    "bfloat16": lambda: filled(5).bfloat16(),
    "large bfloat16": lambda: filled(50, 50).bfloat16(),
    "float16": lambda: filled(1200).half(),
    "float64": lambda: filled(7).double(),
    "int64": lambda: torch.arange(7),
    "large int64": lambda: torch.arange(3000).view(2, -1),
    "int8": lambda: torch.arange(-3, 4, dtype=torch.int8),
    "bool": lambda: torch.tensor([True, False, True]),
    "large bool": lambda: torch.arange(2000) % 3 == 0,
    "complex": lambda: torch.tensor([1 + 2j, -3j]),
    "large complex": lambda: torch.complex(filled(1100), -filled(1100)),
    "complex128": lambda: torch.tensor([1 + 2j, -3j], dtype=torch.complex128),
    "empty": lambda: torch.empty(0),
    "empty rows": lambda: torch.empty(0, 3),
    "empty columns": lambda: torch.empty(3, 0),
    "empty ints": lambda: torch.empty(0, dtype=torch.int64),
    "empty bfloat16": lambda: torch.empty(2, 0, 3, dtype=torch.bfloat16),
}
PROFILES: dict[str, dict[str, Any]] = {
    "default": {}, "short": {"profile": "short"}, "full": {"profile": "full"}, "precision": {"precision": 2},
    "edges": {"edgeitems": 1, "threshold": 10}, "no edges": {"edgeitems": 0, "threshold": 4},
    "narrow": {"linewidth": 40}, "scientific": {"sci_mode": True}, "not scientific": {"sci_mode": False},
}  # fmt: skip


def profiles() -> Iterator[str]:
    """Set each profile in turn, and yield its name while it is set."""
    for name, options in PROFILES.items():
        with torch._tensor_str.printoptions():
            torch.set_printoptions(**options)
            yield name


def shown(x: DTensor) -> str:
    """Return the part of the text that torch makes for a tensor. The mesh and the placements follow it."""
    text, end = repr(x), f", device_mesh={x.device_mesh}, placements={x.placements})"
    assert text.startswith("DTensor(") and text.endswith(end)
    assert str(x) == text == f"{x}"
    return text.removeprefix("DTensor(").removesuffix(end)


@pytest.mark.parametrize("name", slow_except(TENSORS, "flat", "uneven", "large", "small"))
def test_values_are_printed_as_torch_prints_them(mesh_of: Callable[[str], Any], name: str) -> None:
    whole = TENSORS[name]()
    for placement in [Replicate(), *map(Shard, range(min(whole.ndim, 2)))]:
        x = distribute_tensor(whole, mesh_of("3"), [placement])
        full = x.full_tensor()
        for profile in profiles():
            assert shown(x) == repr(full) == str(full) == repr(whole), profile


@pytest.mark.parametrize("size", [(), (3,), (12,), (40, 50)], ids=str)
def test_repr_of_a_tensor_with_gradient(mesh_of: Callable[[str], Any], size: tuple[int, ...]) -> None:
    """A long line is broken before the text that follows the numbers."""
    whole = filled(*size)
    x = distribute_tensor(whole, mesh_of("2"), [Replicate()]).requires_grad_()
    mine = whole.clone().requires_grad_()
    for profile in profiles():
        assert shown(x) == repr(mine), profile
        assert shown(x * 2) == repr(mine * 2), profile
        assert shown((x * 2).detach()) == repr((mine * 2).detach()), profile


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


def test_repr_names_a_custom_autograd_function(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(filled(3), mesh_of("2"), [Replicate()]).requires_grad_()
    assert shown(Doubled.apply(x)) == repr(Doubled.apply(filled(3).requires_grad_()))  # type: ignore[no-untyped-call]


def test_with_another_default_dtype(mesh_of: Callable[[str], Any]) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        for whole in (TENSORS[name]() for name in ("small", "bfloat16", "float64", "complex", "complex128", "empty")):
            assert shown(distribute_tensor(whole, mesh_of("2"), [Shard(0)])) == repr(whole)
    finally:
        torch.set_default_dtype(before)


def test_repr_of_partial_sums_shows_the_total(mesh_of: Callable[[str], Any]) -> None:
    mesh = mesh_of("2x2")
    whole = torch.arange(3000.0).view(60, 50)  # sums of these are exact in any order
    total = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).sum(0)
    assert any(isinstance(each, Partial) for each in total.placements)
    assert shown(total) == repr(whole.sum(0))


def test_repr_of_a_large_tensor_reads_only_the_shown_values(
    mesh_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    own = fetch.as_host
    monkeypatch.setattr(fetch, "as_host", lambda tensor: (read.append(tensor.numel()), own(tensor))[1])
    whole = filled(300, 400)
    assert shown(distribute_tensor(whole, mesh_of("3"), [Shard(0)])) == repr(whole)
    assert read and max(read) <= 7 * 7
