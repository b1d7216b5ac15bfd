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

/// How many of the datagrams behind a packet go on with it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Followers {
    pub(super) count: u32,
    /// One of them must be acknowledged at once.
    pub(super) at_once: bool,
}

impl<'a> Joined<'a> {
    /// One datagram by itself.
    pub(super) fn alone(datagram: &'a [u8]) -> Self {
        Self { datagram, behind: &[] }
    }

    /// Of a packet whose payload lies here.
    pub(super) fn followers(&self, payload: &Range<usize>) -> Followers {
        let head = self.datagram.get(..payload.start).unwrap_or(&[]);
        let mut followers = Followers::default();
        let Some(run) = Run::of(head, payload.len()).filter(|run| run.packet_len() == self.datagram.len())
        else {
            return followers;
        };
        for packet in self.behind.chunks(self.datagram.len()) {
            let Some(at_once) = run.is_next(followers.count + 1, packet) else { break };
            followers.count += 1;
            followers.at_once |= at_once;
        }
        followers
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
