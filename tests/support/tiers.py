"""Parameters of tests by tier: some run with `make test`, the others with `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow_except(values: Iterable[Any], *kept: Any) -> list[Any]:
    """Return the values of a parametrization. All but ``kept`` get the mark ``slow``."""
    values = list(values)
    unknown = [each for each in kept if each not in values]
    assert not unknown, f"not among the values: {unknown}"
    return [each if each in kept else pytest.param(each, marks=pytest.mark.slow) for each in values]
