"""Operations on the workers that this package starts and `_dispatch` runs: ``.to()``, ``untyped_storage().resize_()``.

`_dispatch` imports this package. So its modules set the functions here, once, when they are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Operations:
    call: Callable[..., Any]
    create: Callable[..., Any]  # like `call`, of dispatch.py
    issue: Callable[[str, dict[str, Any]], None]  # of collectives.py
    to: Callable[..., Any]  # like `pinned`, of device_moves.py
    pinned: Callable[[Any], Any]


operations = _Operations()
