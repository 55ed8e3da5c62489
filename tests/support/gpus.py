"""Number of GPUs, and the mark that skips tests without one."""

from __future__ import annotations

import pytest
import torch


def gpu_count() -> int:
    """Return the number of GPUs that torch can use.

    It asks the driver's management library, so a process that forks ranks gets no CUDA context.
    """
    return torch.cuda.device_count() if torch.backends.cuda.is_built() else 0


needs_gpu = pytest.mark.skipif(
    gpu_count() == 0, reason="no GPU that torch can use: run `make test-gpu` on a machine with one"
)
