"""Rendezvous at the store within the timeout. Errors name the missing ranks. Each rank is a process."""

from __future__ import annotations

import contextlib
import datetime
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from monarch_backend.process_group import _handshake, _rendezvous
from tests.support.ranks import run_ranks

SECONDS = 2.0  # timeout for the other ranks
ALONE = 1.0  # timeout if no other rank comes


@contextlib.contextmanager
def _held_port() -> Iterator[int]:
    """Yield a port without a listener. A socket reserves it, with options that let a server bind it too."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def port() -> Iterator[int]:
    with _held_port() as port:
        yield port


@pytest.fixture
def ports() -> Iterator[list[int]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_held_port()) for _ in range(3)]


def _init(rank: int, size: int, url: str, seconds: float = SECONDS, backend: str = "monarch") -> None:
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, timeout=timeout)


def _fails(
    call: Any, *words: str, error: type[Exception] = dist.DistNetworkError, seconds: float = SECONDS, late: float = 1.0
) -> str:
    """``call`` must fail within the timeout plus ``late`` seconds. The message has the words, host and pid."""
    start = time.monotonic()
    with pytest.raises(error) as caught:
        call()
    assert seconds - 0.2 < time.monotonic() - start < seconds + late
    for word in (*words, socket.gethostname(), f"pid {os.getpid()}"):
        assert word in str(caught.value), f"{word!r} is missing in: {caught.value}"
    assert not dist.is_initialized()
    return str(caught.value)


# No server ever starts at these addresses. The cases wait at the same time.
NOBODY = [
    ("127.0.0.1", "monarch", "connection refused", ALONE),
    ("127.0.0.1", "cpu:Monarch,cuda:nccl", "connection refused", 1.5),
    ("localhost", "MONARCH", "connection refused", ALONE),
    ("::1", "monarch", "", ALONE),  # refused, or the machine has no IPv6
    ("nowhere.invalid", "monarch", "does not resolve", ALONE),
]


def _unreachable(rank: int, address: str, port: int) -> None:
    host, backend, why, seconds = NOBODY[rank]
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    _fails(
        lambda: _init(1, 2, f"tcp://{shown}", seconds, backend),
        *(shown, why, "rank 1 of 2", f"{seconds:g} s"),
        seconds=seconds,
    )


def test_store_without_a_listener_times_out(port: int) -> None:
    run_ranks(_unreachable, len(NOBODY), port, backend=None)


def _env(rank: int, address: str, port: int) -> None:
    """With torchrun's store, rank 0 is a client like the other ranks."""
    number = (2, 0)[rank]
    if rank == 1:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE="3")
    who = "torchrun's agent" if "TORCHELASTIC_USE_AGENT_STORE" in os.environ else "rank 0"
    timeout, words = datetime.timedelta(seconds=ALONE), (f"127.0.0.1:{port}", f"rank {number} of 3", who)
    _fails(lambda: dist.init_process_group("monarch", timeout=timeout), *words, seconds=ALONE)


def test_environment_address_without_a_listener_times_out(port: int) -> None:
    run_ranks(_env, 2, port, backend=None)


def _slow_resolver(rank: int, address: str) -> None:
    def slow(host: str, *args: Any, flags: int = 0, **kw: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        signal.pause()

    socket.getaddrinfo = slow  # type: ignore[assignment]
    _fails(lambda: _init(1, 2, "tcp://far.invalid:29500", ALONE), "far.invalid:29500", "no answer", seconds=ALONE)


def test_silent_name_server_times_out() -> None:
    run_ranks(_slow_resolver, 1, backend=None)


@contextlib.contextmanager
def _elsewhere(script: str) -> Iterator[int]:
    """Start a process that binds the socket ``s`` and runs ``script``. Yield its port."""
    script = f"import socket, signal; s = socket.create_server(('127.0.0.1', 0)); {script}"
    script = script.replace("GO", "print(s.getsockname()[1], flush=True)")
    with subprocess.Popen([sys.executable, "-S", "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield int(process.stdout.readline())
        finally:
            process.kill()


def _no_store(rank: int, address: str, port: int) -> None:
    words = f"127.0.0.1:{port}", "no store of torch answers there"
    _fails(lambda: _init(1, 2, f"tcp://127.0.0.1:{port}", ALONE), *words, seconds=ALONE)


def test_silent_server_times_out() -> None:
    # The server is a stopped process or another service. torch's own client would never time out.
    with _elsewhere("GO; signal.pause()") as port:
        run_ranks(_no_store, 1, port, backend=None)


def _works(rank: int) -> None:
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x.tolist() == [2.0] * 3


def _late_server(rank: int, address: str, port: int) -> None:
    # The server starts when the client reports that it found none, not after a fixed sleep.
    marks = dist.FileStore(address.removeprefix("file://"), 2)
    if rank == 0:
        marks.wait(["probed"], datetime.timedelta(seconds=30))
    else:
        check = _rendezvous._probe_server

        def told(*args: Any) -> None:
            try:
                check(*args)
            except ConnectionRefusedError:
                marks.set("probed", "1")
                raise

        _rendezvous._probe_server = told
    _init(rank, 2, f"tcp://127.0.0.1:{port}", 30)
    _works(rank)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("libuv", ["0", "1"])
def test_server_that_starts_late_is_found(port: int, libuv: str) -> None:
    run_ranks(_late_server, 2, port, backend=None, env={"USE_LIBUV": libuv})


def _again(rank: int, address: str, port: int) -> None:
    marks = dist.FileStore(address.removeprefix("file://"), 2)
    if rank == 1:
        _fails(lambda: _init(1, 2, f"tcp://127.0.0.1:{port}", 0.5), seconds=0.5)
        marks.set("failed", "1")
    marks.wait(["failed"], datetime.timedelta(seconds=30))
    _init(rank, 2, f"tcp://127.0.0.1:{port}", 30)
    _works(rank)
    dist.barrier()
    dist.destroy_process_group()


def test_init_after_an_error_succeeds(port: int) -> None:
    run_ranks(_again, 2, port, backend=None)


def _server(rank: int, address: str, libuv: bool, hits: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    here = _rendezvous.place(f"tcp://127.0.0.1:{store.port}", 1, 2)
    assert here is not None
    for _ in range(hits):
        _rendezvous._probe_server(here, _handshake.Deadline(datetime.timedelta(seconds=30)))
    store.set("key", "value")
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    assert other.get("key") == b"value"


@pytest.mark.parametrize("libuv", [False, True])
def test_connection_probe_does_not_disturb_torchs_server(capfd: pytest.CaptureFixture[str], libuv: bool) -> None:
    # torch's server looks up the name of each client. A lost answer must not take long.
    run_ranks(_server, 1, libuv, 100, backend=None, env={"RES_OPTIONS": "timeout:1 attempts:5"})
    assert capfd.readouterr().err == ""


Worlds = list[tuple[str, list[int]]]


def _absent(rank: int, address: str, worlds: Worlds, size: int, late: float) -> str:
    """Run in several worlds at once: each world has its own store, and some of its ranks are missing."""
    url, mine, present = [(url, mine, present) for url, present in worlds for mine in present][rank]
    absent = [other for other in range(size) if other not in present]
    words = [f"{', '.join(map(str, absent))} of {size} ha", "not come", f"rank {mine} of {size}"]
    seconds = SECONDS if len(present) > 1 else ALONE
    return _fails(
        lambda: _init(mine, size, url, seconds), *words, error=dist.DistStoreError, seconds=seconds, late=late
    )


def _wait_for_absent(worlds: Worlds, size: int, late: float) -> None:
    run_ranks(_absent, sum(len(present) for _, present in worlds), worlds, size, late, backend=None)


def test_missing_ranks_are_named_on_all_others(ports: list[int]) -> None:
    presents = [[0], [0, 2], [0, 2, 3]]
    worlds = [(f"tcp://127.0.0.1:{port}", present) for port, present in zip(ports, presents, strict=True)]
    _wait_for_absent(worlds, 4, 1.0)


def test_missing_ranks_at_a_file_store_are_named(tmp_path: Path) -> None:
    worlds = [(f"file://{tmp_path}/{len(present)}", present) for present in ([1], [0, 2])]
    _wait_for_absent(worlds, 3, 1.5)  # torch's FileStore counts in whole seconds


def _absent_from_new_group(rank: int) -> None:
    timeout = datetime.timedelta(seconds=ALONE)
    if rank == 0:
        with pytest.raises(dist.DistStoreError, match="rank 1 of 2 has not come"):
            dist.new_group([0, 1], timeout=timeout)
        dist.group.WORLD.get_group_store().set("given-up", "1")
    else:
        dist.group.WORLD.get_group_store().wait(["given-up"], datetime.timedelta(seconds=30))
    _works(rank)


def test_missing_rank_of_a_new_group_is_named() -> None:
    run_ranks(_absent_from_new_group, 2)


def _host_dies(rank: int, address: str, port: int) -> None:
    url = f"tcp://127.0.0.1:{port}"
    if rank == 1:
        with pytest.raises(dist.DistNetworkError, match=rf"store at 127.0.0.1:{port} closed .*rank 1 of 3"):
            _init(1, 3, url, 60)
        return
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    store.wait(["monarch/here/1"], datetime.timedelta(seconds=30))


def test_lost_store_ends_waiting_ranks(port: int) -> None:
    run_ranks(_host_dies, 2, port, backend=None)


@pytest.mark.parametrize(
    "url", ["file:///nowhere", "tcp://h", "tcp://h:0", "tcp://h:1?rank=0", "x://h:1", b"tcp://h:1"]
)
def test_unsupported_urls_are_left_to_torch(url: Any) -> None:
    assert _rendezvous.place(url, 0, 2) is None


def test_address_is_parsed_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "h", "MASTER_PORT": "9", "RANK": "3", "WORLD_SIZE": "5"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    def read(url: str, rank: int = -1, size: int = -1) -> Any:
        here = _rendezvous.place(url, rank, size)
        return here and (here.host, here.port, here.rank, here.size, here.libuv, here.agent)

    assert read("env://") == ("h", 9, 3, 5, True, False)
    assert read("env://", 1, 2) == ("h", 9, 1, 2, True, False)
    assert read("env://?rank=2&world_size=4&use_libuv=0") == ("h", 9, 2, 4, False, False)
    assert read("tcp://[::1]:7", 0, 1) == ("::1", 7, 0, 1, True, False)
    assert read("tcp://h:7") is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert read("env://") == ("h", 9, 3, 5, True, True)


def test_store_is_made_as_in_torch() -> None:
    from torch.distributed.rendezvous import _create_c10d_store

    made = re.sub(r"\s+", " ", inspect.getsource(_create_c10d_store))
    assert "start_daemon = rank == 0 return TCPStore( host_name=hostname, port=port, world_size=world_size, " in made
    assert "is_master=start_daemon, timeout=timeout, multi_tenant=True, use_libuv=use_libuv, )" in made


def test_torch_counts_groups_from_0() -> None:
    assert "_world.group_count" in inspect.getsource(c10d._process_group_name)
    assert "_world.group_count = 0" in inspect.getsource(c10d.destroy_process_group)
