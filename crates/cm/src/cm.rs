//! What ids have in common.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uwarp_driver::config::Config;
use uwarp_driver::{Engine, Nic};
use uwarp_proto::setup::{ResponderPolicy, Revision};

use crate::event::MAX_DEPTH;
use crate::timeouts::Timeouts;

/// What ids have in common: the device, its settings, and time limits.
pub struct Cm {
    nic: Arc<Nic>,
    timeouts: Timeouts,
    next_key: AtomicU64,
}

impl Cm {
    /// A connection manager over a device.
    pub fn new(nic: &Arc<Nic>, timeouts: Timeouts) -> Arc<Self> {
        Arc::new(Self { nic: Arc::clone(nic), timeouts, next_key: AtomicU64::new(1) })
    }

    /// The device.
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
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
    /// Stored; TCP measures its own.
    pub ack_timeout: Option<u8>,
}
