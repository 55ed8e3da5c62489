"""A failing `bootstrap=` raises where the program waits, with its traceback. The program does not end."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest

import monarch_backend.actor as ma
from monarch_backend._actor import supervision as supervision
from monarch_backend.actor import Actor, MeshFailure, ProcMesh, Restart, SupervisionError, endpoint, this_host
from tests.actor.actors import Sync
from tests.actor.support import PATIENCE, Faults


class MissingDeviceError(RuntimeError):
    """Raised by the bootstrap functions of these tests."""


def raises() -> None:
    raise MissingDeviceError("no accelerator here")


def exits() -> None:
    sys.exit("no driver")


def ends() -> None:
    os._exit(7)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class _FailsToUnpickle:
    def __reduce__(self) -> Any:
        return raises, ()

    def __call__(self) -> None:
        return


FAILING: dict[str, tuple[Callable[[], object], str, str]] = {
    "raises": (raises, "its bootstrap failed: MissingDeviceError: no accelerator here", "in raises"),
    "exits": (exits, "its bootstrap failed: SystemExit: no driver", "in exits"),
    "unpickling": (_FailsToUnpickle(), "its bootstrap failed: MissingDeviceError: no accelerator here", "in raises"),
    "ends": (ends, "exited with status 7", ""),
    "is killed": (is_killed, "killed by signal 9 (SIGKILL)", ""),
}


@pytest.fixture
def default_hook(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Record the failures that would end the program."""
    told = Faults()
    monkeypatch.setattr(supervision, "end_program", told)
    monkeypatch.setattr(ma, "unhandled_fault_hook", told)
    return told


def in_words(error: BaseException | None) -> str:
    assert error is not None
    return str(error)


@pytest.mark.parametrize("kind", FAILING)
def test_failing_bootstrap_raises_where_program_waits(
    kind: str, default_hook: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    bootstrap, what, trace = FAILING[kind]
    with caplog.at_level(logging.ERROR, "monarch_backend"):
        procs = this_host().spawn_procs({"gpus": 2}, bootstrap=bootstrap, name="barren")
        early = procs.spawn("early", Sync)
        first_call = early.slice(gpus=0).echo.call_one(1)
        errors = [procs.initialized.exception(PATIENCE), early.initialized.exception(PATIENCE)]
        calls = [first_call.exception(PATIENCE), early.echo.call(2).exception(PATIENCE)]
        late = procs.spawn("late", Sync)
        errors += [procs.initialized.exception(PATIENCE), late.initialized.exception(PATIENCE)]
        calls.append(late.slice(gpus=1).echo.call_one(3).exception(PATIENCE))
    procs.stop().get(PATIENCE)
    assert all(isinstance(error, MeshFailure) for error in errors)
    assert all(isinstance(error, SupervisionError) and error.delivery == "not sent" for error in calls)
    for error in [*errors, *calls]:
        text = in_words(error)
        assert what in text
        assert trace in text
        assert ("Traceback (most recent call last)" in text) == bool(trace)
        if kind == "raises":
            assert isinstance(error.__cause__, MissingDeviceError)  # type: ignore[union-attr]
    default_hook.none()
    lines = [line for line in caplog.messages if "did not start" in line]
    assert len(lines) == 1, "one line for the mesh, since nothing may wait for it"
    assert re.match(rf"gpus [01] of barren \(pid \d+\) did not start: {re.escape(what)}", lines[0])


def test_failing_bootstrap_reaches_hook_of_program(faults: Faults) -> None:
    with this_host().spawn_procs({"gpus": 1}, bootstrap=raises) as procs:
        failure = faults.next()
        assert isinstance(procs.initialized.exception(PATIENCE), MeshFailure)
    assert failure.deaths[0].at_start and failure.deaths[0].returncode == 1
    assert isinstance(failure.__cause__, MissingDeviceError)
    assert failure.report().count("in raises") == 1


def test_failing_bootstrap_of_one_rank_keeps_mesh_from_being_initialized(default_hook: Faults) -> None:
    marker = f"MONARCH_TEST_{os.getpid()}"

    def fail_once() -> None:
        """Fail in one process only: the first one that creates this file in shared memory."""
        try:
            os.close(os.open(f"/dev/shm/{marker}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        raises()

    try:
        with this_host().spawn_procs({"gpus": 3}, bootstrap=fail_once) as procs:
            assert "no accelerator" in in_words(procs.initialized.exception(PATIENCE))
            actors = procs.spawn("actors", Sync)
            values = list(actors.echo.stream(1))
            assert sorted(value.exception(PATIENCE) is None for value in values) == [False, True, True]
    finally:
        os.unlink(f"/dev/shm/{marker}")
    default_hook.none()


def test_bootstrap_that_fails_after_a_restart_is_a_failure_of_the_mesh(
    faults: Faults, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The mesh has started before, so its owner gets the failure and ``initialized`` does not."""
    flag = tmp_path / "fails"

    def bootstrap() -> None:
        if flag.exists():
            raises()

    policy = Restart(max_restarts=2, backoff=0.0)
    with this_host().spawn_procs({"gpus": 1}, bootstrap=bootstrap, restart=policy, name="once") as procs:
        actor = procs.spawn("actor", Sync)
        pid = actor.pid.call_one().get(PATIENCE)
        flag.touch()
        caplog.set_level(logging.INFO, "monarch_backend")
        os.kill(pid, signal.SIGKILL)
        failure = faults.next()
    assert "its bootstrap failed: MissingDeviceError: no accelerator here; 2 restarts were used up" in str(failure)
    assert [line.partition("; ")[2][:14] for line in caplog.messages if "; restart" in line] == [
        "restart 1 of 2",
        "restart 2 of 2",
    ]


def test_bootstrap_that_succeeds_at_the_second_start_initializes_the_mesh(faults: Faults, tmp_path: Any) -> None:
    flag = tmp_path / "tried"

    def bootstrap() -> None:
        if not flag.exists():
            flag.touch()
            raises()

    policy = Restart(max_restarts=2, backoff=0.0)
    with this_host().spawn_procs({"gpus": 1}, bootstrap=bootstrap, restart=policy) as procs:
        actor = procs.spawn("actor", Sync)
        procs.initialized.get(PATIENCE)
        assert actor.echo.call_one(1).get(PATIENCE) == 1


class Spawns(Actor):
    """Spawns processes whose bootstrap fails, and waits for them."""

    @endpoint
    def try_it(self) -> str:
        procs: ProcMesh = this_host().spawn_procs({"gpus": 1}, bootstrap=raises)
        try:
            procs.initialized.get(PATIENCE)
        except MeshFailure as failure:
            return str(failure)
        finally:
            procs.stop().get(PATIENCE)
        return "initialized"

    @endpoint
    def echo(self, value: Any) -> Any:
        return value


def test_failing_bootstrap_of_an_actors_processes_raises_where_it_waits(default_hook: Faults) -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        actor = procs.spawn("spawns", Spawns)
        text = actor.try_it.call_one().get(PATIENCE)
        assert "MissingDeviceError: no accelerator here" in text and "in raises" in text
        assert actor.echo.call_one("it lives").get(PATIENCE) == "it lives"
    default_hook.none()
