//! UDP as the lower layer of datagram services.
//!
//! One socket of a process serves many queue pairs, so every datagram has its destination and, on the way in,
//! the address of this host that it was sent to. It is an IPv6 socket if the system has IPv6; IPv4 addresses
//! are then mapped (RFC 4291 section 2.5.5.2); callers see plain addresses.
//!
//! The system takes several datagrams as one (`UDP_SEGMENT`) and gives several as one (`UDP_GRO`). So those
//! that are posted together, go to one receiver and are of one length (the last may be shorter) are sent by
//! one call. Each keeps its own piece of the gather list, so nothing is copied for it; those that lie one
//! behind the other go as one piece ([`Socket::send_run`]), for the system looks after each piece. Where it
//! refuses (longer than the path's MTU, a device without checksums, an older system), they go one by one, and
//! no longer ones are tried again on that socket. Datagrams to groups are not joined: each member's socket
//! would have to cut for itself. Lists of 32 of 1 KiB over loopback on a busy machine: 54,000 a second
//! before, 620,000 with both. Messages that are posted one at a time gain nothing. The wire does not change.

// Reason: message headers with their addresses are passed to the kernel.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto};
use smallvec::SmallVec;
use uwarp_process::Descriptor;

pub use self::slot::{Datagrams, Slot};

mod slot;

/// Most datagrams that one call sends or receives.
pub const BATCH: usize = 32;
/// Most datagrams of [`Socket::send_joined`]: of full length on an Ethernet, as many as one send may have
/// bytes.
pub const RUN: usize = 44;
/// Room for waiting datagrams, see [`Socket::make_room`]: for some thousand of one kilobyte, as the system
/// counts.
const ROOM: usize = 4 << 20;
/// Room for everything that one call of the system may return from one sender: the largest datagram, or
/// several joined. Not a power of two, so that the headers of small datagrams do not all use the same lines
/// of the processor's cache.
pub const SLOT: usize = 65_536 + 192;
/// Largest number of bytes of joined datagrams; the system's limit is that of one datagram.
pub const MOST_JOINED: usize = 65_000;
/// The system splits a send into at most 64 datagrams (UDP_MAX_SEGMENTS).
const _: () = assert!(BATCH <= 64 && RUN <= 64);

/// Where a datagram goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Route {
    /// Address and port of the receiver; an IPv6 link-local address needs its scope.
    pub to: SocketAddr,
    /// The address of this host that it comes from; none: the system chooses.
    pub from: Option<IpAddr>,
}

/// What a datagram's IP header shows, where its sender chooses; 0: the system's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Marks {
    /// Type of service, or traffic class.
    pub traffic_class: u8,
    /// Time to live.
    pub hop_limit: u8,
}

/// A datagram to send.
#[derive(Debug, Clone, Copy)]
pub struct Outgoing<'a> {
    /// Where it goes.
    pub route: &'a Route,
    /// All of it.
    pub bytes: &'a [u8],
}

/// A datagram that was received, in the buffer that the caller gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Incoming {
    /// Where it begins in the buffer.
    pub start: usize,
    /// Its length in bytes, at most that of a slot.
    pub len: usize,
    /// The sender's address.
    pub from: SocketAddr,
    /// The address it was sent to: this host's, or a group's. Unspecified if the system does not report it.
    pub to: IpAddr,
    /// The interface that it came in by, or by which a copy of one for a group went out; 0 if the system does
    /// not tell.
    pub interface: u32,
    /// It was longer than the slot, and its end is lost.
    pub truncated: bool,
}

/// What one call has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Received {
    /// Slots that were filled.
    pub slots: usize,
    /// Datagrams in them.
    pub datagrams: usize,
}

/// How many datagrams, counted from the first, the system can send as one and split: to one receiver, all as
/// long as the first, except that the last may be shorter. Not for groups: each of their members would have
/// to split for itself.
fn run(batch: &[Outgoing<'_>], cut_up_to: usize) -> usize {
    let Some(first) = batch.first() else { return 0 };
    let length = first.bytes.len();
    if length == 0 || length > cut_up_to || first.route.to.ip().is_multicast() {
        return 1;
    }
    let (mut count, mut total) = (1, length);
    for out in batch.iter().skip(1) {
        total += out.bytes.len();
        let fits = out.route == first.route && out.bytes.len() <= length && !out.bytes.is_empty();
        if !fits || total > MOST_JOINED {
            break;
        }
        count += 1;
        if out.bytes.len() < length {
            break;
        }
    }
    count
}

/// Whether the system refuses to send datagrams as one: they are longer than the path's MTU, the device has
/// no checksum offload, or it is an older system.
pub fn refuses_to_cut(error: Errno) -> bool {
    matches!(error, Errno::INVAL | Errno::MSGSIZE | Errno::IO | Errno::OPNOTSUPP)
}

/// How many datagrams, counted from the first, have the same marks.
fn alike(marks: &[Marks]) -> usize {
    let Some(first) = marks.first() else { return usize::MAX };
    marks.iter().take_while(|mark| *mark == first).count()
}

/// Adds control data for the marks, by the family of the receiver: to one of IPv4, a socket of IPv6 sends
/// IPv4.
fn put_marks(control: &mut Control, at: usize, to: &SocketAddr, marks: Marks) -> usize {
    if marks == Marks::default() {
        return 0;
    }
    let (level, class, limit) = match to.ip().to_canonical() {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_TOS, libc::IP_TTL),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_TCLASS, libc::IPV6_HOPLIMIT),
    };
    let mut used = 0;
    for (kind, value) in [(class, marks.traffic_class), (limit, marks.hop_limit)] {
        if value != 0 {
            used += put_control(control, at + used, level, kind, libc::c_int::from(value));
        }
    }
    used
}

/// A further descriptor of a socket.
pub type Duplicate = OwnedFd;

/// A UDP socket on one port of all of the host's addresses.
#[derive(Debug)]
pub struct Socket {
    fd: Descriptor,
    ipv6: bool,
    /// Longest datagrams that are passed to the system joined; shorter once it has refused.
    cut_up_to: AtomicUsize,
}

/// Control data of one datagram: the packet information of either family, and the length that joined
/// datagrams have.
const CONTROL: usize = 128;

/// Aligned as control headers must be.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; CONTROL]);

impl Socket {
    /// Opens a non-blocking socket that is closed on exec. Port 0: the system chooses.
    pub fn bind(port: u16) -> Result<Self, Errno> {
        Self::bind_with(port, false)
    }

    /// The same for a port that several processes receive the same groups on.
    pub fn bind_shared(port: u16) -> Result<Self, Errno> {
        Self::bind_with(port, true)
    }

    /// A socket that is bound to this address; port 0 takes a free one.
    pub fn bind_address(address: SocketAddr) -> Result<Self, Errno> {
        Self::bind_to(&address, false)
    }

    /// From now on it receives from this peer only, and reports its errors: `CONNREFUSED` if nothing listens
    /// there.
    pub fn connect(&self, peer: SocketAddr) -> Result<(), Errno> {
        rustix::net::connect(&self.fd, &peer)
    }

    fn bind_with(port: u16, shared: bool) -> Result<Self, Errno> {
        let any = [
            SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)),
            SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)),
        ];
        let mut failure = Errno::AFNOSUPPORT;
        for address in any {
            match Self::bind_to(&address, shared) {
                Ok(socket) => return Ok(socket),
                // The port is taken in IPv6; with IPv4 alone it would serve only one family.
                Err(Errno::ADDRINUSE) => return Err(Errno::ADDRINUSE),
                Err(e) => failure = e,
            }
        }
        Err(failure)
    }

    fn bind_to(address: &SocketAddr, shared: bool) -> Result<Self, Errno> {
        let ipv6 = address.is_ipv6();
        let family = if ipv6 { AddressFamily::INET6 } else { AddressFamily::INET };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = || rustix::net::socket_with(family, SocketType::DGRAM, flags, Some(ipproto::UDP));
        let fd = Descriptor::made(socket)?;
        if ipv6 {
            rustix::net::sockopt::set_ipv6_v6only(&fd, false)?;
            set_option(fd.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, 1)?;
            // Otherwise a socket receives groups that any other socket of the host has joined.
            let _ = set_option(fd.as_fd(), libc::IPPROTO_IPV6, IPV6_MULTICAST_ALL, 0);
        } else {
            set_option(fd.as_fd(), libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
        }
        let _ = set_option(fd.as_fd(), libc::IPPROTO_IP, libc::IP_MULTICAST_ALL, 0);
        if shared {
            rustix::net::sockopt::set_socket_reuseaddr(&fd, true)?;
        }
        rustix::net::sockopt::set_socket_broadcast(&fd, true)?;
        rustix::net::bind(&fd, address)?;
        Ok(Self { fd, ipv6, cut_up_to: AtomicUsize::new(usize::MAX) })
    }

    /// Lets the system keep datagrams that arrive while the process does not receive, as far as the system
    /// allows: without the right to more, up to `net.core.rmem_max`. The memory is used only when needed.
    /// From then on, the system may pass several datagrams joined.
    pub fn make_room(&self) {
        // Joined datagrams need slots of 64 KiB ([`SLOT`]). An older system does not join.
        let _ = set_option(self.fd.as_fd(), libc::SOL_UDP, libc::UDP_GRO, 1);
        let forced = rustix::net::sockopt::set_socket_recv_buffer_size_force(&self.fd, ROOM);
        if forced.is_err() {
            // The system lowers this to its limit.
            let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&self.fd, ROOM);
        }
    }

    /// What the system keeps of datagrams that wait, in bytes as it counts them (`SO_RCVBUF`).
    pub fn room(&self) -> usize {
        rustix::net::sockopt::socket_recv_buffer_size(&self.fd).unwrap_or(0)
    }

    /// Datagrams that found no room since the socket was made (`SO_MEMINFO`); `None`: the system does not
    /// say.
    pub fn drops(&self) -> Option<u32> {
        /// `SK_MEMINFO_VARS`, and the place of `SK_MEMINFO_DROPS`.
        const VALUES: usize = 9;
        const DROPS: usize = 8;
        let mut values = [0u32; VALUES];
        let mut len = size_of_val(&values) as libc::socklen_t;
        // SAFETY: the system writes at most `len` bytes to `values`, and any bytes are numbers.
        let result = unsafe {
            let to = values.as_mut_ptr().cast();
            libc::getsockopt(self.fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_MEMINFO, to, &raw mut len)
        };
        (result == 0 && len as usize == size_of_val(&values)).then(|| values[DROPS])
    }

    /// Its port.
    pub fn port(&self) -> Result<u16, Errno> {
        let address = rustix::net::getsockname(&self.fd)?;
        SocketAddr::try_from(address).map(|address| address.port())
    }

    /// Another descriptor of the same socket.
    pub fn duplicate(&self) -> Result<Duplicate, Errno> {
        rustix::io::fcntl_dupfd_cloexec(self.fd(), 0)
    }

    /// The descriptor, to wait for readiness.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Sends datagrams in order, at most [`BATCH`]; returns how many the kernel took, at least one. `AGAIN`:
    /// there is no room for the first. Any other error is the first one's; it was not sent.
    pub fn send(&self, batch: &[Outgoing<'_>]) -> Result<usize, Errno> {
        self.send_marked(batch, &[])
    }

    /// The same; `marks` are those of the datagrams in the same order, and what lies beyond its end has none.
    pub fn send_marked(&self, batch: &[Outgoing<'_>], marks: &[Marks]) -> Result<usize, Errno> {
        // Clearing the space for many headers would take longer than the rest of the send.
        if batch.len() == 1 {
            self.send_some::<1>(batch, marks)
        } else {
            self.send_some::<BATCH>(batch, marks)
        }
    }

    /// Sends datagrams in one call that lie one behind the other in `bytes`, all of this length, but the last
    /// may be shorter. At most [`RUN`], and of [`MOST_JOINED`] bytes. Returns how many the kernel took.
    pub fn send_joined(&self, route: &Route, bytes: &[u8], length: usize) -> Result<usize, Errno> {
        self.send_run(route, Marks::default(), bytes, length)
    }

    /// The same; all of them have these marks. To a group, they go one by one.
    pub fn send_run(&self, route: &Route, marks: Marks, bytes: &[u8], length: usize) -> Result<usize, Errno> {
        if bytes.len() <= length {
            return self.send_some::<1>(&[Outgoing { route, bytes }], &[marks]);
        }
        if !self.cuts(length) || route.to.ip().is_multicast() {
            return self.send_apart(route, marks, bytes, length);
        }
        match self.send_as_one(route, marks, bytes, length) {
            Err(error) if refuses_to_cut(error) => {
                self.cut_up_to.fetch_min(length.saturating_sub(1), Ordering::Relaxed);
                self.send_apart(route, marks, bytes, length)
            }
            sent => sent,
        }
    }

    /// In one call, which the system cuts.
    fn send_as_one(&self, route: &Route, marks: Marks, bytes: &[u8], length: usize) -> Result<usize, Errno> {
        let count = bytes.len().div_ceil(length.max(1));
        let mut name = MaybeUninit::<libc::sockaddr_in6>::uninit();
        let mut control = Control([0; CONTROL]);
        let mut piece = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        // SAFETY: plain data, of which all zeros are valid.
        let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
        (header.msg_iov, header.msg_iovlen) = (&raw mut piece, 1);
        header.msg_name = name.as_mut_ptr().cast();
        header.msg_namelen = self.put_address(&mut name, &route.to);
        let mut used = route.from.map_or(0, |from| self.put_source(&mut control, from));
        used += put_marks(&mut control, used, &route.to, marks);
        let segment = u16::try_from(length).unwrap_or(u16::MAX);
        used += put_control(&mut control, used, libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        (header.msg_control, header.msg_controllen) = (control.0.as_mut_ptr().cast(), used as _);
        let fd = libc::c_long::from(self.fd.as_raw_fd());
        let flags = libc::c_long::from(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // SAFETY: the header names an address, control data and bytes that live until the call returns; the
        // kernel only reads the bytes.
        let sent = quietly(|| unsafe { libc::syscall(libc::SYS_sendmsg, fd, &raw const header, flags) });
        sent.map(|_| count)
    }

    /// Whether the system is known not to refuse to cut datagrams of this length.
    pub fn cuts(&self, length: usize) -> bool {
        length <= self.cut_up_to.load(Ordering::Relaxed)
    }

    /// As [`Self::send_run`], but a refusal to cut ([`refuses_to_cut`]) is the caller's: he may know why, and
    /// that it concerns one path only.
    pub fn send_cut(&self, route: &Route, marks: Marks, bytes: &[u8], length: usize) -> Result<usize, Errno> {
        if bytes.len() <= length || !self.cuts(length) {
            return self.send_apart(route, marks, bytes, length);
        }
        self.send_as_one(route, marks, bytes, length)
    }

    /// The same, one by one, at most [`BATCH`].
    pub fn send_apart(
        &self,
        route: &Route,
        marks: Marks,
        bytes: &[u8],
        length: usize,
    ) -> Result<usize, Errno> {
        let batch: SmallVec<[Outgoing<'_>; 1]> =
            bytes.chunks(length.max(1)).take(BATCH).map(|bytes| Outgoing { route, bytes }).collect();
        self.send_runs::<BATCH>(&batch, &[marks; BATCH], 0).map_err(|(error, _)| error)
    }

    fn send_some<const N: usize>(&self, batch: &[Outgoing<'_>], marks: &[Marks]) -> Result<usize, Errno> {
        match self.send_runs::<N>(batch, marks, self.cut_up_to.load(Ordering::Relaxed)) {
            Err((error, Some(length))) if refuses_to_cut(error) => {
                self.cut_up_to.fetch_min(length.saturating_sub(1), Ordering::Relaxed);
                self.send_runs::<N>(batch, marks, 0).map_err(|(e, _)| e)
            }
            sent => sent.map_err(|(e, _)| e),
        }
    }

    /// One header for each run of datagrams that the system can split ([`run`]). An error contains the length
    /// of the first datagram if it began such a run.
    fn send_runs<const N: usize>(
        &self,
        batch: &[Outgoing<'_>],
        mut marks: &[Marks],
        cut_up_to: usize,
    ) -> Result<usize, (Errno, Option<usize>)> {
        let mut names = [MaybeUninit::<libc::sockaddr_in6>::uninit(); N];
        let mut controls = [Control([0; CONTROL]); N];
        let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; N];
        let mut runs = [0; N];
        // SAFETY: plain data, of which all zeros are valid.
        let mut headers: [libc::mmsghdr; N] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let (mut rest, mut room) = (batch, &mut pieces[..]);
        let places = names.iter_mut().zip(&mut controls).zip(&mut runs).zip(&mut headers);
        for (((name, control), run_len), header) in places {
            let Some(first) = rest.first() else { break };
            let run = run(rest, cut_up_to).min(room.len()).min(alike(marks));
            if run == 0 {
                break;
            }
            let mark = marks.first().copied().unwrap_or_default();
            marks = marks.get(run..).unwrap_or(&[]);
            let (datagrams, behind) = rest.split_at(run);
            let (own, free) = std::mem::take(&mut room).split_at_mut(run);
            (rest, room) = (behind, free);
            for (out, piece) in datagrams.iter().zip(own.iter_mut()) {
                piece.iov_base = out.bytes.as_ptr().cast_mut().cast();
                piece.iov_len = out.bytes.len();
            }
            let header = &mut header.msg_hdr;
            header.msg_iov = own.as_mut_ptr();
            header.msg_iovlen = run as _;
            header.msg_name = name.as_mut_ptr().cast();
            header.msg_namelen = self.put_address(name, &first.route.to);
            let mut used = first.route.from.map_or(0, |from| self.put_source(control, from));
            used += put_marks(control, used, &first.route.to, mark);
            if run > 1 {
                let length = u16::try_from(first.bytes.len()).unwrap_or(u16::MAX);
                used += put_control(control, used, libc::SOL_UDP, libc::UDP_SEGMENT, length);
            }
            if used > 0 {
                header.msg_controllen = used as _;
                header.msg_control = control.0.as_mut_ptr().cast();
            }
            *run_len = run;
            count += 1;
        }
        let fd = libc::c_long::from(self.fd.as_raw_fd());
        let flags = libc::c_long::from(libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        // Not libc's functions, which are cancellation points: a thread that posts or polls has locks, and
        // neither verb may end it (pthreads(7)).
        // SAFETY: the first `count` headers name addresses, control data and bytes that live until the call
        // returns; the kernel only reads the bytes.
        let sent = quietly(|| unsafe {
            match count {
                1 => match libc::syscall(libc::SYS_sendmsg, fd, &raw const headers[0].msg_hdr, flags) {
                    n if n < 0 => -1,
                    _ => 1,
                },
                _ => libc::syscall(libc::SYS_sendmmsg, fd, headers.as_mut_ptr(), count, flags),
            }
        });
        let cut = batch.first().map(|first| first.bytes.len()).filter(|_| runs.first() > Some(&1));
        let sent = sent.map_err(|error| (error, cut))?;
        Ok(runs.iter().take(sent).sum())
    }

    /// Receives into up to `most` (and [`BATCH`]) slots of `slot` bytes of `buffer`, and calls `each` for the
    /// datagrams in them in order of arrival: one in a slot, or several that the system has joined. `AGAIN`
    /// if there are none.
    pub fn receive(
        &self,
        buffer: &mut [u8],
        slot: usize,
        most: usize,
        mut each: impl FnMut(&[u8], Incoming),
    ) -> Result<Received, Errno> {
        self.receive_slots(buffer, slot, most, |slot| {
            slot.each().for_each(|(bytes, incoming)| each(bytes, incoming));
        })
    }

    /// The same; `each` is called for each slot.
    pub fn receive_slots(
        &self,
        buffer: &mut [u8],
        slot: usize,
        most: usize,
        each: impl FnMut(Slot<'_>),
    ) -> Result<Received, Errno> {
        if most == 1 {
            self.receive_some::<1>(buffer, slot, most, each)
        } else {
            self.receive_some::<BATCH>(buffer, slot, most, each)
        }
    }

    fn receive_some<const N: usize>(
        &self,
        buffer: &mut [u8],
        slot: usize,
        most: usize,
        mut each: impl FnMut(Slot<'_>),
    ) -> Result<Received, Errno> {
        let mut names = [MaybeUninit::<libc::sockaddr_storage>::uninit(); N];
        let mut controls = [MaybeUninit::<Control>::uninit(); N];
        let mut pieces = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; N];
        // SAFETY: plain data, of which all zeros are valid.
        let mut headers: [libc::mmsghdr; N] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        let places = names.iter_mut().zip(&mut controls).zip(&mut pieces).zip(&mut headers);
        for (chunk, (((name, control), piece), header)) in buffer.chunks_exact_mut(slot.max(1)).zip(places) {
            if count == most {
                break;
            }
            piece.iov_base = chunk.as_mut_ptr().cast();
            piece.iov_len = chunk.len();
            header.msg_hdr.msg_iov = piece;
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_name = name.as_mut_ptr().cast();
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_storage>() as _;
            header.msg_hdr.msg_control = control.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = CONTROL as _;
            count += 1;
        }
        let fd = libc::c_long::from(self.fd.as_raw_fd());
        let flags = libc::c_long::from(libc::MSG_DONTWAIT);
        // SAFETY: the first `count` headers name room for addresses, control data and bytes that is valid for
        // writes of the lengths given until the call returns.
        let slots = quietly(|| unsafe {
            match count {
                0 => 0,
                1 => match libc::syscall(libc::SYS_recvmsg, fd, &raw mut headers[0].msg_hdr, flags) {
                    n if n < 0 => -1,
                    n => {
                        headers[0].msg_len = u32::try_from(n).unwrap_or(0);
                        1
                    }
                },
                _ => {
                    let no_limit = std::ptr::null_mut::<libc::timespec>();
                    libc::syscall(libc::SYS_recvmmsg, fd, headers.as_mut_ptr(), count, flags, no_limit)
                }
            }
        })?;
        let mut datagrams = 0;
        for (i, header) in headers.iter().take(slots).enumerate() {
            let start = i * slot;
            let len = (header.msg_len as usize).min(slot);
            // SAFETY: the kernel has filled in the address and the control data of this header, which live in
            // this frame.
            let (from, (to, interface, joined)) =
                unsafe { (address_of(&header.msg_hdr), information_of(&header.msg_hdr)) };
            let Some(from) = from else { continue };
            let truncated = header.msg_hdr.msg_flags & libc::MSG_TRUNC != 0;
            // The system joins datagrams of one length; the last may be shorter.
            let length = joined.filter(|joined| *joined > 0).unwrap_or(len);
            let bytes = buffer.get(start..start + len).unwrap_or(&[]);
            let slot = Slot::new(bytes, length, Incoming { start, len, from, to, interface, truncated });
            datagrams += slot.count();
            each(slot);
        }
        Ok(Received { slots, datagrams })
    }

    /// Writes an address in this socket's family; returns its length.
    fn put_address(&self, name: &mut MaybeUninit<libc::sockaddr_in6>, to: &SocketAddr) -> libc::socklen_t {
        // SAFETY: plain data, of which all zeros are valid.
        let mut out: libc::sockaddr_in6 = unsafe { std::mem::zeroed() };
        if self.ipv6 {
            let (ip, scope) = match to {
                SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
                SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
            };
            out.sin6_family = libc::AF_INET6 as _;
            out.sin6_port = to.port().to_be();
            out.sin6_addr.s6_addr = ip.octets();
            out.sin6_scope_id = scope;
            name.write(out);
            return size_of::<libc::sockaddr_in6>() as _;
        }
        name.write(out);
        // SAFETY: an IPv4 address is shorter than the zeroed room for one of IPv6, and aligned no more
        // strictly. One of IPv6 does not fit this socket and stays a family of 0, which the system refuses.
        let v4 = unsafe { &mut *name.as_mut_ptr().cast::<libc::sockaddr_in>() };
        if let IpAddr::V4(ip) = to.ip() {
            v4.sin_family = libc::AF_INET as _;
            v4.sin_port = to.port().to_be();
            v4.sin_addr.s_addr = u32::from(ip).to_be();
        }
        size_of::<libc::sockaddr_in>() as _
    }

    /// Writes the control message that chooses the source address; returns its length.
    fn put_source(&self, control: &mut Control, from: IpAddr) -> usize {
        if self.ipv6 {
            let ip = match from {
                IpAddr::V4(v4) => v4.to_ipv6_mapped(),
                IpAddr::V6(v6) => v6,
            };
            let info =
                libc::in6_pktinfo { ipi6_addr: libc::in6_addr { s6_addr: ip.octets() }, ipi6_ifindex: 0 };
            return put_control(control, 0, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
        }
        let IpAddr::V4(ip) = from else { return 0 };
        let info = libc::in_pktinfo {
            ipi_ifindex: 0,
            ipi_spec_dst: libc::in_addr { s_addr: u32::from(ip).to_be() },
            ipi_addr: libc::in_addr { s_addr: 0 },
        };
        put_control(control, 0, libc::IPPROTO_IP, libc::IP_PKTINFO, info)
    }

    /// Joins a group on the interface with number `interface` (0: the system chooses).
    pub fn join(&self, group: IpAddr, interface: u32) -> Result<(), Errno> {
        self.membership(group, interface, libc::MCAST_JOIN_GROUP)
    }

    /// Leaves the group.
    pub fn leave(&self, group: IpAddr, interface: u32) -> Result<(), Errno> {
        self.membership(group, interface, libc::MCAST_LEAVE_GROUP)
    }

    fn membership(&self, group: IpAddr, interface: u32, what: libc::c_int) -> Result<(), Errno> {
        let level = if group.is_ipv4() { libc::IPPROTO_IP } else { libc::IPPROTO_IPV6 };
        // SAFETY: plain data, of which all zeros are valid.
        let mut request: GroupRequest = unsafe { std::mem::zeroed() };
        request.interface = interface;
        let place = (&raw mut request.group).cast::<libc::c_void>();
        // SAFETY: an address of either family fits the zeroed storage and is aligned no more strictly.
        unsafe {
            match group {
                IpAddr::V4(ip) => {
                    let v4 = &mut *place.cast::<libc::sockaddr_in>();
                    v4.sin_family = libc::AF_INET as _;
                    v4.sin_addr.s_addr = u32::from(ip).to_be();
                }
                IpAddr::V6(ip) => {
                    let v6 = &mut *place.cast::<libc::sockaddr_in6>();
                    v6.sin6_family = libc::AF_INET6 as _;
                    v6.sin6_addr.s6_addr = ip.octets();
                }
            }
        }
        set_option(self.fd.as_fd(), level, what, request)
    }
}

/// `struct group_req` (RFC 3678 section 5.1).
#[repr(C)]
#[derive(Clone, Copy)]
struct GroupRequest {
    interface: u32,
    group: libc::sockaddr_storage,
}

/// Not in the C library's headers of Debian 12: linux/in6.h.
const IPV6_MULTICAST_ALL: libc::c_int = 29;

pub(crate) fn set_option<T: Copy>(
    fd: BorrowedFd<'_>,
    level: libc::c_int,
    name: libc::c_int,
    value: T,
) -> Result<(), Errno> {
    let len = size_of::<T>() as libc::socklen_t;
    let (fd, value) = (fd.as_raw_fd(), &raw const value);
    // SAFETY: the value is plain data of the length given, and only read.
    let rc = unsafe { libc::syscall(libc::SYS_setsockopt, fd, level, name, value, len) };
    if rc == 0 { Ok(()) } else { Err(last_error()) }
}

/// Writes a control message after `used` bytes of others; returns its length. [`CONTROL`] has room for all
/// that a datagram can have.
fn put_control<T: Copy>(
    control: &mut Control,
    used: usize,
    level: libc::c_int,
    kind: libc::c_int,
    value: T,
) -> usize {
    let space = const { size_of::<libc::cmsghdr>() + size_of::<T>().next_multiple_of(8) };
    assert!(used + space <= CONTROL && used.is_multiple_of(8));
    let len = size_of::<T>() as u32;
    // SAFETY: the header and a value of this size fit the buffer after the others (asserted), and the place
    // is aligned for the header.
    unsafe {
        let header = control.0.as_mut_ptr().add(used).cast::<libc::cmsghdr>();
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = libc::CMSG_LEN(len) as _;
        libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
        libc::CMSG_SPACE(len) as usize
    }
}

/// # Safety
/// The kernel has filled in the name that `header` points to.
unsafe fn address_of(header: &libc::msghdr) -> Option<SocketAddr> {
    if (header.msg_namelen as usize) < size_of::<libc::sockaddr_in>() {
        return None;
    }
    // SAFETY: the caller's promise; the family shows which structure it is.
    unsafe {
        match i32::from((*header.msg_name.cast::<libc::sockaddr>()).sa_family) {
            libc::AF_INET => {
                let v4 = header.msg_name.cast::<libc::sockaddr_in>().read();
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::from((ip, u16::from_be(v4.sin_port))))
            }
            libc::AF_INET6 => {
                let v6 = header.msg_name.cast::<libc::sockaddr_in6>().read();
                let (ip, port) = (Ipv6Addr::from(v6.sin6_addr.s6_addr), u16::from_be(v6.sin6_port));
                Some(match ip.to_ipv4_mapped() {
                    Some(v4) => SocketAddr::from((v4, port)),
                    None => SocketAddrV6::new(ip, port, 0, v6.sin6_scope_id).into(),
                })
            }
            _ => None,
        }
    }
}

/// The address that a datagram was sent to and its interface, unspecified if the system does not report them,
/// and the length of those that it has joined.
///
/// # Safety
/// The kernel has filled in the control data that `header` points to.
unsafe fn information_of(header: &libc::msghdr) -> (IpAddr, u32, Option<usize>) {
    let (mut to, mut interface, mut joined) = (IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0, None);
    // SAFETY: the caller's promise; the walk stays within the length that the kernel wrote, and level and
    // type identify a message.
    unsafe {
        let mut at = libc::CMSG_FIRSTHDR(header);
        while !at.is_null() {
            match ((*at).cmsg_level, (*at).cmsg_type) {
                (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                    let info = libc::CMSG_DATA(at).cast::<libc::in_pktinfo>().read_unaligned();
                    to = Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)).into();
                    interface = info.ipi_ifindex.cast_unsigned();
                }
                (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                    let info = libc::CMSG_DATA(at).cast::<libc::in6_pktinfo>().read_unaligned();
                    let ip = Ipv6Addr::from(info.ipi6_addr.s6_addr);
                    to = ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4);
                    interface = info.ipi6_ifindex;
                }
                (libc::SOL_UDP, libc::UDP_GRO) => {
                    let length = libc::CMSG_DATA(at).cast::<libc::c_int>().read_unaligned();
                    joined = usize::try_from(length).ok();
                }
                _ => {}
            }
            at = libc::CMSG_NXTHDR(header, at);
        }
    }
    (to, interface, joined)
}

/// Makes a system call that polls and posts make all the time. `errno` stays as it was: programs look at it
/// after a poll that succeeds, too.
fn quietly(call: impl FnOnce() -> libc::c_long) -> Result<usize, Errno> {
    // SAFETY: the place where the C library keeps this thread's error number.
    let before = unsafe { *libc::__errno_location() };
    usize::try_from(call()).map_err(|_| {
        let error = last_error();
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = before };
        error
    })
}

fn last_error() -> Errno {
    // SAFETY: the place where the C library keeps this thread's error number.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}

#[cfg(test)]
mod tests;
