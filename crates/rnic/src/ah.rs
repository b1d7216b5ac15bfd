//! Address handles: where a datagram goes.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use uwarp_wire::datagram::QPN_MULTICAST;
pub use uwarp_wire::grh;

use crate::pd::Pd;

/// The lower layer's address of a receiver, and the address of this host that datagrams to it come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// Address and port.
    pub to: SocketAddr,
    /// None: the system chooses.
    pub from: Option<IpAddr>,
    /// Traffic class and hop limit of the IP header; 0: the system's.
    pub marks: (u8, u8),
}

/// An address handle.
#[derive(Debug)]
pub struct Ah {
    /// No other of this process ever has the same.
    number: u64,
    pd: Arc<Pd>,
    to: SocketAddr,
    from: Option<IpAddr>,
    group: bool,
    marks: (u8, u8),
}

impl Ah {
    /// A handle for the host at `to`. The port of `to` is ignored: each queue pair number has its own port.
    /// `from`: an address of this host.
    pub fn new(pd: &Arc<Pd>, to: SocketAddr, from: Option<IpAddr>) -> Arc<Self> {
        Arc::new(Self { number: next_number(), pd: pd.clone(), to, from, group: false, marks: (0, 0) })
    }

    /// A handle for a multicast group or a broadcast address, on the port that all its members listen on.
    pub fn group(pd: &Arc<Pd>, to: SocketAddr, from: Option<IpAddr>) -> Arc<Self> {
        Arc::new(Self { number: next_number(), pd: pd.clone(), to, from, group: true, marks: (0, 0) })
    }

    /// The same, with this traffic class and hop limit in the IP header; 0: the system's.
    pub fn marked(self: Arc<Self>, traffic_class: u8, hop_limit: u8) -> Arc<Self> {
        let Self { pd, to, from, group, .. } = &*self;
        let (number, pd, marks) = (next_number(), pd.clone(), (traffic_class, hop_limit));
        Arc::new(Self { number, pd, to: *to, from: *from, group: *group, marks })
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Names the handle in this process, also after its end: what has gone to the same number and the same
    /// port has gone to the same [`Endpoint`].
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Whether it names a group.
    pub fn is_group(&self) -> bool {
        self.group
    }

    /// Where a datagram to queue pair `qpn` goes.
    #[inline]
    pub fn endpoint(&self, qpn: u32) -> Endpoint {
        let mut to = self.to;
        if !self.group {
            to.set_port(port_of(qpn));
        }
        Endpoint { to, from: self.from, marks: self.marks }
    }
}

fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The port of a queue pair number.
#[inline]
pub fn port_of(qpn: u32) -> u16 {
    u16::try_from(qpn >> 8 & 0xFFFF).unwrap_or(0)
}
