//! Who is at the other end of a Unix socket.

// Reason: the kernel writes the answer. rustix takes a process that is not seen, number 0, for an error; and
// `getsockopt` may be the sockets library's, which answers for a descriptor's number as the program knew it
// last: it does not hear of one that was closed by a plain system call, as libuv closes.
#![allow(unsafe_code)]

use std::os::fd::{AsFd, AsRawFd};

/// Who has made the other end, as this process's namespaces show it (unix(7), `SO_PEERCRED`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// `None`: a process of a PID namespace that this one does not see, of another container.
    pub pid: Option<u32>,
    /// The effective user then.
    pub uid: u32,
}

impl Credentials {
    /// Of the other end. `None`: the socket has no such end.
    pub fn of_peer(socket: impl AsFd) -> Option<Self> {
        let fd = socket.as_fd().as_raw_fd();
        let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
        let mut size = size_of_val(&peer) as libc::socklen_t;
        let (at, size_at) = (&raw mut peer, &raw mut size);
        let (level, name) = (libc::SOL_SOCKET, libc::SO_PEERCRED);
        // SAFETY: the kernel writes at most `size` bytes, and then how many.
        let failed = unsafe { libc::syscall(libc::SYS_getsockopt, fd, level, name, at, size_at) } != 0;
        if failed || size as usize != size_of_val(&peer) || peer.uid == u32::MAX {
            return None;
        }
        Some(Self { pid: u32::try_from(peer.pid).ok().filter(|&pid| pid != 0), uid: peer.uid })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn of_a_peer() {
        let (one, _other) = UnixStream::pair().unwrap();
        let uid = rustix::process::geteuid().as_raw();
        assert_eq!(Credentials::of_peer(&one), Some(Credentials { pid: Some(std::process::id()), uid }));
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(Credentials::of_peer(&tcp), None);
    }
}
