"""Command records in the compiled core: what a worker executes, where it stops, and how it reports a failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch_backend import _native
from monarch_backend._native import Call, execute
from monarch_backend.dtensor._controller import call_sites
from monarch_backend.dtensor._torch_internals import fast_op_lookup

NONE, ONE, MANY = 0, 1, 2
_aten = torch.ops.aten


def call(
    function: Callable[..., Any], *arguments: Any, results: int = 1, kind: int = ONE, writes: bool = False, **named: Any
) -> Call:
    given = [*arguments, *named.values()]
    operands = 1 + max((last_of(each) for each in given), default=-1)
    return Call(function, given, tuple(named), operands, results, kind, writes)


def last_of(argument: Any) -> int:
    """Return the last operand of an argument."""
    is_, what = argument
    if is_ == "list":
        return max(map(last_of, what), default=-1)
    return -1 if is_ == "constant" else what  # type: ignore[no-any-return]


def run(words: list[Any], calls: dict[int, Call], tensors: dict[int, Any], pending: Any = None) -> int:
    return execute(words, 0, calls, tensors, {} if pending is None else pending, [0])


def test_operands_numbers_lists_and_names_are_passed_in_place() -> None:
    def see(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    inner = ("list", [("tensor", 1), ("constant", None), ("tensor", 0)])
    made = call(see, ("tensor", 0), ("constant", "c"), inner, ("number", 2), scale=("number", 3))
    tensors: dict[int, Any] = {10: "ten", 11: "eleven"}
    assert run([7, 0, 10, 11, 2.5, -4, 12], {7: made}, tensors) == 7
    assert tensors[12] == (("ten", "c", ["eleven", None, "ten"], 2.5), {"scale": -4})
    assert made.given(tensors, [7, 0, 10, 11, 2.5, -4, 12], 0) == tensors[12]


def test_calls_of_many_arguments() -> None:
    made = call(lambda *args: args, *[("tensor", i) for i in range(40)])
    tensors: dict[int, Any] = {i: str(i) for i in range(1, 41)}
    assert run([1, 0, *range(1, 41), 99], {1: made}, tensors) == 43
    assert tensors[99] == tuple(str(i) for i in range(1, 41))


def test_unwanted_results_are_dropped() -> None:
    made = call(lambda: ("a", "b", "c"), results=3, kind=MANY)
    tensors: dict[int, Any] = {}
    assert run([1, 0, 5, 0, 6], {1: made}, tensors) == 5
    assert tensors == {5: "a", 6: "c"}


def test_deletion_of_missing_tensors_is_ignored() -> None:
    tensors: dict[int, Any] = {1: "a", 2: "b", 3: "c"}
    assert run([0, 3, 1, 9, 3], {}, tensors) == 5
    assert tensors == {2: "b"}


def test_execute_stops_at_unknown_records() -> None:
    made = call(lambda each: each, ("tensor", 0))
    tensors: dict[int, Any] = {1: "a"}
    words = [7, 0, 1, 2, 8, 0, 2, 3]
    assert run(words, {7: made}, tensors) == 4, "nobody has said what 8 is"
    assert run(words, {7: made, 8: made}, tensors, {2: "under way"}) == 4, "2 must be waited for"
    assert run([0, 1, 2], {}, tensors, {2: "under way"}) == 0, "so must it before it is dropped"
    assert run(words, {7: made, 8: made}, tensors, {99: "under way"}) == 8
    writing = call(lambda each: each, ("tensor", 0), writes=True)
    assert run(words, {7: made, 8: writing}, tensors, {99: "under way"}) == 4, "99 may read what 8 changes"
    assert run(words, {7: made, 8: writing}, tensors) == 8


def test_failure_names_the_record_and_leaves_the_others() -> None:
    def fail(_: Any) -> Any:
        raise ValueError("refused")

    good, bad = call(lambda each: each + "!", ("tensor", 0)), call(fail, ("tensor", 0))
    tensors: dict[int, Any] = {1: "a"}
    cursor = [0]
    words = [7, 0, 1, 2, 8, 0, 2, 3, 7, 0, 2, 4]
    with pytest.raises(ValueError, match="refused"):
        execute(words, 0, {7: good, 8: bad}, tensors, {}, cursor)
    assert cursor == [4]
    assert execute(words, 8, {7: good, 8: bad}, tensors, {}, cursor) == 12
    assert tensors == {1: "a", 2: "a!", 4: "a!!"}
    with pytest.raises(KeyError, match="5"):
        execute([7, 0, 5, 6], 0, {7: good}, tensors, {}, cursor)
    assert cursor == [0]


@pytest.mark.parametrize("words", [[7], [7, 0, 1], [0], [0, 4, 1], [0, -1], ["no number"]])
def test_truncated_records_are_not_executed(words: list[Any]) -> None:
    tensors: dict[int, Any] = {1: "a"}
    assert run(words, {7: call(lambda each: each, ("tensor", 0))}, tensors) == 0 if words != ["no number"] else True
    assert tensors == {1: "a"}


def test_records_keep_no_references_to_operands() -> None:
    class Value:
        alive = 0

        def __init__(self) -> None:
            Value.alive += 1

        def __del__(self) -> None:
            Value.alive -= 1

    made = call(lambda one, many: Value(), ("tensor", 0), ("list", [("tensor", 1), ("tensor", 0)]))
    tensors: dict[int, Any] = {1: Value(), 2: Value()}
    for _ in range(100):
        assert run([1, 0, 1, 2, 3, 0, 1, 3], {1: made}, tensors) == 8
    assert Value.alive == 2
    tensors.clear()
    assert Value.alive == 0


class Workers:
    """A worker set that keeps the words written to it."""

    def __init__(self, limit: int = 100) -> None:
        self.words: list[Any] = []
        self.unreachable: list[int] = []
        self.called: list[str] = []
        wake, full = (lambda: self.called.append("wake")), (lambda: self.called.append("full"))
        self.sink = _native.Sink(self.words, self.unreachable, itertools.count(1), wake, full, limit)


def entry_of(workers: Any, number: int = 7) -> Any:
    made = _native.Entry()
    made.workers, made.number, made.outs, made.kind = workers, number, (), NONE
    return made


def test_record_has_signature_call_site_and_operands() -> None:
    workers = Workers(limit=4)
    plan = _native.Plan("add", None, 0b10, frozenset({"alpha"}))
    plan.entries[3, int, "alpha", int, "beta", float] = entry_of(workers)
    assert _native.issue(plan, (3, 4), {"alpha": -5, "beta": 0.5}, None) is None
    assert workers.words[:1] + workers.words[2:] == [7, 4, -5, 0.5]
    assert call_sites.text_of(workers.words[1]).count("test_command_records.py") >= 1
    assert workers.called == ["wake", "full"]
    assert workers.sink.records == 1


def test_inplace_entry_returns_its_argument() -> None:
    plan = _native.Plan("add_", None, 0, frozenset())
    first, second = entry_of(Workers()), entry_of(Workers())
    first.at, second.returns = 0, lambda args, kwargs: (args, kwargs)
    plan.entries["x",], plan.entries["y",] = first, second
    assert _native.issue(plan, ("x",), None, None) == "x"
    assert _native.issue(plan, ("y",), None, None) == (("y",), {})


@pytest.mark.parametrize("wrong", ["workers", "number", "outs", "kind", "no entry"])
def test_invalid_entry_is_an_error(wrong: str) -> None:
    plan = _native.Plan("add", None, 0, frozenset())
    made = entry_of(Workers())
    if wrong == "kind":
        made.kind = ONE
    elif wrong != "no entry":
        delattr(made, wrong) if wrong != "workers" else setattr(made, wrong, None)
    plan.entries["x",] = made if wrong != "no entry" else object()  # type: ignore[assignment]
    with pytest.raises((TypeError, AttributeError)):
        _native.issue(plan, ("x",), None, None)


A, B = torch.ones(2, 3), torch.ones(2, 3)


@pytest.mark.parametrize(
    ("operator", "args", "kwargs"),
    [
        (_aten.add.Tensor, (A, B), {}),
        (_aten.add.Tensor, (A, B), {"alpha": 2}),
        (_aten.mul_.Tensor, (A, B), {}),
        (_aten.view.default, (A, [6]), {}),
        (_aten.sum.dim_IntList, (A, [0], True), {}),
        (_aten.gelu.default, (A,), {"approximate": "tanh"}),
        (_aten.cat.default, ([A, B], 1), {}),
    ],
)
def test_fast_op_lookup_gives_the_results_of_the_operator(operator: Any, args: Any, kwargs: Any) -> None:
    found = fast_op_lookup.quickest(operator, args, kwargs)
    assert found is not operator._op, "torch has a function for it"
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    torch.testing.assert_close(found(*copies, **kwargs), operator(*copies, **kwargs))
    assert torch.equal(A, torch.ones(2, 3)), "asking does nothing"


@pytest.mark.parametrize(
    ("operator", "args"),
    [
        (_aten.add.Scalar, (A, 2)),  # torch.add of these arguments is add.Tensor
        (_aten._to_copy.default, (A,)),
        (torch.ops._c10d_functional.wait_tensor.default, (A,)),
    ],
)
def test_functions_that_differ_from_the_operator_are_not_used(operator: Any, args: Any) -> None:
    assert fast_op_lookup.quickest(operator, args, {}) is operator._op


def test_functions_that_are_no_torch_operators_stay() -> None:
    assert fast_op_lookup.quickest(len, ([],), {}) is len
