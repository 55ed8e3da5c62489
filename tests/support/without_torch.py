"""Fixture of tests whose programs use no tensors: their fork servers do not import torch, which takes 1.5 s of CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def programs_without_torch() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_PRELOAD_TORCH", "0")
        yield
