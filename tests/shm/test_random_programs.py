"""Random operations of all kinds over shared memory, compared with a reference computed in one process.

A failure reports its seed. `MONARCH_TEST_SEED=<seed>` repeats that seed in every test here. The default run uses
fixed seeds, the slow run new ones.
"""

from __future__ import annotations

import os
import random
import sys
import time

import pytest
import torch
import torch.distributed as dist

import monarch_backend
from tests.shm import random_programs
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's")

# With this limit, small tensors are also read directly from other ranks' memory.
ON = {"MONARCH_SHM": "1", "MONARCH_CMA_MIN_BYTES": "40000"}
SEED = os.environ.get("MONARCH_TEST_SEED", "")


def _play(rank: int, program: random_programs.Program, threads: bool) -> int:
    torch.set_num_threads(1)
    assert monarch_backend.routes()["cpu"].backend == "shm"
    player = random_programs.Player(program, rank)
    count = player.play_in_threads() if threads else player.play(program.steps)
    dist.barrier()
    return count


def _run(seed: int, size: int, steps: int, *, threads: bool = False) -> None:
    seed = int(SEED or seed)
    print(f"MONARCH_TEST_SEED={seed} with {size} ranks, {steps} steps{', in threads' if threads else ''}", flush=True)
    random_programs.prepare()
    program = random_programs.draw(seed, size, steps)
    counts = run_ranks(_play, size, program, threads, env=ON)
    assert counts == [sum(rank in program.groups[step.group] for step in program.steps) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_program(size: int) -> None:
    _run(size, size, 100)


def test_random_program_in_threads() -> None:
    _run(1, 3, 100, threads=True)


@pytest.mark.slow
@pytest.mark.nightly
def test_many_random_programs() -> None:
    start, first = time.monotonic(), int(SEED or random.SystemRandom().randrange(1_000_000))
    plan = [(first + i, 2 + i % 3, i % 4 == 3) for i in range(1 if SEED else 24)]
    for seed, size, threads in [(first, size, t) for size in (2, 3, 4) for t in (False, True)] if SEED else plan:
        _run(seed, size, 130, threads=threads)
    print(f"{time.monotonic() - start:.0f} s")
