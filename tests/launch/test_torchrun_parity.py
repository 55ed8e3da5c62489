"""The same program under `monarch-backend run` and under torchrun: environment, logs, output and exit."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.launch import scripts
from tests.launch.launcher import Launched, finish, launch_both, launching, until

# Variables that differ between two runs of the same launcher.
BY_CHANCE = ("MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID")


# Signals that the launchers inherit as ignored, as from a shell with `nohup` and `&`.
IGNORED = signal.SIGINT, signal.SIGHUP, signal.SIGUSR1


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Launched, Launched]:
    directory = tmp_path_factory.mktemp("probed")
    (directory / "probe.py").write_text(scripts.PROBE)
    streams = ["--log-dir", "logs", "--redirects", "0:1", "--tee", "1:3"]
    words = ["a", "--b", "c d", "${local_rank}", "ä"]
    return launch_both(
        *("--nproc-per-node=2", *streams, str(directory / "probe.py"), *words),
        directory=directory,
        ignored=IGNORED,
        GREETING="grüß",
    )


def _same_file(path: str) -> str:
    return re.sub(r"logs/[^/]*", "logs/RUN", path)


def test_both_succeed(probed: tuple[Launched, Launched]) -> None:
    assert [one.returncode for one in probed] == [0, 0]


def test_a_rank_sees_the_same_environment(probed: tuple[Launched, Launched]) -> None:
    for ours, theirs in zip(*(one.reports() for one in probed), strict=True):
        ours, theirs = ours["environment"], theirs["environment"]
        assert ours.keys() == theirs.keys()
        assert [ours[n] for n in ours if n not in BY_CHANCE] == [theirs[n] for n in ours if n not in BY_CHANCE]
        assert _same_file(ours["TORCHELASTIC_ERROR_FILE"]) == _same_file(theirs["TORCHELASTIC_ERROR_FILE"])
        assert (ours["WORLD_SIZE"], ours["OMP_NUM_THREADS"]) == ("2", "1")


def test_a_rank_sees_the_same_interpreter(probed: tuple[Launched, Launched]) -> None:
    """The comparison includes argv, paths, __main__, streams, signals, descriptors and limits."""
    for ours, theirs in zip(*(one.reports() for one in probed), strict=True):
        # Each launcher runs in a directory of its own. OpenBLAS, loaded with torch, may have threads.
        rest = [{k: v for k, v in one.items() if k not in ("environment", "cwd", "tasks")} for one in (ours, theirs)]
        assert rest[0].pop("descriptors") == [*rest[1].pop("descriptors"), 3]  # the last one is of the stack signal
        assert rest[0] == rest[1]
        assert ours["argv"][1:4] == ["a", "--b", "c d"]


def test_signals_ignored_by_shell_reset_where_launcher_handles_them(probed: tuple[Launched, Launched]) -> None:
    for one in probed:
        for report in one.reports():
            assert "default_int_handler" in report["handlers"]["SIGINT"]
            for name, action in (("SIGTERM", "SIG_DFL"), ("SIGHUP", "SIG_DFL"), ("SIGUSR1", "SIG_IGN")):
                assert report["handlers"][name] in (f"Handlers.{action}", str(int(signal.Handlers[action])))


def test_the_same_logs(probed: tuple[Launched, Launched]) -> None:
    files = [
        {
            _same_file(str(path.relative_to(one.directory))): path.read_text()
            for path in one.directory.rglob("*.log")  # stdout.log and stderr.log
        }
        for one in probed
    ]
    assert files[0] == files[1]
    assert files[0]["logs/RUN/attempt_0/0/stdout.log"] == "out of rank 0\n"


def test_the_same_output(probed: tuple[Launched, Launched]) -> None:
    assert probed[0].stdout == probed[1].stdout == "[default1]:out of rank 1\n"
    for one in probed:
        assert "error of rank 0\n" in one.stderr and "[default1]:error of rank 1\n" in one.stderr


@pytest.mark.parametrize(
    ("way", "code"),
    [("raise", 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in (("exit", 3), ("kill", 9)))],
)
def test_a_rank_fails(way: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(scripts.FAILING)
    program = ["-m", "failing"] if way == "exit" else [str(tmp_path / "failing.py")]
    words = ["--standalone", "--nproc-per-node=2", *program, way]
    both = launch_both(*words, directory=tmp_path, PYTHONPATH=str(tmp_path))
    assert [one.returncode for one in both] == [1, 1]
    assert both[0].stdout == both[1].stdout == "rank 0 was told SIGTERM\n"
    assert both[0].table() == both[1].table()
    assert f"exitcode  : {code} " in both[0].table()  # `table` removes the minus sign
    assert _traceback(both[0]) == _traceback(both[1])


def _traceback(launched: Launched) -> str:
    """Return the rank's traceback, which comes before the launcher's own."""
    return "".join(re.findall(r"(?s)Traceback.*?ValueError.*?\n", launched.stderr.split("ChildFailedError")[0]))


@pytest.mark.slow
def test_restarts_and_error_files(tmp_path: Path) -> None:
    (tmp_path / "recorded.py").write_text(scripts.RECORDED)
    both = launch_both(
        *("--max-restarts=1", "--log-dir=logs", str(tmp_path / "recorded.py")),
        directory=tmp_path,
        TORCHELASTIC_ERROR_FILE="error.json",  # the launcher's own file, into which it copies the first failure
    )
    assert [one.returncode for one in both] == [1, 1]
    assert both[0].stdout == both[1].stdout == "attempt 0\nattempt 1\n"
    assert both[0].table() == both[1].table()
    errors = [_errors(one.directory) for one in both]
    assert errors[0] == errors[1]
    assert set(errors[0]) == {"error.json", "logs/RUN/attempt_0/0/error.json", "logs/RUN/attempt_1/0/error.json"}
    assert errors[0]["error.json"]["message"]["message"] == "ValueError: broken, attempt 1"


def _errors(directory: Path) -> dict[str, Any]:
    found = {}
    for path in directory.rglob("error.json"):
        data = json.loads(path.read_text())
        data["message"]["extraInfo"]["timestamp"] = ""
        found[_same_file(str(path.relative_to(directory)))] = data
    return found


def test_the_launcher_gets_a_signal_while_ranks_start(tmp_path: Path) -> None:
    """The ranks receive the signal when all of them have started."""
    (tmp_path / "hasty.py").write_text(scripts.HASTY)
    with launching("monarch", "--nproc-per-node=4", str(tmp_path / "hasty.py"), directory=tmp_path / "ran") as process:
        ended = finish(process, tmp_path / "ran")
    assert ended.returncode == 1 and "SignalException" in ended.stderr
    assert "rank 0 was told SIGINT\n" in ended.stdout, ended


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_the_launcher_gets_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "waiting.py").write_text(scripts.WAITING)
    words = ["--nproc-per-node=2", str(tmp_path / "waiting.py")]
    ours, theirs = tmp_path / "monarch", tmp_path / "torchrun"
    with launching("monarch", *words, directory=ours) as one, launching("torchrun", *words, directory=theirs) as other:
        for directory in (ours, theirs):
            until(lambda at=directory: len([*at.glob("pids-?")]) == 2)
        for process in (one, other):
            process.send_signal(number)
        both = finish(one, ours), finish(other, theirs)
    for pid in (int(path.read_text().split()[1]) for path in theirs.glob("pids-?")):
        os.kill(pid, signal.SIGKILL)  # torchrun does not end this child of a rank
    assert both[0].returncode == both[1].returncode == 1
    assert both[0].stdout == both[1].stdout == f"told {number.name}\n" * 2
    last = [one.stderr.strip().splitlines()[-1] for one in both]
    assert [re.sub(r"\d+", "N", line) for line in last].count(re.sub(r"\d+", "N", last[0])) == 2
    assert "SignalException" in last[0]
