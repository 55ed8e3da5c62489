"""Fixtures for every test: pools of ranks, and the check that nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support import leaks
from tests.support.ranks import RankPool

_POOLS: dict[int, RankPool] = {}


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


@pytest.fixture(scope="session")
def pool() -> Callable[[int], RankPool]:
    """``pool(n)``: n ranks that live as long as the session, with a default group of backend "monarch"."""

    def get(world_size: int) -> RankPool:
        if world_size not in _POOLS:
            _POOLS[world_size] = RankPool(world_size)
        return _POOLS[world_size]

    return get


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = leaks.take()
    yield
    left = leaks.left_behind(before)
    assert not left, "the test left behind: " + "; ".join(left)
