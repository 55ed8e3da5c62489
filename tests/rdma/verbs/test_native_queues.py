"""Compiled calls on queues that a verbs package created: over a fake driver, and over real ones in the guest."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from monarch_backend import _native
from monarch_backend._verbs.providers import provider
from monarch_backend._verbs.providers.provider import COMPARE_SWAP, FETCH_ADD, READ, WRITE, Work
from tests.rdma.verbs import peers
from tests.rdma.verbs.conftest import Start
from tests.rdma.verbs.peers import Host

pytestmark = pytest.mark.needs("verbs")

CSRC = Path(__file__).resolve().parents[3] / "csrc"
FD, ENTRIES, NUMBER, RC = 1234, 63, 0x1A2B3C, 2


class Sge(ctypes.Structure):
    _fields_ = (("addr", ctypes.c_uint64), ("length", ctypes.c_uint32), ("lkey", ctypes.c_uint32))


class Atomic(ctypes.Structure):
    _fields_ = (
        ("remote_addr", ctypes.c_uint64),
        ("compare_add", ctypes.c_uint64),
        ("swap", ctypes.c_uint64),
        ("rkey", ctypes.c_uint32),
    )


class Rdma(ctypes.Structure):
    _fields_ = (("remote_addr", ctypes.c_uint64), ("rkey", ctypes.c_uint32))


class Target(ctypes.Union):
    _fields_ = (("rdma", Rdma), ("atomic", Atomic))


class SendWr(ctypes.Structure):
    pass


SendWr._fields_ = (
    ("wr_id", ctypes.c_uint64),
    ("next", ctypes.POINTER(SendWr)),
    ("sg_list", ctypes.POINTER(Sge)),
    ("num_sge", ctypes.c_int),
    ("opcode", ctypes.c_int),
    ("send_flags", ctypes.c_uint),
    ("imm_data", ctypes.c_uint32),
    ("wr", Target),
    ("rest", ctypes.c_uint64 * 7),
)


class Wc(ctypes.Structure):
    _fields_ = (
        ("wr_id", ctypes.c_uint64),
        ("status", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("vendor_err", ctypes.c_uint32),
        ("byte_len", ctypes.c_uint32),
        ("imm_data", ctypes.c_uint32),
        ("qp_num", ctypes.c_uint32),
        ("rest", ctypes.c_uint32 * 4),
    )


Poll = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(Wc))
Arm = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
Post = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(SendWr), ctypes.c_void_p)


class Context(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_void_p),
        ("before", ctypes.c_void_p * 11),
        ("poll", Poll),
        ("arm", Arm),
        ("between", ctypes.c_void_p * 12),
        ("post", Post),
        ("after", ctypes.c_void_p * 6),
        ("fds", ctypes.c_int * 2),
    )


class Channel(ctypes.Structure):
    _fields_ = (("context", ctypes.c_void_p), ("fd", ctypes.c_int), ("refcnt", ctypes.c_int))


class Cq(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("channel", ctypes.c_void_p),
        ("cq_context", ctypes.c_void_p),
        ("handle", ctypes.c_uint32),
        ("cqe", ctypes.c_int),
    )


class Qp(ctypes.Structure):
    _fields_ = (
        ("context", ctypes.c_void_p),
        ("qp_context", ctypes.c_void_p),
        ("pd", ctypes.c_void_p),
        ("send_cq", ctypes.c_void_p),
        ("recv_cq", ctypes.c_void_p),
        ("srq", ctypes.c_void_p),
        ("handle", ctypes.c_uint32),
        ("qp_num", ctypes.c_uint32),
        ("state", ctypes.c_int),
        ("qp_type", ctypes.c_int),
    )


def _at(made: ctypes.Structure) -> int:
    return ctypes.addressof(made)


class Driver:
    """A fake device with a queue of each kind. It records all calls."""

    def __init__(self) -> None:
        self.posted: list[dict[str, Any]] = []
        self.completions: list[tuple[int, int, int, int]] = []  # id, status, queue pair number, vendor error
        self.armed = 0
        self.result = 0  # result of the next calls
        self._kept = (Poll(self._poll), Arm(self._arm), Post(self._post))
        self.context = Context(poll=self._kept[0], arm=self._kept[1], post=self._kept[2])
        self.channel = Channel(_at(self.context), FD, 1)
        self.cq = Cq(_at(self.context), _at(self.channel), None, 5, ENTRIES)
        self.qp = Qp(
            _at(self.context), None, None, _at(self.cq), _at(self.cq), None, 6, qp_num=NUMBER, state=3, qp_type=RC
        )

    def _poll(self, queue: int, most: int, into: Any) -> int:
        assert queue == _at(self.cq)
        if self.result:
            return self.result
        taken, self.completions = self.completions[:most], self.completions[most:]
        for i, (id_, status, number, vendor) in enumerate(taken):
            into[i].wr_id, into[i].status, into[i].qp_num, into[i].vendor_err = id_, status, number, vendor
        return len(taken)

    def _arm(self, queue: int, solicited: int) -> int:
        assert queue == _at(self.cq) and not solicited
        self.armed += 1
        return self.result

    def _post(self, pair: int, first: Any, _: Any) -> int:
        assert pair == _at(self.qp)
        while first:
            wr = first.contents
            target = wr.wr.atomic if wr.opcode in (FETCH_ADD, COMPARE_SWAP) else wr.wr.rdma
            sge = wr.sg_list[0] if wr.num_sge else None
            self.posted.append(
                {name: getattr(target, name) for name, _ in target._fields_}
                | {"id": wr.wr_id, "opcode": wr.opcode, "flags": wr.send_flags}
                | {"local": (sge.addr, sge.length, sge.lkey) if sge else None}
            )
            first = wr.next
        return self.result

    def queue(self) -> _native.VerbsCompletionQueue:
        found = provider.compiled_queue(holder(self.cq), FD, ENTRIES)
        assert found is not None
        return found

    def pair(self) -> _native.VerbsQueuePair:
        found = provider.compiled_pair(holder(self.qp), NUMBER, self.queue())
        assert found is not None
        return found


def holder(of: ctypes.Structure | int) -> Any:
    """Return an object whose memory contains this pointer among others, like the objects of the verbs packages."""
    return ctypes.c_void_p(of if isinstance(of, int) else _at(of))


def test_found_queues_post_and_poll() -> None:
    driver = Driver()
    queue, pair = driver.queue(), driver.pair()
    queue.arm()
    assert driver.armed == 1
    big = (1 << 64) - 3
    pair.post([Work(7, READ, True, big, 0xFFFFFFFE, 0xFFFFFFF1, big - 1, 0xFFFFFFF2)])
    assert driver.posted == [
        {"id": 7, "opcode": READ, "flags": 2, "local": (big, 0xFFFFFFFE, 0xFFFFFFF1)}
        | {"remote_addr": big - 1, "rkey": 0xFFFFFFF2}
    ]
    driver.completions = [(big, 0, NUMBER, 0), (8, 12, 0xFFFFFFFF, 0x81)]
    assert queue.poll(64) == [(big, 0, NUMBER, 0), (8, 12, 0xFFFFFFFF, 0x81)]
    assert queue.poll(64) == []


@pytest.mark.parametrize("count", [2, 16, 17, 100])
def test_a_batch_is_a_chain_in_its_order(count: int) -> None:
    driver = Driver()
    driver.pair().post([Work(i, WRITE, i == count - 1, i, 8 + i, 1, 100 + i, 2) for i in range(count)])
    assert [it["id"] for it in driver.posted] == list(range(count))
    assert [it["local"] for it in driver.posted] == [(i, 8 + i, 1) for i in range(count)]
    assert [it["remote_addr"] for it in driver.posted] == [100 + i for i in range(count)]
    assert [it["flags"] for it in driver.posted] == [0] * (count - 1) + [2]


def test_atomics_and_empty_writes() -> None:
    driver, big = Driver(), (1 << 64) - 1
    driver.pair().post(
        [
            Work(1, FETCH_ADD, True, 64, 8, 3, 4096, 5, big, 0),
            Work(2, COMPARE_SWAP, True, 64, 8, 3, 4096, 5, 6, big),
            Work(3, WRITE, True, 0, 0, 0, 0, 0),
        ]
    )
    add, swap, nothing = driver.posted
    assert (add["compare_add"], add["swap"], add["remote_addr"], add["rkey"]) == (big, 0, 4096, 5)
    assert (swap["compare_add"], swap["swap"]) == (6, big)
    assert nothing["local"] is None


def test_no_more_is_polled_than_was_asked_for() -> None:
    driver = Driver()
    driver.completions = [(i, 0, NUMBER, 0) for i in range(100)]
    assert len(driver.queue().poll(3)) == 3
    assert len(driver.queue().poll(1000)) == 64
    assert driver.queue().poll(-1) == []
    assert len(driver.completions) == 33


def test_device_error_has_its_errno() -> None:
    driver = Driver()
    queue, pair = driver.queue(), driver.pair()
    driver.result = errno.ENOMEM
    with pytest.raises(OSError, match="ibv_post_send") as refused:
        pair.post([Work(1, READ, True, 1, 1, 1, 1, 1)])
    assert refused.value.errno == errno.ENOMEM
    with pytest.raises(OSError, match="ibv_req_notify_cq"):
        queue.arm()
    driver.result = -1
    with pytest.raises(OSError, match="ibv_poll_cq"):
        queue.poll(1)


def test_forgotten_queues_are_not_accessed() -> None:
    driver = Driver()
    queue, pair = driver.queue(), driver.pair()
    pair.forget()
    queue.forget()
    for call in (lambda: pair.post([Work(1, READ, True, 1, 1, 1, 1, 1)]), queue.arm, lambda: queue.poll(1)):
        with pytest.raises(OSError, match="is closed") as closed:
            call()
        assert closed.value.errno == errno.EBADF
    assert not driver.posted and not driver.armed


def test_a_pair_ends_with_its_queue() -> None:
    driver = Driver()
    queue = driver.queue()
    pair = provider.compiled_pair(holder(driver.qp), NUMBER, queue)
    assert pair is not None
    queue.forget()
    for call in (
        lambda: pair.post([Work(1, READ, True, 1, 1, 1, 1, 1)]),
        lambda: provider.compiled_pair(holder(driver.qp), NUMBER, queue),
    ):
        with pytest.raises(OSError, match="the completion queue is closed"):
            call()
    assert not driver.posted


def test_poll_in_a_finalizer_loses_no_completion() -> None:
    """poll() creates tuples, which may start a garbage collection. A finalizer may then call poll() as well."""
    driver = Driver()
    queue, inner = driver.queue(), []

    class Polls:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            inner.extend(queue.poll(64))

    for round_ in range(50):
        driver.completions = [(round_ * 1000 + i, 0, NUMBER, 0) for i in range(128)]
        inner.clear()
        before = gc.get_threshold()
        Polls()
        gc.set_threshold(1)
        try:
            found = queue.poll(64)
        finally:
            gc.set_threshold(*before)
        gc.collect()
        rest = queue.poll(64) + queue.poll(64)
        assert sorted(each[0] for each in (*found, *inner, *rest)) == [round_ * 1000 + i for i in range(128)]


class MadeNow:
    """A sequence that creates a work request on each access and keeps none."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Work:
        if i >= 3:
            raise IndexError
        return Work(i, READ, i == 2, 7000 + i, 8, 1, 9000 + i, 2)


def test_lazily_made_work_requests() -> None:
    driver, works = Driver(), MadeNow()
    driver.pair().post(works)  # type: ignore[arg-type]
    assert [it["local"] for it in driver.posted] == [(7000 + i, 8, 1) for i in range(3)]


@pytest.mark.parametrize("works", [[(1, 2, 3)], [7], [("a",) * 10], [Work(1, READ, True, 1, 1, 1, 1, 1), None]])
def test_invalid_work_requests_are_not_posted(works: Any) -> None:
    driver = Driver()
    with pytest.raises(TypeError):
        driver.pair().post(works)
    assert not driver.posted


def test_other_objects_are_not_found() -> None:
    driver = Driver()
    queue, find = driver.queue(), _native.VerbsCompletionQueue.find
    assert find(holder(driver.cq), FD + 1, ENTRIES) is None
    assert find(holder(driver.cq), FD, ENTRIES + 1) is None
    assert find(object(), FD, ENTRIES) is None
    assert find(7, FD, ENTRIES) is None
    other = Driver()
    pair = _native.VerbsQueuePair.find
    assert pair(holder(driver.qp), NUMBER + 1, queue) is None
    assert pair(holder(driver.qp), NUMBER, other.queue()) is None  # the queue pair completes on another queue
    assert pair(holder(driver.cq), NUMBER, queue) is None
    driver.qp.qp_type = 4
    assert pair(holder(driver.qp), NUMBER, queue) is None
    driver.channel.context = _at(other.context)
    assert find(holder(driver.cq), FD, ENTRIES) is None
    assert provider.compiled_pair(holder(driver.qp), NUMBER, None) is None


def test_invalid_addresses_find_no_queue() -> None:
    driver, page = Driver(), mmap.mmap(-1, mmap.PAGESIZE)
    gone = ctypes.addressof(ctypes.c_char.from_buffer(page))
    page.close()
    for word in (1, 8, (1 << 64) - 8, 1 << 63, 0xDEADBEEF0000, gone, _at(driver.cq) + 1):
        assert _native.VerbsCompletionQueue.find(holder(word), FD, ENTRIES) is None
    driver.cq.channel = gone
    assert _native.VerbsCompletionQueue.find(holder(driver.cq), FD, ENTRIES) is None


LAYOUT = """
#include <infiniband/verbs.h>
#include "verbs/pyverbs_abi.h"
#include <cstddef>
namespace ours = monarch::verbs;
#define SAME(mine, its, type, member) \\
  static_assert(offsetof(ours::mine, its) == offsetof(type, member), #member); \\
  static_assert(sizeof(ours::mine::its) == sizeof(type::member), #member)
SAME(Context, poll_cq, ibv_context, ops.poll_cq);
SAME(Context, req_notify_cq, ibv_context, ops.req_notify_cq);
SAME(Context, post_send, ibv_context, ops.post_send);
SAME(Context, cmd_fd, ibv_context, cmd_fd);
SAME(Channel, context, ibv_comp_channel, context);
SAME(Channel, fd, ibv_comp_channel, fd);
SAME(Cq, context, ibv_cq, context);
SAME(Cq, channel, ibv_cq, channel);
SAME(Cq, cqe, ibv_cq, cqe);
SAME(Qp, context, ibv_qp, context);
SAME(Qp, send_cq, ibv_qp, send_cq);
SAME(Qp, qp_num, ibv_qp, qp_num);
SAME(Qp, qp_type, ibv_qp, qp_type);
SAME(Sge, addr, ibv_sge, addr);
SAME(Sge, length, ibv_sge, length);
SAME(Sge, lkey, ibv_sge, lkey);
SAME(SendWr, wr_id, ibv_send_wr, wr_id);
SAME(SendWr, next, ibv_send_wr, next);
SAME(SendWr, sg_list, ibv_send_wr, sg_list);
SAME(SendWr, num_sge, ibv_send_wr, num_sge);
SAME(SendWr, opcode, ibv_send_wr, opcode);
SAME(SendWr, send_flags, ibv_send_wr, send_flags);
SAME(SendWr, wr.rdma.remote_addr, ibv_send_wr, wr.rdma.remote_addr);
SAME(SendWr, wr.rdma.rkey, ibv_send_wr, wr.rdma.rkey);
SAME(SendWr, wr.atomic.compare_add, ibv_send_wr, wr.atomic.compare_add);
SAME(SendWr, wr.atomic.swap, ibv_send_wr, wr.atomic.swap);
SAME(SendWr, wr.atomic.rkey, ibv_send_wr, wr.atomic.rkey);
SAME(Wc, wr_id, ibv_wc, wr_id);
SAME(Wc, status, ibv_wc, status);
SAME(Wc, vendor_err, ibv_wc, vendor_err);
SAME(Wc, qp_num, ibv_wc, qp_num);
static_assert(sizeof(ours::Sge) == sizeof(ibv_sge) && sizeof(ours::Wc) == sizeof(ibv_wc));
static_assert(sizeof(ours::SendWr) == sizeof(ibv_send_wr));
static_assert(ours::reliable == IBV_QPT_RC && IBV_SEND_SIGNALED == 2);
static_assert(IBV_WR_ATOMIC_CMP_AND_SWP == 5 && IBV_WR_ATOMIC_FETCH_AND_ADD == 6);
"""


def test_the_structs_are_those_of_the_header(tmp_path: Path) -> None:
    """The header is libibverbs' own, if libibverbs-dev is installed."""
    compiler = os.environ.get("CXX", "c++")
    source = tmp_path / "layout.cpp"
    source.write_text("#include <infiniband/verbs.h>\n")
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", f"-I{CSRC}", str(source)]
    try:
        if subprocess.run(command, capture_output=True, timeout=120).returncode:
            pytest.skip("libibverbs-dev is not installed")
    except FileNotFoundError:
        pytest.skip("no C++ compiler")
    source.write_text(LAYOUT)
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert not found.returncode, found.stderr


# ---- in the guest


def _are_compiled(host: Host) -> tuple[bool, bool]:
    lanes = host.engine._links["owner"].lanes
    queues: list[Any] = [device.nic for device in host.engine._opened]
    pairs: list[Any] = [lane.pair for lane in lanes]
    return all(nic._queue is not None for nic in queues), bool(pairs) and all(p._pair is not None for p in pairs)


def _there_and_back(owner: Any, asking: Any) -> None:
    nbytes = (5 << 20) + 3
    region = owner(peers.expose, "there", nbytes, 3)
    asking(peers.allocate, "here", nbytes)
    peers.introduce(asking, owner)
    asking(peers.move, "owner", "read", region, [(0, 0, nbytes)], "here")
    assert asking(peers.digest, "here") == owner(peers.digest, "there")
    asking(peers.fill, "here", 99)
    asking(peers.move, "owner", "write", region, [(0, 0, nbytes)], "here")
    assert asking(peers.digest, "here") == owner(peers.digest, "there")


@pytest.mark.verbs
def test_both_packages_queues_are_found(start: Start, devices: list[str]) -> None:
    owner, asking = start("owner", devices[1]), start("asking", devices[0])
    _there_and_back(owner, asking)
    assert asking(_are_compiled) == (True, True)


@pytest.mark.verbs
def test_package_functions_are_the_fallback(start: Start, devices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "compiled_queue", lambda *_: None)  # before the processes fork
    owner, asking = start("owner", devices[1]), start("asking", devices[0])
    _there_and_back(owner, asking)
    assert asking(_are_compiled) == (False, False)
