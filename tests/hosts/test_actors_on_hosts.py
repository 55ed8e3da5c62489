"""Actors on other hosts behave as on one host, in network namespaces and on the loopback interface."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.actor.script_runner import WarmInterpreter
from tests.hosts.support import World, any_address6
from tests.support.hosts import hosts, refusal

BASICS = ["values", "payloads", "ports_and_references", "deadlock"]


SLOW = ["order", "exceptions", "streams"]  # programs whose code paths are the same on one host


@pytest.mark.parametrize("program", [*BASICS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_actors_run_on_hosts(program: str, anywhere: tuple[World, list[str]]) -> None:
    world, workers = anywhere
    world.run(program, *workers)


@pytest.mark.slow
@pytest.mark.parametrize("program", ["values", "ports_and_references"])
def test_actors_run_on_loopback(program: str, loopback: World, loopback_workers: list[str]) -> None:
    loopback.run(program, *loopback_workers)


def test_output_of_processes_is_shown_with_host_and_rank(anywhere: tuple[World, list[str]]) -> None:
    world, workers = anywhere
    run = world.run("output", *workers)
    assert "[hosts 0 gpus 1] said this" in run.out
    assert "logged that" in run.err and "hosts 1 gpus 0" in run.err


def test_timeout_has_the_lines_of_ranks_on_other_hosts(anywhere: tuple[World, list[str]]) -> None:
    world, workers = anywhere
    world.run("places", *workers)


@pytest.mark.slow
def test_timeout_has_the_late_rank_of_a_collective_on_another_host(anywhere: tuple[World, list[str]]) -> None:
    world, workers = anywhere
    world.run("late_rank_there", *workers)


@pytest.mark.slow
@pytest.mark.parametrize("tls", ["0", "1"])
def test_ipv6_with_tls_and_without(tls: str, world: World) -> None:
    env = {"MONARCH_TLS": tls}
    with world.daemon(1, env=env, address=any_address6(1)) as daemon:
        assert daemon.address.startswith("tcp://[fd00:198:18::11]:")
        world.run("values", daemon.address, env=env)


@contextlib.contextmanager
def _ending_well(controllers: list[WarmInterpreter]) -> Iterator[None]:
    """Check that the program on each controller exits with 0."""
    try:
        yield
        for controller in reversed(controllers):
            run = controller.finish()
            assert run.returncode == 0, run.err
    finally:
        for controller in controllers:
            controller.drop()


@pytest.mark.slow
def test_two_controllers_share_hosts(world: World, two_controllers: list[WarmInterpreter], workers: list[str]) -> None:
    """Both controllers have one secret. The work and the end of one do not affect the other."""
    with _ending_well(two_controllers):
        world.start("order", *workers)
        world.start("values", *workers, number=1)


@pytest.mark.slow
def test_controllers_of_two_secrets(
    world: World, two_controllers: list[WarmInterpreter], workers: list[str], tmp_path: Path
) -> None:
    """One daemon serves both jobs. A daemon that knows one secret is refused by the other job."""
    both = tmp_path / "both"
    secrets = [world.secret.read_text().strip(), os.urandom(32).hex()]
    for path, text in ((both, "\n".join(secrets)), (tmp_path / "other", secrets[1])):
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
            file.write(text)
    other = {"MONARCH_SECRET_FILE": str(tmp_path / "other")}
    with world.daemon(1, env={"MONARCH_SECRET_FILE": str(both)}) as host:
        with _ending_well(two_controllers):
            world.start("values", host.address)
            world.start("hello", host.address, number=1, env=other)
        world.start("hello", workers[1], env=other)
        try:
            run = world.controller().finish()
            assert run.returncode == 1 and "secret" in run.err, run.err
        finally:
            world.controller().drop()


def test_one_torch_world_over_several_hosts(anywhere: tuple[World, list[str]]) -> None:
    world, workers = anywhere
    world.run("groups", *workers[:2])


def test_workspace_is_copied_to_hosts(anywhere: tuple[World, list[str]], tmp_path: Path) -> None:
    world, workers = anywhere
    world.run("workspace", str(tmp_path), *workers[:2])


@pytest.mark.slow
def test_process_group_over_hosts_named_loopback_works(tmp_path: Path) -> None:
    # Each host has its own name at 127.0.1.1, as on Debian; the daemons are found by name.
    if why := refusal():
        pytest.skip(why)
    with hosts(3, own_name="127.0.1.1") as named, World(named, tmp_path) as world:
        daemons = [world.daemon(index) for index in (1, 2)]
        ports = [daemon.address.rsplit(":", 1)[1] for daemon in daemons]
        world.run("groups", *(f"{named.name(index)}:{port}" for index, port in zip((1, 2), ports, strict=True)))
