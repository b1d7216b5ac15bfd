//! How two uwarp ends recognize each other, and the data they exchange
//! (docs/adr/002-uwarp-peers-know-each-other.md).
//!
//! A uwarp initiator sets the reserved bit A in its request. A uwarp responder answers with the reserved bit
//! B and without A (so a peer that echoes a request's flags does not look like uwarp) and puts its
//! [`PeerData`] after the program's private data. The initiator answers with its own in the STag and tagged
//! offset of the ready-to-receive Write. That Write has no payload, so its STag and offset mean nothing to
//! other peers (RFC 5040 section 5.1 with RFC 6581 section 9.2). The fields that are 0 in the drawing are
//! checked: only they distinguish our twelve bytes from a stranger's.
//!
//! ```text
//!  0                   1                   2                   3
//!  0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//! +---------------+---------------+-----+---------+---------------+
//! |    Version    |   Features    |Retry|  Timer  |       0       |   STag of the Write
//! +---------------+---------------+-----+---------+---------------+
//! |       0       |               Queue pair number               |   tagged offset
//! +---------------+-----------------------------------------------+   of the Write
//! |                               0                               |
//! +---------------------------------------------------------------+
//! ```
//!
//! A request can carry it, too, after the program's data, with A and B both set: in the views that look like
//! InfiniBand (docs/adr/002), and for programs that pass queue pair numbers through the connection manager.

use super::Host;

/// The version of the protocol between two uwarp ends. Two ends use the lower of their versions.
///
/// 1: ULPDUs of up to 64,768 bytes, and placement acknowledgements if requested.
pub const VERSION: u8 = 1;

/// The introduction of a uwarp end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PeerData {
    /// Highest version that the sender supports; in the ready-to-receive Write the version in use.
    pub version: u8,
    /// The sender requests acknowledgements when its messages are placed.
    pub placement_acks: bool,
    /// The sender says so when it ends a stream of placement acknowledgements (`UWARP_LAST_ACK`). 0.1 did
    /// not.
    pub last_ack: bool,
    /// How often the peer should retry when the sender of this has no receive posted: 0 to 6, or 7 without
    /// limit.
    pub rnr_retry: u8,
    /// The sender's minimum RNR timer, a 5-bit code (0 is 655 ms).
    pub min_rnr_timer: u8,
    /// The sender's queue pair number, 24 bits; 0 if it is not given.
    pub qpn: u32,
}

mod field {
    pub const VERSION: usize = 0;
    pub const FEATURES: usize = 1;
    pub const RNR: usize = 2;
    pub const QPN: core::ops::Range<usize> = 5..8;

    pub const FEATURE_PLACEMENT_ACKS: u8 = 0x01;
    pub const FEATURE_LAST_ACK: u8 = 0x02;
    pub const FEATURE_HOST: u8 = 0x04;
    pub const RETRY_SHIFT: u8 = 5;
    pub const TIMER_MASK: u8 = 0x1F;
}

impl PeerData {
    /// Bytes on the wire.
    pub const LEN: usize = 12;

    /// Data of this version that requests nothing.
    pub const fn new() -> Self {
        Self {
            version: VERSION,
            placement_acks: false,
            last_ack: true,
            rnr_retry: 7,
            min_rnr_timer: 0,
            qpn: 0,
        }
    }

    /// Reads twelve bytes. `None` for version 0, and for bytes that are not zero where they must be: a peer
    /// that set our flag by mistake is treated as a stranger. Features that version 1 does not know are
    /// ignored.
    pub fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let [version, _, _, 0, 0, q0, q1, q2, 0, 0, 0, 0] = *bytes else { return None };
        (version != 0).then_some(Self {
            version,
            placement_acks: bytes[field::FEATURES] & field::FEATURE_PLACEMENT_ACKS != 0,
            last_ack: bytes[field::FEATURES] & field::FEATURE_LAST_ACK != 0,
            rnr_retry: bytes[field::RNR] >> field::RETRY_SHIFT,
            min_rnr_timer: bytes[field::RNR] & field::TIMER_MASK,
            qpn: u32::from_be_bytes([0, q0, q1, q2]),
        })
    }

    /// The twelve bytes. Numbers that are too large for their field lose their upper bits.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[field::VERSION] = self.version;
        if self.placement_acks {
            out[field::FEATURES] |= field::FEATURE_PLACEMENT_ACKS;
        }
        if self.last_ack {
            out[field::FEATURES] |= field::FEATURE_LAST_ACK;
        }
        out[field::RNR] = self.rnr_retry << field::RETRY_SHIFT | self.min_rnr_timer & field::TIMER_MASK;
        let [_, qpn @ ..] = self.qpn.to_be_bytes();
        out[field::QPN].copy_from_slice(&qpn);
        out
    }

    /// The twelve bytes behind those of `host`, which they announce.
    pub(super) fn to_bytes_behind(self, host: Option<Host>) -> [u8; Self::LEN] {
        let mut out = self.to_bytes();
        if host.is_some() {
            out[field::FEATURES] |= field::FEATURE_HOST;
        }
        out
    }

    /// Length of the program's data, and what the peer says behind it.
    pub(super) fn split(private_data: &[u8]) -> Option<(usize, Self, Option<Host>)> {
        let (data, bytes) = private_data.split_last_chunk::<{ Self::LEN }>()?;
        let peer = Self::parse(bytes)?;
        if bytes[field::FEATURES] & field::FEATURE_HOST != 0
            && let Some((data, host)) = data.split_last_chunk::<{ Host::LEN }>()
        {
            return Some((data.len(), peer, Some(Host::parse(host))));
        }
        Some((data.len(), peer, None))
    }

    /// STag and tagged offset of a ready-to-receive Write that carries this.
    pub fn to_rtr(&self) -> (u32, u64) {
        let [a, b, c, d, rest @ ..] = self.to_bytes();
        (u32::from_be_bytes([a, b, c, d]), u64::from_be_bytes(rest))
    }

    /// The data in the STag and offset of a ready-to-receive Write. `None`: its sender is no uwarp end,
    /// although it set our bit in its request; treat it as a stranger.
    pub fn from_rtr(stag: u32, to: u64) -> Option<Self> {
        let mut bytes = [0; Self::LEN];
        let (head, tail) = bytes.split_at_mut(4);
        head.copy_from_slice(&stag.to_be_bytes());
        tail.copy_from_slice(&to.to_be_bytes());
        Self::parse(&bytes)
    }

    /// This end's data in the version that both ends support.
    pub fn agreed_with(self, peer: PeerData) -> Self {
        Self { version: self.version.min(peer.version), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn golden_bytes() {
        let (rnr_retry, min_rnr_timer, qpn) = (7, 12, 0x0080_0501);
        let data =
            PeerData { version: 1, placement_acks: true, last_ack: false, rnr_retry, min_rnr_timer, qpn };
        assert_eq!(
            PeerData { last_ack: true, ..data }.to_bytes(),
            [1, 3, 0xEC, 0, 0, 0x80, 0x05, 0x01, 0, 0, 0, 0]
        );
        assert_eq!(data.to_bytes(), [1, 1, 0xEC, 0, 0, 0x80, 0x05, 0x01, 0, 0, 0, 0]);
        assert_eq!(data.to_rtr(), (0x0101_EC00, 0x0080_0501_0000_0000));
    }

    /// A feature that came with a later version, and that version.
    #[test]
    fn a_later_version_is_spoken_to_in_this_one() {
        let ours = PeerData { placement_acks: true, qpn: 7, ..PeerData::new() };
        let mut later = PeerData { version: VERSION + 1, ..ours }.to_bytes();
        later[field::FEATURES] |= 0x80;
        let theirs = PeerData::parse(&later).unwrap();
        assert_eq!(theirs, PeerData { version: VERSION + 1, ..ours });
        assert_eq!(ours.agreed_with(theirs), ours);
        assert_eq!(theirs.agreed_with(ours), ours);
        assert_eq!(PeerData::parse(&PeerData { version: 0, ..ours }.to_bytes()), None, "a stranger");
    }

    #[test]
    fn a_strangers_ready_to_receive_write_says_nothing() {
        // From siw, from cxgb4, from an older uwarp.
        for (stag, to) in [(1, 0), (1, 1), (0, 0)] {
            assert_eq!(PeerData::from_rtr(stag, to), None);
        }
    }

    proptest! {
        #[test]
        fn round_trip(
            version in 1u8..,
            placement_acks: bool,
            last_ack: bool,
            rnr_retry in 0u8..8,
            min_rnr_timer in 0u8..32,
            qpn in 0u32..1 << 24,
        ) {
            let data = PeerData { version, placement_acks, last_ack, rnr_retry, min_rnr_timer, qpn };
            prop_assert_eq!(PeerData::parse(&data.to_bytes()), Some(data));
            let (stag, to) = data.to_rtr();
            prop_assert_eq!(PeerData::from_rtr(stag, to), Some(data));
        }

        #[test]
        fn any_bytes(bytes: [u8; PeerData::LEN]) {
            let _ = PeerData::parse(&bytes);
        }
    }
}
