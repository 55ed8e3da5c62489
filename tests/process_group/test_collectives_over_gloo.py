"""The CPU route without shared memory, as between hosts or with MONARCH_SHM=0: Gloo runs all calls.

The tests are the matrix of test_collectives.py with some of its dtypes.
"""

from __future__ import annotations

import pytest

import monarch_backend
from tests.process_group.test_collectives import COLLECTIVES, _run_cells
from tests.support.ranks import run_ranks
from tests.support.tiers import slow_except

OFF = {"MONARCH_SHM": "0"}
DTYPES = ("float32", "bfloat16", "int64", "bool", "complex64", "float8_e4m3fn")


def _matrix(rank: int, collective: str) -> list[str]:
    assert monarch_backend.routes()["cpu"].backend == "gloo"
    return [text for dtype in DTYPES for text in _run_cells(rank, collective, dtype)[1]]


@pytest.mark.parametrize("world_size", slow_except([1, 2, 4], 2))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_matrix_of_collectives_over_gloo(collective: str, world_size: int) -> None:
    failures = [text for texts in run_ranks(_matrix, world_size, collective, env=OFF) for text in texts]
    assert not failures, f"{len(failures)} cells failed; the first:\n" + "\n".join(failures[:8])
