"""`monarch-backend run`: torchrun, whose ranks come from a fork server.

The parser, the rendezvous, restarts, logs and error files are torch's own; _elastic.py is where we touch them.
_ranks.py starts and ends this host's ranks, _server.py makes the fork server out of the launcher, _script.py is what a
rank does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run what torchrun would run with these arguments; 0 when all ranks have ended well.

    A failed rank raises torch's ChildFailedError, a signal its SignalException, a wrong argument SystemExit(2).
    """
    from monarch_backend.launch import _ranks, _server

    with contextlib.ExitStack() as stack:
        server, why_not = _server.fork()  # first: what else this process imports, and its threads, are not for ranks
        ranks = None
        if server is not None:
            stack.callback(server.wait)
            ranks = stack.enter_context(_ranks.Ranks(server))

        from monarch_backend.launch import _elastic

        _elastic.run(argv, ranks, why_not)
    return 0
