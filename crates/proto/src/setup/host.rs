//! What a responder says of itself to an initiator on the same host, so that the two can agree on memory
//! instead of TCP.
//!
//! It lies before the [`PeerData`](super::PeerData) of a reply whose third feature bit is set. An end that
//! does not know that bit gives it to its program behind the private data (docs/adr/002).
//!
//! ```text
//!   0 ─ 15  incarnation: names the responder's process, for its address among Unix sockets
//!  16 ─ 31  nonce: known to the two ends of this connection alone
//! ```

/// Where to ask the responder's process, and the word that proves who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Host {
    /// Names the process. No secret.
    pub incarnation: [u8; 16],
    /// Went over this connection only.
    pub nonce: [u8; 16],
}

impl Host {
    /// Bytes on the wire.
    pub const LEN: usize = 32;

    /// Reads them.
    pub fn parse(bytes: &[u8; Self::LEN]) -> Self {
        let (mut incarnation, mut nonce) = ([0; 16], [0; 16]);
        incarnation.copy_from_slice(&bytes[..16]);
        nonce.copy_from_slice(&bytes[16..]);
        Self { incarnation, nonce }
    }

    /// As bytes.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..16].copy_from_slice(&self.incarnation);
        out[16..].copy_from_slice(&self.nonce);
        out
    }
}

/// From which a responder makes the [`Host`] of each connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HostKey {
    /// Names the process.
    pub incarnation: [u8; 16],
    /// Random, and never shown.
    pub key: [u8; 16],
}

/// Without the key.
impl std::fmt::Debug for HostKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HostKey").field("incarnation", &self.incarnation).finish_non_exhaustive()
    }
}
