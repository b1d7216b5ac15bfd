//! TCP as a lower layer: the functions of [`crate::Link::Tcp`].

// Reason: lists of addresses are passed to the kernel.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};
use uwarp_mem::MemSeg;

use crate::lower::{Answers, Ended, Received, Stop};

const _: () = assert!(size_of::<MemSeg>() == size_of::<IoSlice<'_>>());

/// Sends the pieces in order; returns how many bytes the kernel took. If a piece is not mapped, bytes before
/// it may have been sent by an earlier call.
pub fn send(fd: BorrowedFd<'_>, pieces: &[MemSeg]) -> Result<usize, Stop> {
    // SAFETY: IoSlice is documented to have the layout of `iovec`, as MemSeg has (asserted in `uwarp-mem`).
    // The slices exist only as address and length on their way into the system call; no reference to their
    // bytes is made in this process, and the kernel needs no provenance.
    let slices = unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast::<IoSlice<'_>>(), pieces.len()) };
    sent(|| rustix::net::sendmsg(fd, slices, &mut SendAncillaryBuffer::default(), NOW))
}

/// Sends bytes of ours; as [`send`], and cheaper for one piece.
pub fn send_bytes(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Stop> {
    sent(|| rustix::net::send(fd, bytes, NOW))
}

/// No call waits, and none raises SIGPIPE.
const NOW: SendFlags = SendFlags::DONTWAIT.union(SendFlags::NOSIGNAL);

#[inline]
fn sent(mut send: impl FnMut() -> Result<usize, Errno>) -> Result<usize, Stop> {
    loop {
        match send() {
            Ok(bytes) => return Ok(bytes),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(Stop::Later),
            // After an orderly end of the peer's, the system says this for its reset (tcp(7)).
            Err(Errno::PIPE) => return Err(ended_by("sending", Errno::PIPE, Ended::Closed)),
            Err(errno) => return Err(failed("sending", errno)),
        }
    }
}

/// Receives into `buffer`.
pub fn receive(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Received, Stop> {
    let room = buffer.len();
    received(room, || rustix::net::recv(fd, &mut *buffer, RecvFlags::DONTWAIT).map(|(_, bytes)| bytes))
}

/// Receives into the pieces first, then into `buffer`. Of a list of more than 64 pieces, the first 64 are
/// filled.
pub fn receive_scattered(fd: BorrowedFd<'_>, pieces: &[MemSeg], buffer: &mut [u8]) -> Result<Received, Stop> {
    const MOST: usize = 64;
    let mut list = smallvec::SmallVec::<[MemSeg; 16]>::new();
    list.extend(pieces.iter().take(MOST).copied());
    // Bytes may follow the pieces only if all of them fit.
    if list.len() == pieces.len() {
        list.push(MemSeg { addr: buffer.as_mut_ptr().expose_provenance() as u64, len: buffer.len() });
    }
    let room: usize = list.iter().map(|piece| piece.len).sum();
    // SAFETY: as in `send`; the kernel writes to memory that the program registered for it, and to `buffer`,
    // which is borrowed for this call.
    let slices =
        unsafe { std::slice::from_raw_parts_mut(list.as_mut_ptr().cast::<IoSliceMut<'_>>(), list.len()) };
    let mut control = RecvAncillaryBuffer::default();
    received(room, || {
        rustix::net::recvmsg(fd, &mut *slices, &mut control, RecvFlags::DONTWAIT).map(|message| message.bytes)
    })
}

#[inline]
fn received(room: usize, mut receive: impl FnMut() -> Result<usize, Errno>) -> Result<Received, Stop> {
    loop {
        match receive() {
            Ok(0) => return Err(Stop::Ended(Ended::Closed)),
            // A short receive has emptied the socket.
            Ok(bytes) => return Ok(Received { bytes, drained: bytes < room }),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Err(Stop::Later),
            Err(errno) => return Err(failed("receiving", errno)),
        }
    }
}

/// What an error of the system means for a stream.
#[cold]
fn failed(what: &str, errno: Errno) -> Stop {
    match errno {
        Errno::FAULT => Stop::Unmapped,
        // The system's own probes of a silent peer were not answered.
        Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH => ended_by(what, errno, Ended::Silent),
        _ => ended_by(what, errno, Ended::Broken),
    }
}

#[cold]
fn ended_by(what: &str, errno: Errno, ended: Ended) -> Stop {
    tracing::debug!("{what} failed: {errno}");
    Stop::Ended(ended)
}

/// Whether the peer has closed its side, or the connection is broken. Bytes that arrived before may still
/// wait to be read. Checks the socket itself, because the caller may have missed the notification.
pub fn ended(fd: BorrowedFd<'_>) -> Option<Ended> {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::RDHUP)];
    if rustix::event::poll(&mut fds, Some(&Timespec::default())).is_err() {
        return None;
    }
    match fds[0].revents() {
        found if found.contains(PollFlags::ERR) => Some(Ended::Broken),
        found => (!found.is_empty()).then_some(Ended::Closed),
    }
}

/// What a receive would find: `Some(true)`: bytes; `Some(false)`: the end; `None`: nothing yet.
pub fn peek(fd: BorrowedFd<'_>) -> Option<bool> {
    match rustix::net::recv(fd, &mut [0u8], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((bytes, _)) => Some(bytes > 0),
        Err(Errno::AGAIN | Errno::INTR) => None,
        Err(_) => Some(false),
    }
}

/// Sets the traffic class of what is sent to this peer from now on.
pub fn set_traffic_class(fd: BorrowedFd<'_>, peer: SocketAddr, class: u8) -> Result<(), Errno> {
    match peer.ip().to_canonical() {
        IpAddr::V4(_) => rustix::net::sockopt::set_ip_tos(fd, class),
        IpAddr::V6(_) => rustix::net::sockopt::set_ipv6_tclass(fd, u32::from(class)),
    }
}

/// The effective maximum segment size of a connected socket in bytes, `None` if the system does not report
/// it.
pub fn emss(fd: impl AsFd) -> Option<u32> {
    let mut value: libc::c_int = 0;
    // SAFETY: one int.
    let known = unsafe { option(fd.as_fd(), libc::TCP_MAXSEG, &mut value) };
    known.then(|| u32::try_from(value).ok()).flatten().filter(|v| *v > 0)
}

/// Bytes sent that the peer's TCP has not acknowledged: all that can be, if the system does not say.
pub fn unacknowledged(fd: impl AsFd) -> usize {
    let mut value: libc::c_int = 0;
    // SAFETY: TIOCOUTQ (SIOCOUTQ) writes one int.
    let rc =
        unsafe { libc::syscall(libc::SYS_ioctl, fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut value) };
    if rc == 0 { usize::try_from(value).unwrap_or(0) } else { usize::MAX }
}

/// Bytes that the system has taken and not sent once.
pub fn unsent(fd: impl AsFd) -> usize {
    // <linux/sockios.h>
    const SIOCOUTQNSD: libc::c_ulong = 0x894B;
    let mut value: libc::c_int = 0;
    // SAFETY: SIOCOUTQNSD writes one int.
    let rc = unsafe { libc::syscall(libc::SYS_ioctl, fd.as_fd().as_raw_fd(), SIOCOUTQNSD, &raw mut value) };
    if rc == 0 { usize::try_from(value).unwrap_or(0) } else { 0 }
}

/// Half-closes: after all that was sent, the peer sees the end of the stream.
pub fn shutdown_send(fd: BorrowedFd<'_>) {
    // Fails only when the connection is gone already.
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
}

/// Whether the close is a reset, which the peer sees even if it has not read everything.
pub fn reset_on_close(fd: BorrowedFd<'_>, reset: bool) {
    // If this fails, the close is an ordinary one.
    let _ = rustix::net::sockopt::set_socket_linger(fd, reset.then_some(Duration::ZERO));
}

/// Checks what the peer has acknowledged. `None` if the system does not report it.
pub fn answers(fd: BorrowedFd<'_>) -> Option<Answers> {
    /// A single probe may be lost, and the next may be two minutes later.
    const PROBES: u8 = 3;
    let info = info(fd)?;
    let waiting = unacknowledged(fd);
    Some(Answers {
        all: waiting == 0,
        held: waiting > 0 && info.tcpi_unacked == 0,
        doubtful: info.tcpi_retransmits > 0 || info.tcpi_probes >= PROBES,
        last: Duration::from_millis(info.tcpi_last_ack_recv.into()),
    })
}

/// Segments that the system has retransmitted since the connection was made; 0 if it does not report them.
pub fn retransmits(fd: BorrowedFd<'_>) -> u64 {
    info(fd).map_or(0, |info| info.tcpi_total_retrans.into())
}

fn info(fd: BorrowedFd<'_>) -> Option<libc::tcp_info> {
    // SAFETY: plain data, of which all zeros are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    // SAFETY: plain data; an older or newer system writes less.
    unsafe { option(fd, libc::TCP_INFO, &mut info) }.then_some(info)
}

/// Asks the system itself, as all calls here do: a program's own `getsockopt` or `ioctl`, or that of the
/// sockets library, may take the number for another descriptor.
///
/// # Safety
/// The value is plain data: whatever the system writes is valid.
unsafe fn option<T>(fd: BorrowedFd<'_>, name: libc::c_int, value: &mut T) -> bool {
    let (fd, level) = (fd.as_raw_fd(), libc::IPPROTO_TCP);
    let mut len = size_of::<T>() as libc::socklen_t;
    let (value, len) = (std::ptr::from_mut(value), &raw mut len);
    // SAFETY: `value` and `len` are valid for writes of the sizes given.
    unsafe { libc::syscall(libc::SYS_getsockopt, fd, level, name, value, len) == 0 }
}

/// A peer from which nothing has arrived for this time is probed, at this interval; after this many probes
/// without an answer the connection is broken.
const QUIET: Duration = Duration::from_secs(30);
const PROBE_EVERY: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

/// Makes the system probe a quiet peer.
///
/// This does not use `TCP_USER_TIMEOUT`, which also ends connections to peers that answer but do not read,
/// such as one whose program was stopped, or has posted no receive for a while.
pub fn probe_when_quiet(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_keepalive(fd, true)?;
    rustix::net::sockopt::set_tcp_keepidle(fd, QUIET)?;
    rustix::net::sockopt::set_tcp_keepintvl(fd, PROBE_EVERY)?;
    rustix::net::sockopt::set_tcp_keepcnt(fd, PROBES)
}
