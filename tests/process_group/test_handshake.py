"""Handshake before a group is made, on stores that hold keys of earlier attempts. The ranks are threads."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch.distributed as dist

from monarch_backend._core.limits import within
from monarch_backend.process_group._handshake import Deadline, agree, exchange

PATIENCE_S = 30.0
BRIEFLY_S = 0.3


def _deadline(seconds: float = PATIENCE_S) -> Deadline:
    return Deadline(datetime.timedelta(seconds=seconds))


def _agree(store: dist.Store, rank: int, size: int, seconds: float = PATIENCE_S) -> str:
    return agree(store, rank, size, _deadline(seconds), "in the store", f"[rank {rank}]")


def _begin(store: dist.Store, ranks: Sequence[int], size: int, seconds: float = PATIENCE_S) -> list[Future[str]]:
    pool = ThreadPoolExecutor(len(ranks))
    found = [pool.submit(_agree, store, rank, size, seconds) for rank in ranks]
    pool.shutdown(wait=False)
    return found


def _errors(futures: Sequence[Future[str]]) -> list[str]:
    errors = [future.exception(PATIENCE_S) for future in futures]
    assert all(isinstance(error, dist.DistStoreError) for error in errors), errors
    return [str(error) for error in errors]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_agree_on_used_store_gives_new_name_each_time(size: int) -> None:
    store = dist.HashStore()
    names = set()
    for _ in range(10):
        found = {future.result(PATIENCE_S) for future in _begin(store, range(size), size)}
        assert len(found) == 1
        names |= found
    assert len(names) == 10


@pytest.mark.parametrize("size", [2, 5])
def test_agree_again_leaves_one_key_of_each_round(size: int) -> None:
    store = dist.HashStore()
    keys = []
    for _ in range(10):
        for future in _begin(store, range(size), size):
            future.result(PATIENCE_S)
        keys.append(store.num_keys())
    assert keys[-1] - keys[0] == 9


def _dead_rank(store: dist.Store) -> None:
    """Leave the keys of a rank 1 that died while it waited for an answer."""
    dist.PrefixStore("monarch", store).set("here/1", "0123")


def test_agree_after_death_of_rank_waits_for_its_successor() -> None:
    store = dist.HashStore()
    _dead_rank(store)
    early = _begin(store, [0, 2], 3)
    # rank 0 answered the dead process as rank 1
    store.wait(["monarch/answer/0123"], datetime.timedelta(seconds=PATIENCE_S))
    assert not any(future.done() for future in early)
    assert len({future.result(PATIENCE_S) for future in [*early, *_begin(store, [1], 3)]}) == 1


def test_agree_after_death_of_rank_names_the_rank() -> None:
    store = dist.HashStore()
    _dead_rank(store)
    for text in _errors(_begin(store, [0, 2], 3, BRIEFLY_S)):
        assert text.startswith("rank 1 of 3 has not come: ") and "in the store within 0.3 s" in text


@pytest.mark.parametrize("used", [False, True])
def test_agree_without_some_ranks_names_them_on_all_others(used: bool) -> None:
    store = dist.HashStore()
    if used:
        for future in _begin(store, range(4), 4):
            future.result(PATIENCE_S)
    for present, absent in (([0, 2], "ranks 1, 3 of 4 have"), ([1, 2, 3], "rank 0 of 4 has")):
        errors = _errors(_begin(store, present, 4, BRIEFLY_S))
        assert all(text.startswith(f"{absent} not come: ") for text in errors), errors
        assert [f"[rank {rank}]" in text for rank, text in zip(present, errors, strict=True)] == [True] * len(present)
    # A failed attempt leaves no key that the next attempt could mistake for its own.
    assert len({future.result(PATIENCE_S) for future in _begin(store, range(4), 4)}) == 1


def test_exchange_without_a_value_names_the_rank() -> None:
    with pytest.raises(dist.DistStoreError, match=r"ranks 1, 2 of 3 have not come: .*in the group's store.* \[me\]"):
        exchange(dist.HashStore(), "what", 0, 3, {"x": 1}, _deadline(BRIEFLY_S), "[me]")


def test_within_limit_gives_up_on_the_call() -> None:
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        within(BRIEFLY_S, lambda: time.sleep(5))
    assert time.monotonic() - start < 4
    assert within(PATIENCE_S, lambda: 7) == 7
    with pytest.raises(KeyError):
        within(PATIENCE_S, lambda: {}[0])
