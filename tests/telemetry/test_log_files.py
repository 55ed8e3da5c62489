"""Output of programs that have ended: its files, their limits, and `monarch-backend logs` of them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import log_history, program_output
from monarch_backend._telemetry.log_history import LogHistory
from tests.support.running_script import running_script
from tests.support.waiting import wait_until
from tests.telemetry.programs import busy_program

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="the log history needs memfd_create")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "logs"
    monkeypatch.setenv("MONARCH_LOG_DIR", str(made))
    return made


def _history_of_a_program(text: str) -> LogHistory:
    history = log_history.make()
    assert history is not None
    history.append("gpus 0", 1, 1, text.encode())
    return history


def test_output_of_a_killed_program_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with busy_program(str(tmp_path)) as process:
        pid = process.pid
        wait_until(lambda: cli.main(["logs", str(pid)]) == 0 and "sleeps" in capsys.readouterr().out)
        assert program_output.ended_programs() == []
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: bool(program_output.ended_programs()))
    [program] = program_output.ended_programs()
    assert program.pid == pid and abs(program.began - time.time()) < 300
    capsys.readouterr()
    for name in (str(pid), program.command.split()[0], str(program.file)):
        assert cli.main(["logs", name]) == 0
        shown = capsys.readouterr()
        assert shown.out.rpartition(" of trainers: ")[2] == "sleeps\n"
        assert f"program {program} has ended; its output is in {program.file}" in shown.err
    assert cli.main(["logs", str(pid), "--json", "--rank", "gpus 1", "--grep", "sl..ps"]) == 0
    [line] = map(json.loads, capsys.readouterr().out.splitlines())
    assert (line["program"], line["label"], line["text"]) == (pid, "gpus 1 of trainers", "sleeps")
    assert cli.main(["logs", str(pid), "--rank", "gpus 7"]) == 1
    assert "gpus 1 of trainers" in capsys.readouterr().err


def test_ended_program_is_found_by_the_name_of_its_job(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_history, "_jobs", ["before"])
    history = _history_of_a_program("loss 0.5")
    log_history.note_job("nightly-run")
    history.append("gpus 0", 1, 1, b"loss 0.4")
    history.close()
    for name in ("before", "nightly-run"):
        assert cli.main(["logs", name]) == 0
        assert [line.rpartition(": ")[2] for line in capsys.readouterr().out.splitlines()] == ["loss 0.5", "loss 0.4"]
    assert cli.main(["logs", "nightly"]) == 1


def test_ended_programs_are_listed_where_none_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("monarch_backend._telemetry.programs.programs", list)  # other tests' programs may run
    _history_of_a_program("loss 0.5").close()
    assert cli.main(["logs"]) == 1
    [program] = program_output.ended_programs()
    assert f"for `monarch-backend logs PID`:\n  {program}" in capsys.readouterr().err
    assert cli.main(["logs", "no such program"]) == 1
    assert "no running program is 'no such program'" in capsys.readouterr().err


@pytest.mark.parametrize(("files", "why"), [("5", "the last 5 programs with output"), ("0", "ends with its program")])
def test_ended_program_without_output_is_an_error_that_explains(
    files: str, why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONARCH_LOG_FILES", files)
    history = log_history.make()
    assert history is not None
    history.close()
    assert cli.main(["logs", str(2**22 + 1)]) == 1
    error = capsys.readouterr().err
    assert f"no running program is '{2**22 + 1}'" in error and why in error
    assert ("its processes have written nothing, or its output is gone" in error) == (files != "0")


def test_oldest_files_of_ended_programs_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_LOG_FILES", "3")
    running = _history_of_a_program("runs")
    made = []
    for number in range(5):
        history = _history_of_a_program(f"program {number}")
        made.append(max(folder.iterdir()))
        history.close()
    assert [each.file for each in program_output.ended_programs()] == made[-3:]
    assert len(list(folder.iterdir())) == 4  # that of the running program stays, though it is the oldest
    running.close()


def test_files_are_private(folder: Path) -> None:
    history = _history_of_a_program("secret")
    [path] = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
    history.close()


def test_program_without_output_leaves_no_file(folder: Path) -> None:
    history = log_history.make()
    assert history is not None and len(list(folder.iterdir())) == 1
    history.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("case", ["others may write", "is a file", "none wanted"])
def test_history_is_in_memory_where_no_file_can_be_made(
    case: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if case == "others may write":
        folder.mkdir()
        folder.chmod(0o777)
    elif case == "is a file":
        folder.touch()
    else:
        monkeypatch.setenv("MONARCH_LOG_FILES", "0")
    history = _history_of_a_program("kept")
    assert os.readlink(f"/proc/self/fd/{history.descriptor}").startswith("/memfd:")
    assert program_output.ended_programs() == []
    assert [str(folder) in each for each in caplog.messages] == ([] if case == "none wanted" else [True])
    history.close()


def test_missing_parents_of_the_folder_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_LOG_DIR", str(tmp_path / "a" / "b"))
    history = _history_of_a_program("kept")
    assert len(list((tmp_path / "a" / "b").iterdir())) == 1
    history.close()


def test_files_of_others_are_not_shown(folder: Path) -> None:
    history = _history_of_a_program("own")
    history.close()
    [path] = folder.iterdir()
    os.mkfifo(folder / "1-1.history")
    (folder / "loss.history").write_text("0.5")
    assert [each.file for each in program_output.ended_programs()] == [path]
    folder.chmod(0o777)
    assert program_output.ended_programs() == []


KEEPER = """
import sys
from monarch_backend._telemetry import log_history
other = open("loss.history", "w")
history = log_history.make()
history.append("gpus 0", 1, 1, b"kept")
print("ready", flush=True)
sys.stdin.readline()
"""


def test_history_of_a_running_program_is_read_also_from_a_removed_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with running_script(tmp_path / "keeper.py", KEEPER) as program:
        assert program.stdout is not None and program.stdout.readline() == "ready\n"
        for _ in range(2):
            reader = log_history.of_process(program.pid)
            assert reader is not None
            with reader:
                assert [line.text for line in reader.read()] == ["kept"]  # and not those of loss.history
            for path in folder.iterdir():
                path.unlink()


def test_program_survives_that_its_file_is_cut(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history = _history_of_a_program("kept")
    [path] = folder.iterdir()
    os.truncate(path, 0)
    for _ in range(2 * history.size // 1000):
        history.append("gpus 0", 1, 1, b"x" * 1000)
    history.close()
    assert cli.main(["logs", str(path)]) == 1
    assert str(path) in capsys.readouterr().err


def test_file_of_another_release_is_named_and_others_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    history = _history_of_a_program("old")
    [path] = folder.iterdir()
    os.pwrite(history.descriptor, b'{"version": 1, "size": 65536, "owner": 1}'.ljust(4000, b"\0"), 0)
    history.close()
    assert program_output.ended_programs() == []
    assert cli.main(["logs", str(path)]) == 1
    assert str(path) in capsys.readouterr().err
