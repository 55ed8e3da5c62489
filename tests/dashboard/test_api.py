"""The HTTP API: what each route says of a real program that hangs, and how it refuses wrong requests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from starlette.testclient import TestClient

from monarch_backend._dashboard import server, source, states
from monarch_backend._dashboard.answers import CollectiveInFlight
from monarch_backend._dashboard.api import ROUTES
from monarch_backend._dashboard.server import application
from monarch_backend._dashboard.source import Source
from monarch_backend._telemetry import program_recording
from monarch_backend._telemetry.programs import programs
from monarch_backend._telemetry.subject import ThisMachine
from tests.dashboard.conftest import BASE, TOKEN
from tests.support.ranks import RankPool, run_ranks
from tests.support.waiting import wait_until

Program = subprocess.Popen[str]


def _get(client: TestClient, path: str, **parameters: Any) -> Any:
    answer = client.get(f"/api/v1/{path}", params=parameters)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def _ranks(client: TestClient) -> dict[str, Any]:
    [program] = _get(client, "tree")["programs"]
    return {each["label"]: each for each in program["ranks"]}


def _query(client: TestClient, query: str, **others: Any) -> Any:
    return client.post("/api/v1/sql", json={"query": query, **others})


def test_programs_counts_its_processes(client: TestClient, running: Program) -> None:
    [program] = _get(client, "programs")["programs"]
    assert program["pid"] == running.pid
    assert (program["processes"], program["running"], program["failed"]) == (5, 4, 1)


def test_tree_has_state_endpoint_and_mesh_of_each_rank(client: TestClient) -> None:
    ranks = _ranks(client)
    assert list(ranks) == [
        "program training_program.py", "gpus 0 of trainers", "gpus 1 of trainers", "cpus 0 of loaders",
        "cpus 1 of loaders",
    ]  # fmt: skip
    hanging, killed, idle = ranks["gpus 1 of trainers"], ranks["cpus 0 of loaders"], ranks["gpus 0 of trainers"]
    assert (hanging["state"], hanging["doing"], hanging["mesh"]) == ("running", "trainer.hang", "trainers")
    assert hanging["since_s"] > 0 and hanging["memory_bytes"] > 1 << 20
    assert (killed["state"], killed["doing"], killed["exit_code"], killed["memory_bytes"]) == (
        "failed", "loader.die", -9, None,
    )  # fmt: skip
    assert (idle["state"], idle["doing"], idle["since_s"]) == ("idle", "", 0)


def test_process_has_its_activities(client: TestClient) -> None:
    pid = _ranks(client)["gpus 1 of trainers"]["pid"]
    answer = _get(client, "process", pid=pid)
    assert answer["rank"]["pid"] == pid
    [message] = [each for each in answer["activities"] if each["kind"] == "message"]
    assert (message["name"], message["detail"], message["state"], message["rank"]) == ("trainer", "hang", "running", 1)


def test_rates_of_an_idle_program_are_zero_from_the_second_look_on(client: TestClient, running: Program) -> None:
    rates = wait_until(lambda: _get(client, "rates")["rates"])
    assert running.pid in {each["pid"] for each in rates}
    assert {each["messages_per_s"] for each in rates} == {0.0}


def test_failure_of_a_nested_call_has_its_chain_of_causes(client: TestClient) -> None:
    def complete() -> dict[str, Any] | None:
        """Return the failures when the events of both processes have been read."""
        found: dict[str, Any] = _get(client, "failures")
        chains = {each["process"]: each["chain"] for each in found["failures"]}
        return found if len(chains.get("gpus 0 of trainers", [])) == 2 and "cpus 1 of loaders" in chains else None

    answer = wait_until(complete)
    by_process = {each["process"]: each for each in answer["failures"]}
    chain = by_process["gpus 0 of trainers"]["chain"]
    assert [(each["what"].partition(" after")[0], each["process"]) for each in chain] == [
        ("trainer.check failed", "gpus 0 of trainers"), ("loader.load failed", "cpus 1 of loaders"),
    ]  # fmt: skip
    assert by_process["cpus 1 of loaders"]["log"] == ["cannot open <b>shard</b>"]
    assert answer["left_out"] == 0 and answer["not_read"] == []


def test_failure_of_a_killed_process_has_its_message_and_last_lines(client: TestClient) -> None:
    [failure] = [each for each in _get(client, "failures")["failures"] if each["kind"] == "process"]
    assert failure["what"] == "the process has ended: by SIGKILL"
    assert [each["what"] for each in failure["chain"]] == [failure["what"], "it ran loader.die"]
    assert failure["log"] == ["last words"]


def test_stacks_are_folded(client: TestClient) -> None:
    [program] = _get(client, "stacks")["programs"]
    groups = {each["labels"]: each for each in program["groups"]}
    assert "in hang" in groups["gpus 1 of trainers"]["text"]
    assert "waits for messages" in groups["gpus 0 of trainers; cpus 1 of loaders"]["text"]
    assert len(groups["gpus 0 of trainers; cpus 1 of loaders"]["pids"]) == 2


def test_stacks_of_one_rank(client: TestClient) -> None:
    [program] = _get(client, "stacks", rank="gpus 1")["programs"]
    assert [each["labels"] for each in program["groups"]] == ["gpus 1 of trainers"]
    answer = client.get("/api/v1/stacks", params={"rank": "gpus 9"})
    assert answer.status_code == 404 and "gpus 9" in answer.json()["error"]


def test_stacks_beyond_the_time_limit_say_so(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch_backend._dashboard.api.STACKS_TIME_LIMIT_S", 0.0)
    [program] = _get(client, "stacks")["programs"]
    assert {each["text"].partition(":")[0] for each in program["groups"]} == {"no stack"}


def test_logs_search_is_plain_text_and_ignores_case(client: TestClient) -> None:
    texts = [each["text"] for each in _get(client, "logs")["lines"]]
    assert sorted(texts) == ["cannot open <b>shard</b>", "hangs", "last words"]
    [line] = _get(client, "logs", search="CANNOT OPEN <B>")["lines"]
    assert (line["process"], line["stream"]) == ("cpus 1 of loaders", "stderr")
    assert _get(client, "logs", search=".*")["lines"] == []


def test_logs_are_limited_to_the_last_lines_of_a_rank_and_time(client: TestClient) -> None:
    answer = _get(client, "logs", limit=1)
    assert (len(answer["lines"]), answer["left_out"], answer["kept"]) == (1, 2, True)
    assert [each["text"] for each in _get(client, "logs", rank="gpus 1")["lines"]] == ["hangs"]
    assert _get(client, "logs", since_s=0.000001)["lines"] == []


def test_sql_returns_rows(client: TestClient) -> None:
    answer = _query(client, "select full_name, status from actors order by 1").json()
    assert answer["columns"] == ["full_name", "status"]
    assert answer["hosts"] == [{"name": "this machine", "answered": True, "reason": None}]
    assert answer["rows"] == [
        ["loader[0]", "Failed"], ["loader[1]", "Idle"], ["trainer[0]", "Idle"], ["trainer[1]", "Processing"],
    ]  # fmt: skip
    assert not answer["truncated"] and answer["overwritten"] == 0


def test_sql_rows_are_limited(client: TestClient) -> None:
    many = "with recursive n(x) as (select 1 union all select x + 1 from n where x < 50) select x from n"
    answer = _query(client, many, limit=10).json()
    assert [row[0] for row in answer["rows"]] == list(range(1, 11)) and answer["truncated"]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("drop table actors", "a query only reads"),
        ("select wrong from actors", "no such column: wrong; actors has the columns"),
        ("selec", "syntax error"),
        ("select 1; select 2", "one statement at a time"),
        ("attach '/tmp/x' as y", "a query only reads"),
        ("select load_extension('x')", "a query only reads"),
    ],
)
def test_wrong_sql_is_refused(query: str, text: str, client: TestClient) -> None:
    answer = _query(client, query)
    assert answer.status_code == 400 and text in answer.json()["error"] and answer.json()["hint"]


def test_endless_sql_is_ended_and_others_are_answered_meanwhile(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch_backend._telemetry.sql.TIME_LIMIT_S", 2.0)
    endless = "with recursive n(x) as (select 1 union all select x + 1 from n) select count(*) from n"
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_query(client, endless)))
    start = time.monotonic()
    thread.start()
    answered = 0
    while not found:
        _get(client, "programs")
        answered += 1
    thread.join()
    assert answered > 5 and time.monotonic() - start < 60
    assert found[0].status_code == 400 and "longer than 2 s" in found[0].json()["error"]


def test_metrics_are_curves_per_process(client: TestClient) -> None:
    series = _get(client, "metrics", name="loss")["series"]
    assert [each["process"] for each in series] == ["gpus 0 of trainers", "gpus 1 of trainers"]
    for each in series:
        assert each["values"][:4] == [1.0, 0.5, None, 0.25] and len(each["values"]) == len(each["unix_s"]) == 20
        assert each["unix_s"] == sorted(each["unix_s"]) and abs(each["unix_s"][-1] - time.time()) < 600
    samples = _get(client, "metrics", name="samples")["series"]
    assert [each["values"][-1] for each in samples] == [640.0, 640.0]
    assert _get(client, "metrics", name="nothing")["series"] == []


def test_metrics_have_at_most_the_wanted_points(client: TestClient) -> None:
    for each in _get(client, "metrics", name="samples", points=10)["series"]:
        assert 1 < len(each["values"]) <= 10 and each["values"] == sorted(each["values"])


def test_metrics_of_many_processes_are_one_curve_with_a_range(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("monarch_backend._dashboard.curves.MAX_SERIES_OF_METRIC", 1)
    [series] = _get(client, "metrics", name="samples")["series"]
    assert series["process"] == "2 processes"
    bounds = list(zip(series["low"], series["values"], series["high"], strict=True))
    assert bounds and all(low <= value <= high for low, value, high in bounds)
    assert (min(series["low"]), max(series["high"])) == (32.0, 640.0)


def test_timeline_is_a_trace_with_arrows(client: TestClient) -> None:
    answer = _get(client, "timeline", seconds=3600)
    events = answer["trace"]["traceEvents"]
    names = [each["name"] for each in events if each["ph"] == "X"]
    assert names.count("trainer.step") == 40 and names.count("trainer.hang") == 1
    assert sum(each["ph"] == "s" for each in events) >= 40 and answer["left_out"] == 0


def test_timeline_is_bounded_in_time_and_events(client: TestClient) -> None:
    short = _get(client, "timeline", seconds=0.001)["trace"]["traceEvents"]
    assert sorted(each["name"] for each in short if each["ph"] == "X" and each["cat"] == "message") == [
        "loader.die", "trainer.hang",
    ]  # fmt: skip
    few = _get(client, "timeline", seconds=3600, limit=100)
    assert few["left_out"] > 0
    assert sum(each["ph"] == "X" for each in few["trace"]["traceEvents"]) < 130


def _is_late(rank: int) -> None:
    ones = torch.ones(4)
    if rank == 0:
        dist.all_reduce(ones)
        return
    ranks = [each for each in programs() if _parent(each.pid) == os.getppid()]

    def found() -> list[CollectiveInFlight]:
        answer = states.in_flight(program_recording.read_programs(ranks, None))
        return [each for each in answer.in_flight if each.operation == "all_reduce"]

    [one] = wait_until(found)
    assert (one.entered_count, one.missing_count, one.bytes) == (1, 1, 16)
    dist.all_reduce(ones)
    assert found() == []


def _parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def test_collective_in_flight_names_ranks_that_are_missing(pool: Callable[[int], RankPool]) -> None:
    pool(3)  # ranks whose default group has the same name
    run_ranks(_is_late, 2)


def test_collectives_of_an_idle_program_are_none(client: TestClient) -> None:
    assert _get(client, "collectives") == {"in_flight": [], "left_out": 0}


GETS = [route for route in ROUTES if route.method == "GET"]
OF_PROGRAMS = [route for route in GETS if "program" in route.parameters.__struct_fields__]


@pytest.mark.parametrize("route", GETS, ids=lambda route: route.path)
def test_unknown_parameter_is_refused(route: Any, client: TestClient) -> None:
    answer = client.get(f"/api/v1{route.path}", params={"wrong": "1"})
    assert answer.status_code == 400 and "wrong" in answer.json()["error"]
    assert all(name in answer.json()["hint"] for name in route.parameters.__struct_fields__)


@pytest.mark.parametrize("route", OF_PROGRAMS, ids=lambda route: route.path)
def test_program_that_does_not_run_is_not_found(route: Any, client: TestClient, running: Program) -> None:
    answer = client.get(f"/api/v1{route.path}", params={"program": 1})
    assert answer.status_code == 404
    assert "no running program has the process 1" in answer.json()["error"]
    assert str(running.pid) in answer.json()["error"]


@pytest.mark.parametrize(
    "query", ["program=0", "program=x", "program=99999999999", "program=1&program=2", "program=1.5", "program=%00"]
)
def test_wrong_program_is_refused(query: str, client: TestClient) -> None:
    answer = client.get(f"/api/v1/tree?{query}")
    assert answer.status_code == 400 and answer.json()["error"]


def test_ended_program_is_not_found() -> None:
    with TestClient(application(Source(ThisMachine("no-such-program")), TOKEN), BASE) as client:
        answer = client.get("/api/v1/tree", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 404 and "no running program is 'no-such-program'" in answer.json()["error"]


def test_other_methods_and_paths_are_json_errors(client: TestClient) -> None:
    wrong_method, wrong_path = client.post("/api/v1/tree", json={}), client.get("/api/v1/nothing")
    assert (wrong_method.status_code, wrong_path.status_code) == (405, 404)
    for answer in (wrong_method, wrong_path):
        assert set(answer.json()) == {"error", "hint"}


def test_fault_of_the_dashboard_is_a_json_error(running: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(Source, "look", broken)
    with TestClient(application(Source(ThisMachine(None)), TOKEN), BASE, raise_server_exceptions=False) as client:
        answer = client.get("/api/v1/tree", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 500
    assert "KeyError" in answer.json()["error"]
    assert answer.headers["x-frame-options"] == "DENY"


def test_answer_that_takes_too_long_is_given_up(running: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(Source, "look", lambda _: release.wait(60))
    monkeypatch.setattr(server, "TIME_LIMIT_S", 0.2)
    try:
        with TestClient(application(Source(ThisMachine(None)), TOKEN), BASE) as client:
            answer = client.get("/api/v1/tree", headers={"Authorization": f"Bearer {TOKEN}"})
    finally:
        release.set()
    assert answer.status_code == 504 and "longer than 0.2 s" in answer.json()["error"]


def test_answer_that_is_too_large_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_ANSWER_BYTES", 100)
    answer = client.get("/api/v1/tree")
    assert answer.status_code == 400 and "more than" in answer.json()["error"]


def test_equal_looks_at_the_same_time_are_one(running: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "LOOK_AGE_S", 60.0)
    reader = Source(ThisMachine(str(running.pid)))
    looks = []
    look = reader.there.look
    monkeypatch.setattr(reader.there, "look", lambda: (looks.append(1), look())[1])
    threads = [threading.Thread(target=reader.look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(looks) == 1


def test_answers_stay_while_the_program_is_stopped(client: TestClient, running: Program) -> None:
    running.send_signal(signal.SIGSTOP)
    try:
        ranks = _ranks(client)
        assert ranks["gpus 1 of trainers"]["doing"] == "trainer.hang"
        assert _get(client, "logs")["lines"] and _query(client, "select 1").json()["rows"] == [[1]]
        [program] = _get(client, "stacks", rank="program training_program.py")["programs"]
        assert "stopped" in program["groups"][0]["text"] or "training_program.py" in program["groups"][0]["text"]
    finally:
        running.send_signal(signal.SIGCONT)


def test_answers_are_json_that_the_page_can_read(client: TestClient) -> None:
    for route in GETS:
        if route.path != "/process":
            json.loads(client.get(f"/api/v1{route.path}").content, parse_constant=pytest.fail)
