"""Time of a KubernetesJob with many pods: until all listen, until they are attached, and until they have ended.

    python benchmarks/kubernetes_pods.py --pods 10 100

The control plane is real, and the pods are processes of this machine (tests/k8s/cluster.py), so the time of their start
is the processor's. It needs root and `tools/k8s_control_plane.sh --prepare`. `floor` is the start of as many daemons as
plain processes of this machine. An attached pod takes about 200 MB of memory.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from monarch_backend.job import KubernetesJob
from tests.k8s.cluster import cluster, refusal


def measure(kubeconfig: str, folder: str, pods: int, attached: int) -> dict[str, float]:
    """Return seconds of each phase."""
    job = KubernetesJob(name=f"scale{pods}", path=f"{folder}/scale{pods}.json", kubeconfig=kubeconfig)
    job.add_mesh("workers", pods, image="testbed/monarch:1", grace_period=5)
    begun, found = time.perf_counter(), {}
    try:
        job.apply(timeout=900)
        found["ready"] = time.perf_counter() - begun
        if pods <= attached:
            begun = time.perf_counter()
            mesh = job.state(timeout=600).workers
            assert mesh.size("hosts") == pods
            found["attached"] = time.perf_counter() - begun
    finally:
        begun = time.perf_counter()
        job.kill()
        found["ended"] = time.perf_counter() - begun
    return found


def floor(pods: int) -> float:
    """Return the seconds until as many daemons listen as plain processes."""
    command = [sys.executable, "-m", "monarch_backend.cli", "up", "--address", "127.0.0.1:0"]
    begun = time.perf_counter()
    daemons = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(pods)]
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
    print(f"{'pods':>5} {'ready s':>8} {'floor s':>8} {'ratio':>6} {'attached s':>11} {'ended s':>8}")
    with tempfile.TemporaryDirectory() as folder, cluster(Path(folder), {"n0": {}, "n1": {}}) as made:
        for pods in args.pods:
            found = made.run(measure, str(made.kubeconfig()), folder, pods, args.attach, timeout=1500)
            least = floor(pods)
            attached = f"{found['attached']:11.1f}" if "attached" in found else f"{'-':>11}"
            print(
                f"{pods:5} {found['ready']:8.1f} {least:8.1f} {found['ready'] / least:6.2f} {attached} "
                f"{found['ended']:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
