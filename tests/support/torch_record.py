"""pytest plugin for runs on other releases of torch: samples parametrizations, and records the outcome of each test.

    python -m pytest -p tests.support.torch_record --sample --record build/2.15.jsonl tests/process_group

`tools/torch_tests.py` uses it (`make test-torch`). The record is a file with one JSON object in each line. The first
line of a run describes it. Each other line has a test and an outcome, and the last outcome of a test counts. Each
chosen test starts as "unfinished", so the record of an interrupted run shows the tests without an outcome.
"""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import zlib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sample", action="store_true", help="run one parametrization of each test function")
    parser.addoption("--record", metavar="FILE", help="append the outcomes of the tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record"):
        sample = bool(config.getoption("--sample"))
        config.pluginmanager.register(Record(Path(config.getoption("--record")), sample), "torch_record_file")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that are not in the sample, after -m and -k were applied."""
    if not config.getoption("--sample"):
        return
    chosen = set(sample(item.nodeid for item in items))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in chosen])
    items[:] = [item for item in items if item.nodeid in chosen]


def sample(names: Iterable[str]) -> list[str]:
    """Return one name of each test function: the one with the smallest CRC. Other tests do not affect the choice."""
    chosen: dict[str, str] = {}
    for name in sorted(names, key=lambda each: zlib.crc32(each.encode())):
        chosen.setdefault(name.partition("[")[0], name)
    return list(chosen.values())


def commit() -> str:
    """Return the commit of the checkout, with a + if tracked files other than docs differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!*.md")
    return (git("rev-parse", "--short=10", "HEAD").strip() or "unknown") + ("+" if changed.strip() else "")


class Record:
    """The record of one run."""

    def __init__(self, file: Path, sample: bool) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self.out = file.open("a", buffering=1)
        self.outcomes: dict[str, str] = {}
        self.write(
            commit=commit(),
            date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            torch=torch.__version__.partition("+")[0],
            python=platform.python_version(),
            sample=sample,
        )

    def write(self, **values: object) -> None:
        """Append a line."""
        self.out.write(json.dumps(values) + "\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a module that skips or cannot be imported as one test."""
        if report.outcome != "passed":
            self.write(test=report.nodeid, outcome=report.outcome)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record every chosen test as unfinished."""
        for item in session.items:
            self.write(test=item.nodeid, outcome="unfinished")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the worst outcome of a test's phases, after the last of them."""
        name = report.nodeid
        order = ["passed", "skipped", "failed"]
        self.outcomes[name] = max(self.outcomes.get(name, "passed"), report.outcome, key=order.index)
        if report.when == "teardown":
            self.write(test=name, outcome=self.outcomes.pop(name))
