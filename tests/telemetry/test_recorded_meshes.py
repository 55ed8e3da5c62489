"""The mesh of an actor: of a program, of the hosts of a job, and among several of one name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from monarch_backend._mesh.extent import Extent
from monarch_backend._mesh.shape import Shape
from monarch_backend._telemetry import recorder, sql
from monarch_backend._telemetry.kinds import Kind
from monarch_backend._telemetry.program_recording import Recording
from tests.telemetry.recordings import add_program, constructed, event_of, mesh_event

CONTROLLER = 7
SIZES = {"hosts": 2, "gpus": 1}
MESHES = [mesh_event("workers", SIZES), mesh_event("trainer", SIZES, "workers")]
OF_ACTORS = """
    select processes.host, full_name, class, parent from actors join processes using (pid)
    left join (select m.id, m.class, p.given_name as parent from meshes m left join meshes p on p.id = m.parent_mesh_id)
    as of_actor on of_actor.id = mesh_id order by 1, 2
"""


def job_of_two_hosts() -> Recording:
    """Return what the program of a job and its two hosts have recorded: one mesh of actors on both."""
    made = Recording([], [], [], 0, 0)
    sent = [event_of(Kind.SENT, "trainer", "step", reference=5), event_of(Kind.SENT, "trainer", "log")]
    add_program(made, "", 10, {10: ("program train.py", 0, CONTROLLER, [*MESHES, *sent])})
    for rank, host in enumerate(("a", "b")):
        step = event_of(Kind.MESSAGE, "trainer", "step", reference=5, trace=CONTROLLER)
        label = f"hosts {rank} gpus 0 of workers"
        processes = {21 + rank: (label, 20 + rank, 100 + rank, [constructed("trainer"), step])}
        add_program(made, host, 20 + rank, processes)
    return made


def test_actors_of_a_job_are_of_the_mesh_that_its_program_has_made() -> None:
    job = job_of_two_hosts()
    trainer = ("trainer[]", "Python<Trainer>", "workers")
    assert sql.answer(OF_ACTORS, job).rows == [("a", *trainer), ("b", *trainer)]
    meshes = "select full_name, actors_seen, program_pid from meshes order by id"
    assert sql.answer(meshes, job).rows == [("workers/trainer", 2, 10), ("workers", None, 10)]


def test_messages_to_actors_of_a_job_name_their_mesh() -> None:
    query = "select endpoint, handled, class from sent_messages join meshes on meshes.id = actor_mesh_id order by 1"
    assert sql.answer(query, job_of_two_hosts()).rows == [
        ("log", None, "Python<Trainer>"), ("step", 2, "Python<Trainer>"),
    ]  # fmt: skip


def test_actors_whose_program_was_not_read_have_a_mesh_without_class() -> None:
    job = job_of_two_hosts()
    job.processes = [each for each in job.processes if each.host]
    assert sql.answer(OF_ACTORS, job).rows == [(host, "trainer[]", None, None) for host in ("a", "b")]
    assert sql.answer("select full_name, actors_seen from meshes", job).rows == [("workers/trainer", 1)] * 2


def test_meshes_of_one_name_are_told_apart_by_their_makers() -> None:
    made = Recording([], [], [], 0, 0)
    for pid in (10, 20):  # each with a nested mesh, and one with the same name as the other's
        nested = [mesh_event("nested", {"n": 1}), mesh_event("helper", {"n": 1}, "nested", class_of=str(pid))]
        add_program(
            made, "", pid, {
                pid: (f"program {pid}", 0, pid, MESHES),
                pid + 1: ("gpus 0 of workers", pid, pid + 1, [constructed("trainer"), *nested]),
                pid + 2: ("n 0 of nested", pid + 1, pid + 2, [constructed("helper")]),
            },
        )  # fmt: skip
    query = """
        select actors.pid, of_actor.program_pid, of_actor.full_name, actors_seen
        from actors join meshes of_actor on of_actor.id = mesh_id order by 1
    """
    assert sql.answer(query, made).rows == [
        (11, 10, "workers/trainer", 1), (12, 10, "nested/helper", 1),
        (21, 20, "workers/trainer", 1), (22, 20, "nested/helper", 1),
    ]  # fmt: skip


def test_mesh_of_a_host_is_that_of_the_program_that_calls_it() -> None:
    job = job_of_two_hosts()
    add_program(job, "", 90, {90: ("program other.py", 0, 90, MESHES)})
    query = "select distinct program_pid from actors join meshes on meshes.id = mesh_id"
    assert sql.answer(query, job).rows == [(10,)]


def test_mesh_records_which_processes_its_slice_has(monkeypatch: pytest.MonkeyPatch) -> None:
    details = list[dict[str, Any]]()
    monkeypatch.setattr(recorder, "is_recording", lambda: True)
    monkeypatch.setattr(recorder, "event", lambda *words, **_: details.append(json.loads(words[2])))
    whole = Shape.of(Extent.of({"hosts": 2, "gpus": 4}))
    for shape in (whole, whole.slice(gpus=slice(1, None, 2)), Shape.from_ranks(Extent.of({"gpus": 3}), [0, 1, 5])):
        recorder.mesh("trainer", "Trainer", shape.extent, procs="workers", shape=shape)
    assert [each.get("view", "whole") for each in details] == ["whole", [1, [4, 2]], None]


REGIONS = [
    ({}, '{"labels": ["hosts", "gpus"], "slice": {"offset": 0, "sizes": [2, 1], "strides": [1, 1]}}'),
    (
        {"view": [3, [4, 2]]},
        '{"labels": ["hosts", "gpus"], "slice": {"offset": 3, "sizes": [2, 1], "strides": [4, 2]}}',
    ),
    ({"view": None}, None),  # ranks that are no slice
]


@pytest.mark.parametrize(("about", "region"), REGIONS)
def test_mesh_on_a_slice_names_the_selected_ranks(about: dict[str, Any], region: str | None) -> None:
    made = Recording([], [], [], 0, 0)
    events = [mesh_event("workers", SIZES), mesh_event("trainer", SIZES, "workers", **about)]
    add_program(made, "", 10, {10: ("program train.py", 0, CONTROLLER, events)})
    rows = sql.answer("select parent_view_json from meshes where parent_mesh_id is not null", made).rows
    assert rows == [(region,)]
