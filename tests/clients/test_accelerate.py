"""Accelerate: Accelerator(cpu=True) trains with this package's groups under MONARCH_AS=gloo, and refuses the name."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.clients.programs import compare, needs, run

pytestmark = needs("accelerate")


def test_losses_are_those_of_gloo(tmp_path: Path) -> None:
    compare("Accelerate", tmp_path)


def test_the_name_is_refused(tmp_path: Path) -> None:
    """docs/limits.md says so. docs/upstream/accelerate.md has a patch."""
    script = "from accelerate import Accelerator, InitProcessGroupKwargs as Init; "
    script += "Accelerator(cpu=True, kwargs_handlers=[Init(backend='monarch')])"
    done = run(shlex.join([sys.executable, "-c", script]), tmp_path, RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    assert done.status != 0
    assert "Your assigned backend monarch is not available, please use gloo" in done.err
