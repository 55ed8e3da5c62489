"""The page of torch releases has the table of the committed results, and each run samples the same tests."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import torch_record
from tools import torch_table

ROOT = Path(__file__).resolve().parent.parent
SOME_TESTS = """
import os, pytest

@pytest.mark.parametrize("n", range(9))
def test_ok(n): pass

@pytest.fixture
def broken():
    yield
    assert "FINE" in os.environ

def test_teardown(broken): pass
def test_bad(): assert False
def test_left_out(): pytest.skip("why")
"""


def test_table_is_that_of_the_committed_results() -> None:
    assert torch_table.PAGE.read_text() == torch_table.page()


def test_areas_have_paths_that_exist() -> None:
    for area in torch_table.AREAS.values():
        assert all((ROOT / path).exists() for path in (*area.paths, *area.without))


def test_controller_areas_have_all_of_its_tests() -> None:
    listed = [path for area in torch_table.AREAS.values() for path in area.paths]
    tests = {path.relative_to(ROOT) for path in (ROOT / "tests" / "dtensor").rglob("test_*.py")}
    assert not [path for path in tests if not any(path.is_relative_to(each) for each in listed)]


def test_sample_has_one_of_each_function_in_any_order() -> None:
    names = ["a.py::one[1]", "a.py::one[2]", "a.py::one[3]", "a.py::two", "b.py::one[1]"]
    chosen = sorted(torch_record.sample(names))
    assert [name.partition("[")[0] for name in chosen] == ["a.py::one", "a.py::two", "b.py::one"]
    assert chosen == sorted(torch_record.sample(names[::-1]))


def test_record_has_each_outcome_and_the_last_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_table, "RESULTS", tmp_path)
    (tmp_path / "test_some.py").write_text(SOME_TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.torch_record", "--record", "out.jsonl"]
    for words, more in (["--sample"], {}), (["test_some.py::test_teardown", "test_some.py::test_bad"], {"FINE": "1"}):
        variables = {**os.environ, "PYTHONPATH": str(ROOT), **more}
        done = subprocess.run([*command, *words], cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
    torch_table.summarize("2.99.0", "backend", tmp_path / "out.jsonl")
    counts = json.loads((tmp_path / "2.99.0.json").read_text())["backend"]
    assert counts["sample"] is True
    assert (counts["passed"], counts["failed"], counts["skipped"]) == (2, 1, 1)
    assert counts["passed in a second run"] == 1
    assert counts["failed tests"] == ["test_some.py::test_bad"]


def test_unfinished_test_is_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_table, "RESULTS", tmp_path)
    record = tmp_path / "out.jsonl"
    run = {"commit": "c", "date": "d", "torch": "2.99.0", "python": "3.11", "sample": False}
    lines = [run, *({"test": test, "outcome": "unfinished"} for test in "ab"), {"test": "a", "outcome": "passed"}]
    record.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"test": "b", "outc')
    torch_table.summarize("2.99.0", "backend", record)
    counts = json.loads((tmp_path / "2.99.0.json").read_text())["backend"]
    assert (counts["passed"], counts["failed"], counts["unfinished"]) == (1, 0, 1)
    assert torch_table.cell("2.99.0", "backend", counts) == "1 / 0 / 0, 1 not reached, all"


def test_command_builds_an_environment_and_runs_an_area(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    torch_tests = importlib.import_module("torch_tests")
    built, ran = list[str](), list[str]()
    monkeypatch.setattr(torch_tests.Environment, "build", lambda self: built.append(self.folder.name))
    monkeypatch.setattr(torch_tests.Runs, "run", lambda _, name, area, sample: ran.append(name) or True)
    monkeypatch.setattr(sys, "argv", ["torch_tests.py", "2.15.0", "--area", "commands"])
    assert torch_tests.main() == 0
    assert (built, ran) == (["torch-2.15.0"], ["commands"])
