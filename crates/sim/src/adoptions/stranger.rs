//! The other end is no queue pair: it is silent, or says half a frame, a wrong one, or noise, and ends.

use uwarp_proto::setup::{Depths, Initiator, InitiatorConfig, Revision};

use crate::hosts::network::{TcpId, network};
use crate::{Rng, Time};

/// See the head of this file.
pub struct Stranger {
    /// When it does the next thing.
    pub wake: Time,
    id: TcpId,
    rng: Rng,
}

impl Stranger {
    /// At side 1 of this connection.
    pub fn new(id: TcpId, rng: Rng) -> Self {
        Self { wake: 1, id, rng }
    }

    /// It closes, and does nothing any more.
    pub fn end(&mut self) {
        self.wake = Time::MAX;
        network(|network| network.close(self.id, 1, false));
    }

    /// Does something at random. Returns whether it did.
    pub fn turn(&mut self, now: Time) -> bool {
        if now < self.wake {
            return false;
        }
        self.wake = now + 1_000_000 + self.rng.below(5_000_000_000);
        let said = match self.rng.below(10) {
            0 => self.request(),
            1 => {
                let mut half = self.request();
                half.truncate(self.rng.size(1, half.len() - 1));
                half
            }
            2 => {
                let mut reply = self.request();
                reply[..16].copy_from_slice(b"MPA ID Rep Frame");
                reply
            }
            3 => {
                let mut noise = vec![0; self.rng.size(1, 60)];
                self.rng.fill(&mut noise);
                noise
            }
            4 => {
                self.end();
                return true;
            }
            5 => {
                self.wake = Time::MAX;
                network(|network| network.close(self.id, 1, true));
                return true;
            }
            _ => return true,
        };
        network(|network| {
            if let Some(tcp) = network.tcp.get_mut(&self.id) {
                let _ = tcp.pipes[1].send(now, &said);
                tcp.set_up[1].0 += said.len() as u64;
            }
        });
        true
    }

    fn request(&mut self) -> Vec<u8> {
        let config = InitiatorConfig {
            revision: if self.rng.chance(500) { Revision::One } else { Revision::Two },
            crc: self.rng.chance(500),
            markers: self.rng.chance(300),
            depths: Depths::negotiated(4, 4),
            max_ird: 16,
            peer: None,
            peer_in_request: false,
        };
        let data: &[u8] = if self.rng.chance(500) { b"peer 1" } else { b"stranger" };
        let mut asks = Initiator::new(config, data).expect("it is short");
        asks.poll_transmit().expect("a request")
    }
}
