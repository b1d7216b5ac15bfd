//! What the two ends say to each other over the program's connection, before there is another one.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------------------------------------------------------+
//! |                   "uwarp verbs", then version 1               |
//! |                         (12 bytes)                            |
//! +---------------+---------------+-------------------------------+
//! |  Role (1, 2)  |       0       |  Port of rdma_cm (responder)  |
//! +---------------+---------------+-------------------------------+
//! |                         Nonce (8 bytes)                       |
//! +-------------------------------+-------------------------------+
//! |   Bytes of private data       |    the program's private data …
//! +-------------------------------+-----
//! ```
//!
//! Numbers are in network byte order. The initiator sends a greeting, and the responder answers: so one that
//! meets a peer of another kind sends it nothing. The initiator connects to the responder's
//! port, with the responder's nonce in its request. When that connection is there, each end sends one more
//! byte ([`READY`]), and nothing on the new connection before it has the peer's: siw as responder does not
//! see what comes right behind its reply, and as initiator it takes that for a part of the reply
//! (conformance/siw/README.md).

use rustix::io::Errno;
use uwarp_rsocket::upgrade::{MAX_PRIVATE_DATA, Role};

const MAGIC: [u8; 12] = *b"uwarp verbs\x01";
/// Bytes of a greeting without private data.
const FIXED: usize = 26;
/// The second message.
pub const READY: u8 = 0x52;

/// Names this connection in the request on the other one, so that no stranger takes its place.
pub type Nonce = [u8; 8];

/// The first message of an end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Greeting {
    pub role: Role,
    /// Where the responder listens; 0 from an initiator.
    pub port: u16,
    pub nonce: Nonce,
    /// The program's.
    pub private_data: Vec<u8>,
}

fn number(role: Role) -> u8 {
    match role {
        Role::Initiator => 1,
        Role::Responder => 2,
    }
}

impl Greeting {
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend([number(self.role), 0]);
        bytes.extend(self.port.to_be_bytes());
        bytes.extend(self.nonce);
        bytes.extend((self.private_data.len() as u16).to_be_bytes());
        bytes.extend(&self.private_data);
        bytes
    }

    /// Of the peer, as far as it has come. `Ok(Err(n))`: `n` bytes are missing, at least. `PROTO`: it is not
    /// one, or not of an end in the other role than `ours`.
    pub fn parse(bytes: &[u8], ours: Role) -> Result<Result<Self, usize>, Errno> {
        let theirs = number(if ours == Role::Initiator { Role::Responder } else { Role::Initiator });
        let prefix = MAGIC.iter().chain([&theirs]);
        if bytes.iter().zip(prefix).any(|(got, expected)| got != expected) {
            return Err(Errno::PROTO);
        }
        let Some(fixed) = bytes.first_chunk::<FIXED>() else { return Ok(Err(FIXED - bytes.len())) };
        let [.., p0, p1, n0, n1, n2, n3, n4, n5, n6, n7, l0, l1] = *fixed;
        let len = usize::from(u16::from_be_bytes([l0, l1]));
        if len > MAX_PRIVATE_DATA {
            return Err(Errno::PROTO);
        }
        let Some(private_data) = bytes.get(FIXED..FIXED + len) else {
            return Ok(Err(FIXED + len - bytes.len()));
        };
        Ok(Ok(Self {
            role: if ours == Role::Initiator { Role::Responder } else { Role::Initiator },
            port: u16::from_be_bytes([p0, p1]),
            nonce: [n0, n1, n2, n3, n4, n5, n6, n7],
            private_data: private_data.to_vec(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_understood_byte_by_byte() {
        let said = Greeting {
            role: Role::Responder,
            port: 0x1234,
            nonce: *b"12345678",
            private_data: b"to the peer".to_vec(),
        };
        let bytes = said.to_bytes();
        assert_eq!(bytes[..16], *b"uwarp verbs\x01\x02\x00\x12\x34");
        assert_eq!(bytes[16..28], *b"12345678\x00\x0bto");
        for len in 0..bytes.len() {
            let missing = Greeting::parse(&bytes[..len], Role::Initiator).unwrap().unwrap_err();
            // Never more than there is: what follows is another message.
            assert!(missing > 0 && len + missing <= bytes.len(), "{len}: {missing}");
        }
        assert_eq!(Greeting::parse(&bytes, Role::Initiator), Ok(Ok(said)));
    }

    #[test]
    fn what_is_none_is_seen_at_its_first_wrong_byte() {
        let bytes =
            Greeting { role: Role::Initiator, port: 0, nonce: [0; 8], private_data: Vec::new() }.to_bytes();
        assert_eq!(Greeting::parse(b"M", Role::Initiator), Err(Errno::PROTO));
        assert_eq!(Greeting::parse(b"uwarp verbs\x02", Role::Initiator), Err(Errno::PROTO));
        assert_eq!(Greeting::parse(&bytes[..13], Role::Initiator), Err(Errno::PROTO));
        assert!(Greeting::parse(&bytes, Role::Responder).unwrap().is_ok());
        let mut long = bytes;
        long[24] = 0xFF;
        assert_eq!(Greeting::parse(&long, Role::Responder), Err(Errno::PROTO));
    }
}
