"""Custom operators (torch.library.custom_op), which workers learn of at their first use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, distribute_tensor

from monarch_backend.dtensor import RemoteOpError
from monarch_backend.dtensor._torch_internals import custom_ops


@torch.library.custom_op("monarch_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("monarch_tests::tripled", mutates_args=())
def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


doubled.register_fake(torch.empty_like)
tripled.register_fake(torch.empty_like)


@pytest.fixture(scope="module")
def of_this_process() -> Iterator[None]:
    """Operators that exist on the controller only, because importing this module does not register them."""

    def of_script(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    of_script.__module__ = "__main__"
    torch.library.custom_op("monarch_tests::of_script", of_script, mutates_args=()).register_fake(torch.empty_like)
    library = torch.library.Library("monarch_tests", "FRAGMENT")
    library.define("without_module(Tensor x) -> Tensor")
    library.impl("without_module", torch.clone, "CompositeExplicitAutograd")
    yield
    library._destroy()


def test_workers_import_the_module_of_an_operator(mesh_of: Callable[[str], Any]) -> None:
    x = distribute_tensor(torch.arange(3.0), mesh_of("2"), [Replicate()])
    assert doubled(x.to_local()).tolist() == [0.0, 2.0, 4.0]
    assert doubled(x).tolist() == [0.0, 2.0, 4.0]


def test_workers_import_the_module_of_a_captured_operator(mesh_of: Callable[[str], Any]) -> None:
    torch._dynamo.reset()
    # Other workers than those of the test above, which have imported this module.
    x = distribute_tensor(torch.arange(3.0), mesh_of("3"), [Replicate()]).to_local()
    captured = torch.compile(lambda x: tripled(x) + 1, backend="monarch", fullgraph=True, options={"inductor": False})
    assert captured(x).tolist() == [1.0, 4.0, 7.0]


@pytest.mark.usefixtures("of_this_process")
@pytest.mark.parametrize("name", ["of_script", "without_module"])
def test_an_operator_that_workers_cannot_import_says_what_to_do(mesh_of: Callable[[str], Any], name: str) -> None:
    x = distribute_tensor(torch.arange(3.0), mesh_of("2"), [Replicate()]).to_local()
    with pytest.raises(RemoteOpError, match=rf"has no operator monarch_tests\.{name}\.default.*procs\.run\("):
        getattr(torch.ops.monarch_tests, name)(x).tolist()


def test_torch_keeps_the_function_of_an_operator() -> None:
    assert custom_ops.module_of("monarch_tests.doubled") == __name__
    assert custom_ops.module_of("aten.sin") is None
