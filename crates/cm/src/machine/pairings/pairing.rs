//! One queue pair with the peer that its program has named: its state, what it shows, and what it accepts.

use std::cmp::Ordering;
use std::net::{IpAddr, Ipv6Addr};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_proto::setup::{Negotiated, PeerData};
use uwarp_rnic::ah::port_of;
use uwarp_rnic::qp::{Now, Psns, ShownPsns};
use uwarp_wire::introduction::{Cookie, Half, Introduction, TurnedAway};

use super::early::Arrived;
use super::index::{Entry, group};
use super::why::Why;
use super::{Active, ConnKey, Handshake, Machine as _, Path, Place, Terms, Transmit, earlier, gid};
use crate::event::ConnParam;
use crate::timeouts::RETRIES;

/// How long a peer whose PSNs do not fit is rejected unread. Twelve bits are guessed in 17 minutes then, on
/// average.
const WRONG_PSN_PAUSE: Duration = Duration::from_millis(500);

/// A queue pair and the peer that its program has named.
#[derive(Debug)]
pub(super) struct Pairing {
    pub(super) moves: u32,
    pub(super) path: Path,
    pub(super) peer: u32,
    pub(super) terms: Terms,
    pub(super) incarnation: u64,
    pub(super) token: u64,
    /// When it was moved to RTR.
    pub(super) began: Instant,
    pub(super) cookie: Option<(Cookie, Instant)>,
    pub(super) asked: u32,
    /// As `asked`, since the last answer.
    pub(super) unanswered: u32,
    pub(super) why: Option<Why>,
    /// The log has said it.
    pub(super) why_said: bool,
    /// The log says then what is waited for, if it still is.
    pub(super) late: Option<Instant>,
    /// Why the last attempt to connect has failed.
    pub(super) failed: Option<Errno>,
    pub(super) pauses: u32,
    pub(super) rejected: bool,
    /// Requests are rejected unread until then.
    pub(super) wrong_psn: Option<Instant>,
    /// This host cannot do what it needs.
    pub(super) refused: Option<Errno>,
    pub(super) state: State,
    pub(super) indexed: Entry,
}

/// | state | event | → | actions |
/// |-|-|-|-|
/// | – | begin: smaller | Waiting | Listen once a port; early ones with older cookies are rejected |
/// | – | begin: larger | AwaitCookie | ask for a cookie (UDP) |
/// | – | begin: itself | Joining | Connect to itself; Opened: Attach |
/// | Joining | Failed | Paused | – |
/// | AwaitCookie | cookie with our token | Asking | `Active`, introduction with the cookie |
/// | AwaitCookie | 50 ms·2ⁿ ≤ 500 | AwaitCookie | ask again |
/// | Asking | Accepted; numbers, incarnation, halves of the PSNs fit | Attaching | Attach |
/// | Asking | Accepted, unfit; Failed | Paused | Close; 20 ms·2ⁿ ≤ 500 |
/// | Asking | Rejected, first; later | AwaitCookie; Paused | Close; ask again; as above |
/// | Paused | limit | Asking; without a fresh cookie AwaitCookie; itself Joining | – |
/// | Waiting | request: proven since this move; address, numbers, halves fit | Replying | accept |
/// | Waiting | unfit request | Waiting | reject |
/// | Replying | Replied / failed | Attaching / Waiting | Attach / next early one |
/// | Attaching | Attached / Refused: it has failed | Attached / over | – / Close |
/// | Attached | Used | Up | – |
/// | Attached | Ended | Waiting, Paused | – |
/// | Up | Ended | over | – |
/// | any | end, forget | – | Close; forget: reject early ones |
///
/// The limit of the first FPDU is the queue pair's ([`uwarp_rnic::qp::RcCore`]): it ends the stream.
#[derive(Debug)]
pub(super) enum State {
    Waiting,
    Replying { conn: ConnKey, handshake: Box<Handshake>, said: Box<Negotiated>, _place: Place },
    AwaitCookie { again: Instant },
    Asking(Box<Active>),
    Paused { until: Instant },
    Joining { conn: ConnKey },
    Attaching { conn: ConnKey },
    Attached { conn: ConnKey },
    Up { conn: ConnKey },
    Over,
}

impl State {
    /// The connection that a queue pair has, or is about to get.
    pub(super) fn stream(&self) -> Option<ConnKey> {
        match self {
            Self::Attaching { conn } | Self::Attached { conn } | Self::Up { conn } => Some(*conn),
            _ => None,
        }
    }

    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Waiting => "Waiting",
            Self::Replying { .. } => "Replying",
            Self::AwaitCookie { .. } => "AwaitCookie",
            Self::Asking(_) => "Asking",
            Self::Paused { .. } => "Paused",
            Self::Joining { .. } => "Joining",
            Self::Attaching { .. } => "Attaching",
            Self::Attached { .. } => "Attached",
            Self::Up { .. } => "Up",
            Self::Over => "Over",
        }
    }

    /// The connections that are its own.
    fn conns(&self) -> Option<ConnKey> {
        match self {
            Self::Replying { conn, .. } | Self::Joining { conn } => Some(group(*conn)),
            Self::Asking(active) => Some(active.conns()),
            other => other.stream().map(group),
        }
    }
}

impl Pairing {
    /// Less: this end listens; greater: it connects; equal: the queue pair is its own peer.
    pub(super) fn role(&self, qpn: u32) -> Ordering {
        (gid(self.path.local.ip()), qpn).cmp(&(gid(self.path.peer.ip()), self.peer))
    }

    /// The peer's address and port.
    pub(super) fn names_peer(&self) -> (Ipv6Addr, u16) {
        (gid(self.path.peer.ip()), port_of(self.peer))
    }

    pub(super) fn asks_why_on(&self, conn: ConnKey) -> bool {
        self.why.as_ref().is_some_and(|why| why.active.conns() == group(conn))
    }

    pub(super) fn is_peer(&self, address: IpAddr, port: u16) -> bool {
        self.names_peer() == (gid(address), port)
    }

    /// Whether this request is the peer's, for the present move.
    pub(super) fn check(&mut self, now: &Now, qpn: u32, request: &Arrived) -> Result<(), TurnedAway> {
        let said = &request.introduction;
        let is_peers = (said.source_qpn, said.destination_qpn) == (self.peer, qpn)
            && request.from == gid(self.path.peer.ip())
            && self.role(qpn) == Ordering::Less;
        if !is_peers {
            Err(TurnedAway::AnotherPeer)
        } else if request.proven <= self.began {
            Err(TurnedAway::Stale)
        } else if self.wrong_psn.is_some_and(|until| now.get() < until) {
            Err(TurnedAway::Psn)
        } else {
            self.check_psns(now, qpn, Half::Lower, said)
        }
    }

    pub(super) fn check_psns(
        &mut self,
        now: &Now,
        qpn: u32,
        half: Half,
        shown: &Introduction,
    ) -> Result<(), TurnedAway> {
        match ShownPsns::of(shown, half).fit(&self.terms.psns) {
            Some(true) => Ok(()),
            // It comes back when one end has been moved to RTS.
            None => Err(TurnedAway::Psn),
            Some(false) => {
                let Psns { expects, begins } = self.terms.psns;
                // Once: the peer tries again and again.
                if self.wrong_psn.is_none() {
                    tracing::warn!(
                        qpn = %format_args!("{qpn:#x}"),
                        "refused: queue pair {:#x} at {} shows other packet sequence numbers than the \
                         program has set here (rq_psn {}, sq_psn {}); over InfiniBand nothing would arrive",
                        self.peer,
                        self.path.peer.ip().to_canonical(),
                        hex(expects),
                        hex(begins),
                    );
                }
                self.wrong_psn = Some(now.get() + WRONG_PSN_PAUSE);
                Err(TurnedAway::Psn)
            }
        }
    }

    /// Whether the reply comes from the queue pair that was asked.
    pub(super) fn is_answer(&mut self, now: &Now, qpn: u32, reply: &[u8]) -> bool {
        let Some(reply) = Introduction::parse(reply) else { return false };
        let expected = (self.peer, qpn, self.incarnation);
        (reply.source_qpn, reply.destination_qpn, reply.incarnation) == expected
            && self.check_psns(now, qpn, Half::Upper, &reply).is_ok()
    }

    pub(super) fn introduction(
        &self,
        qpn: u32,
        half: Half,
        incarnation: u64,
        cookie: Cookie,
    ) -> Introduction {
        let psns = &self.terms.psns;
        let [expects, begins] = [psns.expects, psns.begins].map(|psn| psn.map(|psn| half.of(psn)));
        Introduction { source_qpn: qpn, destination_qpn: self.peer, expects, begins, incarnation, cookie }
    }

    pub(super) fn peer_data(&self, qpn: u32) -> PeerData {
        let Terms { rnr_retry, min_rnr_timer, placement_acks, .. } = self.terms;
        let rnr_retry = rnr_retry.unwrap_or(RETRIES).min(RETRIES);
        PeerData { placement_acks, rnr_retry, min_rnr_timer, qpn, ..PeerData::new() }
    }

    /// What the program said, as rdma_cm would have it. The peer says how long its Sends may wait.
    pub(super) fn conn_param(&self, said: &Negotiated) -> ConnParam {
        let rnr_retry_count = said.peer.map_or(RETRIES, |peer| peer.rnr_retry);
        ConnParam { retry_count: self.terms.retry_cnt, rnr_retry_count, ..ConnParam::NONE }
    }

    /// What the index must have of it.
    pub(super) fn entry(&mut self) -> Entry {
        let why = self.why.as_ref().map(|why| why.active.conns());
        let (conns, deadline) = ([self.state.conns(), why], self.deadline());
        Entry { conns, deadline, sends: self.poll_transmit().is_some() }
    }

    pub(super) fn is_indexed(&mut self) -> bool {
        self.entry() == self.indexed
    }

    pub(super) fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        match &mut self.state {
            State::Replying { conn, handshake, .. } => {
                Some(Transmit::Bytes { conn: *conn, bytes: handshake.poll_transmit()? })
            }
            State::Asking(active) => active.poll_transmit(),
            _ => self.why.as_mut()?.active.poll_transmit(),
        }
    }

    pub(super) fn deadline(&self) -> Option<Instant> {
        earlier(self.deadline_of_change(), self.late)
    }

    /// Without the moment at which the log says something.
    pub(super) fn deadline_of_change(&self) -> Option<Instant> {
        earlier(self.deadline_of_state(), self.why.as_ref().and_then(|why| why.active.poll_timeout()))
    }

    pub(super) fn deadline_of_state(&self) -> Option<Instant> {
        match &self.state {
            State::Replying { handshake, .. } => handshake.poll_timeout(),
            State::AwaitCookie { again } => Some(*again),
            State::Asking(active) => active.poll_timeout(),
            State::Paused { until } => Some(*until),
            _ => None,
        }
    }
}

/// What the peer has shown of its packet sequence numbers, for the stream: this end may learn one of its own
/// later.
pub fn shown_psns(said: &Negotiated) -> Option<ShownPsns> {
    let half = if said.initiator { Half::Upper } else { Half::Lower };
    Introduction::parse(&said.private_data).map(|peer| ShownPsns::of(&peer, half))
}

fn hex(psn: Option<u32>) -> String {
    psn.map_or_else(|| "not set".into(), |psn| format!("{psn:#x}"))
}
