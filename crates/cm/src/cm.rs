//! What ids have in common.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use uwarp_driver::config::Config;
use uwarp_driver::{Engine, Nic};
use uwarp_proto::setup::{ResponderPolicy, Revision};

use crate::Id;
use crate::event::MAX_DEPTH;
use crate::ports::Ports;
use crate::timeouts::Timeouts;

/// What ids have in common: the device, its settings, and time limits.
pub struct Cm {
    nic: Arc<Nic>,
    timeouts: Timeouts,
    next_key: AtomicU64,
    /// Ids that a queue pair of the program's own is to come to, by key: requests that wait for an answer, and connections
    /// that wait for their queue pair.
    awaiting: Mutex<HashMap<u64, Awaiting>>,
    ports: Arc<Ports>,
}

/// See [`Cm::adopter`] and [`Cm::expects`].
struct Awaiting {
    id: Weak<Id>,
    /// Our queue pair, where it is known already.
    ours: Option<u32>,
    /// The peer's; 0 where it does not say.
    peer: u32,
}

impl Awaiting {
    /// Whether a queue pair that is told this destination can be meant.
    fn is_meant(&self, destination: Option<u32>) -> bool {
        self.peer == 0 || destination.is_none_or(|destination| destination == self.peer)
    }
}

impl Cm {
    /// A connection manager over a device.
    pub fn new(nic: &Arc<Nic>, timeouts: Timeouts) -> Arc<Self> {
        Arc::new(Self {
            nic: Arc::clone(nic),
            timeouts,
            next_key: AtomicU64::new(1),
            awaiting: Mutex::default(),
            ports: Arc::default(),
        })
    }

    /// The device.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    /// The id with a connection for this queue pair, which the program sees to itself. `destination`: the peer's queue pair,
    /// if the program names it. The id is to be asked to [`Id::adopt`].
    pub fn adopter(&self, qpn: u32, destination: Option<u32>) -> Option<Arc<Id>> {
        let awaiting = self.awaiting.lock();
        let found = awaiting.values().find(|a| a.ours == Some(qpn) && a.is_meant(destination))?;
        found.id.upgrade()
    }

    /// Whether there is a request that a queue pair of the program's own may be meant for.
    pub fn expects(&self, destination: Option<u32>) -> bool {
        self.awaiting.lock().values().any(|a| a.ours.is_none() && a.is_meant(destination))
    }

    pub(crate) fn await_queue_pair(&self, id: &Arc<Id>, ours: Option<u32>, peer: u32) {
        self.awaiting.lock().insert(id.key(), Awaiting { id: Arc::downgrade(id), ours, peer });
    }

    pub(crate) fn no_longer_awaits(&self, key: u64) {
        self.awaiting.lock().remove(&key);
    }

    /// The ports that ids have.
    pub(crate) fn ports(&self) -> &Arc<Ports> {
        &self.ports
    }

    /// A key for an id.
    pub(crate) fn next_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.nic.engine()
    }

    pub(crate) fn timeouts(&self) -> &Timeouts {
        &self.timeouts
    }

    pub(crate) fn responder_policy(&self) -> ResponderPolicy {
        let config = Config::get();
        ResponderPolicy {
            max_revision: revision(config),
            crc: config.crc,
            markers: config.markers,
            know_peers: config.find_uwarp_peers,
            max_ird: self.max_depth(),
        }
    }

    /// Greatest read depth of a queue pair, in either direction.
    pub(crate) fn max_depth(&self) -> u16 {
        // The device's limit fits into the octet that rdma_cm has for it.
        u16::try_from(self.nic.limits().max_qp_rd_atom).unwrap_or(u16::MAX).min(u16::from(MAX_DEPTH) - 1)
    }
}

/// The revision that this end speaks, or asks for.
pub(crate) fn revision(config: &Config) -> Revision {
    if config.mpa_revision == 1 { Revision::One } else { Revision::Two }
}

/// Options of an id, to be set before it is bound or connects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Type of service (IPv4) or traffic class (IPv6) of the connection.
    pub tos: Option<u8>,
    /// Others may bind the same address, if they say so too.
    pub reuseaddr: bool,
    /// An IPv6 wildcard does not take IPv4 connections. `None`: as the system is set.
    pub afonly: Option<bool>,
    /// The queue pair's time limit as queries show it, [`ACK_TIMEOUT`] if `None`. It moves nothing: TCP measures the path and
    /// retransmits by that, and what a program sets for the microseconds of a fabric would end connections for nothing.
    ///
    /// [`ACK_TIMEOUT`]: crate::timeouts::ACK_TIMEOUT
    pub ack_timeout: Option<u8>,
}
