"""The programs and commands of docs/guides/kubernetes.md on the test cluster."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from monarch_backend.cli import main
from tests.k8s.cluster import ROOT
from tests.k8s.conftest import Place

pytestmark = [pytest.mark.slow, pytest.mark.k8s]

PAGE = (ROOT / "docs/guides/kubernetes.md").read_text()
ELSEWHERE = ("pip ", "docker ", "kubectl ")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def prepare(kubeconfig: str, folder: Path) -> None:
    os.environ.update(KUBECONFIG=kubeconfig, XDG_STATE_HOME=str(folder))


def run_program(kubeconfig: str, folder: Path, source: str) -> str:
    prepare(kubeconfig, folder)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(source, "kubernetes.md", "exec"), {"__name__": "__main__"})
    return out.getvalue()


def run_command(kubeconfig: str, folder: Path, line: str) -> tuple[int, str]:
    prepare(kubeconfig, folder)
    words, out = shlex.split(line), io.StringIO()
    with contextlib.redirect_stdout(out):
        if words[0] == "monarch-backend":
            return main(words[1:]), out.getvalue()
        assert words[0] == "python"
        sys.argv = [*words[1:], "--steps", "3"]
        sys.path.insert(0, str(ROOT / "examples"))
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")
    return 0, out.getvalue()


def test_programs_of_the_guide_run_one_after_the_other(place: Place) -> None:
    start, find = blocks("py")
    greeted = place.run(run_program, start)
    assert re.search(r"hello-\w{8}-trainers-2", greeted), greeted
    states = place.run(run_program, find)
    assert states == "".join(f"trainers[{index}]: up\n" for index in range(3))


def test_commands_of_the_guide_run(place: Place) -> None:
    lines = "".join([*blocks("sh"), *blocks("shell")]).splitlines()
    doctor, train = sorted(line for line in lines if not line.startswith(ELSEWHERE))
    code, text = place.run(run_command, doctor)
    assert code == 0 and "create apps:statefulsets" in text
    code, text = place.run(run_command, train)
    assert code == 0 and re.search(r"^step 3: loss \d\.\d+$", text, re.MULTILINE), text
