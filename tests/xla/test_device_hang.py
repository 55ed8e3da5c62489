"""What the commands show of a rank that waits for an XLA device. tests/gpu/test_inspection.py is the same on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.device_hang import check_commands, waiting_program

pytestmark = pytest.mark.xla


def test_rank_that_waits_for_a_device_is_shown_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with waiting_program(tmp_path, "xla") as program:
        check_commands(program.pid, capsys)
