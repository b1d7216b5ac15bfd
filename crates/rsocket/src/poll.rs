//! Waiting for many sockets and other descriptors (`rpoll`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use smallvec::SmallVec;

use crate::datagram::Datagrams;
use crate::events::Events;
use crate::socket::Socket;
use crate::stream::Ready;
use crate::table::{self, Entry};
use crate::upgrade::Upgraded;
use crate::waiting::{Sleep, Waiters, Waiting};

/// poll(2)'s bits.
#[allow(missing_docs)]
pub mod bit {
    pub const IN: i16 = 1;
    pub const PRI: i16 = 2;
    pub const OUT: i16 = 4;
    pub const ERR: i16 = 8;
    pub const HUP: i16 = 0x10;
    pub const NVAL: i16 = 0x20;
    pub const RDNORM: i16 = 0x40;
    pub const WRNORM: i16 = 0x100;
    pub const RDHUP: i16 = 0x2000;
}

/// How long a call looks before it sleeps: as long as librdmacm's does, and at least for so many looks.
const SPIN: (Duration, u32) = (Duration::from_micros(10), 16);

/// A descriptor, in poll(2)'s form.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PollFd {
    /// The descriptor; a negative one is ignored.
    pub fd: i32,
    /// What is asked for.
    pub events: i16,
    /// What there is.
    pub revents: i16,
}

/// The kernel's poll.
pub type Kernel<'a> = &'a mut dyn FnMut(&mut [PollFd], Option<Duration>) -> Result<usize, Errno>;

type Sockets = SmallVec<[Option<Any>; 8]>;

/// What this library knows the readiness of.
enum Any {
    Stream(Arc<Socket>),
    Datagrams(Arc<Datagrams>),
    Upgraded(Arc<Upgraded>),
}

/// Waits until one of the descriptors is ready, at most for `limit`; returns how many are. Those that are not
/// sockets of this library are the kernel's.
pub fn poll(fds: &mut [PollFd], limit: Option<Duration>, kernel: Kernel<'_>) -> Result<usize, Errno> {
    poll_with(fds, limit, kernel, None)
}

/// What can wake a call beside its descriptors: the threads to wake, and whether that has happened already.
pub(crate) type More<'a> = (&'a Arc<Waiters>, &'a dyn Fn() -> bool);

/// The same; `more` can wake it, too, and it then returns what is ready, possibly nothing.
pub(crate) fn poll_with(
    fds: &mut [PollFd],
    limit: Option<Duration>,
    kernel: Kernel<'_>,
    more: Option<More<'_>>,
) -> Result<usize, Errno> {
    let sockets: Sockets = fds.iter().map(|entry| socket(entry.fd)).collect();
    if sockets.iter().all(Option::is_none) && more.is_none() {
        return kernel(fds, limit);
    }
    let begin = Instant::now();
    let ready = look(fds, &sockets, kernel)?;
    if ready > 0 || limit == Some(Duration::ZERO) {
        return Ok(ready);
    }
    let nic = Arc::clone(Events::of_process()?.cm().nic());
    let spin = SPIN.0.max(nic.engine().time_of_polls(SPIN.1));
    while begin.elapsed() <= spin {
        let ready = look(fds, &sockets, kernel)?;
        if ready > 0 {
            return Ok(ready);
        }
    }
    // The thread serves its sockets itself where they are all that it waits for: as a call that receives.
    let how = if sockets.iter().all(Option::is_some) { Sleep::InChannel } else { Sleep::OnDescriptor };
    let mut waiting = Waiting::begin(&nic, how, limit)?;
    sockets.iter().flatten().for_each(|socket| waiting.enter(socket.waiters()));
    if let Some((waiters, already)) = more {
        waiting.enter(waiters);
        if already() {
            return look(fds, &sockets, kernel);
        }
    }
    loop {
        sockets.iter().flatten().for_each(|socket| socket.arm(&waiting));
        let ready = look(fds, &sockets, kernel)?;
        if ready > 0 {
            return Ok(ready);
        }
        let woken = match how {
            Sleep::InChannel => waiting.sleep_as_poll()?,
            Sleep::OnDescriptor => sleep(fds, &sockets, &waiting, kernel)?,
        };
        if !woken || more.is_some() {
            return look(fds, &sockets, kernel);
        }
    }
}

fn socket(fd: i32) -> Option<Any> {
    match table::find(fd)? {
        Entry::Socket(socket) => Some(Any::Stream(socket)),
        Entry::Datagrams(socket) => Some(Any::Datagrams(socket)),
        Entry::Upgraded(socket) => Some(Any::Upgraded(socket)),
        // As a descriptor of the kernel.
        Entry::Set(_) => None,
    }
}

impl Any {
    fn waiters(&self) -> &Arc<Waiters> {
        match self {
            Self::Stream(socket) => socket.waiters(),
            Self::Datagrams(socket) => socket.waiters(),
            Self::Upgraded(socket) => socket.waiters(),
        }
    }

    fn arm(&self, waiting: &Waiting) {
        match self {
            Self::Stream(socket) => socket.arm(waiting),
            Self::Datagrams(socket) => socket.arm(waiting),
            Self::Upgraded(socket) => socket.arm(waiting),
        }
    }

    fn readiness(&self) -> Ready {
        match self {
            Self::Stream(socket) => socket.readiness(),
            Self::Datagrams(socket) => socket.readiness(),
            Self::Upgraded(socket) => socket.readiness(),
        }
    }
}

/// What is ready now.
fn look(fds: &mut [PollFd], sockets: &Sockets, kernel: Kernel<'_>) -> Result<usize, Errno> {
    let mut foreign = SmallVec::<[PollFd; 8]>::new();
    let mut ready = 0;
    for (entry, socket) in fds.iter_mut().zip(sockets) {
        entry.revents = 0;
        match socket {
            Some(socket) => {
                entry.revents = events_of(socket, entry.events);
                ready += usize::from(entry.revents != 0);
            }
            None => foreign.push(*entry),
        }
    }
    if foreign.is_empty() {
        return Ok(ready);
    }
    ready += kernel(&mut foreign, Some(Duration::ZERO))?;
    let foreign_entries = fds.iter_mut().zip(sockets).filter(|(_, socket)| socket.is_none());
    for ((entry, _), seen) in foreign_entries.zip(&foreign) {
        entry.revents = seen.revents;
    }
    Ok(ready)
}

fn events_of(socket: &Any, asked: i16) -> i16 {
    bits(socket.readiness(), asked)
}

/// In poll(2)'s bits, of those that were asked for.
pub fn bits(ready: Ready, asked: i16) -> i16 {
    let mut events = 0;
    if ready.readable {
        events |= bit::IN | bit::RDNORM;
    }
    if ready.writable {
        events |= bit::OUT | bit::WRNORM;
    }
    if ready.peer_done {
        events |= bit::RDHUP;
    }
    if ready.completion {
        events |= bit::PRI;
    }
    events &= asked;
    if ready.hangup {
        events |= bit::HUP;
    }
    if ready.error {
        events |= bit::ERR;
    }
    events
}

/// Sleeps until the kernel's descriptors or the thread's own are ready. False: the limit is over.
fn sleep(fds: &[PollFd], sockets: &Sockets, waiting: &Waiting, kernel: Kernel<'_>) -> Result<bool, Errno> {
    let mut set: SmallVec<[PollFd; 8]> =
        fds.iter().zip(sockets).filter(|(_, socket)| socket.is_none()).map(|(entry, _)| *entry).collect();
    set.push(PollFd { fd: waiting.fd(), events: bit::IN, revents: 0 });
    let left = waiting.left();
    let ready = kernel(&mut set, left)?;
    waiting.woken();
    Ok(ready > 0 || left.is_none())
}
