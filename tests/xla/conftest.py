"""The XLA tests need torch_xla, with its own release of torch: `make test-xla` makes that environment.

They run on PJRT's CPU client, which gives one device to one process, or two devices to one process in SPMD mode;
more than one rank can't be had without a TPU.
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
    """Import it once, for all ranks that are forked later; its client starts in the ranks, with the first tensor."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch_xla's own
        import torch_xla  # noqa: F401
