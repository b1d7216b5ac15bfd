//! Strangers: they connect to a listener and say nothing, half a request, a whole one or noise, and they
//! listen where a program connects to.

use std::net::SocketAddr;

use uwarp_proto::setup::{Depths, Initiator, InitiatorConfig, Revision};

use crate::hosts::network::{Listening, Opening, Pid, TcpId, network};
use crate::{Rng, Time};

/// A stranger.
pub struct Stranger {
    /// Its name.
    pub pid: Pid,
    /// Its address. It listens there.
    pub at: SocketAddr,
    /// Whom it connects to.
    pub target: Option<SocketAddr>,
    /// When it does the next thing.
    pub wake: Time,
    until: Time,
    conns: Vec<(TcpId, usize)>,
    rng: Rng,
}

impl Stranger {
    /// One that begins at `wake`, and ends 20 seconds later.
    pub fn new(pid: Pid, at: SocketAddr, target: Option<SocketAddr>, wake: Time, rng: Rng) -> Self {
        if target.is_none() {
            network(|network| {
                let listening = Listening { owner: pid, backlog: Default::default(), news: 0 };
                network.listening.insert(at, listening);
            });
        }
        Self { pid, at, target, wake, until: wake + 20_000_000_000, conns: Vec::new(), rng }
    }

    /// Its program ends.
    pub fn end(&mut self) {
        self.conns.clear();
        self.wake = Time::MAX;
        network(|network| network.end_process(self.pid));
    }

    /// Does something at random. Returns whether it did.
    pub fn turn(&mut self, now: Time) -> bool {
        if now < self.wake {
            return false;
        }
        if now >= self.until {
            self.end();
            return true;
        }
        self.wake = now + 1_000_000 + self.rng.below(300_000_000);
        network(|network| {
            network.running = self.pid;
            let listening =
                network.listening.get_mut(&self.at).filter(|listening| listening.owner == self.pid);
            let new = listening.into_iter().flat_map(|listening| std::mem::take(&mut listening.backlog));
            self.conns.extend(new.map(|id| (id, 1)));
            if let Some(target) = self.target
                && self.conns.len() < 100
                && self.rng.chance(600)
            {
                let from = SocketAddr::new(self.at.ip(), network.any_port());
                self.conns.push((network.connect(from, target), 0));
            }
        });
        let Self { conns, rng, .. } = self;
        conns.retain(|(id, side)| {
            let said = match rng.below(8) {
                0 => request(rng),
                1 => {
                    let mut half = request(rng);
                    half.truncate(rng.size(1, half.len() - 1));
                    half
                }
                2 => {
                    let mut noise = vec![0; rng.size(1, 60)];
                    rng.fill(&mut noise);
                    noise
                }
                3 => {
                    network(|network| network.close(*id, *side, false));
                    return false;
                }
                4 => {
                    network(|network| network.close(*id, *side, true));
                    return false;
                }
                _ => return true,
            };
            network(|network| {
                let now = network.now;
                let Some(tcp) = network.tcp.get_mut(id) else { return false };
                if tcp.state == Opening::Open {
                    let _ = tcp.pipes[*side].send(now, &said);
                    // Not set-up bytes of a machine, which counts what it reads.
                    tcp.set_up[*side].0 += said.len() as u64;
                }
                true
            })
        });
        true
    }
}

fn request(rng: &mut Rng) -> Vec<u8> {
    let config = InitiatorConfig {
        revision: if rng.chance(500) { Revision::One } else { Revision::Two },
        crc: rng.chance(500),
        markers: rng.chance(300),
        depths: Depths::negotiated(4, 4),
        max_ird: 16,
        peer: None,
        peer_in_request: false,
    };
    let mut asks = Initiator::new(config, b"stranger").expect("it is short");
    asks.poll_transmit().expect("a request")
}
