"""Skip without torch_xla, which needs its own release of torch. `make test-xla` makes an environment with both.

Tests run on PJRT's CPU client: one device for one process, or two devices for one process in SPMD mode. More than one
rank needs a TPU.
"""

from __future__ import annotations

import importlib.util
import os
import warnings

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("torch_xla") is None:
        skip = pytest.mark.skip(reason="torch_xla is not installed here: run `make test-xla`")
        for item in items:
            if item.get_closest_marker("xla") is not None:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def torch_xla_imported() -> None:
    """Import torch_xla once, for all ranks that are forked later. Its client starts in a rank with the first tensor."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_xla emits warnings
        import torch_xla  # noqa: F401
