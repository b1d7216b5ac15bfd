//! What the lower layer is to send: datagrams, and runs of them.
//!
//! The system takes several datagrams in one call, and cuts them, if they lie one behind the other, go to one
//! receiver and are of one length; the last may be shorter. The staging buffer has them like this, where a
//! program posts a list. So each post says whether its datagram continues the run of the one before it.

use uwarp_proto::datagram;
use uwarp_wire::crc::crc32c;

use super::writes::Pieces;
use super::{Pending, UdCore};
use crate::ah::{Endpoint, port_of};
use crate::qp::datagrams::UdSendWr;
use crate::qp::state::QpState;
use crate::wr::WcStatus;

/// Datagrams that the lower layer can send in one call.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Where they go.
    pub endpoint: &'a Endpoint,
    /// All of them, one behind the other.
    pub bytes: &'a [u8],
    /// Of each, but the last may be shorter.
    pub length: usize,
    /// How many.
    pub count: usize,
}

/// The run that the last post belongs to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RunEnd {
    /// The address handle and the port.
    to: (u64, u16),
    /// Of its first datagram.
    length: usize,
    /// The last one is as long: another one may follow.
    is_open: bool,
}

/// The last datagrams of the staging buffer, which have no CRC yet.
///
/// The CRC of a copy that was just made waits for the copy, which is on its way to the cache, and its last
/// steps wait for each other. So the CRCs of a list are computed some at a time: the processor then works on
/// two at once.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unsealed {
    /// Where the first one is.
    start: usize,
    lens: [u32; Self::MOST],
    count: usize,
}

impl Unsealed {
    const MOST: usize = 8;
}

/// See [`UdCore::outgoing`].
struct Going<'a> {
    pending: std::collections::vec_deque::Iter<'a, Pending>,
    /// Of these, at most.
    left: usize,
    staged: &'a [u8],
    at: usize,
    pieces: Option<(&'a Endpoint, Pieces<'a>)>,
}

impl<'a> Iterator for Going<'a> {
    type Item = (&'a Endpoint, &'a [u8]);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        if let Some((to, pieces)) = &mut self.pieces {
            return pieces.next().map(|bytes| (*to, bytes));
        }
        self.left = self.left.checked_sub(1)?;
        let is_next = |datagram: &&Pending| datagram.status == WcStatus::Success && datagram.write.is_none();
        let Some(datagram) = self.pending.next().filter(is_next) else {
            self.left = 0;
            return None;
        };
        let bytes = self.staged.get(self.at..self.at + datagram.len).unwrap_or(&[]);
        self.at += datagram.len;
        Some((&datagram.endpoint, bytes))
    }
}

impl UdCore {
    /// The datagram that begins at `start` of the staging buffer, and ends it, gets its CRC with the next
    /// ones, or by [`Self::seal`].
    #[inline]
    pub(super) fn seal_later(&mut self, start: usize) {
        if self.unsealed.count == Unsealed::MOST {
            self.seal();
        }
        let unsealed = &mut self.unsealed;
        if unsealed.count == 0 {
            unsealed.start = start;
        }
        if let Some(len) = unsealed.lens.get_mut(unsealed.count) {
            *len = (self.staged.len() - start) as u32;
            unsealed.count += 1;
        }
    }

    /// All datagrams of the staging buffer have their CRC.
    #[inline]
    pub(super) fn seal(&mut self) {
        let Unsealed { mut start, lens, count } = self.unsealed;
        self.unsealed.count = 0;
        for len in lens.iter().take(count) {
            let end = start + *len as usize;
            let datagram = self.staged.get_mut(start..end).and_then(<[u8]>::split_last_chunk_mut);
            if let Some((covered, trailer)) = datagram {
                *trailer = datagram::trailer(crc32c(covered));
            }
            start = end;
        }
    }

    /// How many of the pending ones may go now.
    #[inline]
    fn may_go(&self) -> usize {
        match self.shell.attr.state {
            QpState::Rts | QpState::Sqe => self.pending.len(),
            QpState::Sqd => self.draining,
            _ => 0,
        }
    }

    /// The datagrams that the lower layer is to send now, oldest first.
    #[inline]
    pub fn outgoing(&self) -> impl Iterator<Item = (&Endpoint, &[u8])> {
        let most = self.may_go();
        let first = self.pending.front().filter(|first| most > 0 && first.write.is_some());
        let pieces = first.filter(|first| first.status == WcStatus::Success);
        Going {
            pending: self.pending.iter(),
            // Those of an RDMA Write-Record stand alone.
            left: if first.is_some() { 0 } else { most },
            staged: &self.staged,
            at: self.taken,
            pieces: pieces.and_then(|first| Some((&first.endpoint, first.write.as_ref()?.outgoing()))),
        }
    }

    /// Where the first of [`Self::outgoing`] goes.
    #[inline]
    pub fn first(&self) -> Option<&Endpoint> {
        let first = self.pending.front().filter(|first| first.status == WcStatus::Success)?;
        let is_staged = first.write.as_ref().is_none_or(|write| write.waiting().is_some());
        (self.may_go() > 0 && is_staged).then_some(&first.endpoint)
    }

    /// The first of [`Self::outgoing`], and those behind it that can go in one call with it: at most so many,
    /// and of so many bytes.
    #[inline]
    pub fn run(&self, most: usize, most_bytes: usize) -> Option<Run<'_>> {
        let left = self.may_go().min(most);
        let first = self.pending.front().filter(|first| left > 0 && first.status == WcStatus::Success)?;
        let endpoint = &first.endpoint;
        if let Some(write) = &first.write {
            let (length, waiting, bytes) = write.waiting()?;
            let count = waiting.min(most).min((most_bytes / length.max(1)).max(1));
            let bytes = bytes.get(..count * length).unwrap_or(bytes);
            return Some(Run { endpoint, bytes, length, count });
        }
        let (mut count, mut total) = (1, first.len);
        while count < left
            && let Some(next) = self.pending.get(count)
        {
            let goes = next.follows && next.status == WcStatus::Success && next.len <= first.len;
            if !goes || total + next.len > most_bytes {
                break;
            }
            (count, total) = (count + 1, total + next.len);
            if next.len < first.len {
                break;
            }
        }
        let bytes = self.staged.get(self.taken..self.taken + total).unwrap_or(&[]);
        Some(Run { endpoint, bytes, length: first.len, count })
    }

    /// Whether a datagram of `len` bytes, which is staged, continues the run of the last one that waits.
    #[inline]
    pub(super) fn follows(&mut self, ud: &UdSendWr<'_>, to: &Endpoint, len: usize) -> bool {
        let named = (ud.ah.number(), if ud.ah.is_group() { 0 } else { port_of(ud.remote_qpn) });
        let last = self.pending.back().filter(|last| last.len > 0);
        let run = &mut self.run;
        // Two handles may name the same place.
        let is_alike = last.is_some_and(|last| run.to == named || last.endpoint == *to);
        let follows = is_alike && run.is_open && len <= run.length;
        if !follows {
            run.length = len;
        }
        (run.to, run.is_open) = (named, len == run.length);
        follows
    }
}
