"""Loss of processes, agents, daemons and hosts: which errors are raised, when, and what continues."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.hosts.support import Daemon, World, descendants, until_gone

QUICKLY = 2.0
"""Seconds after a controller's death within which its processes end (promise 8 of docs/architecture.md)."""

SILENCE = 1.0
"""Seconds without a heartbeat until a host is lost, as in controller_programs.py."""

pytestmark = pytest.mark.usefixtures("whole")


@pytest.fixture
def whole(world: World) -> Iterator[None]:
    """Restore the network after the test."""
    yield
    assert world.where is not None
    world.where.cables.heal_all()


def lose(world: World, daemons: list[Daemon], how: str, most: float) -> None:
    assert world.where is not None
    addresses = [daemon.address for daemon in daemons]
    world.run("lost_host", addresses, how, most, world.where.cables.pids, [daemon.pid for daemon in daemons])


def test_killed_worker_is_reported(world: World, workers: list[str]) -> None:
    world.run("worker_killed", *workers[:2])


@pytest.mark.parametrize("how", [pytest.param("agent killed", marks=pytest.mark.slow), "cut off"])
def test_lost_host_is_reported(how: str, world: World, daemons: list[Daemon]) -> None:
    lose(world, daemons[:2], how, 3 * SILENCE)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["agent stopped", "cut there", "cut back", "cut from its controller", "unplugged"])
def test_host_lost_in_other_ways_is_reported(how: str, world: World, daemons: list[Daemon]) -> None:
    lose(world, daemons[:2], how, 3 * SILENCE)


@pytest.mark.slow
def test_killed_daemon_loses_its_host(world: World, daemons: list[Daemon]) -> None:
    with world.daemon(2) as victim:
        lose(world, [daemons[0], victim], "daemon killed", 3 * SILENCE)


@pytest.mark.slow
def test_stopped_daemon_fails_new_attachments_only(world: World, daemons: list[Daemon]) -> None:
    with world.daemon(2) as stopped:
        world.run("daemon_stopped", [daemons[0].address, stopped.address], stopped.pid)


@pytest.mark.slow
def test_lost_and_reordered_packets_change_no_message(world: World, daemons: list[Daemon]) -> None:
    assert world.where is not None
    with world.where.lossy(2, loss=0.02, reorder=0.1) as counts:
        addresses = [daemon.address for daemon in daemons[:2]]
        world.run("breaks", addresses, world.where.cables.pids, "nothing", 2)
    print("measured frames sent, lost, reordered:", *counts)
    assert counts[1] > 10 and counts[2] > 10, counts


@pytest.mark.parametrize("how", ["stop", pytest.param("kill", marks=pytest.mark.slow)])
def test_stop_does_not_wait_for_the_reason_of_a_lost_host(how: str, world: World, workers: list[str]) -> None:
    world.run("stopped_after_loss", workers[:2], how)


def test_killed_gateway_of_the_controller_is_reported(world: World, workers: list[str]) -> None:
    run = world.run("gateway_killed", *workers[:2])
    assert "the gateway of this host has ended" in run.out


@pytest.mark.slow
def test_link_cut_between_two_hosts(world: World, daemons: list[Daemon]) -> None:
    assert world.where is not None
    world.run("cut_between", [daemon.address for daemon in daemons[:2]], world.where.cables.pids)


@pytest.mark.slow
def test_hosts_that_only_one_host_reaches(world: World, workers: list[str]) -> None:
    assert world.where is not None
    with world.daemon(1, "--workers", ",".join(workers[1:])) as gateway:
        world.run("through_another", gateway.address, workers[1:], world.where.cables.pids)


@pytest.mark.slow
def test_link_cut_between_two_hosts_before_their_first_contact(world: World, daemons: list[Daemon]) -> None:
    assert world.where is not None
    world.run("cut_before_they_meet", [daemon.address for daemon in daemons[:2]], world.where.cables.pids)


def test_ranks_move_to_a_remaining_host(world: World, daemons: list[Daemon]) -> None:
    world.run("spare", [daemon.address for daemon in daemons[:2]], [daemon.pid for daemon in daemons])


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        ("one_for_one", "found"),
        ("all", "found"),
        ("one_for_one", "none"),
        ("one_for_one", "stop"),
        ("one_for_one", "end"),
    ],
)
def test_ranks_of_a_lost_host_wait_for_its_successor(
    strategy: str, how: str, world: World, daemons: list[Daemon]
) -> None:
    world.run("successor", [daemon.address for daemon in daemons], strategy, how)


def test_successors_of_all_lost_hosts_are_searched_at_once(world: World, daemons: list[Daemon]) -> None:
    world.run("successors", [daemon.address for daemon in daemons])


def test_host_is_attached_while_another_thread_waits_for_a_silent_one(world: World, workers: list[str]) -> None:
    world.run("beside_silent", workers)


@pytest.mark.parametrize("how", [pytest.param("killed"), pytest.param("cut off", marks=pytest.mark.slow)])
def test_lost_controller_ends_its_processes(how: str, world: World, daemons: list[Daemon]) -> None:
    """All processes that the controller started end on every host, and the daemons serve the next controller."""
    assert world.where is not None
    addresses = [daemon.address for daemon in daemons]
    run = world.start("controller", *addresses)
    try:
        run.read_until("pids ")
        run.read_until("\n")
        pids = [int(word) for word in run.out.split("pids ")[1].split("\n")[0].split()]
        if how == "killed":
            os.kill(run.pid, signal.SIGKILL)
            print("measured end of everything after kill -9 of its controller:", until_gone(pids, QUICKLY))
        else:
            world.where.cables.cut_off(0)
            print("measured end of what a cut-off controller had elsewhere:", until_gone(pids[:-1], 3 * SILENCE))
            world.where.cables.heal(0)
        run = world.controller().finish()
        assert run.returncode == (-signal.SIGKILL if how == "killed" else 1), run.err
        if how != "killed":
            assert "is lost" in run.err
        until_gone(pids, QUICKLY)
    finally:
        world.controller().drop()
    world.run("values", *addresses)
    for daemon in daemons:
        until_gone([pid for pid in descendants(daemon.pid) if pid in pids], 0.0)


@pytest.mark.parametrize(
    ("how", "times"),
    [
        ("reset", 3),
        pytest.param("reset", 40, marks=pytest.mark.slow),
        pytest.param("pause", 10, marks=pytest.mark.slow),
        pytest.param("one long pause", 5, marks=pytest.mark.slow),
    ],
)
def test_broken_connections_lose_no_message(how: str, times: int, world: World, workers: list[str]) -> None:
    """No message is lost or repeated."""
    assert world.where is not None
    world.run("breaks", workers[:2], world.where.cables.pids, how, times)
