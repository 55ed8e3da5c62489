"""Imports of torch that are slow or that warn, done once before the ranks fork. No fixtures."""

import warnings

# Every torch.optim and DDP constructor imports it: once here instead of half a second in each forked rank.
import torch._dynamo

with warnings.catch_warnings():
    # Importing torch.distributed.optim runs parts of torch.jit, which torch itself has deprecated.
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    import torch.distributed.optim  # noqa: F401
