"""Errors of the HTTP API: a status, what has failed, and what to do. They are sent as JSON."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from monarch_backend._dashboard.answers import Error


class Problem(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, error: str, hint: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error)
        self.status, self.error, self.hint, self.headers = status, error, hint, headers


def as_response(problem: Problem) -> Response:
    """Return the answer to a request that has this problem."""
    content = msgspec.json.encode(Error(problem.error, problem.hint))
    return Response(content, problem.status, problem.headers, "application/json")
