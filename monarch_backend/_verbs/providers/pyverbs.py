"""libibverbs through rdma-core's own pyverbs, such as Debian's python3-pyverbs.

One of the two adapters of provider.py.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR

from monarch_backend._verbs.providers import provider as verbs
from monarch_backend._verbs.providers.provider import Completion, Limits, Path, Port, Work

_ETHERNET, _ACTIVE = 2, 4
_EVENT_FILE = "anon_inode:[infinibandevent]"

_opening = threading.Lock()


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    try:
        yield
    except PyverbsError as error:
        raise OSError(getattr(error, "error_code", 0), str(error)) from error


def _event_files() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == _EVENT_FILE:
                found.add(int(name))
        except OSError:  # closed meanwhile
            continue
    return found


def _channel_with_fd(context: Any) -> tuple[Any, int]:
    """Find the channel's descriptor: pyverbs hides it, and waits for events with the GIL held."""
    with _opening:
        for _ in range(8):
            before = _event_files()
            channel = CompChannel(context)
            new = _event_files() - before
            if len(new) == 1:
                return channel, new.pop()
            channel.close()  # another library made one in the same moment
    raise OSError(0, "the descriptor of a completion channel cannot be identified")


def open_nic(device: str, completions: int) -> _Nic:
    with _os_errors():
        return _Nic(device, completions)


class _Nic:
    def __init__(self, device: str, completions: int) -> None:
        self.name = device
        self._context = Context(name=device)
        try:
            a = self._context.query_device()
            self.limits = Limits(
                a.max_qp_wr, min(completions, a.max_cqe), max(1, a.max_qp_rd_atom), max(1, a.max_qp_init_rd_atom)
            )
            self._pd = PD(self._context)
            self._channel, self.fd = _channel_with_fd(self._context)
            self._cq = CQ(self._context, self.limits.completions, None, self._channel, 0)
        except BaseException:
            self._context.close()
            raise
        self._queue = queue = verbs.compiled_queue(self._cq, self.fd, self._cq.cqe)
        self.arm: Callable[[], None] = self._arm if queue is None else queue.arm
        self.poll: Callable[[int], Sequence[Completion]] = self._poll if queue is None else queue.poll

    def port(self, number: int) -> Port:
        with _os_errors():
            a = self._context.query_port(number)
        return Port(a.state == _ACTIVE, a.link_layer == _ETHERNET, a.lid, a.active_mtu, a.max_msg_sz)

    def _arm(self) -> None:
        with _os_errors():
            self._cq.req_notify()

    def take_event(self) -> None:
        with _os_errors():
            self._channel.get_cq_event(self._cq)
            self._cq.ack_events(1)

    def _poll(self, most: int) -> list[Completion]:
        with _os_errors():
            _, found = self._cq.poll(most)
        return [Completion(wc.wr_id, wc.status, wc.qp_num, wc.vendor_err) for wc in found]

    def register(self, address: int, nbytes: int, access: int) -> _Registration:
        with _os_errors():
            return _Registration(MR(self._pd, nbytes, access, address=address))

    def register_dmabuf(self, *_: int) -> Any:
        # DmaBufMR can't set the address at which requests find the memory; it is the offset in the dma-buf.
        raise OSError(
            errno.EOPNOTSUPP, "pyverbs can't: install the ibverbs wheel, and set MONARCH_VERBS_PROVIDER=ibverbs"
        )

    def queue_pair(self, depth: int) -> _QueuePair:
        cap = QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        asked = QPInitAttr(qp_type=verbs.QP_TYPE_RC, scq=self._cq, rcq=self._cq, cap=cap, sq_sig_all=0)
        with _os_errors():
            return _QueuePair(QP(self._pd, asked), self._queue)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.forget()
        verbs.close_each((self._context, self._pd, self._channel, self._cq), _close)


def _close(part: Any) -> None:
    with _os_errors():
        part.close()


class _Registration:
    def __init__(self, region: Any) -> None:
        self._region = region
        self.lkey: int = region.lkey
        self.rkey: int = region.rkey

    def close(self) -> None:
        _close(self._region)


class _QueuePair:
    def __init__(self, qp: Any, queue: Any) -> None:
        self._qp = qp
        self.number: int = qp.qp_num
        self._pair = pair = verbs.compiled_pair(qp, self.number, queue)
        self.post: Callable[[Sequence[Work]], None] = self._post if pair is None else pair.post

    def initialize(self, port: int, access: int) -> None:
        asked = QPAttr(qp_state=verbs.INIT, port_num=port)
        asked.qp_access_flags, asked.pkey_index = access, 0
        with _os_errors():
            self._qp.modify(asked, verbs.RESET_TO_INIT)

    def connect(self, path: Path) -> None:
        route = GlobalRoute(
            dgid=GID(str(ipaddress.IPv6Address(path.gid).exploded)),
            sgid_index=path.gid_index,
            hop_limit=64,
            traffic_class=path.settings.traffic_class,
        )
        to_rtr = QPAttr(qp_state=verbs.RTR, port_num=path.port)
        to_rtr.path_mtu, to_rtr.dest_qp_num, to_rtr.rq_psn = path.mtu, path.number, path.psn_in
        to_rtr.max_dest_rd_atomic, to_rtr.min_rnr_timer = path.reads_in, 12
        to_rtr.ah_attr = AHAttr(
            dlid=path.lid, sl=path.settings.service_level, is_global=int(path.is_global), port_num=path.port, gr=route
        )
        to_rts = QPAttr(qp_state=verbs.RTS, port_num=path.port)
        to_rts.timeout, to_rts.retry_cnt, to_rts.rnr_retry = path.settings.timeout, path.settings.retries, 7
        to_rts.sq_psn, to_rts.max_rd_atomic = path.psn_out, path.reads_out
        with _os_errors():
            self._qp.modify(to_rtr, verbs.INIT_TO_RTR)
            self._qp.modify(to_rts, verbs.RTR_TO_RTS)

    def close(self) -> None:
        if self._pair is not None:
            self._pair.forget()
        _close(self._qp)

    def _post(self, works: Sequence[Work]) -> None:
        chain: list[Any] = []  # from the last to the first; pyverbs only keeps pointers
        for work in reversed(works):
            chain.append(_request(work))
            if len(chain) > 1:
                chain[-1].next_wr = chain[-2]
        with _os_errors():
            self._qp.post_send(chain[-1])


def _request(work: Work) -> Any:
    request = SendWR(
        wr_id=work.id,
        opcode=work.opcode,
        num_sge=1,
        sg=[SGE(work.local, work.nbytes, work.lkey)],
        send_flags=verbs.SEND_SIGNALED if work.signaled else 0,
    )
    if not work.nbytes:
        request.num_sge = 0  # the constructor requires one
    if work.opcode in (verbs.FETCH_ADD, verbs.COMPARE_SWAP):
        request.set_wr_atomic(work.rkey, work.remote, work.compare_add, work.swap)
    else:
        request.set_wr_rdma(work.rkey, work.remote)
    return request
