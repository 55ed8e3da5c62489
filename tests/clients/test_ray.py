"""Ray Train: two workers of TorchTrainer train with this package's groups, with MONARCH_AS=gloo and by name."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.clients.programs import compare, needs

pytestmark = needs("ray")


def test_losses_are_those_of_gloo(tmp_path: Path) -> None:
    # Ray's sockets are in this folder. The path of a socket has at most 107 bytes, so tmp_path is too long.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        compare("Ray Train", tmp_path, by_name=True, RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0")
