//! An observer that polls within a poll's look, as a stream that is closing does in its timer.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{ThreadId, current};

use uwarp_driver::{Nic, Readiness, Source};
use uwarp_llp::carrier::Watch;
use uwarp_rnic::{AsyncEvent, AsyncSink, Cq};

struct Nobody;

impl AsyncSink for Nobody {
    fn async_event(&self, _: AsyncEvent) {}
}

struct Polls {
    nic: Arc<Nic>,
    cq: Arc<Cq>,
    here: ThreadId,
    calls: AtomicUsize,
    nested: AtomicUsize,
}

impl Source for Polls {
    fn ready(&self, _: Readiness) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if current().id() == self.here {
            self.nested.fetch_add(1, Ordering::SeqCst);
        }
        self.nic.poll_cq(&self.cq, 1, |_| ());
    }

    fn timeout(&self) {}
}

/// It was taken for a poll after a jump out of the outer one: each time all sources were reported again.
#[test]
fn a_poll_within_a_look_has_nothing_reported_again() {
    const RAISED: usize = 200;
    let nic = Nic::open().unwrap();
    let cq = Cq::new(8, 0, None, Arc::new(Nobody));
    let source = Arc::new(Polls {
        nic: nic.clone(),
        cq: cq.clone(),
        here: current().id(),
        calls: AtomicUsize::new(0),
        nested: AtomicUsize::new(0),
    });
    let token = nic.engine().register_watch(Watch::Itself, source.clone()).unwrap();
    for _ in 0..RAISED {
        nic.engine().raise(token, Readiness { readable: true, writable: false, hangup: false });
        for _ in 0..600 {
            nic.poll_cq(&cq, 1, |_| ());
        }
    }
    let (calls, nested) = (source.calls.load(Ordering::SeqCst), source.nested.load(Ordering::SeqCst));
    assert!(nested > 0, "none of {calls} was in the thread that polls");
    assert!(calls <= RAISED, "{calls} calls, {nested} of them nested");
    nic.engine().deregister(token);
}
