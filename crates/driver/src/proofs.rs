//! Proofs that a port of queue pair numbers has received, until its observer has them.

use std::net::{IpAddr, SocketAddr};
use std::sync::Weak;

use uwarp_wire::datagram::proof::Proof;

use crate::sync::{AtomicBool, Mutex, OnceLock, Ordering};

/// Receives the datagrams by which connected queue pairs prove that they own the port of their numbers.
pub trait ProofObserver: Send + Sync {
    /// One has come for a queue pair of this port, from the port of the number that it names. `to`: the
    /// address of this host that it was sent to. Called without a lock.
    fn proof(&self, from: SocketAddr, to: IpAddr, proof: &Proof);
}

/// Most that wait to be reported: a flood must not take memory, and what is lost is asked for again.
const MOST: usize = 1024;
/// Most of them before there is an observer. The oldest makes room: its peer has asked again meanwhile.
const MOST_EARLY: usize = 256;

/// See the head of this file.
#[derive(Default)]
pub(crate) struct Proofs {
    observer: OnceLock<Weak<dyn ProofObserver>>,
    /// A port may serve datagrams before the program moves its first connected queue pair to RTR. What comes
    /// until then waits, as it would in a socket that nobody reads.
    to_report: Mutex<Vec<(SocketAddr, IpAddr, Proof)>, 29>,
    has_any: AtomicBool,
}

impl Proofs {
    /// With an observer from the beginning, if there is one.
    pub fn new(observer: Option<Weak<dyn ProofObserver>>) -> Self {
        let proofs = Self::default();
        observer.into_iter().for_each(|observer| proofs.watch(observer));
        proofs
    }

    /// Proofs go to this observer from now on; only the first call has an effect. [`Self::report`] follows.
    pub fn watch(&self, observer: Weak<dyn ProofObserver>) {
        let _ = self.observer.set(observer);
    }

    /// Keeps one until it is reported. False: one is dropped.
    pub fn take(&self, from: SocketAddr, to: IpAddr, proof: Proof) -> bool {
        let mut waiting = self.to_report.lock();
        let mut kept = true;
        if self.observer.get().is_none() {
            // Each repeats its request, and counts with the last one.
            let of = |proof: &Proof| (proof.source_qpn, proof.destination_qpn);
            waiting.retain(|(peer, _, other)| (*peer, of(other)) != (from, of(&proof)));
            if waiting.len() >= MOST_EARLY {
                waiting.remove(0);
                kept = false;
            }
        } else if waiting.len() >= MOST {
            return false;
        }
        waiting.push((from, to, proof));
        self.has_any.store(true, Ordering::Relaxed);
        kept
    }

    /// Reports those that have come. Called without a lock, by the thread that has received.
    pub fn report(&self) {
        if !self.has_any.load(Ordering::Relaxed) {
            return;
        }
        let Some(observer) = self.observer.get() else { return };
        // Nobody else reports what this one takes.
        if !self.has_any.swap(false, Ordering::Relaxed) {
            return;
        }
        let proofs = std::mem::take(&mut *self.to_report.lock());
        let Some(observer) = observer.upgrade() else { return };
        for (from, to, proof) in &proofs {
            observer.proof(*from, *to, proof);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    #[derive(Default)]
    struct Seen(Mutex<Vec<(u16, u32, u64)>, 1>);

    impl ProofObserver for Seen {
        fn proof(&self, from: SocketAddr, _: IpAddr, proof: &Proof) {
            self.0.lock().push((from.port(), proof.source_qpn, proof.token));
        }
    }

    fn take(proofs: &Proofs, port: u16, source_qpn: u32, token: u64) -> bool {
        let proof = Proof { source_qpn, destination_qpn: 7, token, cookie: None };
        proofs.take((HERE, port).into(), HERE, proof)
    }

    /// They were dropped: a peer waited for its next request.
    #[test]
    fn what_comes_before_the_observer_is_kept_once_for_each_peer_and_then_reported() {
        let (proofs, seen) = (Proofs::default(), Arc::new(Seen::default()));
        for token in 1..4 {
            assert!(take(&proofs, 1, 0x101, token) && take(&proofs, 2, 0x201, token));
        }
        proofs.report();
        let observer: Weak<Seen> = Arc::downgrade(&seen);
        proofs.watch(observer);
        proofs.report();
        assert_eq!(*seen.0.lock(), [(1, 0x101, 3), (2, 0x201, 3)]);
        assert!(take(&proofs, 1, 0x101, 4) && take(&proofs, 1, 0x101, 4));
        proofs.report();
        assert_eq!(seen.0.lock()[2..], [(1, 0x101, 4); 2], "the machine knows what was repeated");
    }

    #[test]
    fn a_flood_before_the_observer_takes_bounded_memory_and_the_last_ones_stay() {
        let (proofs, seen) = (Proofs::default(), Arc::new(Seen::default()));
        let kept = (0..1000).filter(|n| take(&proofs, 1, *n, 0)).count();
        assert_eq!((kept, proofs.to_report.lock().len()), (MOST_EARLY, MOST_EARLY));
        assert!(!take(&proofs, 2, 0x201, 1), "it takes an older one's place");
        let observer: Weak<Seen> = Arc::downgrade(&seen);
        proofs.watch(observer);
        proofs.report();
        assert_eq!(seen.0.lock().last(), Some(&(2, 0x201, 1)));
    }
}
