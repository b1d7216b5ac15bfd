//! A queue pair of any service.

use std::sync::{Arc, Weak};

use uwarp_rnic::qp::QpAttr;

use crate::qp::Qp;
use crate::rd::{RdQp, UcQp};
use crate::ud::UdQp;

/// A queue pair, by its service.
#[derive(Clone)]
pub enum QueuePair {
    /// Reliable connection: a stream over TCP.
    Rc(Arc<Qp>),
    /// Unreliable datagrams over UDP.
    Ud(Arc<UdQp>),
    /// Reliable datagrams over UDP.
    Rd(Arc<RdQp>),
    /// Unreliable connection, over UDP.
    Uc(Arc<UcQp>),
}

impl QueuePair {
    /// Its number.
    pub fn qpn(&self) -> u32 {
        match self {
            Self::Rc(qp) => qp.qpn(),
            Self::Ud(qp) => qp.qpn(),
            Self::Rd(qp) => qp.qpn(),
            Self::Uc(qp) => qp.qpn(),
        }
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        match self {
            Self::Rc(qp) => qp.query(),
            Self::Ud(qp) => qp.query(),
            Self::Rd(qp) => qp.query(),
            Self::Uc(qp) => qp.query(),
        }
    }

    /// Destroys it; see [`Qp::destroy`], [`UdQp::destroy`], [`RdQp::destroy`] and [`UcQp::destroy`].
    pub fn destroy(&self) {
        match self {
            Self::Rc(qp) => qp.destroy(),
            Self::Ud(qp) => qp.destroy(),
            Self::Rd(qp) => qp.destroy(),
            Self::Uc(qp) => qp.destroy(),
        }
    }

    pub(crate) fn downgrade(&self) -> WeakQueuePair {
        match self {
            Self::Rc(qp) => WeakQueuePair::Rc(Arc::downgrade(qp)),
            Self::Ud(qp) => WeakQueuePair::Ud(Arc::downgrade(qp)),
            Self::Rd(qp) => WeakQueuePair::Rd(Arc::downgrade(qp)),
            Self::Uc(qp) => WeakQueuePair::Uc(Arc::downgrade(qp)),
        }
    }
}

/// What the registry of numbers holds.
#[derive(Clone)]
pub(crate) enum WeakQueuePair {
    Rc(Weak<Qp>),
    Ud(Weak<UdQp>),
    Rd(Weak<RdQp>),
    Uc(Weak<UcQp>),
}

impl WeakQueuePair {
    pub fn upgrade(&self) -> Option<QueuePair> {
        match self {
            Self::Rc(qp) => qp.upgrade().map(QueuePair::Rc),
            Self::Ud(qp) => qp.upgrade().map(QueuePair::Ud),
            Self::Rd(qp) => qp.upgrade().map(QueuePair::Rd),
            Self::Uc(qp) => qp.upgrade().map(QueuePair::Uc),
        }
    }
}
