"""Output of ranks in files: each file has a turn, and is closed after the end of its rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from monarch_backend._core import platform
from monarch_backend._launch import kept_output
from monarch_backend._launch.kept_output import KeptOutput
from monarch_backend._telemetry import log_history
from tests.launch.launcher import open_files
from tests.support.waiting import wait_until

PATIENCE = 30.0


class Lines:
    """History that is a list of lines. The bytes of a long line are left out."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, int, bytes]] = []

    def append(self, label: str, pid: int, stream: int, text: bytes) -> None:
        self.found.append((label, pid, stream, text[:200]))

    def close(self) -> None:
        pass


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    history = Lines()
    monkeypatch.setattr(log_history, "make", lambda: history)
    return history


@pytest.fixture
def kept(lines: Lines) -> Iterator[KeptOutput]:
    made = KeptOutput()
    yield made
    _close(made)


def _close(kept: KeptOutput) -> None:
    closing = threading.Thread(target=kept.close, daemon=True)  # so that a failure is no hang
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive(), "close() has not ended"


def _written(folder: Path) -> Callable[[str, bytes], str]:
    def write(name: str, text: bytes) -> str:
        (folder / name).write_bytes(text)
        return str(folder / name)

    return write


def test_file_without_an_end_holds_up_no_other_and_no_close(kept: KeptOutput, lines: Lines, tmp_path: Path) -> None:
    kept.add("/dev/zero", "rank 0", 10, 1)
    kept.add(_written(tmp_path)("1", b"ready\n"), "rank 1", 11, 1)
    wait_until(lambda: ("rank 1", 11, 1, b"ready") in lines.found)
    _close(kept)


def test_long_rest_at_the_end_is_left_out_up_to_the_last_bytes(
    kept: KeptOutput, lines: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_output, "MAX_LAST_BYTES", 9)
    monkeypatch.setattr(kept_output, "PERIOD_S", PATIENCE)
    path = _written(tmp_path)("0", b"first\n" * 100 + b"last line")
    kept.add(path, "rank 0", 10, 1)
    _close(kept)
    note = f"... [600 bytes are only in {path}]".encode()
    assert [text for *_, text in lines.found] == [note[:200], b"last line"]


@pytest.mark.skipif(not platform.HAS_PROC, reason="needs /proc")
def test_files_of_an_exited_rank_are_read_and_closed(kept: KeptOutput, lines: Lines, tmp_path: Path) -> None:
    write = _written(tmp_path)
    kept.add(write("0", b"half a line"), "rank 0", 10, 1)
    kept.add(write("1", b""), "rank 1", 11, 1)
    kept.end(10)
    wait_until(lambda: open_files("self", tmp_path) == ["1"])
    assert lines.found == [("rank 0", 10, 1, b"half a line")]


@pytest.mark.skipif(not platform.HAS_PROC, reason="needs /proc")
def test_files_of_a_restarted_rank_replace_earlier_ones(kept: KeptOutput, lines: Lines, tmp_path: Path) -> None:
    write = _written(tmp_path)
    for attempt in range(3):
        for stream in (1, 2):
            text = f"attempt {attempt}".encode()
            kept.add(write(f"{attempt}.{stream}", text), "rank 0", 10 + attempt, stream)
    wait_until(lambda: open_files("self", tmp_path) == ["2.1", "2.2"])
    _close(kept)
    assert sorted(lines.found) == [
        ("rank 0", 10 + attempt, stream, f"attempt {attempt}".encode()) for attempt in range(3) for stream in (1, 2)
    ]
