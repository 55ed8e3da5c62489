"""Random programs: a single process, eager code on workers and a captured step have the same values.

A statement that raises is left out if the error names a remedy. MONARCH_TEST_SEED=7 replays one program.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from monarch_backend._core.torch_version import torch_version
from monarch_backend.dtensor import RemoteTensorError
from monarch_backend.dtensor._compile import compile_backend
from monarch_backend.dtensor._patches import manifest
from tests.dtensor.conftest import LAST_ROW, part_of
from tests.dtensor.ops.random_programs import NAMES, Program, Writer
from tests.dtensor.values import value

pytestmark = [
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:Found a non-scalar tensor with numel=1"),
    pytest.mark.filterwarnings("ignore:Tensor.mT is deprecated on 0-D tensors"),
    pytest.mark.filterwarnings("ignore:Using a target size"),
]

MESHES = ("2", "3", "2x2", "2x2 tp", LAST_ROW)
UNSUPPORTED_ERROR_TEXTS = (
    "redistribut",
    "does not have a sharding strategy",
    "not support",
    "cannot be evenly sharded",
)
"""Texts in torch's errors for features that DTensor lacks. Such errors of this package are RemoteTensorErrors."""


class OnMesh:
    """A program with its inputs on a mesh. Each statement is tried on the mesh before the program gets it."""

    def __init__(self, seed: int, mesh_of: Callable[[str], Any], names: Sequence[str]) -> None:
        self.seed, self._random = seed, random.Random(seed)
        self.mesh = part_of(mesh_of, self._random.choice(names))
        self.placements: dict[str, list[Any]] = {}
        self._there: dict[str, Any] = dict(NAMES)
        self._writer = Writer(seed, self.mesh.ndim, self._random.randint(2, 6), self._holds)
        self.program: Program = self._writer.program
        self._writer.write()

    def inputs(self, *, there: bool) -> dict[str, torch.Tensor]:
        """Return all arguments: inputs on the mesh (``there``) or the host, and tensors that are always on the host."""
        found = self.program.tensors("inputs")
        for name, tensor in found.items():
            if there:
                found[name] = distribute_tensor(tensor, self.mesh, self._placed(name))
            found[name].requires_grad_()
        return found | self.program.tensors("hosts")

    def _placed(self, name: str) -> list[Any]:
        if name not in self.placements:
            kinds = [*map(Shard, range(len(self.program.inputs[name]))), Replicate()]
            self.placements[name] = [self._random.choice(kinds) for _ in range(self.mesh.ndim)]
        return self.placements[name]

    def _holds(self, line: str) -> bool:
        if len(self._there) == len(NAMES):
            self._there.update(self.inputs(there=True), **self.program.tensors("constants"))
        before = dict(self._there)
        try:
            exec(line, self._there)
            value(self._there[line.split(" = ")[0]])
        except Exception as error:
            self._there = before
            if isinstance(error, RemoteTensorError) or any(each in str(error) for each in UNSUPPORTED_ERROR_TEXTS):
                return False
            raise AssertionError(f"{line}\nafter\n{self}\nraises an error that names no unsupported feature") from error
        return True

    def __str__(self) -> str:
        hosts = f"on the host {self.program.hosts}, from outside {self.program.constants}"
        return f"{self.mesh}, {self.placements}, {self.program.inputs}, {hosts}\n{self.program.text()}"

    def left_out(self) -> int:
        """Return the index of the result that is not in the loss. In half of the programs no result has this index."""
        return random.Random(self.seed).randrange(2 * len(self.program.results))

    def written(self) -> int | None:
        """Return the index of the result that is written into after the call.

        It is None for a program with `place`, which may return a copy or its argument.
        """
        if "place(" in self.program.text():
            return None
        return random.Random(self.seed).randrange(len(self.program.results))


def values(
    function: Callable[..., Any], inputs: dict[str, torch.Tensor], written: int | None = None, left_out: int = -1
) -> dict[str, torch.Tensor | None]:
    """Return results, input gradients, and all tensors again after one result was written into.

    ``written``: the index of that result; ``left_out``: the index of the result that is not in the loss.
    """
    torch.manual_seed(7)
    results = function(**inputs)
    losses = [each.square().mean() for at, each in enumerate(results) if each.requires_grad and at != left_out]
    if losses:
        sum(losses).backward()  # type: ignore[union-attr]
    grads = {f"{name}.grad": each.grad for name, each in inputs.items()}
    found = {f"result {at}": copied(each) for at, each in enumerate(results)}
    found |= {name: copied(each) for name, each in grads.items()}
    if written is not None:
        with torch.no_grad():
            results[written].mul_(3)
        found |= {f"result {at} afterwards": copied(each) for at, each in enumerate(results)}
        found |= {f"{name} afterwards": copied(each) for name, each in inputs.items()}
    return found


def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else value(tensor).clone()


def writable(function: Callable[..., Any], inputs: dict[str, torch.Tensor], at: int) -> tuple[bool, bool]:
    """Return whether the result can be written into, and whether inputs and other results have other memory."""
    torch.manual_seed(7)
    results = function(**inputs)
    result = results[at]
    memory = result.untyped_storage().data_ptr()
    others = [*inputs.values(), *(each for each in results if each is not result)]
    apart = all(each.untyped_storage().data_ptr() != memory for each in others)
    try:
        with torch.no_grad():
            result.mul_(3)
    except RuntimeError:  # torch refuses to write into a tensor with overlapping elements
        return False, apart
    return True, apart


def check(seed: int, mesh_of: Callable[[str], Any], names: Sequence[str], captured: bool) -> None:
    on = OnMesh(seed, mesh_of, names)
    if not on.program.statements:
        return
    program, written = on.program.function(), on.written()
    may_write, apart = (False, False) if written is None else writable(program, on.inputs(there=False), written)
    ways: list[Callable[..., Any]] = [program]
    # Dynamo uses the sizes from before an in-place view, also for plain tensors.
    if captured and not any(each in on.program.text() for each in (".unsqueeze_(", ".t_(")):
        torch._dynamo.reset()
        ways.append(torch.compile(program, backend="monarch", options={"inductor": False}))
    for way in ways:
        # A captured step may return a copy in place of a view of an argument or of another result.
        at = written if may_write and (apart or way is program) else None
        reference = values(program, on.inputs(there=False), at, on.left_out())
        what = f"MONARCH_TEST_SEED={seed} {'eager' if way is program else 'captured'}, {on}"
        try:
            ours = values(way, on.inputs(there=True), at, on.left_out())
        except Exception as error:
            if way is program and any(each in str(error) for each in UNSUPPORTED_ERROR_TEXTS):
                return  # a gradient raised, which is not tried statement by statement
            raise AssertionError(what) from error
        for name, expected in reference.items():
            found = ours[name]
            if expected is None and found is not None and way is not program:
                expected = torch.zeros_like(found)  # a captured step gives tensors outside the loss gradients of zeros
            assert (found is None) == (expected is None), f"{name} of {what}"
            if found is not None:
                torch.testing.assert_close(
                    found,
                    expected,
                    atol=1e-3,
                    rtol=1e-3,
                    msg=lambda text, name=name, what=what: f"{name}: {text}\n{what}",
                )


def seeds(few: int) -> Any:
    """Return the seed of MONARCH_TEST_SEED, or the first ``few`` seeds."""
    asked = os.environ.get("MONARCH_TEST_SEED")
    return range(few) if asked is None else [int(asked)]


@pytest.fixture
def names(all_procs: Any) -> list[str]:
    return [name for name in MESHES if ("2x2" if name == LAST_ROW else name.split()[0]) in all_procs]


@pytest.mark.parametrize("seed", seeds(8))
def test_programs(mesh_of: Callable[[str], Any], names: list[str], seed: int) -> None:
    check(seed, mesh_of, names, captured=seed < 2 and torch_version() >= manifest.CAPTURED.since)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: [x[1:]],
    "a row": lambda x: [x[1]],
    "in parts": lambda x: [x.unflatten(1, (-1, 3))],
    "again and again": lambda x: [x[:, None].expand(-1, 2, -1), x.t()],
    "of what is returned, too": lambda x: (lambda y: [y, y[1:], *y.chunk(2)])(x * 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_views_of_unequal_shards(mesh_of: Callable[[str], Any], name: str) -> None:
    """The view starts at another offset in each rank's memory."""
    whole = torch.randn(5, 3)

    def program(x: Any) -> Any:
        return VIEWS[name](x)

    torch._dynamo.reset()
    captured = torch.compile(program, backend="monarch", options={"inductor": False})
    for by, learns in itertools.product((0, 1), (False, True)):
        ours = distribute_tensor(whole, mesh_of("2"), [Shard(by)]).requires_grad_(learns)
        calls = compile_backend.statistics["calls"]
        found = values(captured, {"x": ours})
        assert compile_backend.statistics["calls"] > calls
        for what, expected in values(program, {"x": whole.clone().requires_grad_(learns)}).items():
            torch.testing.assert_close(found[what], expected, msg=lambda text, what=what: f"{what}: {text}")


def test_parts_of_a_host_tensor_that_are_kept_for_backward(mesh_of: Callable[[str], Any]) -> None:
    """The parts are results of the forward graph, so they are sent. Only then are the graph's values numbered."""
    host = torch.randn(4, 2, 1)

    def program(x: Any, h: Any) -> Any:
        return [torch.addcmul(x, h, x, value=0.5), torch.nn.functional.mse_loss(x, h)]

    torch._dynamo.reset()
    captured = torch.compile(program, backend="monarch", options={"inductor": False})
    whole = torch.randn(4, 2, 1)
    found = values(captured, {"x": distribute_tensor(whole, mesh_of("2"), [Shard(1)]).requires_grad_(), "h": host})
    for what, expected in values(program, {"x": whole.clone().requires_grad_(), "h": host}).items():
        torch.testing.assert_close(found[what], expected, msg=lambda text, what=what: f"{what}: {text}")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", seeds(16))
def test_programs_eager_and_captured(mesh_of: Callable[[str], Any], names: list[str], seed: int) -> None:
    check(seed, mesh_of, names, captured=True)
