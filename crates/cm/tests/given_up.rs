//! An id that is destroyed at the worst moment of its attempt.

mod common;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use uwarp_cm::{Cm, ConnParam, EventChannel, EventKind, Id, Timeouts};
use uwarp_driver::Nic;
use uwarp_rnic::qp::{QpModify, QpState};
use uwarp_rnic::{CompletionSink, RecvWr};

use common::{cq_with, qp_on};

/// Longest a test waits for what has to come.
const PATIENCE: Duration = Duration::from_secs(60);

/// Another thread destroys the id when the first receive is flushed.
struct Destroyer {
    id: Arc<Id>,
    done: Mutex<Option<mpsc::Sender<()>>>,
}

impl CompletionSink for Destroyer {
    fn completion_event(&self, _: u64) {
        std::thread::scope(|scope| _ = scope.spawn(|| self.id.destroy()));
        self.done.lock().unwrap().take().unwrap().send(()).unwrap();
    }
}

fn expect(channel: &EventChannel, kind: EventKind) {
    let event = channel.get().unwrap();
    assert_eq!(event.kind, kind);
    event.acknowledge();
}

/// An attempt to reach `peer` with a receive posted; its id is destroyed while the rejection flushes the
/// receive. Another id of the same channel then gets its own event, and there is none of the first one's.
fn destroyed_while_receives_are_flushed(cm: &Arc<Cm>, peer: SocketAddr) {
    let channel = EventChannel::new(cm.nic()).unwrap();
    let id = Id::new(cm, &channel);
    id.resolve_address(None, peer).unwrap();
    expect(&channel, EventKind::AddressResolved);
    id.resolve_route().unwrap();
    expect(&channel, EventKind::RouteResolved);
    let (done, is_done) = mpsc::channel();
    let cq = cq_with(Arc::new(Destroyer { id: Arc::clone(&id), done: Mutex::new(Some(done)) }));
    let qp = qp_on(&cq);
    qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
    qp.post_recv(std::iter::once(RecvWr { wr_id: 1, sges: &[] })).map_err(|(_, e)| e).unwrap();
    cq.arm(false);
    id.connect(&qp, ConnParam::DEFAULT, b"").unwrap();
    is_done.recv_timeout(PATIENCE).unwrap();

    let next = Id::new(cm, &channel);
    next.resolve_address(None, peer).unwrap();
    expect(&channel, EventKind::AddressResolved);
    next.resolve_route().unwrap();
    expect(&channel, EventKind::RouteResolved);
    // The thread that flushed has come to its end by the time that another attempt does.
    let other = qp_on(&common::qp_and_cq().1);
    next.connect(&other, ConnParam::DEFAULT, b"").unwrap();
    let event = channel.get().unwrap();
    assert_eq!(event.kind, EventKind::Rejected);
    assert!(Arc::ptr_eq(&event.id, &next), "{event:?} of an id that is destroyed");
    event.acknowledge();
    next.destroy();
}

#[test]
fn a_refusal_is_not_reported_to_an_id_that_is_destroyed_meanwhile() {
    let cm = Cm::new(&Nic::open().unwrap(), Timeouts::default());
    // Bound, so that no other program listens there.
    let nobody = Id::new(&cm, &EventChannel::new(cm.nic()).unwrap());
    nobody.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    destroyed_while_receives_are_flushed(&cm, nobody.local_address().unwrap());
    nobody.destroy();
}

#[test]
fn a_rejection_is_not_reported_to_an_id_that_is_destroyed_meanwhile() {
    let cm = Cm::new(&Nic::open().unwrap(), Timeouts::default());
    let requests = EventChannel::new(cm.nic()).unwrap();
    let listener = Id::new(&cm, &requests);
    listener.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_address().unwrap();
    let server = std::thread::spawn(move || {
        for _ in 0..2 {
            let event = requests.get().unwrap();
            event.id.reject(b"no").unwrap();
            event.id.destroy();
            event.acknowledge();
        }
    });
    destroyed_while_receives_are_flushed(&cm, address);
    server.join().unwrap();
    listener.destroy();
}
