"""Fixtures for all tests: pools of ranks, and the check that a test leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.tensor  # makes fork servers of tests import it, as the workers of a mesh need it

from monarch_backend._core import platform
from monarch_backend._processes import parent_watch
from tests.fast_tier import LONG_MODULES
from tests.support import features, leaks
from tests.support.ranks import RankPool

if not platform.HAS_PRCTL:
    parent_watch.descriptor()  # the pipe that it makes once stays open

# Tests fork ranks from this process, so it must not start OpenMP threads. They would be missing in the children, where
# torch's large operations would wait for them.
torch.set_num_threads(1)

# A process that has asked the CUDA runtime for GPUs cannot be forked. Asking the driver's management library is safe.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# torch's TCPStore looks up the name of every client on its only thread. Each lost reply of the name server would delay
# a test for five seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")

# Programs that tests start write at once. print() then writes the text and the end of the line separately, so several
# processes that write lines to one pipe use sys.stdout.write().
os.environ["PYTHONUNBUFFERED"] = "1"

# A shell starts background commands with SIGINT ignored, and the processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_POOLS: dict[int, RankPool] = {}
_TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the modules that tests/fast_tier.py lists")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--fast", default=False) or not collection_path.is_relative_to(_TESTS):
        return None
    return True if collection_path.relative_to(_TESTS).as_posix() in LONG_MODULES else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        if lacking := features.missing(*mark.args):
            pytest.skip(f"this system has no {' and no '.join(lacking)}")


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> None:
    """Exclude existing objects from garbage collection during a module.

    Collections then do not traverse torch, pytest and torch's caches of earlier modules (compiled graphs: 0.8 s for
    each collection). Tests that wait for an object's end collect often. Forked ranks also share those pages for longer.
    """
    gc.collect()
    gc.freeze()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Record the names of started tests, so that the last one is known if the tests hang or die."""
    if begun := os.environ.get("MONARCH_TEST_BEGUN"):
        with open(begun, "a") as file:
            file.write(nodeid + "\n")


@pytest.fixture(scope="session", autouse=True)
def _log_dir_of_torchrun(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Set the default of torchrun's --log-dir: torchrun makes a folder there and does not delete it."""
    os.environ["PET_LOG_DIR"] = str(tmp_path_factory.mktemp("torchelastic"))


@pytest.fixture(scope="session", autouse=True)
def _log_dir_of_programs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the last output of the tests' programs out of the user's own folder."""
    os.environ["MONARCH_LOG_DIR"] = str(tmp_path_factory.mktemp("logs"))


@pytest.fixture(scope="session", autouse=True)
def _close_pools() -> Iterator[None]:
    yield
    for pool in _POOLS.values():
        pool.close()
    _POOLS.clear()


@pytest.fixture(scope="session")
def pool() -> Callable[[int], RankPool]:
    """Return ``pool(n)``: n ranks that live until the session ends, with a default group of backend "monarch"."""

    def get(world_size: int) -> RankPool:
        if world_size not in _POOLS:
            _POOLS[world_size] = RankPool(world_size)
        return _POOLS[world_size]

    return get


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Let Python's threads take turns every 10 microseconds, so that races are likely."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    before = leaks.take()
    yield
    left = leaks.left_behind(before)
    assert not left, "the test left behind: " + "; ".join(left)
