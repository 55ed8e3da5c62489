"""Imports of a mesh's workers: the fork server of a program with DTensors imports this module once for all workers.

If it fails, processes start all the same. A worker reports the reason when a device mesh is made.
"""

import contextlib

with contextlib.suppress(Exception):
    import torch.distributed.tensor  # noqa: F401

    import monarch_backend.dtensor._worker  # noqa: F401
