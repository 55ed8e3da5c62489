"""Reader that may not call process_vm_readv and process_vm_writev, as under the seccomp filters of containers."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from collections.abc import Iterator

import pytest
import torch

from monarch_backend.actor import ActorError, ActorMesh, endpoint
from monarch_backend.rdma import RDMAError
from tests.rdma.actors import ROUTES, Process, two_processes

Pair = tuple[ActorMesh, ActorMesh]
MIB = 1 << 20
NUMBERS = {"x86_64": (317, 310, 311), "aarch64": (277, 270, 271)}
"""Numbers of the system calls seccomp, process_vm_readv and process_vm_writev."""

pytestmark = [
    pytest.mark.usefixtures("faults"),
    pytest.mark.needs("process_vm_readv"),
    pytest.mark.skipif(os.uname().machine not in NUMBERS, reason="the kernel's numbers are not known here"),
]


def forbid() -> None:
    """Make both calls fail with EPERM in all threads of this process from now on."""
    seccomp, readv, writev = NUMBERS[os.uname().machine]
    steps = [  # instructions of a classic BPF program: code, jump if true, jump if false, operand
        (0x20, 0, 0, 0),  # load the system call's number
        (0x15, 1, 0, readv),
        (0x15, 0, 1, writev),
        (0x06, 0, 0, 0x00050001),  # SECCOMP_RET_ERRNO with EPERM
        (0x06, 0, 0, 0x7FFF0000),  # SECCOMP_RET_ALLOW
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    what = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    # SECCOMP_SET_MODE_FILTER with SECCOMP_FILTER_FLAG_TSYNC, because transfers also run in other threads.
    assert libc.syscall(seccomp, 1, 1, what) == 0, os.strerror(ctypes.get_errno())


class Forbidden(Process):
    """A process that can forbid itself these system calls."""

    @endpoint
    def forbid(self) -> str:
        """Forbid the system calls, and return the error message of one."""
        forbid()
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0) == -1
        return os.strerror(ctypes.get_errno())


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    for owner, reader in two_processes("kernel", Forbidden):
        assert reader.forbid.call_one().get() == "Operation not permitted"
        yield owner, reader


def test_owner_thread_copies_instead(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", 64).get()
    [said] = reader.debug_lines.call_one(buffer).get()
    assert said.endswith("same host, copied by its own thread: the kernel forbids process_vm_readv")
    assert reader.way.call_one(buffer).get() == ROUTES["thread"].way
    owner.drop.call_one(buffer).get()


@pytest.mark.parametrize("kind", ["slice", "array"])
@pytest.mark.parametrize("size", [1, 4095, MIB + 3, 5 * MIB])
def test_read_and_write_transfer_the_bytes_without_cma(pair: Pair, kind: str, size: int) -> None:
    owner, reader = pair
    buffer = owner.own.call_one(kind, size).get()
    assert reader.read.call_one(buffer, kind).get()
    reader.write.call_one(buffer, kind, 9).get()
    assert owner.shows.call_one(size, 9).get()
    owner.drop.call_one(buffer).get()


def test_many_parts_in_one_action_without_cma(pair: Pair) -> None:
    owner, reader = pair
    buffer = owner.own.call_one("tensor", MIB).get()
    ends = itertools.pairwise(range(0, MIB, 5003))
    assert reader.scatter.call_one(buffer, list(ends)).get()
    owner.drop.call_one(buffer).get()


def test_atomics_without_cma(pair: Pair) -> None:
    """Each atomic runs once, while the owner runs atomics on the same value."""
    owner, reader = pair
    buffer = owner.own_value.call_one(torch.zeros(2, dtype=torch.int64)).get()
    calls = [each.add.call_one(buffer, 1, 200) for each in (owner, reader)]
    assert sorted(number for call in calls for number in call.get()) == list(range(400))
    assert reader.swap.call_one(buffer, 0, 7, 8).get() == 0
    assert reader.swap.call_one(buffer, 0, 9, 8).get() == 7
    assert owner.value.call_one().get().tolist() == [400, 7]
    owner.drop.call_one(buffer).get()


def test_opposite_direction_still_uses_cma(pair: Pair) -> None:
    owner, reader = pair
    buffer = reader.own.call_one("tensor", 2 * MIB).get()
    assert owner.read.call_one(buffer).get()
    assert owner.way.call_one(buffer).get() == ROUTES["kernel"].way
    reader.drop.call_one(buffer).get()


def test_cma_forbidden_after_connection_raises() -> None:
    """A filter installed after the first transfer: the kernel's error is raised, and no bytes are written."""
    for owner, reader in two_processes("kernel", Forbidden):
        buffer = owner.own.call_one("tensor", 2 * MIB).get()
        assert reader.read.call_one(buffer).get(), "they have met"
        reader.forbid.call_one().get()
        for call in (reader.read.call_one(buffer), reader.write.call_one(buffer)):
            with pytest.raises(ActorError, match="Operation not permitted") as raised:
                call.get()
            assert isinstance(raised.value.__cause__, RDMAError)
        assert owner.shows.call_one(2 * MIB, 1).get()
