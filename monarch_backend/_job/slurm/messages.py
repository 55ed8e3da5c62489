"""Slurm's messages in the output of a job: why Slurm has ended the job, a step or a process.

srun and slurmstepd write them at once. The state of the job follows when the job is complete.
"""

from __future__ import annotations

import re

MAX_MESSAGES = 3
MAX_OUTPUT_CHARS = 4000
START_MARK = "monarch_backend: start "
"""Prefix of the line that the job's script prints first. The output of a requeued job has one for each start."""

_MESSAGE = re.compile(
    r"(?:slurmstepd-(?P<writer>\S+): )?error: (?:"
    r"\*\*\* (?:JOB|STEP) \S+ (?:ON (?P<node>\S+) )?"
    r"(?P<end>(?:STEPD TERMINATED ON (?P<stepd>\S+) )?.+?)(?:, SEE SLURMCTLD LOG FOR DETAILS)? \*\*\*"
    r"|(?P<memory>Detected \d+ oom[-_ ]kill event\S*(?: in [\w.=+]*\w)?|.*\bexceeded (?:job |step )?memory limit.*)"
    r"|(?P<failure>Node failure on (?P<failed>\S+)|(?P<tasks>\S+): tasks? [\d,-]+: Out Of Memory)"
    r")",
    re.IGNORECASE,
)


def of_start(output: str, start: str) -> str:
    """Return the part of a job's output that one start has written, such as "17.0". An output without marks is one."""
    if START_MARK not in output:
        return output
    for part in output.split(START_MARK)[1:]:
        its_start, _, text = part.partition("\n")
        if its_start.strip() == start:
            return text
    return ""


def shorten(output: str) -> str:
    """Return Slurm's messages in a long output, and the end of the output."""
    start = len(output) - MAX_OUTPUT_CHARS
    earlier = dict.fromkeys(match[0] for match in _MESSAGE.finditer(output) if match.start() < start)
    return "\n".join([*earlier, output[-MAX_OUTPUT_CHARS:]])


def reasons(output: str, node: str = "") -> list[str]:
    """Return Slurm's reasons in its words, without repetitions: how it has ended, then those of memory and of nodes.

    With ``node`` messages about another node are left out. Some name no node. One node tells that a whole step is
    cancelled.

    >>> reasons("slurmstepd-n1: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-11-29T21:55:28 DUE TO TIME LIMIT ***")
    ['CANCELLED AT 2026-11-29T21:55:28 DUE TO TIME LIMIT']
    """
    found: dict[str, None] = {}
    for match in _MESSAGE.finditer(output):
        if node and not _concerns(match, node):
            continue
        found[(match["end"] or match["memory"] or match["failure"]).strip().rstrip(".")] = None
    # A job and each of its steps are cancelled within seconds of each other, for one reason.
    ends: dict[str, str] = {}
    for text in found:
        if " AT " in text:
            ends.setdefault(re.sub(r" (?:ON|AT) \S+", "", text), text)
    rest = [text for text in found if " AT " not in text]
    return [*ends.values(), *rest][:MAX_MESSAGES]


def _concerns(message: re.Match[str], node: str) -> bool:
    if (message["end"] or "").startswith("CANCELLED"):
        return True
    its_node = message["node"] or message["stepd"] or message["failed"] or message["tasks"] or message["writer"]
    return its_node is None or its_node == node or "[" in its_node  # brackets: several nodes
