"""Commands that look at a job: what runs on its hosts, read from a second terminal, while its program hangs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import _native
from monarch_backend._dashboard import api
from monarch_backend._dashboard.source import Source
from monarch_backend._job import inspection
from monarch_backend._job.inspection import Inspection
from monarch_backend._telemetry.export.series import Collector
from monarch_backend._telemetry.program_output import ALL_LINES
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import Job
from tests.job.support import in_program
from tests.job.test_ssh_job import new_job
from tests.support import sshd
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(bool(sshd.refusal()), reason=sshd.refusal())

PROGRAM = """
import sys, time
from monarch_backend.actor import Actor, current_rank, endpoint, this_host
from monarch_backend.job import Job

class Talker(Actor):
    @endpoint
    def talk(self):
        print("the nested process talks", flush=True)

class Sleeper(Actor):
    @endpoint
    def sleep(self):
        print("rank", current_rank()["gpus"], "sleeps", flush=True)
        if current_rank()["gpus"] == 0:
            self.nested = this_host().spawn_procs({"inner": 1}, name="nested")
            self.nested.spawn("talker", Talker).talk.call_one().get()
        time.sleep(1e6)

if __name__ == "__main__":
    procs = Job.load(sys.argv[1]).state().trainers.spawn_procs({"gpus": 2}, name="workers")
    future = procs.spawn("sleeper", Sleeper).sleep.call()
    print("ready", flush=True)
    future.get()
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """A job with one host, which counts as another machine, and a program that hangs on it."""
    folder = tmp_path_factory.mktemp("job")
    with sshd.server(folder) as server:
        made = new_job(server, folder).add_mesh("trainers", ["127.0.0.1"])
        made.apply()
        script = folder / "hanging.py"
        script.write_text(PROGRAM)
        command = [sys.executable, str(script), str(made.path)]
        program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "ready\n"
            yield made
        finally:
            program.kill()
            program.communicate()
            made.kill()


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "monarch_backend.cli", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=100)


@pytest.fixture(scope="module")
def programs(job: Job) -> list[dict[str, Any]]:
    """Output of `ps` when both actors sleep, and the nested one has talked."""
    deadline = time.monotonic() + 60
    while True:
        ran = command("ps", job.path, "--json")
        assert ran.returncode == 0, ran.stderr
        found: list[dict[str, Any]] = json.loads(ran.stdout)
        there = [each for each in found if each["host"]]
        activities = [(a["state"], a["detail"]) for each in there for p in each["processes"] for a in p["activities"]]
        if sorted(activities) == [("idle", ""), ("running", "sleep"), ("running", "sleep")]:
            return found
        assert time.monotonic() < deadline, activities


RANKS = """
import os, sys, threading
import torch
import torch.distributed as dist
from monarch_backend.actor import Actor, current_rank, endpoint
from monarch_backend.job import Job

class Trainer(Actor):
    @endpoint
    def train(self, store):
        rank = current_rank()["hosts"]
        dist.init_process_group("monarch", init_method=f"file://{store}", rank=rank, world_size=2)
        dist.all_reduce(torch.ones(2))
        if rank == 1:
            threading.Event().wait()  # late
        dist.all_reduce(torch.ones(2))

if __name__ == "__main__":
    procs = Job.load(sys.argv[1]).state().trainers.spawn_procs({"gpus": 1}, name="ranks")
    procs.spawn("trainer", Trainer).train.call(sys.argv[2]).get()
"""


@pytest.mark.slow
def test_ps_names_the_late_rank_of_another_host(tmp_path: Path) -> None:
    with sshd.server(tmp_path) as server, contextlib.ExitStack() as stack:
        job = new_job(server, tmp_path).add_mesh("trainers", ["127.0.0.1", "127.0.0.1"])
        stack.callback(job.kill)
        job.apply()
        script = tmp_path / "ranks.py"
        script.write_text(RANKS)
        program = subprocess.Popen([sys.executable, str(script), str(job.path), str(tmp_path / "store")])
        stack.callback(program.wait)
        stack.callback(program.kill)

        def late() -> list[tuple[str, dict[str, Any]]]:
            ran = command("ps", job.path, "--json")
            assert ran.returncode == 0 and program.poll() is None, ran.stderr
            return [(each["host"], late) for each in json.loads(ran.stdout) for late in each["late"]]

        [(host, found)] = wait_until(late, 60.0)
        assert host == "trainers[1] (127.0.0.1)"
        assert (found["operation"], found["rank"], found["waiting"]) == ("all_reduce", 1, [0])
        assert re.search(r"it is at .*ranks.py:\d+ in train \(threading.Event\(\).wait\(\)  # late\)", found["text"])


def test_ps_shows_the_program_and_its_processes_on_the_host(job: Job, programs: list[dict[str, Any]]) -> None:
    here, there = sorted(programs, key=lambda each: str(each["host"]))
    assert "hanging.py" in here["command"] and here["host"] == ""
    assert there["host"] == "trainers[0] (127.0.0.1)"
    workers = [each for each in there["processes"] if each["label"].endswith("of workers")]
    assert [each["label"] for each in workers] == ["hosts 0 gpus 0 of workers", "hosts 0 gpus 1 of workers"]
    assert [a["detail"] for each in workers for a in each["activities"]] == ["sleep", "sleep"]
    assert not any("reader" in each["label"] for each in there["processes"])
    text = command("ps", job.path).stdout
    assert " on trainers[0] (127.0.0.1) (pid " in text and "sleeper rank 1: running sleep" in text


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_stack_shows_where_the_processes_of_the_host_are(job: Job) -> None:
    deadline = time.monotonic() + 60
    while True:
        ran = command("stack", job.path)
        assert ran.returncode == 0, ran.stderr
        # On a busy machine, a process may not answer in time.
        if "hosts 0 gpus 0-1 of workers (pids " in ran.stdout or time.monotonic() > deadline:
            break
    assert "hosts 0 gpus 0-1 of workers (pids " in ran.stdout
    assert "hanging.py:18 in sleep" in ran.stdout and "time.sleep(1e6)" in ran.stdout
    one = command("stack", job.path, "--rank", "hosts 0 gpus 1", "--json")
    assert [each["label"] for program in json.loads(one.stdout) for each in program["processes"]] == [
        "hosts 0 gpus 1 of workers"
    ]


@pytest.mark.usefixtures("programs")
def test_sql_joins_the_program_and_the_host(job: Job) -> None:
    query = "select host, label from processes where pid in (select from_pid from messages where endpoint = 'sleep')"
    answer = json.loads(command("sql", query, job.path, "--json").stdout)
    assert answer["rows"] == [["", "program hanging.py"]]
    assert answer["not_read"] == []
    assert answer["hosts"] == [{"name": name, "answered": True, "reason": None} for name in ("this machine", HOST)]
    text = command("sql", query, job.path).stderr
    assert text.startswith("(1 rows; ") and text.endswith(f"; answered: this machine, {HOST})\n")


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_connections_between_hosts_are_recorded(job: Job) -> None:
    query = (
        "select host, process, peer, event from connections join processes using (pid) where label not like 'agent%'"
    )
    rows = json.loads(command("sql", query, job.path, "--json").stdout)["rows"]
    [host] = json.loads(job.path.read_text())["hosts"]
    assert ["", "gateway", host["address"].removeprefix("tcp://"), "made"] in rows


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_trace_has_one_clock(job: Job, tmp_path: Path) -> None:
    ran = command("trace", job.path, "-o", tmp_path / "trace.json")
    assert ran.returncode == 0, ran.stderr
    trace = json.loads((tmp_path / "trace.json").read_text())
    bound = trace["otherData"]["clock_error_bound_ns"]
    assert 0 < bound < 1e9
    sleeps = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["name"] == "sleeper.sleep"]
    arrows = {each["ph"]: each["ts"] for each in trace["traceEvents"] if each["ph"] in "sf"}
    assert len(sleeps) == 2 and len({each["pid"] for each in sleeps}) == 2
    assert arrows["s"] <= arrows["f"] + bound / 1000
    assert "times of other machines may be wrong by" in ran.stdout


def ask(path: Path) -> Any:
    made = Job.load(path)
    with Inspection(made.path) as there:
        programs, unread = there.programs()
    count = threading.active_count()
    has_duckdb = importlib.util.find_spec("duckdb") is not None
    for engine in ("sqlite", "duckdb" if has_duckdb else "sqlite", "sqlite"):
        result = made.query("select count(*) from processes where label like '%of workers'", engine=engine)
        assert result.rows == [(2,)]
        assert result.unread == [str(each) for each in unread]
    wait_until(lambda: threading.active_count() <= count)  # threads of the last query end a moment later
    hosts = [str(each) for each in result.hosts]
    return [each.host for each in programs], [str(each) for each in unread], result.rows, result.unread, hosts


HOST = "trainers[0] (127.0.0.1)"


def look(path: Path) -> dict[str, Any]:
    """Return what one inspection and the dashboard's API find on the host."""
    with Inspection(path) as there:
        chosen, _, unread = there.look()
        _, rates, _ = there.look()
        [program] = [each for each in chosen if each.host]
        [worker] = [each for each in program.processes if each.label == "hosts 0 gpus 1 of workers"]
        profile = there.profile([(program, worker)], seconds=0.05, steps=None)
        families, _ = Collector(there.recording).look()
        reader = Source(there)
        logs = api.logs(reader, api.LogsOf(search="talks"))
        return {
            "unread": unread,
            "rates": (HOST, worker.pid) in rates,
            "profile": (profile.labels, profile.problems, profile.trace()),
            "memory of": {p.process.label for f in families if f.name == "monarch.process.memory" for p in f.points},
            "lines": [(each.host, each.text) for each in logs.lines],
            "followed": [[each.text for each in there.follow(program, ALL_LINES).lines] for _ in range(2)],
            "tree": [each.host for each in api.tree(reader, api.OfProgram()).programs],
            "stacks": api.stacks(reader, api.StacksOf(program=program.pid, host=HOST, rank=str(worker.pid))),
            "sql": api.sql_query(reader, api.Query("select count(*) from stacks where function = 'sleep'")).rows,
            "slices": [e["name"] for e in api.timeline(reader, api.TimelineOf(seconds=3600)).trace["traceEvents"]],
            "failures": api.failures_of(reader, api.OfProgram()).failures,
            "process": api.process(reader, api.OfProcess(pid=worker.pid, host=HOST)).rank.label,
        }


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_all_looks_reach_the_host(job: Job) -> None:
    found = in_program(look, job.path)
    worker = "hosts 0 gpus 1 of workers"
    assert (found["unread"], found["failures"], found["rates"], found["process"]) == ([], [], True, worker)
    labels, problems, trace = found["profile"]
    assert (labels, problems) == ([worker], {})
    assert worker in str([e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"])
    assert {worker, "hosts 0 gpus 0 of workers", "program hanging.py"} <= found["memory of"]
    assert (HOST, "the nested process talks") in found["lines"]
    first, second = found["followed"]
    assert "the nested process talks" in first and second == []
    assert sorted(found["tree"]) == ["", HOST]
    [stacks] = found["stacks"].programs
    assert stacks.host == HOST and "in sleep" in stacks.groups[0].text
    assert found["sql"] == [[2]] and found["slices"].count("sleeper.sleep") == 2


@pytest.mark.slow
def test_one_process_of_the_host_gets_a_signal(job: Job, programs: list[dict[str, Any]]) -> None:
    [worker] = [p for each in programs for p in each["processes"] if p["label"] == "hosts 0 gpus 1 of workers"]
    state = Path(f"/proc/{worker['pid']}/stat")
    sent = command("kill", job.path, "--rank", "hosts 0 gpus 1", "--signal", "STOP")
    try:
        assert sent.stdout.startswith(f"sent SIGSTOP to {worker['label']} (pid {worker['pid']}) of "), sent.stderr
        assert sent.stdout.endswith(f" on {HOST}\n")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
    finally:
        assert command("kill", job.path, "--rank", "hosts 0 gpus 1", "--signal", "CONT").returncode == 0
    wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] != "T")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["kill", "JOB", "--signal", "KILL"], "is a job, whose hosts end as with Job.kill(): leave out --signal"),
        (["kill", "JOB", "--rank", "gpus 9"], "no running process is 'gpus 9'; there are: "),
        (["profile", "JOB", "--seconds", "1", "--ranks", "gpus=9"], "no process is 'gpus=9'; there are: "),
        (["debug", "run", "p 1", "--program", "JOB"], "no process waits"),
        (["flight-recorder", "JOB", "-o", "dumps"], "no process has a group of backend='monarch'"),
        (["logs", "JOB", "--rank", "gpus 9"], "no process is 'gpus 9'; there are: "),
    ],
)
@pytest.mark.usefixtures("programs")
def test_what_is_not_there_is_an_error(job: Job, words: list[str], error: str) -> None:
    ran = command(*(str(job.path) if word == "JOB" else word for word in words))
    assert (ran.returncode, ran.stdout) == (1, "")
    assert error in ran.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
def test_commands_read_the_host(job: Job, tmp_path: Path) -> None:
    lines = command("logs", job.path, "--grep", "nested .* talks|sleeps").stdout
    assert f"{HOST} " in lines and "inner 0 of nested: the nested process talks" in lines
    assert "rank 1 sleeps" in lines
    table = command("top", job.path, "--once").stdout
    assert re.search(
        rf"^{re.escape(HOST)} .*\n(.*\n)*    hosts 0 gpus 1 of workers .*\n.* running +sleep ", table, re.M
    ), table
    assert f'host="{HOST}"' in command("metrics", job.path).stdout
    saved = tmp_path / "recording.sqlite"
    assert command("export", "sqlite", job.path, "-o", saved).returncode == 0
    query = "select count(*) from messages where endpoint = 'sleep'"
    assert json.loads(command("sql", query, "--from", saved, "--json").stdout)["rows"] == [[2]]
    profile = command("profile", job.path, "--seconds", "0.1", "-o", tmp_path / "trace.json")
    assert "profiles of 3 of 3 processes" in profile.stdout, profile.stdout + profile.stderr


@pytest.mark.slow
def test_host_that_is_gone_is_named(job: Job, tmp_path: Path) -> None:
    content = json.loads(job.path.read_text())
    lost = content["hosts"][0] | {"index": 1, "where": "lost", "address": "tcp://127.0.0.1:9"}
    content["hosts"].append(lost)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    hosts, unread, rows, not_read, answers = in_program(ask, path)
    wanted = ["trainers[1] (lost): it does not accept a connection at tcp://127.0.0.1:9"]
    assert sorted(hosts) == ["", "trainers[0] (127.0.0.1)"]
    assert (unread, not_read) == (wanted, wanted)
    assert answers == ["this machine", HOST, *wanted]
    assert rows == [(2,)]


def not_read(path: Path) -> list[str]:
    with Inspection(path) as there:
        return [str(each) for each in there.look()[2]]


def test_job_without_its_secret_names_its_hosts(job: Job, tmp_path: Path) -> None:
    content = json.loads(job.path.read_text()) | {"secret_file": str(tmp_path / "gone")}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(content))
    path.chmod(0o600)
    [text] = not_read(path)
    assert text.startswith(f"{HOST}: the job's secret cannot be read: ") and "No such file" in text


@pytest.mark.slow
def test_hosts_are_attached_at_the_same_time(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of two hosts ends its connection before both have one."""
    both, met = threading.Barrier(2), list[int]()

    def serve(server: socket.socket) -> None:
        server.accept()[0].close()  # the look whether it can be reached
        with server.accept()[0]:
            both.wait(30)
            met.append(1)

    content = json.loads(job.path.read_text())
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        content["hosts"] = [
            content["hosts"][0] | {"index": index, "address": f"tcp://127.0.0.1:{server.getsockname()[1]}"}
            for index, server in enumerate(servers)
        ]
        path = tmp_path / "job.json"
        path.write_text(json.dumps(content))
        path.chmod(0o600)
        monkeypatch.setattr(inspection, "TIMEOUT_S", 2.0)
        threads = [threading.Thread(target=serve, args=(server,), daemon=True) for server in servers]
        for thread in threads:
            thread.start()
        unread = in_program(not_read, path)
        for thread in threads:
            thread.join(30)
    assert [each.partition(":")[0] for each in unread] == ["trainers[0] (127.0.0.1)", "trainers[1] (127.0.0.1)"]
    assert met == [1, 1]


def test_names_that_are_no_jobs_stand_for_programs() -> None:
    ran = command("ps", "no-such-job")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "no running program is 'no-such-job'" in ran.stderr


def test_offset_of_a_clock_is_that_of_the_shortest_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    now, delays = 0, iter([80, 10, 2, 50, *[100] * 6])

    def clock_ns() -> int:
        nonlocal now
        delay = next(delays)
        now += 2 * delay
        return now - delay + 1_000_000

    monkeypatch.setattr(_native, "monotonic_ns", lambda: now)
    assert inspection._clock_offset(clock_ns) == (1_000_000, 2)


class Holder(Actor):
    """Actor that stops at a breakpoint."""

    @endpoint
    def hold(self) -> int:
        value = 6
        breakpoint()
        return value


def debugged(path: Path) -> Any:
    """Stop a process of the job's host at a breakpoint, and use it from a second terminal."""
    procs = Job.load(path).state().trainers.spawn_procs({"gpus": 2}, name="held")
    future = procs.spawn("holder", Holder).hold.call()
    wait_until(lambda: command("debug", path).stdout.count(" in hold") == 2)
    listed = command("debug", path).stdout
    every = "--program", path
    attached = command("debug", "attach", "hosts 0 gpus 1", *every)
    only = command("debug", "run", "value = 7", "--rank", "gpus=1", *every)
    ran = command("debug", "run", "p value * 2", "--json", *every)
    continued = command("debug", "continue", *every)
    values = list(future.get(30).values())
    procs.stop().get(30)
    return listed, attached.stderr, only.returncode, json.loads(ran.stdout), continued.stdout, values


@pytest.mark.slow
def test_breakpoints_of_another_host_are_listed_and_commanded(job: Job) -> None:
    listed, attached, code, ran, continued, values = in_program(debugged, job.path, timeout=100)
    assert listed.startswith(f"hosts 0 gpus 0 of held on {HOST}  pid ")
    assert "only from its own machine" in attached and code == 0
    assert [(each["host"], each["answer"]) for each in ran] == [(HOST, "12\n"), (HOST, "14\n")]
    assert continued == f"[hosts 0 gpus 0-1 of held on {HOST}] the program continues\n"
    assert values == [6, 7]
