"""Imported by the fork server of a program that has DTensors: what workers of a mesh import, so that they need not.

Where that fails, processes start all the same, and a worker says why when there is a mesh.
"""

from __future__ import annotations

import contextlib

with contextlib.suppress(Exception):
    import torch.distributed.tensor  # noqa: F401

    import monarch_backend.dtensor._worker  # noqa: F401
