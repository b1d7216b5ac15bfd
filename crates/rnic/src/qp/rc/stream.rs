//! The state of one connection, made anew for each.

use std::collections::VecDeque;

use uwarp_proto::framing::{self, Rest};
use uwarp_proto::rx::{RxState, Segment};
use uwarp_wire::ddp::Header;
use uwarp_wire::terminate::TerminateError;

use super::ack_policy::{AckTiming, Hold};
use super::aside::Aside;
use super::params::{Rtr, StreamParams};
use super::reads::{ReadSink, Request};
use super::silence::Silence;
use super::tx::Tx;
use crate::mr::MrUse;
use crate::out::OutQueue;
use crate::pd::Streaming;

/// Why a stream ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disconnect {
    /// The peer closed its side.
    PeerClosed,
    /// This side asked for it.
    LocalClosed,
    /// The peer sent a Terminate.
    Terminated(TerminateError),
    /// We sent a Terminate.
    Sent(TerminateError),
    /// The connection broke.
    Reset,
    /// The peer did not do its part in time.
    Timeout,
}

/// State of the connection, made anew for each.
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
    /// Reads and atomic operations of ours that wait for responses, oldest first.
    pub reads: VecDeque<ReadSink>,
    /// Reads and atomic operations of the peer's that wait for our responses, oldest first.
    pub requests: VecDeque<Request>,
    /// Where the responses end that are cut and, as far as was looked, not all with the lower layer.
    pub responses: VecDeque<u64>,
    /// Until it ends, the stream can use the regions of its domain.
    pub streaming: Option<Streaming>,
    /// A Send arrived and no receive was posted.
    pub stalled: bool,
    /// Sends that came without a receive while Responses to our Reads are to come behind them.
    pub aside: Aside,
    /// The Send that waited last.
    pub waiting: Option<OffendingSegment>,
    /// Bytes of the Write that came last, whole or not; zero when a Send or an Immediate came behind it.
    pub written: u32,
    /// The Write that came last is not whole yet.
    pub write_continues: bool,
    pub first_fpdu_seen: bool,
    /// How often the peer was nudged, see [`StreamParams::nudge_after`].
    pub nudges: u32,
    /// The program was told that something came before its queue pair could send.
    pub comm_est: bool,
    pub established: Established,
    /// Messages of the peer that are placed, and how many of them it was told of.
    pub placed: u64,
    pub placed_told: u64,
    /// The program has sent something since the last of them: it likely answers the next one too, and what
    /// tells of it can ride on that.
    pub answered: bool,
    /// What is placed of that the peer wants to hear of.
    pub asked_of: u64,
    /// The first of these of which it was not told yet.
    pub asked_first: u64,
    /// When the peer is to be told.
    pub tell: AckTiming,
    /// And for how long a program that polls in vain may still answer first.
    pub hold: Hold,
    /// Messages of ours that the peer has placed.
    pub acked: u64,
    /// Signalled ones that have completed.
    pub completed_signaled: u64,
    pub silence: Silence,
    /// The program is to be warned if posted work may not go out.
    pub warn_if_muted: bool,
    /// The program has disconnected; until [`timers::Timer::Drain`] is over, posted work still goes out.
    pub draining: bool,
    pub closing: Option<Disconnect>,
}

impl Stream {
    /// One that begins; `streaming` lets it use the regions of its queue pair's domain.
    pub fn new(qpn: u32, params: StreamParams, streaming: Streaming) -> Self {
        let sender = params.framing.sender();
        Self {
            qpn,
            params,
            mulpdu: params.mulpdu(),
            out: OutQueue::new(sender.boundaries()),
            tx: Tx::new(!params.wait_first_fpdu),
            sender,
            receiver: params.framing.receiver(),
            rx: RxState::new(params.peer_is_uwarp),
            direct: None,
            reads: VecDeque::new(),
            requests: VecDeque::new(),
            responses: VecDeque::new(),
            streaming: Some(streaming),
            stalled: false,
            aside: Aside::default(),
            waiting: None,
            written: 0,
            write_continues: false,
            first_fpdu_seen: false,
            nudges: 0,
            comm_est: false,
            established: Established::NotYet,
            placed: 0,
            placed_told: 0,
            answered: false,
            asked_of: 0,
            asked_first: 0,
            tell: AckTiming::Rides,
            hold: Hold::new(),
            acked: 0,
            completed_signaled: 0,
            silence: Silence::default(),
            warn_if_muted: params.wait_first_fpdu && params.rtr == Rtr::None,
            draining: false,
            closing: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Established {
    NotYet,
    Untold,
    Told,
}

/// The header of a segment whose bytes are not at hand any more, for a Terminate that tells of it.
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

/// Regions in use by a receive that is under way; kept only for the length of a system call.
pub(super) type Pins = smallvec::SmallVec<[MrUse; 2]>;
