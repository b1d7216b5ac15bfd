//! What strangers make a process hold: one budget, whatever its listeners. Alone in its process, because of
//! its limit of descriptors.

mod common;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uwarp_cm::{Cm, EventChannel, EventKind, Id, Timeouts};
use uwarp_driver::Nic;
use uwarp_wire::mpa::KEY_REQ;

use common::qp;

/// Longest a test waits for what has to come; reached only when it fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long what must not grow is looked at.
const LOOK: Duration = Duration::from_secs(1);
/// The process' descriptors; both ends of all connections are here.
const DESCRIPTORS: usize = 1024;
/// A quarter of them.
const BUDGET: usize = DESCRIPTORS / 4;

/// One test at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS as u64), maximum }).unwrap();
    guard
}

fn cm() -> Arc<Cm> {
    let request = 10 * PATIENCE;
    Cm::new(&Nic::open().unwrap(), Timeouts { request, ..Timeouts::default() })
}

fn listening(cm: &Arc<Cm>, backlog: i32) -> (Arc<Id>, Arc<EventChannel>) {
    let channel = EventChannel::new(cm.nic()).unwrap();
    let id = Id::new(cm, &channel);
    id.bind((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
    id.listen(backlog).unwrap();
    (id, channel)
}

/// How many connections to this listener the kernel holds, because they are not accepted.
fn not_accepted(at: SocketAddr) -> usize {
    const LISTENS: &str = "0A";
    let local = format!("0100007F:{:04X}", at.port());
    let sockets = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let waiting = sockets.lines().find_map(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let (address, state, queues) = (fields.next()?, fields.nth(1)?, fields.next()?);
        let (_, waiting) = queues.split_once(':')?;
        (address == local && state == LISTENS).then(|| usize::from_str_radix(waiting, 16).ok())?
    });
    waiting.expect("the listener's line")
}

fn is_open(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).unwrap();
    stream.read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// How many of the strangers' connections the process has accepted and not closed; never more than there are.
fn held(strangers: &[(&Id, Vec<TcpStream>)]) -> usize {
    // In this order: one that is accepted meanwhile is not counted, nor one that is closed.
    let not_accepted: usize = strangers.iter().map(|(id, _)| not_accepted(id.local_address().unwrap())).sum();
    let open = strangers.iter().flat_map(|(_, streams)| streams).filter(|stream| is_open(stream)).count();
    open.saturating_sub(not_accepted)
}

fn is_bounded(strangers: &[(&Id, Vec<TcpStream>)]) {
    let begin = Instant::now();
    while begin.elapsed() < LOOK {
        let held = held(strangers);
        assert!(held <= BUDGET, "{held} connections are held, of {BUDGET}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn stranger(to: &Id, request: &[u8]) -> TcpStream {
    let mut stranger = TcpStream::connect(to.local_address().unwrap()).unwrap();
    stranger.write_all(request).unwrap();
    stranger
}

/// A complete request counted nowhere until it was reported, and it is not reported while a connection that
/// the same peer may have seen accepted is not established. With a backlog of 4, all were accepted.
#[test]
fn complete_requests_that_wait_are_in_the_budget() {
    let _alone = alone();
    let cm = cm();
    let (listener, channel) = listening(&cm, 4);
    // Enhanced, peer-to-peer, a Write as the indication.
    let request = [&KEY_REQ[..], &[0x50, 2, 0, 4, 0x80, 0, 0x80, 0]].concat();
    let _silent = stranger(&listener, &request);
    let event = channel.get_within(Some(PATIENCE)).unwrap();
    assert_eq!(event.kind, EventKind::ConnectRequest);
    let accepted = Arc::clone(&event.id);
    event.acknowledge();
    let queue_pair = qp();
    accepted.accept(&queue_pair, None, b"").unwrap();
    let strangers = (0..BUDGET + 150).map(|_| stranger(&listener, &request)).collect();
    is_bounded(&[(&listener, strangers)]);
    [accepted, listener].iter().for_each(|id| id.destroy());
    queue_pair.destroy();
}

/// Each listener had a budget of its own: five of them could take more than all descriptors.
#[test]
fn silent_connections_of_all_listeners_are_in_one_budget() {
    let _alone = alone();
    let cm = cm();
    let listeners: Vec<_> = (0..3).map(|_| listening(&cm, 0)).collect();
    let each = BUDGET / 3 + 50;
    let strangers: Vec<_> = listeners
        .iter()
        .map(|(id, _)| (id.as_ref(), (0..each).map(|_| stranger(id, b"")).collect()))
        .collect();
    is_bounded(&strangers);
    listeners.iter().for_each(|(id, _)| id.destroy());
}
