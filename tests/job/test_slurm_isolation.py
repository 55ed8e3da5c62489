"""Strangers in the network of a real cluster, other users of it, and two jobs of one user at once."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monarch_backend._job import state_file
from monarch_backend.job import JobError, SlurmJob
from tests.job.support import Where, in_program
from tests.support.slurm_cluster import SlurmCluster
from tests.support.strangers import Stranger, ask_as_stranger, check_stranger

pytestmark = pytest.mark.slurm

UNPRIVILEGED = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def ask_on_node(cluster: SlurmCluster, index: int, address: str, secret: bytes) -> Stranger:
    """Return what a program on a host of the cluster gets."""
    return ask_as_stranger(cluster.where.command(index), address, secret, cluster.environment)


def use_among_strangers(cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    """Run a job, and let a program on another node and another user try to use it meanwhile."""
    job = SlurmJob(name="mine", path=folder / "mine.json", options=["--nodelist=" + ",".join(cluster.nodes[:2])])
    job.add_mesh("trainers", 2)
    try:
        job.apply(timeout=60)
        file = state_file.read(job.path)
        assert file is not None
        number, secret = str(file.submitted["job"]), Path(file.secret_file)
        actors = job.state().trainers.spawn_procs({"gpus": 1}).spawn("where", Where)
        before = list(actors.machine.call().get(60).values())
        addresses = [each.address for each in job.status()]
        strangers = [ask_on_node(cluster, 3, each, bytes(32)) for each in addresses]
        tried = {}
        for name, words in {
            "secret": ["cat", str(secret)],
            "file": ["cat", str(job.path)],
            "folder": ["ls", str(job._folder)],
            "script": ["scontrol", "write", "batch_script", number, "-"],
            "scancel": ["scancel", number],
        }.items():
            done = subprocess.run([*UNPRIVILEGED, *words], capture_output=True, text=True, timeout=30)
            tried[name] = (done.returncode, done.stdout, done.stderr)
        after = list(actors.machine.call().get(60).values())
        states = [str(each) for each in job.status()]
        return {
            "strangers": strangers, "tried": tried, "machines": (before, after), "states": states,
            "secret": bytes.fromhex(secret.read_text()),
        }  # fmt: skip
    finally:
        job.kill()


def on_login_node(cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    cluster.where.enter(0)
    return use_among_strangers(cluster, folder)


def test_strangers_and_other_users_get_nothing_and_the_job_goes_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    folder = cluster.folder / tmp_path.name  # other users reach this one, and the folders of pytest not
    folder.mkdir(mode=0o755)
    found = in_program(on_login_node, cluster, folder, timeout=120)
    assert len(found["strangers"]) == 2
    for stranger in found["strangers"]:
        check_stranger(stranger, found["secret"])
    for name, (code, said, error) in found["tried"].items():
        assert not said, (name, said)
        assert code or name == "script", name  # scontrol has the error as text only
        assert re.search("denied|permission|invalid user id", error, re.IGNORECASE), (name, error)
    before, after = found["machines"]
    assert before == after == cluster.nodes[:2]
    assert found["states"] == ["trainers[0]: up", "trainers[1]: up"]


def use_two_jobs(cluster: SlurmCluster, folder: Path) -> dict[str, Any]:
    cluster.where.enter(0)
    jobs = [
        SlurmJob(name=name, path=folder / f"{name}.json", options=[f"--nodelist={cluster.nodes[0]}"])
        for name in ("one", "two")
    ]
    one, two = [job.add_mesh("trainers", 1) for job in jobs]
    try:
        for job in jobs:
            job.apply(wait=False)
        secrets, addresses, echoes = [], [], []
        for job in jobs:
            actors = job.state(timeout=60).trainers.spawn_procs({"gpus": 1}).spawn("where", Where)
            echoes.append((actors.machine.call_one().get(60), actors.echo.call_one(job.name).get(60)))
            file = state_file.read(job.path)
            assert file is not None
            secrets.append(bytes.fromhex(Path(file.secret_file).read_text()))
            addresses.append(file.hosts[0].address)
        crossed, _ = ask_on_node(cluster, 0, addresses[1], secrets[0])
        with pytest.raises(JobError) as described:
            SlurmJob(name="two", path=two.path).add_mesh("others", 1).apply()
        one.kill()
        left = cluster.jobs("%j")
        after = actors.echo.call_one("still").get(60), [str(each) for each in two.status()]
        return {
            "echoes": echoes, "crossed": crossed, "addresses": addresses, "described": str(described.value),
            "left": left, "after": after,
        }  # fmt: skip
    finally:
        for job in jobs:
            job.kill()


def test_two_jobs_of_one_user_on_one_node_do_not_mix(cluster: SlurmCluster, tmp_path: Path) -> None:
    found = in_program(use_two_jobs, cluster, tmp_path, timeout=120)
    assert found["echoes"] == [(cluster.nodes[0], "one"), (cluster.nodes[0], "two")]
    assert len(set(found["addresses"])) == 2
    assert "secret" in found["crossed"]
    assert "described differently" in found["described"]
    [left] = found["left"]
    assert left.startswith("monarch-two-")
    assert found["after"] == ("still", ["trainers[0]: up"])
