"""`monarch-backend run`: torchrun, whose ranks come from a fork server.

The parser, the rendezvous, restarts, logs and error files are torch's own; torchelastic_patches.py is where we touch
them. rank_processes.py starts and ends this host's ranks, fork_server_bootstrap.py makes the fork server out of the
launcher, run_script.py is what a rank does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Run what torchrun would run with these arguments; 0 when all ranks have ended well.

    A failed rank raises torch's ChildFailedError, a signal its SignalException, a wrong argument SystemExit(2).
    """
    from monarch_backend._launch import fork_server_bootstrap, rank_processes

    with contextlib.ExitStack() as stack:
        server, why_not = (
            fork_server_bootstrap.fork()
        )  # first: what else this process imports, and its threads, are not for ranks
        ranks = None
        if server is not None:
            stack.callback(server.wait)
            ranks = stack.enter_context(rank_processes.Ranks(server))

        from monarch_backend._launch import torchelastic_patches

        torchelastic_patches.run(argv, ranks, why_not)
    return 0
