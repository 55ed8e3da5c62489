"""Operations on the workers that this package starts and `_dispatch` runs: ``.to()``, ``untyped_storage().resize_()``.

`_dispatch` imports this package. So its modules set the functions here, once, when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Operations:
    """Functions of `_dispatch`.

    ``call`` and ``create``: those of dispatch.py. ``issue``: that of collectives.py. ``to`` and ``pinned``: those of
    device_moves.py.
    """

    call: Callable[..., Any]
    create: Callable[..., Any]
    issue: Callable[[str, dict[str, Any]], None]
    to: Callable[..., Any]
    pinned: Callable[[Any], Any]


operations = _Operations()
