"""Each test is in one of the two parallel runs of pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import halves
from tests.fast_tier import LONG_MODULES


def test_each_module_is_in_one_half() -> None:
    first, second = (
        [file for path in map(Path, half) for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        for half in halves.halves()
    )
    apart = [file for name in halves.APART for file in (halves.HERE / name).rglob("test_*.py")]
    assert apart
    assert sorted(first + second + apart) == sorted(halves.HERE.rglob("test_*.py"))
    assert second


def test_paths_of_both_runs_can_be_given() -> None:
    assert halves.split_at_dashes(["-m", "not slow"]) == [["-m", "not slow"]]
    assert halves.split_at_dashes(["-q", "--", "a", "b", "--", "c"]) == [["-q"], ["a", "b"], ["c"]]


def test_fast_tier_has_a_module_of_each_folder() -> None:
    modules = {path.relative_to(halves.HERE).as_posix() for path in halves.HERE.rglob("test_*.py")}
    assert modules >= LONG_MODULES
    folders, left = (
        {name.split("/")[0] for name in names if "/" in name} for names in (modules, modules - LONG_MODULES)
    )
    assert folders - left == {"torch_suite"}  # this folder runs torch's own tests


def test_the_status_is_the_worse_one_and_a_half_without_tests_has_none() -> None:
    assert halves.status([0, 0]) == 0
    assert halves.status([1, 0]) == halves.status([0, 1]) == 1
    assert halves.status([0, -9]) == 9  # killed by a signal
    assert halves.status([5, 0]) == halves.status([0, 5]) == 0
    assert halves.status([5, 1]) == 1
    assert halves.status([5, 5]) == 5 == halves.NO_TESTS == pytest.ExitCode.NO_TESTS_COLLECTED
