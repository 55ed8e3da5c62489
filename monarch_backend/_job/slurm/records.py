"""Jobs as ``scontrol show job`` and ``squeue`` print them: as text, and as JSON of Slurm 21.08 to the current release.

JSON of releases before 23.02 has plain numbers and one state. Later ones have ``{"set": true, "number": 1}``, and lists
of states. Only the parts that a job of this package needs are read.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FINAL_STATES = {
    "BOOT_FAIL": "a node failed to boot",
    "CANCELLED": "cancelled",
    "COMPLETED": "its processes have ended",
    "DEADLINE": "its deadline has passed",
    "FAILED": "it has failed",
    "LAUNCH_FAILED": "it could not be launched",
    "NODE_FAIL": "a node has failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted by another job",
    "RECONFIG_FAIL": "its nodes could not be configured",
    "REVOKED": "another cluster runs it",
    "TIMEOUT": "its time limit has passed",
}
"""States that a job does not leave by itself, in words."""

_BASE_STATES = ("PENDING", "RUNNING", "SUSPENDED", *FINAL_STATES)


@dataclass(frozen=True)
class SlurmRecord:
    """One job of Slurm, or one component of a heterogeneous job. Times are in seconds since 1970, 0 where unknown.

    ``offset``: number of the component. ``state``: such as "PENDING". ``is_completing``: its processes still end.
    ``reason``: why it waits or has failed, "" if there is none. ``restarts``: how often it was requeued.
    ``preempt_time``: when Slurm has preempted it. It then runs for the grace time of its partition, until ``end_time``.
    """

    number: int
    state: str
    offset: int = 0
    is_completing: bool = False
    reason: str = ""
    nodes: str = ""
    end_time: float = 0.0
    preempt_time: float = 0.0
    restarts: int = 0
    exit_code: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in FINAL_STATES

    def __str__(self) -> str:
        text = f"Slurm job {self.number}: {self.state}"
        if self.has_ended:
            text += f", {FINAL_STATES[self.state]}"
        detail = [self.reason] if self.reason else []
        detail += [f"exit {self.exit_code}"] if self.exit_code not in ("", "0:0") else []
        detail += ["preempted"] if self.preempt_time and self.state != "PREEMPTED" else []
        return f"{text} ({', '.join(detail)})" if detail else text


def parse(text: str) -> list[SlurmRecord]:
    """Return the jobs of an output of scontrol or squeue, as JSON or as text with one job on each line.

    Raises ValueError for other text.
    """
    if text.lstrip().startswith("{"):
        return [_from_json(each) for each in json.loads(text)["jobs"]]
    return [_from_text(line) for line in text.splitlines() if line.startswith("JobId=")]


def _from_text(line: str) -> SlurmRecord:
    fields = dict(reversed(re.findall(r"([A-Za-z][\w:/]*)=(.*?)(?=\s+[A-Za-z][\w:/]*=|\s*$)", line)))
    states = re.split(r"[+,\s]+", fields["JobState"])
    return SlurmRecord(
        number=int(fields["JobId"]),
        state=_base(states),
        offset=int(fields.get("HetJobOffset", 0)),
        is_completing="COMPLETING" in states,
        reason=_meaning(fields.get("Reason")),
        nodes=_meaning(fields.get("NodeList")),
        end_time=_seconds(fields.get("EndTime", "")),
        preempt_time=_seconds(fields.get("PreemptTime", "")),
        restarts=int(fields.get("Restarts", 0)),
        exit_code=fields.get("ExitCode", ""),
    )


def _from_json(fields: Mapping[str, Any]) -> SlurmRecord:
    said = fields["job_state"]
    states = [said] if isinstance(said, str) else list(said)
    nodes = fields.get("nodes")
    exit_code: Any = fields.get("exit_code", 0)
    if isinstance(exit_code, Mapping):
        signal = exit_code.get("signal") or {}
        returned = int(_number(exit_code.get("return_code")))
        killed = int(_number(signal.get("id", signal.get("signal_id"))))
    else:  # the status of wait(2)
        returned, killed = int(_number(exit_code)) >> 8, int(_number(exit_code)) & 0x7F
    return SlurmRecord(
        number=int(_number(fields["job_id"])),
        state=_base(states),
        offset=int(_number(fields.get("het_job_offset"))),
        is_completing="COMPLETING" in states,
        reason=_meaning(fields.get("state_reason")),
        nodes=_meaning(nodes.get("list") if isinstance(nodes, Mapping) else nodes),
        end_time=_number(fields.get("end_time")),
        preempt_time=_number(fields.get("preempt_time")),
        restarts=int(_number(fields.get("restart_cnt"))),
        exit_code=f"{returned}:{killed}",
    )


def _base(states: list[str]) -> str:
    """Return the main one of a job's states. For a job that is completing, the text does not have it: "COMPLETING"."""
    for state in states:
        if state in _BASE_STATES:
            return state
    return "PENDING" if {"CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"} & set(states) else states[0]


def _meaning(value: Any) -> str:
    return "" if value in (None, "None", "(null)", "N/A", "") else str(value)


def _number(value: Any) -> float:
    """Return a number of either JSON format; 0 for one that is not set or infinite."""
    if isinstance(value, Mapping):
        return float(value.get("number") or 0) if value.get("set", True) and not value.get("infinite") else 0.0
    return float(value or 0)


def _seconds(text: str) -> float:
    """Return the time of a text: seconds since 1970, or a time of this machine's zone. 0 if it is none."""
    if text.isdigit():
        return float(text)
    with contextlib.suppress(ValueError):
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    return 0.0
