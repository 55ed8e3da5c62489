"""The workflow and .ci/run use targets and variables of the Makefile, and run the tests of Slurm and Kubernetes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()
WORKFLOW = ".github/workflows/ci.yml"


@pytest.mark.parametrize("path", [WORKFLOW, ".ci/run"])
def test_targets_and_variables_exist(path: str) -> None:
    commands = re.findall(
        r"^(?![^\n]*(?:#|apt-get))[^\n]*\bmake ([\w-]+)((?: [A-Z_]+=\S+)*)", (ROOT / path).read_text(), re.MULTILINE
    )
    assert len(commands) > 5
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    variables = set(re.findall(r"^([A-Z_]+) \?=", MAKEFILE, re.MULTILINE))
    for target, given in commands:
        assert target in targets
        assert set(re.findall(r"([A-Z_]+)=", given)) <= variables


@pytest.mark.parametrize(
    ("target", "variable", "command"),
    [("test-slurm", "SLURM", "make test-slurm SLURM=slurm\n"), ("test-k8s", "K8S", "make test-k8s\n")],
)
def test_nightly_jobs_run_all_tests_of_a_scheduler(target: str, variable: str, command: str) -> None:
    """`make test-slow` and `make test-nightly` leave them out."""
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert recipe is not None and f'-m "$({variable})"' in recipe[1]
    default = re.search(rf"^{variable} \?= (.*)$", MAKEFILE, re.MULTILINE)
    assert default is not None
    jobs = re.split(r"\n(?=  \w+:\n)", (ROOT / WORKFLOW).read_text())
    (job,) = (each for each in jobs if command in each)
    assert "if: github.event_name == 'schedule'" in job
    assert f"{variable}=" in command or default[1] == variable.lower()


def test_each_skip_of_ci_has_a_reason() -> None:
    text = (ROOT / ".ci" / "run").read_text().replace('" \\\n  "', " ")
    skips = re.findall(r"SKIPPED: (NOT ONE [^,;]*)(.)", text)
    assert len(skips) >= 6
    assert [what for what, mark in skips if mark != ","] == []
