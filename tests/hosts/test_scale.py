"""256 processes on eight hosts start in seconds, answer together, and continue after losses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.support import World, descendants, until_gone
from tests.support.hosts import hosts, refusal

HOSTS, EACH = 8, 32


@pytest.mark.slow
@pytest.mark.nightly
def test_many_processes_on_many_hosts(tmp_path: Path) -> None:
    if why := refusal():
        pytest.skip(why)
    with hosts(1 + HOSTS) as where, World(where, tmp_path) as world:
        daemons = [world.daemon(1 + index) for index in range(HOSTS)]
        addresses = [daemon.address for daemon in daemons]
        before = {pid for daemon in daemons for pid in descendants(daemon.pid)}
        world.run("scale", addresses, EACH, [daemon.pid for daemon in daemons], module="scale_program")
        until_gone([pid for daemon in daemons for pid in descendants(daemon.pid) if pid not in before], 2.0)
