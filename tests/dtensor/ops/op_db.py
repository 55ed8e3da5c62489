"""torch's operator database through DTensor: the outcome of each operator, sample and placement.

As a script it calculates the reference in torch's LocalTensorMode: ``python -m tests.dtensor.ops.op_db OUT NAME...``.
The reference needs a separate process, because a controller replaces functions that the mode needs.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from tests.dtensor.torch_test_modules import common_dtensor, op_db

SAMPLES, PLACEMENTS, RANKS = 3, 4, 2

GOODNESS = {"ok": 2, "no strategy": 1, "error": 1, "wrong": 0}
"""Outcomes in order: higher is better. An error is better than a wrong value, because the user notices it."""

WITHOUT_VALUES = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
"""Operators with uninitialised results. Only the shapes of their results are compared."""

Outcome = tuple[str, str]
"""Outcome of one sample in one placement: a key of GOODNESS, and torch's error message."""


def operators() -> dict[str, Any]:
    """Return all operators that support float32 on a CPU, by name."""
    found = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    return {".".join(filter(None, (op.name, op.variant_test_name))): op for op in found}


def outcomes(names: Iterable[str], mesh: Any, fetch: Callable[[Any], Any], around: Any) -> dict[str, list[Outcome]]:
    """Return the outcomes of each operator, in the same order for each caller.

    An operator's list is empty if no sample has a tensor to distribute. ``fetch`` returns the values of a local tensor
    of this mesh. ``around`` returns the context in which DTensors are used.
    """
    known = operators()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: list(_outcomes(known[name], mesh, fetch, around)) for name in names}


def _outcomes(op: Any, mesh: Any, fetch: Any, around: Any) -> Iterator[Outcome]:
    torch.manual_seed(0)
    samples = [sample for sample, _ in zip(op.sample_inputs("cpu", torch.float32), range(SAMPLES), strict=False)]
    for sample in samples:
        args = [sample.input, *sample.args]
        try:
            expected = _alone(op, args, sample.kwargs)
        except Exception:  # the sample must fail
            continue
        with around():
            converter = common_dtensor.DTensorConverter(mesh, args, sample.kwargs)  # type: ignore[arg-type]
            for (distributed, named), _ in zip(converter, range(PLACEMENTS), strict=False):
                if not converter.hit:
                    break
                yield _outcome(op, distributed, named, expected, mesh, fetch)


def _alone(op: Any, args: Any, kwargs: Any) -> Any:
    copies = pytree.tree_map(lambda v: v.clone() if type(v) is torch.Tensor and not v.is_sparse else v, (args, kwargs))
    torch.manual_seed(0)
    return op(*copies[0], **copies[1])


def _outcome(op: Any, args: Any, kwargs: Any, expected: Any, mesh: Any, fetch: Any) -> Outcome:
    torch.manual_seed(0)
    try:
        found = pytree.tree_leaves(op(*args, **kwargs))
        values = [fetch(each.full_tensor() if isinstance(each, DTensor) else each) for each in found]
    except Exception as error:
        text = str(error)
        missing = "does not have a sharding strategy" in text or "sharding rule" in text
        return "no strategy" if missing else "error", f"{type(error).__name__}: {' '.join(text.split())[:300]}"
    try:
        for value, reference in zip(values, pytree.tree_leaves(expected), strict=True):
            if isinstance(reference, torch.Tensor):
                assert value.shape == reference.shape, f"shape {tuple(value.shape)}, not {tuple(reference.shape)}"
                if getattr(op, "name", "") not in WITHOUT_VALUES:
                    torch.testing.assert_close(value, reference, equal_nan=True, check_dtype=False, check_stride=False)
    except (AssertionError, ValueError, AttributeError) as error:
        return "wrong", " ".join(str(error).split())[:300]
    return "ok", ""


def worse(ours: list[Outcome], reference: list[Outcome]) -> list[tuple[Outcome, Outcome]]:
    """Return the outcomes that are worse than the reference, each with the reference's outcome."""
    pairs = zip(ours, reference, strict=True)
    return [(mine, other) for mine, other in pairs if GOODNESS[mine[0]] < GOODNESS[other[0]]]


def reference(names: Iterable[str]) -> dict[str, list[Outcome]]:
    """Return the outcomes in torch's LocalTensorMode. This process must not be a controller."""
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def fetch(value: Any) -> Any:
        return value.reconcile() if isinstance(value, LocalTensor) else value

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = dist.init_device_mesh("cpu", (RANKS,))
    try:
        return outcomes(names, mesh, fetch, lambda: LocalTensorMode(frozenset(range(RANKS))))
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Write the reference outcomes of the operators NAME... as JSON to the file OUT."""
    out, *names = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        found = reference(names)
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
