"""Meshes of XLA devices: workers with torch_xla's torch, a controller with a newer torch and without torch_xla.

`make test-xla` also runs other tests below tests/dtensor on such workers (xla_selection.py). The tests here need XLA.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from monarch_backend.actor import this_host
from monarch_backend.dtensor import RemoteOpError, RemoteTensor, RemoteTensorError, put_module, run, simulated_mesh
from monarch_backend.dtensor._controller import controller_process_group as groups
from monarch_backend.dtensor._ops import autocast_rules
from monarch_backend.dtensor._patches.semantics import autocast
from monarch_backend.dtensor._torch_internals import decompositions
from monarch_backend.dtensor._worker import op_functions
from monarch_backend.dtensor._worker.xla import op_overrides, xla_spmd
from tests.dtensor import worker_functions, xla_selection
from tests.dtensor.conftest import FOLDER, workers_of
from tests.dtensor.values import same, value
from tests.support import xla

with_workers = [pytest.mark.xla, pytest.mark.skipif(not xla.PYTHON, reason=xla.NOT_HERE)]
X = torch.arange(12.0).view(4, 3)


@pytest.fixture
def mesh(mesh_of: Any) -> Any:
    """A mesh of two XLA devices."""
    return mesh_of("2")


@pytest.fixture
def there(mesh: Any) -> Any:
    """X, sharded by rows."""
    return distribute_tensor(X, mesh, [Shard(0)])


# Without XLA devices --------------------------------------------------------------------------------------------


def test_processes_without_torch_xla_are_refused() -> None:
    with (
        this_host().spawn_procs({"x": 2}) as procs,
        pytest.raises(
            RemoteTensorError, match=r"2 of 2 processes have none. rank 0: torch_xla .*host .*, pid \d+.*any_torch=True"
        ),
    ):
        procs.device_mesh("xla")


def test_functions_of_torch_have_one_case_for_spmd() -> None:
    for each in xla_spmd.FUNCTIONS:
        stand_in = each.__globals__.get(f"_monarch_{each.__name__}")  # the patch, if a controller has installed it
        cells = [] if stand_in is None else [cell.cell_contents for cell in stand_in.__closure__]
        own = next((cell for cell in cells if inspect.isfunction(cell) and "xla" in cell.__code__.co_consts), each)
        assert own.__code__.co_consts.count("xla") == 1, each
        assert "xla" not in xla_spmd.without_spmd(own).__code__.co_consts
    assert "_setup_world_group_and_device" in inspect.getsource(xla_spmd.FUNCTIONS[0])


def test_decompositions_per_device_are_found() -> None:
    aten, x = torch.ops.aten, torch.rand(4, 3)
    for each, device in ((aten.mm.default, "CPU"), (aten.dropout.default, "XLA")):  # torch has dropout for all
        assert decompositions.is_there(each, device)
    given = x, x + 1, [3], x.mean(1, keepdim=True), x.std(1, keepdim=True), x[0], x[1], [True] * 3
    operator = aten.native_layer_norm_backward.default
    assert not decompositions.is_there(operator, "XLA")
    said: Any = decompositions.in_others(operator)
    torch.testing.assert_close(said(*given), operator(*given))


@pytest.mark.parametrize("kind", ["cuda", "xla"])
def test_shapes_that_torch_finds_on_the_device_only(kind: str) -> None:
    # The gathered shards are uneven. C++ makes them dense and switches to a device that this process lacks.
    if torch.cuda.is_available():
        pytest.skip("this process has a GPU")
    mesh = simulated_mesh((2, 2), ("a", "b"), kind)
    try:
        x = distribute_tensor(torch.ones(7, 5), mesh, [Shard(0), Shard(1)]).full_tensor()
        assert x.shape == (7, 5) and x.device == torch.device(kind, 0)
    finally:
        groups._owners.remove(workers_of(mesh))


@pytest.mark.parametrize("name", list(op_overrides.REPLACED))
def test_corrected_operators_match_torch(name: str) -> None:
    """The second argument is given by position and by name."""
    operator, corrected = op_functions.find(name), op_overrides.REPLACED[name]
    names = [each.name for each in operator._schema.arguments]
    known: dict[str, Any] = {
        "ord": 2, "k": 1, "dim": [0] if "int[" in str(operator._schema) else 0, "stable": True, "shifts": [1],
        "output_size": None if ".vec" in name else [6, 4], "input_size": [1, 1, 4, 3], "align_corners": False,
        "scales_h": 1.7, "scales_w": 1.4, "scale_factors": [1.7, 1.4], "lengths": torch.tensor([3, 2, 1]),
        "batch_first": False,
    }  # fmt: skip
    named = {each: known[each] for each in names if each in known}
    inputs = [X, X.long(), X[:0]] if name in ("aten.cumsum.default", "aten.roll.default") else [X]
    if "upsample" in name:
        inputs = [torch.randn(1, 1, *((6, 4) if "backward" in name else (4, 3)))]
    for x in inputs:
        assert_close = functools.partial(torch.testing.assert_close, rtol=0, atol=0)
        assert_close(corrected(x, **named), operator(x, **named))
        if len(names) > 1 and not operator._schema.arguments[1].kwarg_only:
            second = named.pop(names[1])
            assert_close(corrected(x, second, **named), operator(x, second, **named))
            named[names[1]] = second


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3, 1, 1], [2, 2, 2, 1], [1, 1, 1, 1]])
def test_sequences_are_packed_as_torch_does(lengths: list[int], batch_first: bool) -> None:
    x = torch.arange(40.0).view(4, 5, 2)
    given = x if batch_first else x.transpose(0, 1), torch.tensor(lengths), batch_first
    operator = torch.ops.aten._pack_padded_sequence.default
    torch.testing.assert_close(op_overrides.pack_padded_sequence(*given), operator(*given), rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[1, 3], [2, 0], [1]])
def test_lengths_that_torch_refuses(lengths: list[int]) -> None:
    given = torch.zeros(2, 5, 1), torch.tensor(lengths), True
    with pytest.raises(RuntimeError) as of_torch:
        torch.ops.aten._pack_padded_sequence.default(*given)
    with pytest.raises(RuntimeError, match=re.escape(str(of_torch.value))):
        op_overrides.pack_padded_sequence(*given)


def test_each_exception_names_a_test() -> None:
    for name in (*xla_selection.CANNOT, *xla_selection.ALWAYS):
        file, _, test = name.partition("::")
        (path,) = FOLDER.glob(f"*/{file}")
        module = importlib.import_module(f"tests.dtensor.{path.parent.name}.{path.stem}")
        for part in test.partition("[")[0].split("::"):
            module = getattr(module, part)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A simulated mesh of XLA devices, for the metadata of its tensors."""
    monkeypatch.setattr(groups, "_owners", [])  # otherwise only meshes of real processes would count
    return simulated_mesh((2,), ("x",), "xla")


def test_autocast_matches_torch_xla(simulated: Any) -> None:
    rules = autocast_rules.XLA
    names = {each._schema.name.removeprefix("aten::") for each in autocast.operators("xla")}
    assert names >= rules.lower | rules.widest
    layer, x = nn.Linear(3, 3), torch.ones(3, 3)
    put_module(layer, simulated)
    there = distribute_tensor(x, simulated, [Replicate()]).to_local().detach()
    with torch.autocast("xla"):
        lower = layer(there)
        assert lower.dtype == torch.bfloat16 and F.linear(x, x).dtype == torch.float32  # a tensor of this process's CPU
        assert {each.dtype for each in (F.relu(there), F.max_pool2d(there[None], 2))} == {torch.bfloat16}
        assert {each.dtype for each in (lower.softmax(-1), lower.pow(2), lower.prod())} == {torch.float32}
        assert torch.cat([lower, lower]).dtype == torch.bfloat16
        assert torch.cat([lower, there]).dtype == torch.float32
        assert (there.double() @ there.double()).dtype == torch.float64
        assert there.exp().dtype == torch.float32 and (lower * 2).dtype == torch.bfloat16  # no rule for these
        with torch.autocast("xla", enabled=False):
            assert layer(there).dtype == torch.float32
        with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="leave the step to eager code"):
            torch.compile(lambda x: x @ x, backend="monarch", fullgraph=True)(there)
    assert layer(there).dtype == torch.float32


def test_a_captured_step_leaves_ways_between_devices_to_eager_code(simulated: Any) -> None:
    x = distribute_tensor(torch.ones(4), simulated, [Replicate()]).to_local()
    for program, kind in ((lambda x: (x * 2).cpu(), "cpu"), (lambda x: (x * 2).to("xla"), "xla")):
        torch._dynamo.reset()
        assert torch.compile(program, backend="monarch")(x).device.type == kind
    torch._dynamo.reset()
    step = torch.compile(lambda x: x + torch.arange(4, device="xla"), backend="monarch", fullgraph=True)
    assert step(x).device.type == "xla"


# On XLA devices -------------------------------------------------------------------------------------------------


class TestXla:
    """Tests that need workers with XLA devices."""

    pytestmark = with_workers

    def test_tensors_are_on_xla_devices_of_another_torch(self, mesh: Any, there: Any) -> None:
        assert there.device == torch.device("xla", 0) and not there.is_cpu
        assert list(run(mesh, worker_functions.where_it_is, there).get().values()) == [
            ("xla:0", "2.9", X[:2].tolist()),
            ("xla:0", "2.9", X[2:].tolist()),
        ]

    def test_functions_get_dtensors_and_return_some(self, mesh: Any, there: Any) -> None:
        doubled, totals = run(mesh, worker_functions.doubled_and_summed, there).get()
        assert set(totals.values()) == {X.sum().item()}
        same(doubled, X * 2)

    def test_inplace_changes_of_a_function_are_visible(self, mesh: Any, there: Any) -> None:
        view = there.view(2, 2, 3)
        for _ in range(3):
            run(mesh, worker_functions.doubled_in_place, there).get()
        same(there, X * 8)
        same(view, (X * 8).view(2, 2, 3))

    @pytest.mark.parametrize("how", ["read", "collective", "function"])
    def test_graphs_that_differ_only_in_which_tensor_is_used_where(self, mesh: Any, how: str) -> None:
        """torch_xla runs the second graph with an equal hash by the executable of the first."""
        given = [torch.rand(3, 5), torch.rand(3, 5)]
        there = [distribute_tensor(each, mesh, [Replicate()]) for each in given]
        ends: dict[str, Any] = {
            "read": lambda x: x,
            "collective": lambda x: DTensor.from_local(x.to_local(), mesh, [Partial("max")]).redistribute(
                placements=[Replicate()]
            ),
            "function": lambda x: next(iter(run(mesh, lambda x: x.to_local(), x).get().values())),
        }
        for places in 2 * [(0, 1, 0), (0, 1, 1), (1, 0, 1), (0, 0, 1), (0, 0, 0)]:
            a, b, c = (there[at] for at in places)
            expected = [given[at] for at in places]
            same(ends[how]((a - b) * c.exp()), (expected[0] - expected[1]) * expected[2].exp())

    def test_ways_to_the_cpu_and_back(self, there: Any) -> None:
        here = there.cpu()
        assert here.device.type == "cpu" and there.to("xla") is there
        back = here.to("xla")
        assert back.device == there.device
        same(back * 2, X * 2)
        with pytest.raises(RemoteTensorError, match="make the mesh of such devices"):
            there.to("cuda")

    def test_tensors_and_modules_by_the_name_of_the_device(self, mesh: Any) -> None:
        with mesh:
            made = [torch.zeros(3, device="xla"), torch.arange(3, device="xla:0"), torch.tensor([1.0], device="xla")]
            layer = nn.Linear(3, 2)
            expected = layer(X)
            layer.to("xla")
        for each, reference in zip(made, [torch.zeros(3), torch.arange(3), torch.tensor([1.0])], strict=True):
            assert isinstance(each, RemoteTensor) and each.device.type == "xla"
            same(each, reference)
        same(layer(distribute_tensor(X, mesh, [Replicate()]).to_local()), expected)

    def test_attention(self, mesh: Any) -> None:
        values = [torch.randn(2, 4, 6, 8) for _ in range(3)]
        found = []
        for q, k, v in (values, [distribute_tensor(each, mesh, [Shard(1)]) for each in values]):
            leaves = [each.detach().requires_grad_() for each in (q, k, v)]
            out = F.scaled_dot_product_attention(*leaves, is_causal=True)
            out.sum().backward()
            found.append([out, *(each.grad for each in leaves)])
        for reference, ours in zip(*found, strict=True):
            same(ours, reference, 1e-5)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_a_captured_step(self, there: Any, dynamic: bool) -> None:
        step = torch.compile(lambda x, f: (x * f).sin().sum(), backend="monarch", dynamic=dynamic)
        for factor in (2.0, 3.0):
            same(step(there, factor), (X * factor).sin().sum())

    def test_autocast_is_torch_xlas_own(self, mesh: Any, there: Any) -> None:
        known, *_ = run(mesh, worker_functions.autocasts_of_xla).get().values()
        assert {each for each in known if "imname" not in each} == set(autocast_rules.XLA_OPERATORS)

        def step(x: Any) -> list[Any]:
            lower = x @ x.t()
            return [lower, lower.softmax(-1), torch.cat([lower, lower]), F.relu(x), x.exp(), lower.pow(2)]

        dtypes, *_ = run(mesh, worker_functions.dtypes_in_autocast, step, there).get().values()
        with torch.autocast("xla"):
            assert [str(each.dtype) for each in step(there.full_tensor())] == dtypes

    def test_an_activation_checkpoint_draws_the_same_numbers_again(self, mesh: Any) -> None:
        found = []
        for x in (X.clone(), distribute_tensor(X, mesh, [Replicate()]).to_local().detach()):
            torch.manual_seed(3)
            x.requires_grad_()
            out = checkpoint(lambda x: F.dropout(x, 0.5).sin(), x, use_reentrant=False)
            out.sum().backward()
            found.append([out, x.grad])
        for reference, ours in zip(*found, strict=True):
            same(ours, reference)

    def test_rows_are_looked_up_by_computed_indices(self, there: Any) -> None:
        """Without the overrides torch_xla ends the process or reduces nothing: dtensor/_worker/xla/op_overrides.py."""
        for find in (
            lambda x: x.sort(0, descending=True)[1][:2, 0], lambda x: x.topk(2, 0)[1][:, 1], lambda x: x.argsort(0)[0],
            lambda x: x.max(0)[1], lambda x: x.min(0)[1], lambda x: x.cummax(0)[1][:, 0], lambda x: x.kthvalue(2, 0)[1],
        ):  # fmt: skip
            same(there.index_select(0, find(there)), X.index_select(0, find(X)), 0)
            same(F.embedding(find(there), there), F.embedding(find(X), X), 0)
            with torch.inference_mode():  # here torch does not decompose the operator
                same(there.index_select(0, find(there)), X.index_select(0, find(X)), 0)
        step = torch.compile(lambda x: x[x.argsort(0, descending=True)[:2, 0]] * 2, backend="monarch")
        same(step(there), X.flip(0)[:2] * 2, 0)

    def test_reductions_match_torch(self, there: Any) -> None:
        for reduce in (
            lambda x: x.amax(), lambda x: x.amin(), lambda x: x.sum([]), lambda x: x.mean([], keepdim=True),
            lambda x: x.var([]), lambda x: x.std([]), lambda x: torch.linalg.vector_norm(x, dim=[]),
            lambda x: x.to(torch.int32).cumsum(1), lambda x: (x > 3).cumsum(0), lambda x: x.count_nonzero(0),
            lambda x: x.long().mean(dtype=torch.float32), lambda x: x.long().mean(0, dtype=torch.float32),
            lambda x: x.sum().sum(0),
        ):  # fmt: skip
            expected = reduce(X)
            assert reduce(there).dtype == expected.dtype
            same(reduce(there), expected)

    def test_images_of_other_sizes(self, mesh: Any) -> None:
        x = torch.randn(1, 2, 9, 6)
        for mode, factor in (("bilinear", 0.5), ("bilinear", 2.0), ("nearest", 1.7)):
            found = []
            for image in (x.clone(), distribute_tensor(x, mesh, [Replicate()]).to_local()):
                image.requires_grad_()
                resized = F.interpolate(image, scale_factor=factor, mode=mode)
                resized.pow(2).sum().backward()
                found.append([resized, image.grad])
            for reference, ours in zip(*found, strict=True):
                same(ours, reference)

    def test_roll_with_an_empty_shard(self, mesh: Any) -> None:
        row = distribute_tensor(X[:1], mesh, [Shard(0)])
        same(row.to_local().roll(1, 1), X[:1].roll(1, 1), 0)

    def test_failures_are_reported(self, mesh: Any) -> None:
        with pytest.raises(RemoteOpError, match=r"on rank \d \(host .*, pid \d+\): ValueError: on purpose"):
            run(mesh, worker_functions.fails).get()
        assert distribute_tensor(X, mesh, [Shard(0)]).sum().item() == X.sum().item()

    def test_a_function_that_fails_on_a_mesh_of_other_devices_of_the_same_processes(
        self, all_procs: Any, mesh_of: Any
    ) -> None:
        mesh = mesh_of("2x2")
        same(distribute_tensor(X, mesh, [Shard(1), Shard(0)]).full_tensor(), X)
        cpus = all_procs["2x2"].device_mesh("cpu")  # a new mesh, which must leave the groups of the other
        for failing, other in ((cpus, mesh), (mesh, cpus)):
            for each in (failing, other):
                same(distribute_tensor(X, each, [Shard(1), Shard(0)]).full_tensor(), X)
            with pytest.raises(RemoteOpError, match="on purpose"):
                run(failing, worker_functions.fails).get()
            for each in (other, failing):
                same(distribute_tensor(X, each, [Shard(1), Shard(0)]).full_tensor(), X)

    def test_unread_results_run_after_a_number_of_records(self, mesh: Any) -> None:
        before, *_ = run(mesh, worker_functions.set_max_recorded_words, 200).get().values()
        try:
            x = distribute_tensor(X, mesh, [Replicate()]).to_local()
            first = list(run(mesh, worker_functions.execution_count).get().values())
            for _ in range(300):
                x = x * 1.0
            assert list(run(mesh, worker_functions.execution_count).get().values()) > first
        finally:
            run(mesh, worker_functions.set_max_recorded_words, before).get()
        assert value(x).equal(X)

    def test_code_of_the_page_runs(self, tmp_path: Path) -> None:
        page = (Path(__file__).parents[3] / "docs" / "guides" / "dtensor.md").read_text()
        [code] = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        promised = re.findall(r"^ *print\(.*?\)\s+# (.+)$", code, re.MULTILINE)
        assert len(promised) == 2
        with xla.daemon() as address:
            script = tmp_path / "script.py"
            script.write_text(code.replace("tcp://127.0.0.1:26600", address))
            done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert set(promised) <= set(done.stdout.splitlines()), done.stdout
