"""Flag protocol of csrc/shm/ under the model checker, with every interleaving: see csrc/shm/model/README.md.

Needs spin (a Debian package of that name) and gcc. Skips if one is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

CHECK = Path(__file__).resolve().parents[2] / "csrc" / "shm" / "model" / "check.py"


def load_check() -> Any:
    spec = importlib.util.spec_from_file_location("shm_model_check", CHECK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


check = load_check()
needs_spin = pytest.mark.skipif(bool(check.missing()), reason=f"not on this machine: {check.missing()}")
# One case of each sort, which takes seconds. Other cases need -m slow.
SAMPLE = {"mixed, a death, time-outs", "mutant: one slot", "mutant: no fence in ring()"}
# Cases that take minutes. Smaller cases cover nearly the same. `make test-model` runs them all.
LONG = {
    "3 ranks, large", "3 ranks, slots, a death, a time-out", "3 ranks, direct, a death", "3 ranks, mixed, a death",
}  # fmt: skip


@needs_spin
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, id=c.name, marks=() if c.name in SAMPLE else [pytest.mark.slow, pytest.mark.nightly])
        for c in check.CASES
        if c.name not in LONG
    ],
)
def test_model_checker_finds_the_expected_outcome(case: Any) -> None:
    outcome = check.run(case)
    assert outcome.found == case.expected, outcome.text
    assert outcome.states > 0
