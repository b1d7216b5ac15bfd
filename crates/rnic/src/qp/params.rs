//! What a stream begins with: what set-up has agreed on, and what is known of the peer.

use std::time::Duration;

use uwarp_proto::setup::PeerData;
use uwarp_proto::tx::{self, UWARP_MULPDU};

/// Ready-to-receive frame of RFC 6581's peer-to-peer connections, by which the initiator speaks first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rtr {
    /// None was negotiated.
    None,
    /// Initiator: send a zero-length RDMA Write first.
    SendWrite,
    /// Initiator: send a zero-length RDMA Read Request first.
    SendRead,
    /// Responder: the first FPDU that arrives is one.
    Expect,
}

/// What was negotiated for a stream.
#[derive(Debug, Clone, Copy)]
pub struct StreamParams {
    /// This end sent the MPA request.
    pub initiator: bool,
    /// CRCs are generated and checked.
    pub crc: bool,
    /// The peer asked for markers.
    pub send_markers: bool,
    /// We asked for markers.
    pub receive_markers: bool,
    /// RDMA Reads the peer may have outstanding. With 0 it may have one of no bytes.
    pub ird: u16,
    /// RDMA Reads this end may have outstanding.
    pub ord: u16,
    /// The peer is a uwarp end: large FPDUs, our own operations.
    pub peer_is_uwarp: bool,
    /// Effective maximum segment size of the path, in bytes; what FPDUs toward strangers are cut to.
    pub emss: u32,
    /// Ready-to-receive frame.
    pub rtr: Rtr,
    /// What the peer says of itself, where set-up has told it; a responder hears it with the ready-to-receive Write.
    pub peer: Option<PeerData>,
    /// What queries tell of time limit and retries, unless the program has set them itself: TCP has its own.
    pub timeout: u8,
    /// See `timeout`.
    pub retry_cnt: u8,
    /// What our ready-to-receive Write says in its STag and offset ([`PeerData::to_rtr`]), to a uwarp peer only.
    pub rtr_stag_to: (u32, u64),
    /// Responder: nothing may be sent before the first FPDU arrived (RFC 5044 section 7.1.2).
    pub wait_first_fpdu: bool,
    /// How long to wait before the first FPDU; some peers are not listening yet when their reply arrives.
    pub first_fpdu_delay: Duration,
    /// How long a Send waits for a receive to be posted; `None`: for ever.
    pub rnr_timeout: Option<Duration>,
    /// Sends and Writes complete when the peer acknowledged their placement (uwarp peers only).
    pub placement_acks: bool,
    /// The same toward a stranger, where an RDMA Read of no bytes behind them has to come back. Only where the peer is known to take one
    /// Read at least, whatever `ord` says of the program's.
    pub placement_reads: bool,
    /// What becomes of the peer is told as InfiniBand's verbs do, for the roce and ib views (`qp/gone`).
    pub infiniband: bool,
}

impl StreamParams {
    /// Largest ULPDU to send.
    pub(super) fn mulpdu(&self) -> usize {
        if self.peer_is_uwarp {
            UWARP_MULPDU
        } else {
            tx::mulpdu_for_emss(self.emss as usize, self.send_markers)
        }
    }
}

impl Default for StreamParams {
    fn default() -> Self {
        Self {
            initiator: true,
            crc: true,
            send_markers: false,
            receive_markers: false,
            ird: 16,
            ord: 16,
            peer_is_uwarp: false,
            emss: 1460,
            peer: None,
            timeout: 0,
            retry_cnt: 0,
            rtr: Rtr::None,
            rtr_stag_to: PeerData::new().to_rtr(),
            wait_first_fpdu: false,
            first_fpdu_delay: Duration::ZERO,
            rnr_timeout: None,
            placement_acks: false,
            placement_reads: false,
            infiniband: false,
        }
    }
}
