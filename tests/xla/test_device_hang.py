"""What the commands show of a rank that waits for an XLA device. tests/gpu/test_inspection.py is the same on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from monarch_backend import cli
from tests.support.device_hang import waiting_program
from tests.support.waiting import wait_until

pytestmark = pytest.mark.xla


def test_rank_that_waits_for_a_device_is_shown_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    with waiting_program(tmp_path, "xla") as program:

        def is_shown() -> bool:
            assert cli.main(["stack", str(program.pid)]) == 0
            return "in step\n        return x[0, 0].item()\n" in capsys.readouterr().out

        wait_until(is_shown)
        assert cli.main(["ps", str(program.pid)]) == 0
        assert "trainer rank 0: running step for" in capsys.readouterr().out
