"""Dynamo's graph break, with an error as its reason. Imports dynamo, so import it in a trace only."""

from __future__ import annotations

from typing import NoReturn

from torch._dynamo.exc import unimplemented


def break_graph(what: str, error: Exception) -> NoReturn:
    """Let dynamo run this operation eagerly; with ``fullgraph=True`` it raises this text."""
    hint = "Without fullgraph=True it runs eagerly; or put it into a function with torch.compiler.disable."
    unimplemented(
        gb_type="What differs by rank", context=what, explanation=str(error), from_exc=error, hints=[hint]
    )  # fmt: skip
