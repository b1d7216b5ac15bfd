//! Datagram sockets: a UDP socket of the kernel, and a queue pair of the service UD.
//!
//! The first datagrams to an address go to its UDP socket, with our queue pair's number in front. The answer
//! brings the number of the queue pair there, and all later ones go from queue pair to queue pair.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags as Flags4, SocketFlags, SocketType, sockopt};
use smallvec::SmallVec;
use uwarp_cm::QKEY;
use uwarp_driver::{Nic, Readiness, Source, Token, UdQp};
use uwarp_llp::route;
use uwarp_mem::owned::{Owned, from_program};
use uwarp_mem::{MemSeg, copy_in, copy_out};
use uwarp_process::{Mutex, MutexGuard};
use uwarp_rnic::ah::grh;
use uwarp_rnic::qp::{QpCaps, QpInit, QpModify, QpState, UdSendWr};
use uwarp_rnic::{
    Access, Ah, AsyncEvent, AsyncSink, Cq, Mr, Pd, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcStatus,
};

use crate::events::Events;
use crate::number::Number;
use crate::socket::Flags;
use crate::stream::Ready;
use crate::waiting::{Sleep, Waiters, Waiting};
use crate::wire::{Announcement, DatagramHeader};

/// Bytes of a datagram between queue pairs, header included: what librdmacm's receives have room for.
const SLOT: usize = 2048;
/// A receive has the area of the GRH in front.
const RECEIVE_SLOT: usize = SLOT + grh::LEN;
/// Sends, and receives.
const SLOTS: u32 = 384;
/// Datagrams that wait to be read. More are dropped, as UDP drops them.
const MOST_UNREAD: usize = SLOTS as usize;
/// Addresses that are remembered.
const MOST_DESTINATIONS: usize = 1 << 16;
/// Completions taken at once.
const BATCH: usize = 32;
/// The other bit of a work request's number says that it is a receive.
const RECEIVE: u64 = 1 << 32;

/// An address that datagrams go to.
#[derive(Clone)]
struct Destination {
    /// Our address toward it.
    from: IpAddr,
    /// Its queue pair, once that is known.
    queue_pair: Option<(Arc<Ah>, u32)>,
}

/// A datagram that waits to be read.
struct Unread {
    from: SocketAddr,
    bytes: Vec<u8>,
}

struct State {
    /// Places for sends that are free.
    free: Vec<u32>,
    unread: VecDeque<Unread>,
}

struct NoEvents;

impl AsyncSink for NoEvents {
    fn async_event(&self, _: AsyncEvent) {}
}

/// A datagram socket.
pub struct Datagrams {
    me: Weak<Self>,
    nic: Arc<Nic>,
    number: Number,
    udp: OwnedFd,
    v6: bool,
    nonblocking: AtomicBool,
    closed: AtomicBool,
    pd: Arc<Pd>,
    cq: Arc<Cq>,
    qp: Arc<UdQp>,
    sends: (Owned, Arc<Mr>),
    receives: (Owned, Arc<Mr>),
    waiters: Arc<Waiters>,
    token: Mutex<Option<Token>, 29>,
    peer: Mutex<Option<SocketAddr>, 29>,
    destinations: Mutex<HashMap<SocketAddr, Destination>, 29>,
    /// Datagrams that came by the UDP socket. The engine puts them here, possibly in a thread that has
    /// `state` locked.
    by_udp: Mutex<VecDeque<Unread>, 29>,
    state: Mutex<State, 7>,
}

impl Datagrams {
    /// A new socket.
    pub fn new(v6: bool, nonblocking: bool) -> Result<Arc<Self>, Errno> {
        let nic = Arc::clone(Events::of_process()?.cm().nic());
        let family = if v6 { AddressFamily::INET6 } else { AddressFamily::INET };
        let udp = rustix::net::socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        let number = Number::new()?;
        let pd = Pd::new();
        let waiters = Arc::<Waiters>::default();
        let cq = Cq::new(2 * SLOTS, 0, Some(Arc::clone(&waiters) as _), Arc::new(NoEvents));
        let caps = QpCaps {
            max_send_wr: SLOTS,
            max_recv_wr: SLOTS,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInit {
            pd: Arc::clone(&pd),
            send_cq: Arc::clone(&cq),
            recv_cq: Arc::clone(&cq),
            srq: None,
            caps,
            sq_sig_all: true,
            cookie: 0,
            async_sink: Arc::new(NoEvents),
        };
        let qp = UdQp::create(&nic, init).map_err(errno)?;
        let memory = |len: usize| {
            let memory = Owned::new(len).ok_or(Errno::NOMEM)?;
            let seg = memory.seg();
            let mr = Mr::register(&pd, seg.addr, seg.len as u64, seg.addr, Access::LOCAL_WRITE);
            Ok((memory, mr.map_err(errno)?))
        };
        let (sends, receives) = (memory(SLOTS as usize * SLOT)?, memory(SLOTS as usize * RECEIVE_SLOT)?);
        let socket = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            nic,
            number,
            udp,
            v6,
            nonblocking: AtomicBool::new(nonblocking),
            closed: AtomicBool::new(false),
            pd,
            cq,
            qp,
            sends,
            receives,
            waiters,
            token: Mutex::default(),
            peer: Mutex::default(),
            destinations: Mutex::default(),
            by_udp: Mutex::default(),
            state: Mutex::new(State { free: (0..SLOTS).collect(), unread: VecDeque::new() }),
        });
        socket.start()?;
        Ok(socket)
    }

    fn start(self: &Arc<Self>) -> Result<(), Errno> {
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let change = QpModify { state: Some(state), qkey: Some(QKEY), ..QpModify::default() };
            self.qp.modify(&change).map_err(errno)?;
        }
        self.post_receives(0..SLOTS)?;
        let source = Arc::new(Udp(Weak::clone(&self.me)));
        let registered = self.nic.engine().register(self.udp.as_raw_fd(), source);
        let token = registered.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::MFILE))?;
        *self.token.lock() = Some(token);
        Ok(())
    }

    /// Its number.
    pub fn fd(&self) -> i32 {
        self.number.value()
    }

    /// See [`Number::disown`].
    pub(crate) fn disown_number(&self) {
        self.number.disown();
    }

    /// `O_NONBLOCK`.
    pub fn nonblocking(&self) -> bool {
        self.nonblocking.load(Ordering::Relaxed)
    }

    /// Sets `O_NONBLOCK`.
    pub fn set_nonblocking(&self, on: bool) {
        self.nonblocking.store(on, Ordering::Relaxed);
    }

    /// `SO_REUSEADDR`.
    pub fn set_reuse_address(&self, on: bool) -> Result<(), Errno> {
        sockopt::set_socket_reuseaddr(&self.udp, on)
    }

    /// Binds to a local address.
    pub fn bind(&self, address: SocketAddr) -> Result<(), Errno> {
        rustix::net::bind(&self.udp, &address)
    }

    /// Sets the peer that [`Self::send`] without an address sends to, and that alone is received from.
    pub fn connect(&self, peer: SocketAddr) -> Result<(), Errno> {
        let peer = route::loopback_if_wildcard(peer);
        rustix::net::connect(&self.udp, &peer)?;
        *self.peer.lock() = Some(peer);
        Ok(())
    }

    /// Its address.
    pub fn local_address(&self) -> Result<SocketAddr, Errno> {
        let address = rustix::net::getsockname(&self.udp)?;
        SocketAddr::try_from(address).map_err(|_| Errno::AFNOSUPPORT)
    }

    /// The address it is connected to.
    pub fn peer_address(&self) -> Result<SocketAddr, Errno> {
        (*self.peer.lock()).ok_or(Errno::NOTCONN)
    }

    fn sge((memory, mr): &(Owned, Arc<Mr>), slot: u32, size: usize, len: usize) -> Sge {
        let length = u32::try_from(len).unwrap_or(0);
        Sge { addr: memory.seg().addr + u64::from(slot) * size as u64, length, lkey: mr.stag() }
    }

    fn post_receives(&self, slots: impl Iterator<Item = u32>) -> Result<(), Errno> {
        let sge = |slot| Self::sge(&self.receives, slot, RECEIVE_SLOT, RECEIVE_SLOT);
        let posts: SmallVec<[(u32, Sge); BATCH]> = slots.map(|slot| (slot, sge(slot))).collect();
        let wrs = posts
            .iter()
            .map(|(slot, sge)| RecvWr { wr_id: RECEIVE | u64::from(*slot), sges: std::slice::from_ref(sge) });
        self.qp.post_recv(wrs).map_err(|(_, error)| errno(error))
    }

    /// Takes completions, as long as there is room for what has arrived. If there is no place for sends, also
    /// beyond that: a program may send for ever and read nothing.
    fn process(&self, state: &mut MutexGuard<'_, State, 7>) {
        while state.unread.len() + BATCH <= MOST_UNREAD || state.free.is_empty() {
            let mut batch = SmallVec::<[Wc; BATCH]>::new();
            let found = self.nic.poll_cq(&self.cq, BATCH, |wc| batch.push(wc));
            let mut used = SmallVec::<[u32; BATCH]>::new();
            for wc in &batch {
                let slot = wc.wr_id as u32;
                if wc.wr_id & RECEIVE == 0 {
                    state.free.push(slot);
                    continue;
                }
                used.push(slot);
                if wc.status == WcStatus::Success
                    && state.unread.len() < MOST_UNREAD
                    && let Some(unread) = self.received(slot, wc.byte_len as usize)
                {
                    state.unread.push_back(unread);
                }
            }
            // Refused only when the queue pair is destroyed.
            let _ = self.post_receives(used.into_iter());
            if found < BATCH {
                break;
            }
        }
        let mut by_udp = self.by_udp.lock();
        let room = MOST_UNREAD.saturating_sub(state.unread.len()).min(by_udp.len());
        state.unread.extend(by_udp.drain(..room));
    }

    /// A datagram between queue pairs.
    fn received(&self, slot: u32, len: usize) -> Option<Unread> {
        let place = self.receives.0.seg().part(slot as usize * RECEIVE_SLOT, RECEIVE_SLOT);
        let mut bytes = Vec::new();
        copy_out(place.part(grh::LEN, len.saturating_sub(grh::LEN)), &mut bytes).ok()?;
        let header = DatagramHeader::parse(&bytes)?;
        bytes.drain(..header.len());
        self.wants(header.from).then_some(Unread { from: header.from, bytes })
    }

    /// Whether a connected socket receives from there.
    fn wants(&self, from: SocketAddr) -> bool {
        let peer = *self.peer.lock();
        peer.is_none_or(|peer| (peer.ip(), peer.port()) == (from.ip(), from.port()))
    }

    /// The port, which an unbound socket gets now.
    fn port(&self) -> Result<u16, Errno> {
        match self.local_address()?.port() {
            0 => {
                let any: IpAddr =
                    if self.v6 { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
                match self.bind(SocketAddr::new(any, 0)) {
                    // Another thread has bound it meanwhile.
                    Ok(()) | Err(Errno::INVAL) => Ok(self.local_address()?.port()),
                    Err(errno) => Err(errno),
                }
            }
            port => Ok(port),
        }
    }

    /// What is known of an address; it is remembered from now on.
    fn destination(&self, to: SocketAddr) -> Result<Destination, Errno> {
        if let Some(known) = self.destinations.lock().get(&to) {
            return Ok(known.clone());
        }
        let bound = Some(self.local_address()?.ip()).filter(|ip| !ip.is_unspecified());
        let from = route::source_for(bound, to, false)?;
        let mut destinations = self.destinations.lock();
        if destinations.len() >= MOST_DESTINATIONS {
            // Strangers must not make it grow; those that are still used are found again.
            destinations.clear();
        }
        Ok(destinations.entry(to).or_insert(Destination { from, queue_pair: None }).clone())
    }

    /// Sends a datagram to `to`, or to the peer.
    pub fn send(&self, buffers: &[MemSeg], to: Option<SocketAddr>, flags: Flags) -> Result<usize, Errno> {
        let len: usize = buffers.iter().map(|buffer| buffer.len).sum();
        let to = match to {
            Some(to) => route::loopback_if_wildcard(to),
            None => (*self.peer.lock()).ok_or(Errno::DESTADDRREQ)?,
        };
        if to.is_ipv6() != self.v6 {
            return Err(Errno::AFNOSUPPORT);
        }
        let port = self.port()?;
        let destination = self.destination(to)?;
        let header = DatagramHeader { from: SocketAddr::new(destination.from, port) };
        if len > SLOT - header.len().max(Announcement::MAX_LEN) {
            return Err(Errno::MSGSIZE);
        }
        let mut wait = self.waits(flags.dont_wait);
        loop {
            let mut state = self.state.lock();
            if state.free.is_empty() {
                self.process(&mut state);
            }
            let Some(slot) = state.free.pop() else {
                drop(state);
                wait()?;
                continue;
            };
            let sent = match &destination.queue_pair {
                Some((ah, qpn)) => self.send_to_queue_pair(slot, header, buffers, len, (ah, *qpn)),
                None => self.send_to_udp(slot, (to, destination.from), buffers, len, flags),
            };
            if sent.is_err() || destination.queue_pair.is_none() {
                state.free.push(slot);
            }
            return sent.map(|()| len);
        }
    }

    /// Puts a header and the program's bytes into a place for sends.
    fn stage(&self, slot: u32, header: &[u8], buffers: &[MemSeg]) -> Result<MemSeg, Errno> {
        let place = self.sends.0.seg().part(slot as usize * SLOT, SLOT);
        // Memory of ours is mapped.
        let mut at = copy_in(place, header).unwrap_or(0);
        for buffer in buffers {
            at += from_program(place.part(at, SLOT), *buffer).map_err(|_| Errno::FAULT)?;
        }
        Ok(place.part(0, at))
    }

    fn send_to_queue_pair(
        &self,
        slot: u32,
        header: DatagramHeader,
        buffers: &[MemSeg],
        len: usize,
        (ah, qpn): (&Arc<Ah>, u32),
    ) -> Result<(), Errno> {
        self.stage(slot, &header.to_bytes(), buffers)?;
        let sge = Self::sge(&self.sends, slot, SLOT, header.len() + len);
        let wr = SendWr {
            wr_id: u64::from(slot),
            op: SendOp::Send { invalidate: None },
            flags: SendFlags::empty(),
            sges: std::slice::from_ref(&sge),
        };
        let wr = UdSendWr { wr, ah, remote_qpn: qpn, remote_qkey: QKEY, job_key: None };
        self.qp.post_send(std::iter::once(wr)).map_err(|(_, error)| errno(error))
    }

    fn send_to_udp(
        &self,
        slot: u32,
        (to, from): (SocketAddr, IpAddr),
        buffers: &[MemSeg],
        len: usize,
        flags: Flags,
    ) -> Result<(), Errno> {
        let announcement = Announcement { data: true, qpn: self.qp.qpn(), from };
        let header = announcement.to_bytes();
        let place = self.stage(slot, &header, buffers)?;
        let mut bytes = Vec::with_capacity(header.len() + len);
        copy_out(place, &mut bytes).map_err(|_| Errno::FAULT)?;
        let wait = flags.dont_wait || self.nonblocking();
        let with = if wait { Flags4::DONTWAIT } else { Flags4::empty() } | Flags4::NOSIGNAL;
        rustix::net::sendto(&self.udp, &bytes, with, &to).map(drop)
    }

    /// Receives a datagram. Returns how many bytes fitted, how many there were, and where it came from.
    pub fn receive(&self, buffers: &[MemSeg], flags: Flags) -> Result<(usize, usize, SocketAddr), Errno> {
        let mut wait = self.waits(flags.dont_wait);
        loop {
            let mut state = self.state.lock();
            if state.unread.is_empty() {
                self.process(&mut state);
            }
            if let Some(first) = state.unread.front() {
                let mut left = first.bytes.as_slice();
                for buffer in buffers {
                    let n = copy_in(*buffer, left).map_err(|_| Errno::FAULT)?;
                    left = left.get(n..).unwrap_or_default();
                }
                let got = (first.bytes.len() - left.len(), first.bytes.len(), first.from);
                if !flags.peek {
                    state.unread.pop_front();
                }
                return Ok(got);
            }
            drop(state);
            wait()?;
        }
    }

    fn waits(&self, dont_wait: bool) -> impl FnMut() -> Result<(), Errno> {
        let mut waiting: Option<Waiting> = None;
        move || {
            if self.closed.load(Ordering::Acquire) {
                return Err(Errno::BADF);
            }
            match &mut waiting {
                None if dont_wait || self.nonblocking() => return Err(Errno::AGAIN),
                None => {
                    let mut new = Waiting::begin(&self.nic, Sleep::InChannel, None)?;
                    new.enter(&self.waiters);
                    self.arm(&new);
                    waiting = Some(new);
                }
                Some(waiting) => {
                    waiting.sleep()?;
                    self.arm(waiting);
                }
            }
            Ok(())
        }
    }

    /// Who waits for it.
    pub(crate) fn waiters(&self) -> &Arc<Waiters> {
        &self.waiters
    }

    /// Prepares to wait for a change.
    pub(crate) fn arm(&self, waiting: &Waiting) {
        self.cq.arm(false);
        waiting.channel().armed(&Arc::downgrade(&self.cq));
    }

    /// What it is ready for.
    pub fn readiness(&self) -> Ready {
        let mut state = self.state.lock();
        self.process(&mut state);
        Ready { readable: !state.unread.is_empty(), writable: !state.free.is_empty(), ..Ready::default() }
    }

    /// Closes it.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
        let token = self.token.lock().take();
        if let Some(token) = token {
            self.nic.engine().deregister(token);
        }
        self.waiters.wake();
        self.qp.destroy();
    }

    /// Something came by UDP: a datagram, or the number of a queue pair.
    fn announced(&self, bytes: &[u8], from: SocketAddr) {
        let Some(announcement) = Announcement::parse(bytes, from.is_ipv6()) else { return };
        let Ok(destination) = self.destination(from) else { return };
        if announcement.data {
            let answer = Announcement { data: false, qpn: self.qp.qpn(), from: destination.from };
            let flags = Flags4::DONTWAIT | Flags4::NOSIGNAL;
            // If it gets lost, the next datagram brings another one.
            let _ = rustix::net::sendto(&self.udp, &answer.to_bytes(), flags, &from);
        }
        if destination.queue_pair.as_ref().is_none_or(|(_, qpn)| *qpn != announcement.qpn) {
            let ah = Ah::new(&self.pd, from, Some(destination.from));
            if let Some(known) = self.destinations.lock().get_mut(&from) {
                known.queue_pair = Some((ah, announcement.qpn));
            }
        }
        if announcement.data && self.wants(from) {
            let bytes = bytes.get(Announcement::len_of(from.is_ipv6())..).unwrap_or_default().to_vec();
            let mut by_udp = self.by_udp.lock();
            if by_udp.len() < MOST_UNREAD {
                by_udp.push_back(Unread { from, bytes });
            }
            drop(by_udp);
            self.waiters.wake();
        }
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.qp.destroy();
        for (_, mr) in [&self.sends, &self.receives] {
            // No window is bound to it.
            mr.deregister();
        }
    }
}

/// What the engine calls when the UDP socket is readable.
struct Udp(Weak<Datagrams>);

impl Source for Udp {
    fn ready(&self, _: Readiness) {
        let Some(socket) = self.0.upgrade() else { return };
        let mut buffer = [0u8; 4096];
        loop {
            match rustix::net::recvfrom(&socket.udp, &mut buffer, RecvFlags::DONTWAIT) {
                Ok((_, len, Some(from))) => {
                    if let (Ok(from), Some(bytes)) = (SocketAddr::try_from(from), buffer.get(..len)) {
                        socket.announced(bytes, from);
                    }
                }
                // A port that nobody has: UDP tells by the next call, and the datagram is lost.
                Ok(_) | Err(Errno::INTR | Errno::CONNREFUSED) => {}
                Err(_) => return,
            }
        }
    }

    fn timeout(&self) {}
}

fn errno(error: uwarp_rnic::VerbsError) -> Errno {
    Errno::from_raw_os_error(error.errno())
}
