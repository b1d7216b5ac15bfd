//! Connections, and requests for them, that wait for a queue pair which the program moves to RTR and RTS
//! itself.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use uwarp_driver::Qp;
use uwarp_process::Mutex;

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
    waiting: Mutex<HashMap<u64, Waiting>, 29>,
}

struct Waiting {
    adopter: Weak<dyn Adopter>,
    /// Our queue pair, if it is known already.
    ours: Option<u32>,
    /// The peer's; 0 where the peer does not name it.
    peer: u32,
    /// The address that the peer's request came from.
    from: Option<IpAddr>,
    /// The program has taken the request.
    given: bool,
}

impl Waiting {
    /// Whether a queue pair with this destination can be the one that is meant.
    fn is_meant(&self, destination: Option<u32>) -> bool {
        self.peer == 0 || destination.is_none_or(|destination| destination == self.peer)
    }

    /// Whether a queue pair with this destination, at this address, takes them from this request.
    fn is_source_of(&self, destination: Option<u32>, peer: Option<IpAddr>) -> bool {
        let is_its_address = match (self.from, peer) {
            (Some(from), Some(peer)) => from.to_canonical() == peer.to_canonical(),
            _ => true,
        };
        is_its_address && destination.is_none_or(|destination| destination == self.peer)
    }
}

impl Awaiting {
    /// Adds a connection that waits for our queue pair `ours`.
    pub fn insert(&self, key: u64, adopter: Weak<dyn Adopter>, ours: u32, peer: u32) {
        self.waiting.lock().insert(key, Waiting { adopter, ours: Some(ours), peer, from: None, given: true });
    }

    /// Adds a request from this address, whose queue pair of ours is not known yet.
    pub fn insert_request(&self, key: u64, adopter: Weak<dyn Adopter>, peer: u32, from: Option<IpAddr>) {
        self.waiting.lock().insert(key, Waiting { adopter, ours: None, peer, from, given: false });
    }

    /// The program takes this request.
    pub fn give(&self, key: u64) {
        if let Some(waiting) = self.waiting.lock().get_mut(&key) {
            waiting.given = true;
        }
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

    /// Whether there is a request for a queue pair that is not known yet. The program takes the destination,
    /// and the address of its path, from that request. So if the peer named none (0), a queue pair that names
    /// a destination belongs to another connection, and so does one whose path leads to another address: any
    /// peer can name any number. And what the program has not taken yet it can take nothing from: whoever may
    /// connect from the peer's address holds nothing up in a program that looks at its requests.
    pub fn expects(&self, destination: Option<u32>, peer: Option<IpAddr>) -> bool {
        let waiting = self.waiting.lock();
        waiting.values().any(|w| w.ours.is_none() && w.given && w.is_source_of(destination, peer))
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
        let expected =
            || [None, Some(0), Some(5), Some(6)].map(|destination| awaiting.expects(destination, None));
        awaiting.insert_request(1, nobody.clone(), 0, None);
        assert_eq!(expected(), [false; 4]);
        awaiting.give(1);
        assert_eq!(expected(), [true, true, false, false]);
        awaiting.insert_request(2, nobody, 5, None);
        assert_eq!(expected(), [true, true, false, false], "the program has not taken it yet");
        awaiting.give(2);
        assert_eq!(expected(), [true, true, true, false]);
        awaiting.remove(1);
        assert_eq!(expected(), [true, false, true, false]);
    }

    #[test]
    fn a_request_keeps_no_queue_pair_from_a_peer_at_another_address() {
        let (awaiting, nobody) = (Awaiting::default(), Arc::new(Nobody));
        let [from, mapped, other] = ["10.0.0.1", "::ffff:10.0.0.1", "10.0.0.2"].map(|ip| ip.parse().ok());
        awaiting.insert_request(1, Arc::downgrade(&nobody) as _, 5, from);
        awaiting.give(1);
        let expected = |number| [None, from, mapped, other].map(|peer| awaiting.expects(number, peer));
        assert_eq!(expected(Some(5)), [true, true, true, false]);
        assert_eq!(expected(None), [true, true, true, false]);
        assert_eq!(expected(Some(6)), [false; 4]);
    }
}
