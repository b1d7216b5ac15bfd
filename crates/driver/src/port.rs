//! The port of the device: which addresses and which interface it shows, and the events when they change.
//!
//! The kernel sends a notice over netlink when an interface, an address or the default route changes. The
//! notice only says when to look: what is seen then is compared with what was seen before. So a lost notice,
//! or one that changes nothing, does no harm.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};
use uwarp_process::{Mutex, PerProcess};
use uwarp_rnic::{AsyncEvent, AsyncSink, EventKind};

use crate::address::{self, Address};
use crate::config::{Config, View};
use crate::engine::Engine;
use crate::netdev::{self, Netdev};
use crate::source::{Readiness, Source};

/// The number of the device's only port.
pub const PORT: u8 = 1;

/// A device's port: all interfaces of this host, or one.
#[derive(Debug)]
pub struct Port {
    /// The name of the only interface that it stands for; `None`: it stands for all.
    only: Option<String>,
    last: address::Last,
    /// The interface it was last seen on, if that was not the loopback interface; 0: none. When that goes
    /// down, the port is down, although the loopback interface is still there.
    interface: AtomicU32,
    mtu: PerProcess<Mutex<Option<(Instant, u32)>, 28>>,
}

/// What a port looks like at a moment.
#[derive(Debug, Clone, Default)]
pub struct PortState {
    /// Its addresses, as [`Port::addresses`] has them.
    pub addresses: Arc<[Address]>,
    /// The interface of the first address or, when all addresses are gone, the one it had.
    pub netdev: Netdev,
}

impl Port {
    /// The port of one interface, by its name, or of all.
    pub(crate) fn new(only: Option<String>) -> Self {
        Self {
            only,
            last: address::Last::new(),
            interface: AtomicU32::new(0),
            mtu: PerProcess::new(Mutex::default),
        }
    }

    /// The name of its interface, if it stands for one only.
    pub fn interface(&self) -> Option<&str> {
        self.only.as_deref()
    }

    /// Its addresses, in the order of the GID table, which may have places without one
    /// ([`Address::is_none`]).
    pub fn addresses(&self) -> Arc<[Address]> {
        self.last.keep_in_place(self.only.as_deref().map_or_else(address::list, address::list_of))
    }

    /// The same, at most a tenth of a second old and never older than what [`Self::addresses`] has shown.
    /// Programs move queue pairs to RTR by the thousand, and asking the system takes longer than all the rest
    /// of that.
    pub fn recent_addresses(&self) -> Arc<[Address]> {
        self.last.recent(Instant::now()).unwrap_or_else(|| self.addresses())
    }

    /// What it looks like now.
    pub fn state(&self) -> PortState {
        let addresses = self.addresses();
        let mut interfaces = netdev::list().into_iter();
        if let Some(only) = &self.only {
            let netdev = interfaces.find(|dev| dev.name == *only).unwrap_or_default();
            return PortState { addresses, netdev };
        }
        let first = first_of(&addresses).filter(|first| !first.loopback);
        let index = match first {
            Some(first) => {
                self.interface.store(first.index, Ordering::Relaxed);
                first.index
            }
            None => match self.interface.load(Ordering::Relaxed) {
                0 => first_of(&addresses).map_or(0, |first| first.index),
                last => last,
            },
        };
        let netdev = interfaces.find(|dev| dev.index == index).unwrap_or_default();
        PortState { addresses, netdev }
    }

    /// MTU of its interface in bytes, 0 when unknown; at most a tenth of a second old. Programs resolve
    /// routes and make queue pairs by the thousand, and a query of the system takes longer than all the rest
    /// of that.
    pub fn mtu(&self) -> u32 {
        const FRESH: Duration = Duration::from_millis(100);
        let mut last = self.mtu.lock();
        match *last {
            Some((at, mtu)) if at.elapsed() < FRESH => mtu,
            _ => {
                let mtu = self.state().netdev.mtu;
                *last = Some((Instant::now(), mtu));
                mtu
            }
        }
    }
}

/// The address that stands for the port: the first one of the table.
fn first_of(addresses: &[Address]) -> Option<&Address> {
    addresses.iter().find(|address| !address.is_none())
}

impl PortState {
    /// The LID of the port, in the view that has LIDs; 0: it has none.
    pub fn lid(&self) -> u16 {
        address::of_lid(&self.addresses).map_or(0, |own| address::lid_of(own.ip))
    }

    /// The events that tell of the change from `before`; `has_lids`: in the view that has LIDs.
    fn events_since(&self, before: &Self, has_lids: bool) -> Vec<EventKind> {
        let mut events = Vec::new();
        match (before.netdev.up, self.netdev.up) {
            (true, false) => events.push(EventKind::PortErr),
            (false, true) => events.push(EventKind::PortActive),
            _ => {}
        }
        if !self.addresses.iter().map(|a| a.ip).eq(before.addresses.iter().map(|a| a.ip)) {
            events.push(EventKind::GidChange);
        }
        if has_lids && self.lid() != before.lid() {
            events.push(EventKind::LidChange);
        }
        events
    }
}

/// Something that wants to know of a port's changes, and what it knows.
struct Observer {
    port: &'static Port,
    seen: PortState,
    sink: Weak<dyn AsyncSink>,
}

/// The kernel's notices.
pub(crate) struct PortWatch {
    socket: OwnedFd,
    observers: Mutex<Vec<Observer>, 23>,
}

/// `RTMGRP_LINK`, `RTMGRP_IPV4_IFADDR`, `RTMGRP_IPV4_ROUTE`, `RTMGRP_IPV6_IFADDR`, `RTMGRP_IPV6_ROUTE`.
const GROUPS: u32 = 0x1 | 0x10 | 0x40 | 0x100 | 0x400;
/// `RTM_NEWROUTE` and `RTM_DELROUTE`.
const ROUTES: [u16; 2] = [24, 25];
/// Length of `struct nlmsghdr`; in a route's message, family and length of the destination's prefix follow.
const HEADER: usize = 16;

impl PortWatch {
    /// Opens the socket and has the engine watch it.
    pub fn start(engine: &Engine) -> io::Result<Arc<Self>> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        // Protocol 0 is NETLINK_ROUTE.
        let socket = rustix::net::socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, None)?;
        rustix::net::bind(&socket, &SocketAddrNetlink::new(0, GROUPS))?;
        let watch = Arc::new(Self { socket, observers: Mutex::default() });
        // The engine keeps it, and its descriptor, as long as the process lives.
        engine.register(watch.socket.as_raw_fd(), watch.clone())?;
        Ok(watch)
    }

    /// Adds an observer, which knows the present state.
    pub fn add(&self, port: &'static Port, sink: Weak<dyn AsyncSink>) {
        let mut observers = self.observers.lock();
        observers.retain(|observer| observer.sink.strong_count() > 0);
        observers.push(Observer { port, seen: port.state(), sink });
    }

    /// Takes all notices; says whether one of them may concern a port.
    fn drain(&self) -> bool {
        let mut relevant = false;
        let mut buffer = [0; 8192];
        loop {
            match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::empty()) {
                Ok((length, _)) => relevant |= concerns(buffer.get(..length).unwrap_or(&[])),
                Err(Errno::INTR) => {}
                // Some were lost: there may have been one that matters.
                Err(Errno::NOBUFS) => relevant = true,
                Err(_) => return relevant,
            }
        }
    }
}

/// Whether one of these netlink messages is about more than a non-default route. Routes may change a thousand
/// times a second, and only the default route decides which address comes first.
fn concerns(mut messages: &[u8]) -> bool {
    while let Some((header, _)) = messages.split_first_chunk::<HEADER>() {
        let [l0, l1, l2, l3, t0, t1, ..] = *header;
        let length = u32::from_ne_bytes([l0, l1, l2, l3]) as usize;
        let default_route = messages.get(HEADER + 1) == Some(&0);
        if !ROUTES.contains(&u16::from_ne_bytes([t0, t1])) || default_route {
            return true;
        }
        // The next one begins at a multiple of four.
        let next = length.max(HEADER).next_multiple_of(4);
        messages = messages.get(next..).unwrap_or(&[]);
    }
    false
}

impl Source for PortWatch {
    fn ready(&self, _readiness: Readiness) {
        if !self.drain() {
            return;
        }
        let has_lids = Config::get().view == View::Ib;
        // Locked until the events are queued: of two threads that look, the later one must not be overtaken.
        let mut observers = self.observers.lock();
        observers.retain_mut(|observer| {
            let Some(sink) = observer.sink.upgrade() else { return false };
            let state = observer.port.state();
            for kind in state.events_since(&observer.seen, has_lids) {
                sink.async_event(AsyncEvent { kind, cookie: PORT.into() });
            }
            observer.seen = state;
            true
        });
    }

    fn timeout(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(up: bool, ips: &[&str]) -> PortState {
        let address = |ip: &&str| Address {
            ip: ip.parse().unwrap(),
            interface: "eth0".into(),
            index: 2,
            loopback: false,
            link_local: false,
            broadcast: None,
        };
        PortState { addresses: ips.iter().map(address).collect(), netdev: Netdev { up, ..Netdev::default() } }
    }

    #[test]
    fn events_tell_of_the_difference_and_of_nothing_else() {
        use EventKind::{GidChange, LidChange, PortActive, PortErr};
        let (up, down) = (state(true, &["192.0.2.1"]), state(false, &["127.0.0.1"]));
        assert_eq!(down.events_since(&up, false), [PortErr, GidChange]);
        assert_eq!(up.events_since(&down, false), [PortActive, GidChange]);
        assert_eq!(up.events_since(&up, true), []);
        let more = state(true, &["192.0.2.1", "::1"]);
        assert_eq!(more.events_since(&up, true), [GidChange], "GID 0 is the same, and with it the LID");
        // The low half of GID 0 is the LID.
        assert_eq!(down.events_since(&up, true), [PortErr, GidChange, LidChange]);
        let elsewhere = state(true, &["198.51.2.1"]);
        assert_eq!(elsewhere.events_since(&up, true), [GidChange], "another network, the same LID");
    }

    #[test]
    fn of_routes_only_the_default_route_counts() {
        let message = |kind: u16, prefix: u8| {
            let mut bytes = vec![0; 28];
            bytes[..4].copy_from_slice(&28u32.to_ne_bytes());
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes[17] = prefix;
            bytes
        };
        assert!(!concerns(&message(24, 24)));
        assert!(concerns(&message(24, 0)));
        assert!(concerns(&message(16, 24)));
        assert!(concerns(&[message(25, 24), message(20, 24)].concat()));
        assert!(!concerns(&[message(25, 24), message(24, 64)].concat()));
        // Whatever the kernel sends, it is taken without a panic.
        assert!(!concerns(&[0; 15]));
        assert!(concerns(&[0; 40]));
    }
}
