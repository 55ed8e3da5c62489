"""Fixtures of tests of telemetry."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.without_torch import programs_without_torch as programs_without_torch

GATES = "go", "wait", "hold", "never"


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[Path]:
    """Yield the folder of the files that endpoints of held_actors.py wait for.

    All files are there after the test, also after a failure: else the endpoints would keep their processes.
    """
    yield tmp_path
    for name in GATES:
        (tmp_path / name).touch()
