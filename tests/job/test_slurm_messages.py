"""Slurm's messages in the recorded output of jobs, and the reasons of lost hosts that are made of them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from monarch_backend._core.state import make_private
from monarch_backend._job import state_file
from monarch_backend._job.slurm import commands
from monarch_backend._job.slurm.messages import of_start, reasons, shorten
from monarch_backend._job.slurm.node import Report, report_path
from monarch_backend._job.state_file import HostEntry
from monarch_backend._transport.network.auth import write_private
from monarch_backend.job import SlurmJob

CANCELLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-29T21:55:27{why} ***\n"
STEP = "0: slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-29T21:55:28{why} ***\n"
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
OVER_LIMIT = """1: slurmstepd-n2: error: StepId=7.0 exceeded memory limit (119812 > 102400), being killed
slurmstepd-n1: error: Exceeded job memory limit
"""
UNKILLABLE = (
    "slurmstepd-n1: error: *** STEP 7.0 STEPD TERMINATED ON n1 AT 2026-11-29T21:56:28"
    " DUE TO JOB NOT ENDING WITH SIGNALS ***\n"
)
OTHERS = """srun: cluster configuration lacks support for cpu binding
srun: got SIGCONT
srun: Job step aborted: Waiting up to 4 seconds for job step to finish.
"""


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("", []),
        (OTHERS, []),
        (CANCELLED.format(why=""), ["CANCELLED AT 2026-11-29T21:55:27"]),
        (
            OTHERS + CANCELLED.format(why=" DUE TO TIME LIMIT") + STEP.format(why=" DUE TO TIME LIMIT"),
            ["CANCELLED AT 2026-11-29T21:55:27 DUE TO TIME LIMIT"],
        ),
        (STEP.format(why=" DUE TO PREEMPTION"), ["CANCELLED AT 2026-11-29T21:55:28 DUE TO PREEMPTION"]),
        (
            CANCELLED.format(why=" DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS")
            + "srun: error: Node failure on n2\n",
            ["CANCELLED AT 2026-11-29T21:55:27 DUE TO NODE FAILURE", "Node failure on n2"],
        ),
        (
            OOM + "srun: error: n2: task 1: Out Of Memory\n",
            ["Detected 1 oom_kill event in StepId=7.0", "n2: task 1: Out Of Memory"],
        ),
        (
            OOM.replace("1 oom_kill event in StepId=7.0", "2 oom-kill event(s) in StepId=7.batch"),
            ["Detected 2 oom-kill event(s) in StepId=7.batch"],
        ),
        (
            OVER_LIMIT,
            ["StepId=7.0 exceeded memory limit (119812 > 102400), being killed", "Exceeded job memory limit"],
        ),
        ("slurmstepd-n1: error: *** STEP 7.0 ON n1 UNCORRECTABLE MEMORY ERROR AT 2026-11-29T21:55:28 ***\n",
         ["UNCORRECTABLE MEMORY ERROR AT 2026-11-29T21:55:28"]),
        (
            STEP.format(why=" DUE TO TIME LIMIT") + UNKILLABLE + UNKILLABLE.replace("n1", "n2"),
            [
                "CANCELLED AT 2026-11-29T21:55:28 DUE TO TIME LIMIT",
                "STEPD TERMINATED ON n1 AT 2026-11-29T21:56:28 DUE TO JOB NOT ENDING WITH SIGNALS",
            ],
        ),
        (
            "srun: error: *** STEP 7.0 CANCELLED AT 2026-11-29T21:55:28 DUE TO TIME LIMIT ***\n",
            ["CANCELLED AT 2026-11-29T21:55:28 DUE TO TIME LIMIT"],
        ),
    ],
)  # fmt: skip
def test_messages_are_reasons_once(output: str, expected: list[str]) -> None:
    assert reasons(output) == expected


def test_end_of_a_job_is_its_first_reason() -> None:
    tasks = "".join(f"srun: error: n{node}: task {node}: Out Of Memory\n" for node in range(5))
    assert reasons(tasks + CANCELLED.format(why=" DUE TO TIME LIMIT")) == [
        "CANCELLED AT 2026-11-29T21:55:27 DUE TO TIME LIMIT",
        "n0: task 0: Out Of Memory",
        "n1: task 1: Out Of Memory",
    ]


def test_messages_before_the_end_of_a_long_output_are_kept() -> None:
    rest = OTHERS * 100
    for words in (STEP.format(why=" DUE TO TIME LIMIT"), OTHERS + OOM):
        short = shorten(words + rest)
        assert reasons(short) == reasons(words)
        assert short.endswith(rest[-4000:])
        assert len(short) < 4200
    cut = len(rest) - 4000
    assert reasons(shorten(rest[:cut] + OOM + rest[cut + len(OOM) - 30 :])) == reasons(OOM)
    assert shorten(OTHERS) == OTHERS


def test_messages_about_other_nodes_are_no_reasons_of_a_host() -> None:
    others = f"{OVER_LIMIT}srun: error: n1: task 0: Out Of Memory\nsrun: error: Node failure on n1\n"
    others += (
        UNKILLABLE + "slurmstepd-n1: error: *** STEP 7.0 ON n1 UNCORRECTABLE MEMORY ERROR AT 2026-11-29T21:55:28 ***\n"
    )
    output = others + "srun: error: n[2-3]: tasks 1-2: Out Of Memory\n"
    assert reasons(output, "n2") == [
        "StepId=7.0 exceeded memory limit (119812 > 102400), being killed",
        "n[2-3]: tasks 1-2: Out Of Memory",
    ]
    assert reasons(OOM, "n2") == ["Detected 1 oom_kill event in StepId=7.0"]  # it names no node
    assert reasons(STEP.format(why=""), "n2") == ["CANCELLED AT 2026-11-29T21:55:28"]  # the step of both nodes


def test_output_of_one_start_is_found() -> None:
    output = "monarch_backend: start 7.0\nfirst\nmonarch_backend: start 7.1\nsecond\nmore\n"
    assert [of_start(output, f"7.{count}") for count in range(3)] == ["first\n", "second\nmore\n", ""]
    assert of_start("srun: error", "7.0") == "srun: error"


RECORD = (
    "JobId=7 JobName=x JobState={state} Reason={reason} NodeList=n[1-2] EndTime=1795962260 Restarts=0 ExitCode={code}"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return ``slurm(record, nodes)``, which replaces scontrol and sinfo by commands with this output."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_CONF", str(tmp_path))
    monkeypatch.setitem(commands._has_json, str(tmp_path), False)

    def make(record: str, nodes: str) -> None:
        for name, output in (("scontrol", record), ("sinfo", nodes)):
            (tmp_path / name).write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
            (tmp_path / name).chmod(0o755)

    return make


def _job_with_hosts(tmp_path: Path, ended: str = "", ending_notice: float = 0.0) -> SlurmJob:
    """Return the Slurm job 7, whose two hosts have reported their addresses, and have ``ended``."""
    job = SlurmJob(path=tmp_path / "job.json", ending_notice=ending_notice).add_mesh("trainers", 2)
    folder = tmp_path / "job.slurm"
    make_private(folder)
    file = job._new_file(job.path)
    file.submitted = {"job": 7, "folder": str(folder)}
    state_file.write(job.path, file)
    for index in range(2):
        report = Report("7.0", f"n{index + 1}", f"tcp://n{index + 1}:1", ended=ended)
        write_private(report_path(folder, "trainers", index), msgspec.json.encode(report))
    return job


@pytest.mark.parametrize(
    ("state", "reason", "code", "said", "nodes", "expected"),
    [
        ("CANCELLED", "None", "0:15", CANCELLED.format(why=""), "",
         ("Slurm job 7: CANCELLED, cancelled (exit 0:15); CANCELLED AT 2026-11-29T21:55:27", True)),
        ("TIMEOUT", "TimeLimit", "0:15", STEP.format(why=" DUE TO TIME LIMIT"), "",
         ("Slurm job 7: TIMEOUT, its time limit has passed (TimeLimit, exit 0:15); CANCELLED AT 2026-11-29", True)),
        ("OUT_OF_MEMORY", "OutOfMemory", "0:125", OOM, "",
         ("Slurm job 7: OUT_OF_MEMORY, out of memory (OutOfMemory, exit 0:125); Detected 1 oom_kill event", True)),
        ("NODE_FAIL", "NodeDown", "0:15", "srun: error: Node failure on n2", "n1|idle|none\nn2|down|new disk",
         ("Slurm job 7: NODE_FAIL, a node has failed (NodeDown, exit 0:15); node n2 is down: new disk; Node", True)),
        ("COMPLETING", "None", "0:15", STEP.format(why=" DUE TO PREEMPTION"), "",
         ("Slurm job 7: COMPLETING (exit 0:15); CANCELLED AT 2026-11-29T21:55:28 DUE TO PREEMPTION", False)),
        ("RUNNING", "None", "0:0", "", "n1|mixed|none\nn2|mixed*|none",
         ("up for the scheduler: node n2 does not respond to Slurm", False)),
        ("RUNNING", "ended", "0:0", OVER_LIMIT, "",
         ("its daemon was killed by signal 9 on node n2; StepId=7.0 exceeded memory limit (119812 > 102400)", True)),
        ("RUNNING", "ended", "0:0", "srun: error: n1: task 0: Out Of Memory", "",
         ("its daemon was killed by signal 9 on node n2", True)),
        ("RUNNING", "None", "0:0", "", "n1|mixed|none\nn2|draining*|new disk",
         ("up for the scheduler: node n2 is draining: new disk", False)),
    ],
)  # fmt: skip
def test_loss_of_a_host_has_slurms_reason(
    slurm: Callable[[str, str], None], tmp_path: Path, state: str, reason: str, code: str, said: str, nodes: str,
    expected: tuple[str, bool],
) -> None:  # fmt: skip
    job = _job_with_hosts(tmp_path, "its daemon was killed by signal 9" if reason == "ended" else "")
    folder = tmp_path / "job.slurm"
    (folder / "batch.log").write_text(f"monarch_backend: start 7.0\n{said}\n")
    end = "Unknown" if state == "RUNNING" else "1795962260"
    slurm(RECORD.format(state=state, reason=reason, code=code).replace("1795962260", end), nodes)
    host = HostEntry("trainers", 1, "n2", "tcp://n2:1", None, "", "7.0.trainers.1")
    [found] = job._why_lost([host])
    words, is_final = expected
    assert found.text.startswith(f"n2 is {words}" if words.startswith("up") else f"n2: {words}")
    assert "n1: task" not in found.text
    assert found.is_final == is_final


def test_lost_host_of_a_job_that_ends_soon_waits_for_the_reason(
    slurm: Callable[[str, str], None], tmp_path: Path
) -> None:
    """A short job is "ending" all the time. That does not explain the loss of a node."""
    job = _job_with_hosts(tmp_path, ending_notice=300)
    host = HostEntry("trainers", 1, "n2", "tcp://n2:1", None, "", "7.0.trainers.1")
    record = RECORD.format(state="RUNNING", reason="None", code="0:0")
    slurm(record.replace("1795962260", str(int(time.time()) + 100)), "n1|mixed|none\nn2|mixed*|none")
    [found] = job._why_lost([host])
    assert re.fullmatch(
        r"n2 is ending for the scheduler: its time limit ends at .*; node n2 does not respond to Slurm", found.text
    )
    assert not found.is_final


@pytest.mark.parametrize("state", ["COMPLETING", "PENDING"])
def test_requeued_job_has_the_reason_of_the_start_before(
    slurm: Callable[[str, str], None], tmp_path: Path, state: str
) -> None:
    job = _job_with_hosts(tmp_path)
    said = CANCELLED.format(why=" DUE TO JOB REQUEUE")
    (tmp_path / "job.slurm" / "batch.log").write_text(f"monarch_backend: start 7.0\n{said}")
    slurm(RECORD.format(state=state, reason="None", code="0:0").replace("Restarts=0", "Restarts=1"), "")
    assert all("CANCELLED AT 2026-11-29T21:55:27 DUE TO JOB REQUEUE" in each.reason for each in job.status())
    with (tmp_path / "job.slurm" / "batch.log").open("a") as file:
        file.write(f"monarch_backend: start 7.1\n{CANCELLED.format(why='')}")
    assert all(("JOB REQUEUE" in each.reason) == (state == "PENDING") for each in job.status())
