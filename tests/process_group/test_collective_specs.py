"""Table of collectives: each row has a method, argument forms, an overlap rule, routes and a reference result.

No other module of process_group lists collectives. These tests cover a new row without changes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from monarch_backend import CollectiveArgumentError, NoRouteError, _native, process_group
from monarch_backend.process_group import _c10d_internals, _collective_specs
from monarch_backend.process_group._collective_specs import (
    ARGUMENTS,
    BY_METHOD,
    COLLECTIVES,
    OPERATIONS,
    CollectiveSpec,
    Form,
    Overlap,
)
from monarch_backend.process_group._collectives import Collectives
from monarch_backend.process_group._hierarchical.hierarchical_backend import Hierarchy
from monarch_backend.process_group._shm.shm_backend import SharedMemory
from monarch_backend.process_group._xla import graph_hash_workaround
from monarch_backend.process_group._xla.host_staged import StagedGroup
from monarch_backend.process_group._xla.xla_backend import XlaGroup
from tests.process_group.test_hierarchical import ON, TWO_AND_ONE, three  # noqa: F401  # a fixture
from tests.support import collective_references
from tests.support.collective_references import REFERENCES, arguments, call, given_by
from tests.support.hosts import Hosts, refusal, run_on_hosts
from tests.support.ranks import run_ranks

each_collective = pytest.mark.parametrize("spec", COLLECTIVES, ids=lambda spec: spec.key)


def _methods(spec: CollectiveSpec) -> list[str]:
    """Return the spec's methods that this release of torch has."""
    return [method for method in spec.methods if hasattr(dist.ProcessGroup, method)]


# Columns -------------------------------------------------------------------------------------------------------------


def test_each_method_and_operator_is_in_one_row() -> None:
    assert len(BY_METHOD) == sum(len(spec.methods) for spec in COLLECTIVES)
    operators = [spec.operator for spec in COLLECTIVES if spec.operator]
    assert len(set(operators)) == len(operators)
    assert REFERENCES.keys() == {spec.key for spec in COLLECTIVES}


@each_collective
def test_collective_has_a_method_where_torch_has_one(spec: CollectiveSpec) -> None:
    if not _methods(spec):
        pytest.skip("this torch has no such method")
    own = [method for method in _methods(spec) if method in vars(Collectives)]
    assert own, "no method in _collectives.py"
    if spec.options is not None:
        assert all(hasattr(vars(Collectives)[method], "__wrapped__") for method in own), "no call_forms"


def test_each_method_with_call_forms_has_a_row() -> None:
    assert {name for name, member in vars(Collectives).items() if hasattr(member, "__wrapped__")} <= BY_METHOD.keys()


@each_collective
def test_collective_has_arguments_of_its_form(spec: CollectiveSpec) -> None:
    counts = {Form.IN_PLACE: 1, Form.IN_PLACE_LIST: 1, Form.EXCHANGE: 4, Form.NOTHING: 0}
    if spec.options is None:
        assert spec.form is Form.NOTHING or spec.form.is_point_to_point
        return
    assert len(ARGUMENTS[spec.form]) == counts.get(spec.form, 2)
    made = spec.options()
    if spec.operation is not None:
        assert hasattr(made, "reduceOp") == spec.reduces
        assert hasattr(made, "rootRank") == spec.has_root
    assert set(spec.keywords) <= {"root", "op", "timeout"}


@each_collective
def test_operator_is_torchs(spec: CollectiveSpec) -> None:
    if not spec.operator:
        assert spec.operation is None, "torch's dispatcher cannot reach the core without an operator"
        return
    schema = getattr(torch.ops.c10d, spec.operator).default._schema
    assert spec.form is Form.NOTHING or schema.arguments[0].type.str().removesuffix("[]").startswith("Tensor")


@each_collective
def test_collective_has_a_route_in_shared_memory(spec: CollectiveSpec) -> None:
    if spec.operation is None and not spec.form.is_point_to_point:
        assert not spec.operator
        return
    assert callable(getattr(SharedMemory, spec.key))
    assert spec.profiler_name


@pytest.mark.parametrize("index", range(len(OPERATIONS)), ids=lambda index: OPERATIONS[index].name)
def test_operation_has_an_algorithm_between_hosts(index: int) -> None:
    name = OPERATIONS[index].name
    assert callable(getattr(Hierarchy, f"_{name}"))
    assert getattr(_collective_specs, name.upper()) == index
    assert any(spec.operation == index for spec in COLLECTIVES)


def test_operations_are_those_of_the_core() -> None:
    assert _native.collectives() == OPERATIONS


@each_collective
def test_kernels_with_hooks_find_a_method(spec: CollectiveSpec) -> None:
    if spec.operator:
        assert spec.methods[-1] in vars(_c10d_internals.DispatcherShimBackend)


# XLA -----------------------------------------------------------------------------------------------------------------


class _Inner:
    """A group with every method, as a later release of torch_xla may have."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: name


class _Group(dist.ProcessGroup):
    pass


def _xla_group(whole_world: bool) -> XlaGroup:
    group = XlaGroup.__new__(XlaGroup)
    group._inner, group._whole_world = _Inner(), whole_world
    group._group = _Group(0, 1)
    group._group._label = "0"
    return group


@each_collective
def test_xla_route_has_collective_or_gives_a_remedy(spec: CollectiveSpec) -> None:
    if spec.xla_remedy:
        for method in spec.methods:
            with pytest.raises(NoRouteError, match="lacks it") as refused:
                getattr(_xla_group(whole_world=True), method)
            assert spec.xla_remedy in str(refused.value)
        return
    assert callable(getattr(_xla_group(whole_world=True), spec.key))
    if spec.xla_world_only and spec.key not in vars(XlaGroup):
        with pytest.raises(NoRouteError, match="Use the default group"):
            getattr(_xla_group(whole_world=False), spec.key)


@pytest.mark.parametrize("spec", [s for s in COLLECTIVES if s.reduces and not s.xla_remedy], ids=lambda spec: spec.key)
def test_xla_route_refuses_a_reduce_op_that_xla_lacks(spec: CollectiveSpec) -> None:
    opts = collective_references.options(spec)
    reduce = getattr(_xla_group(whole_world=True), spec.key)
    assert reduce(None, opts) == spec.key
    opts.reduceOp = dist.ReduceOp.AVG
    with pytest.raises(CollectiveArgumentError, match=f"{spec.name}.*torch_xla has no reduce op AVG"):
        reduce(None, opts)


class _Recorder:
    """Stands in for the group, and fills the tensors that a method writes."""

    def __getattr__(self, name: str) -> Any:
        def record(*args: Any) -> Any:
            for tensor in args[0] if BY_METHOD[name].form.writes else []:
                tensor.fill_(7.0)
            return _c10d_internals.finished_work([])

        return record


@each_collective
def test_staged_route_writes_back_written_tensors(spec: CollectiveSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = []

    def all_on_host(values: Any) -> Any:
        copies.append(values)
        return pytree.tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, values)

    monkeypatch.setattr(graph_hash_workaround, "all_on_host", all_on_host)
    monkeypatch.setattr(graph_hash_workaround, "is_on_xla", lambda each: isinstance(each, Tensor))
    group = StagedGroup.__new__(StagedGroup)
    group._group = _Recorder()  # type: ignore[assignment]
    tensor = torch.zeros(2)
    getattr(group, spec.key)([tensor], None).wait()
    assert tensor.tolist() == ([7.0, 7.0] if spec.form.writes else [0.0, 0.0])
    reads = spec.form.is_in_place or not spec.form.writes
    assert any(each is tensor for each in pytree.tree_leaves(copies)) == reads


# Values --------------------------------------------------------------------------------------------------------------


def _outputs(spec: CollectiveSpec, mine: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
    return mine if spec.form.is_in_place else [torch.full_like(tensor, -1) for tensor in expected]


def _run(spec: CollectiveSpec, method: str, rank: int, root: int) -> list[str]:
    """Call one method, directly and as its dispatched form. Return a description of each failure."""
    group, size = dist.group.WORLD, dist.get_world_size()
    given = [given_by(spec, each, size) for each in range(size)]
    expected = REFERENCES[spec.key](given, rank, root)
    mine = [tensor.clone() for tensor in given[rank]]
    outputs = _outputs(spec, mine, expected)
    if spec.form.is_point_to_point:
        _message(spec, method, rank, root, mine, outputs)
        if rank == root:
            return []
    else:
        call(group, method, spec, arguments(spec, mine, outputs, root, rank, size), root)
    pairs = zip(outputs[: len(expected)], expected, strict=True)
    return [f"{method}, root {root}: {got} for {want}" for got, want in pairs if not torch.equal(got, want)]


def _message(
    spec: CollectiveSpec, method: str, rank: int, root: int, mine: list[Tensor], outputs: list[Tensor]
) -> None:
    """The root sends to each other rank."""
    group, size = dist.group.WORLD, dist.get_world_size()
    sends = spec.form is Form.SEND
    if rank == root:
        for other in range(size):
            if other != root:
                getattr(group, method if sends else "send")(mine, other, 0).wait()
    elif sends:
        group.recv([torch.empty_like(mine[0])], root, 0).wait()
    else:
        call(group, method, spec, arguments(spec, mine, outputs, root, rank, size), root)


def _all_values(rank: int) -> list[str]:
    found = []
    for spec in COLLECTIVES:
        for method in [m for m in _methods(spec) if m in vars(Collectives)]:
            for root in range(dist.get_world_size()) if spec.has_root or spec.form.is_point_to_point else (0,):
                found += _run(spec, method, rank, root)
    return found


@pytest.mark.parametrize("shared", ["0", "1"])
def test_each_collective_gives_its_reference_result(shared: str) -> None:
    assert run_ranks(_all_values, 3, env={"MONARCH_SHM": shared}) == [[], [], []]


@pytest.mark.skipif(bool(refusal()), reason=refusal() or "-")
def test_each_collective_over_two_hosts_gives_its_reference_result(three: Hosts) -> None:  # noqa: F811
    assert run_on_hosts(three, TWO_AND_ONE, _all_values, env=ON) == [[], [], []]


def _observed_values(rank: int) -> list[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return _all_values(rank)


def test_each_collective_by_torchs_dispatcher_gives_its_reference_result() -> None:
    assert run_ranks(_observed_values, 2) == [[], []]


# Overlaps ------------------------------------------------------------------------------------------------------------


def _share(first: Tensor, second: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """Return both tensors in one memory: ``second`` starts ``offset`` elements after ``first`` and keeps its values."""
    memory = torch.zeros(first.numel() + second.numel() + offset)
    shared = memory[offset : offset + second.numel()]
    shared.copy_(second)
    return memory[: first.numel()], shared


def _overlapping(rank: int) -> list[str]:
    group, size, root, found = dist.group.WORLD, dist.get_world_size(), 0, []
    for spec in COLLECTIVES:
        method = next((m for m in _methods(spec) if m in vars(Collectives)), None)
        if method is None or spec.overlap is Overlap.NONE:
            continue
        given = [given_by(spec, each, size) for each in range(size)]
        mine = [tensor.clone() for tensor in given[rank]]
        if spec.form.is_in_place:  # the values of the last tensor remain where tensors overlap
            mine[0], mine[1] = _share(mine[0], mine[1], 1)
            given = [[*_in_one_memory(row)] for row in given]
            expected = REFERENCES[spec.key](given, rank, root)
            call(group, method, spec, arguments(spec, mine, [], root, rank, size), root)
            if not torch.equal(mine[-1], expected[-1]):
                found.append(f"{method}: {mine[-1]} for {expected[-1]}")
            continue
        expected = REFERENCES[spec.key](given, rank, root)
        outputs = [torch.full_like(tensor, -1) for tensor in expected]
        if outputs:
            # this rank's own piece, at the position of the output
            own = rank if spec.overlap is Overlap.READ_FIRST else 0
            offset = 0 if spec.overlap is Overlap.READ_FIRST else 1
            outputs[0], mine[own] = _share(outputs[0], mine[own], offset)
        args = arguments(spec, mine, outputs, root, rank, size)
        try:
            call(group, method, spec, args, root)
        except CollectiveArgumentError as error:
            if spec.overlap is not Overlap.REFUSED:
                found.append(f"{method}: {error}")
            continue
        if spec.overlap is Overlap.REFUSED:
            found.append(f"{method} was not refused")
        if not all(torch.equal(got, want) for got, want in zip(outputs, expected, strict=True)):
            found.append(f"{method}: {outputs} for {expected}")
    return found


def _in_one_memory(row: list[Tensor]) -> tuple[Tensor, Tensor]:
    return _share(row[0], row[1], 1)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_each_collective_treats_overlaps_by_its_rule(shared: str) -> None:
    assert run_ranks(_overlapping, 2, env={"MONARCH_SHM": shared}) == [[], []]


@each_collective
def test_rule_for_overlaps_fits_the_form(spec: CollectiveSpec) -> None:
    """Only a call with at most one tensor has no rule for overlaps."""
    alone = spec.form in (Form.IN_PLACE, Form.NOTHING) or spec.form.is_point_to_point
    assert (spec.overlap is Overlap.NONE) == alone


# Other lists ---------------------------------------------------------------------------------------------------------

FOLDER = Path(process_group.__file__).parent
NAMES = frozenset(
    {
        *BY_METHOD,
        *_collective_specs.BY_OPERATOR,
        *(spec.name for spec in COLLECTIVES),
        *(operation.name for operation in OPERATIONS),
        *(operation.name.upper() for operation in OPERATIONS),
    }
)


def _literals(source: str) -> Iterator[tuple[int, set[str]]]:
    """Yield the names in each literal of a module: strings and constants, or the keys of a dict."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Dict, ast.List, ast.Set, ast.Tuple)):
            entries = node.keys if isinstance(node, ast.Dict) else node.elts
            yield node.lineno, {name for entry in entries if (name := _name(entry))}


def _name(entry: ast.expr | None) -> str:
    if isinstance(entry, ast.Constant) and isinstance(entry.value, str):
        return entry.value
    constant = str(getattr(entry, "id", getattr(entry, "attr", "")))
    return constant if constant.isupper() else ""


def _lists_of_collectives(source: str) -> list[tuple[int, set[str]]]:
    """Return the literals with at least two names of collectives."""
    found = [(line, names & NAMES) for line, names in _literals(source)]
    return [(line, names) for line, names in found if len(names) > 1]


def test_no_other_module_lists_collectives() -> None:
    found = {
        str(path.relative_to(FOLDER)): lists
        for path in sorted(FOLDER.rglob("*.py"))
        if path.name != "_collective_specs.py" and (lists := _lists_of_collectives(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ['{"allreduce": 1, "gather_": 2}', 'x = ("send", "recv")', "{m.GATHER: 1, SCATTER: 2}", '["reduce", 1, "gather"]'],
)
def test_a_list_of_collectives_is_found(source: str) -> None:
    assert _lists_of_collectives(source)


@pytest.mark.parametrize("source", ['f(("input", "output"), "reduce")', "x = (dist.send, dist.recv)"])
def test_other_expressions_are_no_lists(source: str) -> None:
    assert not _lists_of_collectives(source)


# The guide ------------------------------------------------------------------------------------------------------------

GUIDE = FOLDER.parents[1] / "docs" / "guides" / "new-collective.md"


def test_code_of_the_guide_is_in_the_files_that_it_names() -> None:
    found = re.findall(r"^`([\w/]+\.py)`|^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    path, blocks = "", 0
    for named, block in found:
        path = named or path
        blocks += bool(block)
        block = block.removeprefix("(\n").removesuffix(")\n")  # in the module the row is part of a larger statement
        assert block in (GUIDE.parents[2] / path).read_text(), f"{path} does not have:\n{block}"
    assert blocks == 5


def test_files_of_the_guide_exist() -> None:
    for path in re.findall(r"`([\w/]+/[\w/]*\.\w+)`", GUIDE.read_text()):
        assert (GUIDE.parents[2] / path).exists(), path
