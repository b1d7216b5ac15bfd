//! Parameters of a stream: what set-up has negotiated, and what is known of the peer.

use std::time::Duration;

use uwarp_proto::framing::Framing;
use uwarp_proto::opening::{First, Hold, Opening, Terms};
pub use uwarp_proto::setup::Rtr;
use uwarp_proto::setup::{PeerData, RTR_STAG_TO};

use super::psns::ShownPsns;

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
    /// The peer is a uwarp end: large frames, our own operations.
    pub peer_is_uwarp: bool,
    /// Effective maximum segment size of the path, in bytes; frames toward strangers are limited to it.
    pub emss: u32,
    /// Ready-to-receive frame.
    pub rtr: Rtr,
    /// The peer's introduction, if set-up contained it; a responder gets it with the ready-to-receive Write.
    pub peer: Option<PeerData>,
    /// The timeout that queries return, unless the program has set it: TCP has its own.
    pub timeout: u8,
    /// The same for the number of retries.
    pub retry_cnt: u8,
    /// STag and offset of our ready-to-receive Write ([`PeerData::to_rtr`]), to a uwarp peer only.
    pub rtr_stag_to: (u32, u64),
    /// Nothing may be sent before the first frame arrived, but the ready-to-receive frame: a responder (RFC
    /// 5044 section 7.1.2), and both ends of a stream by number.
    pub wait_first_frame: bool,
    /// How long to wait before the first frame: some peers are not ready for it when their reply arrives.
    pub first_frame_delay: Duration,
    /// The peer may not notice the first frame until more bytes come, so more are sent while it has sent
    /// nothing. This is the delay before the first time.
    pub nudge_after: Option<Duration>,
    /// How long a Send waits for a receive to be posted; `None`: for ever.
    pub rnr_timeout: Option<Duration>,
    /// Sends and Writes complete when the peer has acknowledged their placement (uwarp peers only).
    pub placement_acks: bool,
    /// The same toward a stranger, by an RDMA Read of no bytes after them (a placement Read). Only if the
    /// peer is known to accept at least one Read, whatever `ord` is.
    pub placement_reads: bool,
    /// What the lower layer does.
    pub link: LinkCaps,
    /// The end of the peer is reported as InfiniBand's verbs do, for the roce and ib views (`qp/rc/gone`).
    pub infiniband: bool,
    /// The stream was brought up by number, which no RNIC can. It counts once a program's message has gone in
    /// either direction; one that ends before is replaced by the next one. For that, both ends are silent
    /// until the peer's first frame: the initiator's indication contains a Read, whose Response is the
    /// responder's. And the queue pair outlives the stream, also without `infiniband`: the end of the peer
    /// flushes nothing (docs/adr/011).
    pub by_number: bool,
    /// By number: what the peer has shown of its packet sequence numbers. One that this end's program sets
    /// later must fit, or the stream ends.
    pub psns: Option<ShownPsns>,
}

/// What the lower layer does beside moving bytes. The default is a plain stream of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkCaps {
    /// It reports how the peer's system answers: a peer that is silent for long is given up.
    pub answers: bool,
    /// It carries the numbers of placed messages beside the stream: no frame acknowledges, and none only asks
    /// for that.
    pub counts: bool,
    /// It refers to memory that it has taken: work requests complete when that is released.
    pub refers: bool,
}

impl StreamParams {
    /// How the stream opens.
    pub(super) fn opening(&self) -> Opening {
        let first = match self.rtr {
            Rtr::None => First::Nothing,
            // Nothing is placed, so STag and offset can have any value: between uwarp ends they identify this
            // end.
            Rtr::SendWrite => {
                let (stag, to) = if self.peer_is_uwarp { self.rtr_stag_to } else { RTR_STAG_TO };
                First::SendWrite(stag, to)
            }
            Rtr::SendRead => First::SendRead,
            Rtr::Expect => First::Expect,
        };
        let hold = match self.first_frame_delay {
            _ if self.wait_first_frame => Hold::UntilInput,
            Duration::ZERO => Hold::None,
            time => Hold::For(time),
        };
        Opening::new(Terms { first, hold, nudge: self.nudge_after })
    }

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
            wait_first_frame: false,
            first_frame_delay: Duration::ZERO,
            nudge_after: None,
            rnr_timeout: None,
            placement_acks: false,
            placement_reads: false,
            link: LinkCaps::default(),
            infiniband: false,
            by_number: false,
            psns: None,
        }
    }
}
