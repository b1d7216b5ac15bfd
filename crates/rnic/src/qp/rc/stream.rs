//! The state of one connection.

use std::collections::VecDeque;

use uwarp_proto::framing::{self, Framing, Rest};
use uwarp_proto::opening::Opening;
use uwarp_proto::rx::{RxState, Segment};
use uwarp_wire::ddp::Header;
use uwarp_wire::rdmap::Delivery;
use uwarp_wire::terminate::TerminateError;

use super::ack_policy::{AckTiming, Hold};
use super::buffered::BufferedSends;
use super::params::{LinkCaps, StreamParams};
use super::reads::{ReadSink, Request};
use super::silence::Silence;
use super::tx::Tx;
use crate::mr::MrUse;
use crate::out::OutQueue;
use crate::pd::Streaming;

/// Why a stream has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnect {
    /// The peer closed its side.
    PeerClosed,
    /// This side closed it.
    LocalClosed,
    /// The peer sent a Terminate.
    Terminated(TerminateError),
    /// We sent a Terminate.
    Sent(TerminateError),
    /// The connection broke.
    Reset,
    /// The peer did not do its part in time.
    Timeout,
    /// The link that is required here cannot be had. Only a shell says so.
    NoLink,
}

/// State of one connection; each has its own.
pub(super) struct Stream {
    /// The queue pair's number, for traces.
    pub qpn: u32,
    pub params: StreamParams,
    pub mulpdu: usize,
    pub out: OutQueue,
    pub tx: Tx,
    /// Makes the frames to send.
    pub sender: framing::Sender,
    /// Finds frames in what is received.
    pub receiver: framing::Receiver,
    pub rx: RxState,
    pub direct: Option<Direct>,
    /// Reads and atomic operations of this end that wait for responses, oldest first.
    pub reads: VecDeque<ReadSink>,
    /// Reads and atomic operations of the peer that wait for our responses, oldest first.
    pub requests: VecDeque<Request>,
    /// How many of these are atomic operations.
    pub atomics: usize,
    /// Stream positions at which cut responses end, if the lower layer had not taken all of them at the last
    /// check.
    pub responses: VecDeque<u64>,
    /// Present until the stream ends: it can use the regions of its domain.
    pub streaming: Option<Streaming>,
    /// Reading has stopped: a Send arrived and no receive was posted.
    pub stalled: bool,
    /// Sends that arrived before their receive was posted, while this end waits for Responses behind them.
    pub buffered: BufferedSends,
    /// The Send that waits, or waited last.
    pub waiting: Option<OffendingSegment>,
    /// Bytes of the last Write, complete or not; zero if a Send or an Immediate arrived after it.
    pub written: u32,
    /// The last Write is not complete yet.
    pub write_continues: bool,
    /// Who may send.
    pub opening: Opening,
    /// The program got an event because something arrived before its queue pair could send.
    pub comm_est: bool,
    pub established: Established,
    /// Messages and Reads sent with the ready-to-receive frame.
    pub begun: (u64, u32),
    /// Messages of the peer that are placed, and how many of them were acknowledged.
    pub placed: u64,
    pub placed_acked: u64,
    /// The program has sent something since the last of them: it likely answers the next one too, and the
    /// acknowledgement can ride on that.
    pub answered: bool,
    /// The last placed message for which the peer requested an acknowledgement.
    pub requested_to: u64,
    /// The first such message that is not acknowledged yet.
    pub requested_from: u64,
    /// When to send the next acknowledgement.
    pub ack_timing: AckTiming,
    /// How long to hold it while the program's polls find nothing.
    pub hold: Hold,
    /// Messages of ours that the peer has placed.
    pub acked: u64,
    /// The peer acknowledges for the last time before it ends the stream ([`PeerData::last_ack`]).
    ///
    /// [`PeerData::last_ack`]: uwarp_proto::setup::PeerData::last_ack
    pub last_acks: bool,
    /// It has done so.
    pub last_ack_seen: bool,
    /// This end has said why it ends the stream, or that it does.
    pub last_word_said: bool,
    pub silence: Silence,
    /// Warn the program if posted work must not be sent.
    pub warn_if_muted: bool,
    /// The program has disconnected; posted work is still sent until [`super::timers::Timer::Drain`] expires.
    pub draining: bool,
    pub answer: DisconnectReply,
    pub closing: Option<Disconnect>,
}

impl Stream {
    /// A new stream; `streaming` lets it use the regions of its queue pair's domain.
    pub fn new(qpn: u32, params: StreamParams, streaming: Streaming) -> Self {
        let (sender, opening) = (params.framing.sender(), params.opening());
        Self {
            qpn,
            params,
            mulpdu: params.mulpdu(),
            out: OutQueue::new(sender.boundaries(), params.link.refers),
            tx: Tx::new(),
            sender,
            receiver: params.framing.receiver(),
            rx: RxState::new(params.peer_is_uwarp),
            direct: None,
            reads: VecDeque::new(),
            requests: VecDeque::new(),
            atomics: 0,
            responses: VecDeque::new(),
            streaming: Some(streaming),
            stalled: false,
            buffered: BufferedSends::default(),
            waiting: None,
            written: 0,
            write_continues: false,
            opening,
            comm_est: false,
            established: Established::NotYet,
            begun: (0, 0),
            placed: 0,
            placed_acked: 0,
            answered: false,
            requested_to: 0,
            requested_from: 0,
            ack_timing: AckTiming::Rides,
            hold: Hold::new(),
            acked: 0,
            last_acks: params.peer.is_some_and(|peer| peer.last_ack),
            last_ack_seen: false,
            last_word_said: false,
            silence: Silence::default(),
            warn_if_muted: opening.may_starve(),
            draining: false,
            answer: DisconnectReply::None,
            closing: None,
        }
    }
}

impl Stream {
    /// The peer's lower layer carries other frames than was assumed, or other things beside them. Returns
    /// whether that is possible: nothing is sent or received.
    pub fn reframe(&mut self, framing: Framing, link: LinkCaps) -> bool {
        if self.opening.heard() || self.direct.is_some() || self.closing.is_some() {
            return false;
        }
        if self.out.queued() > 0 {
            return self.begin_anew(framing, link);
        }
        (self.params.framing, self.params.link) = (framing, link);
        self.mulpdu = self.params.mulpdu();
        (self.sender, self.receiver) = (framing.sender(), framing.receiver());
        self.out = OutQueue::new(self.sender.boundaries(), link.refers);
        true
    }

    /// What this end has queued, and not sent, in the other framing: it is the ready-to-receive frame alone.
    fn begin_anew(&mut self, framing: Framing, link: LinkCaps) -> bool {
        if self.out.taken() > 0 || self.is_used() {
            return false;
        }
        let Some(streaming) = self.streaming.take() else { return false };
        let params = StreamParams { framing, link, ..self.params };
        let mut anew = Self::new(self.qpn, params, streaming);
        anew.begin();
        // What the program has set goes out with the first frame.
        anew.tx.rnr_retry = self.tx.rnr_retry;
        // What has been reported of it is not reported again.
        (anew.established, anew.comm_est) = (self.established, self.comm_est);
        (anew.draining, anew.answer) = (self.draining, self.answer);
        *self = anew;
        true
    }

    /// Whether it still waits for the peer's first frame, and is one that does not count before.
    #[inline]
    pub fn is_joining(&self) -> bool {
        !self.opening.may_send() && self.params.by_number
    }

    /// Whether this is the Read that belongs to an indication by number, or its Response: no message of a
    /// program.
    #[cold]
    pub fn is_indication(&self, segment: &Segment) -> bool {
        let reads = matches!(segment.info.delivery, Delivery::ReadRequest | Delivery::ReadSink);
        self.params.by_number && reads && !self.is_used()
    }

    /// Whether a message of a program has gone, or begun to go, in either direction.
    pub fn is_used(&self) -> bool {
        let sent = (self.tx.messages(), self.tx.read_msn) != self.begun || self.tx.current.is_some();
        let indications = self.opening.indications();
        sent || self.placed > u64::from(indications)
            || (self.write_continues || self.direct.is_some() || self.stalled)
            || !self.buffered.is_empty()
            || self.rx.has_begun(indications)
    }
}

/// InfiniBand's connection manager answers a disconnect when the other program disconnects, too, and reports
/// it to the first program then. Here the end of the other side of the stream is the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DisconnectReply {
    /// There is none.
    None,
    /// This end's program has disconnected, and waits for it.
    Awaited,
    /// The peer waits for it.
    Owed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Established {
    NotYet,
    Unreported,
    Reported,
}

/// The header of a segment whose bytes were not kept, for a Terminate that quotes it.
#[derive(Debug, Clone, Copy)]
pub(super) struct OffendingSegment {
    header: [u8; Header::MAX_LEN],
    header_len: usize,
    segment_len: u16,
}

impl OffendingSegment {
    pub fn new(segment: &Segment) -> Self {
        let mut header = [0; Header::MAX_LEN];
        let header_len = segment.header.emit(&mut header);
        let segment_len = u16::try_from(segment.header_len + segment.payload_len).unwrap_or(u16::MAX);
        Self { header, header_len, segment_len }
    }

    pub fn get(&self) -> (&[u8], u16) {
        (self.header.get(..self.header_len).unwrap_or(&[]), self.segment_len)
    }
}

/// A segment whose payload is being received straight into place.
#[derive(Debug)]
pub(super) struct Direct {
    pub segment: Segment,
    pub rest: Rest,
    pub pins: Pins,
}

/// Regions in use by a receive in progress; kept only during one system call.
pub(super) type Pins = smallvec::SmallVec<[MrUse; 2]>;
