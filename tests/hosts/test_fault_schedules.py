"""Random faults on four hosts under load: no call runs twice, order holds, all futures complete, no process is left.

``make test-schedules COUNT=200`` runs more seeds. ``python -m tests.hosts.fault_schedules SEED`` repeats one.
"""

from __future__ import annotations

import pytest

from tests.hosts import fault_schedules
from tests.hosts.support import Daemon, World

SEEDS = 2
MANY_SEEDS, CHUNK = 10, 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_schedule_of_faults(seed: int, world: World, daemons: list[Daemon]) -> None:
    fault_schedules.run(world, daemons, seed)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MANY_SEEDS, CHUNK))
def test_many_schedules_of_faults(first: int, world: World, daemons: list[Daemon]) -> None:
    for seed in range(first, first + CHUNK):
        fault_schedules.run(world, daemons, seed)
