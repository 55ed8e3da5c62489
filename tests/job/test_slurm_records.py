"""Output of Slurm's commands, in the text format and the JSON formats of several releases."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from monarch_backend._job.slurm.records import SlurmRecord, parse

TEXT = (
    "JobId=17 JobName=monarch-train-5f UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=4294901758 Nice=0 "
    "Account=(null) QOS=normal JobState={state} Reason={reason} Dependency=(null) Requeue=0 Restarts={restarts} "
    "BatchFlag=1 Reboot=0 ExitCode={code} "
    "RunTime=00:00:05 TimeLimit=01:00:00 TimeMin=N/A SubmitTime=1795962200 EndTime={end} "
    "PreemptEligibleTime=1795962201 PreemptTime=None Partition=main AllocNode:Sid=login:9360 ReqNodeList=(null) "
    "NodeList={nodes} BatchHost=n1 NumNodes=2 ReqB:S:C:T=0:0:*:* TRES=cpu=2,node=2 Socks/Node=* "
    "Comment=monarch_backend 5f StdOut=/home/me/batch.log Power= \n"
)


def text(state: str, reason: str = "None", nodes: str = "n[1-2]", end: str = "1795962260", **fields: Any) -> str:
    return TEXT.format(state=state, reason=reason, nodes=nodes, end=end, **{"restarts": 0, "code": "0:0", **fields})


def as_json(release: str, **fields: Any) -> str:
    """Return the JSON of a release for a job. It has one state before 23.02, and objects for numbers since then."""

    def number(value: int) -> Any:
        return value if release < "23.02" else {"set": True, "infinite": False, "number": value}

    state, reason = fields.pop("job_state"), fields.pop("state_reason", "None")
    job = {
        "job_id": 17, "name": "monarch-train-5f", "comment": "monarch_backend 5f",
        "nodes": fields.pop("nodes", "n[1-2]"),
        "job_state": state if release < "23.11" else [state, *fields.pop("flags", [])], "state_reason": reason,
        "end_time": number(fields.pop("end_time", 1795962260)) if release >= "24.05" else 1795962260,
        "preempt_time": number(0), "restart_cnt": fields.pop("restart_cnt", 0),
        "het_job_offset": number(0) if release < "23.02" else {"set": False, "infinite": False, "number": 0},
        "exit_code": fields.pop("exit_code", number(0)),
    }  # fmt: skip
    assert not fields
    return json.dumps({"meta": {"Slurm": {"release": release}}, "errors": [], "jobs": [job]})


RUNNING = SlurmRecord(17, "RUNNING", nodes="n[1-2]", end_time=1795962260, exit_code="0:0")


@pytest.mark.parametrize(
    "output",
    [
        text("RUNNING"),
        as_json("22.05.8", job_state="RUNNING"),
        as_json("23.02.7", job_state="RUNNING"),
        as_json("23.11.10", job_state="RUNNING"),
        as_json("24.05.1", job_state="RUNNING"),
        as_json("25.05.0", job_state="RUNNING", nodes={"list": "n[1-2]", "count": 2}),
    ],
    ids=["text", "22.05", "23.02", "23.11", "24.05", "25.05"],
)
def test_formats_of_all_releases_are_one_record(output: str) -> None:
    assert parse(output) == [RUNNING]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (text("PENDING", "Resources", "(null)", "Unknown"), "PENDING (Resources)"),
        (text("PENDING", "QOSMaxJobsPerUserLimit"), "PENDING (QOSMaxJobsPerUserLimit)"),
        (text("FAILED", "NonZeroExitCode", code="1:0"), "FAILED, it has failed (NonZeroExitCode, exit 1:0)"),
        (text("NODE_FAIL", "None", code="0:0"), "NODE_FAIL, a node has failed"),
        (text("PREEMPTED"), "PREEMPTED, preempted by another job"),
        (text("TIMEOUT", "TimeLimit", code="0:15"), "TIMEOUT, its time limit has passed (TimeLimit, exit 0:15)"),
        (text("OUT_OF_MEMORY", "OutOfMemory", code="0:125"), "OUT_OF_MEMORY, out of memory (OutOfMemory, exit 0:125)"),
        (as_json("24.05.1", job_state="CANCELLED"), "CANCELLED, cancelled"),
        (as_json("22.05.8", job_state="FAILED", exit_code=0x100), "FAILED, it has failed (exit 1:0)"),
        (
            as_json(
                "24.05.1",
                job_state="OUT_OF_MEMORY",
                exit_code={"status": ["SIGNALED"], "return_code": {"set": False, "number": 0},
                           "signal": {"id": {"set": True, "infinite": False, "number": 9}, "name": "SIGKILL"}},
            ),
            "OUT_OF_MEMORY, out of memory (exit 0:9)",
        ),
    ],
)  # fmt: skip
def test_state_and_reason_in_words(output: str, words: str) -> None:
    [record] = parse(output)
    assert str(record) == f"Slurm job 17: {words}"
    assert record.has_ended == (record.state != "PENDING")


def test_job_that_completes_or_was_requeued() -> None:
    [completing] = parse(as_json("24.05.1", job_state="NODE_FAIL", flags=["COMPLETING"]))
    assert (completing.state, completing.is_completing) == ("NODE_FAIL", True)
    [completing] = parse(text("COMPLETING"))
    assert (completing.state, completing.is_completing, completing.has_ended) == ("COMPLETING", True, False)
    [requeued] = parse(text("PENDING", "BeginTime", restarts=2))
    assert (requeued.state, requeued.reason, requeued.restarts) == ("PENDING", "BeginTime", 2)
    [held] = parse(as_json("24.05.1", job_state="PENDING", flags=["REQUEUED"], restart_cnt=1))
    assert (held.state, held.restarts) == ("PENDING", 1)
    [configuring] = parse(text("CONFIGURING"))
    assert configuring.state == "PENDING"


def test_components_and_local_times() -> None:
    first = text("RUNNING").replace("JobId=17 ", "JobId=17 HetJobId=17 HetJobOffset=0 HetJobIdSet=17-18 ")
    second = text("RUNNING", end="2026-11-29T15:24:20").replace("JobId=17 ", "JobId=18 HetJobId=17 HetJobOffset=1 ")
    found = parse(f"{first}\n{second}\n")
    assert [(each.number, each.offset) for each in found] == [(17, 0), (18, 1)]
    assert time.localtime(found[1].end_time)[:6] == (2026, 11, 29, 15, 24, 20)


def test_unlimited_time_has_no_end() -> None:
    for output in (text("RUNNING", end="Unknown"), as_json("24.05.1", job_state="RUNNING", end_time=0)):
        [record] = parse(output)
        assert record.end_time == 0


def test_other_output_is_refused() -> None:
    assert parse("") == []
    with pytest.raises(KeyError):
        parse('{"errors": []}')


def test_exit_code_without_a_signal_is_read() -> None:
    exit_code = {"return_code": {"set": True, "number": 3}, "signal": None}
    assert parse(as_json("24.05.1", job_state="FAILED", exit_code=exit_code))[0].exit_code == "3:0"
