"""Frameworks that use torch.distributed train with this package's groups: `make test-clients`."""

import pytest

pytest.register_assert_rewrite("tests.clients.programs")
