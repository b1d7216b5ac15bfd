//! Datagrams that the system has joined, and the runs among them: packets that bring the next parts of one
//! message are handled as if they were one.

use std::ops::Range;

use uwarp_wire::rd::run::Run;

/// A packet that has come, and the datagrams of the same length behind it that came with it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Joined<'a> {
    pub(super) datagram: &'a [u8],
    pub(super) behind: &'a [u8],
}

impl<'a> Joined<'a> {
    /// One datagram by itself.
    pub(super) fn alone(datagram: &'a [u8]) -> Self {
        Self { datagram, behind: &[] }
    }

    /// Of a packet whose payload lies here: how many of those behind it bring the next parts of the same.
    /// Sets `at_once` if one of them must be acknowledged at once.
    pub(super) fn take_followers(&self, payload: &Range<usize>, at_once: &mut bool) -> u32 {
        let head = self.datagram.get(..payload.start).unwrap_or(&[]);
        let run = Run::of(head, payload.len()).filter(|run| run.packet_len() == self.datagram.len());
        let Some(run) = run else { return 0 };
        let mut count = 0;
        for packet in self.behind.chunks(self.datagram.len()) {
            let Some(asks) = run.is_next(count + 1, packet) else { break };
            count += 1;
            *at_once |= asks;
        }
        count
    }
}

/// Where the payload of a run is: in datagrams of one length, one behind the other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pieces {
    first: Range<usize>,
    stride: usize,
    more: u32,
}

impl Pieces {
    pub(super) fn new(first: Range<usize>, stride: usize, more: u32) -> Self {
        Self { first, stride, more }
    }

    /// One alone.
    #[cfg(test)]
    pub(super) fn one(first: Range<usize>) -> Self {
        Self { first, stride: 0, more: 0 }
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> usize {
        self.first.len() * (self.more as usize + 1)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.first.is_empty()
    }

    /// Where the first piece is in the datagrams that were handled together.
    pub fn first(&self) -> &Range<usize> {
        &self.first
    }

    /// Bytes from the start of a piece to that of the next one.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// How many pieces there are.
    pub fn count(&self) -> usize {
        self.more as usize + 1
    }

    /// Where each piece is in the datagrams that were handled together, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self { first, stride, more } = self.clone();
        (0..=more as usize).map(move |nth| first.start + nth * stride..first.end + nth * stride)
    }
}
