"""Each test is in one of the parallel runs of pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import parallel_runs
from tests.fast_tier import LONG_MODULES


def test_each_module_is_in_one_run() -> None:
    runs = [
        [file for path in map(Path, paths) for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
        for paths in parallel_runs.all_runs()
    ]
    apart = [file for name in parallel_runs.APART for file in (parallel_runs.HERE / name).rglob("test_*.py")]
    assert apart
    assert all(runs)
    assert sorted([file for files in [*runs, apart] for file in files]) == sorted(parallel_runs.HERE.rglob("test_*.py"))


def test_paths_of_all_runs_can_be_given() -> None:
    assert parallel_runs.split_at_dashes(["-m", "not slow"]) == [["-m", "not slow"]]
    assert parallel_runs.split_at_dashes(["-q", "--", "a", "b", "--", "c"]) == [["-q"], ["a", "b"], ["c"]]


def test_fast_tier_has_a_module_of_each_folder() -> None:
    modules = {path.relative_to(parallel_runs.HERE).as_posix() for path in parallel_runs.HERE.rglob("test_*.py")}
    assert modules >= LONG_MODULES
    folders, left = (
        {name.split("/")[0] for name in names if "/" in name} for names in (modules, modules - LONG_MODULES)
    )
    assert folders - left == {"torch_suite"}  # this folder runs torch's own tests


def test_the_status_is_the_worst_one_and_a_run_without_tests_has_none() -> None:
    assert parallel_runs.status([0, 0, 0]) == 0
    assert parallel_runs.status([1, 0, 0]) == parallel_runs.status([0, 0, 1]) == 1
    assert parallel_runs.status([0, -9]) == 9  # killed by a signal
    assert parallel_runs.status([5, 0]) == parallel_runs.status([0, 5]) == 0
    assert parallel_runs.status([5, 1]) == 1
    assert parallel_runs.status([5, 5]) == 5 == parallel_runs.NO_TESTS == pytest.ExitCode.NO_TESTS_COLLECTED
