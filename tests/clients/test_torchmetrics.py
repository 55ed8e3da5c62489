"""TorchMetrics: metrics synchronise over this package's groups, with MONARCH_AS=gloo and by name."""

from __future__ import annotations

from pathlib import Path

from tests.clients.programs import compare, needs

pytestmark = needs("torchmetrics")


def test_values_are_those_of_gloo(tmp_path: Path) -> None:
    compare("TorchMetrics", tmp_path, by_name=True)
