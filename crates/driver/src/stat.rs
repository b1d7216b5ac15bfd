//! What this process does, for `uwarp stat`: a Unix socket that answers every connection of the same user
//! with lines of JSON.
//!
//! The name is in the abstract namespace, `@uwarp-stat-UID-PID-N`. So nothing is left behind however the
//! process ends, a forked child and a program that is executed do not have it, and no directory is needed.
//! Abstract names have no owner, so each side checks the other's user.
//!
//! The first line is about the process, each further one about a queue pair. Thousands of lines are written
//! piece by piece, so that connections are served in between.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{self, AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use serde::Serialize;
use uwarp_process::Mutex;
use uwarp_rnic::qp::{Counters, Drops, QpState, Snapshot};

use crate::config::Config;
use crate::credentials::Credentials;
use crate::engine::Engine;
use crate::nic::Nic;
use crate::pair::{QueuePair, WeakQueuePair};
use crate::rings::Carried;
use crate::source::{Readiness, Source, Token};
use crate::ud::Unclaimed;

/// Beginning of the sockets' names, without the zero byte of the abstract namespace.
pub const NAME: &str = "uwarp-stat-";
/// Names to try; another user may have taken one to block it.
const NAMES: u32 = 16;
/// Readers at a time.
const MOST_READERS: usize = 8;
/// A reader that does not read for this long is closed.
const PATIENCE: Duration = Duration::from_secs(5);
/// Queue pairs written before other sources are served.
const TURN: usize = 64;
/// Connections accepted before other sources are served: any user of this host may connect as fast as they
/// are accepted.
const ACCEPTS: usize = 16;
/// The pause before the next try when there was no descriptor or no memory.
const AGAIN: Duration = Duration::from_millis(100);

/// The first line.
#[derive(Serialize)]
struct Process {
    pid: u32,
    /// How long the device has been open.
    seconds: f64,
    queue_pairs: usize,
    /// Counters of destroyed queue pairs.
    departed: Counters,
    /// Datagrams that these dropped.
    departed_drops: Drops,
    /// Datagrams that reached no queue pair.
    unclaimed: Unclaimed,
}

/// Each further line.
#[derive(Serialize)]
struct Line {
    qpn: u32,
    service: &'static str,
    state: &'static str,
    local: Option<SocketAddr>,
    peer: Option<SocketAddr>,
    /// The number of the peer's queue pair, if it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    peer_qpn: Option<u32>,
    /// What carries its stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    link: Option<String>,
    /// Why that is TCP, although the peer is on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    why_tcp: Option<String>,
    #[serde(flatten)]
    now: Snapshot,
    /// Datagrams that were dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    drops: Option<Drops>,
    /// Processes of this host to which datagrams were sent from the port of its number, or that have asked
    /// for memory there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    peers: Vec<Carried>,
}

impl Line {
    fn new(qp: &QueuePair) -> Option<Self> {
        let (service, state, peer_qpn, now, (addresses, link, why_tcp), drops) = match qp {
            QueuePair::Rc(qp) => {
                let (attr, now, carried) = qp.look_at()?;
                let peer_qpn = Some(attr.dest_qp_num).filter(|number| *number != 0);
                ("RC", attr.state, peer_qpn, now, carried, None)
            }
            QueuePair::Ud(qp) => {
                let (state, now, drops) = qp.look_at();
                ("UD", state, None, now, ([None, None], None, None), Some(drops))
            }
            QueuePair::Rd(qp) => {
                let (state, now, drops) = qp.look_at();
                ("RD", state, None, now, ([None, None], None, None), Some(drops))
            }
            QueuePair::Uc(qp) => {
                let (attr, peer, now, drops) = qp.look_at();
                let peer_qpn = Some(attr.dest_qp_num).filter(|number| *number != 0);
                let port = uwarp_rnic::ah::port_of(qp.qpn());
                let local = peer.and_then(|peer| peer.from).map(|from| SocketAddr::new(from, port));
                let carried = ([local, peer.map(|peer| peer.to)], None, None);
                ("UC", attr.state, peer_qpn, now, carried, Some(drops))
            }
        };
        let [local, peer] = addresses.map(|address| address.map(plain));
        let (link, why_tcp) = (link.map(|link| link.to_string()), why_tcp.map(|why| why.to_string()));
        let peers = match qp {
            QueuePair::Rc(_) | QueuePair::Rd(_) | QueuePair::Uc(_) => Vec::new(),
            QueuePair::Ud(qp) => qp.carried(),
        };
        let (qpn, state) = (qp.qpn(), name(state));
        Some(Self { qpn, service, state, local, peer, peer_qpn, link, why_tcp, now, drops, peers })
    }
}

/// The address of a connection that an IPv6 socket has accepted, as its peer would write it.
fn plain(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip if ip == address.ip() => address,
        ip => SocketAddr::new(ip, address.port()),
    }
}

fn name(state: QpState) -> &'static str {
    match state {
        QpState::Reset => "RESET",
        QpState::Init => "INIT",
        QpState::Rtr => "RTR",
        QpState::Rts => "RTS",
        QpState::Sqd => "SQD",
        QpState::Sqe => "SQE",
        QpState::Err => "ERR",
    }
}

/// Listens, unless the settings forbid it. Without this the process is not visible, and works all the same.
pub(crate) fn start(nic: &Arc<Nic>) {
    if !Config::get().stat {
        return;
    }
    if let Err(error) = Listener::start(nic) {
        tracing::info!("not visible to uwarp stat: {error}");
    }
}

struct Listener {
    me: Weak<Self>,
    nic: Weak<Nic>,
    fd: OwnedFd,
    since: Instant,
    token: Mutex<Option<Token>, 25>,
    readers: Mutex<usize, 29>,
}

impl Listener {
    fn start(nic: &Arc<Nic>) -> std::io::Result<()> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let fd = net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        let (uid, pid) = (rustix::process::getuid().as_raw(), std::process::id());
        let mut bound = Err(Errno::ADDRINUSE);
        for number in 0..NAMES {
            let name = format!("{NAME}{uid}-{pid}-{number}");
            bound = net::bind(&fd, &SocketAddrUnix::new_abstract_name(name.as_bytes())?);
            if bound != Err(Errno::ADDRINUSE) {
                break;
            }
        }
        bound?;
        net::listen(&fd, i32::try_from(MOST_READERS).unwrap_or(1))?;
        let listener = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            nic: Arc::downgrade(nic),
            fd,
            since: Instant::now(),
            token: Mutex::default(),
            readers: Mutex::default(),
        });
        // Locked during the registration: the engine may call at once.
        let mut token = listener.token.lock();
        *token = Some(nic.engine().register(listener.fd.as_raw_fd(), listener.clone())?);
        Ok(())
    }

    fn accept(&self, nic: &Arc<Nic>) -> Result<(), Errno> {
        let fd = net::accept_with(&self.fd, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        let same_user = Credentials::of_peer(&fd)
            .is_some_and(|peer| peer.uid == rustix::process::getuid().as_raw() || peer.uid == 0);
        let mut readers = self.readers.lock();
        let Some(me) = self.me.upgrade().filter(|_| same_user && *readers < MOST_READERS) else {
            return Ok(());
        };
        *readers += 1;
        drop(readers);
        let qps = nic.queue_pairs();
        let (departed, departed_drops) = nic.departed();
        let process = Process {
            pid: std::process::id(),
            seconds: self.since.elapsed().as_secs_f64(),
            queue_pairs: qps.len(),
            departed,
            departed_drops,
            unclaimed: nic.unclaimed(),
        };
        let mut text = Vec::new();
        append(&mut text, &process);
        Reader::start(nic.engine(), me, fd, text, qps);
        Ok(())
    }
}

impl Source for Listener {
    fn ready(&self, _: Readiness) {
        let (Some(nic), Some(token)) = (self.nic.upgrade(), *self.token.lock()) else { return };
        for _ in 0..ACCEPTS {
            match self.accept(&nic) {
                Ok(()) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                // The system does not report again that connections wait.
                Err(_) => return nic.engine().set_timer(token, Some(Instant::now() + AGAIN)),
            }
        }
        nic.engine().rearm(token);
    }

    fn timeout(&self) {
        self.ready(Readiness::default());
    }
}

/// One answer that is being written.
struct Reader {
    engine: Arc<Engine>,
    listener: Arc<Listener>,
    token: OnceLock<Token>,
    answer: Mutex<Option<Answer>, 15>,
}

struct Answer {
    fd: OwnedFd,
    text: Vec<u8>,
    written: usize,
    /// Those that are still to be written, last one first.
    qps: Vec<WeakQueuePair>,
}

impl Reader {
    fn start(
        engine: &Arc<Engine>,
        listener: Arc<Listener>,
        fd: OwnedFd,
        text: Vec<u8>,
        mut qps: Vec<WeakQueuePair>,
    ) {
        qps.reverse();
        let reader = Arc::new(Self {
            engine: engine.clone(),
            listener,
            token: OnceLock::new(),
            answer: Mutex::default(),
        });
        // Locked during the registration: the engine may call at once.
        let mut answer = reader.answer.lock();
        let registered = engine.register(fd.as_raw_fd(), reader.clone());
        *answer = Some(Answer { fd, text, written: 0, qps });
        match registered {
            Ok(token) => {
                let _ = reader.token.set(token);
                engine.set_timer(token, Some(Instant::now() + PATIENCE));
                drop(answer);
                reader.go_on();
            }
            Err(_) => drop(answer.take()),
        }
    }

    fn go_on(&self) {
        let mut guard = self.answer.lock();
        let (Some(answer), Some(token)) = (guard.as_mut(), self.token.get()) else { return };
        match answer.write() {
            Some(false) => {}
            Some(true) => self.engine.rearm(*token),
            None => self.end(guard.take(), *token),
        }
    }

    fn end(&self, answer: Option<Answer>, token: Token) {
        if answer.is_some() {
            self.engine.deregister(token);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        *self.listener.readers.lock() -= 1;
    }
}

impl Source for Reader {
    fn ready(&self, _: Readiness) {
        self.go_on();
    }

    fn timeout(&self) {
        let answer = self.answer.lock().take();
        if let Some(token) = self.token.get() {
            self.end(answer, *token);
        }
    }
}

impl Answer {
    /// Writes for one turn. `None`: that was all, or the reader is gone. Otherwise whether it can continue at
    /// once.
    fn write(&mut self) -> Option<bool> {
        let turn = if self.text.is_empty() { TURN } else { 0 };
        for qp in self.qps.split_off(self.qps.len().saturating_sub(turn)).iter().rev() {
            if let Some(line) = qp.upgrade().and_then(|qp| Line::new(&qp)) {
                append(&mut self.text, &line);
            }
        }
        while let Some(rest) = self.text.get(self.written..).filter(|rest| !rest.is_empty()) {
            match net::send(self.fd.as_fd(), rest, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(n) => self.written += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Some(false),
                Err(_) => return None,
            }
        }
        self.text.clear();
        self.written = 0;
        (!self.qps.is_empty()).then_some(true)
    }
}

fn append(text: &mut Vec<u8>, line: &impl Serialize) {
    // Writes into memory, and none of the values can fail.
    let _ = serde_json::to_writer(&mut *text, line);
    let _ = text.write_all(b"\n");
}

#[cfg(test)]
mod tests {
    use super::plain;

    #[test]
    fn mapped_addresses_are_shown_as_ipv4_and_scopes_stay() {
        for (given, shown) in [
            ("[::ffff:192.0.2.1]:7", "192.0.2.1:7"),
            ("192.0.2.1:7", "192.0.2.1:7"),
            ("[fe80::1%2]:7", "[fe80::1%2]:7"),
        ] {
            assert_eq!(plain(given.parse().unwrap()).to_string(), shown);
        }
    }
}
