//! What the tests of the connection manager have in common.

use std::sync::Arc;

use uwarp_driver::{Nic, Qp};
use uwarp_rnic::qp::{QpCaps, QpInit};
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq, Pd};

struct Ignore;

impl AsyncSink for Ignore {
    fn async_event(&self, _: AsyncEvent) {}
}

/// A queue pair in RESET, with a protection domain and a completion queue of its own.
pub fn qp() -> Arc<Qp> {
    qp_and_cq().0
}

/// The same, and its completion queue.
pub fn qp_and_cq() -> (Arc<Qp>, Arc<Cq>) {
    let sink: Arc<dyn AsyncSink> = Arc::new(Ignore);
    let cq = Cq::new(64, 0, None, Arc::clone(&sink));
    let caps =
        QpCaps { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 };
    let init = QpInit {
        pd: Pd::new(),
        send_cq: Arc::clone(&cq),
        recv_cq: Arc::clone(&cq),
        srq: None,
        caps,
        sq_sig_all: true,
        cookie: 0,
        async_sink: sink,
    };
    (Qp::create(&Nic::open().expect("a device"), init).expect("a queue pair"), cq)
}
