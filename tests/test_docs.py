"""The code blocks of the pages in docs/ run."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._core import platform
from tests.support.finished_program import run_to_end

DOCS = Path(__file__).parent.parent / "docs"
RUN = [
    "concepts/meshes.md",
    "concepts/supervision.md",
    "guides/actors.md",
    "guides/dtensor.md",
    "guides/from-ray.md",
    "guides/rdma-buffers.md",
    "guides/rdma.md",
    "guides/restart.md",
    "guides/simulation.md",
    "guides/two-machines.md",
    "operate/export.md",
    "operate/dashboard.md",
    "operate/logs.md",
    "operate/stacks.md",
    "operate/telemetry.md",
    "start/actors.md",
    "start/controller.md",
    "tutorials/actors.md",
]
COMMANDS = ["tutorials/checkpoints.md", "tutorials/rl.md"]
TORCHRUN = {
    "guides/ddp-fsdp2.md": None,
    "start/backend.md": ["tensor([3., 3., 3., 3.])"] * 2,
    "tutorials/ddp.md": None,
}

FRAGMENTS = {"guides/new-collective.md", "operate/hangs.md"}
"""Pages whose code blocks are no one program: parts of the package's own files, or programs that hang, which
tests/telemetry/test_hang_causes.py runs. On other pages such a block has the language py.
"""

ELSEWHERE = {
    "guides/kubernetes.md": "k8s/test_kubernetes_guide.py",
    "guides/ray-clusters.md": "job/test_scheduler_pages.py",
    "guides/schedulers.md": "job/test_scheduler_pages.py",
    "guides/slurm.md": "job/test_slurm_page.py",
}
"""Pages on schedulers, and the tests that run their code. The code needs a cluster, or other processes."""


def blocks(page: Path, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_each_page_with_python_code_is_run() -> None:
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if blocks(page)}
    assert pages - FRAGMENTS == set(RUN)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_code_of_a_page_on_a_scheduler_is_run_by_its_test(name: str) -> None:
    assert blocks(DOCS / name, "py")
    assert Path(name).name in (Path(__file__).parent / ELSEWHERE[name]).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_code_of_a_page_prints_the_shown_output(name: str) -> None:
    """A new interpreter runs it, because one with more modules would hide a missing import."""
    script = "\n".join(blocks(DOCS / name))
    done = run_to_end([sys.executable, "-"], script=script, timeout=120)
    assert done.returncode == 0, done.stderr
    _has_printed_what_it_promises(script, done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_commands_of_a_page_print_the_shown_output(name: str, tmp_path: Path) -> None:
    """The sh blocks run in one folder, in order.

    The text block after each one is its output; times in it may differ.
    """
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = dict(os.environ, OMP_NUM_THREADS="1", PATH=path, MPLCONFIGDIR=str(tmp_path))
    steps = re.findall(r"^```sh\n(.*?)^```\n+```text\n(.*?)^```", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    assert len(steps) == len(blocks(DOCS / name, "sh"))
    for command, promised in steps:
        shell = ["bash", "-ec", command]
        done = run_to_end(shell, cwd=tmp_path, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        assert _without_seconds(done.stdout) == _without_seconds(promised)


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHRUN)
def test_scripts_of_a_page_run_under_torchrun(name: str, tmp_path: Path) -> None:
    """The page has the script as a heredoc. Its text block, or TORCHRUN above, has the output of the ranks."""
    page = (DOCS / name).read_text()
    ((file, script),) = re.findall(r"^cat > (\S+) <<'EOF'\n(.*?)\nEOF$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / file).write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", file]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    done = run_to_end(command, cwd=tmp_path, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    promised = TORCHRUN[name] or "".join(blocks(DOCS / name, "text")).splitlines()
    assert len(promised) == 2
    for line in promised:
        assert done.stdout.count(line) == promised.count(line), done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not platform.HAS_PRCTL, reason="shells do not see the pids of processes of a mesh")
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="pdb stops one line earlier than the page shows")
def test_commands_of_the_page_on_breakpoints_print_the_shown_output(tmp_path: Path) -> None:
    """The first sh block is a program that goes on meanwhile; the lines behind prompts are its client's input."""
    page = (DOCS / "operate/breakpoints.md").read_text()
    steps = re.findall(r"^```sh\n(.*?)^```\n+```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(steps) == len(re.findall(r"^```sh$", page, re.MULTILINE)) == 5
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = dict(os.environ, OMP_NUM_THREADS="1", PATH=path)
    shell: dict[str, Any] = {"cwd": tmp_path, "env": env, "text": True}
    (start, promised), *others = steps
    with subprocess.Popen(["bash", "-ec", start], stdout=subprocess.PIPE, stderr=subprocess.PIPE, **shell) as program:
        assert program.stdout is not None and program.stderr is not None
        try:
            lines = sorted(program.stderr.readline() for _ in promised.splitlines())
            assert _without_pids("".join(lines), tmp_path) == _without_pids(promised, tmp_path)
            for command, shown in others:
                typed = "\n".join([*re.findall(r"^\(Pdb\) (.*)$", shown, re.MULTILINE), ""])
                expected = re.sub(r"^\(Pdb\) .*\n", "(Pdb) ", shown, flags=re.MULTILINE)
                done = subprocess.run(
                    ["bash", "-ec", command], input=typed, stdout=subprocess.PIPE, timeout=60, check=True, **shell
                )
                assert _without_pids(done.stdout, tmp_path) == _without_pids(expected, tmp_path)
            printed = program.stdout.read()
        finally:
            program.kill()
    assert f"The program ends with `{printed.strip()}`" in page


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 13), reason="pdb shows other lines than the page")
def test_commands_of_the_page_on_replays_print_the_shown_output(tmp_path: Path) -> None:
    """The lines behind prompts are the input of pdb."""
    page = (DOCS / "operate/replay.md").read_text()
    steps = re.findall(r"^```sh\n(.*?)^```\n+```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(steps) == len(re.findall(r"^```sh$", page, re.MULTILINE)) == 4
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = dict(os.environ, OMP_NUM_THREADS="1", PATH=path)
    for command, shown in steps:
        typed = "\n".join([*re.findall(r"^\(Pdb\) (.*)$", shown, re.MULTILINE), ""])
        expected = re.sub(r"^\(Pdb\) .*\n", "(Pdb) ", shown, flags=re.MULTILINE)
        done = run_to_end(["bash", "-ec", command], script=typed, timeout=120, cwd=tmp_path, env=env)
        assert done.returncode == 0, done.stderr
        assert _of_replay(done.stdout, tmp_path) == _of_replay(expected, tmp_path)


def _of_replay(text: str, folder: Path) -> str:
    text = re.sub(r"\(host \S+, pid", "(host _, pid", _without_pids(text, folder))
    return re.sub(r"(trainer\.\d)\.\S+\.replay", r"\1.replay", text)


def _without_pids(text: str, folder: Path) -> str:
    text = re.sub(r"pid \d+", "pid _", text.replace(str(folder), "/home/me"))
    return re.sub(r" +", " ", re.sub(r" for \d.*$", " for _", text, flags=re.MULTILINE))


def _without_seconds(text: str) -> str:
    return re.sub(r"\b\d+\.\d s\b", "_ s", text)


def _has_printed_what_it_promises(script: str, printed: str) -> None:
    """Check that the output has the lines that comments beside the print calls show."""
    promised = re.findall(r"^ *print\(.*?\)\s+# (.+)$", script, re.MULTILINE)
    assert promised
    out = [line.strip() for line in printed.splitlines()]
    for line in promised:
        assert line.strip() in out, printed


def test_the_reference_of_the_command_line_has_each_command_and_option() -> None:
    namespace = runpy.run_path(str(DOCS / "cli.py"))
    page = (DOCS / "reference" / "cli.md").read_text()
    commands = namespace["commands"]()
    assert {"doctor", "up", "run"} <= set(commands)
    helps = re.findall(r"^<!-- help: ?(.*?) -->$", page, re.MULTILINE)
    assert [each for each in helps if " " not in each] == ["", *commands]
    assert re.findall(r"^## monarch-backend (.+)$", page, re.MULTILINE) == commands
    built = namespace["with_help"](page)
    assert "<!-- help" not in built
    for option in ("--version", "--json", "--address", "--workers", "--secret-from-stdin", "--detach", "--controller"):
        assert re.search(rf"^  (-\w, )?{option}\b", built, re.MULTILINE), f"{option} is not in:\n{built}"


def test_diagrams_are_current() -> None:
    namespace = runpy.run_path(str(DOCS / "diagrams" / "draw.py"))
    sources = sorted((DOCS / "diagrams").glob("*.txt"))
    assert len(sources) >= 4
    for source in sources:
        drawn = namespace["draw"](source.read_text())
        assert source.with_suffix(".svg").read_text() == drawn, f"run docs/diagrams/draw.py: {source.name} has changed"


def test_pictures_of_notebook_cells_are_current() -> None:
    namespace = runpy.run_path(str(DOCS / "tutorials" / "draw_cells.py"))
    for name, (notebook, text) in namespace["CELLS"].items():
        picture = (DOCS / "tutorials" / name).read_bytes()
        digest = namespace["digest"](namespace["cell"](notebook, text))
        assert digest.encode() in picture, f"run docs/tutorials/draw_cells.py: the cell of {name} has changed"
        assert len(picture) < 100_000
