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

#[derive(Default)]
pub(super) struct ErrorQueue {
    /// The last messages that were sent: MSN and work request, by the low bits of the MSN.
    sent: Vec<Option<(u32, u64)>>,
    pub waiting: VecDeque<PeerError>,
}

fn place(msn: u32) -> usize {
    msn as usize % REMEMBERED
}

impl ErrorQueue {
    pub fn sent(&mut self, msn: u32, wr_id: u64) {
        if self.sent.is_empty() {
            self.sent = vec![None; REMEMBERED];
        }
        if let Some(place) = self.sent.get_mut(place(msn)) {
            *place = Some((msn, wr_id));
        }
    }

    /// Says whether the program must be told: it knows of no other.
    pub fn add(&mut self, message: &ErrorMessage, from: IpAddr) -> bool {
        let ErrorMessage { source_qpn: remote_qpn, msn, error, .. } = *message;
        let known = self.sent.get(place(msn)).copied().flatten().filter(|(sent, _)| *sent == msn);
        let Some((_, wr_id)) = known.filter(|_| self.waiting.len() < WAITING) else { return false };
        self.waiting.push_back(PeerError { wr_id, msn, remote_qpn, from, error });
        self.waiting.len() == 1
    }
}
