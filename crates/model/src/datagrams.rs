//! What `uwarp-driver`'s `ud` has around it: UDP sockets of a network that loses nothing but what has no
//! socket, and a device.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Weak};

use rustix::io::Errno;

use crate::source::Readiness;
use crate::sync::PerProcess;
use crate::sys;

/// Addresses and LIDs: no scenario has the InfiniBand view.
pub mod address {
    use std::net::{IpAddr, SocketAddr};

    pub fn lid_of(_: IpAddr) -> u16 {
        0
    }

    pub fn longest_datagram(_: IpAddr, _: SocketAddr) -> Option<usize> {
        None
    }
}

/// `uwarp_llp::udp`.
pub mod udp {
    use super::*;

    /// Few and small, so that a turn ends in the middle of what came.
    pub const BATCH: usize = 4;
    pub const RUN: usize = 6;
    pub const MOST_JOINED: usize = 4096;
    pub const SLOT: usize = 512;

    pub use llp::udp::{Marks, Route, refuses_to_cut};

    pub struct Outgoing<'a> {
        pub route: &'a Route,
        pub bytes: &'a [u8],
    }

    #[derive(Debug, Clone, Copy)]
    pub struct Incoming {
        pub len: usize,
        pub from: SocketAddr,
        pub to: IpAddr,
        pub interface: u32,
        pub truncated: bool,
    }

    #[derive(Debug, Clone, Copy)]
    pub struct Received {
        pub slots: usize,
        pub datagrams: usize,
    }

    /// What one sender has sent together, to the same address.
    pub struct Slot<'a> {
        bytes: &'a [Vec<u8>],
        incoming: Incoming,
    }

    impl<'a> Slot<'a> {
        pub fn incoming(&self) -> &Incoming {
            &self.incoming
        }

        pub fn datagrams(&self) -> Datagrams<'a> {
            Datagrams(self.bytes.iter())
        }

        pub fn each(&self) -> impl Iterator<Item = (&'a [u8], Incoming)> + use<'a> {
            let incoming = self.incoming;
            self.datagrams().map(move |bytes| (bytes, Incoming { len: bytes.len(), ..incoming }))
        }
    }

    #[derive(Clone)]
    pub struct Datagrams<'a>(std::slice::Iter<'a, Vec<u8>>);

    impl<'a> Datagrams<'a> {
        /// Nothing is reliable here.
        pub fn rest(&self) -> &'a [u8] {
            &[]
        }
    }

    impl<'a> Iterator for Datagrams<'a> {
        type Item = &'a [u8];

        fn next(&mut self) -> Option<&'a [u8]> {
            self.0.next().map(Vec::as_slice)
        }
    }

    pub struct Duplicate(sys::Socket);

    impl AsRawFd for Duplicate {
        fn as_raw_fd(&self) -> RawFd {
            self.0.fd()
        }
    }

    /// Who has which port. What a port has joined, it gets: no scenario has two interfaces.
    #[derive(Default)]
    struct Net(std::sync::Mutex<HashMap<u16, Weak<Shared>>>);

    static NET: PerProcess<Net> = PerProcess::new(Net::default);

    struct Shared(std::sync::Mutex<State>);

    struct State {
        descriptors: Vec<RawFd>,
        inbox: VecDeque<(Vec<u8>, Incoming)>,
        groups: Vec<IpAddr>,
        /// Datagrams that it takes to send, until there is more room.
        room: usize,
    }

    impl State {
        /// The arguments of [`sys::update`].
        fn and<T>(&self, result: T, news: bool) -> (T, Vec<RawFd>, Readiness, bool) {
            let now = Readiness {
                readable: !self.inbox.is_empty(),
                writable: self.room > 0,
                ..Readiness::default()
            };
            (result, self.descriptors.clone(), now, news)
        }
    }

    /// All changes of a socket are one step each: no thread is switched while its lock is held.
    pub struct Socket {
        port: u16,
        fd: sys::Socket,
        shared: Arc<Shared>,
    }

    impl Socket {
        pub fn bind_shared(port: u16) -> Result<Self, Errno> {
            let fd = sys::Socket::new();
            let state = State {
                descriptors: vec![fd.fd()],
                inbox: VecDeque::new(),
                groups: vec![],
                room: usize::MAX,
            };
            let shared = Arc::new(Shared(std::sync::Mutex::new(state)));
            NET.0.lock().unwrap().insert(port, Arc::downgrade(&shared));
            let socket = Self { port, fd, shared };
            socket.change(|state| state.and((), false));
            Ok(socket)
        }

        fn change<T>(&self, change: impl FnOnce(&mut State) -> (T, Vec<RawFd>, Readiness, bool)) -> T {
            sys::update(|| change(&mut self.shared.0.lock().unwrap()))
        }

        pub fn duplicate(&self) -> Result<Duplicate, Errno> {
            let duplicate = Duplicate(sys::Socket::new());
            self.change(|state| {
                state.descriptors.push(duplicate.as_raw_fd());
                state.and((), false)
            });
            Ok(duplicate)
        }

        pub fn fd(&self) -> RawFd {
            self.fd.fd()
        }

        pub fn make_room(&self) {}

        /// The system takes this number of datagrams, and no more.
        pub fn set_room(&self, room: usize) {
            self.change(|state| {
                state.room = room;
                state.and((), room > 0)
            });
        }

        pub fn join(&self, group: IpAddr, _: u32) -> Result<(), Errno> {
            self.change(|state| {
                state.groups.push(group);
                state.and(Ok(()), false)
            })
        }

        pub fn leave(&self, group: IpAddr, _: u32) -> Result<(), Errno> {
            self.change(|state| {
                state.groups.retain(|joined| *joined != group);
                state.and(Ok(()), false)
            })
        }

        pub fn cuts(&self, _: usize) -> bool {
            true
        }

        /// No scenario has parts.
        pub fn send_cut(
            &self,
            route: &Route,
            marks: Marks,
            bytes: &[u8],
            len: usize,
        ) -> Result<usize, Errno> {
            self.send_run(route, marks, bytes, len)
        }

        pub fn send_apart(
            &self,
            route: &Route,
            marks: Marks,
            bytes: &[u8],
            len: usize,
        ) -> Result<usize, Errno> {
            self.send_run(route, marks, bytes, len)
        }

        pub fn send(&self, batch: &[Outgoing<'_>]) -> Result<usize, Errno> {
            self.send_marked(batch, &[])
        }

        pub fn send_run(&self, route: &Route, _: Marks, bytes: &[u8], length: usize) -> Result<usize, Errno> {
            self.send_joined(route, bytes, length)
        }

        pub fn send_joined(&self, route: &Route, bytes: &[u8], length: usize) -> Result<usize, Errno> {
            let batch: Vec<_> = bytes.chunks(length).map(|bytes| Outgoing { route, bytes }).collect();
            self.send(&batch)
        }

        /// Nobody looks at the marks.
        pub fn send_marked(&self, batch: &[Outgoing<'_>], _: &[Marks]) -> Result<usize, Errno> {
            for (n, outgoing) in batch.iter().enumerate() {
                let taken = self.change(|state| {
                    let taken = state.room > 0;
                    state.room -= usize::from(taken);
                    state.and(taken, false)
                });
                if !taken {
                    return if n > 0 { Ok(n) } else { Err(Errno::AGAIN) };
                }
                self.deliver(outgoing);
            }
            Ok(batch.len())
        }

        fn deliver(&self, outgoing: &Outgoing<'_>) {
            let to = outgoing.route.to;
            let from = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
            let incoming =
                Incoming { len: outgoing.bytes.len(), from, to: to.ip(), interface: 1, truncated: false };
            let receiver = NET.0.lock().unwrap().get(&to.port()).and_then(Weak::upgrade);
            let Some(receiver) = receiver else { return };
            sys::update(|| {
                let mut state = receiver.0.lock().unwrap();
                let wanted = !to.ip().is_multicast() || state.groups.contains(&to.ip());
                if wanted {
                    state.inbox.push_back((outgoing.bytes.to_vec(), incoming));
                }
                state.and((), wanted)
            });
        }

        /// Those of one sender to one address that lie one behind the other come in one slot.
        pub fn receive_slots(
            &self,
            _: &mut [u8],
            _: usize,
            most: usize,
            mut each: impl FnMut(Slot<'_>),
        ) -> Result<Received, Errno> {
            let taken: Vec<(Vec<u8>, Incoming)> = self.change(|state| {
                let n = state.inbox.len().min(most).min(BATCH);
                let taken = state.inbox.drain(..n).collect();
                state.and(taken, false)
            });
            if taken.is_empty() {
                return Err(Errno::AGAIN);
            }
            for together in taken.chunk_by(|(_, one), (_, next)| (one.from, one.to) == (next.from, next.to)) {
                let bytes: Vec<_> = together.iter().map(|(bytes, _)| bytes.clone()).collect();
                together.first().map(|(_, incoming)| each(Slot { bytes: &bytes, incoming: *incoming }));
            }
            Ok(Received { slots: taken.len(), datagrams: taken.len() })
        }
    }
}

/// `uwarp_driver::rings`: all datagrams go by UDP.
pub mod rings {
    use super::*;
    use crate::udp::Incoming;
    use uwarp_rnic::ah::Endpoint;
    use uwarp_wire::datagram::memory::Memory;

    #[derive(Default)]
    pub struct Rings;
    #[derive(Default)]
    pub struct Inboxes;
    #[derive(Default)]
    pub struct Last;
    pub enum Way {}
    pub enum Carried {}

    impl Last {
        pub fn is_ring_to(&self, _: SocketAddr, _: Option<IpAddr>) -> bool {
            false
        }
    }

    impl Rings {
        pub fn is_on(&self) -> bool {
            false
        }

        pub fn any(&self) -> bool {
            false
        }

        pub fn concerns(&self, _: SocketAddr, _: Option<IpAddr>) -> bool {
            false
        }

        pub fn way<'a>(&self, _: SocketAddr, _: Option<IpAddr>, _: &'a mut Last) -> Option<&'a Way> {
            None
        }

        pub fn carried(&self) -> Vec<Carried> {
            Vec::new()
        }

        pub fn use_room(&self) {}

        pub fn hear(&self, _: Memory, _: &Incoming) -> bool {
            false
        }

        pub fn read(&self, _: &mut Inboxes, _: impl FnMut(&[u8], &Incoming), _: impl Fn(u64)) -> usize {
            0
        }
    }

    impl Way {
        pub fn send<'a>(
            &self,
            _: &Weak<crate::ud::UdQp>,
            _: &Endpoint,
            _: impl Iterator<Item = (&'a Endpoint, &'a [u8])>,
            _: impl FnOnce(usize) -> Result<usize, Errno>,
        ) -> Result<Option<usize>, Errno> {
            match *self {}
        }
    }
}

/// `uwarp_driver::pair`.
pub mod pair {
    use std::sync::Arc;

    pub enum QueuePair {
        Ud(Arc<crate::ud::UdQp>),
    }
}

/// `uwarp_driver::nic`, reduced to one port of numbers.
pub mod nic {
    use super::*;
    use crate::config::Config;
    use crate::engine::Engine;
    use crate::pair::QueuePair;
    use crate::sync::Mutex;
    use crate::ud::{DatagramPort, UnclaimedCounters};
    use uwarp_rnic::VerbsError;
    use uwarp_rnic::qp::{Counters, Drops, QpCaps, QpInit};

    pub struct Limits;

    impl Limits {
        pub fn admit(&self, init: &QpInit) -> Result<QpCaps, VerbsError> {
            Ok(init.caps)
        }
    }

    /// Numbers are used again as soon as they are free.
    pub struct Numbers(Mutex<Vec<u32>, 17>);

    impl Numbers {
        pub fn take(&self) -> Result<u32, VerbsError> {
            self.0.lock().pop().ok_or(VerbsError::NoResources("numbers"))
        }

        pub fn give(&self, qpn: u32) {
            if !sys::over() {
                self.0.lock().push(qpn);
            }
        }
    }

    pub struct Nic {
        engine: Arc<Engine>,
        pub numbers: Numbers,
        /// Lives on for the next queue pair.
        pub socket: Arc<udp::Socket>,
        port: u16,
        known: Mutex<Weak<DatagramPort>, 15>,
        group_port: Mutex<Weak<DatagramPort>, 15>,
        unclaimed: Arc<UnclaimedCounters>,
    }

    impl Nic {
        pub fn new(engine: &Arc<Engine>, port: u16) -> Arc<Self> {
            let first = u32::from(port) << 8;
            Arc::new(Self {
                engine: engine.clone(),
                numbers: Numbers(Mutex::new((first..first + 3).rev().collect())),
                socket: Arc::new(udp::Socket::bind_shared(port).unwrap()),
                port,
                known: Mutex::default(),
                group_port: Mutex::default(),
                unclaimed: Arc::default(),
            })
        }

        pub fn engine(&self) -> &Engine {
            &self.engine
        }

        pub fn limits(&self) -> Limits {
            Limits
        }

        /// As the real one.
        pub fn datagram_port(&self, _: u32) -> Result<Arc<DatagramPort>, VerbsError> {
            let mut port = self.known.lock();
            if let Some(known) = port.upgrade() {
                return Ok(known);
            }
            let socket = self.socket.clone();
            let new =
                DatagramPort::of_numbers(&self.engine, socket, self.port, &self.unclaimed, None).unwrap();
            *port = Arc::downgrade(&new);
            Ok(new)
        }

        /// As the real one.
        pub fn group_port(&self) -> Result<Arc<DatagramPort>, VerbsError> {
            let mut known = self.group_port.lock();
            if let Some(port) = known.upgrade() {
                return Ok(port);
            }
            let socket = Arc::new(udp::Socket::bind_shared(Config::get().multicast_port).unwrap());
            let port = DatagramPort::of_groups(&self.engine, socket, &self.unclaimed).unwrap();
            *known = Arc::downgrade(&port);
            Ok(port)
        }

        pub fn arrive(&self, _: &QueuePair) {}

        pub fn depart(&self, _: u32, _: Counters, _: Drops) {}
    }
}

/// No queue pair of reliable datagrams is made here.
pub mod rd {
    use std::sync::Arc;

    use uwarp_rnic::VerbsError;

    use crate::engine::Engine;
    use crate::ud::DatagramPort;
    use crate::udp::Incoming;

    pub(crate) struct Exchanges;
    pub(crate) struct Taking;

    impl Exchanges {
        pub fn new(_: &Arc<DatagramPort>, _: u16) -> Result<Arc<Self>, VerbsError> {
            Ok(Arc::new(Self))
        }

        pub fn take(&self, _: &Engine) -> Taking {
            Taking
        }

        pub fn after_input(&self, _: bool) -> usize {
            0
        }

        pub fn found_empty(&self, _: &Engine) {}

        pub fn poll(&self, _: &Engine) -> usize {
            0
        }

        pub fn exit(&self) {}
    }

    impl Taking {
        pub fn finish(self, _: bool) -> usize {
            0
        }

        pub fn input(&mut self, _: &[u8], _: &Incoming) {}
    }
}
