"""What tests of Linux's core skip on the portable one, see csrc/platform/README.md."""

from __future__ import annotations

import pytest

from monarch_backend import _native

needs_reads = pytest.mark.skipif(_native.is_portable, reason="the portable core reads no other process's memory")
"""For tests of process_vm_readv, and of the route "kernel" of registered memory."""
