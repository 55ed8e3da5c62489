"""The image of deploy/k8s/Dockerfile: it is built, and its pods run hosts and the example's training."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.k8s.cluster import INSIDE, ROOT, Cluster
from tests.k8s.conftest import Place
from tests.k8s.image import built, refusal

pytestmark = [pytest.mark.slow, pytest.mark.k8s, pytest.mark.nightly]

BUILD_TIMEOUT_S = 1800
IMAGE = "registry.example/train:1"
# The class of the actor is sent with its code: the tests' modules are not in the image.
PROGRAM = """
import os, sys
import torch
from monarch_backend.actor import Actor, endpoint
from monarch_backend.job import KubernetesJob


class Where(Actor):
    @endpoint
    def read(self):
        import monarch_backend
        return os.getuid(), torch.ones(2).sum().item(), os.path.dirname(monarch_backend.__file__)


job = KubernetesJob(name="image", path=sys.argv[2]).add_mesh("trainers", 2, image=sys.argv[1])
try:
    job.apply(100)
    procs = job.state().trainers.spawn_procs({"gpus": 1})
    for found in procs.spawn("where", Where).read.call().get(60).values():
        print(*found)
    procs.stop().get(60)
finally:
    job.kill()
"""


@pytest.fixture(scope="module")
def image(kube: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if why := refusal():
        pytest.skip(f"no image: {why}")
    faulthandler.dump_traceback_later(BUILD_TIMEOUT_S, exit=True)  # in place of pytest's timeout for a test
    with built(tmp_path_factory.mktemp("image")) as made:
        plan = {"root": str(made.root), "user": made.user, "env": made.env}
        kube.tell_kubelet(f"image {IMAGE} {json.dumps(plan)}")
        yield IMAGE


def run_program(place: Place, *words: str) -> list[str]:
    """Run a Python program beside the pods, and return the lines of its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "KUBECONFIG": str(place.kubeconfig)}
    command = place.kube.where.command(INSIDE, sys.executable, *words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_pods_run_the_package_of_the_image_as_its_user(place: Place, image: str) -> None:
    program = place.folder / "program.py"
    program.write_text(PROGRAM)
    found = run_program(place, str(program), image, str(place.folder / "job.json"))
    assert found == [f"1000 2.0 /usr/local/lib/python3.{sys.version_info[1]}/dist-packages/monarch_backend"] * 2


def test_example_trains_on_pods_of_the_image(place: Place, image: str) -> None:
    example = str(ROOT / "examples/kubernetes_train.py")
    lines = run_program(place, example, "--image", image, "--pods", "2", "--steps", "6")
    assert [line.split(": loss")[0] for line in lines] == [f"step {step}" for step in range(1, 7)]
