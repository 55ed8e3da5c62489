"""A handler in torch's debug server that answers queries about the program of its process."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from monarch_backend._telemetry.sql import QueryError, query

HANDLER = "monarch_sql"
"""Name of the handler, and the last part of its URL."""

_is_registered = False


def add_torch_debug_handler() -> None:
    """Let torch's debug server in this process answer queries: ``POST /handler/monarch_sql?query=SELECT...``.

    Call it in each rank that calls ``torch.distributed.debug.start_debug_server``. The answer is that of
    `QueryResult.as_json`, about the program of this process. That server has no password.

    Raises NotImplementedError if torch has no such server.

    >>> from monarch_backend.telemetry import add_torch_debug_handler
    >>> add_torch_debug_handler()
    """
    global _is_registered
    try:
        from torch._C._distributed_c10d import _register_handler
    except ImportError:
        import torch

        raise NotImplementedError(f"torch {torch.__version__} has no debug server with handlers") from None
    if not _is_registered:
        # torch releases its handlers after the interpreter's end. Freeing an object of Python would abort there.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(_answer))
        _register_handler(HANDLER, _answer)
        _is_registered = True


def _answer(request: Any, response: Any) -> None:
    try:
        status, content = 200, json.dumps(query(request.get_param("query")).as_json())
    except (QueryError, LookupError, NotImplementedError, OSError) as error:
        status, content = 400, json.dumps({"error": str(error)})
    except Exception as error:  # torch's server would answer without a reason
        status, content = 500, json.dumps({"error": f"{type(error).__name__}: {error}"})
    response.set_content(content, "application/json")
    response.set_status(status)
