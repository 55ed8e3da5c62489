"""Ranks that are late for a collective: their lines of code in `ps`, `stack` and the error of its timeout."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from monarch_backend import CollectiveTimeoutError, cli
from monarch_backend._core import platform
from monarch_backend._telemetry import late_ranks, whereabouts
from tests.support.ranks import run_ranks
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not platform.HAS_MEMFD, reason="places of other processes need memfd_create")


def _store() -> dist.Store:
    assert dist.group.WORLD is not None
    return dist.group.WORLD.get_group_store()


def _load(store: dist.Store) -> None:
    store.wait(["go on"], datetime.timedelta(seconds=60))  # line A


def _line_a() -> int:
    with open(__file__) as file:
        return next(number for number, line in enumerate(file, 1) if line.endswith("# line A\n"))


def _printed(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert cli.main([*words]) == 0
    return out.getvalue()


def _one_is_late(rank: int) -> None:
    store = _store()
    dist.all_reduce(torch.ones(2))
    if rank == 2:
        store.set("late pid", str(os.getpid()))
        _load(store)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    if rank == 0:
        pid = int(store.get("late pid"))
        expected = (
            rf"all_reduce #(\d+) of group \S+: rank 2 \(pid {pid}\) has not entered, 2 ranks wait for \d+ s; "
            rf"it is at .*test_late_ranks\.py:{_line_a()} in _load \(store\.wait\(.*# line A\)"
        )
        shown = wait_until(
            lambda: [line for line in _printed("ps", str(pid)).splitlines() if "has not entered" in line]
        )
        assert len(shown) == 1 and re.fullmatch(expected, shown[0]), shown
        [line] = [line for line in _printed("stack", str(pid)).splitlines() if "has not entered" in line]
        assert re.fullmatch(expected, line), line
        [program] = json.loads(_printed("ps", str(pid), "--json"))
        [late] = program["late"]
        assert (late["operation"], late["rank"], late["pid"], late["waiting"]) == ("all_reduce", 2, pid, [0, 1])
        assert "has not entered" not in _printed("ps", str(os.getpid()))  # this program's own rank has entered
        store.set("go on", "1")
    work.wait()
    dist.barrier()
    assert "has not entered" not in _printed("ps", str(os.getpid()))


@pytest.mark.slow
def test_late_rank_is_named_with_its_line() -> None:
    run_ranks(_one_is_late, 3)


def _times_out(rank: int) -> None:
    store = _store()
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=0.5))
    if rank == 1:
        _load(store)
        return
    try:
        with pytest.raises(CollectiveTimeoutError) as caught:
            dist.all_reduce(torch.ones(2), group=group)
        text = str(caught.value)
        place = rf"did not enter all_reduce\(.*; it is at .*test_late_ranks\.py:{_line_a()} in _load \(store\.wait"
        assert re.search(place, text), text
        with pytest.raises(CollectiveTimeoutError) as again:  # it is looked for once
            dist.all_reduce(torch.ones(2), group=group)
        assert "it is at" not in str(again.value)
    finally:
        store.set("go on", "1")


def test_timeout_names_the_line_of_the_late_rank() -> None:
    run_ranks(_times_out, 2)


def test_rank_of_another_process_has_no_place() -> None:
    assert late_ranks.place_of_rank("group 0", 0, os.getpid()) is None


def test_stopped_process_has_a_place_that_says_so() -> None:
    code = "from monarch_backend.actor import this_proc; this_proc(); print('ready', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            [recorded] = [each for each in whereabouts.processes().values() if each.pid == process.pid]
            os.kill(process.pid, signal.SIGSTOP)
            wait_until(lambda: "stopped" in whereabouts.place_of(recorded, 0.5))
        finally:
            process.kill()
