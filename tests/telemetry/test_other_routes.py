"""Recorded collectives of Gloo alone, and of accelerators, whose calls only enqueue them."""

from __future__ import annotations

import gc
import os
import re
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from monarch_backend import CollectiveTimeoutError
from monarch_backend._core import platform
from monarch_backend._telemetry import late_ranks, program_recording, sql
from monarch_backend._telemetry.kinds import Kind, State, Status
from monarch_backend._telemetry.payloads import ROUTES, route_named
from monarch_backend._telemetry.reader import Activity
from monarch_backend.process_group import _route_recording
from monarch_backend.process_group._route_recording import RecordedCall, RouteRecording
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="recording areas need memfd_create")

GLOO = {"MONARCH_SHM": "0"}


def _rows(columns: str, condition: str = "1") -> list[tuple[object, ...]]:
    own = program_recording.read_pids([os.getpid()])
    return sql.answer(f"select {columns} from collectives where {condition} order by number", own).rows


def _activities() -> list[Activity]:
    [own] = program_recording.read_pids([os.getpid()]).processes
    return own.recorded.activities


def _cell(name: str = "group 0") -> Activity:
    [found] = [each for each in _activities() if each.kind == Kind.COLLECTIVE and each.name == name]
    return found


def _ends_one_by_one(rank: int) -> None:
    x, store = torch.ones(4), dist.group.WORLD.get_group_store()
    before = _cell().count
    if rank == 0:
        works = [dist.all_reduce(x, async_op=True) for _ in range(5)]
        assert _rows("detail, bytes, dtype, route", "status = 'open'") == [("all_reduce", 16, "float32", "gloo")]
        assert _cell().reference == before + 1
        store.set("entered", "1")
        works[1].wait()  # the first one is still under way, so the cell shows it
        assert _cell().reference == before + 1 and _cell().count == before
        works[0].wait()
        assert _cell().reference == before + 3 and _cell().count == before + 2
        wait_until(works[2].is_completed)
        assert _cell().count == before + 3
        works[3].get_future().wait()
        wait_until(lambda: _cell().count == before + 4)
        del works[4]
        gc.collect()
        assert (_cell().state, _cell().count) == (State.IDLE, before + 5)
        assert _rows("status", f"number > {before}") == [("ok",)] * 5
    else:
        store.wait(["entered"])
        for _ in range(5):
            dist.all_reduce(x)


def test_collective_of_gloo_ends_with_its_wait_future_or_work() -> None:
    run_ranks(_ends_one_by_one, 2, env=GLOO)


def _fails(rank: int) -> None:
    group, store = dist.new_group(timeout=timedelta(seconds=1)), dist.group.WORLD.get_group_store()
    if rank == 1:
        store.wait(["failed"], timedelta(seconds=60))
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.all_reduce(torch.ones(2), group=group)
        store.set("failed", "1")
        name = group._label
        assert f"timed out: all_reduce #1 of group {name}; rank 1 has not entered it, it is at " in str(caught.value)
        assert 'store.wait(["failed"]' in str(caught.value) and "Gloo says: " in str(caught.value)
        assert _rows("detail, status", f"name = 'group {name}' and status = 'error'") == [("all_reduce", "error")]
    dist.barrier()


def test_collective_of_gloo_that_fails_is_recorded_with_an_error() -> None:
    run_ranks(_fails, 2, env=GLOO)


def _late_ranks() -> list[late_ranks.LateRank]:
    jobs = late_ranks.jobs.running().values()
    return [each for job in jobs if os.getpid() in {p.pid for p in job} for each in late_ranks.of_job(job)]


def _is_late(rank: int) -> None:
    store = dist.group.WORLD.get_group_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
        store.wait(["found"], timedelta(seconds=60))
        dist.barrier()
        return
    work = dist.barrier(async_op=True)
    pid = int(store.get("pid"))
    wait_until(_late_ranks)
    [late] = _late_ranks()
    store.set("found", "1")
    work.wait()
    assert (late.rank, late.pid, late.operation, late.waiting) == (1, pid, "barrier", (0,))
    assert "store.wait" in late.place


def test_late_rank_of_gloo_is_named_with_its_line() -> None:
    run_ranks(_is_late, 2, env=GLOO)


def _is_mismatched(rank: int) -> None:
    # The end of the ranks waits for the timeout. Until a thread waits for the works, the cells show them.
    group, store = dist.new_group(timeout=timedelta(seconds=3)), dist.group.WORLD.get_group_store()
    x = torch.ones(2)
    if rank == 1:
        store.wait(["entered"], timedelta(seconds=60))
        work = dist.broadcast(x, 0, group, async_op=True)
        store.wait(["found"], timedelta(seconds=60))
    else:
        work = dist.all_reduce(x, group=group, async_op=True)
        store.set("entered", "1")
        wait_until(_late_ranks)
        [late] = _late_ranks()
        store.set("found", "1")
        assert (late.rank, late.operation, late.instead, late.waiting) == (1, "all_reduce", "broadcast", (0,))
        assert re.search(r"rank 1 \(pid \d+\) is in broadcast instead, 1 rank waits for \d+ s; it is at ", str(late))
    del work


def test_rank_of_gloo_in_another_operation_is_named() -> None:
    run_ranks(_is_mismatched, 2, env=GLOO)


def _twice(_rank: int) -> None:
    dist.barrier()
    first = _cell().trace
    other = dist.new_group()
    assert first and _cell(f"group {other._label}").trace not in (0, first)


def test_group_of_gloo_has_an_identity_of_its_own() -> None:
    run_ranks(_twice, 2, env=GLOO)


def _enqueues(_rank: int) -> None:
    name = "group 0 on cuda"
    nccl = RouteRecording(name, 0, 77, "nccl")
    with nccl.enter("broadcast", [torch.ones(3, dtype=torch.bfloat16)]) as call:
        assert call is None and _cell(name).state == State.RUNNING
    cell = _cell(name)
    assert (cell.state, cell.count, cell.payload) == (State.IDLE, 1, ("bfloat16", "nccl"))
    with pytest.raises(ZeroDivisionError), nccl.enter("barrier", ()):
        _ = 1 / 0
    assert _rows("detail, dtype, bytes, status", "route = 'nccl'") == [
        ("broadcast", "bfloat16", 6, "ok"), ("barrier", None, 0, "error"),
    ]  # fmt: skip
    del nccl
    gc.collect()
    assert name not in {each.name for each in _activities()}


def test_collective_of_an_accelerator_ends_with_its_call() -> None:
    run_ranks(_enqueues, 1)


@pytest.mark.parametrize("name", [*ROUTES[1:], "tpu_dist"])
def test_route_has_its_name_or_is_another(name: str) -> None:
    assert ROUTES[route_named(name)] == (name if name in ROUTES else "other")


def _is_dropped(_rank: int) -> None:
    name = "group 0 of gloo"
    recording = RouteRecording(name, 0, 78, "gloo")
    first = recording.enter("barrier", ())
    assert isinstance(first, RecordedCall)
    with recording._lock:  # another thread records
        thread = threading.Thread(target=lambda: first.end(Status.OK, blocking=False))
        thread.start()
        thread.join()
    assert _cell(name).count == 0
    second = recording.enter("barrier", ())
    assert isinstance(second, RecordedCall) and _cell(name).count == 1
    second.end(Status.OK)
    second.end(Status.ERROR)
    assert _cell(name).count == 2


def test_work_that_is_dropped_while_a_thread_records_ends_with_the_next_one() -> None:
    run_ranks(_is_dropped, 1)


def test_all_members_of_a_store_agree_on_an_identity() -> None:
    store = dist.HashStore()
    drawn = {_route_recording.agree_on_identity(store) for _ in range(3)}
    assert len(drawn) == 1 and drawn != {0}
    assert _route_recording.agree_on_identity(dist.HashStore()) not in drawn


def _is_closed(_rank: int) -> None:
    recording = RouteRecording("group 0 of gloo", 0, 78, "gloo")
    call = recording.enter("barrier", ())
    assert isinstance(call, RecordedCall)
    recording.close()
    assert call.status == Status.ABORTED and "group 0 of gloo" not in {each.name for each in _activities()}
    assert _rows("detail, status", "name = 'group 0 of gloo'") == [("barrier", "aborted")]
    call.end(Status.OK)


def test_closed_group_leaves_no_collective_under_way() -> None:
    run_ranks(_is_closed, 1)


def _is_many(_rank: int) -> None:
    name = "group 0 of gloo"
    recording = RouteRecording(name, 0, 78, "gloo")
    calls = [recording.enter("barrier", ()) for _ in range(_route_recording.MAX_OPEN + 3)]
    assert _cell(name).count == 3 and len(calls) > _route_recording.MAX_OPEN


def test_works_that_are_kept_without_a_wait_are_bounded() -> None:
    run_ranks(_is_many, 1)


class _Plain(dist.Store):
    """A store without `compare_set`, as torch elastic's EtcdStore."""


def test_store_without_compare_set_is_refused() -> None:
    with pytest.raises(RuntimeError):  # the group goes on without a recording
        _route_recording.agree_on_identity(_Plain())


def _is_nested(_rank: int) -> None:
    name = "group 0 of gloo"
    recording = RouteRecording(name, 0, 78, "gloo")
    inner: list[RecordedCall] = []

    def handler(*_: object) -> None:  # as a signal handler that calls a collective
        call = recording.enter("all_reduce", ())
        assert isinstance(call, RecordedCall)
        call.end(Status.OK)
        inner.append(call)

    show = RecordedCall.show
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedCall, "show", lambda call: (show(call), inner or handler()))
        outer = recording.enter("barrier", ())
    assert isinstance(outer, RecordedCall) and (_cell(name).detail, _cell(name).count) == ("barrier", 0)
    outer.end(Status.OK)
    assert _cell(name).count == 2 and len(inner) == 1


def test_collective_of_a_signal_handler_does_not_block() -> None:
    run_ranks(_is_nested, 1)
