"""The shared-memory core under AddressSanitizer with UBSan and under ThreadSanitizer: `make test-sanitizers`.

The driver in csrc/shm/stress/ runs random operations without Python. Tests of the process group also run with the
extension compiled for a sanitizer. tests/transport/test_channel_sanitizers.py checks the channels between processes.
tests/support/sanitizers.py builds the programs.

A failure prints its seed. `build/sanitizers/thread/shm_stress threads SEED 1 STEPS` repeats that round.
ThreadSanitizer does not support atomic_thread_fence. The core has two such fences (Doorbell::ring, Group::ring),
which order a store before a load and publish no data. ThreadSanitizer does not need them: it checks the release and
acquire of the counters. A missing fence would lose a wake-up, which would hang here. The model checker covers that.
"""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import sanitizers

# libtorch is not instrumented. ThreadSanitizer does not see the reference counts that decide which thread, Gloo's or
# ours, frees a work last. It reports that free as a race. These functions never call code of csrc/.
# The second one: glibc frees the thread-local storage of an ended torch thread when another thread starts.
SUPPRESSIONS = "race:c10d::ProcessGroupGloo\nrace:_dl_deallocate_tls\n"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="the shared-memory core is Linux's"),
]


# The driver -----------------------------------------------------------------------------------------------------------

# The seed selects one of four or five ways in which a round ends. These numbers of rounds include each at least twice.
RUNS = [("address", "processes", 15, 200), ("address", "threads", 8, 200), ("thread", "threads", 8, 150)]


@pytest.mark.parametrize("portable", [False, True], ids=["linux", "portable"])
@pytest.mark.parametrize(("kind", "ranks", "rounds", "steps"), RUNS)
def test_random_operations(kind: str, ranks: str, rounds: int, steps: int, portable: bool) -> None:
    print(sanitizers.stress("shm", kind, ranks, rounds, steps, portable=portable))


# From Python ----------------------------------------------------------------------------------------------------------


def test_python_with_address_sanitizer() -> None:
    prefix, extension = sanitizers.prefix("address"), sanitizers.extension("address")
    chosen = "mixed or different_calls or late_rank or name_the_dead or forked_child"
    chosen += " or (matrix and 2 and (reduce or to_all))"
    command = [sys.executable, "-m", __name__, extension, *sanitizers.PYTEST]
    command += ["tests/process_group/test_shm_backend.py", "-k", chosen]
    # Python keeps memory until it ends, so only the driver looks for leaks.
    env = {"LD_PRELOAD": sanitizers.preload("address"), "ASAN_OPTIONS": "detect_leaks=0"}
    assert " passed" in sanitizers.checked([*prefix, *command], 400, **env)


def test_python_with_thread_sanitizer(tmp_path: Path) -> None:
    """Start each rank as a fresh process: ThreadSanitizer fails in a fork of a process that had threads, as torch
    does.
    """
    prefix, extension = sanitizers.prefix("thread"), sanitizers.extension("thread")
    suppressions = tmp_path / "suppressions"
    suppressions.write_text(SUPPRESSIONS)
    env = {
        "LD_PRELOAD": sanitizers.preload("thread"),
        "TSAN_OPTIONS": f"suppressions={suppressions}",
        "MONARCH_SHM": "1",
    }
    command = [*prefix, sys.executable, "-m", __name__, extension, "rank"]
    with ThreadPoolExecutor(3) as ranks:
        running = [
            ranks.submit(sanitizers.checked, [*command, rank, 3, f"file://{tmp_path}/store"], 300, **env)
            for rank in range(3)
        ]
    for rank, done in enumerate(running):
        text = done.result()
        assert f"rank {rank} is through" in text, text
        assert "WARNING: ThreadSanitizer" not in text, text


def _import_from(extension: str) -> None:
    """Make imports of monarch_backend._native load this file."""

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> Any:
            return (
                importlib.util.spec_from_file_location(name, extension) if name == "monarch_backend._native" else None
            )

    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    from monarch_backend import _native

    assert _native.__file__ == extension


def _play_rank(rank: int, size: int, address: str) -> None:
    import torch.distributed as dist

    from tests.process_group import test_shm_backend
    from tests.support.ranks import init

    init(rank, size, address)
    for seed in range(2):
        test_shm_backend._mixed(rank, seed)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} is through", flush=True)


if __name__ == "__main__":
    _import_from(sys.argv[1])
    if sys.argv[2] == "pytest":
        sys.exit(pytest.main(sys.argv[3:]))
    _play_rank(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
