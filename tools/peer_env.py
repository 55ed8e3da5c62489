#!/usr/bin/env python3
"""Builds a virtual environment with another library, for benchmarks of actors, hosts, jobs and rdma.

    python tools/peer_env.py torchmonarch ray     # makes .envs/peer-torchmonarch and .envs/peer-ray; again: no change
    python tools/peer_env.py nixl                 # .envs/peer-nixl; x86-64 and arm64

Each has the torch of constraints.txt, for the CPU, put there before the library so that pip does not fetch another
one; how a CUDA build of torch becomes one for the CPU is in torch_env.py. This checkout is not installed in them.
What is measured, and how, is in benchmarks/actor_peers, host_runners, job_runners and rdma_runners.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from torch_env import ROOT, BuildError, Environment, call, say

RECIPE = 1  # raise it when environments that were built before must be built again
# name -> (what pip installs, the module that must import)
PEERS = {
    "torchmonarch": (["torchmonarch[kubernetes]==0.7.0"], "monarch.job.kubernetes"),
    "ray": (["ray==2.60.0"], "ray"),
    # Not the package "nixl", which brings the builds for two releases of CUDA; on CPU memory this one needs none.
    "nixl": (["nixl-cu12==1.5.1"], "nixl_cu12._api"),
}


def torch_version() -> str:
    """The release of torch that development is pinned to."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2].strip() for line in lines if line.startswith("torch=="))


class PeerEnvironment(Environment):
    """One virtual environment below .envs, with torch and one peer."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(folder, torch_version(), xla=False)
        self.requirements, self.module = PEERS[name]

    def recipe(self) -> dict[str, object]:
        """What the stamp says once everything is in place."""
        return {**super().recipe(), "peer recipe": RECIPE, "peer": self.requirements}

    def build(self) -> None:
        """Make what is not there yet."""
        if self.is_ready():
            return
        if self.stamp.exists():
            say(f"{self.folder} was built from another recipe; starting over")
            shutil.rmtree(self.folder)
        self.create()
        self.install_torch()
        say(" ".join(self.requirements))
        # A constraint and no requirement: pip would bring the CUDA libraries that a CUDA build of torch lists.
        self.pip("-c", str(ROOT / "constraints.txt"), "numpy>=1.26", *self.requirements)
        call([self.python, "-c", f"import torch, {self.module}"], f"import {self.module}")
        say(f"ready: {self.folder}")
        self.stamp.write_text(json.dumps(self.recipe()))

    def create(self) -> None:
        """The empty environment."""
        if not self.python.exists():
            say(f"virtual environment {self.folder}")
            call([sys.executable, "-m", "venv", self.folder], "making a virtual environment")


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("peers", nargs="+", choices=list(PEERS), metavar="NAME", help=", ".join(PEERS))
    parser.add_argument("--dir", type=Path, default=ROOT / ".envs", help="where to; .envs in this checkout")
    args = parser.parse_args()
    failed = 0
    for name in args.peers:
        try:
            PeerEnvironment(name, args.dir.absolute() / f"peer-{name}").build()
        except BuildError as error:
            say(f"{name}: {error}")
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main())
