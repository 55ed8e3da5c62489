"""Every public ``timeout=`` takes numbers, timedelta, None and infinity, and refuses NaN, negative numbers and text."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from monarch_backend._core.timeouts import MAX_TIMEOUT_S, check_timeout
from monarch_backend.actor import Actor, Future, endpoint, this_host
from monarch_backend.dtensor._patches.releases import CONTROLLER
from monarch_backend.hosts import attach, attach_to_workers
from monarch_backend.job import LocalJob, ProcessJob, SPMDJob, host_mesh_from_env
from monarch_backend.rdma import RDMAAction, RDMABuffer

BAD = [(float("nan"), ValueError), (-1, ValueError), (-float("inf"), ValueError), (-(10**400), ValueError),
       (datetime.timedelta(seconds=-1), ValueError), ("5", TypeError), (True, TypeError), (5j, TypeError)]  # fmt: skip
GOOD = [None, 30, 30.5, datetime.timedelta(seconds=30), float("inf"), 1e300, 10**400, np.float32(30), np.int64(30)]


@pytest.mark.parametrize(("value", "error"), BAD, ids=str)
def test_check_timeout_bad_value_raises(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="patience="):
        check_timeout(value, "patience")


def test_check_timeout_returns_seconds() -> None:
    returned = [check_timeout(value) for value in GOOD]
    assert returned == [None, 30.0, 30.5, 30.0, None, MAX_TIMEOUT_S, MAX_TIMEOUT_S, 30.0, 30.0]
    assert threading.Lock().acquire(timeout=MAX_TIMEOUT_S)
    assert check_timeout(0) == 0.0
    with pytest.raises(ValueError, match="more than 0 seconds"):
        check_timeout(0, zero=False)


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


@pytest.fixture(scope="module")
def procs() -> Iterator[Any]:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        procs.initialized.get()
        yield procs


@pytest.fixture(scope="module")
def echoes(procs: Any) -> Any:
    return procs.spawn("echoes", Echo)


def _entry_points(echoes: Any, tmp_path: Any) -> dict[str, Callable[[Any], object]]:
    """Return functions that pass their argument as ``timeout``, by name.

    A bad timeout is refused before any other effect.
    """
    done, local = Future.of(1), torch.zeros(4)
    waiting = echoes.echo.call_one(1)
    buffer = RDMABuffer(torch.zeros(4))
    hosts = ["tcp://127.0.0.1:1"]
    job = ProcessJob({"hosts": 1}, path=tmp_path / "job.json")
    return {
        "Future.get": lambda t: waiting.get(timeout=t),
        "Future.get of a finished one": lambda t: done.get(timeout=t),
        "Future.result": lambda t: waiting.result(timeout=t),
        "Future.exception": lambda t: done.exception(timeout=t),
        "Endpoint.options": lambda t: echoes.echo.options(timeout=t),
        "ActorMesh.stop": lambda t: echoes.proc_mesh.spawn("brief", Echo).stop(timeout=t).get(30),
        "RDMABuffer.read_into": lambda t: buffer.read_into(local, timeout=t),
        "RDMABuffer.write_from": lambda t: buffer.write_from(local, timeout=t),
        "RDMABuffer.fetch_add": lambda t: buffer.fetch_add(1, timeout=t),
        "RDMABuffer.compare_and_swap": lambda t: buffer.compare_and_swap(0, 1, timeout=t),
        "RDMAAction.submit": lambda t: RDMAAction().read_remote(local, buffer).submit(timeout=t),
        "attach_to_workers": lambda t: attach_to_workers(hosts, timeout=t),
        "attach": lambda t: attach(hosts[0], hosts, timeout=t),
        "Job.apply": lambda t: job.apply(timeout=t),
        "Job.state": lambda t: job.state(timeout=t),
        "LocalJob.state": lambda t: LocalJob(["hosts"]).state(timeout=t),
        "host_mesh_from_env": lambda t: host_mesh_from_env(timeout=t),
        "SPMDJob": lambda t: SPMDJob(timeout=t),
    }


def test_every_entry_point_refuses_bad_timeouts(echoes: Any, tmp_path: Any) -> None:
    wrong = []
    for name, call in _entry_points(echoes, tmp_path).items():
        for value, error in BAD:
            try:
                call(value)
            except Exception as raised:
                if type(raised) is not error or "timeout=" not in str(raised):
                    wrong.append(f"{name}({value!r}): {raised!r}")
            else:
                wrong.append(f"{name}({value!r}): accepted")
    assert not wrong, "\n".join(wrong)


def test_process_meshes_refuse_bad_timeouts(procs: Any) -> None:
    calls = [procs.stop, procs.process_group]
    if torch.torch_version.TorchVersion(torch.__version__) >= CONTROLLER:
        calls.append(procs.device_mesh)
    for value, error in BAD:
        for call in calls:
            with pytest.raises(error, match="timeout="):
                call(timeout=value)


@pytest.mark.parametrize("value", [v for v in GOOD if v is not None], ids=str)
def test_long_timeouts_wait_on_every_thread(echoes: Any, value: Any) -> None:
    assert echoes.echo.call_one(1).get(timeout=value) == 1
    assert echoes.echo.options(timeout=value).call_one(2).get() == 2
    read, source = torch.zeros(4), torch.ones(4)
    RDMABuffer(source).read_into(read, timeout=value).get(timeout=value)
    assert read.tolist() == [1.0] * 4
    found: list[Any] = []

    def wait() -> None:
        try:
            found.append(echoes.echo.call_one(3).get(timeout=value))
        except BaseException as error:
            found.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3, 3, 3]
