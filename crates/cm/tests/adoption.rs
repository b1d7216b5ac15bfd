//! Adoptions of sockets whose owner goes away, or whose queue pair does.

mod common;

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use rustix::io::Errno;
use uwarp_cm::{AdoptObserver, Adoption, Cm, Role, Terms};
use uwarp_driver::Qp;
use uwarp_proto::setup::{Depths, Initiator, InitiatorConfig, Revision};
use uwarp_rnic::CompletionSink;
use uwarp_rnic::qp::{QpModify, QpState};

use common::{cq_with, qp_on};

/// A bound of hangs.
const LONG: Duration = Duration::from_secs(60);

struct Nobody;

impl CompletionSink for Nobody {
    fn completion_event(&self, _: u64) {}
}

/// What owns an adoption and gives it up when it is dropped.
struct Owner {
    adoption: Mutex<Option<Arc<Adoption>>>,
    /// Dropped when it is called.
    last: Mutex<Option<Arc<Owner>>>,
    told: mpsc::Sender<Result<(), Errno>>,
}

impl Owner {
    fn new() -> (Arc<Self>, mpsc::Receiver<Result<(), Errno>>) {
        let (told, hears) = mpsc::channel();
        (Arc::new(Self { adoption: Mutex::default(), last: Mutex::default(), told }), hears)
    }

    /// Responds on a socket with this queue pair.
    fn adopt(self: &Arc<Self>, cm: &Arc<Cm>, socket: &TcpStream, qp: &Arc<Qp>) {
        let observer: Arc<dyn AdoptObserver> = self.clone();
        let observer = Arc::downgrade(&observer);
        let terms = Terms { role: Role::Responder, private_data: b"", expects: |_| true, limit: LONG };
        let adoption = Adoption::start(cm, socket.try_clone().unwrap().into(), &terms, qp, observer);
        *self.adoption.lock().unwrap() = Some(adoption.unwrap());
    }
}

impl AdoptObserver for Owner {
    fn adopted(&self, _: Vec<u8>) {
        let _ = self.told.send(Ok(()));
    }

    fn failed(&self, errno: Errno) {
        drop(self.last.lock().unwrap().take());
        let _ = self.told.send(Err(errno));
    }

    fn ended(&self, _: Option<Errno>) {}
}

impl Drop for Owner {
    fn drop(&mut self) {
        if let Some(adoption) = self.adoption.lock().unwrap().take() {
            adoption.cancel();
        }
    }
}

fn tcp() -> [TcpStream; 2] {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    peer.set_read_timeout(Some(LONG)).unwrap();
    [listener.accept().unwrap().0, peer]
}

fn queue_pair() -> Arc<Qp> {
    let qp = qp_on(&cq_with(Arc::new(Nobody)));
    qp.modify(&QpModify { state: Some(QpState::Init), ..QpModify::default() }).unwrap();
    qp
}

fn request() -> Vec<u8> {
    let config = InitiatorConfig {
        revision: Revision::Two,
        crc: true,
        markers: false,
        depths: Depths::negotiated(1, 1),
        max_ird: 1,
        peer: None,
        peer_in_request: false,
    };
    Initiator::new(config, b"").unwrap().poll_transmit().unwrap()
}

/// The peer sees an end, and no wait for one: the program's descriptor is open all the time.
fn ends(mut peer: TcpStream) {
    peer.read_to_end(&mut Vec::new()).unwrap();
}

/// The thread that serves the adoption then has its last owner.
#[test]
fn an_owner_may_go_while_the_adoption_calls_it() {
    let cm = Cm::of_process().unwrap();
    let qp = queue_pair();
    let [socket, mut peer] = tcp();
    let (owner, hears) = Owner::new();
    owner.adopt(&cm, &socket, &qp);
    *owner.last.lock().unwrap() = Some(owner.clone());
    drop(owner);
    peer.write_all(&[b'x'; 64]).unwrap();
    assert_eq!(hears.recv_timeout(LONG), Ok(Err(Errno::PROTO)));
    // Then its own end of the channel is gone.
    assert_eq!(hears.recv_timeout(LONG), Err(mpsc::RecvTimeoutError::Disconnected));
    qp.destroy();
    ends(peer);
}

#[test]
fn a_queue_pair_that_takes_no_stream_ends_the_connection() {
    let cm = Cm::of_process().unwrap();
    let qp = queue_pair();
    let [socket, mut peer] = tcp();
    let (owner, hears) = Owner::new();
    owner.adopt(&cm, &socket, &qp);
    qp.destroy();
    peer.write_all(&request()).unwrap();
    assert!(matches!(hears.recv_timeout(LONG), Ok(Err(_))));
    ends(peer);
}

/// Nobody was told, neither the program nor the peer, until the limit; and the peer not even then.
#[test]
fn a_queue_pair_that_is_gone_ends_the_connection() {
    let cm = Cm::of_process().unwrap();
    let qp = queue_pair();
    let [socket, mut peer] = tcp();
    let (owner, hears) = Owner::new();
    owner.adopt(&cm, &socket, &qp);
    qp.destroy();
    drop(qp);
    peer.write_all(&request()).unwrap();
    assert!(matches!(hears.recv_timeout(LONG), Ok(Err(_))));
    ends(peer);
}
