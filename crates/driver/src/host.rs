//! Two ends on one host agree to use memory instead of their TCP connection.
//!
//! ```text
//!   TCP:   MPA request ──▶      ◀── MPA reply, with the name of the responder's process and a nonce
//!   Unix:  join ──▶      ◀── answer                                          (words.rs)
//!   memory: the initiator's first frame; or TCP, if there was no answer
//! ```
//!
//! The initiator alone decides, with its first frame: its link is held ([`Settling`]) until it has an
//! answer or the time is over. The responder keeps both: it has attached the connection with its reply, and a
//! lane that it has granted waits beside it ([`Granted`]) until a byte comes over one of the two. So nothing
//! is ambiguous, and no thread waits.
//!
//! The proof that both ends are on this host, and who they are: the nonce went over the TCP connection alone,
//! and counts once; the Unix socket says which user asks, and which one answers; and the connection's ends,
//! as the two processes see them, are mirror images, so that nobody is passed by who lies between.

mod asked;
mod asking;
mod fading;
mod to_itself;
mod word;
mod words;

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix,
};
use uwarp_llp::link::Kind;
use uwarp_llp::memory::board::Board;
use uwarp_llp::memory::lane::End;
use uwarp_llp::memory::slab::{Carries, Slab};
use uwarp_process::Mutex;
use uwarp_proto::setup::{Host, HostKey, Negotiated};
use uwarp_rnic::mr::random_u32;

use crate::config::{Config, LinkChoice};
use crate::credentials::Credentials;
use crate::engine::Engine;
use crate::lanes::Lanes;
use crate::nic::Nic;
use crate::places::Place;
use crate::qp::{Qp, StreamNumber};
use crate::rings::Way;
use crate::source::{Readiness, Token};

use asked::Asked;
pub use asked::Granted;
use asking::Asking;
pub(crate) use to_itself::ToItself;
pub use words::Why;

pub use crate::qp::Settling;

/// How long an initiator waits for the answer, or for one to another question. It stays with TCP then, or
/// fails where memory is required. The process has just answered over TCP: if it is late now, it waits for a
/// processor, and would be as late over TCP.
const ANSWER: Duration = Duration::from_secs(2);
/// After a failure, a process is not asked again for so long.
const AFTER_FAILURE: Duration = Duration::from_secs(10);

/// What this process shares with others of its host.
pub struct Neighbours {
    engine: Arc<Engine>,
    key: HostKey,
    lanes: Arc<Lanes>,
    asked: Arc<Asked>,
    /// Those that this process asks, by incarnation.
    asking: Mutex<HashMap<[u8; 16], Known>, 9>,
}

/// The choice of the user for a connection of this kind, and the place that its stream keeps; `ends`: ours,
/// the peer's; `process`: what the peer is known by.
pub fn choice(
    negotiated: &Negotiated,
    kind: Kind,
    ends: [SocketAddr; 2],
    process: SocketAddr,
) -> (LinkChoice, Option<Place>) {
    let [own, peer] = ends;
    let port = if negotiated.initiator { peer.port() } else { own.port() };
    let rule = Config::get().links.choose(peer.ip(), port);
    let (choice, has_place) = choice_by(rule, kind, own == peer);
    if kind == Kind::Rd && rule != choice && negotiated.initiator {
        tracing::info!(%peer, "the stream uses reliable datagrams: UWARP_LINK={rule}, and no place is free");
    }
    (choice, has_place.then(|| Place::hold(process)))
}

/// What a rule means for a connection that exists, and whether its peer has a place for it.
fn choice_by(rule: LinkChoice, kind: Kind, is_itself: bool) -> (LinkChoice, bool) {
    match rule {
        // Its link is settled. It must not ask for memory, whatever the rule allows to others.
        _ if kind == Kind::Rd => (LinkChoice::Rd, false),
        // One socket, which is connected with itself.
        LinkChoice::Rd if is_itself => (LinkChoice::Tcp, false),
        LinkChoice::Hybrid(_) => (LinkChoice::Auto, !is_itself),
        choice => (choice, false),
    }
}

/// A queue pair has got a stream of which the two processes may settle the link: an initiator's is settled
/// from now on, and a responder's initiator may ask.
pub fn begin(
    qp: &Arc<Qp>,
    number: StreamNumber,
    choice: LinkChoice,
    negotiated: &Negotiated,
    ends: [SocketAddr; 2],
) {
    let unsettled = Unsettled { qp: Arc::downgrade(qp), number };
    if Settling::is_alone(choice, ends) {
        // (A sandbox may end who makes such memory.)
        if qp.neighbours().is_none() {
            return unsettled.stay(qp.why_alone());
        }
        return match qp.lane_to_itself() {
            Some(end) => unsettled.settle(end),
            None => unsettled.stay(Why::NoResources),
        };
    }
    let Some(host) = negotiated.host else {
        // On another host there is nothing to say, unless memory is required.
        if choice == LinkChoice::Rd {
            unsettled.stay(Why::Datagrams);
        } else if choice != LinkChoice::Tcp && (choice == LinkChoice::Memory || are_one_host(ends)) {
            // It is the responder that offers it, and it knows why it has not.
            let is_alone = !negotiated.initiator && qp.neighbours().is_none();
            unsettled.stay(if is_alone { qp.why_alone() } else { Why::NotOffered });
        }
        return;
    };
    if choice == LinkChoice::Rd {
        return unsettled.stay(Why::Datagrams);
    }
    let decline = |why| {
        if let Some(neighbours) = qp.known_neighbours().filter(|_| !negotiated.initiator) {
            neighbours.asked.decline(host.nonce, ends, unsettled.clone(), why);
        }
    };
    match (choice, qp.neighbours(), negotiated.initiator) {
        (LinkChoice::Tcp, ..) => {
            decline(Why::TheirSetting);
            unsettled.stay(Why::Setting);
        }
        (_, Some(neighbours), true) => {
            tracing::debug!(qpn = qp.qpn(), "asks the peer's process for memory");
            if let Err((why, wants)) = neighbours.ask(host, ends, Wants::Stream(unsettled)) {
                wants.stay(why);
            }
        }
        (_, Some(neighbours), false) => neighbours.asked.expect(host.nonce, ends, unsettled),
        // Or, since it has offered it, must not be looked into any more.
        (_, None, _) => {
            decline(Why::TheirSandbox);
            unsettled.stay(qp.why_alone());
        }
    }
}

/// Why this process can share no memory with others of its host, if it cannot: for people.
pub fn obstacle() -> Option<Why> {
    if is_sandboxed() {
        return Some(Why::Sandbox);
    }
    Board::create().is_err().then_some(Why::NoResources)
}

/// Whether a connection with these ends is within a host. (One between two addresses of a host may be, too.)
pub fn are_one_host([own, peer]: [SocketAddr; 2]) -> bool {
    let [own, peer] = [own, peer].map(|end| end.ip().to_canonical());
    own == peer || own.is_loopback() && peer.is_loopback()
}

/// A process that this one asks.
enum Known {
    /// The engine has it as long as it is of use: when the process is gone, nothing of it is kept.
    Asking(Weak<Asking>),
    /// It has failed.
    Not(Why, Instant),
}

/// A stream that waits for its link to be settled.
#[derive(Clone)]
pub(crate) struct Unsettled {
    qp: Weak<Qp>,
    number: StreamNumber,
}

impl Unsettled {
    /// The stream goes on over this lane.
    fn settle(&self, end: End) {
        if let Some(qp) = self.qp.upgrade()
            && let Err(error) = qp.settle_in_memory(self.number, end)
        {
            tracing::debug!(qpn = qp.qpn(), "the stream has ended before its link was settled: {error}");
        }
    }

    /// Whether nothing was heard of the peer yet.
    fn is_open(&self) -> bool {
        self.qp.upgrade().is_some_and(|qp| qp.may_settle(self.number))
    }

    /// The responder has granted a lane.
    fn grant(&self, granted: Arc<Granted>) {
        if let Some(qp) = self.qp.upgrade() {
            qp.grant(self.number, granted);
        }
    }

    /// The stream stays with TCP, or ends if that is not allowed.
    fn stay(&self, why: Why) {
        if let Some(qp) = self.qp.upgrade() {
            qp.stay_with_tcp(self.number, why);
        }
    }
}

/// Who asks for memory.
pub(crate) enum Wants {
    /// An initiator's stream.
    Stream(Unsettled),
    /// The datagrams between two ports.
    Datagrams(Arc<Way>),
}

impl Wants {
    fn settle(self, end: End) {
        match self {
            Self::Stream(unsettled) => unsettled.settle(end),
            Self::Datagrams(way) => way.settle(end),
        }
    }

    fn stay(self, why: Why) {
        match self {
            Self::Stream(unsettled) => unsettled.stay(why),
            Self::Datagrams(way) => way.stay(why),
        }
    }

    fn carries(&self) -> Carries {
        match self {
            Self::Stream(_) => Carries::Streams,
            Self::Datagrams(_) => Carries::Datagrams,
        }
    }
}

impl Neighbours {
    pub(crate) fn start(nic: &Nic) -> Result<Arc<Self>, Why> {
        if is_sandboxed() {
            SANDBOXED.store(true, Ordering::Relaxed);
            return Err(Why::Sandbox);
        }
        let mut words = [[0; 16]; 2];
        for part in words.iter_mut().flat_map(|word| word.chunks_exact_mut(4)) {
            part.copy_from_slice(&random_u32().map_err(|_| Why::NoResources)?.to_ne_bytes());
        }
        let [incarnation, key] = words;
        let key = HostKey { incarnation, key };
        let lanes = nic.lanes().map_err(|_| Why::NoResources)?;
        let engine = nic.engine().clone();
        let asked = Asked::listen(&engine, &lanes, key, nic.me()).map_err(|_| Why::NoResources)?;
        Ok(Arc::new(Self { engine, key, lanes, asked, asking: Mutex::default() }))
    }

    /// What a responder offers to its initiators.
    pub fn key(&self) -> HostKey {
        self.key
    }

    /// What the owner of the second of these ends, a UDP port, is told: whoever shows it joins with that end.
    pub(crate) fn word_for(&self, ends: [SocketAddr; 2]) -> [u8; 16] {
        self.asked.word_for(ends)
    }

    pub(crate) fn ask(
        &self,
        host: Host,
        ends: [SocketAddr; 2],
        mut wants: Wants,
    ) -> Result<(), (Why, Wants)> {
        loop {
            let asking = match self.asking(host.incarnation) {
                Ok(asking) => asking,
                Err(why) => return Err((why, wants)),
            };
            match asking.ask(host.nonce, ends, wants) {
                Ok(()) => return Ok(()),
                // Between the two calls.
                Err((_, again)) if asking.was_idle() => wants = again,
                Err((why, wants)) => {
                    self.forget(host.incarnation, &asking, why);
                    return Err((why, wants));
                }
            }
        }
    }

    fn asking(&self, incarnation: [u8; 16]) -> Result<Arc<Asking>, Why> {
        let mut all = self.asking.lock();
        let in_use = |asking: &Weak<Asking>| asking.upgrade().filter(|asking| !asking.is_over());
        match all.get(&incarnation) {
            Some(Known::Asking(asking)) => {
                if let Some(asking) = in_use(asking) {
                    return Ok(asking);
                }
            }
            Some(Known::Not(why, until)) if Instant::now() < *until => return Err(*why),
            _ => {}
        }
        all.retain(|_, known| match known {
            Known::Asking(asking) => in_use(asking).is_some(),
            Known::Not(_, until) => Instant::now() < *until,
        });
        let begun = Asking::begin(&self.engine, &self.lanes, &incarnation);
        let known = match &begun {
            Ok(asking) => Known::Asking(Arc::downgrade(asking)),
            Err(why) => Known::Not(*why, Instant::now() + AFTER_FAILURE),
        };
        all.insert(incarnation, known);
        begun
    }

    fn forget(&self, incarnation: [u8; 16], asking: &Arc<Asking>, why: Why) {
        if asking.is_over() {
            let until = Instant::now() + AFTER_FAILURE;
            self.asking.lock().insert(incarnation, Known::Not(why, until));
        }
    }
}

/// The address of a process among Unix sockets: an abstract name, which belongs to the network namespace and
/// to no file system.
fn name(incarnation: &[u8; 16]) -> Result<SocketAddrUnix, Errno> {
    let mut name = b"uwarp-host-".to_vec();
    for byte in incarnation {
        name.extend(format!("{byte:02x}").bytes());
    }
    SocketAddrUnix::new_abstract_name(&name)
}

/// Whether the process at the other end belongs to the same user. (The user of whom a namespace knows nothing
/// is nobody's.)
fn is_same_user(socket: impl AsFd) -> bool {
    const OVERFLOW: u32 = 65534;
    let peer = Credentials::of_peer(socket);
    peer.is_some_and(|peer| peer.uid == rustix::process::geteuid().as_raw() && peer.uid != OVERFLOW)
}

/// Whether other processes of the user must not read this one's memory: then it shares none.
pub(crate) fn is_sandboxed() -> bool {
    !may_be_looked_into() || crate::has_more_rights_than_its_caller() || has_filters_of_its_own()
}

/// This process has shared nothing from the beginning, because of that.
static SANDBOXED: AtomicBool = AtomicBool::new(false);

/// Whether it shares nothing because it must not be looked into. Of what the program has done since, only
/// what a question to the system tells that any filter lets through.
pub(crate) fn shares_nothing() -> bool {
    SANDBOXED.load(Ordering::Relaxed) || !may_be_looked_into()
}

/// Whether the program lets other processes of its user trace it now (prctl(2), `PR_SET_DUMPABLE`).
pub(crate) fn may_be_looked_into() -> bool {
    let dumpable = rustix::process::dumpable_behavior();
    matches!(dumpable, Ok(rustix::process::DumpableBehavior::Dumpable))
}

/// Whether the process has system call filters beyond those of its parent. A container's belong to both. The
/// parent of who is started in a container from outside cannot be seen: the container's first process stands
/// for it, and that one has the filter with which the runtimes begin a container, and no more.
fn has_filters_of_its_own() -> bool {
    let filters = |pid: &str| -> Option<u32> {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("Seccomp_filters:"))?;
        line.trim().parse().ok()
    };
    let Some(own @ 1..) = filters("self") else { return false };
    let inherited = match rustix::process::getppid() {
        Some(parent) => filters(&parent.as_raw_nonzero().to_string()),
        None if rustix::process::getpid().is_init() => Some(1),
        None => filters("1"),
    };
    inherited.is_none_or(|inherited| own > inherited)
}

/// The process at the other end is not heard any more. Streams know that by their connections; the lanes with
/// datagrams are looked at.
fn end_datagrams(engine: &Engine, slabs: &[Arc<Slab>]) {
    for slab in slabs.iter().filter(|slab| slab.carries() == Carries::Datagrams) {
        slab.names(|name| engine.raise(Token(name), Readiness::ANY));
    }
}

/// Sends one message with descriptors. Never waits.
fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::NOBUFS);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags).map(|_| ())
}

/// The most descriptors of a message.
const MOST: usize = 3;

/// Receives one message, of at most the buffer's size; returns how long it is. 0: the peer has closed. MFILE:
/// its descriptors do not fit into this process.
fn receive(socket: impl AsFd, buffer: &mut [u8], fds: &mut Vec<OwnedFd>) -> Result<usize, Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = part {
            fds.extend(rights);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MFILE);
    }
    Ok(message.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_by_datagrams_asks_for_no_memory_and_one_of_tcp_has_a_place() {
        use LinkChoice::*;
        for (rule, kind, is_itself, choice, has_place) in [
            (Auto, Kind::Tcp, false, Auto, false),
            (Memory, Kind::Tcp, false, Memory, false),
            (Rd, Kind::Tcp, false, Rd, false),
            (Rd, Kind::Tcp, true, Tcp, false),
            (Rd, Kind::Rd, false, Rd, false),
            (Hybrid(2), Kind::Rd, false, Rd, false),
            (Hybrid(2), Kind::Tcp, false, Auto, true),
            (Hybrid(0), Kind::Tcp, false, Auto, true),
            (Hybrid(2), Kind::Tcp, true, Auto, false),
        ] {
            assert_eq!(choice_by(rule, kind, is_itself), (choice, has_place), "{rule} {kind} {is_itself}");
        }
    }
}
