"""Each operator of torch's database gives the result of torch's LocalTensorMode, or a better one.

The ordinary run takes some operators of each kind, the slow run all. Both sides run op_db.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dtensor.ops import op_db
from tests.dtensor.ops.op_db import Outcome
from tests.dtensor.values import value

EXCEPTIONS: dict[str, str] = {}
"""Operators that may have worse outcomes than in LocalTensorMode, at most two, with the reason."""
PARTS = 8
"""Number of parts of the database. One test of all operators would exceed the time limit of a test."""

SOME = [
    "add", "bernoulli", "cat", "gather", "index_put", "matmul", "max.reduction_with_dim", "nn.functional.conv2d",
    "nn.functional.cross_entropy", "nonzero", "split", "view",
]  # fmt: skip


class Reference:
    """Process that runs the same operators in torch's LocalTensorMode."""

    def __init__(self, names: Sequence[str], out: Path) -> None:
        root = Path(__file__).parents[3]
        search = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
        self._out, self._said = out, out.with_suffix(".txt")
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", "tests.dtensor.ops.op_db", str(out), *names],
                cwd=root, env={**os.environ, "PYTHONPATH": search}, stdout=said, stderr=said,
            )  # fmt: skip

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def outcomes(self) -> dict[str, list[Outcome]]:
        """Wait for the process, and return its outcomes."""
        assert self._process.wait() == 0, self._said.read_text()[-2000:]
        found: dict[str, list[Any]] = json.loads(self._out.read_text())
        return {name: [(kind, words) for kind, words in each] for name, each in found.items()}


def fetch(found: Any) -> Any:
    """Return the values of an operator's result."""
    return value(found) if isinstance(found, torch.Tensor) else found


def kind_of(outcomes: list[Outcome]) -> str:
    """Return the kind of an operator's outcomes."""
    kinds = {kind for kind, _ in outcomes} - {"ok"}
    return " and ".join(sorted(kinds)) if kinds else "ok" if outcomes else "nothing to convert"


def compare(names: Sequence[str], mesh: Any, folder: Path) -> None:
    """Print both tables, and fail if an operator outside EXCEPTIONS has a worse outcome."""
    with Reference(names, folder / "reference.json") as process:
        ours = op_db.outcomes(names, mesh, fetch, contextlib.nullcontext)
        theirs = process.outcomes()
    print(f"\n{len(names)} operators from the controller: {dict(Counter(map(kind_of, ours.values())))}")
    print(f"{len(names)} operators in LocalTensorMode: {dict(Counter(map(kind_of, theirs.values())))}")
    worse = {name: found for name in names if (found := op_db.worse(ours[name], theirs[name]))}
    better = [name for name in names if op_db.worse(theirs[name], ours[name])]
    print(f"better: {', '.join(better) or 'none'}")
    table = {
        name: f"{name}: {len(found)} of {len(ours[name])}; first: {found[0][0]}, there {found[0][1]}"
        for name, found in worse.items()
    }
    print(f"worse: {len(worse)}", *table.values(), sep="\n")
    assert worse.keys() <= EXCEPTIONS.keys(), table
    # Without this check the test would pass if it compared nothing or if almost all operators failed.
    assert sum(kind_of(each) == "ok" for each in ours.values()) > len(names) * 3 // 4


def test_sampled_operators_match_torch(mesh_of: Any, tmp_path: Path) -> None:
    known = op_db.operators()
    compare([name for name in SOME if name in known], mesh_of("2"), tmp_path)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators_match_torch(mesh_of: Any, tmp_path: Path, part: int) -> None:
    compare(list(op_db.operators())[part::PARTS], mesh_of("2"), tmp_path)


def test_exceptions_are_few_and_are_operators() -> None:
    assert len(EXCEPTIONS) <= 2
    assert EXCEPTIONS.keys() <= op_db.operators().keys()


def test_comparison_detects_wrong_results(mesh_of: Any) -> None:
    """A wrong result, a missing sharding strategy and an error are distinguished from a correct result."""

    class Wrong:
        def __init__(self, function: Any) -> None:
            self.function = function

        def __call__(self, x: Any) -> Any:
            return self.function(x)

    mesh, x = mesh_of("2"), torch.randn(4, 4)
    distributed = torch.distributed.tensor.distribute_tensor(x, mesh, [torch.distributed.tensor.Shard(0)])

    def outcome(function: Any) -> str:
        return op_db._outcome(Wrong(function), [distributed], {}, x.sin(), mesh, fetch)[0]

    assert outcome(torch.sin) == "ok"
    assert outcome(torch.cos) == "wrong"
    assert outcome(lambda v: v.sin()[:2]) == "wrong"
    assert outcome(torch.ops.aten.grid_sampler_2d) == "error"
    assert op_db.worse([("wrong", "")], [("ok", "")])
    assert op_db.worse([("wrong", "")], [("error", "")])
    assert not op_db.worse([("error", "")], [("no strategy", "")])
    assert not op_db.worse([("ok", "")], [("error", "")])
