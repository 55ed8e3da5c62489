"""docs/tutorials/one_controller.ipynb runs, and its stored outputs are those of the run."""

from __future__ import annotations

import re

import nbformat
import pytest

from tests.examples import notebook_runner
from tests.examples.notebook_runner import text

pytestmark = pytest.mark.slow

NAME = "one_controller.ipynb"


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> nbformat.NotebookNode:
    return notebook_runner.execute(NAME, tmp_path_factory.mktemp("notebook"))


def test_tensor_and_its_shards_are_shown(executed: nbformat.NotebookNode) -> None:
    assert "[12., 13., 14., 15., 16., 17.]" in text(executed)
    assert "placements=(Shard(dim=0), Shard(dim=1))" in text(executed)
    found = re.findall(r"dp (\d), tp (\d): (\[\[.*\]\]) in process (\d+)", text(executed))
    assert [part[2] for part in found] == [
        "[[0.0, 1.0, 2.0], [6.0, 7.0, 8.0]]",
        "[[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]",
        "[[12.0, 13.0, 14.0], [18.0, 19.0, 20.0]]",
        "[[15.0, 16.0, 17.0], [21.0, 22.0, 23.0]]",
    ]
    here = re.search(r"this is process (\d+)", text(executed))
    assert here and len({*(part[3] for part in found), here[1]}) == 5


def test_each_process_has_its_share_of_the_memory(executed: nbformat.NotebookNode) -> None:
    shares = re.search(r"each of the four has (\d+)%, (\d+)%, (\d+)%, (\d+)%", text(executed))
    assert shares and all(25 <= int(share) <= 35 for share in shares.groups())


def test_a_killed_process_changes_no_loss(executed: nbformat.NotebookNode) -> None:
    assert re.search(r"step 15: .*trainers: dp 1 tp 1 .* killed by signal 9", text(executed))
    again = re.search(r"went on from step 10; the 4 steps that were done twice differ by at most (\S+)", text(executed))
    assert again and float(again[1]) < 1e-5
    losses = re.search(r"loss (\S+) at first, (\S+) in the end", text(executed))
    assert losses and float(losses[2]) < 3 < 5 < float(losses[1])


def test_stored_outputs_match_a_new_run(executed: nbformat.NotebookNode) -> None:
    notebook_runner.is_stored(NAME, executed, 3)
