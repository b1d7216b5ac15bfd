//! Connections, and requests for them, that wait for a queue pair which the program moves to RTR and RTS
//! itself.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use uwarp_driver::Qp;

use crate::error::CmError;

/// A connection, or one that is being made, for a queue pair that is known to it by number only.
pub trait Adopter: Send + Sync {
    /// The program changes the state of its queue pair: the queue pair gets the connection that waits for it,
    /// and is in RTS.
    fn adopt(&self, qp: &Arc<Qp>) -> Result<(), CmError>;
}

/// Connections that wait, by key.
#[derive(Default)]
pub(crate) struct Awaiting {
    waiting: Mutex<HashMap<u64, Waiting>>,
}

struct Waiting {
    adopter: Weak<dyn Adopter>,
    /// Our queue pair, if it is known already.
    ours: Option<u32>,
    /// The peer's; 0 where the peer does not name it.
    peer: u32,
}

impl Waiting {
    /// Whether a queue pair with this destination can be the one that is meant.
    fn is_meant(&self, destination: Option<u32>) -> bool {
        self.peer == 0 || destination.is_none_or(|destination| destination == self.peer)
    }
}

impl Awaiting {
    /// Adds a connection that waits, for our queue pair `ours` if that is known.
    pub fn insert(&self, key: u64, adopter: Weak<dyn Adopter>, ours: Option<u32>, peer: u32) {
        self.waiting.lock().insert(key, Waiting { adopter, ours, peer });
    }

    /// Removes a connection: it waits no longer.
    pub fn remove(&self, key: u64) {
        self.waiting.lock().remove(&key);
    }

    /// The connection for queue pair `qpn`.
    pub fn adopter(&self, qpn: u32, destination: Option<u32>) -> Option<Arc<dyn Adopter>> {
        let waiting = self.waiting.lock();
        let found = waiting.values().find(|w| w.ours == Some(qpn) && w.is_meant(destination))?;
        found.adopter.upgrade()
    }

    /// Whether there is a request for a queue pair that is not known yet. The program takes the destination
    /// from that request. So if the peer named none (0), a queue pair that names a destination belongs to
    /// another connection.
    pub fn expects(&self, destination: Option<u32>) -> bool {
        let meant = |w: &Waiting| destination.is_none_or(|destination| destination == w.peer);
        self.waiting.lock().values().any(|w| w.ours.is_none() && meant(w))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Nobody;

    impl Adopter for Nobody {
        fn adopt(&self, _: &Arc<Qp>) -> Result<(), CmError> {
            Ok(())
        }
    }

    #[test]
    fn a_request_without_a_number_keeps_no_other_queue_pair_from_its_peer() {
        let (awaiting, nobody) = (Awaiting::default(), Arc::new(Nobody));
        let nobody = Arc::downgrade(&nobody);
        let expected = || [None, Some(0), Some(5), Some(6)].map(|destination| awaiting.expects(destination));
        awaiting.insert(1, nobody.clone(), None, 0);
        assert_eq!(expected(), [true, true, false, false]);
        awaiting.insert(2, nobody, None, 5);
        assert_eq!(expected(), [true, true, true, false]);
        awaiting.remove(1);
        assert_eq!(expected(), [true, false, true, false]);
    }
}
