"""`RayJob.resize` on a Ray cluster of this machine: added and removed hosts, their nodes, and nothing left in Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from monarch_backend.job import Job, JobError, RayJob
from tests.clients.programs import needs
from tests.clients.ray_clusters import Counter, RayCluster, daemons, groups, ranks, tethered_program
from tests.job.support import in_program
from tests.support.waiting import wait_until

pytestmark = needs("ray")

WAITS = "each host takes"


def free_cpus() -> float:
    import ray

    return float(ray.available_resources().get("CPU", 0))


def nodes() -> dict[str, str]:
    """Return the node of each actor of a job that runs, by the end of the actor's name, such as "trainers-0"."""
    from ray._private.state import actors

    running = actors(actor_state_name="ALIVE").values()
    return {
        each["Name"].split("-", 2)[2]: each["Address"]["NodeID"]
        for each in running
        if each["Name"].startswith("monarch-")
    }


def test_resize_keeps_the_other_hosts_and_gives_resources_back(
    job: Callable[..., RayJob], ray_cluster: RayCluster
) -> None:
    def program() -> None:
        before = daemons()
        mine = job({"trainers": 2})
        mine.apply()
        procs = mine.state(60).trainers.spawn_procs({"gpus": 1})
        actors = procs.spawn("counter", Counter)
        kept = [each.address for each in mine.status()]
        pids = actors.pid.call().get(60)
        mine.resize("trainers", 4, 60)
        assert ranks(mine) == [0, 1, 2, 3]
        assert len(daemons() - before) == 4
        assert [each.address for each in mine.status()][:2] == kept
        wait_until(lambda: free_cpus() == 0)
        mine.resize("trainers", 3, 60)
        assert ranks(mine) == [0, 1, 2]
        assert len(daemons() - before) == 3
        wait_until(lambda: free_cpus() == 1)
        assert actors.pid.call().get(60) == pids  # on hosts that were never ended
        procs.stop().get(60)
        mine.kill()
        wait_until(lambda: free_cpus() == 4)
        assert groups() == []
        assert daemons() <= before

    with ray_cluster.more_nodes(1):
        in_program(program, timeout=200)


def test_added_hosts_have_nodes_of_their_own_although_others_have_room(job: Callable[..., RayJob]) -> None:
    """Each node has room for two hosts. Ray places two groups on one node, where the strategy holds in each."""

    def program() -> str:
        mine = job({"trainers": 1}, resources_per_host={"CPU": 0.5})
        mine.apply()
        mine.resize("trainers", 3, 60)
        assert ranks(mine) == [0, 1, 2]
        assert len(set(nodes().values())) == 3
        with pytest.raises(JobError) as caught:
            mine.resize("trainers", 4, timeout=3)
        mine.resize("trainers", 3, 60)
        assert len(groups()) == 3
        return str(caught.value)

    text = in_program(program, timeout=120)
    assert "not all hosts run in time: trainers[3]: pending" in text
    assert WAITS in text and "with STRICT_SPREAD, and 3 nodes have" in text


def test_added_host_is_on_the_node_of_the_others_with_strict_pack(
    job: Callable[..., RayJob], ray_cluster: RayCluster
) -> None:
    def program() -> set[str]:
        mine = job({"trainers": 2}, strategy="STRICT_PACK")
        mine.apply()
        mine.resize("trainers", 3, 60)
        assert ranks(mine) == [0, 1, 2]
        return set(nodes().values())

    with ray_cluster.more_nodes(1, num_cpus=4) as more:
        assert in_program(program, timeout=120) == set(more)


def test_added_host_is_anywhere_with_pack(job: Callable[..., RayJob]) -> None:
    def program() -> list[int]:
        mine = job({"trainers": 1, "loaders": 1}, strategy="PACK")
        mine.apply()
        mine.resize("trainers", 2, 60)
        return ranks(mine)

    assert in_program(program, timeout=120) == [0, 1]


def test_host_takes_the_bundle_that_an_applied_one_has_left(job: Callable[..., RayJob]) -> None:
    """Ray gives back all bundles of a group or none, so an applied host leaves its bundle to the job."""

    def program() -> None:
        mine = job({"trainers": 3})
        mine.apply()
        mine.resize("trainers", 1, 60)
        assert ranks(mine) == [0]
        assert len(groups()) == 1 and free_cpus() == 0
        mine.resize("trainers", 3, 60)
        assert ranks(mine) == [0, 1, 2]
        assert len(groups()) == 1

    in_program(program, timeout=120)


def test_other_programs_see_resize_and_end_the_job(job: Callable[..., RayJob], tmp_path: Path) -> None:
    before = daemons()
    mine = job({"trainers": 1})
    in_program(mine.apply)
    mine.dump(tmp_path / "copy.json")
    in_program(lambda: Job.load(mine.path).resize("trainers", 3, 60))
    assert in_program(lambda: ranks(Job.load(mine.path))) == [0, 1, 2]

    def old_description() -> list[str]:
        with pytest.raises(JobError, match=r"described differently: resize it by Job.load\(.*\)"):
            mine.resize("trainers", 2)
        return [each.state for each in mine.status()]

    assert in_program(old_description) == ["up"]
    assert len(daemons() - before) == 3

    def kill() -> None:
        mine.kill()  # its description has one host
        assert groups() == []

    in_program(kill)
    wait_until(lambda: daemons() <= before)


def test_tethered_job_is_resized_by_its_program_and_ends_with_it(job: Callable[..., RayJob]) -> None:
    before = daemons()
    mine = job({"trainers": 1}, tether=True)

    def other() -> str:
        other = Job.load(mine.path)
        with pytest.raises(JobError) as caught:
            other.resize("trainers", 4, 60)
        other.resize("trainers", 2, 60)
        return str(caught.value)

    with tethered_program(mine, 1, resized_to=3) as process:
        assert len(daemons() - before) == 3
        assert "is tethered: only the program that has applied it adds hosts" in in_program(other)
        assert len(daemons() - before) == 2
        process.kill()
    wait_until(lambda: daemons() <= before)
    in_program(wait_for_no_groups, mine)


def wait_for_no_groups(job: RayJob) -> None:
    job._ray()
    wait_until(lambda: groups() == [])


def test_added_host_of_a_lost_node_starts_on_another_one(job: Callable[..., RayJob], ray_cluster: RayCluster) -> None:
    mine = job({"trainers": 1}, resources_per_host={"slot": 1})

    def lose() -> None:
        mine.apply()
        mine.resize("trainers", 2, 60)
        ray_cluster.lose_node(nodes()["trainers-1"])
        wait_until(lambda: "its node was lost" in mine.status()[1].reason)
        assert mine.status()[0].state == "up"

    with ray_cluster.more_nodes(2, resources={"slot": 1}):
        in_program(lose, timeout=120)
        with ray_cluster.more_nodes(1, resources={"slot": 1}):
            assert in_program(lambda: ranks(Job.load(mine.path)), timeout=120) == [0, 1]


def test_host_that_ray_moves_to_the_node_of_an_added_one_is_placed_anew(
    job: Callable[..., RayJob], ray_cluster: RayCluster
) -> None:
    """Only the node of the added host has room for the applied one when its node is lost. Ray uses it."""
    mine = job({"trainers": 1}, resources_per_host={"slot": 1})

    def lose() -> list[str]:
        mine.apply()
        mine.resize("trainers", 2, 60)
        kept = mine.status()[1].address
        ray_cluster.lose_node(nodes()["trainers-0"])
        wait_until(lambda: "on the node of trainers[1]" in mine.status()[0].reason)
        assert mine.status()[1].address == kept
        return [kept]

    def use() -> tuple[list[int], str, int]:
        resized = Job.load(mine.path)
        found = ranks(resized)
        return found, resized.status()[1].address, len(set(nodes().values()))

    with ray_cluster.more_nodes(2, resources={"slot": 2}):
        [kept] = in_program(lose, timeout=120)
        with ray_cluster.more_nodes(1, resources={"slot": 2}):
            assert in_program(use, timeout=120) == ([0, 1], kept, 2)


def test_added_host_follows_the_others_to_another_node_with_strict_pack(
    job: Callable[..., RayJob], ray_cluster: RayCluster
) -> None:
    mine = job({"trainers": 1}, resources_per_host={"slot": 1}, strategy="STRICT_PACK")

    def lose() -> None:
        mine.apply()
        mine.resize("trainers", 2, 60)
        [node] = set(nodes().values())
        ray_cluster.lose_node(node)
        wait_until(lambda: "Ray has moved the other hosts" in mine.status()[1].reason)

    def use() -> tuple[list[int], int]:
        return ranks(Job.load(mine.path)), len(set(nodes().values()))

    with ray_cluster.more_nodes(2, resources={"slot": 2}):
        in_program(lose, timeout=120)
        assert in_program(use, timeout=120) == ([0, 1], 1)


def test_shrinking_ends_a_host_that_waits_for_a_node(job: Callable[..., RayJob], ray_cluster: RayCluster) -> None:
    def program() -> list[int]:
        mine = job({"trainers": 2}, resources_per_host={"slot": 1})
        mine.apply()
        mine.resize("trainers", 3, 60)
        ray_cluster.lose_node(nodes()["trainers-2"])
        wait_until(lambda: "its node was lost" in mine.status()[2].reason)
        mine.resize("trainers", 2, 60)
        return ranks(mine)

    with ray_cluster.more_nodes(3, resources={"slot": 1}):
        assert in_program(program, timeout=120) == [0, 1]


def test_kill_ends_a_job_that_waits_for_added_hosts(job: Callable[..., RayJob]) -> None:
    def program() -> str:
        mine = job({"trainers": 1})
        mine.apply()
        errors: list[str] = []

        def resize() -> None:
            try:
                mine.resize("trainers", 9, 60)
            except JobError as error:
                errors.append(str(error))

        waiting = threading.Thread(target=resize)
        waiting.start()
        wait_until(lambda: len(groups()) == 9)
        Job.load(mine.path).kill()
        waiting.join(60)
        assert not waiting.is_alive()
        assert groups() == []
        return "".join(errors)

    error = in_program(program, timeout=120)
    assert "was ended while this program waited for its hosts" in error or "gone" in error  # the file, or the hosts


def test_hosts_that_a_program_has_not_asked_for_are_asked_for_by_the_next_one(
    job: Callable[..., RayJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first program ends after it has written the new size to the job's file."""

    def program() -> None:
        mine = job({"trainers": 1})
        mine.apply()
        with monkeypatch.context() as patch:
            patch.setattr(RayJob, "_start_absent", lambda *_: None)
            patch.setattr(RayJob, "_place_anew", lambda *_: None)
            with pytest.raises(JobError, match=r"trainers\[1\]: pending \(it has no placement group yet"):
                mine.resize("trainers", 2, timeout=1)
        assert ranks(Job.load(mine.path)) == [0, 1]

    in_program(program, timeout=120)


def test_ray_without_label_selectors_adds_hosts_only_with_other_strategies(
    job: Callable[..., RayJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    def program() -> str:
        import ray

        mine = job({"trainers": 1})
        mine.apply()
        monkeypatch.setattr(ray.util, "placement_group", lambda bundles, strategy, name, lifetime: None)
        with pytest.raises(JobError) as caught:
            mine.resize("trainers", 2, 60)
        assert mine.can_run(Job.load(mine.path))
        return str(caught.value)

    assert "cannot keep STRICT_SPREAD for a host that is added: it needs Ray 2.49" in in_program(program, timeout=120)
