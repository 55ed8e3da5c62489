"""Imports of torch modules that are slow or that warn, done once before the ranks fork. There are no fixtures here."""

import warnings

# Every constructor of torch.optim and DDP imports it. One import here saves half a second in each forked rank.
import torch._dynamo

with warnings.catch_warnings():
    # Importing torch.distributed.optim runs parts of torch.jit, which torch itself has deprecated.
    warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
    import torch.distributed.optim  # noqa: F401
