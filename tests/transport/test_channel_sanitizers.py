"""The channels between processes under AddressSanitizer with UBSan and under ThreadSanitizer.

The driver in csrc/channel/stress/ plays rounds of random frames, deaths, departures and forged frames without Python;
each run says what its frames have met with, and a run of fifteen rounds fails if something was never seen. A failure
prints its seed; `build/sanitizers/thread/channel_stress threads SEED 1 LETTERS` plays that round again.
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

# Fewer than fifteen rounds are not asked what they have seen: ThreadSanitizer makes readers too slow for some of it.
RUNS = [("address", "processes", 15, 200), ("address", "threads", 15, 150), ("thread", "threads", 14, 120)]


@pytest.mark.parametrize(("kind", "ranks", "rounds", "letters"), RUNS)
def test_random_frames(kind: str, ranks: str, rounds: int, letters: int) -> None:
    print(sanitizers.stress("channel", kind, ranks, rounds, letters, runs=3))
