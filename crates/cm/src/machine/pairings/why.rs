//! Why a peer does not answer, for the log.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use uwarp_llp::carrier::Close;
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::Now;
use uwarp_wire::introduction::{self, Cookie, Introduction};

use super::{Active, Machine as _, Pairings, active, gid};
use crate::machine::is_over;
use crate::machine::silence::{self, Heard, LateWords, Versions, Whose, Words};

/// A peer's address and port.
#[derive(Debug, Default)]
pub(super) struct Named {
    /// How many pairings name it.
    pub(super) pairings: usize,
    /// The log says that it has another version.
    version_said: bool,
    /// The log says that a stream of its is late.
    late_said: bool,
    /// When its TCP port was last asked why its UDP port does not answer.
    asked_why: Option<Instant>,
}

impl Named {
    /// Whether the log must say that the peer has another version.
    pub(super) fn say_version(&mut self) -> bool {
        !std::mem::replace(&mut self.version_said, true)
    }

    /// Whether the log must say that a stream of the peer's is late. Who was turned away for its version is
    /// not late: what to look for then would mislead.
    fn say_late(&mut self) -> bool {
        !self.version_said && !std::mem::replace(&mut self.late_said, true)
    }

    /// Whether the TCP port is asked now.
    pub(super) fn may_ask_why(&mut self, now: Instant) -> bool {
        let may = !self.version_said && self.asked_why.is_none_or(|asked| now >= asked + silence::PAUSE);
        if may {
            self.asked_why = Some(now);
        }
        may
    }
}

/// The question to a peer's TCP port, why its UDP port does not answer.
#[derive(Debug)]
pub(super) struct Why {
    pub(super) active: Box<Active>,
    /// How many requests for a cookie had no answer then.
    unanswered: u32,
    heard: bool,
}

impl Pairings {
    /// A request has another version. Its sender tries again for as long as its program waits: the log says
    /// so once, and only of a peer that a queue pair waits for. Strangers cannot fill it.
    pub(super) fn say_version_of(&mut self, peer: SocketAddr, theirs: u8, request: &[u8]) {
        let Some(qpn) = introduction::source_qpn(request) else { return };
        let at = peer.ip().to_canonical();
        if self.named.get_mut(&(gid(at), port_of(qpn))).is_some_and(Named::say_version) {
            tracing::warn!("refused: a request of queue pair {qpn:#x} at {at}: {}", Versions(theirs));
        } else {
            tracing::debug!("refused: a request of queue pair {qpn:#x} at {at} has version {theirs}");
        }
    }

    /// The UDP port does not answer: asks the TCP port why.
    pub(super) fn ask_why(&mut self, now: &Now, qpn: u32, unanswered: u32) {
        if self.end_why(qpn).is_some_and(|before| !before.heard) {
            return self.say(qpn, Heard::Nothing, unanswered);
        }
        let names = self.space();
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        let named = self.named.get_mut(&pairing.names_peer());
        if pairing.why_said || !named.is_some_and(|named| named.may_ask_why(now.get())) {
            return;
        }
        // Nothing that only the two ends know.
        let introduction = Introduction {
            source_qpn: qpn,
            destination_qpn: pairing.peer,
            expects: None,
            begins: None,
            incarnation: 0,
            cookie: Cookie::NONE,
        };
        let mut peer = pairing.path.peer;
        peer.set_port(port_of(pairing.peer));
        let target = active::Target {
            local: Some(pairing.path.local),
            peer,
            config: self.settings.request(qpn, pairing),
            private_data: introduction.to_bytes().to_vec(),
            fall_back: false,
        };
        if let Ok(active) = Active::start(now, names, self.settings.timeouts, target) {
            pairing.why = Some(Why { active: Box::new(active), unanswered, heard: false });
            self.hear_why(qpn);
        }
    }

    /// Takes what the TCP port says. Whatever it is, it only chooses the words: no answer connects a queue
    /// pair.
    pub(super) fn hear_why(&mut self, qpn: u32) {
        while let Some(why) = self.pairs.get_mut(&qpn).and_then(|pairing| pairing.why.as_mut())
            && let Some(action) = why.active.poll_action()
        {
            match action.pass() {
                Ok(action) => self.actions.push_back(action),
                Err(active::Report::ConnectingFrom(_)) => {}
                Err(report) => {
                    why.heard = true;
                    let unanswered = why.unanswered;
                    if let active::Report::Accepted { conn, .. } = report {
                        self.close(conn, Close::Finish);
                    }
                    self.say(qpn, Heard::from(&report), unanswered);
                }
            }
        }
    }

    pub(super) fn end_why(&mut self, qpn: u32) -> Option<Why> {
        let mut why = self.pairs.get_mut(&qpn)?.why.take()?;
        why.active.cancel();
        while let Some(action) = why.active.poll_action() {
            self.actions.extend(action.pass().ok());
        }
        Some(why)
    }

    pub(super) fn say(&mut self, qpn: u32, heard: Heard, unanswered: u32) {
        if unanswered >= heard.said_after()
            && self.may_say(qpn, heard.is_definite())
            && let Some(pairing) = self.pairs.get(&qpn)
        {
            let whose = Whose { peer: pairing.peer, at: pairing.path.peer.ip().to_canonical() };
            tracing::warn!(qpn = %format_args!("{qpn:#x}"), "{}", Words(whose, heard));
        }
    }

    pub(super) fn late_after(&mut self, now: &Now, qpn: u32, limit: Duration) {
        if let Some(pairing) = self.pairs.get_mut(&qpn) {
            pairing.late = Some(now.get() + limit);
        }
    }

    /// Says once, of all queue pairs of a port, what the stream is waiting for.
    pub(super) fn say_late(&mut self, now: &Now, qpn: u32) {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return };
        if !is_over(pairing.late, now) {
            return;
        }
        pairing.late = None;
        let Some(late) = pairing.waits_for(qpn) else { return };
        let whose = Whose { peer: pairing.peer, at: pairing.path.peer.ip().to_canonical() };
        let named = self.named.get_mut(&pairing.names_peer());
        if named.is_some_and(Named::say_late) {
            tracing::warn!(qpn = %format_args!("{qpn:#x}"), "{}", LateWords(whose, late));
        }
    }

    /// Whether the log may say why the peer does not answer. Of its version it speaks once.
    pub(super) fn may_say(&mut self, qpn: u32, version: bool) -> bool {
        let Some(pairing) = self.pairs.get_mut(&qpn) else { return false };
        let named = self.named.get_mut(&pairing.names_peer());
        let may = named.is_some_and(|named| if version { named.say_version() } else { !named.version_said });
        pairing.why_said |= may;
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_says_one_reason_why_a_peer_is_late() {
        let (mut silent, mut old) = (Named::default(), Named::default());
        assert_eq!([silent.say_late(), silent.say_late()], [true, false]);
        assert!(old.say_version());
        assert_eq!([old.say_version(), old.say_late()], [false; 2]);
    }
}
