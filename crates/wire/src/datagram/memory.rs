//! How two processes of one host agree that their datagrams go by memory (docs/datagram-iwarp.md section 14).
//!
//! A process that sends to a port of its own host asks that port; the answer names the process there, among
//! Unix sockets, and has a word that only the asking port can read. Whoever shows the word there speaks for
//! that port.
//!
//! ```text
//! extension header, 20 bytes | token, 16 | name, 16 | word, 16 | CRC32c, 4 bytes
//! ```
//!
//! All are of one length, so an answer is never longer than its question.

use core::fmt;

use super::{CRC_LEN, Datagram, Header, Kind, seal};

/// A datagram about memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Memory {
    /// A number of the sender's port, 24 bits.
    pub source_qpn: u32,
    /// A number of the receiver's port, 24 bits.
    pub destination_qpn: u32,
    /// What it says.
    pub says: Says,
}

/// What a [`Memory`] says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Says {
    /// Asks the receiver for memory.
    Request {
        /// Random: the answer returns it.
        token: [u8; 16],
    },
    /// The answer: who to ask.
    Offer {
        /// That of the request.
        token: [u8; 16],
        /// Names the process.
        name: [u8; 16],
        /// Proves who asks.
        word: [u8; 16],
    },
    /// The answer: there is none.
    Refusal {
        /// That of the request.
        token: [u8; 16],
    },
    /// All datagrams behind this one are in the memory for which this word was shown.
    Begins {
        /// That of the offer.
        word: [u8; 16],
    },
}

impl Memory {
    /// Bytes of the whole datagram.
    pub const LEN: usize = Header::LEN + 3 * 16 + CRC_LEN;

    /// Reads a datagram. `None`: it is none of these. The caller checks the CRC.
    pub fn parse(datagram: &Datagram<'_>) -> Option<Self> {
        let header = datagram.header();
        let body: &[u8; 3 * 16] = datagram.body().try_into().ok()?;
        let (mut token, mut name, mut word) = ([0; 16], [0; 16], [0; 16]);
        token.copy_from_slice(&body[..16]);
        name.copy_from_slice(&body[16..32]);
        word.copy_from_slice(&body[32..]);
        let says = match header.kind() {
            Kind::MemoryRequest => Says::Request { token },
            Kind::MemoryReply if name == [0; 16] => Says::Refusal { token },
            Kind::MemoryReply => Says::Offer { token, name, word },
            Kind::MemoryBegins => Says::Begins { word },
            _ => return None,
        };
        let is_plain = header.flags == header.kind().code();
        let Header { source_qpn, destination_qpn, .. } = *header;
        is_plain.then_some(Self { source_qpn, destination_qpn, says })
    }

    /// The whole datagram, with its CRC.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        const NONE: [u8; 16] = [0; 16];
        let (kind, fields) = match self.says {
            Says::Request { token } => (Kind::MemoryRequest, [token, NONE, NONE]),
            Says::Offer { token, name, word } => (Kind::MemoryReply, [token, name, word]),
            Says::Refusal { token } => (Kind::MemoryReply, [token, NONE, NONE]),
            Says::Begins { word } => (Kind::MemoryBegins, [NONE, NONE, word]),
        };
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
        body.chunks_mut(16).zip(fields).for_each(|(to, field)| to.copy_from_slice(&field));
        seal(&mut out);
        out
    }
}

/// `MemoryRequest src=0x4e2007 dst=0x4e2107`; the words are nobody else's business.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self.says {
            Says::Request { .. } => "MemoryRequest",
            Says::Offer { .. } => "MemoryOffer",
            Says::Refusal { .. } => "MemoryRefusal",
            Says::Begins { .. } => "MemoryBegins",
        };
        write!(f, "{name} src={:#x} dst={:#x}", self.source_qpn, self.destination_qpn)
    }
}

#[cfg(test)]
mod tests {
    use std::string::ToString;

    use super::*;

    #[test]
    fn golden() {
        let (token, name, word) = ([7; 16], [8; 16], [9; 16]);
        let all = [
            (Says::Request { token }, 5, [7, 0, 0], "MemoryRequest"),
            (Says::Offer { token, name, word }, 6, [7, 8, 9], "MemoryOffer"),
            (Says::Refusal { token }, 6, [7, 0, 0], "MemoryRefusal"),
            (Says::Begins { word }, 7, [0, 0, 9], "MemoryBegins"),
        ];
        for (says, flags, fields, text) in all {
            let memory = Memory { source_qpn: 0x01_0203, destination_qpn: 0x04_0506, says };
            let bytes = memory.to_bytes();
            assert_eq!(bytes[..8], [1, 1, 2, 3, flags, 4, 5, 6]);
            assert_eq!(bytes[20..68].chunks(16).map(|field| field[0]).collect::<std::vec::Vec<_>>(), fields);
            let parse = |bytes: &[u8]| Datagram::parse(bytes).ok().and_then(|whole| Memory::parse(&whole));
            assert_eq!(parse(&bytes), Some(memory));
            assert_eq!(memory.to_string(), std::format!("{text} src=0x10203 dst=0x40506"));
            for (at, bit) in [(4, 0x80), (4, 0x40), (4, 0x20), (4, 8)] {
                let mut other = bytes;
                other[at] ^= bit;
                assert_eq!(parse(&other), None, "a flag that it does not have, another kind");
            }
            assert_eq!(parse(&bytes[..bytes.len() - 1]), None);
        }
    }
}
