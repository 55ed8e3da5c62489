"""Lives of processes and meshes, as `ps`, SQL and the dashboard show them: killed, restarted and stopped ones agree."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._dashboard import states
from monarch_backend._telemetry import program_recording, recording_history, sql
from tests.telemetry.restarted_program import program_of, program_with_a_killed_rank

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    with program_with_a_killed_rank(tmp_path_factory.mktemp("program")) as process:
        yield process


def _rows(running: subprocess.Popen[str], query: str) -> list[tuple[Any, ...]]:
    return sql.answer(query, program_recording.read(str(running.pid))).rows


def test_activity_of_a_killed_rank_is_lost_in_ps_and_its_time_stands_still(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    for _ in range(2):
        assert cli.main(["ps", str(running.pid), "--json"]) == 0
        [program] = json.loads(capsys.readouterr().out)
        [dead] = [each for each in program["processes"] if each["exit_code"] == -signal.SIGKILL]
        seen.append([(each["state"], each["detail"], each["seconds"]) for each in dead["activities"]])
    assert seen[0] == seen[1]
    assert [each[:2] for each in seen[0]] == [("lost", "step")] and seen[0][0][2] > 0
    assert cli.main(["ps", str(running.pid)]) == 0
    text = capsys.readouterr().out
    assert (
        "trainer rank 1: lost step after " in text and "running" not in text.partition("ended with")[2].splitlines()[1]
    )


def test_ps_shows_how_often_a_rank_was_restarted(
    running: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ps", str(running.pid)]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  gpus")]
    assert sum("restarted once" in line for line in lines) == 1
    [line] = [line for line in lines if "restarted once" in line]
    assert line.startswith("  gpus 1 of trainers") and "running" in line


def test_sql_and_dashboard_agree_about_a_killed_rank(running: subprocess.Popen[str]) -> None:
    pid = f"(select pid from processes where exit_code = {-signal.SIGKILL:d})"
    activities = f"select name, state, duration_us > 0 from activities where pid = {pid}"
    assert _rows(running, activities) == [("trainer", "lost", 1)]
    assert _rows(running, f"select status from actors where pid = {pid}") == [("Failed",)]
    [dead] = [each for each in program_of(running).processes if each.exit_code]
    assert states.rank(dead).state == "failed"


def test_failure_of_a_killed_actor_has_the_signal_and_the_time_of_the_end(running: subprocess.Popen[str]) -> None:
    query = "select timestamp_us, reason from actor_status_events where new_status = 'Failed'"
    [(first, reason)], [(second, _)] = _rows(running, query), _rows(running, query)
    assert reason == "its process has ended: by SIGKILL"
    assert abs(second - first) < 1000  # the offset of the clocks is read anew each time
    [(successor,)] = _rows(running, "select timestamp_us from processes where restarts = 1")
    [(started, ended)] = _rows(running, "select timestamp_us, ended_us from processes where ended_us is not null")
    assert started < ended < successor and abs(ended - first) < 1000


def test_events_have_the_lives_of_meshes_and_processes(running: subprocess.Popen[str]) -> None:
    lives = "select kind, name, detail, status from events where kind in ('mesh', 'process') order by timestamp_us"
    found = [each for each in _rows(running, lives) if not each[2].startswith("{")]
    processes = [each[1:] for each in found if each[0] == "process"]
    assert [(name, detail.partition(":")[0], status) for name, detail, status in processes] == [
        ("gpus 1 of trainers", "failed", 1), ("gpus 1 of trainers", "restarted", 0), ("gpus 1 of trainers", "ready", 0),
    ]  # fmt: skip
    assert "SIGKILL" in processes[0][1] and "restart 1 of 3" in processes[0][1]
    assert processes[1][1] == "restarted: 1 of 3 within 60 s"
    assert {each[1:3] for each in found if each[0] == "mesh"} == {("trainers", "ready"), ("trainer", "ready")}


def test_meshes_are_not_changed_by_later_events_of_their_lives(running: subprocess.Popen[str]) -> None:
    shape = '{"inner": {"labels": ["gpus"], "sizes": [2]}}'
    meshes = "select given_name, class, shape_json from meshes order by given_name"
    assert _rows(running, meshes) == [
        ("trainer", "Python<Trainer>", shape), ("trainers", "Proc", shape),
    ]  # fmt: skip


@pytest.mark.parametrize("missing", [["ended_unix_ns", "restarts"], ["restarts"]], ids=["both", "last"])
def test_history_of_an_earlier_release_gets_the_new_columns(
    missing: list[str], running: subprocess.Popen[str], tmp_path: Path
) -> None:
    recording = program_recording.read(str(running.pid))
    with recording_history.HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        writer.append(recording)
        [file] = tmp_path.glob("history-*")
        with recording_history._opened(file) as connection:
            for column in missing:
                connection.execute(f"alter table process drop column {column}")
        writer.append(recording)
    query = "select restarts, ended_us from processes order by 1, 2"
    assert sql.answer_from(query, str(tmp_path)).rows == sql.answer(query, recording).rows


def test_history_has_activities_that_earlier_releases_can_read(running: subprocess.Popen[str], tmp_path: Path) -> None:
    with recording_history.HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        writer.append(program_recording.read(str(running.pid)))
    [file] = tmp_path.glob("history-*")
    with recording_history._opened(file) as connection:
        rows = [json.loads(text) for (text,) in connection.execute("select activities from process")]
    assert {len(fields) for fields in itertools.chain(*rows)} == {12}


def test_history_of_a_later_release_is_an_error_that_names_it(running: subprocess.Popen[str], tmp_path: Path) -> None:
    with recording_history.HistoryWriter(tmp_path, 3600, 1 << 30) as writer:
        writer.append(program_recording.read(str(running.pid)))
    [file] = tmp_path.glob("history-*")
    with recording_history._opened(file) as connection:
        connection.execute("pragma user_version = 99")
    text = "format 99 of a later release of monarch_backend"
    with pytest.raises(OSError, match=text):
        recording_history.read(tmp_path)
    with pytest.raises(OSError, match=text):
        recording_history.HistoryWriter(tmp_path, 3600, 1 << 30)


def test_stopped_mesh_is_recorded(tmp_path: Path) -> None:
    with program_with_a_killed_rank(tmp_path) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert any("stopped" in line for line in process.stdout)
        stopped = "select name, detail from events where kind = 'mesh' and detail like 'stopped%'"
        assert [name for name, _ in _rows(process, stopped)] == ["trainers"]
