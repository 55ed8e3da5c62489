"""Modules that a rank with backend="monarch" imports: those of the process group and of the layers below it."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.ranks import without_gloos_lines

PROGRAM = """
import json, sys
import torch
import torch.distributed as dist
dist.init_process_group("monarch", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(4)
dist.all_reduce(tensor)
if {nics}:
    from monarch_backend._verbs import Engine
dist.destroy_process_group()
print(json.dumps([name for name in sys.modules if name.startswith("monarch_backend.")]))
"""


def imported(nics: bool) -> set[str]:
    """Return the packages and modules directly below monarch_backend, and the modules of _verbs."""
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(nics=nics)], capture_output=True, text=True, timeout=120, check=True
    )
    names: list[str] = json.loads(without_gloos_lines(said.stdout))
    return {name for name in names if name.count(".") == 1 or name.startswith("monarch_backend._verbs.")}


CORE = {
    "monarch_backend._autoload",
    "monarch_backend._core",
    "monarch_backend._telemetry",
    "monarch_backend._native",
    "monarch_backend.process_group",
}


def test_rank_without_nics_imports_process_group_and_core() -> None:
    assert imported(nics=False) == CORE | {"monarch_backend._verbs", "monarch_backend._verbs.eligibility"}


def test_rank_with_nics_imports_verbs_and_no_more() -> None:
    found = imported(nics=True)
    assert {name for name in found if not name.startswith("monarch_backend._verbs")} == CORE
    assert "monarch_backend._verbs.engine" in found
