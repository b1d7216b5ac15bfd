//! Why a queue pair finds no peer, in words for the log: another version, a port that is blocked, a program
//! that does not listen.
//!
//! A peer of version 1 does not answer at its UDP port, and it closes the TCP connection of a request that it
//! does not understand. So when the UDP port has not answered for a while, the TCP port is asked as well,
//! with a request that proves nothing. Whatever it says only chooses the words: no answer connects a queue
//! pair.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use rustix::io::Errno;
use uwarp_rnic::ah::port_of;
use uwarp_wire::introduction::{self, TurnedAway, VERSION};

use super::active::Report;

/// After so many requests for a cookie without an answer the TCP port is asked: a third of a second, 1.3 and
/// three seconds. Work requests wait for half a second at least, and many programs for two.
pub(super) const ASKED_AFTER: [u32; 3] = [4, 6, 9];
/// The TCP port of one peer is asked once in this time, whatever the number of queue pairs that wait for it.
pub(super) const PAUSE: Duration = Duration::from_millis(500);

/// What this end is.
const OWN: &str = env!("CARGO_PKG_VERSION");

/// A peer's queue pair, and where it is.
#[derive(Debug, Clone, Copy)]
pub(super) struct Whose {
    pub peer: u32,
    pub at: IpAddr,
}

/// What the TCP port says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Heard {
    /// Nothing, for a second or more.
    Nothing,
    /// Nobody listens there.
    Refused,
    /// The connection was closed without a reply.
    Closed,
    /// It understands this version.
    Understood,
    /// It understands another version.
    Version(u8),
    /// Something that no queue pair says.
    Other,
}

impl Heard {
    /// How many requests for a cookie must have had no answer until the log says this. A datagram may be
    /// lost, and a peer may be late.
    pub fn said_after(self) -> u32 {
        let [first, second, third] = ASKED_AFTER;
        match self {
            Self::Closed | Self::Version(_) => first,
            Self::Understood | Self::Nothing | Self::Other => second,
            Self::Refused => third,
        }
    }

    /// Whether it says what the peer is.
    pub fn is_definite(self) -> bool {
        matches!(self, Self::Closed | Self::Version(_))
    }
}

impl From<&Report> for Heard {
    fn from(how: &Report) -> Self {
        match how {
            Report::Rejected(rejection) => {
                let said = &rejection.private_data;
                match (TurnedAway::parse(said), introduction::version(said)) {
                    (Some(_), Some(VERSION)) => Self::Understood,
                    (Some(_), Some(theirs)) => Self::Version(theirs),
                    _ => Self::Other,
                }
            }
            // A proof is needed first.
            Report::Accepted { .. } | Report::ConnectingFrom(_) => Self::Other,
            Report::Failed { errno, .. } => match *errno {
                Errno::CONNREFUSED => Self::Refused,
                Errno::CONNRESET | Errno::PIPE => Self::Closed,
                Errno::PROTO => Self::Other,
                _ => Self::Nothing,
            },
        }
    }
}

pub(super) struct Words(pub Whose, pub Heard);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Whose { peer, at, .. }, heard) = *self;
        let port = port_of(peer);
        match heard {
            Heard::Closed => write!(
                f,
                "cannot connect to queue pair {peer:#x} at {at}: it is uwarp 0.1, or no uwarp (TCP port \
                 {port} closes each connection without an answer, and UDP port {port} does not answer). This \
                 end is uwarp {OWN}, which connects by number to 0.2 or newer only: install uwarp \
                 {OWN} there",
            ),
            Heard::Version(theirs) => {
                write!(f, "cannot connect to queue pair {peer:#x} at {at}: {}", Versions(theirs))
            }
            Heard::Understood => write!(
                f,
                "still waiting for queue pair {peer:#x} at {at}: TCP port {port} answers there, but UDP port \
                 {port} does not, and queue pairs need both. Does a firewall block UDP? (--port-range names \
                 the ports)"
            ),
            Heard::Refused => write!(
                f,
                "still waiting for queue pair {peer:#x} at {at}: nothing listens at port {port} there. Has \
                 the peer moved its queue pair to RTR, and does its program still run?"
            ),
            Heard::Nothing => write!(
                f,
                "still waiting for queue pair {peer:#x} at {at}: neither UDP port {port} nor TCP port {port} \
                 answers. Does a firewall block them? (Queue pairs need both; --port-range names the ports.) \
                 Does the peer's program still run?"
            ),
            Heard::Other => write!(
                f,
                "still waiting for queue pair {peer:#x} at {at}: UDP port {port} does not answer, and what \
                 answers at TCP port {port} is no queue pair. Has the peer's program ended?"
            ),
        }
    }
}

/// How long a peer may take to connect before the log says that it is waited for. Its program may be slow.
pub(super) const CONNECTS_WITHIN: Duration = Duration::from_secs(5);
/// How long a TCP port may take to answer whose UDP port has answered.
pub(super) const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

/// What a stream is late for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Late {
    /// The peer has not connected to this queue pair.
    NotConnected { own: u32 },
    /// The peer's TCP port does not answer, or so.
    NoTcp(Option<Errno>),
}

pub(super) struct LateWords(pub Whose, pub Late);

impl fmt::Display for LateWords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(Whose { peer, at }, late) = *self;
        let port = port_of(peer);
        write!(f, "still waiting for queue pair {peer:#x} at {at}: ")?;
        match late {
            Late::NotConnected { own } => write!(
                f,
                "it has not connected to TCP port {own} of this host. Has the peer's program moved it to \
                 RTR? Does a firewall block TCP or UDP port {own}? (--port-range names the ports)",
                own = port_of(own)
            ),
            Late::NoTcp(Some(Errno::CONNREFUSED)) => write!(
                f,
                "UDP port {port} answers there, and TCP port {port} refuses. Has the peer's program moved \
                 it to RTR? Does a firewall block TCP? (--port-range names the ports)"
            ),
            Late::NoTcp(_) => write!(
                f,
                "UDP port {port} answers there, but TCP port {port} does not, and queue pairs need both. \
                 Does a firewall block TCP? (--port-range names the ports)"
            ),
        }
    }
}

/// That the peer understands another version of introductions than this end, and what can be done.
pub(super) struct Versions(pub u8);

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let theirs = self.0;
        if theirs < VERSION {
            write!(
                f,
                "the peer is uwarp 0.1, whose introductions (version {theirs}) prove nothing, and this end \
                 is uwarp {OWN}, which connects by number to 0.2 or newer only: install uwarp {OWN} there"
            )
        } else {
            write!(
                f,
                "the peer is a newer uwarp, whose introductions have version {theirs}, and this end is uwarp \
                 {OWN}, which understands version {VERSION}: install the peer's uwarp here"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use uwarp_proto::setup::Rejection;

    use super::*;
    use crate::event::EventKind;

    #[test]
    fn what_the_tcp_port_says_is_told_apart() {
        let rejected = |private_data: &[u8]| {
            Report::Rejected(Rejection { enhanced: None, private_data: private_data.to_vec() })
        };
        let failed = |errno| Report::Failed { kind: EventKind::Rejected, errno, begun: true };
        for (how, heard) in [
            (rejected(&TurnedAway::NoProof.to_bytes()), Heard::Understood),
            (rejected(b"uQP\x03\0\0\0\x07"), Heard::Version(3)),
            (rejected(b"uQP\x01\0\0\0\x07"), Heard::Version(1)),
            (rejected(b""), Heard::Other),
            (failed(Errno::CONNRESET), Heard::Closed),
            (failed(Errno::CONNREFUSED), Heard::Refused),
            (failed(Errno::TIMEDOUT), Heard::Nothing),
            (failed(Errno::HOSTUNREACH), Heard::Nothing),
            (failed(Errno::PROTO), Heard::Other),
        ] {
            assert_eq!(Heard::from(&how), heard);
        }
    }

    #[test]
    fn words_name_both_versions_and_the_remedy() {
        let whose = Whose { peer: 0x51_3b00, at: IpAddr::from([127, 0, 0, 1]) };
        let old = Words(whose, Heard::Closed).to_string();
        assert_eq!(
            old,
            format!(
                "cannot connect to queue pair 0x513b00 at 127.0.0.1: it is uwarp 0.1, or no uwarp (TCP port \
                 20795 closes each connection without an answer, and UDP port 20795 does not answer). This \
                 end is uwarp {OWN}, which connects by number to 0.2 or newer only: install uwarp {OWN} there"
            )
        );
        for (theirs, what) in [(1, "is uwarp 0.1"), (3, "is a newer uwarp")] {
            let words = Words(whose, Heard::Version(theirs)).to_string();
            for part in [what, &format!("version {theirs}"), &format!("this end is uwarp {OWN}"), ": install"]
            {
                assert!(words.contains(part), "{words}");
            }
        }
    }
}
