"""torch's registry of custom operators, which torch.library.custom_op fills."""

from __future__ import annotations

from torch._library.custom_ops import OPDEFS


def module_of(name: str) -> str | None:
    """Return the module of an operator's Python function; None if torch.library.custom_op did not register it.

    >>> module_of("prims.sin"), module_of("aten.sin")
    ('torch._prims', None)
    """
    found = OPDEFS.get(name.replace(".", "::", 1))
    return None if found is None else found._init_fn.__module__
