"""The channels between processes under AddressSanitizer with UBSan and under ThreadSanitizer.

The driver in csrc/channel/stress/ runs rounds of random frames, deaths, departures and attacks without Python. Each run
prints what its frames have exercised, and a run of fifteen rounds fails if a case never occurred. A failure prints its
seed; `build/sanitizers/thread/channel_stress threads SEED 1 MESSAGES` repeats that round.
"""

from __future__ import annotations

import sys

import pytest

from tests.support import sanitizers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(sys.platform != "linux", reason="the channels' core is Linux's"),
]

# Runs of fewer than fifteen rounds may miss cases: ThreadSanitizer makes readers too slow for some.
RUNS = [("address", "processes", 15, 200), ("address", "threads", 15, 150), ("thread", "threads", 14, 120)]


@pytest.mark.parametrize("portable", [False, True], ids=["linux", "portable"])
@pytest.mark.parametrize(("kind", "ranks", "rounds", "messages"), RUNS)
def test_random_frames(kind: str, ranks: str, rounds: int, messages: int, portable: bool) -> None:
    print(sanitizers.stress("channel", kind, ranks, rounds, messages, runs=3, portable=portable))
