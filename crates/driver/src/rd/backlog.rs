//! Streams that peers have opened for one service, and that nobody has accepted yet.

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use uwarp_llp::streams::Pipe;

use crate::sync::Mutex;

/// How many there are at most.
const MOST: usize = 4096;
/// One of an address gets a place while that has fewer than this many times the number of free ones: as with
/// connections whose request has not come (`uwarp_cm`'s budget), who opens many leaves some to the others.
const SHARE: usize = 8;

/// Those of a service.
#[derive(Default)]
pub(super) struct Backlog {
    waiting: Mutex<Waiting, 28>,
}

#[derive(Default)]
struct Waiting {
    pipes: VecDeque<Arc<Pipe>>,
    of_address: BTreeMap<IpAddr, usize>,
    /// By which the engine knows the listener; 0: not yet.
    name: u64,
}

impl Waiting {
    fn is_gone(&mut self, pipe: &Pipe) {
        let address = pipe.ends().peer.ip();
        if let Some(count) = self.of_address.get_mut(&address) {
            *count -= 1;
            if *count == 0 {
                self.of_address.remove(&address);
            }
        }
    }
}

impl Backlog {
    /// Returns whom to tell. `None`: there is no room.
    pub fn push(&self, pipe: &Arc<Pipe>) -> Option<u64> {
        let mut waiting = self.waiting.lock();
        let free = MOST - waiting.pipes.len();
        let name = waiting.name;
        let address = pipe.ends().peer.ip();
        let count = waiting.of_address.get(&address).copied().unwrap_or(0);
        if count >= free * SHARE {
            return None;
        }
        waiting.of_address.insert(address, count + 1);
        waiting.pipes.push_back(Arc::clone(pipe));
        Some(name)
    }

    /// The one that has waited longest.
    pub fn pop(&self) -> Option<Arc<Pipe>> {
        let mut waiting = self.waiting.lock();
        let pipe = waiting.pipes.pop_front()?;
        waiting.is_gone(&pipe);
        Some(pipe)
    }

    /// One has ended. It may be accepted already.
    pub fn remove(&self, pipe: &Arc<Pipe>) {
        let mut waiting = self.waiting.lock();
        if let Some(at) = waiting.pipes.iter().position(|other| Arc::ptr_eq(other, pipe)) {
            waiting.pipes.remove(at);
            waiting.is_gone(pipe);
        }
    }

    pub fn take_all(&self) -> VecDeque<Arc<Pipe>> {
        let mut waiting = self.waiting.lock();
        waiting.of_address.clear();
        std::mem::take(&mut waiting.pipes)
    }

    /// The engine knows the listener by this name. Returns whether some wait.
    pub fn name(&self, name: u64) -> bool {
        let mut waiting = self.waiting.lock();
        waiting.name = name;
        !waiting.pipes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uwarp_llp::carrier::Ends;

    fn from(address: u8) -> Arc<Pipe> {
        let at = |last: u8| ([10, 0, 0, last], 20_000).into();
        Pipe::new(Ends { local: at(1), peer: at(address) }, None)
    }

    #[test]
    fn who_opens_many_leaves_some_to_others() {
        let backlog = Backlog::default();
        let taken = (0..2 * MOST).filter(|_| backlog.push(&from(2)).is_some()).count();
        assert_eq!(taken, MOST * SHARE / (SHARE + 1) + 1);
        let other = from(3);
        assert!(backlog.push(&other).is_some());
        // What has ended gives its place back.
        assert!(backlog.push(&from(2)).is_none());
        backlog.remove(&other);
        backlog.remove(&other);
        (0..taken).for_each(|_| assert!(backlog.pop().is_some()));
        assert!(backlog.pop().is_none() && backlog.waiting.lock().of_address.is_empty());
    }
}
