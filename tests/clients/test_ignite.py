"""PyTorch-Ignite: idist.auto_model trains with this package's groups under MONARCH_AS=gloo, and not by name."""

from __future__ import annotations

from pathlib import Path

from tests.clients.programs import compare, expect_refusal, needs, run

pytestmark = needs("ignite")


def test_losses_are_those_of_gloo(tmp_path: Path) -> None:
    compare("PyTorch-Ignite", tmp_path)


def test_the_name_is_refused(tmp_path: Path) -> None:
    """docs/limits.md says so. docs/upstream/ignite.md has a patch."""
    expect_refusal("PyTorch-Ignite", tmp_path, "Unknown backend 'monarch'")


OWN_GROUP = """
import sys
import ignite.distributed as idist
import torch
import torch.distributed as dist

dist.init_process_group("monarch")
wrapped = type(idist.auto_model(torch.nn.Linear(2, 2))).__name__
sys.stdout.write(f"rank {dist.get_rank()} {wrapped}\\n")  # print may write twice
dist.destroy_process_group()
"""


def test_auto_model_does_not_wrap_for_a_group_of_the_name(tmp_path: Path) -> None:
    """Each rank would train a model of its own, without a warning."""
    script = tmp_path / "own_group.py"
    script.write_text(OWN_GROUP)
    done = run(f"torchrun --standalone --nproc-per-node=2 {script}", tmp_path)
    assert done.losses() == ["rank 0 Linear", "rank 1 Linear"]
