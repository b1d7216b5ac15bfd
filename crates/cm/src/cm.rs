//! What ids have in common.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use uwarp_driver::config::Config;
use uwarp_driver::{Engine, Nic};
use uwarp_llp::carrier;
use uwarp_proto::setup::ResponderPolicy;

use crate::awaiting::{Adopter, Awaiting};
use crate::event::MAX_DEPTH;
use crate::machine::budget::Budget;
use crate::machine::life::{Awaits, Rules};
use crate::numbers::{Numbers, descriptors};
use crate::params::{passes_for_infiniband, revision};
use crate::ports::Ports;
use crate::timeouts::Timeouts;

/// What ids have in common: the device, its settings, and time limits.
pub struct Cm {
    nic: Arc<Nic>,
    next_key: AtomicU64,
    awaiting: Awaiting,
    ports: Arc<Ports>,
    numbers: Numbers,
    /// Of what strangers hold, in all listeners and pairings.
    budget: Budget,
    rules: Arc<Rules>,
}

impl Cm {
    /// A connection manager over a device.
    pub fn new(nic: &Arc<Nic>, timeouts: Timeouts) -> Arc<Self> {
        let budget = Budget::new(Budget::of_descriptors(descriptors()));
        let policy = responder_policy(nic);
        Arc::new(Self {
            rules: Arc::new(Rules { timeouts, infiniband: passes_for_infiniband(), policy }),
            numbers: Numbers::new(nic, timeouts, policy, budget.clone()),
            budget,
            nic: Arc::clone(nic),
            next_key: AtomicU64::new(1),
            awaiting: Awaiting::default(),
            ports: Arc::default(),
        })
    }

    /// The device.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    /// The connection that waits for this queue pair, which the program moves itself. `destination`: the
    /// peer's queue pair, if the program names it.
    pub fn adopter(&self, qpn: u32, destination: Option<u32>) -> Option<Arc<dyn Adopter>> {
        self.awaiting.adopter(qpn, destination)
    }

    /// Whether there is a request that may be meant for a queue pair which the program moves itself.
    /// `destination` and `peer`: the peer's queue pair and address, if the program names them.
    pub fn expects(&self, destination: Option<u32>, peer: Option<IpAddr>) -> bool {
        self.awaiting.expects(destination, peer)
    }

    /// What the id with this key waits for now. `from`: its peer's address.
    pub(crate) fn set_awaiting(
        &self,
        key: u64,
        adopter: Weak<dyn Adopter>,
        awaits: Option<Awaits>,
        from: Option<IpAddr>,
    ) {
        match awaits {
            None => self.awaiting.remove(key),
            Some(Awaits { ours: Some(ours), peer }) => self.awaiting.insert(key, adopter, ours, peer),
            Some(Awaits { ours: None, peer }) => self.awaiting.insert_request(key, adopter, peer, from),
        }
    }

    /// The ports that ids have.
    pub(crate) fn ports(&self) -> &Arc<Ports> {
        &self.ports
    }

    /// The program takes the request whose id has this key.
    pub(crate) fn give(&self, key: u64) {
        self.awaiting.give(key);
    }

    /// A key for an id.
    pub(crate) fn next_key(&self) -> u64 {
        self.next_key.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        self.nic.engine()
    }

    /// What ids are told of the configuration and the device.
    pub(crate) fn rules(&self) -> Arc<Rules> {
        Arc::clone(&self.rules)
    }

    /// The process's budget. The program may have raised the limit of its descriptors.
    pub(crate) fn budget(&self) -> Budget {
        self.budget.set_limit(Budget::of_descriptors(descriptors()));
        self.budget.clone()
    }

    /// Streams of queue pairs that know each other by number and address.
    pub(crate) fn numbers(&self) -> &Numbers {
        &self.numbers
    }

    pub(crate) fn responder_policy(&self) -> ResponderPolicy {
        responder_policy(&self.nic)
    }

    /// Greatest read depth of a queue pair, in either direction.
    pub(crate) fn max_depth(&self) -> u16 {
        max_depth(&self.nic)
    }
}

fn responder_policy(nic: &Nic) -> ResponderPolicy {
    let config = Config::get();
    ResponderPolicy {
        max_revision: revision(config),
        crc: config.crc,
        markers: config.markers,
        know_peers: config.find_uwarp_peers,
        max_ird: max_depth(nic),
        host: nic.host_key(),
    }
}

fn max_depth(nic: &Nic) -> u16 {
    // The device's limit fits into the octet that rdma_cm has for it.
    u16::try_from(nic.limits().max_qp_rd_atom).unwrap_or(u16::MAX).min(u16::from(MAX_DEPTH) - 1)
}

/// Options of an id, to be set before it is bound or connects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Options {
    /// Type of service (IPv4) or traffic class (IPv6) of the connection.
    pub tos: Option<u8>,
    /// Other ids may bind the same address if they have this option, too.
    pub reuseaddr: bool,
    /// An IPv6 wildcard does not take IPv4 connections. `None`: as the system is set.
    pub afonly: Option<bool>,
    /// The queue pair's time limit as queries show it, [`ACK_TIMEOUT`] if `None`. It has no other effect: TCP
    /// measures the path and retransmits accordingly. A limit that a program chooses for the microseconds of
    /// a fabric would end connections without need.
    ///
    /// [`ACK_TIMEOUT`]: crate::timeouts::ACK_TIMEOUT
    pub ack_timeout: Option<u8>,
}

impl Options {
    /// Those that concern sockets.
    pub(crate) fn of_sockets(&self) -> carrier::Options {
        carrier::Options { tos: self.tos, reuseaddr: self.reuseaddr, afonly: self.afonly }
    }
}
