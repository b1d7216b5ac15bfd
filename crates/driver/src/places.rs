//! Which peers have a link of their own, where a rule says `hybrid:N`
//! (docs/adr/056-rc-over-reliable-datagrams.md).
//!
//! A peer is an address and a port: what this process connects to, the port of a peer's queue pair numbers,
//! or, of who has connected by rdma_cm, the port that it comes from. A peer has a place while a connection
//! with it exists, or is being made, that is not by reliable datagrams.
//!
//! The end that connects decides by its own places. What a peer connects counts here, too, and is never
//! refused: so N limits what a process begins, and others may add to it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::{IpAddr, SocketAddr};

use uwarp_process::{Birth, Mutex, PerProcess};

/// Those of this process.
static PLACES: PerProcess<Mutex<Places, 29>> = PerProcess::new(Mutex::default);

/// How many connections each peer has that keep its place.
#[derive(Debug, Default)]
struct Places(HashMap<(IpAddr, u16), u32>);

/// Keeps a peer's place until it is dropped.
#[derive(Debug)]
pub struct Place {
    peer: (IpAddr, u16),
    birth: Birth,
}

impl Place {
    /// For a connection that is begun: a place, if this peer has one or fewer than `most` peers have.
    pub fn take(peer: SocketAddr, most: u32) -> Option<Self> {
        let peer = key(peer);
        PLACES.lock().take(peer, most).then(|| Self { peer, birth: Birth::here() })
    }

    /// For a connection that exists, whoever has begun it: it has its place.
    pub fn hold(peer: SocketAddr) -> Self {
        let peer = key(peer);
        PLACES.lock().hold(peer);
        Self { peer, birth: Birth::here() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if !self.birth.is_parents() {
            PLACES.lock().give(self.peer);
        }
    }
}

impl Places {
    fn take(&mut self, peer: (IpAddr, u16), most: u32) -> bool {
        let is_free = self.0.len() < usize::try_from(most).unwrap_or(usize::MAX);
        let may = is_free || self.0.contains_key(&peer);
        if may {
            self.hold(peer);
        }
        may
    }

    fn hold(&mut self, peer: (IpAddr, u16)) {
        *self.0.entry(peer).or_default() += 1;
    }

    fn give(&mut self, peer: (IpAddr, u16)) {
        if let Entry::Occupied(mut held) = self.0.entry(peer) {
            match held.get() {
                0 | 1 => drop(held.remove()),
                _ => *held.get_mut() -= 1,
            }
        }
    }
}

fn key(peer: SocketAddr) -> (IpAddr, u16) {
    (peer.ip().to_canonical(), peer.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(port: u16) -> (IpAddr, u16) {
        key(SocketAddr::from(([10, 0, 0, 1], port)))
    }

    #[test]
    fn the_first_peers_have_places_until_their_last_connections_end() {
        let mut places = Places::default();
        assert!(!places.take(peer(1), 0), "nobody has one");
        assert_eq!([1, 2, 3, 1].map(|port| places.take(peer(port), 2)), [true, true, false, true]);
        places.give(peer(1));
        assert!(!places.take(peer(3), 2), "the first peer still has a connection");
        places.give(peer(1));
        assert!(places.take(peer(3), 2));
        assert!(!places.take(peer(1), 2), "another one has its place");
        // Another rule, which allows more.
        assert!(places.take(peer(1), 3));
    }

    #[test]
    fn who_connects_to_us_takes_places_and_is_never_refused() {
        let mut places = Places::default();
        [1, 2, 3].into_iter().for_each(|port| places.hold(peer(port)));
        assert_eq!(
            [4, 3].map(|port| places.take(peer(port), 2)),
            [false, true],
            "a known peer keeps its link"
        );
        [3, 3, 2].into_iter().for_each(|port| places.give(peer(port)));
        assert!(places.take(peer(4), 2));
        // One too many changes nothing.
        places.give(peer(9));
        assert_eq!(places.0.len(), 2);
    }

    #[test]
    fn a_mapped_address_is_the_same_peer() {
        let [mapped, plain] = ["[::ffff:10.0.0.1]:5", "10.0.0.1:5"].map(|end| key(end.parse().unwrap()));
        assert_eq!(mapped, plain);
    }
}
