"""Transformers: Trainer trains with this package's groups under MONARCH_AS=gloo, and refuses the name."""

from __future__ import annotations

from pathlib import Path

from tests.clients.programs import compare, expect_refusal, needs

pytestmark = needs("transformers")


def test_losses_are_those_of_gloo(tmp_path: Path) -> None:
    compare("Transformers", tmp_path)


def test_the_name_is_refused(tmp_path: Path) -> None:
    """docs/limits.md says so. docs/upstream/transformers.md has a patch."""
    expect_refusal("Transformers", tmp_path, "Your assigned backend monarch is not available, please use gloo")
