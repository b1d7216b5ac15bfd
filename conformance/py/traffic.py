"""Device, domain, region and queues through pyverbs, and traffic over RC and UD between queue pairs that the program connects itself.

Prints one line per statement: "ok name", or "FAIL name: what was seen".
"""
import time

import pyverbs.enums as e
from pyverbs.addr import AH, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CQEX, CqInitAttrEx, PollCqAttr
from pyverbs.device import Context, get_device_list
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

ALL = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
GRH = 40


def check(good, name, seen=""):
    print(f"ok {name}" if good else f"FAIL {name}: {seen}", flush=True)


def completion(cq):
    end = time.monotonic() + 10
    while time.monotonic() < end:
        count, found = cq.poll()
        if count:
            return found[0]
    raise SystemExit("FAIL a completion: none came")


class End:
    """A queue pair with its queues and 8 KiB of memory: the first half is sent, the second received."""

    def __init__(self, context, kind, extended=False):
        self.pd = PD(context)
        self.mr = MR(self.pd, 8192, ALL)
        self.scq = CQ(context, 16)
        self.rcq = CQEX(context, CqInitAttrEx(cqe=16, wc_flags=e.IBV_WC_STANDARD_FLAGS)) if extended else CQ(context, 16)
        init = QPInitAttr(qp_type=kind, scq=self.scq, rcq=self.rcq, cap=QPCap(16, 16, 1, 1), sq_sig_all=1)
        attr = QPAttr(port_num=1)
        attr.qkey = 0x1234
        attr.qp_access_flags = ALL
        # With its attributes, pyverbs takes a datagram queue pair to RTS, and a connected one to INIT.
        self.qp = QP(self.pd, init, attr)

    def receive(self, length):
        self.qp.post_recv(RecvWR(7, 1, [SGE(self.mr.buf + 4096, length, self.mr.lkey)]))

    def submit(self, opcode, text, peer=None, ah=None):
        self.mr.write(text, len(text))
        wr = SendWR(9, opcode=opcode, num_sge=1, sg=[SGE(self.mr.buf, len(text), self.mr.lkey)])
        if ah:
            wr.set_wr_ud(ah, peer.qp.qp_num, 0x1234)
        elif peer:
            wr.set_wr_rdma(peer.mr.rkey, peer.mr.buf + 4096)
        self.qp.post_send(wr)

    def connect(self, context, peer):
        route = GlobalRoute(dgid=context.query_gid(1, 0), sgid_index=0)
        attr = QPAttr(port_num=1, path_mtu=e.IBV_MTU_1024)
        attr.dest_qp_num, attr.ah_attr = peer.qp.qp_num, AHAttr(port_num=1, is_global=1, gr=route)
        attr.max_rd_atomic, attr.max_dest_rd_atomic, attr.min_rnr_timer = 4, 4, 12
        attr.qp_access_flags = ALL
        attr.timeout, attr.retry_cnt, attr.rnr_retry = 18, 7, 7
        self.qp.to_rts(attr)


def device():
    devices = get_device_list()
    check([d.name for d in devices] == [b"uwarp0"], "one device, uwarp0", devices)
    context = Context(name="uwarp0")
    attr = context.query_device()
    check(attr.max_qp >= 1000 and attr.max_cqe >= 4096 and attr.vendor_id, "attributes of the device", attr)
    port = context.query_port(1)
    check(port.state == e.IBV_PORT_ACTIVE and port.gid_tbl_len > 0, "attributes of the port", port)
    entries = context.query_gid_table(port.gid_tbl_len)
    same = all(str(context.query_gid_ex(1, i)) == str(entry) for i, entry in enumerate(entries))
    check(len(entries) == port.gid_tbl_len and same, "the GID table", entries)
    check(context.query_gid_type(1, 0) == e.IBV_GID_TYPE_SYSFS_ROCE_V2, "the type of GID 0", context.query_gid_type(1, 0))
    extended = context.query_device_ex()
    check(extended.orig_attr.max_qp == attr.max_qp, "extended attributes", extended)
    return context


def connected(context):
    a, b = End(context, e.IBV_QPT_RC), End(context, e.IBV_QPT_RC, extended=True)
    a.connect(context, b)
    b.connect(context, a)
    check(a.qp.query(e.IBV_QP_STATE)[0].cur_qp_state == e.IBV_QPS_RTS, "an RC queue pair in RTS")
    b.receive(4096)
    a.submit(e.IBV_WR_SEND, "a Send")
    check(completion(a.scq).status == e.IBV_WC_SUCCESS, "a Send completes")
    end = time.monotonic() + 10
    while (rc := b.rcq.start_poll(PollCqAttr())) == 2 and time.monotonic() < end:
        pass
    check(rc == 0 and b.rcq.status == e.IBV_WC_SUCCESS and b.rcq.read_byte_len() == 6, "it is received", rc)
    b.rcq.end_poll()
    check(b.mr.read(6, 4096) == b"a Send", "as it was sent", b.mr.read(6, 4096))
    a.submit(e.IBV_WR_RDMA_WRITE, "a Write", b)
    check(completion(a.scq).status == e.IBV_WC_SUCCESS, "a Write completes")
    check(b.mr.read(7, 4096) == b"a Write", "and is where it belongs", b.mr.read(7, 4096))
    a.submit(e.IBV_WR_RDMA_READ, "       ", b)
    check(completion(a.scq).status == e.IBV_WC_SUCCESS and a.mr.read(7, 0) == b"a Write", "a Read gets it back")


def datagrams(context):
    a, b = End(context, e.IBV_QPT_UD), End(context, e.IBV_QPT_UD)
    route = GlobalRoute(dgid=context.query_gid(1, 0), sgid_index=0)
    ah = AH(a.pd, attr=AHAttr(port_num=1, is_global=1, gr=route))
    b.receive(1024 + GRH)
    a.submit(e.IBV_WR_SEND, "a datagram", b, ah)
    check(completion(a.scq).status == e.IBV_WC_SUCCESS, "a datagram is sent")
    found = completion(b.rcq)
    good = found.status == e.IBV_WC_SUCCESS and found.byte_len == GRH + 10 and found.src_qp == a.qp.qp_num
    check(good, "it is received, with its sender's number", found)
    check(b.mr.read(10, 4096 + GRH) == b"a datagram", "as it was sent", b.mr.read(10, 4096 + GRH))


def refusals(context):
    try:
        End(context, e.IBV_QPT_RAW_PACKET)
        check(False, "a raw packet queue pair is refused", "it is not")
    except PyverbsRDMAError as error:
        check(error.error_code == 95, "a raw packet queue pair is refused", error)


opened = device()
connected(opened)
datagrams(opened)
refusals(opened)
opened.close()
check(True, "the device is closed")
