"""Fixtures of tests of telemetry."""

from __future__ import annotations

from tests.support.without_torch import programs_without_torch as programs_without_torch
