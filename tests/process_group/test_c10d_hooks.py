"""Features of torch 2.14 and later for every process group: hooks around collectives, NaN checks, gather_single.

torch's dispatcher calls the hooks. Collectives bypass the dispatcher unless a hook is registered. On an older torch
all tests skip: `make test-torch VERSION=2.15.0` runs them.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from monarch_backend import CollectiveArgumentError
from monarch_backend._core.torch_version import torch_version
from monarch_backend.process_group import _bootstrap
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(torch_version() < (2, 14), reason="torch 2.14 brought it")


def _collectives(rank: int) -> list[str]:
    """Run each collective once, and return the names that the hooks report."""
    x, two = torch.ones(2), [torch.zeros(2), torch.zeros(2)]
    dist.all_reduce(x)
    dist.all_reduce(x, async_op=True).wait()
    dist.broadcast(x, 0)
    dist.reduce(x, 1)
    dist.all_gather(two, x)
    dist.all_gather_single(torch.zeros(4), x)
    dist.reduce_scatter(torch.zeros(2), two)
    dist.reduce_scatter_single(torch.zeros(1), x)
    dist.gather(x, two if rank == 0 else None, 0)
    dist.scatter(x, two if rank == 0 else None, 0)
    dist.all_to_all([torch.zeros(2), torch.zeros(2)], two)
    dist.barrier()
    names = ["ALLREDUCE", "ALLREDUCE", "BROADCAST", "REDUCE", "ALLGATHER", "_ALLGATHER_BASE", "REDUCE_SCATTER"]
    return [*names, "_REDUCE_SCATTER_BASE", "GATHER", "SCATTER", "ALLTOALL", "BARRIER"]


def _hooks(rank: int) -> list[str]:
    group, seen = dist.group.WORLD, []
    group.register_pre_hook(7, lambda call: seen.append(f"before {call.name.name}"))
    group.register_post_hook(8, lambda call: seen.append(f"after {call.name.name}"))
    _collectives(rank)
    group.unregister_pre_hook(7)
    group.unregister_post_hook(8)
    count = len(seen)
    dist.all_reduce(torch.ones(1))
    assert len(seen) == count
    return seen


def test_hooks_see_every_collective_as_on_gloo() -> None:
    ours = run_ranks(_hooks, 2)
    assert ours == run_ranks(_hooks, 2, backend="gloo")
    assert len(ours[0]) == 2 * 12
    assert ours[0][:2] == ["before ALLREDUCE", "after ALLREDUCE"]


def _nan(rank: int, attach: bool) -> None:
    from torch._C._distributed_c10d import NanCheckHook

    good, bad = torch.ones(2), torch.tensor([1.0, float("nan")])
    group = dist.new_group([0, 1])
    if attach:
        dist.all_reduce(bad.clone(), group=group)  # no NaN check is attached yet
        NanCheckHook.attach(group)
    dist.all_reduce(good, group=group)
    for call in (lambda: dist.all_reduce(bad, group=group), lambda: dist.broadcast(bad, rank, group=group)):
        with pytest.raises(RuntimeError, match="NaN"):
            call()
    dist.all_reduce(good, group=group)
    assert good.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("attach", [True, False], ids=["attached", "by the environment"])
def test_nan_check_raises(attach: bool) -> None:
    run_ranks(_nan, 2, attach, env={} if attach else {"TORCH_DIST_NAN_CHECK": "1"})


def _recorded(rank: int, instance: dict[str, str]) -> list[str]:
    from torch._C import _distributed_c10d

    group = dist.group.WORLD
    hook = _distributed_c10d.FlightRecorderHook.attach(group)
    dist.all_reduce(torch.ones(1))
    receiver = dist.irecv(torch.zeros(1), 1 - rank, tag=rank)
    dist.send(torch.ones(1), 1 - rank, tag=1 - rank)
    receiver.wait()
    assert hook is not None
    return [e["profiling_name"] for e in json.loads(_distributed_c10d._dump_fr_trace_json(**instance))["entries"]]


@pytest.mark.parametrize("shm", [True, False], ids=["shared memory", "gloo"])
def test_flight_recorder_has_collectives(shm: bool) -> None:
    env = {"TORCH_FR_BUFFER_SIZE": "100"} | ({} if shm else {"MONARCH_SHM": "0"})
    # torch 2.15 has a recorder for each kind of backend.
    ours = run_ranks(_recorded, 2, {"backend": "shm"} if shm and torch_version() > (2, 14) else {}, env=env)
    if shm or torch_version() == (2, 14):  # torch 2.14's hook does not know that a backend has its own recorder
        names = [name.partition(" ")[0].replace("all_reduce", "allreduce") for name in ours[0]]
        by = "c10d" if torch_version() == (2, 14) else "shm"
        assert {f"{by}:allreduce", f"{by}:recv", f"{by}:send"} <= set(names)
    else:
        assert "gloo:all_reduce" in ours[0]


def _unasked(_rank: int) -> tuple[set[str], set[str]]:
    group = dist.new_group([0, 1])
    before = set(group._observed)
    group.register_pre_hook(7, lambda call: None)
    return before, group._observed


def test_disabled_flight_recorder_keeps_the_fast_path() -> None:
    assert run_ranks(_unasked, 2) == [(set(), {"cpu"})] * 2


def _hooked(_rank: int) -> list[Any]:
    """A group keeps its name and description, and functional collectives still find it, after a hook is registered."""
    from torch.distributed import _functional_collectives as funcol

    group = dist.group.WORLD
    name, desc = group.group_name, group.group_desc
    group.register_pre_hook(7, lambda call: None)
    assert (group.group_name, group.group_desc) == (name, desc)
    return funcol.all_reduce(torch.ones(2), "sum", group).wait().tolist()


def test_group_with_hooks_keeps_its_name() -> None:
    assert run_ranks(_hooked, 2) == [[2.0, 2.0]] * 2


def _nested(_rank: int, before: bool) -> tuple[list[Any], float]:
    """A hook that calls a collective of the same group."""
    group, busy, seen = dist.group.WORLD, [], []

    def hook(call: Any) -> None:
        seen.append(call.name.name)
        if not busy:
            busy.append(True)
            inner = torch.full((1,), 10.0)
            dist.all_reduce(inner)
            seen.append(inner.item())

    (group.register_pre_hook if before else group.register_post_hook)(7, hook)
    outer = torch.ones(1)
    dist.all_reduce(outer)
    return seen, outer.item()


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_hooks_can_call_collectives(before: bool) -> None:
    assert run_ranks(_nested, 2, before) == [(["ALLREDUCE", "ALLREDUCE", 20.0], 2.0)] * 2


def _two_hosts(rank: int) -> tuple[set[str], list[Any]]:
    """Ranks 0 and 1 are on this host, ranks 2 and 3 appear to be on another. Gloo carries messages, with or without
    hooks.
    """
    exchange = _bootstrap.exchange

    def elsewhere(store: Any, name: str, rank: int, size: int, mine: Any, deadline: Any, who: str) -> Any:
        said = mine | {"kernel": "another"} if name == "shm" and rank >= 2 else mine
        return exchange(store, name, rank, size, said, deadline, who)

    _bootstrap.exchange = elsewhere
    group = dist.new_group([0, 1, 2, 3])
    unasked = set(group._observed)
    results: list[Any] = [str(group._routes["cpu"].backend)]
    for _ in range(2):  # without a hook and with one
        x = torch.full((2,), float(rank))
        if rank in (0, 1):
            dist.send(x, 3 - rank, group)
        else:
            results.append(
                (dist.recv(x, 0, group), x.tolist()) if rank == 3 else (dist.recv(x, group=group), x.tolist())
            )
        dist.all_reduce(x.fill_(1.0), group=group)
        results.append(x.tolist())
        group.register_pre_hook(7, lambda call: None)
    return unasked, results


def test_hooks_run_on_groups_over_two_hosts() -> None:
    for rank, (unasked, results) in enumerate(run_ranks(_two_hosts, 4)):
        received = {2: [(1, [1.0, 1.0])], 3: [(0, [0.0, 0.0])]}.get(rank, [])
        assert unasked == set()
        assert results == ["shm+gloo", *[*received, [4.0, 4.0]] * 2]


def _timeouts(rank: int) -> None:
    group = dist.new_group([0, 1])
    dist.set_timeout(datetime.timedelta(seconds=7), group)
    assert group._get_backend(torch.device("cpu")).options._timeout == datetime.timedelta(seconds=7)


def test_set_timeout_applies_to_later_calls() -> None:
    run_ranks(_timeouts, 2)


def _gather_single(rank: int) -> Any:
    answers = []
    for shape, dtype in (((2,), torch.float32), ((3, 2), torch.int16), ((0,), torch.int64)):
        mine = torch.full(shape, rank + 1, dtype=dtype)
        out = torch.zeros(2 * shape[0], *shape[1:], dtype=dtype) if rank == 1 else None
        work = dist.gather_single(mine, out, dst=1, async_op=True)
        work.wait()
        answers.append(None if out is None else out.tolist())
    with pytest.raises(CollectiveArgumentError, match="The output must have 2"):
        dist.gather_single(torch.ones(2), torch.zeros(3), dst=rank)
    return answers


def test_gather_single_which_gloo_lacks() -> None:
    nothing, gathered = run_ranks(_gather_single, 2)
    assert nothing == [None] * 3
    assert gathered == [[1.0, 1.0, 2.0, 2.0], [[1, 1]] * 3 + [[2, 2]] * 3, []]
