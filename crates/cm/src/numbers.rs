//! The ports of queue pair numbers: the shell of [`crate::machine::pairings`], one [`Runner`] for each port
//! whose queue pairs are brought up by number.
//!
//! ```text
//!   bringup ─ begin, terms, end, forget ─▶ Numbers ─ by port ─▶ Runner ─▶ attach_awaited
//!                       the port's UDP socket ─ ProofObserver ──▶ │ ▲
//!                                     its TCP socket, accepted ───┘ └─ Used, Ended: the queue pair's stream
//! ```

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Instant;

use rustix::io::Errno;
use uwarp_driver::carriers::with_rules;
use uwarp_driver::config::Config;
use uwarp_driver::{Nic, ProofObserver, ProofPort, Qp, QueuePair};
use uwarp_llp::carrier::Ends;
use uwarp_llp::udp::Route;
use uwarp_proto::setup::{Negotiated, ResponderPolicy, Rtr};
use uwarp_rnic::VerbsError;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::qp::{Now, Psns, QpAttr, QpState, StreamParams};
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::introduction::Introduction;

use crate::error::CmError;
use crate::event::ConnParam;
use crate::machine::Recipient;
use crate::machine::budget::Budget;
use crate::machine::pairings::{Pairings, Path, Settings, Terms, shown_psns};
use crate::params::{passes_for_infiniband, stream_params};
use crate::runner::{Environment, Runner, now};
use crate::sync::Mutex;
use crate::timeouts::Timeouts;

/// All ports of a process that have pairings.
pub(crate) struct Numbers {
    nic: Arc<Nic>,
    timeouts: Timeouts,
    policy: ResponderPolicy,
    budget: Budget,
    limit_read: LimitRead,
    /// By number. One never goes: its sockets are the device's.
    ports: Mutex<HashMap<u16, Arc<Port>>, 7>,
}

type Port = Runner<Pairings, Owner>;

impl Numbers {
    pub fn new(nic: &Arc<Nic>, timeouts: Timeouts, policy: ResponderPolicy, budget: Budget) -> Self {
        let limit_read = LimitRead { since: now().get(), tenth: AtomicU64::new(0) };
        Self { nic: Arc::clone(nic), timeouts, policy, budget, limit_read, ports: Mutex::default() }
    }

    /// Joins a queue pair, which is in RTR and waits for its stream, with queue pair `peer` at the other end
    /// of the path.
    pub fn begin(&self, qp: &Qp, path: Path, peer: u32) -> Result<(), CmError> {
        let Some((attr, psns, moves)) = qp.awaits_stream() else { return Ok(()) };
        let [incarnation, token] = [random_u64()?, random_u64()?];
        let (qpn, terms) = (qp.qpn(), terms(&attr, psns));
        let port = self.port(qpn, |pairings, now| {
            // The program may have raised the limit of its descriptors.
            if self.limit_read.is_old(now) {
                self.budget.set_limit(Budget::of_descriptors(descriptors()));
            }
            pairings.begin(now, (qpn, moves), path, peer, terms, incarnation, token);
        })?;
        let refused = port.call(|pairings, now| {
            pairings.begun(now, qpn);
            pairings.refused(qpn)
        });
        match refused {
            Some(errno) => {
                port.call(|pairings, _| pairings.end(qpn));
                Err(errno.into())
            }
            None => Ok(()),
        }
    }

    /// The program has changed attributes of a queue pair.
    pub fn changed(&self, qp: &Qp) {
        // Set-up shows the present ones: the program sets one of the packet sequence numbers late. And the
        // stream that it has may turn out to be none.
        if let Some(port) = self.known(qp.qpn()) {
            let (attr, psns) = qp.terms();
            port.call(|pairings, _| pairings.terms(qp.qpn(), terms(&attr, psns)));
        }
    }

    /// The queue pair is in RESET or ERR: everything that was begun for it is cancelled.
    pub fn end(&self, qpn: u32) {
        if let Some(port) = self.known(qpn) {
            port.call(|pairings, _| pairings.end(qpn));
        }
    }

    /// The queue pair is about to be destroyed.
    pub fn forget(&self, qpn: u32) {
        if let Some(port) = self.known(qpn) {
            port.call(|pairings, now| pairings.forget(now, qpn));
        }
    }

    fn known(&self, qpn: u32) -> Option<Arc<Port>> {
        self.ports.lock().get(&port_of(qpn)).cloned()
    }

    /// What runs the port of this number, from now on, after this call of the program.
    fn port(&self, qpn: u32, call: impl FnOnce(&mut Pairings, &Now)) -> Result<Arc<Port>, CmError> {
        // Locked while it is made, so that two threads do not both make it.
        let mut ports = self.ports.lock();
        let number = port_of(qpn);
        if let Some(port) = ports.get(&number).cloned() {
            drop(ports);
            port.call(call);
            return Ok(port);
        }
        let mut key = [0; 16];
        for part in key.chunks_exact_mut(8) {
            part.copy_from_slice(&random_u64()?.to_ne_bytes());
        }
        let config = Config::get();
        let settings = Settings {
            timeouts: self.timeouts,
            policy: self.policy,
            crc: config.crc,
            markers: config.markers,
            says_uwarp: config.find_uwarp_peers,
            budget: self.budget.clone(),
        };
        let owner = Owner {
            nic: Arc::clone(&self.nic),
            port: number,
            proofs: OnceLock::new(),
            // No number that the device has.
            changes: AtomicU64::new(u64::MAX),
        };
        let machine = Pairings::new(&now(), settings, &key);
        let bound = with_rules(self.nic.take_stream_socket(qpn).ok_or(Errno::MFILE)?);
        let port = Runner::start(self.nic.engine(), owner, machine, []);
        let observer: Weak<Port> = Arc::downgrade(&port);
        // With the call: peers may have asked already. What they get before it does not count.
        port.call_with(|pairings, conns, now| match self.nic.serve_proofs(qpn, observer) {
            Ok(proofs) => {
                // The only one to set it.
                let _ = port.env().proofs.set(proofs);
                conns.set_bound(bound);
                call(pairings, now);
                Ok(())
            }
            Err(error) => {
                self.nic.return_stream_socket(qpn, bound);
                Err(error)
            }
        })?;
        ports.insert(number, Arc::clone(&port));
        Ok(port)
    }
}

/// When the limit of descriptors was read last. Programs move queue pairs to RTR by the thousand.
struct LimitRead {
    since: Instant,
    /// The tenth of a second of that, from 1 on.
    tenth: AtomicU64,
}

impl LimitRead {
    /// Whether it must be read again, which the caller then does.
    fn is_old(&self, now: &Now) -> bool {
        let tenth = now.get().saturating_duration_since(self.since).as_millis() / 100 + 1;
        let tenth = u64::try_from(tenth).unwrap_or(u64::MAX);
        self.tenth.swap(tenth, Ordering::Relaxed) != tenth
    }
}

/// What the machine of a port has around it.
struct Owner {
    nic: Arc<Nic>,
    port: u16,
    proofs: OnceLock<ProofPort>,
    /// [`Nic::changes`] when the machine was told last which queue pairs exist.
    changes: AtomicU64,
}

impl Owner {
    fn find(&self, qpn: u32) -> Option<Arc<Qp>> {
        match self.nic.queue_pair(qpn)? {
            QueuePair::Rc(qp) => Some(qp),
            QueuePair::Ud(_) | QueuePair::Rd(_) | QueuePair::Uc(_) => None,
        }
    }

    fn waits(&self, qpn: u32, moves: u32) -> bool {
        let awaited = self.find(qpn).and_then(|qp| qp.awaits_stream());
        awaited.is_some_and(|(.., present)| present == moves)
    }
}

impl Environment<Pairings> for Owner {
    fn queue_pair(&self, to: Recipient) -> Option<Arc<Qp>> {
        match to {
            Recipient::Number { qpn, .. } => self.find(qpn),
            Recipient::Own => None,
        }
    }

    fn stream_params(&self, qp: &Qp, said: &Negotiated, param: ConnParam) -> StreamParams {
        let attr = qp.query();
        StreamParams {
            // In the iwarp view, too: programs that exchange numbers are written for InfiniBand.
            by_number: true,
            wait_first_frame: said.rtr != Rtr::None,
            psns: shown_psns(said),
            ..stream_params(said, param, attr.timeout, attr.min_rnr_timer)
        }
    }

    fn process_of(&self, said: &Negotiated, ends: Ends) -> SocketAddr {
        process_of(said.initiator, &said.private_data, ends.peer)
    }

    fn report(&self, report: Infallible) {
        match report {}
    }

    /// If none has used it, the queue pair waits again.
    fn was_used(&self, to: Recipient) -> bool {
        matches!(to, Recipient::Number { qpn, moves } if !self.waits(qpn, moves))
    }

    /// A queue pair whose work requests have waited for too long fails on its own: its end of the pairing
    /// must not go on trying.
    fn before_timeout(&self, port: &Port) {
        for (qpn, moves) in port.call(|pairings, now| pairings.due(now)) {
            if !self.waits(qpn, moves) {
                port.call(|pairings, _| pairings.give_up(qpn, moves));
            }
        }
    }

    fn prepare(&self, pairings: &mut Pairings, _: &Now) {
        let changes = self.nic.changes();
        if self.changes.swap(changes, Ordering::Relaxed) != changes {
            pairings.set_alive(self.port, self.nic.numbers_of(self.port));
        }
    }

    fn send(&self, route: Route, bytes: &[u8]) {
        if let Some(port) = self.proofs.get() {
            port.send(&route, bytes);
        }
    }
}

impl ProofObserver for Port {
    fn proof(&self, from: SocketAddr, to: IpAddr, proof: &Proof) {
        // (A stranger who says so delays a call for less than half a second.)
        if let Some(qp) = self.env().find(proof.destination_qpn) {
            qp.note_step();
        }
        self.datagram(from, to, &proof.to_bytes());
    }
}

/// A process is known by the port of its queue pairs' numbers: that is what others connect to, and it
/// connects from any.
fn process_of(initiator: bool, introduction: &[u8], peer: SocketAddr) -> SocketAddr {
    let source = Introduction::parse(introduction).filter(|_| !initiator);
    let port = source.map_or(peer.port(), |introduction| port_of(introduction.source_qpn));
    SocketAddr::new(peer.ip(), port)
}

/// What the program has set. How long its Sends may wait for a receive it says when it moves the queue pair
/// to RTS, which may be later: until then, for as long as it takes. (The queue pair tells the peer then.)
fn terms(attr: &QpAttr, psns: Psns) -> Terms {
    Terms {
        psns,
        retry_cnt: attr.retry_cnt,
        rnr_retry: (attr.state != QpState::Rtr).then_some(attr.rnr_retry),
        min_rnr_timer: attr.min_rnr_timer,
        placement_acks: passes_for_infiniband(),
    }
}

/// How many this process may have.
pub(crate) fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

fn random_u64() -> Result<u64, VerbsError> {
    Ok(u64::from(random_u32()?) << 32 | u64::from(random_u32()?))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uwarp_wire::introduction::Cookie;

    use super::*;

    #[test]
    fn both_ends_know_a_process_by_the_port_of_its_numbers() {
        let shown = Introduction {
            source_qpn: 0x0012_3456,
            destination_qpn: 0x009A_BCDE,
            expects: None,
            begins: None,
            incarnation: 1,
            cookie: Cookie::NONE,
        };
        let from_any: SocketAddr = "10.0.0.1:50000".parse().unwrap();
        let accepted = process_of(false, &shown.to_bytes(), from_any);
        assert_eq!(accepted, "10.0.0.1:4660".parse().unwrap());
        // It has connected to that port.
        assert_eq!(process_of(true, &shown.to_bytes(), accepted), accepted);
        assert_eq!(process_of(false, b"", from_any), from_any);
    }

    #[test]
    fn the_limit_of_descriptors_is_read_again_after_a_tenth_of_a_second() {
        let since = Instant::now();
        let read = LimitRead { since, tenth: AtomicU64::new(0) };
        let asked =
            [0, 0, 99, 100, 150, 450, 499].map(|ms| read.is_old(&Now::at(since + Duration::from_millis(ms))));
        assert_eq!(asked, [true, false, false, true, false, true, false]);
    }
}
