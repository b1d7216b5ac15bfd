//! What every queue pair has beside its core, whatever its service: a number, and its places at the device
//! and at the completion queues (`crates/rnic/src/qp/shell.rs`).

use std::sync::{Arc, Weak};

use uwarp_rnic::cq::Feeder;
use uwarp_rnic::qp::{Counters, Drops, QpInit};
use uwarp_rnic::{Cq, VerbsError};

use crate::fork::Birth;
use crate::nic::Nic;
use crate::pair::QueuePair;
use crate::source::Token;

/// The part of a queue pair that does not depend on its service. Its number is free again when this is
/// dropped.
pub(crate) struct Shell {
    nic: Arc<Nic>,
    birth: Birth,
    qpn: u32,
    /// Where it completes; polls of these queues look for its input.
    cqs: [Arc<Cq>; 2],
}

impl Shell {
    /// Gives a queue pair its number; `init` then has the sizes that it really gets. Fails when a limit of
    /// the device is exceeded or no number is free.
    pub fn admit(nic: &Arc<Nic>, init: &mut QpInit) -> Result<Self, VerbsError> {
        if nic.engine().birth.is_parents() {
            return Err(VerbsError::Forked);
        }
        init.caps = nic.limits().admit(init)?;
        let qpn = nic.numbers.take()?;
        Ok(Self {
            nic: nic.clone(),
            birth: Birth::here(),
            qpn,
            cqs: [init.send_cq.clone(), init.recv_cq.clone()],
        })
    }

    pub fn qpn(&self) -> u32 {
        self.qpn
    }

    /// This process is a child, and the queue pair its parent's.
    #[inline]
    pub fn is_parents(&self) -> bool {
        self.birth.is_parents()
    }

    #[inline]
    pub fn nic(&self) -> &Arc<Nic> {
        &self.nic
    }

    /// The queue pair is made. Not called earlier: a completion queue removes feeders that do not exist.
    pub fn arrive(&self, qp: &QueuePair, feeder: &Weak<dyn Feeder>) {
        for cq in &self.cqs {
            cq.add_feeder(self.qpn, feeder.clone());
        }
        self.nic.arrive(qp);
    }

    /// Whether completions wait to be polled in these queues.
    pub fn has_unpolled(&self) -> bool {
        self.cqs.iter().any(|cq| !cq.is_empty())
    }

    /// Whether only the system knows what it waits for. (Unless this is called: yes.)
    pub fn set_needs_system(&self, needs: bool) {
        for cq in &self.cqs {
            cq.set_needs_system(self.qpn, needs);
        }
    }

    /// Its input comes from this source from now on; `None`: from one that many queue pairs share.
    pub fn fed_by(&self, source: Option<Token>) {
        for cq in &self.cqs {
            cq.fed_by(source.map(|source| source.0));
        }
    }

    /// From now on no poll looks for its input.
    pub fn stop_feeding(&self) {
        for cq in &self.cqs {
            cq.remove_feeder(self.qpn);
        }
    }

    /// The queue pair is destroyed: adds what it has done to the device's counters, the first time.
    pub fn depart(&self, counters: Counters, drops: Drops) {
        self.nic.depart(self.qpn, counters, drops);
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        self.nic.numbers.give(self.qpn);
    }
}

/// Posts work requests one by one. If one is refused, returns its index (the ones before it are posted) and
/// the reason.
#[inline]
pub(crate) fn post_each<W>(
    wrs: impl Iterator<Item = W>,
    mut post: impl FnMut(&W) -> Result<(), VerbsError>,
) -> Result<(), (usize, VerbsError)> {
    for (i, wr) in wrs.enumerate() {
        post(&wr).map_err(|e| (i, e))?;
    }
    Ok(())
}

/// Posts work requests if none of them is refused, otherwise none. `check` is given how many come first.
#[inline]
pub(crate) fn post_together<C, W>(
    core: &mut C,
    wrs: impl Iterator<Item = W> + Clone,
    check: impl Fn(&mut C, &W, u32) -> Result<(), VerbsError>,
    post: impl Fn(&mut C, &W),
) -> Result<(), VerbsError> {
    for (wr, ahead) in wrs.clone().zip(0..) {
        check(core, &wr, ahead)?;
    }
    wrs.for_each(|wr| post(core, &wr));
    Ok(())
}
