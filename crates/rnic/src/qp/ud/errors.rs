//! The error queue of a datagram queue pair: what peers said of its messages (docs/datagram-iwarp.md section
//! 7).
//!
//! A program asks for it. It is bounded, so that nobody can make it grow: what does not fit is only counted.

use std::collections::VecDeque;
use std::net::IpAddr;

use uwarp_wire::datagram::error::ErrorMessage;
use uwarp_wire::terminate::TerminateError;

/// Messages whose work requests are known after they were sent. An Error Message about an older one is only
/// counted.
pub(super) const REMEMBERED: usize = 1024;
/// Errors that wait for the program.
pub(super) const WAITING: usize = 64;

/// A message that a peer has dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerError {
    /// Of the work request.
    pub wr_id: u64,
    /// Of the message.
    pub msn: u32,
    /// The queue pair that dropped it.
    pub remote_qpn: u32,
    /// The address that the Error Message came from.
    pub from: IpAddr,
    /// Why.
    pub error: TerminateError,
}

/// A message that was sent to one queue pair.
#[derive(Clone, Copy)]
pub(super) struct Sent {
    pub msn: u32,
    pub wr_id: u64,
    pub to: IpAddr,
    pub remote_qpn: u32,
}

/// What becomes of an Error Message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It is kept. The program must hear of it if the queue was empty.
    Kept { was_empty: bool },
    /// It is only counted: the message is not known, or there is no room.
    Counted,
    /// An error of this message was kept already.
    Repeated,
    /// The message went to another queue pair.
    Foreign,
}

#[derive(Default)]
pub(super) struct ErrorQueue {
    /// The last messages that were sent, by the low bits of the MSN, and whether an error was kept.
    sent: Vec<Option<(Sent, bool)>>,
    pub waiting: VecDeque<PeerError>,
}

fn place(msn: u32) -> usize {
    msn as usize % REMEMBERED
}

impl ErrorQueue {
    pub fn sent(&mut self, message: Sent) {
        if self.sent.is_empty() {
            self.sent = vec![None; REMEMBERED];
        }
        if let Some(place) = self.sent.get_mut(place(message.msn)) {
            *place = Some((message, false));
        }
    }

    /// Keeps an Error Message from `from` if it is the first about a known message, and from where that went.
    pub fn add(&mut self, message: &ErrorMessage, from: IpAddr) -> Verdict {
        let ErrorMessage { source_qpn: remote_qpn, msn, error, .. } = *message;
        let place = self.sent.get_mut(place(msn)).and_then(Option::as_mut);
        let Some((sent, kept)) = place.filter(|(sent, _)| sent.msn == msn) else { return Verdict::Counted };
        if (sent.to, sent.remote_qpn) != (from, remote_qpn) {
            return Verdict::Foreign;
        }
        if *kept {
            return Verdict::Repeated;
        }
        if self.waiting.len() >= WAITING {
            return Verdict::Counted;
        }
        *kept = true;
        let was_empty = self.waiting.is_empty();
        self.waiting.push_back(PeerError { wr_id: sent.wr_id, msn, remote_qpn, from, error });
        Verdict::Kept { was_empty }
    }

    /// Forgets all messages and errors.
    pub fn clear(&mut self) {
        self.sent.clear();
        self.waiting.clear();
    }
}
