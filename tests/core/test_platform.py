"""Abilities of the system, and the portable mode that hides them on Linux."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from monarch_backend import _native
from monarch_backend._core import platform

_ABILITIES = [name for name in vars(platform) if name.startswith("HAS_")]


def test_portable_mode_hides_all_abilities() -> None:
    found = {name: getattr(platform, name) for name in _ABILITIES}
    assert found == dict.fromkeys(_ABILITIES, not platform.IS_PORTABLE)
    if platform.IS_PORTABLE:
        assert _native.is_portable


@pytest.mark.skipif(_native.is_portable, reason="the core is the portable one")
def test_portable_mode_without_a_portable_core_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from monarch_backend.actor import this_host; this_host().spawn_procs({'gpus': 1})"],
        env={**os.environ, "MONARCH_PORTABLE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "RuntimeError: MONARCH_PORTABLE=1 needs the portable build of the C++ core" in done.stderr


def test_usable_cpus_are_those_of_this_process() -> None:
    assert 1 <= platform.usable_cpus() <= (os.cpu_count() or 1)


@pytest.mark.parametrize("kind", ["eventfd", "pipe"])
def test_wake_descriptor_is_readable_until_it_is_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "eventfd" and not platform.HAS_EVENTFD:
        pytest.skip("this system has no eventfd")
    monkeypatch.setattr(platform, "HAS_EVENTFD", kind == "eventfd")
    read, write = platform.wake_descriptors()
    try:
        assert not select.select([read], [], [], 0)[0]
        for _ in range(3):
            os.write(write, platform.WAKE)
        assert select.select([read], [], [], 0)[0]
        assert os.read(read, 4096)
        assert not select.select([read], [], [], 0)[0]
        with pytest.raises(BlockingIOError):
            os.read(read, 4096)
    finally:
        for descriptor in {read, write}:
            os.close(descriptor)
