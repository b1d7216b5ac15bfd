//! What the tests of the connection manager have in common.

#![allow(dead_code, reason = "each test uses some of it")]

use std::sync::Arc;

use uwarp_driver::{Nic, Qp};
use uwarp_rnic::qp::{QpCaps, QpInit};
use uwarp_rnic::{AsyncEvent, AsyncSink, CompletionSink, Cq, Pd};

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
    let cq = Cq::new(64, 0, None, Arc::new(Ignore));
    (qp_on(&cq), cq)
}

/// A completion queue that reports its next completion.
pub fn cq_with(completions: Arc<dyn CompletionSink>) -> Arc<Cq> {
    Cq::new(64, 0, Some(completions), Arc::new(Ignore))
}

/// A queue pair in RESET that completes there, with a protection domain of its own.
pub fn qp_on(cq: &Arc<Cq>) -> Arc<Qp> {
    let caps =
        QpCaps { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 64 };
    let init = QpInit {
        pd: Pd::new(),
        send_cq: Arc::clone(cq),
        recv_cq: Arc::clone(cq),
        srq: None,
        caps,
        sq_sig_all: true,
        cookie: 0,
        async_sink: Arc::new(Ignore),
    };
    Qp::create(&Nic::open().expect("a device"), init).expect("a queue pair")
}
