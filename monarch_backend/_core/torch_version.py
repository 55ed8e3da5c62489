"""Releases of torch that this package was tested with, and the warning for other ones."""

from __future__ import annotations

import functools
import warnings

import torch

# docs/reference/torch-releases.md has the tests that ran on each release.
OLDEST = (2, 9)
NEWEST = (2, 15)
TESTED = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def torch_version() -> tuple[int, int]:
    """Return (major, minor) of the installed torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()))


@functools.cache
def remark() -> str:
    """Warn, once per process and in one line, when torch is outside the tested range. Return that line or ''."""
    if OLDEST <= torch_version() <= NEWEST:
        return ""
    line = f"monarch_backend was tested with torch {TESTED}; this is {torch.__version__}: parts of it may not work"
    warnings.warn(line, stacklevel=3)
    return line
