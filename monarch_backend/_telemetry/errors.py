"""Error of queries. The public errors include it, so this module imports neither numpy nor sqlite3."""

from __future__ import annotations

from monarch_backend._core.errors import MonarchError, public


@public("monarch_backend.telemetry")
class QueryError(MonarchError, ValueError):
    """A query is wrong, changes something, or takes too long. The text is one line, with the columns of its tables.

    `query` raises it.

    >>> from monarch_backend.telemetry import QueryError
    >>> issubclass(QueryError, ValueError)
    True
    """
