//! A shared receive queue, and the queue pairs that wait for it.

use std::sync::Arc;

use uwarp_rnic::{RecvWr, SrqAttr, SrqInit, VerbsError};

use crate::fork::Birth;
use crate::nic::Nic;

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    birth: Birth,
    core: Arc<uwarp_rnic::Srq>,
    max_wr: u32,
}

impl Srq {
    /// Makes a shared receive queue. Fails when a limit of the device is exceeded.
    pub fn create(nic: &Nic, init: SrqInit) -> Result<Self, VerbsError> {
        if nic.engine().birth.is_parents() {
            return Err(VerbsError::Forked);
        }
        let limits = nic.limits();
        if init.max_wr == 0 || init.max_wr > limits.max_srq_wr {
            return Err(VerbsError::Invalid("no work requests, or more than max_srq_wr"));
        }
        if init.max_sge > limits.max_srq_sge {
            return Err(VerbsError::Invalid("more scatter/gather elements than max_srq_sge"));
        }
        Ok(Self { birth: Birth::here(), core: uwarp_rnic::Srq::new(init), max_wr: limits.max_srq_wr })
    }

    /// The shared receive queue that queue pairs are created with.
    pub fn core(&self) -> &Arc<uwarp_rnic::Srq> {
        &self.core
    }

    /// Posts receives, and continues queue pairs that wait for them, in the calling thread. If one is
    /// refused, returns its index (the ones before it are posted) and the reason. Never blocks.
    pub fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.birth.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let (result, woken) = self.core.post_recv(wrs);
        woken.wake();
        result
    }

    /// Changes size or limit, both or none; see [`uwarp_rnic::Srq::modify`].
    pub fn modify(&self, max_wr: Option<u32>, limit: Option<u32>) -> Result<(), VerbsError> {
        if self.birth.is_parents() {
            return Err(VerbsError::Forked);
        }
        if max_wr.is_some_and(|n| n > self.max_wr) {
            return Err(VerbsError::Invalid("more work requests than max_srq_wr"));
        }
        self.core.modify(max_wr, limit)
    }

    /// Its attributes.
    pub fn query(&self) -> SrqAttr {
        self.core.query()
    }
}
