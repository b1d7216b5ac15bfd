//! What a user can read of each connection that a rule chose, with `UWARP_LOG=info`: whether iWARP carries
//! it, and if not, why.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use super::conn::Conn;
use super::machine::Role;
use super::wire::Ends;
use crate::sys;

/// Why a connection stays TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// No HELLO within the time for it.
    NotAsked,
    /// HELLOs were refused.
    Refused,
    /// Nothing has come back.
    NoAnswer,
    /// The other end has decided so.
    Peer,
    /// A call or a fork that this library cannot follow.
    Vetoed,
    /// There is no descriptor, memory or thread for a stream.
    NoRoom,
    /// A rule of `UWARP_LINK` says that it goes by memory or by reliable datagrams.
    OtherLink,
    /// The UDP port of the connection's number is not to be had.
    NoUdpPort,
    /// Another process has the name of the connection.
    NoName,
    /// Another user has the name of the connection, and is shown nothing.
    OtherUser,
    /// The other end is on another host, and the rule does not say who is believed there.
    OtherHost,
    /// It has ended before.
    Ended,
}

impl Why {
    fn text(self) -> &'static str {
        match self {
            Self::NotAsked => {
                "the other end has not asked for 5 s: it is under no rule, its program has not used the \
                 connection, or UDP does not pass"
            }
            Self::Refused => "the other end is under no rule, or its program has not used the connection",
            Self::NoAnswer => {
                "the other end has not answered for 8 s: it is under no rule, its program has not used the \
                 connection, or UDP does not pass"
            }
            Self::Peer => "the other end decided to stay TCP",
            Self::Vetoed => {
                "this program made a call that iWARP cannot follow (fork, dup, shutdown or another one of \
                 docs/sockets.md) before both ends had agreed"
            }
            Self::NoRoom => "no descriptor, memory or thread is left for a stream",
            Self::OtherLink => {
                "UWARP_LINK requires memory or reliable datagrams for it, and what has begun as TCP cannot \
                 go that way"
            }
            Self::NoUdpPort => "the UDP port with the number of its TCP port is in use",
            Self::NoName => "another process has the Unix socket with the name of this connection",
            Self::OtherUser => {
                "another user has the Unix socket with the name of this connection, or the two users have no \
                 numbers of their own in this user namespace"
            }
            Self::OtherHost => {
                "the other end is on another host, where anybody could speak for it: give the rules of both \
                 ends key=FILE, or no-other-users (docs/sockets.md)"
            }
            Self::Ended => "it ended before both ends had agreed",
        }
    }
}

/// Whether `UWARP_LOG` asks for lines of this library at this level.
pub fn is_wanted() -> bool {
    static WANTED: OnceLock<bool> = OnceLock::new();
    *WANTED.get_or_init(|| {
        let wanted = |level: &str| ["info", "debug", "trace"].contains(&level);
        let filter = std::env::var("UWARP_LOG").unwrap_or_default();
        let directives = || filter.split(',').map(|part| part.split_once('=').unwrap_or(("", part)));
        let of = |name: &str| {
            directives().filter(|(target, _)| *target == name).map(|(_, level)| level).next_back()
        };
        of("uwarp_sockets").or(of("")).is_some_and(wanted)
    })
}

/// This connection is iWARP's from here on, or stays TCP. Counts once: a close and a decision may meet.
pub fn decided(conn: &Conn, why: Option<Why>) {
    if is_wanted() && !conn.said.swap(true, Ordering::Relaxed) {
        let (role, ends) = {
            let agreement = conn.agreement.lock();
            (agreement.role(), agreement.ends())
        };
        say(role, ends, why);
    }
}

/// The same of a connection for which nothing has been made.
pub fn never_begun(role: Role, ends: Ends, why: Why) {
    if is_wanted() {
        say(role, ends, Some(why));
    }
}

fn say(role: Role, ends: Ends, why: Option<Why>) {
    let (own, way, peer) = match role {
        Role::Connected => (ends.connected, "to", ends.accepted),
        Role::Accepted => (ends.accepted, "from", ends.connected),
    };
    match why {
        None => sys::inform(&format!("{own} {way} {peer}: iWARP")),
        Some(why) => sys::inform(&format!("{own} {way} {peer}: TCP, as {}", why.text())),
    }
}
