//! What two ends send to agree on an upgrade: datagrams beside the connection, markers in it. All numbers are
//! in network byte order.
//!
//! ```text
//!  datagram, 104 bytes                               marker, 48 bytes
//!   0  "uwarpUPG"                                     0  nonce of the end that sends it
//!   8  version (2)                                   16  nonce of the other end
//!   9  kind: 1 HELLO, 2 WELCOME, 3 NEVER, 4 MARKED,  32  one of the words
//!      5 QUESTION
//!  10  0, 0, 0, 0, 0, 0
//!  16  nonce of the end that accepted
//!  32  nonce of the end that connected, or zeros
//!  48  address of the end that connected, as IPv6
//!  64  address of the end that accepted
//!  80  port of the end that connected
//!  82  port of the end that accepted
//!  84  0, 0, 0, 0
//!  88  with a key: a keyed hash of all this; without: zeros
//! ```
//!
//! With a key, the first 32 bytes of a marker are keyed hashes of both nonces and both addresses, so that
//! nobody makes one who has only seen the datagrams. The hash is SipHash-2-4 with 128 bits, a pseudo-random
//! function.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use siphasher::sip128::{Hasher128, SipHasher24};
use uwarp_preload::rules::Key;

const MAGIC: &[u8; 8] = b"uwarpUPG";
const VERSION: u8 = 2;

/// A number that only the two ends of a connection know.
pub type Nonce = [u8; 16];

/// What a datagram says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The end that accepted proposes an upgrade.
    Hello,
    /// The end that connected looks for the marker from here on.
    Welcome,
    /// The end that accepted sends no marker and never will.
    Never,
    /// The end that accepted has sent its marker, which may be behind many bytes.
    Marked,
    /// The end that connected asks for a HELLO with its nonce: anybody can send another one.
    Question,
}

/// A connection, as both of its ends see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// The end that connected.
    pub connected: SocketAddr,
    /// The end that accepted.
    pub accepted: SocketAddr,
}

/// A datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram {
    /// What it says.
    pub kind: Kind,
    /// Of the end that accepted.
    pub accepted: Nonce,
    /// Of the end that connected; zeros if that is not known.
    pub connected: Nonce,
    /// Which connection it speaks of.
    pub ends: Ends,
}

fn ip_bytes(ip: IpAddr) -> [u8; 16] {
    match ip.to_canonical() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
        IpAddr::V6(ip) => ip.octets(),
    }
}

/// A hash of these parts, of which all but the last have a fixed length.
fn hash(key: &Key, parts: &[&[u8]]) -> [u8; 16] {
    let mut hasher = SipHasher24::new_with_key(&key.0);
    parts.iter().for_each(|part| std::hash::Hasher::write(&mut hasher, part));
    hasher.finish128().as_bytes()
}

fn read<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

impl Datagram {
    /// Its length.
    pub const LEN: usize = 104;
    /// Where the hash is.
    const TAG: usize = 88;

    /// As bytes. `key`: of the rule.
    pub fn to_bytes(self, key: Option<&Key>) -> [u8; Self::LEN] {
        let kind = match self.kind {
            Kind::Hello => 1,
            Kind::Welcome => 2,
            Kind::Never => 3,
            Kind::Marked => 4,
            Kind::Question => 5,
        };
        let ports = [self.ends.connected.port().to_be_bytes(), self.ends.accepted.port().to_be_bytes()];
        let parts: [&[u8]; 10] = [
            MAGIC,
            &[VERSION, kind, 0, 0, 0, 0, 0, 0],
            &self.accepted,
            &self.connected,
            &ip_bytes(self.ends.connected.ip()),
            &ip_bytes(self.ends.accepted.ip()),
            &ports[0],
            &ports[1],
            &[0; 4],
            &[0; Self::LEN - Self::TAG],
        ];
        let mut bytes = [0; Self::LEN];
        for (to, from) in bytes.iter_mut().zip(parts.into_iter().flatten()) {
            *to = *from;
        }
        if let (Some(key), Some((covered, tag))) = (key, bytes.split_at_mut_checked(Self::TAG)) {
            tag.copy_from_slice(&hash(key, &[b"datagram", covered]));
        }
        bytes
    }

    /// Whether it was made with this key, or without one if there is none.
    pub fn is_made_with(bytes: &[u8], key: Option<&Key>) -> bool {
        let Some((covered, tag)) = bytes.split_at_checked(Self::TAG) else { return false };
        let wanted = key.map_or([0; 16], |key| hash(key, &[b"datagram", covered]));
        // In a time that does not say how much of it is right.
        tag.len() == wanted.len() && tag.iter().zip(wanted).fold(0, |all, (a, b)| all | (a ^ b)) == 0
    }

    /// From bytes. A datagram of another version has another meaning, so it is none.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != Self::LEN || read(bytes, 0)? != *MAGIC || bytes.get(8) != Some(&VERSION) {
            return None;
        }
        let kind = match bytes.get(9)? {
            1 => Kind::Hello,
            2 => Kind::Welcome,
            3 => Kind::Never,
            4 => Kind::Marked,
            5 => Kind::Question,
            _ => return None,
        };
        let end = |ip, port| -> Option<SocketAddr> {
            let ip = Ipv6Addr::from(read::<16>(bytes, ip)?);
            Some(SocketAddr::new(IpAddr::V6(ip).to_canonical(), u16::from_be_bytes(read(bytes, port)?)))
        };
        let ends = Ends { connected: end(48, 80)?, accepted: end(64, 82)? };
        Some(Self { kind, accepted: read(bytes, 16)?, connected: read(bytes, 32)?, ends })
    }
}

impl Ends {
    /// Whether these are the same addresses. The scope of a link-local address is each end's own.
    pub fn are(&self, other: &Self) -> bool {
        let key = |end: SocketAddr| (ip_bytes(end.ip()), end.port());
        key(self.connected) == key(other.connected) && key(self.accepted) == key(other.accepted)
    }
}

/// What a marker says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// Of the end that accepted: these were my last plain bytes, if you agree.
    Mark,
    /// Of the end that connected: these were my last plain bytes.
    Yes,
    /// Of the end that connected: both of us go on with plain bytes.
    No,
}

/// The nonces of a marker, by which it is found.
pub type Pattern = [u8; 32];

/// The nonces of the markers that an end sends.
pub fn pattern(own: &Nonce, peers: &Nonce, ends: &Ends, key: Option<&Key>) -> Pattern {
    let halves = match key {
        None => [*own, *peers],
        Some(key) => {
            let (connected, accepted) = (ip_bytes(ends.connected.ip()), ip_bytes(ends.accepted.ip()));
            let ports = [ends.connected.port().to_be_bytes(), ends.accepted.port().to_be_bytes()];
            let of =
                |half: &[u8; 8]| hash(key, &[half, own, peers, &connected, &accepted, ports.as_flattened()]);
            [of(b"marker 1"), of(b"marker 2")]
        }
    };
    let mut pattern = [0; 32];
    for (to, from) in pattern.iter_mut().zip(halves.as_flattened()) {
        *to = *from;
    }
    pattern
}

impl Word {
    /// Its length.
    pub const LEN: usize = 16;

    /// As bytes.
    pub const fn bytes(self) -> &'static [u8; Self::LEN] {
        match self {
            Self::Mark => b"\nuwarp-upgrade1\n",
            Self::Yes => b"\nuwarp-agreed-1\n",
            Self::No => b"\nuwarp-refused1\n",
        }
    }

    /// From bytes.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        [Self::Mark, Self::Yes, Self::No].into_iter().find(|word| word.bytes() == bytes)
    }
}

/// The length of a marker.
pub const MARKER_LEN: usize = 32 + Word::LEN;

/// A marker.
pub fn marker(pattern: &Pattern, word: Word) -> [u8; MARKER_LEN] {
    let mut marker = [0; MARKER_LEN];
    for (to, from) in marker.iter_mut().zip(pattern.iter().chain(word.bytes())) {
        *to = *from;
    }
    marker
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Datagram {
        Datagram {
            kind: Kind::Hello,
            accepted: [7; 16],
            connected: [0; 16],
            ends: Ends {
                connected: "10.0.0.1:40000".parse().unwrap(),
                accepted: "[fd00::2]:80".parse().unwrap(),
            },
        }
    }

    #[test]
    fn datagrams_come_back_as_they_were() {
        for kind in [Kind::Hello, Kind::Welcome, Kind::Never, Kind::Marked, Kind::Question] {
            let datagram = Datagram { kind, ..hello() };
            for key in [None, Some(&Key([5; 16]))] {
                assert_eq!(Datagram::parse(&datagram.to_bytes(key)), Some(datagram));
            }
        }
        let mapped: SocketAddr = "[::ffff:10.0.0.1]:40000".parse().unwrap();
        assert!(hello().ends.are(&Ends { connected: mapped, ..hello().ends }));
        assert!(!hello().ends.are(&Ends { connected: "10.0.0.1:1".parse().unwrap(), ..hello().ends }));
    }

    #[test]
    fn what_is_no_datagram_is_none() {
        let bytes = hello().to_bytes(None);
        assert_eq!(Datagram::parse(&bytes[..103]), None);
        assert_eq!(Datagram::parse(&[&bytes[..], &[0]].concat()), None);
        for at in [0, 8, 9] {
            let mut other = bytes;
            other[at] ^= 0x40;
            assert_eq!(Datagram::parse(&other), None, "byte {at}");
        }
    }

    #[test]
    fn who_does_not_have_the_key_makes_no_datagram_and_no_marker() {
        let (key, other) = (Key([5; 16]), Key([6; 16]));
        let bytes = hello().to_bytes(Some(&key));
        assert!(Datagram::is_made_with(&bytes, Some(&key)));
        for wrong in [None, Some(&other)] {
            assert!(!Datagram::is_made_with(&bytes, wrong));
            assert!(!Datagram::is_made_with(&hello().to_bytes(wrong), Some(&key)));
        }
        assert!(!Datagram::is_made_with(&bytes[..103], Some(&key)));
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes;
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(!Datagram::is_made_with(&changed, Some(&key)), "bit {bit}");
        }
        let ends = hello().ends;
        let elsewhere = Ends { accepted: "10.0.0.9:80".parse().unwrap(), ..ends };
        let patterns = [
            pattern(&[1; 16], &[2; 16], &ends, Some(&key)),
            pattern(&[2; 16], &[1; 16], &ends, Some(&key)),
            pattern(&[1; 16], &[3; 16], &ends, Some(&key)),
            pattern(&[1; 16], &[2; 16], &elsewhere, Some(&key)),
            pattern(&[1; 16], &[2; 16], &ends, Some(&other)),
            pattern(&[1; 16], &[2; 16], &ends, None),
        ];
        for (at, pattern) in patterns.iter().enumerate() {
            assert!(patterns.iter().skip(at + 1).all(|other| other != pattern));
        }
    }

    #[test]
    fn words_come_back_as_they_were() {
        for word in [Word::Mark, Word::Yes, Word::No] {
            assert_eq!(Word::parse(word.bytes()), Some(word));
        }
        assert_eq!(Word::parse(b"0123456789abcdef"), None);
    }
}
