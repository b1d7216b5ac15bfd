//! TCP as iWARP's lower layer.

// Reason: lists of addresses are handed to the kernel.
#![allow(unsafe_code)]

use std::io::{IoSlice, IoSliceMut};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvFlags, SendAncillaryBuffer, SendFlags};

/// Bytes at an address, laid out like the system's `iovec`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Piece {
    addr: *mut core::ffi::c_void,
    len: usize,
}

const _: () = {
    assert!(size_of::<Piece>() == size_of::<libc::iovec>());
    assert!(size_of::<Piece>() == size_of::<IoSlice<'_>>());
    assert!(core::mem::offset_of!(Piece, addr) == core::mem::offset_of!(libc::iovec, iov_base));
    assert!(core::mem::offset_of!(Piece, len) == core::mem::offset_of!(libc::iovec, iov_len));
};

impl Piece {
    /// `len` bytes at virtual address `addr` of this process.
    pub fn new(addr: u64, len: usize) -> Self {
        Self { addr: std::ptr::with_exposed_provenance_mut(addr as usize), len }
    }
}

/// Most pieces that one call takes.
pub const MAX_PIECES: usize = 256;

/// Sends the pieces in order; returns how many bytes the kernel took. `AGAIN`: none fit; `FAULT`: a piece is not
/// mapped (bytes before it may have gone out on an earlier call).
pub fn send(fd: BorrowedFd<'_>, pieces: &[Piece]) -> Result<usize, Errno> {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    // SAFETY: IoSlice is documented to have the layout of `iovec`, as Piece has (asserted above). The slices exist only as
    // address and length on their way into the system call; no reference to their bytes is made in this process.
    let slices = unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast::<IoSlice<'_>>(), pieces.len()) };
    rustix::net::sendmsg(fd, slices, &mut SendAncillaryBuffer::default(), flags)
}

/// Sends bytes of ours; as [`send`], and cheaper for one piece.
pub fn send_bytes(fd: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    rustix::net::send(fd, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL)
}

/// Receives into `buffer`; 0 is the end of the stream.
pub fn recv(fd: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<usize, Errno> {
    rustix::net::recv(fd, buffer, RecvFlags::DONTWAIT).map(|(n, _)| n)
}

/// What [`recv_scattered`] received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scattered {
    /// Bytes in all; 0 is the end of the stream.
    pub bytes: usize,
    /// There was room for more: the socket is empty.
    pub short: bool,
}

/// Receives into the pieces first, then into `buffer`. Of a list of more than 64 pieces, the first 64 are filled.
pub fn recv_scattered(fd: BorrowedFd<'_>, pieces: &[Piece], buffer: &mut [u8]) -> Result<Scattered, Errno> {
    const MOST: usize = 64;
    let mut list = smallvec::SmallVec::<[Piece; 16]>::new();
    list.extend(pieces.iter().take(MOST).copied());
    // All pieces must fit before bytes may go behind them.
    if list.len() == pieces.len() {
        list.push(Piece { addr: buffer.as_mut_ptr().cast(), len: buffer.len() });
    }
    let room: usize = list.iter().map(|piece| piece.len).sum();
    // SAFETY: as in `send`; the kernel writes to memory that the program registered for it, and to `buffer`, which is
    // borrowed for this call.
    let slices =
        unsafe { std::slice::from_raw_parts_mut(list.as_mut_ptr().cast::<IoSliceMut<'_>>(), list.len()) };
    let mut control = RecvAncillaryBuffer::default();
    let bytes = rustix::net::recvmsg(fd, slices, &mut control, RecvFlags::DONTWAIT)?.bytes;
    Ok(Scattered { bytes, short: bytes < room })
}

/// Whether the peer has closed its side, or the connection is broken. A look at the socket, for it is too late to
/// have been told.
pub fn hung_up(fd: BorrowedFd<'_>) -> bool {
    !look(fd, PollFlags::RDHUP).is_empty()
}

/// Whether the connection is broken, though bytes that came before that may still wait to be read.
pub fn broken(fd: BorrowedFd<'_>) -> bool {
    look(fd, PollFlags::empty()).contains(PollFlags::ERR)
}

fn look(fd: BorrowedFd<'_>, for_what: PollFlags) -> PollFlags {
    let mut fds = [PollFd::from_borrowed_fd(fd, for_what)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    // An interruption: as if not asked.
    let asked = rustix::event::poll(&mut fds, Some(&now)).is_ok();
    if asked { fds[0].revents() } else { PollFlags::empty() }
}

/// Sets what every stream needs: no delay for small segments.
pub fn prepare(fd: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::net::sockopt::set_tcp_nodelay(fd, true)
}

/// The effective maximum segment size of a connected socket in bytes, `None` if the system does not tell.
pub fn emss(fd: impl AsFd) -> Option<u32> {
    let mut value: libc::c_int = 0;
    let mut len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `value` and `len` are valid for writes of the sizes given.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_MAXSEG,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    (rc == 0).then(|| u32::try_from(value).ok()).flatten().filter(|v| *v > 0)
}

/// The addresses of a connected socket: its own, the peer's.
pub fn addresses(fd: BorrowedFd<'_>) -> [Option<SocketAddr>; 2] {
    let own = rustix::net::getsockname(fd).ok().and_then(|address| SocketAddr::try_from(address).ok());
    let peer = rustix::net::getpeername(fd).ok().flatten();
    [own, peer.and_then(|address| SocketAddr::try_from(address).ok())]
}

/// Bytes sent that the peer's TCP has not acknowledged.
pub fn unacknowledged(fd: impl AsFd) -> usize {
    let mut value: libc::c_int = 0;
    // SAFETY: TIOCOUTQ (SIOCOUTQ) writes one int.
    let rc = unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut value) };
    if rc == 0 { usize::try_from(value).unwrap_or(0) } else { 0 }
}

/// Half-closes: the peer sees the end of the stream after all that was sent.
pub fn shutdown_send(fd: BorrowedFd<'_>) {
    // Fails only when the connection is gone already.
    let _ = rustix::net::shutdown(fd, rustix::net::Shutdown::Write);
}

/// Makes the close a reset, which the peer hears of whatever it has not read.
pub fn reset_on_close(fd: BorrowedFd<'_>) {
    // Without it the close is an ordinary one.
    let _ = rustix::net::sockopt::set_socket_linger(fd, Some(Duration::ZERO));
}

/// How the peer's system answers what was sent to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answers {
    /// Nothing waits for an answer.
    pub all: bool,
    /// All that was sent is answered, and more waits to be sent: the peer takes no more for now.
    pub held: bool,
    /// What was sent has been repeated, and repeated probes of a closed window are without answer: it may be gone.
    pub doubtful: bool,
    /// How long ago the last answer of any kind came; to the millisecond.
    pub last: Duration,
}

/// Looks at what the peer has acknowledged. `None` if the system does not tell.
pub fn answers(fd: BorrowedFd<'_>) -> Option<Answers> {
    /// A single probe may get lost, and the next is up to two minutes away.
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

/// Segments that the system has sent again since the connection was made; 0 if it does not tell.
pub fn retransmits(fd: BorrowedFd<'_>) -> u64 {
    info(fd).map_or(0, |info| info.tcpi_total_retrans.into())
}

fn info(fd: BorrowedFd<'_>) -> Option<libc::tcp_info> {
    // SAFETY: plain data, of which all zeros are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` and `len` are valid for writes of the sizes given; an older or newer system writes less.
    let rc = unsafe {
        libc::getsockopt(
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    (rc == 0).then_some(info)
}

/// Has the system ask a peer from which nothing has come for `idle`, every `interval`; without an answer to `count` questions
/// the connection is broken.
///
/// Not `TCP_USER_TIMEOUT`: it also ends connections to peers that answer and only do not read, such as one whose program was
/// stopped, or has posted no receive for a while.
pub fn ask_when_quiet(
    fd: BorrowedFd<'_>,
    idle: Duration,
    interval: Duration,
    count: u32,
) -> Result<(), Errno> {
    rustix::net::sockopt::set_socket_keepalive(fd, true)?;
    rustix::net::sockopt::set_tcp_keepidle(fd, idle)?;
    rustix::net::sockopt::set_tcp_keepintvl(fd, interval)?;
    rustix::net::sockopt::set_tcp_keepcnt(fd, count)
}
