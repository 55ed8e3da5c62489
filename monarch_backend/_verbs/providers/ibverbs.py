"""libibverbs through the `ibverbs` wheel, which dlopens it. One of the two adapters of provider.py."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any

import ibverbs

from monarch_backend._verbs.providers import provider as verbs
from monarch_backend._verbs.providers.provider import Completion, Limits, Path, Port, Work

_ETHERNET, _ACTIVE = 2, 4


def open_nic(device: str, completions: int) -> _Nic:
    for found in ibverbs.get_device_list():
        if found.name == device:
            return _Nic(found, completions)
    raise FileNotFoundError(f"no device {device}")


class _Nic:
    def __init__(self, device: Any, completions: int) -> None:
        self.name: str = device.name
        self._context = device.open()
        a = self._context.query_device()
        # The wheel lacks max_qp_init_rd_atom and atomic_caps. On known devices the first is equal to this value.
        reads = max(1, a.max_qp_rd_atom)
        self.limits = Limits(a.max_qp_wr, min(completions, a.max_cqe), reads, reads)
        self._pd = self._context.alloc_pd()
        self._channel = self._context.create_comp_channel()
        self.fd: int = self._channel.fd
        self._cq = self._context.create_cq(self.limits.completions, self._channel)
        self._queue = queue = verbs.compiled_queue(self._cq, self.fd, self._cq.cqe)
        self.arm: Callable[[], None] = self._cq.req_notify if queue is None else queue.arm
        self.poll: Callable[[int], Sequence[Completion]] = self._poll if queue is None else queue.poll

    def port(self, number: int) -> Port:
        a = self._context.query_port(number)
        return Port(a.state == _ACTIVE, a.link_layer == _ETHERNET, a.lid, int(a.active_mtu), a.max_msg_sz)

    def take_event(self) -> None:
        self._channel.get_cq_event()
        self._cq.ack_events(1)

    def _poll(self, most: int) -> list[Completion]:
        return [Completion(wc.wr_id, int(wc.status), wc.qp_num, wc.vendor_err) for wc in self._cq.poll(most)]

    def register(self, address: int, nbytes: int, access: int) -> Any:
        return self._pd.reg_mr(address, nbytes, access)

    def register_dmabuf(self, fd: int, offset: int, nbytes: int, address: int, access: int) -> Any:
        return self._pd.reg_dmabuf_mr(offset, nbytes, address, fd, access)

    def queue_pair(self, depth: int) -> _QueuePair:
        asked = ibverbs.QPInitAttr(
            send_cq=self._cq,
            recv_cq=self._cq,
            qp_type=verbs.QP_TYPE_RC,
            max_send_wr=depth,
            max_recv_wr=1,
            max_send_sge=1,
            max_recv_sge=1,
            sq_sig_all=False,
        )
        return _QueuePair(self._pd.create_qp(asked), self._queue)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.forget()
        verbs.close_each((self._context, self._pd, self._channel, self._cq), _close)


def _close(part: Any) -> None:
    try:
        part.close()
    except RuntimeError as error:  # a resource of it still exists
        raise OSError(errno.EBUSY, str(error)) from error


class _QueuePair:
    def __init__(self, qp: Any, queue: Any) -> None:
        self._qp = qp
        self.number: int = qp.qp_num
        self._pair = pair = verbs.compiled_pair(qp, self.number, queue)
        self.post: Callable[[Sequence[Work]], None] = self._post if pair is None else pair.post

    def initialize(self, port: int, access: int) -> None:
        self._qp.modify(verbs.RESET_TO_INIT, qp_state=verbs.INIT, pkey_index=0, port_num=port, qp_access_flags=access)

    def connect(self, path: Path) -> None:
        self._qp.modify(
            verbs.INIT_TO_RTR,
            ibverbs.AHAttr(
                dgid=path.gid,
                sgid_index=path.gid_index,
                dlid=path.lid,
                is_global=int(path.is_global),
                port_num=path.port,
                hop_limit=64,
                traffic_class=path.settings.traffic_class,
                sl=path.settings.service_level,
            ),
            qp_state=verbs.RTR,
            path_mtu=path.mtu,
            dest_qp_num=path.number,
            rq_psn=path.psn_in,
            max_dest_rd_atomic=path.reads_in,
            min_rnr_timer=12,
        )
        self._qp.modify(
            verbs.RTR_TO_RTS,
            qp_state=verbs.RTS,
            timeout=path.settings.timeout,
            retry_cnt=path.settings.retries,
            rnr_retry=7,
            sq_psn=path.psn_out,
            max_rd_atomic=path.reads_out,
        )

    def close(self) -> None:
        if self._pair is not None:
            self._pair.forget()
        _close(self._qp)

    def _post(self, works: Sequence[Work]) -> None:
        self._qp.post_send([_request(work) for work in works])


def _request(work: Work) -> Any:
    return ibverbs.SendWR(
        wr_id=work.id,
        sg_list=[ibverbs.SGE(work.local, work.nbytes, work.lkey)] if work.nbytes else None,
        opcode=work.opcode,
        send_flags=verbs.SEND_SIGNALED if work.signaled else 0,
        remote_addr=work.remote,
        rkey=work.rkey,
        compare_add=work.compare_add,
        swap=work.swap,
    )
