"""Time of a KubernetesJob with many pods: until all listen, are attached, run processes, and have ended.

    python benchmarks/kubernetes_pods.py --pods 10 100

The control plane is real, and the pods are processes of this machine (tests/k8s/cluster.py), so the time of their start
is the processor's. It needs root and `tools/k8s_control_plane.sh --prepare`. `floor` is the start of as many daemons as
plain processes of this machine. A pod has no torch, and takes about 90 MB of memory. The last three columns are the
messages that the program receives while it attaches the pods, starts a process on each, and calls an actor on each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from monarch_backend._mesh.runtime_protocol import program
from monarch_backend.job import KubernetesJob
from tests.k8s.cluster import cluster, refusal
from tests.k8s.host_name import HostName

LEAN = {"MONARCH_PRELOAD_TORCH": "0", "MONARCH_PREFAULT_BYTES": "0"}
"""Environment of pods without torch, and without memory for large messages."""
PHASES = ("attach", "start", "call")
"""What the program does with the pods, while the messages that it receives are counted."""


class Received:
    """Number of the messages that this program has received."""

    def __init__(self) -> None:
        self.count = 0
        router: Any = program().router  # type: ignore[attr-defined]
        handle = router.handle

        def counting(events: Sequence[Any]) -> None:
            self.count += len(events)
            handle(events)

        router.handle = counting

    def since_last(self) -> int:
        found, self.count = self.count, 0
        return found


def measure(kubeconfig: str, folder: str, pods: int, attached: int) -> dict[str, float]:
    """Return seconds until the job is ready, attached and ended, and received messages of each phase."""
    job = KubernetesJob(name=f"scale{pods}", path=f"{folder}/scale{pods}.json", kubeconfig=kubeconfig)
    job.add_mesh("workers", pods, image="testbed/monarch:1", grace_period=5, env=LEAN)
    begun, found = time.perf_counter(), {}
    try:
        job.apply(timeout=900)
        found["ready"] = time.perf_counter() - begun
        if pods <= attached:
            begun, received = time.perf_counter(), Received()
            mesh = job.state(timeout=600).workers
            assert mesh.size("hosts") == pods
            found["attached"] = time.perf_counter() - begun
            found["attach"] = received.since_last()
            names = mesh.spawn_procs({"gpus": 1}).spawn("names", HostName)
            names.initialized.get(600)
            found["start"] = received.since_last()
            assert len(set(names.read.call().get(600).values())) == pods
            found["call"] = received.since_last()
    finally:
        begun = time.perf_counter()
        job.kill()
        found["ended"] = time.perf_counter() - begun
    return found


def floor(pods: int) -> float:
    """Return the seconds until as many daemons listen as plain processes."""
    command = [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0"]
    begun = time.perf_counter()
    daemons = [subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **LEAN}) for _ in range(pods)]
    try:
        for each in daemons:
            assert each.stdout is not None
            assert each.stdout.readline()
        return time.perf_counter() - begun
    finally:
        for each in daemons:
            each.terminate()
        for each in daemons:
            each.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pods", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--attach", type=int, default=30, metavar="PODS", help="largest job that is attached")
    args = parser.parse_args()
    if why := refusal():
        sys.exit(f"no Kubernetes cluster: {why}")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    head = f"{'pods':>5} {'ready s':>8} {'floor s':>8} {'ratio':>6} {'attached s':>11} {'ended s':>8}"
    print(f"{head} {'  '.join(f'messages: {each}' for each in PHASES)}")
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), {"n0": {}, "n1": {}}) as made:
        for pods in args.pods:
            found = made.run(measure, str(made.kubeconfig()), folder, pods, args.attach, timeout=1500)
            least = floor(pods)
            attached = f"{found['attached']:11.1f}" if "attached" in found else f"{'-':>11}"
            print(
                f"{pods:5} {found['ready']:8.1f} {least:8.1f} {found['ready'] / least:6.2f} {attached} "
                f"{found['ended']:8.1f} "
                + " ".join(f"{found.get(each, '-'):>{len('messages: ') + len(each) + 1}}" for each in PHASES),
                flush=True,
            )


if __name__ == "__main__":
    main()
