"""Rank of a peer: handles the driver's requests from a socket, and blocks in recv between them.

It serves collectives.py and training_steps.py. _rank_set.py starts it as `_rank_main.py PEER RANKS FOLDER`. For
MPI, the launcher starts one process per rank. Otherwise one process imports torch and forks all ranks. Requests and
answers are lines of JSON. A rank ends when its socket is closed.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from _peer_collectives import C10d, Call, DeepSpeed, Library, Mpi, make_buffers

MPI_PEERS = ("OpenMPI", "Intel MPI")


class Serve:
    """Requests that a rank handles. It keeps the buffers of a case until the next case."""

    def __init__(self, library: Library, ranks: int) -> None:
        self._library, self._ranks = library, ranks
        self._call: Call = lambda: None
        self._steps: dict[str, Call] = {}

    def check(self, what: str, size: int) -> bool:
        """Make the buffers and run the collective once. Return whether the result is as expected."""
        library = self._library
        source, target, expected = make_buffers(what, size, library.rank, self._ranks)
        self._call = library.call(what, source, target)
        library.barrier()
        self._call()
        right = np.array_equal(target, expected)
        if what.startswith("all_reduce"):
            target.fill(0)  # zeros stay zeros: other values would grow to infinity with each in-place sum
        return right

    def batch(self, what: str, calls: int, warm: int) -> list[int]:
        """Return the nanoseconds of each of ``calls`` consecutive calls, after ``warm`` calls that are not timed."""
        call, clock, times = self._call, time.perf_counter_ns, [0] * calls
        self._library.barrier()
        for _ in range(warm):
            call()
        start = clock()
        for index in range(calls):
            call()
            now = clock()
            times[index] = now - start
            start = now
        # The barrier lets MPI deliver pending messages, which may need the sender. Not after a ping-pong: the ranks
        # that take no part in it would spin in the barrier.
        if what != "send_recv":
            self._library.barrier()
        return times

    def step(self, kind: str, calls: int, warm: int) -> list[int]:
        """Return the nanoseconds of each training step of this kind."""
        if kind not in self._steps:
            from _training_steps import training_step

            self._steps[kind] = training_step(kind)
        self._call = self._steps[kind]
        return self.batch(kind, calls, warm)


def _serve(orders: Any, link: socket.socket) -> None:
    """Handle requests until the socket ends. A request names a method of ``orders``."""
    for line in link.makefile("r", encoding="utf-8"):
        order, *arguments = json.loads(line)
        if order == "end":
            return
        try:
            answer = {"value": getattr(orders, order)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        link.sendall(json.dumps(answer).encode() + b"\n")


def _run(library: Library | None, ranks: int, link: socket.socket) -> None:
    rank = 0 if library is None else library.rank
    if library is None:
        from _floors import Floors

        orders: Any = Floors(ranks)
    else:
        orders = Serve(library, ranks)
    gc.collect()
    gc.disable()
    link.sendall(json.dumps({"rank": rank, "pid": os.getpid()}).encode() + b"\n")
    _serve(orders, link)
    if library is not None:
        library.close()


def _connect(folder: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    link.connect(str(folder / "orders"))
    return link


def _forked(peer: str, ranks: int, folder: Path) -> int:
    """Fork the ranks of a peer that runs under torch, and wait for them. Return 1 if one has failed, otherwise 0."""
    import torch

    torch.set_num_threads(1)
    operator: Any = None
    if peer == "DeepSpeed":
        from deepspeed.ops.op_builder import ShareMemCommBuilder

        operator = ShareMemCommBuilder().load()
    if peer == "monarch":
        import monarch_backend  # noqa: F401
    children = []
    for rank in range(1 if peer == "floors" else ranks):
        child = os.fork()
        if child == 0:
            try:
                _one(peer, operator, rank, ranks, folder)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            sys.stderr.flush()
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def _one(peer: str, operator: Any, rank: int, ranks: int, folder: Path) -> None:
    link = _connect(folder)
    store = str(folder / f"store-{peer}-{ranks}")
    if peer == "floors":
        _run(None, ranks, link)
    elif peer == "DeepSpeed":
        _run(DeepSpeed(operator, rank, ranks, store), ranks, link)
    else:
        _run(C10d("fake" if peer == "no communication" else peer, rank, ranks, store), ranks, link)


def main() -> int:
    """Run the rank, or all ranks, that the command line names."""
    peer, ranks, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    if peer not in MPI_PEERS:
        return _forked(peer, ranks, folder)
    _run(Mpi(), ranks, _connect(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
