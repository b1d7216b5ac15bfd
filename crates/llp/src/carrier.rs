//! What a lower layer must offer before a stream begins: binding, listening, connecting, and set-up frames on
//! a connection. The connection manager's shell uses these alone; it names no lower layer elsewhere.
//!
//! ```text
//!   Carrier ─ bind ─▶ Bound ─┬─ listen ──▶ Listening ─ accept ─▶ SetUp
//!                            └─ connect ──────────────────────▶ SetUp ─ send_some, receive ─▶ the stream
//! ```
//!
//! No call here waits.

use rustix::io::Errno;

/// How to close a connection that never became a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Close {
    /// Behind what was sent: the peer still reads it.
    Finish,
    /// At once; the local port is free at once.
    Reset,
}

/// Why a connection cannot be made, or cannot go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The peer's host refuses: no program listens.
    Refused,
    /// The peer has ended it.
    Gone,
    /// The peer cannot be reached.
    Unreachable(Errno),
    /// This host refuses.
    Local(Errno),
}

impl Refusal {
    /// From an error of the system.
    pub fn from_errno(errno: Errno) -> Self {
        match errno {
            Errno::CONNREFUSED => Self::Refused,
            Errno::CONNRESET | Errno::PIPE => Self::Gone,
            Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::HOSTDOWN | Errno::NETDOWN => {
                Self::Unreachable(errno)
            }
            errno => Self::Local(errno),
        }
    }

    /// The error of the system that it comes from.
    pub fn errno(self) -> Errno {
        match self {
            Self::Refused => Errno::CONNREFUSED,
            Self::Gone => Errno::CONNRESET,
            Self::Unreachable(errno) | Self::Local(errno) => errno,
        }
    }
}
