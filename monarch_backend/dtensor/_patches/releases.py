"""Oldest releases of torch for the parts of a controller and its workers."""

from __future__ import annotations

from monarch_backend._core.patches import Release

CONTROLLER: Release = (2, 11)
"""A controller, with eager operations."""
FSDP2: Release = (2, 12)
"""`fully_shard` on a controller's mesh."""
CAPTURED: Release = (2, 13)
"""Steps captured by torch.compile."""
WORKER: Release = (2, 9)
"""A worker."""
XLA: Release = (2, 9)
"""The release that torch_xla needs, and no other."""
