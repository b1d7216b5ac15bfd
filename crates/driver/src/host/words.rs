//! What two processes of one host say to each other over a Unix socket before they share memory.
//!
//! ```text
//!   initiator                                        responder
//!   ── Join { nonce, addresses, slab, lane } ──────▶  by the nonce it finds the queue pair
//!      with the first one: board, bell; with a new slab: the slab
//!   ◀────────── Answer { nonce, refused or not } ──   with the first one: board, bell
//! ```
//!
//! Both are of one length each, in the byte order of the host, and of one version: a peer of another one has
//! another magic number, and the stream stays with TCP.

use std::net::{IpAddr, SocketAddr};

/// Asks for a lane instead of a connection, or beside two UDP ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Join {
    /// Went over the connection.
    pub nonce: [u8; 16],
    /// The connection's ends, as the initiator sees them: its own, the responder's.
    pub ends: [SocketAddr; 2],
    /// Which of the slabs that were passed over this socket.
    pub slab: u32,
    pub lane: u32,
    /// Descriptors come with it: board and bell.
    pub first: bool,
    /// A descriptor comes with it, behind those: the slab.
    pub new_slab: bool,
    /// The lane is for datagrams between two ports, and the nonce is a word that went by UDP.
    pub datagrams: bool,
}

/// Why a stream stays with TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The responder's process is not found by its name: it is on another host, or in another network
    /// namespace.
    NotHere,
    /// It belongs to another user.
    AnotherUser,
    /// It does not know the connection: a proxy or address translation lies between, or it has ended.
    NotOurs,
    /// A limit of descriptors or memory, or the system refuses.
    NoResources,
    /// It speaks another version.
    Version,
    /// No answer in time.
    Silent,
    /// No answer, and it hears no more: it ends, has no descriptors or memory left, or does not understand.
    Closed,
    /// The rules of this process say so.
    Setting,
    /// The rules of the peer's process say so.
    TheirSetting,
    /// The responder has offered none.
    NotOffered,
    /// The initiator has decided so; it knows why.
    Initiator,
    /// The peer has broken the rules of the memory.
    Broken,
    /// The program must not share memory: it has more rights than its user, cannot be looked at, or is in a
    /// sandbox.
    Sandbox,
    /// The same of the peer's program, which had offered it before.
    TheirSandbox,
    /// Reliable datagrams are required, and the connection came over TCP.
    Datagrams,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::NotHere => "the peer's process is not in this network namespace",
            Self::AnotherUser => "the peer's process belongs to another user",
            Self::NotOurs => "the peer's process does not know this connection (is a proxy between?)",
            Self::NoResources => "no descriptors or memory are left for it",
            Self::Version => "the peer is of another version",
            Self::Silent => "the peer's process has not answered in time",
            Self::Closed => {
                "the peer's process has not answered: it ends, has no descriptors or memory left for it, \
                 or is of another version"
            }
            Self::Setting => "UWARP_LINK says so here",
            Self::TheirSetting => "UWARP_LINK says so at the peer",
            Self::NotOffered => {
                "memory was not offered: UWARP_LINK=tcp or UWARP_PEER=off there, an older version, too much \
                 private data, or no process of this host"
            }
            Self::Initiator => "the end that has connected has chosen it; its log at level info says why",
            Self::Datagrams => "the peer has connected over TCP",
            Self::Broken => "the peer has written nonsense into the memory",
            Self::Sandbox => {
                "this program has more rights than its user, cannot be traced, or has a sandbox of its own"
            }
            Self::TheirSandbox => "the peer's program cannot be traced any more",
        })
    }
}

const JOIN: [u8; 4] = *b"uwJ1";
const ANSWER: [u8; 4] = *b"uwA1";
const FIRST: u32 = 1;
const NEW_SLAB: u32 = 2;
const DATAGRAMS: u32 = 4;
/// What an answer says: the reasons that a responder may have.
const ANSWERS: [(u32, Option<Why>); 6] = [
    (0, None),
    (1, Some(Why::AnotherUser)),
    (2, Some(Why::NotOurs)),
    (3, Some(Why::NoResources)),
    (4, Some(Why::TheirSetting)),
    // Who does not know it hears that no resources are left.
    (5, Some(Why::TheirSandbox)),
];

impl Join {
    pub const LEN: usize = 4 + 4 + 16 + 4 + 4 + 2 * END;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let flags = [(self.first, FIRST), (self.new_slab, NEW_SLAB), (self.datagrams, DATAGRAMS)];
        let flags = flags.iter().filter(|(is, _)| *is).fold(0, |all, (_, flag)| all | flag);
        let parts = JOIN
            .into_iter()
            .chain(flags.to_ne_bytes())
            .chain(self.nonce)
            .chain(self.slab.to_ne_bytes())
            .chain(self.lane.to_ne_bytes())
            .chain(self.ends.iter().flat_map(|end| end_bytes(*end)));
        out.iter_mut().zip(parts).for_each(|(to, from)| *to = from);
        out
    }

    /// `None`: it is none of this version.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (flags, rest) = rest.split_first_chunk()?;
        let (nonce, rest) = rest.split_first_chunk()?;
        let (slab, rest) = rest.split_first_chunk()?;
        let (lane, rest) = rest.split_first_chunk()?;
        let (own, rest) = rest.split_first_chunk()?;
        let peer = rest.first_chunk()?;
        let flags = u32::from_ne_bytes(*flags);
        (*magic == JOIN).then_some(Self {
            nonce: *nonce,
            ends: [end_of(own), end_of(peer)],
            slab: u32::from_ne_bytes(*slab),
            lane: u32::from_ne_bytes(*lane),
            first: flags & FIRST != 0,
            new_slab: flags & NEW_SLAB != 0,
            datagrams: flags & DATAGRAMS != 0,
        })
    }
}

/// The answer to a [`Join`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    pub nonce: [u8; 16],
    pub refused: Option<Why>,
}

impl Answer {
    pub const LEN: usize = 24;

    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        let code = ANSWERS.iter().find(|(_, why)| *why == self.refused).map_or(3, |(code, _)| *code);
        out[..4].copy_from_slice(&ANSWER);
        out[4..8].copy_from_slice(&code.to_ne_bytes());
        out[8..].copy_from_slice(&self.nonce);
        out
    }

    /// `None`: it is none of this version.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (code, rest) = rest.split_first_chunk()?;
        let nonce = rest.first_chunk()?;
        let code = u32::from_ne_bytes(*code);
        let known = ANSWERS.iter().find(|(known, _)| *known == code);
        let refused = known.map_or(Some(Why::NoResources), |(_, why)| *why);
        (*magic == ANSWER).then_some(Self { nonce: *nonce, refused })
    }
}

/// Bytes of an address with its port.
const END: usize = 18;

fn end_bytes(end: SocketAddr) -> [u8; END] {
    let mut out = [0; END];
    let ip = match end.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    out[..16].copy_from_slice(&ip.octets());
    out[16..].copy_from_slice(&end.port().to_be_bytes());
    out
}

fn end_of(bytes: &[u8; END]) -> SocketAddr {
    let mut ip = [0; 16];
    ip.copy_from_slice(&bytes[..16]);
    SocketAddr::new(IpAddr::V6(ip.into()).to_canonical(), u16::from_be_bytes([bytes[16], bytes[17]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_go_there_and_back() {
        for (first, new_slab) in [(true, true), (false, false), (false, true)] {
            let ends = ["127.0.0.1:7".parse().unwrap(), "[2001:db8::1]:65535".parse().unwrap()];
            let datagrams = first != new_slab;
            let join = Join { nonce: [7; 16], ends, slab: 3, lane: 63, first, new_slab, datagrams };
            assert_eq!(Join::parse(&join.to_bytes()), Some(join));
            assert_eq!(Join::parse(&join.to_bytes()[1..]), None);
        }
        for (_, refused) in ANSWERS {
            let answer = Answer { nonce: [9; 16], refused };
            assert_eq!(Answer::parse(&answer.to_bytes()), Some(answer));
        }
        let mut other = Answer { nonce: [0; 16], refused: None }.to_bytes();
        other[3] = b'2';
        assert_eq!((Answer::parse(&other), Answer::parse(b"")), (None, None));
        other[3] = b'1';
        other[4] = 99;
        assert_eq!(Answer::parse(&other).unwrap().refused, Some(Why::NoResources));
    }

    #[test]
    fn a_mapped_address_is_that_address() {
        let mapped: SocketAddr = "[::ffff:10.0.0.1]:5".parse().unwrap();
        assert_eq!(end_of(&end_bytes(mapped)), "10.0.0.1:5".parse().unwrap());
    }
}
