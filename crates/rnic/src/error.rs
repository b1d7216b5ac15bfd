//! A program's own mistakes: the error that a verb returns when it is used wrongly, and its errno.

use thiserror::Error;
use uwarp_mem::Unmapped;

/// Why a verb was refused. Nothing has changed when one of these is returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VerbsError {
    /// An argument is outside what the object or the device allows.
    #[error("invalid argument: {0}")]
    Invalid(&'static str),
    /// Every place of the queue is taken.
    #[error("the queue is full")]
    QueueFull,
    /// A device limit or memory is exhausted.
    #[error("out of resources: {0}")]
    NoResources(&'static str),
    /// Something still uses the object.
    #[error("the object is in use")]
    Busy,
    /// The operation is not offered for this object.
    #[error("not supported: {0}")]
    NotSupported(&'static str),
    /// The memory of a region cannot be used by this process.
    #[error("the memory is not mapped, or not with the rights that the region needs")]
    BadAddress,
    /// The process is a child forked after the device was opened.
    #[error("not usable in a forked child")]
    Forked,
}

impl From<Unmapped> for VerbsError {
    fn from(_: Unmapped) -> Self {
        Self::BadAddress
    }
}

impl VerbsError {
    /// The errno that rdma-core's man pages name for this refusal.
    pub fn errno(self) -> i32 {
        match self {
            Self::Invalid(_) => 22,      // EINVAL
            Self::QueueFull => 12,       // ENOMEM (ibv_post_send(3), ibv_post_recv(3))
            Self::NoResources(_) => 12,  // ENOMEM
            Self::Busy => 16,            // EBUSY
            Self::NotSupported(_) => 95, // EOPNOTSUPP
            Self::BadAddress => 14,      // EFAULT
            Self::Forked => 19,          // ENODEV
        }
    }
}
