"""Training of examples/kubernetes_train.py on one process without failures, whose losses other runs must have."""

from __future__ import annotations

import sys
from pathlib import Path

from monarch_backend.actor import this_host

ROOT = Path(__file__).parents[2]


def train_undisturbed(steps: int) -> dict[int, float]:
    """Return the loss of each step. Call it in a program of its own."""
    sys.path.insert(0, str(ROOT / "examples"))
    import kubernetes_train

    procs = this_host().spawn_procs({"hosts": 1})
    procs.process_group().get()
    trainers = procs.spawn("trainers", kubernetes_train.Trainer, 0, None)
    return {step: next(iter(trainers.train.call(step).get(60).values())) for step in range(steps)}
