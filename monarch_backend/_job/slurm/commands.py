"""Slurm's commands: submit, look, cancel. Errors have what the command has printed."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence

from monarch_backend._job.errors import JobError
from monarch_backend._job.slurm import records
from monarch_backend._job.slurm.records import SlurmRecord

COMMAND_TIMEOUT_S = 60.0
OUTAGE_TIMEOUT_S = 60.0
"""Seconds in which a slurmctld that does not answer is asked again: it may be restarting."""

_OUTAGE = re.compile(r"Unable to contact slurm controller|Socket timed out|Connection refused|Zero Bytes were trans")
_UNKNOWN_JOB = re.compile(r"Invalid job id|No job found|Invalid job array")

# Variables that change what the commands print, which jobs they find, when they return, and how many jobs sbatch makes.
# In a job, by its number, scontrol writes a script into the working directory when it changes the nodes of any job.
_OPTIONS = re.compile(
    r"(SQUEUE|SCONTROL|SINFO|SCANCEL)_\w+|SLURM_(TIME_FORMAT|JSON|YAML|JOB_?ID)|SBATCH_(WAIT|ARRAY_INX)"
)


class _CommandError(JobError):
    pass


def environment() -> dict[str, str]:
    """Return the environment for commands whose output is read. Times are printed in seconds since 1970."""
    kept = {name: value for name, value in os.environ.items() if not _OPTIONS.fullmatch(name)}
    return {**kept, "SLURM_TIME_FORMAT": "%s"}


def is_outage(error: BaseException) -> bool:
    """Return whether slurmctld has not answered a command. It may still carry it out."""
    return isinstance(error, _CommandError) and bool(_OUTAGE.search(str(error)))


def run(words: Sequence[str], text: str | None = None) -> str:
    """Run one of Slurm's commands with ``text`` as its input, and return its output. Raises JobError."""
    try:
        done = subprocess.run(
            words, input=text, stdin=subprocess.DEVNULL if text is None else None, capture_output=True, text=True,
            errors="replace", timeout=COMMAND_TIMEOUT_S, env=environment(),
        )  # fmt: skip
    except FileNotFoundError:
        raise JobError(
            f"{words[0]} not found: run this program where Slurm's commands are, or add them to PATH"
        ) from None
    except subprocess.TimeoutExpired:
        raise _CommandError(f"{words[0]} did not end within {COMMAND_TIMEOUT_S:g} s: Socket timed out") from None
    if done.returncode:
        said = re.sub(rf"^{words[0]}: (error: |fatal: )?", "", done.stderr.strip(), flags=re.MULTILINE)
        raise _CommandError(f"{words[0]} has failed ({done.returncode}): {said or done.stdout.strip()}")
    return done.stdout


def _ask(*words: str) -> str:
    """Run a command that changes nothing, again while slurmctld does not answer."""
    until = time.monotonic() + OUTAGE_TIMEOUT_S
    while True:
        try:
            return run(words)
        except _CommandError as error:
            if not is_outage(error) or time.monotonic() > until:
                raise
            time.sleep(1.0)


_has_json: dict[str, bool] = {}  # by the cluster's configuration


def show(number: int) -> list[SlurmRecord]:
    """Return the records of a job, one for each component. The list is empty if Slurm does not know the job any more.

    scontrol has ``--json`` since Slurm 23.02. ``squeue --json`` is older, but prints all jobs of the cluster.
    """
    cluster = os.environ.get("SLURM_CONF", "")
    try:
        if _has_json.setdefault(cluster, True):
            try:
                return records.parse(_ask("scontrol", "--json", "show", "job", str(number)))
            except (_CommandError, ValueError) as error:
                if _UNKNOWN_JOB.search(str(error)):
                    raise
                _has_json[cluster] = False
        return records.parse(_ask("scontrol", "--oneliner", "show", "job", str(number)))
    except _CommandError as error:
        if _UNKNOWN_JOB.search(str(error)):
            return []
        raise
    except (ValueError, KeyError) as error:
        raise JobError(f"the output of scontrol is not understood ({error!r}); is SLURM_CONF right?") from error


def find_by_name(name: str) -> list[int]:
    """Return the numbers of this user's jobs with a name. More than one: a submission was accepted late."""
    user = str(os.geteuid())
    found = _ask("squeue", "--noheader", f"--user={user}", f"--name={name}", "--format=%i").split()
    return list(dict.fromkeys(int(each.partition("+")[0]) for each in found))  # one for each component


def find_step(number: int | None, name: str) -> str | None:
    """Return the step with a name, such as "17.2", of a job or of all jobs of this user; None if it does not run."""
    where = f"--user={os.geteuid()}" if number is None else f"--jobs={number}"
    try:
        lines = _ask("squeue", "--noheader", "--steps", where, "--format=%i|%j").splitlines()
    except _CommandError as error:
        if _UNKNOWN_JOB.search(str(error)):
            return None
        raise
    return next(
        (step for step, _, its_name in (line.strip().partition("|") for line in lines) if its_name == name), None
    )


def node_problems(nodes: str) -> dict[str, str]:
    """Return what is wrong with nodes, by name: an administrator drains them, they are down, or they do not respond.

    A node that does not respond is down for Slurm only after SlurmdTimeout, by default 300 s.
    """
    lines = _ask("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N|%T|%E").splitlines()
    found = {}
    for line in lines:
        name, state, why = [*line.split("|", 2), "", ""][:3]
        if re.match(r"drain|down|fail", state):
            found[name] = f"node {name} is {state.rstrip('*~#!%$@^-+')}: {why}"
        elif state.endswith("*"):
            found[name] = f"node {name} does not respond to Slurm"
    return found


def node_names(nodes: str) -> list[str]:
    """Return the names of nodes, such as of "n[1-2]"."""
    return _ask("scontrol", "show", "hostnames", nodes).split() if nodes else []


def keep_nodes(number: int, nodes: Sequence[str]) -> None:
    """Let a running job have only these of its nodes. Slurm kills its processes on the others. Raises JobError."""
    run(["scontrol", "update", f"JobId={number}", f"NodeList={','.join(nodes)}"])


def cancel(what: str) -> None:
    """Cancel a job, a step, or all jobs with a name: "--name=NAME". Do nothing if it has ended. Raises JobError."""
    try:
        run(["scancel", what])
    except _CommandError as error:
        if not re.search(r"already complet|Invalid job id|Kill job error", str(error)):
            raise
