"""Lightning: Fabric and Trainer train with this package's groups, with MONARCH_AS=gloo and by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.programs import compare, needs

pytestmark = needs("lightning")


@pytest.mark.parametrize("part", ["Fabric", "Trainer"])
def test_losses_are_those_of_gloo(part: str, tmp_path: Path) -> None:
    compare(f"Lightning {part}", tmp_path, by_name=True)
