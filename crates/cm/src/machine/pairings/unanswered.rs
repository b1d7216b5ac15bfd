//! Requests for cookies that come before the program has moved the queue pair that they are for. They are
//! answered at the move. Programs exchange numbers and move their queue pairs at once, so every tenth request
//! came too early, and cost its peer a connection.
//!
//! A request waits once: whoever repeats it is answered. So a stranger who fills the room, or asks in another
//! peer's place, keeps nobody waiting.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use uwarp_wire::datagram::proof::Proof as ProofDatagram;

/// Most that wait, one for each of a port's numbers and as many of strangers; others are answered at once.
const MOST: usize = 512;
/// Those that came this long ago were repeated since, if their peers still wait.
const LIFE: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Unanswered {
    /// By the number that each is for, and by where it came from.
    waiting: BTreeMap<(u32, SocketAddr, u32), (IpAddr, ProofDatagram, Instant)>,
    /// When there was room last.
    cleared: Option<Instant>,
}

impl Unanswered {
    /// Keeps a request. False: it was kept before, or there is no room.
    pub fn is_first(&mut self, now: Instant, from: SocketAddr, to: IpAddr, request: &ProofDatagram) -> bool {
        let key = (request.destination_qpn, from, request.source_qpn);
        if let Some((_, kept, _)) = self.waiting.get(&key) {
            // With another token it may come from somebody else, whatever address it shows.
            if kept.token == request.token {
                self.waiting.remove(&key);
            }
            return false;
        }
        if self.waiting.len() >= MOST && self.cleared.is_none_or(|cleared| cleared + LIFE <= now) {
            self.cleared = Some(now);
            self.waiting.retain(|_, (.., since)| now < *since + LIFE);
        }
        let has_room = self.waiting.len() < MOST;
        if has_room {
            self.waiting.insert(key, (to, *request, now));
        }
        has_room
    }

    /// Removes what waits for this number; returns those that `fit`, by address and number.
    pub fn take(
        &mut self,
        qpn: u32,
        fit: impl Fn(SocketAddr, u32) -> bool,
    ) -> Vec<(SocketAddr, IpAddr, ProofDatagram)> {
        let first = (qpn, SocketAddr::from(([0; 4], 0)), 0);
        let keys: Vec<_> =
            self.waiting.range(first..).map(|(key, _)| *key).take_while(|key| key.0 == qpn).collect();
        let taken = keys.into_iter().filter_map(|key| Some((key, self.waiting.remove(&key)?)));
        taken
            .filter(|((_, from, source), _)| fit(*from, *source))
            .map(|((_, from, _), (to, request, _))| (from, to, request))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn request(source_qpn: u32, destination_qpn: u32) -> ProofDatagram {
        ProofDatagram { source_qpn, destination_qpn, token: 7, cookie: None }
    }

    fn from(port: u16) -> SocketAddr {
        SocketAddr::new(HERE, port)
    }

    #[test]
    fn a_request_waits_once_and_is_found_by_its_queue_pair() {
        let (now, mut waits) = (Instant::now(), Unanswered::default());
        for (port, source, for_qpn) in [(1, 0x101, 5), (2, 0x201, 5), (1, 0x102, 6)] {
            assert!(waits.is_first(now, from(port), HERE, &request(source, for_qpn)));
        }
        let forged = ProofDatagram { token: 8, ..request(0x102, 6) };
        assert!(!waits.is_first(now, from(1), HERE, &forged), "and the first one stays");
        assert!(!waits.is_first(now, from(2), HERE, &request(0x201, 5)), "it was repeated");
        assert_eq!(waits.take(5, |at, source| (at.port(), source) == (1, 0x102)), []);
        assert_eq!(waits.take(5, |_, _| true), [], "those of others are dropped, too");
        assert_eq!(waits.take(6, |_, _| true), [(from(1), HERE, request(0x102, 6))]);
    }

    #[test]
    fn a_flood_takes_room_for_a_tenth_of_a_second_and_keeps_nobody_waiting() {
        let (now, mut waits) = (Instant::now(), Unanswered::default());
        let firsts = (0..2 * MOST as u32).filter(|n| waits.is_first(now, from(1), HERE, &request(*n, 5)));
        assert_eq!(firsts.count(), MOST);
        assert!(!waits.is_first(now + LIFE / 2, from(2), HERE, &request(9, 6)), "answered at once");
        assert!(waits.is_first(now + 2 * LIFE, from(2), HERE, &request(9, 6)));
        assert_eq!(waits.waiting.len(), 1);
    }
}
