"""Sizes that no host can hold raise a typed error at once, with the limit, before anything is allocated."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

from monarch_backend._mesh.extent import Extent
from monarch_backend._processes.resource_limits import MAX_PROCESSES_PER_HOST, SpawnLimitError, check_count
from monarch_backend.actor import this_host


@pytest.fixture(scope="module", autouse=True)
def _program() -> None:
    """Create the program's state, which the first spawn creates and which remains until the process ends."""
    with contextlib.suppress(SpawnLimitError):
        this_host().spawn_procs({"a": 10**6})


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """Assert that a test takes less than a second of CPU time and less than 100 MB of additional memory."""
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - began < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 100_000


@pytest.mark.parametrize("sizes", [{"a": 10**6}, {"a": 10**9}, {"a": 1000, "b": 1000}, {"a": 2**31 - 1}], ids=str)
def test_spawn_of_too_many_raises_spawn_limit_error(sizes: dict[str, int]) -> None:
    with pytest.raises(
        SpawnLimitError, match=r"can't start \d+ processes: they need .* leaves \d+\. Start at most \d+"
    ):
        this_host().spawn_procs(sizes)


@pytest.mark.parametrize(
    ("sizes", "error", "text"),
    [
        ({"a": 2**31}, ValueError, "at most 2147483647"),
        ({"a": 2**63}, ValueError, "at most 2147483647"),
        ({"a": 10**100}, ValueError, "at most 2147483647"),
        ({"a": 2**16, "b": 2**16}, ValueError, "at most 2147483647"),
        ({"a": 0}, ValueError, "a size of 1 or more"),
        ({"a": -1}, ValueError, "a size of 1 or more"),
        ({"a": -(2**63)}, ValueError, "a size of 1 or more"),
        ({"a": True}, TypeError, "give an int"),
        ({"a": 2.0}, TypeError, "give an int"),
        ({"a": float("inf")}, TypeError, "give an int"),
        ({"a": "2"}, TypeError, "give an int"),
    ],
    ids=str,
)
def test_size_that_is_no_size_raises_with_the_limit(sizes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        this_host().spawn_procs(sizes)
    with pytest.raises(error, match=text):
        Extent.of(sizes)


def test_largest_extent_is_a_few_numbers() -> None:
    extent = Extent.of({"a": 2**31 - 1})
    assert len(extent) == 2**31 - 1
    assert extent.point(2**31 - 2)["a"] == 2**31 - 2


def test_other_hosts_have_a_bound_of_their_own() -> None:
    check_count(MAX_PROCESSES_PER_HOST, here=False)
    with pytest.raises(SpawnLimitError, match="MAX_PROCESSES_PER_HOST leaves 65536"):
        check_count(MAX_PROCESSES_PER_HOST + 1, here=False)
