"""Behaviour of `monarch-backend run` that torchrun lacks."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from monarch_backend import cli
from monarch_backend._core import platform
from monarch_backend._telemetry import program_output
from tests.launch import scripts
from tests.launch.launcher import PATIENCE, Launched, finish, gone, launch, launching, open_files, until


def _write(directory: Path, name: str, text: str) -> str:
    (directory / name).write_text(text)
    return str(directory / name)


@pytest.mark.parametrize(
    ("words", "message"), [([], "training_script"), (["--nonsense", "x.py"], "--nonsense"), (["--nnodes"], "--nnodes")]
)
def test_wrong_usage(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command runs in this process, so the leak check is part of the test."""
    from monarch_backend.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["run", *words])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("usage: monarch-backend run") and message in error


@pytest.mark.parametrize(
    ("variables", "words", "message"),
    [
        (
            {"NNODES": "2"},
            [],
            "--nnodes=2 (PET_NNODES) without --master-addr (PET_MASTER_ADDR): give the address of node 0",
        ),
        ({"NNODES": "2", "MASTER_ADDR": ""}, [], "without --master-addr (PET_MASTER_ADDR)"),
        ({"NNODES": "2", "NODE_RANK": "5"}, ["--master-addr=n0"], "--node-rank=5 (PET_NODE_RANK) of --nnodes=2"),
        ({"NODE_RANK": "-1"}, [], "--node-rank=-1 (PET_NODE_RANK) of --nnodes=1:1"),
        ({"NNODES": "x"}, [], "--nnodes='x' (PET_NNODES): give a number of nodes, such as 2, or a range, such as 1:4"),
        ({"NNODES": "4:2"}, [], "--nnodes='4:2' (PET_NNODES): give a number of nodes"),
        ({"NNODES": "0"}, [], "--nnodes='0' (PET_NNODES): give a number of nodes"),
        ({"NPROC_PER_NODE": "x"}, [], "--nproc-per-node='x' (PET_NPROC_PER_NODE): Unsupported nproc_per_node value: x"),
    ],
)
@pytest.mark.parametrize("mode", [[], ["--controller"]], ids=["ranks", "controller"])
def test_nodes_that_cannot_meet_are_an_error_at_once(
    variables: dict[str, str], words: list[str], message: str, mode: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Kubeflow Trainer and others give the options by variables."""
    from monarch_backend.cli import main

    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    with pytest.raises(SystemExit) as caught:
        main(["run", *words, *mode, _write(tmp_path, "script.py", "raise SystemExit(9)")])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"monarch-backend run: {message}" if message.startswith("--") else "monarch-backend run: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes=2", "--master-addr=n0", "--node-rank=1"],
        ["--nnodes=2", "--rdzv-endpoint=n0:1"],
        ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=n0:1", "--node-rank=7"],
        ["--standalone", "--nnodes=2"],
        [],
    ],
)
def test_nodes_that_can_meet_are_left_to_torch(words: list[str]) -> None:
    from torch.distributed import run as torchrun

    from monarch_backend._launch import torchelastic_patches

    args = torchelastic_patches._parse([*words, "x.py"])
    assert vars(args).items() >= vars(torchrun.get_args_parser().parse_args([*words, "x.py"])).items()


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    from monarch_backend.cli import main

    with pytest.raises(SystemExit) as caught:
        main(["run", "--help"])
    assert caught.value.code == 0
    assert "--rdzv-backend" in capsys.readouterr().out


def test_there_is_no_such_script(tmp_path: Path) -> None:
    done = launch("monarch", str(tmp_path / "nothing.py"), directory=tmp_path)
    assert done.returncode == 1
    assert f"can't open file '{tmp_path / 'nothing.py'}': [Errno 2]" in done.stderr
    assert "exitcode  : 2 " in done.stderr


def test_ranks_compute_with_their_given_thread_counts(tmp_path: Path) -> None:
    script = _write(tmp_path, "sum.py", scripts.SUM)
    done = launch("monarch", "--nproc-per-node=3", script, directory=tmp_path, MONARCH="1", OMP_NUM_THREADS="2")
    assert done.returncode == 0, done.stderr
    assert done.reports() == [[6.0, 2, "2", "0"]] * 3
    assert done.stderr == ""


def test_a_directory_and_standard_input(tmp_path: Path) -> None:
    (tmp_path / "program").mkdir()
    _write(tmp_path / "program", "__main__.py", "import sys, other; print(other.x, sys.argv[1:], sys.stdin.read())")
    _write(tmp_path / "program", "other.py", "x = 'found'")
    _write(tmp_path, "stdin", "what was typed")
    with open(tmp_path / "stdin") as stdin:
        done = launch("monarch", str(tmp_path / "program"), "-x", directory=tmp_path, stdin=stdin)
    assert (done.returncode, done.stdout) == (0, "found ['-x'] what was typed\n")


@pytest.mark.parametrize(
    ("way", "code", "said"),
    [("interrupt", 2, "KeyboardInterrupt"), pytest.param("words", 1, "some words\n", marks=pytest.mark.slow)],
)
def test_failed_rank_is_reported_with_its_exit_code(way: str, code: int, said: str, tmp_path: Path) -> None:
    script = _write(tmp_path, "failing.py", scripts.FAILING)
    done = launch("monarch", "--nproc-per-node=2", script, way, directory=tmp_path)
    assert done.returncode == 1
    assert f"exitcode  : {code} " in done.table()  # `table` removes the minus sign
    assert said in done.stderr


@pytest.mark.parametrize("program", ["script", "no python"])
def test_rank_exit_is_detected_without_polling(program: str, tmp_path: Path) -> None:
    """torchrun polls once per --monitor-interval, which is a minute here. This launcher notices an end at once."""
    script = _write(tmp_path, "failing.py", scripts.FAILING)
    words = ["--no-python", sys.executable, script] if program == "no python" else [script]
    began = time.monotonic()
    done = launch("monarch", "--monitor-interval=60", "--nproc-per-node=2", *words, "kill", directory=tmp_path)
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert done.stdout == "rank 0 was told SIGTERM\n"
    assert "exitcode  : 9 " in done.table()  # `table` removes the minus sign


@pytest.mark.slow
def test_stopped_rank_ends_without_grace_period(tmp_path: Path) -> None:
    """The grace period is 30 s. Both kinds of start run at the same time."""
    script = _write(tmp_path, "stopped.py", scripts.STOPPED)
    forked, plain = tmp_path / "forked", tmp_path / "plain"
    words = ["--nproc-per-node=2"]
    began = time.monotonic()
    with (
        launching("monarch", *words, script, directory=forked) as one,
        launching("monarch", *words, "--no-python", sys.executable, script, directory=plain) as other,
    ):
        both = finish(one, forked), finish(other, plain)
    assert time.monotonic() - began < 25
    for done in both:
        assert done.returncode == 1
        assert "exitcode  : 15 " in done.table() and "exitcode  : 3 " in done.table()  # `table` removes the minus signs


def test_rank_that_ignores_sigterm_is_killed_after_the_timeout(tmp_path: Path) -> None:
    script = _write(tmp_path, "waiting.py", scripts.WAITING)
    words = ["--shutdown-timeout=1", "--nproc-per-node=2", script, "stubborn"]
    with launching("monarch", *words, directory=tmp_path) as process:
        until(lambda: len([*tmp_path.glob("pids-?")]) == 2)
        process.send_signal(signal.SIGTERM)
        done = finish(process, tmp_path)
    assert done.returncode == 1
    assert done.stdout == "told SIGTERM\n" * 2
    assert "forcefully exiting via" in done.stderr
    assert all(gone(pid) for pid in _pids(tmp_path))


def _pids(directory: Path) -> list[int]:
    """Return the pids of ranks and of their child processes."""
    return [int(word) for path in directory.glob("pids-?") for word in path.read_text().split()]


def test_killed_launcher_leaves_no_processes(tmp_path: Path) -> None:
    script = _write(tmp_path, "waiting.py", scripts.WAITING)
    with launching("monarch", "--nproc-per-node=2", script, directory=tmp_path) as process:
        until(lambda: len([*tmp_path.glob("pids-?")]) == 2)
        assert not any(gone(pid) for pid in _pids(tmp_path))
        process.kill()
        until(lambda: all(gone(pid) for pid in _pids(tmp_path)))


def test_another_interpreter_is_started_plainly(tmp_path: Path) -> None:
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    script = _write(tmp_path, "say.py", "print('said')")
    done = launch("monarch", script, directory=tmp_path, PYTHON_EXEC=str(other))
    assert (done.returncode, done.stdout) == (0, "said\n")
    assert f"PYTHON_EXEC={other} is another interpreter" in done.stderr


# Code that starts threads in a launcher, and the reason that the launcher then gives.
BUSY = {
    "OpenMP": (
        "import torch; torch.set_num_threads(2); torch.ones(1 << 20).exp()",
        "threads of an imported library were running",
    ),
    "Python": (
        "import threading; threading.Thread(target=threading.Event().wait, name='busy', daemon=True).start()",
        "the launcher has threads besides its main one, which a forked process would lack: ['busy']",
    ),
}


@pytest.mark.parametrize("kind", ["OpenMP", pytest.param("Python", marks=pytest.mark.slow)])
def test_launcher_with_threads_does_not_fork(kind: str, tmp_path: Path) -> None:
    program, reason = BUSY[kind]
    code = f"{program}; from monarch_backend.cli import main; import sys; sys.exit(main())"
    words = [sys.executable, "-c", code, "run", _write(tmp_path, "say.py", "print('said')")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "said\n"), done.stderr
    assert "each rank starts an interpreter and imports torch by itself" in done.stderr and reason in done.stderr


@pytest.mark.slow
def test_fresh_interpreters_on_request(tmp_path: Path) -> None:
    script = _write(tmp_path, "say.py", "import sys; print('said', sys.argv)")
    done = launch("monarch", script, "x", directory=tmp_path, MONARCH_START_METHOD="spawn")
    assert (done.returncode, done.stdout) == (0, f"said ['{script}', 'x']\n")


def _endpoint() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.slow
def test_two_launchers_one_of_them_torchrun(tmp_path: Path) -> None:
    script = _write(tmp_path, "sum.py", scripts.SUM)
    words = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={_endpoint()}", "--rdzv-id=x"]
    words += ["--local-addr=127.0.0.1"]
    with (
        launching("monarch", *words, "--nproc-per-node=2", script, directory=tmp_path) as ours,
        launching("torchrun", *words, "--nproc-per-node=1", script, directory=tmp_path) as theirs,
    ):
        both: list[Launched] = [finish(ours, tmp_path), finish(theirs, tmp_path)]
    assert [one.returncode for one in both] == [0, 0], both[0].stderr + both[1].stderr
    reports = both[0].reports()
    assert [report[0] for report in reports] == [6.0] * 3
    assert sorted(report[3] for report in reports) in (["0", "0", "1"], ["0", "1", "1"])


def test_dead_fork_server_is_named(tmp_path: Path) -> None:
    script = _write(tmp_path, "waiting.py", scripts.WAITING)
    with launching("monarch", script, directory=tmp_path) as process:
        until(lambda: len([*tmp_path.glob("pids-?")]) == 1)
        rank = _pids(tmp_path)[0]
        server = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(server, signal.SIGKILL)
        done = finish(process, tmp_path)
    assert done.returncode == 1
    assert "the fork server closed the connection" in done.stderr
    assert all(gone(pid) for pid in _pids(tmp_path))


WAITS = """
import os, sys, time
import torch.distributed as dist
dist.init_process_group("monarch")
dist.barrier()
if dist.get_rank() == 0:
    print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.skipif(not platform.HAS_MEMFD, reason="programs are found in /proc")
def test_launcher_is_named_and_its_ranks_are_found_by_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from monarch_backend.cli import main

    script, end = _write(tmp_path, "waits_for_a_file.py", WAITS), tmp_path / "end"
    with launching("monarch", "--nproc-per-node=2", script, str(end), directory=tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        pid = str(process.pid)
        assert main(["ps", pid]) == 0
        assert capsys.readouterr().out.startswith("launcher of ")
        assert main(["stack", pid]) == 0
        text = capsys.readouterr().out
        assert f"launcher (pid {pid}):\n    starts the ranks, and waits for their end" in text
        assert "waits for messages" not in text and "waits_for_a_file.py:" in text
        assert main(["stack", pid, "--rank", "1"]) == 0
        assert re.search(r"^rank 1: .* \(pid \d+\):$", capsys.readouterr().out, re.MULTILINE)
        assert main(["logs", pid]) == 1
        error = capsys.readouterr().err
        assert "its ranks write to the terminal of the launcher" in error and "--log-dir with --tee 3" in error
        end.touch()
        assert process.wait(PATIENCE) == 0


PRINTS = """
import os, sys
print("rank", os.environ["RANK"], "on a terminal:", sys.stdout.isatty(), flush=True)
print("half a line", end="", file=sys.stderr, flush=True)
"""


@pytest.mark.parametrize("option", ["--redirects", "--tee"])
def test_output_in_files_is_kept_for_logs(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONARCH_LOG_DIR", str(tmp_path / "kept"))
    script = _write(tmp_path, "prints.py", PRINTS)
    done = launch("monarch", "--nproc-per-node=2", option, "3", script, directory=tmp_path / "runs")
    assert done.returncode == 0, done.stderr
    assert ("on a terminal" in done.stdout) == (option == "--tee")
    [program] = program_output.ended_programs("prints.py")
    assert cli.main(["logs", str(program.pid)]) == 0
    lines = {line.partition(" ")[2] for line in capsys.readouterr().out.splitlines()}
    assert lines == {
        f"rank {rank}: {script}{text}"
        for rank in range(2)
        for text in (f": rank {rank} on a terminal: False", ", stderr: half a line")
    }
    assert cli.main(["logs", str(program.pid), "--rank", "1", "--grep", "terminal"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_output_on_the_terminal_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_LOG_DIR", str(tmp_path / "kept"))
    script = _write(tmp_path, "prints.py", PRINTS)
    done = launch("monarch", script, directory=tmp_path / "runs")
    assert (done.returncode, done.stdout) == (0, "rank 0 on a terminal: False\n")
    assert program_output.ended_programs() == []


def test_output_of_running_ranks_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONARCH_LOG_DIR", str(tmp_path / "kept"))
    script = _write(tmp_path, "prints.py", PRINTS + "import time\ntime.sleep(1e6)")
    with launching("monarch", "--redirects", "3", script, directory=tmp_path / "runs") as process:
        until(lambda: cli.main(["logs", str(process.pid)]) == 0 and "on a terminal" in capsys.readouterr().out)


RESTARTS = """
import os, sys, time
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
    sys.exit(3)
if os.environ["RANK"] == "0":
    time.sleep(1e6)
"""


@pytest.mark.skipif(not platform.HAS_PROC, reason="needs /proc")
def test_files_of_ended_ranks_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONARCH_LOG_DIR", str(tmp_path / "kept"))
    script = _write(tmp_path, "restarts.py", RESTARTS)
    words = "--nproc-per-node=2", "--max-restarts=2", "--redirects", "3", script
    with launching("monarch", *words, directory=tmp_path / "runs") as process:

        def read() -> list[str]:
            names = open_files(process.pid, Path("/"))
            return [name.partition("/attempt_")[2] for name in names if name.endswith(".log")]

        until(lambda: read() == ["2/0/stderr.log", "2/0/stdout.log"])
