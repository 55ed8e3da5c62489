"""Closed connections of a Gloo group end the waits of its ranks, also of messages that were cut in the middle."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend.process_group import _c10d_internals
from monarch_backend.process_group._gloo_links import GlooLinks
from tests.support.ranks import run_ranks

LARGE = 1 << 28  # bytes: a tenth of a second on loopback
NO_TIMEOUT = timedelta(0)


def _gloo() -> Any:
    return dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _wait_for_close(rank: int) -> None:
    if rank == 0:
        with pytest.raises(RuntimeError):
            _gloo().recv([torch.ones(1)], 1, 7).wait()
    else:
        _c10d_internals.close_gloo_links(_gloo())


def test_wait_for_a_rank_that_closes_its_links_ends() -> None:
    run_ranks(_wait_for_close, 2)


def _wait_beside_a_broken_link(rank: int) -> None:
    store = _store()
    if rank == 1:
        _c10d_internals.close_gloo_links(_gloo())
    if rank == 0:
        with pytest.raises(RuntimeError):
            _gloo().recv([torch.ones(1)], 1, 7).wait()
        work = _gloo().recv([torch.ones(1)], 2, 7)
        _c10d_internals.close_gloo_links(_gloo())
        with pytest.raises(RuntimeError):
            work.wait()
        store.set("ended", "")
    store.wait(["ended"], timedelta(seconds=60))


def test_links_close_although_one_is_broken_already() -> None:
    run_ranks(_wait_beside_a_broken_link, 3)


def _cut_in_the_middle(rank: int, start: Callable[[Any, torch.Tensor, int], Any], method: str) -> None:
    store, gloo = _store(), _gloo()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        work = start(gloo, torch.ones(LARGE, dtype=torch.uint8), rank)
        store.wait(["ended"], timedelta(seconds=60))
        del work
        return
    pid, x = int(store.get("pid")), torch.zeros(LARGE, dtype=torch.uint8)
    work = start(gloo, x, rank)
    while not x[0]:
        pass
    os.kill(pid, signal.SIGSTOP)
    try:
        assert not x[-1], "the message was not cut"
        links, begun = GlooLinks(gloo), time.monotonic()
        links.close()
        with pytest.raises(RuntimeError, match="the links were closed"):
            getattr(links, method)(work, NO_TIMEOUT)
        assert time.monotonic() < begun + 5  # Gloo's own wait lasts until the group's timeout
    finally:
        os.kill(pid, signal.SIGCONT)
    store.set("ended", "")


def _message(gloo: Any, x: torch.Tensor, rank: int) -> Any:
    return gloo.recv([x], 1, 7) if rank == 0 else gloo.send([x], 0, 7)


def _collective(gloo: Any, x: torch.Tensor, rank: int) -> Any:
    opts = dist.BroadcastOptions()
    opts.rootRank = 1
    return gloo.broadcast([x], opts)


@pytest.mark.parametrize(
    ("start", "method"),
    [(_message, "wait_for_message"), (_collective, "wait_for_collective")],
    ids=["message", "collective"],
)
def test_wait_for_data_that_were_cut_in_the_middle_ends(start: Callable[..., Any], method: str) -> None:
    run_ranks(_cut_in_the_middle, 2, start, method)


def _own_ends(rank: int) -> None:
    links, opts = GlooLinks(_gloo()), dist.BroadcastOptions()
    if rank == 0:
        time.sleep(0.6)  # longer than two short waits of rank 1
    links.wait_for_collective(_gloo().broadcast([torch.ones(1)], opts), NO_TIMEOUT)
    if rank == 1:
        work, begun = _gloo().broadcast([torch.ones(1)], opts), time.monotonic()
        with pytest.raises(RuntimeError, match="timed out"):
            links.wait_for_collective(work, timedelta(seconds=0.4))
        assert time.monotonic() >= begun + 0.39
        _c10d_internals.close_gloo_links(_gloo())
        with pytest.raises(RuntimeError, match=r"(?i)clos"):  # its own error
            links.wait_for_collective(work, NO_TIMEOUT)
        _store().set("ended", "")
    _store().wait(["ended"], timedelta(seconds=60))


def test_short_waits_end_like_a_long_one() -> None:
    run_ranks(_own_ends, 2)
