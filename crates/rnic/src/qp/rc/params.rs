//! What a stream begins with: what set-up has agreed on, and what is known of the peer.

use std::time::Duration;

use uwarp_proto::framing::Framing;
use uwarp_proto::setup::PeerData;
pub use uwarp_proto::setup::Rtr;

/// What was negotiated for a stream.
#[derive(Debug, Clone, Copy)]
pub struct StreamParams {
    /// This end sent the MPA request.
    pub initiator: bool,
    /// How segments are delimited and protected.
    pub framing: Framing,
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
    /// The peer may miss the first FPDU until more comes: it gets more while it has sent nothing. Pause before the first time.
    pub nudge_after: Option<Duration>,
    /// How long a Send waits for a receive to be posted; `None`: for ever.
    pub rnr_timeout: Option<Duration>,
    /// Sends and Writes complete when the peer acknowledged their placement (uwarp peers only).
    pub placement_acks: bool,
    /// The same toward a stranger, where an RDMA Read of no bytes behind them has to come back. Only where the peer is known to take one
    /// Read at least, whatever `ord` says of the program's.
    pub placement_reads: bool,
    /// The lower layer tells how the peer's system answers: a peer that is silent for long is given up.
    pub link_answers: bool,
    /// What becomes of the peer is told as InfiniBand's verbs do, for the roce and ib views (`qp/gone`).
    pub infiniband: bool,
}

impl StreamParams {
    /// Largest ULPDU to send.
    pub(super) fn mulpdu(&self) -> usize {
        self.framing.mulpdu(self.emss as usize, self.peer_is_uwarp)
    }
}

impl Default for StreamParams {
    fn default() -> Self {
        Self {
            initiator: true,
            framing: Framing::default(),
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
            nudge_after: None,
            rnr_timeout: None,
            placement_acks: false,
            placement_reads: false,
            link_answers: false,
            infiniband: false,
        }
    }
}
