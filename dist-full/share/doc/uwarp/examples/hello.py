# SPDX-License-Identifier: MIT OR Apache-2.0
"""A first verbs program in Python: what hello.c does, and each can be the other's peer.

    uwarp run -- python3 hello.py server ADDRESS
    uwarp run -- python3 hello.py client ADDRESS
"""
import sys

from pyverbs.cmid import CMID, AddrInfo
from pyverbs.cm_enums import RAI_PASSIVE, RDMA_PS_TCP
from pyverbs.enums import IBV_QPT_RC
from pyverbs.qp import QPCap, QPInitAttr

PORT, SIZE = "7471", 100

if len(sys.argv) != 3 or sys.argv[1] not in ("server", "client"):
    sys.exit(f"usage: {sys.argv[0]} server|client ADDRESS")
role, address = sys.argv[1:]
attr = QPInitAttr(qp_type=IBV_QPT_RC, cap=QPCap(max_send_wr=1, max_recv_wr=1), sq_sig_all=1)

if role == "server":
    to = AddrInfo(src=address, src_service=PORT, port_space=RDMA_PS_TCP, flags=RAI_PASSIVE)
    listener = CMID(creator=to, qp_init_attr=attr)
    listener.listen()
    id = listener.get_request()
    # Registered: the device reads and writes this memory itself.
    memory = id.reg_msgs(SIZE)
    # First the buffer, then the connection: a message that comes finds its place.
    id.post_recv(memory)
    id.accept()
    done = id.get_recv_comp()
    assert done.status == 0, done
    print("received:", memory.read(done.byte_len, 0).decode())
else:
    to = AddrInfo(dst=address, dst_service=PORT, port_space=RDMA_PS_TCP)
    id = CMID(creator=to, qp_init_attr=attr)
    id.connect()
    memory = id.reg_msgs(SIZE)
    message = b"hello from Python"
    memory.write(message, len(message))
    id.post_send(memory, length=len(message))
    done = id.get_send_comp()
    assert done.status == 0, done
    print("sent:", message.decode())
id.disconnect()
