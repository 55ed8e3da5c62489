"""docs/actors.ipynb: it runs, shows what it says, and what is stored in it is what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.examples.programs import run

pytestmark = pytest.mark.slow

NOTEBOOK = Path(__file__).parents[2] / "docs" / "actors.ipynb"
EXECUTE = """
import sys

import nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], 4)
# Unix sockets, in this folder: no port to collide with, and no notice that TCP is not encrypted.
client = NotebookClient(notebook, timeout=60, kernel_name="python3")
client.create_kernel_manager()
client.km.transport, client.km.ip = "ipc", "kernel"
client.execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    scratch = tmp_path_factory.mktemp("notebook")
    run("-", str(NOTEBOOK), scratch, stdin=EXECUTE)
    return nbformat.read(scratch / "executed.ipynb", 4)


def text(notebook: nbformat.NotebookNode, stream: str = "stdout") -> str:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == stream)


def pictures(notebook: nbformat.NotebookNode) -> list[int]:
    """How many each cell shows."""
    return [sum("image/png" in output.get("data", {}) for output in cell.get("outputs", [])) for cell in notebook.cells]


def test_meshes_slices_and_calls(executed: nbformat.NotebookNode) -> None:
    assert "8 processes after" in text(executed)
    assert "ActorMesh('rows', Rows, replicas=2, pp=2, tp=2)" in text(executed)
    assert "choose    [2, 2, 2, 2, 2, 2, 2, 2] calls for each" in text(executed)
    assert "(torch.Size([1000]), torch.Size([125]))" in str(executed)


def test_what_workers_print_is_shown_with_their_ranks(executed: nbformat.NotebookNode) -> None:
    assert "[replicas 0-1 gpus 0-3] hello from a notebook\n" in text(executed)


def test_a_slow_reader_holds_the_actor_up(executed: nbformat.NotebookNode) -> None:
    ahead = re.search(r"the actor was at most (\d+) values ahead", text(executed))
    assert ahead and 32 <= int(ahead[1]) <= 66


def test_a_death_is_told_and_the_rest_goes_on(executed: nbformat.NotebookNode) -> None:
    assert "RuntimeError: linalg.inv" in text(executed)
    assert "rank 6, pid" in text(executed)
    assert "failed: (6,), going on: ActorMesh('rows', Rows, ranks=7)" in text(executed)
    report = text(executed, "stderr")
    assert "root cause: mesh 'workers' lost 1 of its ranks" in report
    assert "killed by signal 9 (SIGKILL)" in report
    assert "the program ends" not in report


def test_a_restarted_rank_answers_again(executed: nbformat.NotebookNode) -> None:
    """20 calls each, one before and one after them; rank 2 has lost the count of those before its death."""
    ticks = re.search(r"ticks that each has counted: \[22, 22, (\d+), 22\]", text(executed))
    assert ticks and 1 <= int(ticks[1]) < 22
    lost = re.findall(r"clocks.tick was called on a rank that is dead", text(executed))
    assert len(lost) == 1


def test_what_is_stored_is_what_it_shows(executed: nbformat.NotebookNode) -> None:
    stored = nbformat.read(NOTEBOOK, 4)
    assert pictures(stored) == pictures(executed)
    assert sum(pictures(stored)) == 4
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run all cells, then save it"
    assert NOTEBOOK.stat().st_size < 300_000
