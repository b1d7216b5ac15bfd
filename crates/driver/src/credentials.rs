//! Who is at the other end of a Unix socket.

use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt};

/// Who has made the other end, as this process's namespaces show it (unix(7), `SO_PEERCRED`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// `None`: a process of a PID namespace that this one does not see, of another container.
    pub pid: Option<u32>,
    /// The effective user then.
    pub uid: u32,
}

impl Credentials {
    /// Of the other end. (rustix takes a process that is not seen, number 0, for an error.)
    pub fn of_peer(socket: impl AsFd) -> Option<Self> {
        let peer = getsockopt(&socket.as_fd(), sockopt::PeerCredentials).ok()?;
        Some(Self { pid: u32::try_from(peer.pid()).ok().filter(|&pid| pid != 0), uid: peer.uid() })
    }
}
