"""Groups between hosts whose hostname resolves to loopback, as Debian's installer configures it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from monarch_backend._core.addresses import address_towards
from monarch_backend.process_group import _own_address
from tests.support.hosts import Hosts, hosts, refusal, run_on_hosts, sent_bytes


@pytest.fixture(scope="module")
def debian() -> Iterator[Hosts]:
    """Start two hosts whose own name resolves to 127.0.1.1."""
    if why := refusal():
        pytest.skip(why)
    with hosts(2, own_name="127.0.1.1") as made:
        yield made


def _sums(rank: int) -> list[bool]:
    assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
    before, value = sent_bytes(), torch.full((1 << 16,), float(rank))
    dist.all_reduce(value)
    subgroup = dist.new_group([0, 2])
    part = torch.tensor([rank + 1])
    if rank != 1:
        dist.all_reduce(part, group=subgroup)
    return [sent_bytes() > before, value.eq(3).all().item() is True, part.item() == (2 if rank == 1 else 4)]


@pytest.mark.parametrize("shared_memory", ["0", "1"])
@pytest.mark.parametrize("master", ["", "host-a"])
def test_group_of_hosts_named_loopback_works(debian: Hosts, master: str, shared_memory: str) -> None:
    # On host-a the store's host name resolves to 127.0.1.1, so its ranks learn the network's address from rank 2.
    env = {"MONARCH_SHM": shared_memory}
    assert run_on_hosts(debian, [0, 0, 1], _sums, env=env, master=master) == [[True] * 3] * 3


@pytest.mark.slow
def test_interface_of_the_user_wins_over_store_route(debian: Hosts) -> None:
    # Each host has its own loopback interface, so a group cannot connect over it.
    words = "Connection refused|timed out|not there within"
    with pytest.raises(AssertionError, match=words):
        run_on_hosts(debian, [0, 1], _sums, env={"GLOO_SOCKET_IFNAME": "lo"}, group_timeout=5.0)


def _stays_local(rank: int) -> set[str]:
    # Every connection of this process must use loopback.
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    found = set()
    with open("/proc/self/net/tcp") as table:
        for line in list(table)[1:]:
            words = line.split()
            if f"socket:[{words[9]}]" in inodes:
                found.add(socket.inet_ntoa(bytes.fromhex(words[1].split(":")[0])[::-1]))
    return found


def test_group_of_one_host_named_loopback_stays_on_loopback(debian: Hosts) -> None:
    for addresses in run_on_hosts(debian, [0, 0], _stays_local, master="host-a", env={"MONARCH_SHM": "0"}):
        assert addresses and not {a for a in addresses if not a.startswith("127.") and a != "0.0.0.0"}


def test_address_on_the_way_to_loopback_or_nowhere_is_empty() -> None:
    for host in ("", "127.0.0.1", "::1", "localhost", "x" * 64):
        assert address_towards(host) == "", host


def test_hostname_without_address_counts_as_loopback() -> None:
    assert _own_address.is_hostname_loopback("x" * 64)
    assert _own_address.is_hostname_loopback("localhost")
