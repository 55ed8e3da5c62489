"""Both ends of a command record (csrc/records) under AddressSanitizer and UndefinedBehaviorSanitizer.

The controller's end runs instrumented. Workers come from a fork server with the package's own extension, so
test_command_records.py runs their end in this process.
"""

from __future__ import annotations

import sys

import pytest

from tests.support import sanitizers

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_with_address_sanitizer() -> None:
    prefix, extension = sanitizers.prefix("address"), sanitizers.extension("address")
    command = [sys.executable, "-m", "tests.shm.test_sanitizers", extension, *sanitizers.PYTEST]
    names = ("worker/test_command_records", "controller/test_per_rank_int", "controller/test_errors")
    command += [f"tests/dtensor/{name}.py" for name in (*names, "controller/test_worker_memory")]
    # The sanitizer keeps up to 256 MiB of freed memory, in the workers too, so tests cannot measure peak memory.
    command += ["-k", "not thousand and not large_tensors", "-m", "not slow"]
    # Python keeps its objects until it ends, and the sanitizer would report these as leaks.
    env = {"LD_PRELOAD": sanitizers.preload("address"), "ASAN_OPTIONS": "detect_leaks=0"}
    assert " passed" in sanitizers.checked([*prefix, *command], 400, **env)
