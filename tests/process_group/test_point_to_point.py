"""Point-to-point operations: send, recv, isend, irecv, any source, tags, batches, rings. Each message is compared.

test_object_collectives.py tests objects, test_bad_input.py wrong arguments.
"""

from __future__ import annotations

import datetime
import itertools
import os
import signal

import pytest
import torch
import torch.distributed as dist

from monarch_backend import (
    CollectiveArgumentError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    RankFailedError,
)
from tests.process_group import reference
from tests.support.ranks import run_ranks

SHAPES: tuple[tuple[int, ...], ...] = ((7,), (), (0,), (3, 5), (4099,), (2, 0, 3))


def _blank(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    return torch.zeros(shape).to(getattr(torch, dtype))


def _message(sender: int, dtype: str, shape: tuple[int, ...], salt: int = 0) -> torch.Tensor:
    return reference.values(sender, dtype, shape, salt).clone()


def _check(got: torch.Tensor, sender: int, dtype: str, shape: tuple[int, ...], salt: int = 0) -> None:
    want = reference.values(sender, dtype, shape, salt)
    assert reference.same(got, want), f"{dtype}{list(shape)}: got {got.tolist()}, want {want.tolist()}"


def _rings(rank: int, dtype: str) -> None:
    size = dist.get_world_size()
    after, before = (rank + 1) % size, (rank - 1) % size
    for shape in SHAPES:
        got = _blank(shape, dtype)
        if rank % 2 == 0:
            dist.send(_message(rank, dtype, shape), after)
            assert dist.recv(got, before) == before
        else:
            dist.recv(got, before)
            dist.send(_message(rank, dtype, shape), after)
        _check(got, before, dtype, shape)
    # The same asynchronously, with all shapes in flight at once.
    sent = [_message(rank, dtype, shape, salt=1) for shape in SHAPES]
    received = [_blank(shape, dtype) for shape in SHAPES]
    works = [dist.irecv(x, before) for x in received] + [dist.isend(x, after) for x in sent]
    for work in works:
        assert work is not None
        work.wait()
    for got, shape in zip(received, SHAPES, strict=True):
        _check(got, before, dtype, shape, salt=1)


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_in_a_ring_arrive(pool, world_size: int, dtype: str) -> None:
    pool(world_size).run(_rings, dtype)


def _any_source(rank: int) -> None:
    size = dist.get_world_size()
    if rank:
        dist.send(_message(rank, "int64", (5,)), 0)
        dist.send(_message(rank, "int16", (5,), salt=1), 0, tag=7)
        return
    for dtype, salt, tag in (("int64", 0, 0), ("int16", 1, 7)):
        senders = []
        for _ in range(size - 1):
            got = _blank((5,), dtype)
            sender = dist.recv(got, tag=tag)
            _check(got, sender, dtype, (5,), salt)
            senders.append(sender)
        assert sorted(senders) == list(range(1, size))


@pytest.mark.parametrize("world_size", [2, 4])
def test_receive_from_any_source(pool, world_size: int) -> None:
    pool(world_size).run(_any_source)


def _any_source_without_waiting(rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(2), 0)
    if rank == 0:
        got = torch.zeros(2)
        work = dist.irecv(got)
        work.wait()
        assert work._source_rank() == 1
        assert got.tolist() == [1.0, 1.0]


def test_irecv_from_any_source(pool) -> None:
    pool(4).run(_any_source_without_waiting)


def _tags(rank: int) -> None:
    peer = 1 - rank
    works = [dist.isend(torch.tensor([float(10 * rank + tag)]), peer, tag=tag) for tag in (1, 2, 3)]
    for tag in (3, 1, 2):  # not in the order of the sends
        got = torch.zeros(1)
        dist.recv(got, peer, tag=tag)
        assert got.item() == 10 * peer + tag
    for work in works:
        work.wait()


def test_tags_keep_messages_apart(pool) -> None:
    pool(2).run(_tags)


def _same_tag_in_order(rank: int) -> None:
    peer, count = 1 - rank, 50
    works = [dist.isend(torch.tensor([float(i)]), peer) for i in range(count)]
    received = [torch.zeros(1) for _ in range(count)]
    works += [dist.irecv(x, peer) for x in received]
    for work in works:
        work.wait()
    assert [x.item() for x in received] == list(range(count))


def test_messages_of_one_tag_keep_their_order(pool) -> None:
    pool(2).run(_same_tag_in_order)


def _batch(rank: int, dtype: str) -> None:
    """Every rank sends five messages to every other rank in one batch, sends first."""
    size = dist.get_world_size()
    peers = [p for p in range(size) if p != rank]
    slots = list(itertools.product(peers, range(5)))
    sent = [dist.P2POp(dist.isend, _message(rank, dtype, (n, 3), salt=n), peer, tag=n) for peer, n in slots]
    received = [dist.P2POp(dist.irecv, _blank((n, 3), dtype), peer, tag=n) for peer, n in slots]
    works = dist.batch_isend_irecv(sent + received)
    assert len(works) == len(sent) + len(received)
    for work in works:
        work.wait()
    for op, (peer, n) in zip(received, slots, strict=True):
        _check(op.tensor, peer, dtype, (n, 3), salt=n)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "complex64", "float8_e4m3fn", "uint64"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_batched_messages_arrive(pool, world_size: int, dtype: str) -> None:
    pool(world_size).run(_batch, dtype)


def _subgroup(rank: int) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        peer = 4 - rank
        mine, got = torch.tensor([float(rank)]), torch.zeros(1)
        ops = [dist.P2POp(dist.isend, mine, peer, group), dist.P2POp(dist.irecv, got, peer, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert got.item() == peer
        # Ranks in the group: global rank 1 is 0, global rank 3 is 1.
        if rank == 1:
            dist.send(mine, group=group, group_dst=1)
            assert dist.recv(got, group=group) == 3  # a receive from any source returns the global rank
        else:
            assert dist.recv(got, group=group, group_src=0) == 1
            dist.send(mine, group=group, group_dst=0)
        dist.destroy_process_group(group)


def test_ranks_of_a_subgroup_exchange_messages(pool) -> None:
    pool(4).run(_subgroup)


def _layouts(rank: int) -> None:
    peer = 1 - rank
    memory = torch.zeros(9)
    view = memory[2:7]  # contiguous, with an offset in its storage
    works = [dist.irecv(view, peer), dist.isend(torch.arange(20.0)[10:15], peer)]
    for work in works:
        work.wait()
    assert memory.tolist() == [0, 0, 10, 11, 12, 13, 14, 0, 0]
    for call in (dist.send, dist.recv, dist.isend, dist.irecv):
        with pytest.raises((CollectiveArgumentError, ValueError), match="contiguous"):
            call(torch.zeros(4, 2).t(), peer)
    with pytest.raises((CollectiveArgumentError, ValueError), match="contiguous"):
        dist.recv(torch.zeros(8)[::2])
    dist.barrier()


def test_strided_tensors_are_sent_and_received(pool) -> None:
    pool(2).run(_layouts)


def _to_itself(rank: int) -> None:
    for call in (dist.send, dist.isend, dist.recv, dist.irecv):
        with pytest.raises(ValueError, match=r"same as the rank|this rank itself"):
            call(torch.ones(1), rank)
    dist.barrier()


def test_message_to_the_own_rank_is_refused(pool) -> None:
    pool(2).run(_to_itself)


def _works(rank: int) -> None:
    peer, got = 1 - rank, torch.zeros(3)
    receive = dist.irecv(got, peer)
    if rank == 0:
        assert not receive.is_completed()  # the peer sends only after the barrier
    dist.barrier()
    send = dist.isend(torch.ones(3), peer)
    assert send.wait() is True
    assert receive.wait() is True
    assert got.tolist() == [1.0] * 3
    assert receive._source_rank() == peer


def test_works_of_messages_complete(pool) -> None:
    pool(2).run(_works)


def _only_two_talk(rank: int) -> None:
    """Ranks 1 and 3 take no part: the first message needs no rendezvous of the whole group."""
    if rank == 2:
        dist.send(torch.ones(4), 0)
    if rank == 0:
        got = torch.zeros(4)
        dist.recv(got, 2)
        assert got.tolist() == [1.0] * 4


def test_first_use_by_two_of_four_ranks_does_not_wait_for_others() -> None:
    run_ranks(_only_two_talk, 4)


# Failures on the shared-memory route -------------------------------------------------------------------------------


def _mismatched(rank: int) -> None:
    sent, words = torch.zeros(4), r"rank 0 sent 4 elements of float32 with tag 3, and the receive is of "
    for got, what in (
        (torch.zeros(5), "5 elements of float32"),
        (torch.zeros(4, dtype=torch.int32), "4 elements of int32"),
    ):
        if rank == 0:
            dist.send(sent, 1, tag=3)
        else:
            with pytest.raises(
                CollectiveMismatchError, match=words + what + rf".*rank 1 of 2, host \S+, pid {os.getpid()}"
            ):
                dist.recv(got, 0, tag=3)
            assert not got.any()
    _exchange(rank)


def _exchange(rank: int) -> None:
    """Check that the group still works."""
    peer, got = 1 - rank, torch.zeros(3)
    works = [dist.isend(torch.full((3,), float(rank)), peer), dist.irecv(got, peer)]
    for work in works:
        work.wait()
    assert got.eq(peer).all()
    dist.barrier()


def test_message_of_another_size_or_dtype_raises() -> None:
    run_ranks(_mismatched, 2)


def _receive_without_sender(rank: int) -> None:
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    store.set_timeout(datetime.timedelta(seconds=60))
    if rank == 0:
        words = (
            r"rank 1 \(host \S+, pid \d+\) did not send what recv from rank 1 \(float32, 3 elements, tag 5\) waits for"
        )
        with pytest.raises(CollectiveTimeoutError, match=words):
            dist.recv(torch.zeros(3), 1, tag=5)
        store.set("gave up", "")
    else:
        store.wait(["gave up"])


def test_missing_message_times_out() -> None:
    run_ranks(_receive_without_sender, 2, group_timeout=1.0)


def _send_without_receiver(rank: int) -> None:
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    store.set_timeout(datetime.timedelta(seconds=60))
    if rank == 0:
        words = (
            r"rank 1 \(host \S+, pid \d+\) did not take what send to rank 1 \(uint8, \d+ elements, tag 0\) has for it"
        )
        with pytest.raises(CollectiveTimeoutError, match=words):
            dist.send(torch.zeros(16 << 20, dtype=torch.uint8), 1)
        store.set("gave up", "")
    else:
        store.wait(["gave up"])


def test_large_message_without_a_receiver_times_out() -> None:
    run_ranks(_send_without_receiver, 2, group_timeout=1.0)


def _killed(rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(3), 0)
        os.kill(os.getpid(), signal.SIGKILL)
    got = torch.zeros(3)
    dist.recv(got, 1)  # a message that the rank sent before it died
    assert got.eq(1).all()
    for call in (lambda: dist.recv(got, 1), lambda: dist.send(torch.zeros(16 << 20), 1), lambda: dist.recv(got, 1)):
        with pytest.raises(RankFailedError, match=r"rank 1 \(host \S+, pid \d+\) killed by signal 9"):
            call()


def test_killed_peer_fails_the_message() -> None:
    with pytest.raises(AssertionError) as caught:
        run_ranks(_killed, 2)
    assert "rank 1:\nthe rank died without an answer" in str(caught.value)
    assert "rank 0:" not in str(caught.value)


def _closed(rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(3), 0)
        return  # run_ranks destroys its group
    got = torch.zeros(3)
    dist.recv(got, 1)
    assert got.eq(1).all()
    with pytest.raises(
        RankFailedError, match=r"rank 1 \(host \S+, pid \d+\) closed the group without recv from rank 1|ended"
    ):
        dist.recv(got, 1)


def test_peer_that_destroys_its_group_fails_the_message() -> None:
    run_ranks(_closed, 2)
