"""docs/tutorials/actors.ipynb runs, and its stored outputs are those of the run."""

from __future__ import annotations

import re

import nbformat
import pytest

from tests.examples import notebook_runner
from tests.examples.notebook_runner import text

pytestmark = pytest.mark.slow

NAME = "actors.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    return notebook_runner.execute(NAME, tmp_path_factory.mktemp("notebook"))


def test_meshes_slices_and_calls(executed: nbformat.NotebookNode) -> None:
    assert "8 processes after" in text(executed)
    assert "ActorMesh('rows', Rows, replicas=2, pp=2, tp=2)" in text(executed)
    assert "choose    [2, 2, 2, 2, 2, 2, 2, 2] calls for each" in text(executed)
    assert "(torch.Size([1000]), torch.Size([125]))" in str(executed)


def test_output_of_workers_is_shown_with_their_ranks(executed: nbformat.NotebookNode) -> None:
    assert "[replicas 0-1 gpus 0-3] hello from a notebook\n" in text(executed)


def test_slow_reader_blocks_the_generator(executed: nbformat.NotebookNode) -> None:
    ahead = re.search(r"the actor was at most (\d+) values ahead", text(executed))
    assert ahead and 32 <= int(ahead[1]) <= 66


def test_death_is_reported_and_other_workers_continue(executed: nbformat.NotebookNode) -> None:
    assert "RuntimeError: linalg.inv" in text(executed)
    assert "rank 6, pid" in text(executed)
    assert "failed: (6,), going on: ActorMesh('rows', Rows, ranks=7)" in text(executed)
    report = text(executed, "stderr")
    assert "root cause: mesh 'workers' lost 1 of its ranks" in report
    assert "killed by signal 9 (SIGKILL)" in report
    assert "the program ends" not in report


def test_a_restarted_rank_answers_again(executed: nbformat.NotebookNode) -> None:
    """Each rank counts 20 calls, one call before and one after.

    Rank 2 loses the count of the calls before its death.
    """
    ticks = re.search(r"ticks that each has counted: \[22, 22, (\d+), 22\]", text(executed))
    assert ticks and 1 <= int(ticks[1]) < 22
    lost = re.findall(r"clocks.tick was called on a rank that is dead", text(executed))
    assert len(lost) == 1


def test_stored_outputs_match_a_new_run(executed: nbformat.NotebookNode) -> None:
    notebook_runner.is_stored(NAME, executed, 4)
