"""Manifest of the change of torch while a process is profiled on request."""

from __future__ import annotations

from monarch_backend._core.patches import Patch

PROFILER = (
    Patch(
        "torch.autograd.profiler:profile._prepare_trace", "semantics",
        ("monarch_backend._telemetry.profiler:let_sessions_wait",),
        "Two sessions of the profiler at the same time can crash a process, and torch prevents it on one thread only.",
        "tests/telemetry/test_profile.py::test_profile_that_the_program_starts_meanwhile_is_the_programs", (2, 9),
        upstream="not reported",
    ),
)  # fmt: skip
"""Applied with the first request for a profile."""
