"""`monarch-backend run`: torchrun, with ranks that come from a fork server.

The parser, the rendezvous, restarts, logs and error files are torch's own. torchelastic_patches.py replaces parts of
them. rank_processes.py forks the fork server from the launcher, and starts and ends this host's ranks. run_script.py
runs in each rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run what torchrun would run with these arguments. Return 0 when all ranks have ended well.

    A failed rank raises torch's ChildFailedError, a signal its SignalException, a wrong argument SystemExit(2).
    """
    from monarch_backend._launch import rank_processes

    with contextlib.ExitStack() as stack:
        server, why_not = (
            rank_processes.fork()
        )  # first: ranks must not get later imports of this process, or its threads
        ranks = None
        if server is not None:
            stack.callback(server.wait)
            ranks = stack.enter_context(rank_processes.Ranks(server))

        from monarch_backend._launch import torchelastic_patches

        torchelastic_patches.run(argv, ranks, why_not)
    return 0
