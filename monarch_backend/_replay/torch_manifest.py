"""Manifest of the entry that a replay adds to torch's table of backends."""

from __future__ import annotations

from monarch_backend._core.patches import Registration

_C10D = "torch.distributed.distributed_c10d"
_TABLES = tuple(
    f"{_C10D}:Backend.{table}" for table in ("_plugins", "backend_list", "backend_capability", "backend_type_map")
)

REPLAY = (
    Registration(
        _TABLES, ("monarch_replay", "MONARCH_REPLAY"), "monarch_backend._replay.collectives", "first group", "process",
        "semantics", "The group of a replayed actor has the recorded rank and size, and raises in each collective.",
        "tests/actor/test_replay.py::test_collectives_and_registered_memory_raise_errors_that_name_them", (2, 9),
    ),
)  # fmt: skip
"""Only in the process of `monarch-backend replay`."""
