//! What systems say about the ports of peers (docs/rd.md section 5.6).

use std::net::SocketAddr;

use super::super::message::Failure;
use super::Rd;
use crate::clock::Now;

/// What the system of a peer says about a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortAnswer {
    /// It refuses the port: no process has it.
    Refused,
    /// It says nothing, although the question has had time.
    Nothing,
}

impl Rd {
    /// What has come of [`Action::AskPort`](super::super::Action::AskPort). Refused: what there is with the
    /// process of this address and port is over, where it is silent, too.
    pub fn port_is(&mut self, now: &Now, remote: SocketAddr, answer: PortAnswer) {
        let now = now.get();
        for id in self.peers.ids() {
            let Some(peer) = self.peers.get_mut(id) else { continue };
            let route = peer.route;
            let Some(exchange) = peer.exchange.as_mut().filter(|_| route.remote == remote) else { continue };
            match answer {
                PortAnswer::Refused if exchange.is_refused(now) => {
                    peer.end_exchange(now, Failure::Restarted, &mut self.actions);
                    self.after(now, id);
                }
                PortAnswer::Nothing => {
                    exchange.on_port_taken(now);
                    self.after(now, id);
                }
                PortAnswer::Refused => {}
            }
        }
    }
}
