//! Proof that a process owns the port of its queue pair numbers (docs/datagram-iwarp.md section 13).
//!
//! Whoever wants to connect a queue pair by number sends a [`ProofRequest`](super::Kind::ProofRequest) from
//! the UDP port of its own number to the UDP port of the peer's. The answer contains a cookie, which only
//! the owner of the first port can read; the connection's introduction shows it.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                   extension header, 20 bytes                  |
//! +---------------------------------------------------------------+
//! |                                                               |
//! +                             Token                             +
//! |                                                               |
//! +---------------------------------------------------------------+
//! |                                                               |
//! +            Cookie: when it was made; its hash                 +
//! |                       (0 in a request)                        |
//! +                                                               +
//! |                                                               |
//! +                                                               +
//! |                                                               |
//! +---------------------------------------------------------------+
//! |                            CRC32c                             |
//! +---------------------------------------------------------------+
//! ```
//!
//! Both are of the same length, so an answer is never longer than its question. The token is random, and the
//! answer returns it: nobody who has not seen the question can make an answer.

use core::fmt;

use super::{CRC_LEN, Datagram, Header, Kind, seal};
use crate::be64;
use crate::introduction::Cookie;

/// A request for a cookie, or the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Proof {
    /// The sender's queue pair, 24 bits.
    pub source_qpn: u32,
    /// The receiver's queue pair, 24 bits.
    pub destination_qpn: u32,
    /// Chosen by who asks.
    pub token: u64,
    /// `None`: this is a request.
    pub cookie: Option<Cookie>,
}

impl Proof {
    /// Bytes of the whole datagram.
    pub const LEN: usize = Header::LEN + Self::TOKEN_LEN + Cookie::LEN + CRC_LEN;

    const TOKEN_LEN: usize = 8;

    /// Reads a datagram. `None`: it is none of these two, or not as long as they are. The caller checks the
    /// CRC.
    pub fn parse(datagram: &Datagram<'_>) -> Option<Self> {
        let header = datagram.header();
        let (token, cookie) = datagram.body().split_first_chunk::<{ Self::TOKEN_LEN }>()?;
        let cookie = Cookie::from_bytes(<&[u8; Cookie::LEN]>::try_from(cookie).ok()?);
        let cookie = match header.kind() {
            Kind::ProofRequest => None,
            Kind::ProofReply => Some(cookie),
            _ => return None,
        };
        let is_plain = header.flags == header.kind().code();
        is_plain.then(|| Self {
            source_qpn: header.source_qpn,
            destination_qpn: header.destination_qpn,
            token: be64(token),
            cookie,
        })
    }

    /// The whole datagram, with its CRC.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let kind = if self.cookie.is_some() { Kind::ProofReply } else { Kind::ProofRequest };
        let header = Header {
            flags: kind.code(),
            source_qpn: self.source_qpn,
            destination_qpn: self.destination_qpn,
            qkey: 0,
            immediate: 0,
            incarnation: 0,
        };
        let mut out = [0; Self::LEN];
        let (head, body) = out.split_at_mut(Header::LEN);
        head.copy_from_slice(&header.to_bytes());
        body[..Self::TOKEN_LEN].copy_from_slice(&self.token.to_be_bytes());
        let cookie = self.cookie.unwrap_or(Cookie::NONE).to_bytes();
        body[Self::TOKEN_LEN..Self::TOKEN_LEN + Cookie::LEN].copy_from_slice(&cookie);
        seal(&mut out);
        out
    }
}

/// `ProofRequest src=0x4e2007 dst=0x4e2107`; the token and the cookie are nobody else's business.
impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.cookie.is_some() { "ProofReply" } else { "ProofRequest" };
        write!(f, "{name} src={:#x} dst={:#x}", self.source_qpn, self.destination_qpn)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn golden() {
        let request = Proof {
            source_qpn: 0x01_0203,
            destination_qpn: 0x04_0506,
            token: 0x1112_1314_1516_1718,
            cookie: None,
        };
        let bytes = request.to_bytes();
        assert_eq!(bytes[..8], [1, 1, 2, 3, 3, 4, 5, 6]);
        assert_eq!(bytes[20..28], [0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(bytes[28..44], [0; 16]);
        let parse = |bytes: &[u8]| Datagram::parse(bytes).ok().and_then(|datagram| Proof::parse(&datagram));
        assert_eq!(parse(&bytes), Some(request));
        let reply = Proof { cookie: Some(Cookie { made: 1, hash: 2 }), ..request };
        let answer = reply.to_bytes();
        assert_eq!((answer.len(), answer[4], answer[35], answer[43]), (bytes.len(), 4, 1, 2));
        assert_eq!(parse(&answer), Some(reply));
        assert_eq!(reply.to_string(), "ProofReply src=0x10203 dst=0x40506");
        for (at, bit) in [(4, 0x80), (4, 0x40), (4, 0x20)] {
            let mut other = answer;
            other[at] ^= bit;
            assert_eq!(parse(&other), None, "a flag that it does not have");
        }
        assert_eq!(parse(&bytes[..bytes.len() - 1]), None);
    }
}
