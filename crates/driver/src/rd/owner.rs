//! Whose bytes a message has.

use std::sync::{Arc, Weak};

use uwarp_llp::streams::Pipe;

use super::answers::PeerAnswer;
use super::{RdQp, UcQp};

/// Adds bytes of a message, from an offset, so many; returns whether it could.
pub(super) type Fill<'a> = dyn FnMut(u32, u32, &mut Vec<u8>) -> bool + 'a;

/// Whose message it is.
#[derive(Clone)]
pub(super) enum Owner {
    /// A request of a queue pair.
    Request { qp: Weak<RdQp>, request: u64 },
    /// The answer to a request of a peer.
    Answer(Arc<PeerAnswer>),
    /// A request of a queue pair whose messages are not repeated.
    Unrepeated { qp: Weak<UcQp>, request: u64 },
    /// A stream of a queue pair.
    Stream(Arc<Pipe>),
}

impl Owner {
    /// Adds bytes of its message to `out`; returns whether it could.
    pub fn fill(&self, offset: u32, len: u32, out: &mut Vec<u8>) -> bool {
        self.with_bytes(|fill| fill(offset, len, out))
    }

    /// Lets `work` add bytes of its message, as often as it likes, with what has them locked once.
    pub fn with_bytes(&self, work: impl FnOnce(&mut Fill<'_>) -> bool) -> bool {
        match self {
            Self::Request { qp, request } => qp.upgrade().is_some_and(|qp| {
                let mut core = qp.inner.lock();
                work(&mut |offset, len, out| core.fill(*request, offset, len, out))
            }),
            Self::Answer(answer) => work(&mut |offset, len, out| answer.fill(offset, len, out)),
            Self::Unrepeated { qp, request } => qp.upgrade().is_some_and(|qp| {
                let mut core = qp.inner.lock();
                work(&mut |offset, len, out| core.fill(*request, offset, len, out))
            }),
            Self::Stream(pipe) => work(&mut |offset, len, out| pipe.fill(offset, len, out)),
        }
    }

    pub fn is_of(&self, own: &Weak<RdQp>) -> bool {
        match self {
            Self::Request { qp, .. } => qp.ptr_eq(own),
            Self::Answer(answer) => answer.qp.ptr_eq(own),
            Self::Unrepeated { .. } | Self::Stream(_) => false,
        }
    }
}
