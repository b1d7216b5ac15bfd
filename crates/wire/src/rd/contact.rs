//! What two processes say before they have an exchange (docs/rd.md section 4).
//!
//! ```text
//! Hello, 96 bytes in all: padding follows, so that no answer is longer
//! +---------------+-----------------------------------------------+
//! |Highest version|                   Reserved                    |
//! +---------------+-----------------------------------------------+
//! |                           Features                            |
//! +---------------------------------------------------------------+
//!
//! Challenge, 52 bytes in all
//! +---------------+---------------+-------------------------------+
//! |Highest version|   Reserved    |           Home port           |
//! +---------------+---------------+-------------------------------+
//! |                           Features                            |
//! +---------------------------------------------------------------+
//! |                      Cookie, 128 bits                         |
//! +-------------------------------+-------------------------------+
//! |    Credit, units of 4 KiB     |        Largest packet         |
//! +-------------------------------+-------------------------------+
//!
//! Open: these 24 bytes, then chunks
//! +---------------------------------------------------------------+
//! |                        Token, 64 bits                         |
//! +---------------------------------------------------------------+
//! |               Lower half of the cookie, 64 bits               |
//! +-------------------------------+---------------+---------------+
//! |          Asked port           |    Version    |   Reserved    |
//! +-------------------------------+---------------+---------------+
//! |                           Features                            |
//! +---------------------------------------------------------------+
//! ```
//!
//! The upper half of the cookie is the key of the Open, and from then on the responder's key. The lower half
//! says when the cookie was made, so that its age needs no state.

use core::fmt;

use super::{Header, Kind};
use crate::datagram::{self, CRC_LEN};
use crate::{Truncated, be16, be32, be64, head};

/// Feature: the process takes STREAM and its companions.
pub const STREAMS: u32 = 1;

/// Proof that its bearer received at an address when it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Cookie {
    /// A keyed hash of address, ports, token and time; the responder's key of the exchange.
    pub key: u64,
    /// When it was made, in microseconds of its maker's clock.
    pub made: u64,
}

/// The first packet to a process that is not known. Its key is the sender's token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hello {
    /// The highest RD version that the sender speaks.
    pub highest: u8,
    /// Features that the sender offers, one bit each.
    pub features: u32,
}

impl Hello {
    /// Bytes of the body without its padding.
    pub const LEN: usize = 8;
    /// Bytes of the whole packet, with padding and CRC.
    pub const PACKET_LEN: usize = 96;

    /// Reads the body of a packet. `None`: it is shorter than [`Self::PACKET_LEN`], so it gets no answer.
    pub fn parse(body: &[u8]) -> Option<Self> {
        let hello = body.first_chunk::<{ Self::LEN }>()?;
        let is_padded = body.len() + Header::LEN + CRC_LEN >= Self::PACKET_LEN;
        is_padded.then(|| Hello { highest: hello[0], features: be32(&hello[4..8]) })
    }

    /// The whole packet.
    pub fn to_packet(&self, header: &Header) -> [u8; Self::PACKET_LEN] {
        let mut out = [0; Self::PACKET_LEN];
        out[..Header::LEN].copy_from_slice(&Header { kind: Kind::Hello, ..*header }.to_bytes());
        out[Header::LEN] = self.highest;
        out[Header::LEN + 4..Header::LEN + 8].copy_from_slice(&self.features.to_be_bytes());
        datagram::seal(&mut out);
        out
    }
}

/// The answer to a [`Hello`]. Its key is the Hello's. Its sender keeps nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Challenge {
    /// The highest RD version that the sender speaks.
    pub highest: u8,
    /// The port of the sender to which the Open goes.
    pub home_port: u16,
    /// Features that the sender has.
    pub features: u32,
    /// To be returned in the Open.
    pub cookie: Cookie,
    /// How much the other end may have in flight at first, in units of 4 KiB.
    pub credit: u16,
    /// The longest packet that the sender takes, in bytes of UDP payload.
    pub largest: u16,
}

impl Challenge {
    /// Bytes of the body.
    pub const LEN: usize = 28;
    /// Bytes of the whole packet.
    pub const PACKET_LEN: usize = Header::LEN + Self::LEN + CRC_LEN;

    /// Reads the body of a packet.
    pub fn parse(body: &[u8]) -> Result<Self, Truncated> {
        let body = head::<{ Self::LEN }>(body)?;
        Ok(Challenge {
            highest: body[0],
            home_port: be16(&body[2..4]),
            features: be32(&body[4..8]),
            cookie: Cookie { key: be64(&body[8..16]), made: be64(&body[16..24]) },
            credit: be16(&body[24..26]),
            largest: be16(&body[26..28]),
        })
    }

    /// The body.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = self.highest;
        out[2..4].copy_from_slice(&self.home_port.to_be_bytes());
        out[4..8].copy_from_slice(&self.features.to_be_bytes());
        out[8..16].copy_from_slice(&self.cookie.key.to_be_bytes());
        out[16..24].copy_from_slice(&self.cookie.made.to_be_bytes());
        out[24..26].copy_from_slice(&self.credit.to_be_bytes());
        out[26..28].copy_from_slice(&self.largest.to_be_bytes());
        out
    }

    /// The whole packet.
    pub fn to_packet(&self, header: &Header) -> [u8; Self::PACKET_LEN] {
        let mut out = [0; Self::PACKET_LEN];
        out[..Header::LEN].copy_from_slice(&Header { kind: Kind::Challenge, ..*header }.to_bytes());
        out[Header::LEN..Header::LEN + Self::LEN].copy_from_slice(&self.to_bytes());
        datagram::seal(&mut out);
        out
    }
}

/// What an Open begins with. Its key is the upper half of the cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Open {
    /// The initiator's key of the exchange: the token of its Hello.
    pub token: u64,
    /// The lower half of the cookie.
    pub made: u64,
    /// The port to which the Hello went.
    pub asked_port: u16,
    /// The RD version that both ends use from now on.
    pub version: u8,
    /// The features that both ends use from now on.
    pub features: u32,
}

impl Open {
    /// Bytes on the wire.
    pub const LEN: usize = 24;

    /// Reads the body of a packet; the chunks follow after [`Self::LEN`] bytes.
    pub fn parse(body: &[u8]) -> Result<Self, Truncated> {
        let body = head::<{ Self::LEN }>(body)?;
        Ok(Open {
            token: be64(&body[..8]),
            made: be64(&body[8..16]),
            asked_port: be16(&body[16..18]),
            version: body[18],
            features: be32(&body[20..24]),
        })
    }

    /// As bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.token.to_be_bytes());
        out[8..16].copy_from_slice(&self.made.to_be_bytes());
        out[16..18].copy_from_slice(&self.asked_port.to_be_bytes());
        out[18] = self.version;
        out[20..24].copy_from_slice(&self.features.to_be_bytes());
        out
    }
}

/// `Hello v1 features=0x0`
impl fmt::Display for Hello {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hello v{} features={:#x}", self.highest, self.features)
    }
}

/// `Challenge v1 features=0x0 home=20000 credit=8 largest=1472`; the cookie is for one reader.
impl fmt::Display for Challenge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Challenge { highest, features, home_port, credit, largest, .. } = self;
        write!(f, "Challenge v{highest} features={features:#x} home={home_port}")?;
        write!(f, " credit={credit} largest={largest}")
    }
}

/// `Open v1 features=0x0 asked=20000`
impl fmt::Display for Open {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Open v{} features={:#x} asked={}", self.version, self.features, self.asked_port)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::string::ToString;

    use super::super::Packet;
    use super::*;

    pub(in crate::rd) const HEADER: Header = Header {
        version: 1,
        kind: Kind::Packet,
        source_port: 20_001,
        destination_port: 20_000,
        key: 0x0102_0304_0506_0708,
        number: 0,
    };

    #[test]
    fn golden_hello() {
        let hello = Hello { highest: 1, features: 0xA0B0_C0D0 };
        let bytes = hello.to_packet(&HEADER);
        assert_eq!(bytes[..8], [1, 0x4E, 0x21, 1, 0x41, 0x4E, 0x20, 0]);
        assert_eq!(bytes[8..28], [1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0, 1, 0, 0, 0, 0xA0, 0xB0, 0xC0, 0xD0]);
        assert_eq!(bytes[28..92], [0; 64]);
        let packet = Packet::parse(&bytes).unwrap();
        assert!(packet.is_intact());
        assert_eq!(Hello::parse(packet.body()), Some(hello));
        assert_eq!(hello.to_string(), "Hello v1 features=0xa0b0c0d0");
        assert_eq!(Hello::parse(&packet.body()[..71]), None, "an answer could be longer");
        assert_eq!(Hello::parse(&[1; 7]), None);
    }

    #[test]
    fn golden_challenge() {
        let cookie = Cookie { key: 0x1112_1314_1516_1718, made: 0x2122_2324_2526_2728 };
        let challenge =
            Challenge { highest: 2, home_port: 0x4E22, features: 7, cookie, credit: 0x31, largest: 1472 };
        let bytes = challenge.to_packet(&HEADER);
        assert_eq!(
            bytes[20..48],
            [
                2, 0, 0x4E, 0x22, 0, 0, 0, 7, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x21, 0x22,
                0x23, 0x24, 0x25, 0x26, 0x27, 0x28, 0, 0x31, 0x05, 0xC0,
            ]
        );
        assert_eq!((bytes[4], bytes.len()), (0x42, 52));
        const { assert!(Challenge::PACKET_LEN <= Hello::PACKET_LEN) };
        let packet = Packet::parse(&bytes).unwrap();
        assert!(packet.is_intact());
        assert_eq!(Challenge::parse(packet.body()), Ok(challenge));
        assert_eq!(Challenge::parse(&packet.body()[..27]), Err(Truncated));
        assert_eq!(challenge.to_string(), "Challenge v2 features=0x7 home=20002 credit=49 largest=1472");
    }

    #[test]
    fn golden_open() {
        let open = Open {
            token: 0x0102_0304_0506_0708,
            made: 0x1112_1314_1516_1718,
            asked_port: 0x4E20,
            version: 1,
            features: 0x0A,
        };
        let bytes = [
            1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x4E, 0x20, 1, 0, 0, 0,
            0, 0x0A,
        ];
        assert_eq!(open.to_bytes(), bytes);
        assert_eq!(Open::parse(&bytes), Ok(open));
        assert_eq!(Open::parse(&bytes[..23]), Err(Truncated));
        assert_eq!(open.to_string(), "Open v1 features=0xa asked=20000");
    }
}
