//! What datagrams are compared with: the same over a bare UDP socket that is not connected.
//!
//! A socket that serves many peers names the receiver with each datagram, chooses the source address, and
//! learns which of its addresses a datagram was sent to. So the bare socket does all three, as uwarp does;
//! what it need not do each time (its headers, its buffers) it prepares once.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::protocol::{Failure, Figure, Result};
use super::raw::{NO_NUMBER, Raw, Trips, is_last};
use super::ways::{PATIENCE, Waiting};

/// Bytes that the system may hold for the receiver, as far as it allows: what uwarp requests.
const ROOM: libc::c_int = 4 << 20;
/// Largest batch of one system call.
const LARGEST_BATCH: usize = 64;
/// Room for one received datagram, and for several that the system has joined.
const SLOT: usize = 4352;
const JOINED: usize = 65536;
/// What a sender has not heard of for this long counts as lost: it goes on.
const SILENCE: Duration = Duration::from_millis(5);
/// Nothing more of a stream comes this long after its last datagram, also where the system is busy with other
/// things before it passes them on.
const LATE: Duration = Duration::from_millis(200);
/// Datagrams under way at most: as many of 1 KiB as fit the receiver's socket where the system allows no more
/// than its usual room. A sender without any limit measures how the system drops datagrams.
const WINDOW: u64 = 160;
/// The receiver reports after this number of datagrams.
const REPORT_EVERY: u64 = 64;

/// A socket and its peer's address.
pub struct RawUdp {
    socket: UdpSocket,
    peer: libc::sockaddr_in,
    own: Ipv4Addr,
}

/// Room for the packet information and a segment size.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Control([u8; 96]);

/// The headers of several datagrams, prepared once. They point into the boxes beside them.
struct Batch {
    headers: Vec<libc::mmsghdr>,
    _pieces: Vec<libc::iovec>,
    _names: Vec<libc::sockaddr_in>,
    _controls: Vec<Control>,
    buffer: Vec<u8>,
    slot: usize,
    /// What the system overwrites.
    control_len: usize,
}

impl Batch {
    fn new(count: usize, slot: usize, name: libc::sockaddr_in) -> Batch {
        let mut buffer = vec![0_u8; count * slot];
        let mut names = vec![name; count];
        let mut controls = vec![Control([0; 96]); count];
        let mut pieces: Vec<_> = buffer
            .chunks_exact_mut(slot)
            .map(|chunk| libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: slot })
            .collect();
        let places = pieces.iter_mut().zip(&mut names).zip(&mut controls);
        let headers = places
            .map(|((piece, name), control)| {
                // SAFETY: plain data, of which all zeros are valid.
                let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
                header.msg_hdr.msg_iov = piece;
                header.msg_hdr.msg_iovlen = 1;
                header.msg_hdr.msg_name = std::ptr::from_mut(name).cast();
                header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as _;
                header.msg_hdr.msg_control = control.0.as_mut_ptr().cast();
                header
            })
            .collect();
        let control_len = size_of::<Control>();
        Batch { headers, _pieces: pieces, _names: names, _controls: controls, buffer, slot, control_len }
    }

    /// For sending: each header chooses `own` as the source and, where the system cuts, says into what.
    fn outgoing(count: usize, size: usize, to: libc::sockaddr_in, own: Ipv4Addr, cut: bool) -> Batch {
        let mut batch = match cut {
            true => Batch::new(1, count * size, to),
            false => Batch::new(count, size, to),
        };
        let info = libc::in_pktinfo {
            ipi_ifindex: 0,
            ipi_spec_dst: libc::in_addr { s_addr: u32::from(own).to_be() },
            ipi_addr: libc::in_addr { s_addr: 0 },
        };
        for header in &mut batch.headers {
            let header = &mut header.msg_hdr;
            header.msg_controllen = size_of::<Control>() as _;
            // SAFETY: the control area is zeroed, aligned, and has room for both messages.
            unsafe {
                let first = libc::CMSG_FIRSTHDR(header);
                put(first, libc::IPPROTO_IP, libc::IP_PKTINFO, info);
                let mut len = libc::CMSG_SPACE(size_of::<libc::in_pktinfo>() as u32);
                if cut {
                    let next = first.cast::<u8>().add(len as usize).cast::<libc::cmsghdr>();
                    put(next, libc::SOL_UDP, libc::UDP_SEGMENT, size as u16);
                    len += libc::CMSG_SPACE(2);
                }
                header.msg_controllen = len as _;
            }
        }
        batch
    }
}

/// # Safety
/// `header` is aligned and has room behind it for the value.
unsafe fn put<T>(header: *mut libc::cmsghdr, level: libc::c_int, kind: libc::c_int, value: T) {
    // SAFETY: the caller's promise.
    unsafe {
        (*header).cmsg_level = level;
        (*header).cmsg_type = kind;
        (*header).cmsg_len = libc::CMSG_LEN(size_of::<T>() as u32) as _;
        libc::CMSG_DATA(header).cast::<T>().write_unaligned(value);
    }
}

impl RawUdp {
    /// Each end binds a port of its own, and learns the other's and its address over `raw`. `own` is the
    /// address that uwarp's datagrams have: a send to another address of the host than 127.0.0.1 takes the
    /// system half a microsecond more, because it keeps no route for it.
    pub fn new(raw: &mut Raw, own: IpAddr) -> Result<RawUdp> {
        let IpAddr::V4(own) = own else {
            return Err(Failure::new("datagrams are measured over IPv4 only"));
        };
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let socket = UdpSocket::bind(any).map_err(Failure::of("raw UDP: bind"))?;
        let port = socket.local_addr().map_err(Failure::of("raw UDP: bind"))?.port();
        let this = |peer_port: u16, peer: u32| {
            // SAFETY: plain data, of which all zeros are valid.
            let mut name: libc::sockaddr_in = unsafe { std::mem::zeroed() };
            name.sin_family = libc::AF_INET as _;
            name.sin_port = peer_port.to_be();
            name.sin_addr.s_addr = peer.to_be();
            name
        };
        raw.send_number(port.into())?;
        raw.send_number(u32::from(own).into())?;
        let peer_port = u16::try_from(raw.receive_number()?).map_err(Failure::of("raw UDP: a port"))?;
        let peer = u32::try_from(raw.receive_number()?).map_err(Failure::of("raw UDP: an address"))?;
        let this = RawUdp { socket, peer: this(peer_port, peer), own };
        this.set(libc::IPPROTO_IP, libc::IP_PKTINFO, 1)?;
        if this.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, ROOM).is_err() {
            this.set(libc::SOL_SOCKET, libc::SO_RCVBUF, ROOM)?;
        }
        Ok(this)
    }

    fn set(&self, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> Result<()> {
        let len = size_of::<libc::c_int>() as libc::socklen_t;
        // SAFETY: the value is a number of the length given, and only read.
        let rc =
            unsafe { libc::setsockopt(self.socket.as_raw_fd(), level, name, (&raw const value).cast(), len) };
        if rc == 0 { Ok(()) } else { Err(last("raw UDP: setsockopt")) }
    }

    /// Bytes of a datagram as long as uwarp's packets here, and how many go in a call, of `most`.
    pub fn packets(&self, most: u32) -> (usize, usize) {
        // Those that never leave the host, and those of an Ethernet.
        let is_local = u32::from(self.own).to_be() == self.peer.sin_addr.s_addr;
        let size: usize = if is_local { 15_616 } else { 1452 };
        // What one datagram of the system's can hold.
        (size, (most as usize).min(65_000 / size))
    }

    /// The active side of a ping-pong.
    pub fn ping(&self, size: usize, wait: Waiting, time: Duration) -> Result<Figure> {
        let (mut out, mut back) = self.ball(size);
        let mut trips = Trips::start(time);
        while let Some(number) = trips.next() {
            write(&mut out, size, number);
            self.send(&mut out)?;
            trips.end(self.receive_ball(&mut back, size, wait)?)?;
        }
        trips.figure(2)
    }

    /// The passive side.
    pub fn pong(&self, raw: &mut Raw, size: usize, wait: Waiting) -> Result<()> {
        let (mut out, mut back) = self.ball(size);
        raw.send_number(0)?;
        loop {
            let number = self.receive_ball(&mut back, size, wait)?;
            write(&mut out, size, number);
            self.send(&mut out)?;
            if is_last(number) {
                return Ok(());
            }
        }
    }

    fn ball(&self, size: usize) -> (Batch, Batch) {
        (Batch::outgoing(1, size, self.peer, self.own, false), Batch::new(1, SLOT, self.peer))
    }

    /// Waits for a number of the ping-pong.
    fn receive_ball(&self, batch: &mut Batch, size: usize, wait: Waiting) -> Result<u64> {
        loop {
            self.receive_one(batch, wait)?;
            let number = read(batch, size);
            if number != NO_NUMBER {
                return Ok(number);
            }
        }
    }

    fn receive_one(&self, batch: &mut Batch, wait: Waiting) -> Result<usize> {
        let mut waiting_since: Option<Instant> = None;
        loop {
            let patient = waiting_since.is_none_or(|since| since.elapsed() < PATIENCE);
            let blocks = wait == Waiting::Block || (wait == Waiting::SpinThenBlock && !patient);
            if wait == Waiting::Poll {
                let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
                rustix::event::poll(&mut fds, None).map_err(Failure::of("raw UDP: poll"))?;
            }
            match self.receive(batch, if blocks { 0 } else { libc::MSG_DONTWAIT })? {
                0 if wait == Waiting::SpinThenBlock => {
                    waiting_since.get_or_insert_with(Instant::now);
                }
                0 => {}
                n => return Ok(n),
            }
        }
    }

    /// Sends for about `time`, `list` datagrams of `size` bytes in a call. The figure is the peer's:
    /// datagrams a second that arrived.
    pub fn stream(
        &self,
        raw: &mut Raw,
        (size, list): (usize, usize),
        cut: bool,
        time: Duration,
    ) -> Result<Figure> {
        let mut batch = Batch::outgoing(list, size, self.peer, self.own, cut);
        raw.receive_number()?;
        let start = Instant::now();
        let mut window = Window::default();
        while start.elapsed() < time {
            window.wait_for(list as u64, raw)?;
            let taken = self.send(&mut batch)?;
            window.sent += if cut { list } else { taken } as u64;
        }
        window.finish(raw)
    }

    /// Receives such a stream, up to `batch` datagrams in a call.
    pub fn drain(&self, raw: &mut Raw, batch: usize, joined: bool, wait: Waiting) -> Result<()> {
        self.set(libc::SOL_UDP, libc::UDP_GRO, joined.into())?;
        let slot = if joined { JOINED } else { SLOT };
        let mut batch = Batch::new(batch.min(LARGEST_BATCH), slot, self.peer);
        let mut tally = Tally::default();
        // What an earlier trial left.
        while self.receive(&mut batch, libc::MSG_DONTWAIT)? > 0 {}
        raw.send_number(0)?;
        loop {
            let flags = if wait == Waiting::Spin { libc::MSG_DONTWAIT } else { libc::MSG_WAITFORONE };
            if wait != Waiting::Spin && !self.readable(SILENCE)? {
                if tally.is_over(raw)? {
                    break;
                }
                continue;
            }
            let count = self.receive(&mut batch, flags)?;
            let datagrams = if joined { datagrams(&batch, count) } else { count as u64 };
            if tally.add(datagrams, raw)? && tally.is_over(raw)? {
                break;
            }
        }
        tally.report(raw)
    }

    fn readable(&self, patience: Duration) -> Result<bool> {
        let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
        let patience = rustix::event::Timespec::try_from(patience).map_err(Failure::of("time"))?;
        rustix::event::poll(&mut fds, Some(&patience)).map(|n| n > 0).map_err(Failure::of("raw UDP: poll"))
    }

    fn send(&self, batch: &mut Batch) -> Result<usize> {
        let fd = self.socket.as_raw_fd();
        let count = batch.headers.len();
        // SAFETY: the headers point into the batch's own boxes, which are alive.
        let sent = unsafe {
            match batch.headers.first_mut() {
                Some(only) if count == 1 => {
                    (libc::sendmsg(fd, &raw const only.msg_hdr, 0).min(1)) as libc::c_int
                }
                _ => libc::sendmmsg(fd, batch.headers.as_mut_ptr(), count as _, 0),
            }
        };
        usize::try_from(sent).map_err(|_| last("raw UDP: send"))
    }

    /// How many came; 0 if none was there.
    fn receive(&self, batch: &mut Batch, flags: libc::c_int) -> Result<usize> {
        let fd = self.socket.as_raw_fd();
        let count = batch.headers.len();
        for header in &mut batch.headers {
            header.msg_hdr.msg_controllen = batch.control_len as _;
            header.msg_hdr.msg_namelen = size_of::<libc::sockaddr_in>() as _;
        }
        // SAFETY: the headers point into the batch's own boxes, which are alive and as long as they say.
        let received = unsafe {
            match batch.headers.first_mut() {
                Some(only) if count == 1 => {
                    let n = libc::recvmsg(fd, &raw mut only.msg_hdr, flags & libc::MSG_DONTWAIT);
                    only.msg_len = u32::try_from(n).unwrap_or(0);
                    n.min(1) as libc::c_int
                }
                _ => {
                    let none = std::ptr::null_mut();
                    libc::recvmmsg(fd, batch.headers.as_mut_ptr(), count as _, flags, none)
                }
            }
        };
        match usize::try_from(received) {
            Ok(n) => Ok(n),
            Err(_) if matches!(errno(), libc::EAGAIN | libc::EINTR) => Ok(0),
            Err(_) => Err(last("raw UDP: receive")),
        }
    }
}

/// How many datagrams the first `count` places hold, where the system has joined some.
fn datagrams(batch: &Batch, count: usize) -> u64 {
    let each = |header: &libc::mmsghdr| {
        let mut size = 0_u64;
        // SAFETY: the system has filled in the control data of this header.
        unsafe {
            let mut at = libc::CMSG_FIRSTHDR(&header.msg_hdr);
            while !at.is_null() {
                if ((*at).cmsg_level, (*at).cmsg_type) == (libc::SOL_UDP, libc::UDP_GRO) {
                    size = libc::CMSG_DATA(at).cast::<libc::c_int>().read_unaligned() as u64;
                }
                at = libc::CMSG_NXTHDR(&header.msg_hdr, at);
            }
        }
        if size == 0 { 1 } else { u64::from(header.msg_len).div_ceil(size) }
    };
    batch.headers.iter().take(count).map(each).sum()
}

/// The receiver's account of a stream: datagrams, and the time from the first to the last.
#[derive(Default)]
pub struct Tally {
    count: u64,
    span: Option<(Instant, Instant)>,
    reported: u64,
    /// Looks that found nothing since the last one that did.
    empty: u32,
    /// How many the sender has sent, and when it said so.
    sent: Option<(u64, Instant)>,
}

impl Tally {
    /// So many came; says whether it is time to ask whether there are more.
    #[inline]
    pub fn add(&mut self, count: u64, raw: &mut Raw) -> Result<bool> {
        if count == 0 {
            self.empty += 1;
            return Ok(self.empty.is_multiple_of(64));
        }
        self.empty = 0;
        self.count += count;
        let now = Instant::now();
        self.span = Some((self.span.map_or(now, |(first, _)| first), now));
        if self.count - self.reported >= REPORT_EVERY {
            self.reported = self.count;
            raw.send_number(self.count)?;
        }
        Ok(false)
    }

    /// The sender has ended, and what was under way has come.
    pub fn is_over(&mut self, raw: &mut Raw) -> Result<bool> {
        if self.sent.is_none() {
            self.sent = raw.number_if_there()?.map(|sent| (sent, Instant::now()));
        }
        Ok(self.sent.is_some_and(|(sent, said)| {
            let last = self.span.map_or(said, |(_, last)| last);
            self.count >= sent || last.elapsed() > LATE
        }))
    }

    pub fn report(self, raw: &mut Raw) -> Result<()> {
        let span = self.span.map_or(Duration::ZERO, |(first, last)| last - first);
        raw.send_number(END)?;
        raw.send_number(self.count)?;
        raw.send_number(u64::try_from(span.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Among the receiver's reports: no more of them.
const END: u64 = u64::MAX;

/// The sender's end of that.
#[derive(Default)]
pub struct Window {
    pub sent: u64,
    reported: u64,
    /// Never reported: they were lost.
    lost: u64,
}

impl Window {
    /// Waits until `more` may be sent. What is not reported for a while has been lost.
    #[inline]
    pub fn wait_for(&mut self, more: u64, raw: &mut Raw) -> Result<()> {
        let mut since = None;
        while self.sent + more > self.reported + self.lost + WINDOW {
            match raw.number_if_there()? {
                Some(number) => self.reported = number,
                None if since.get_or_insert_with(Instant::now).elapsed() < SILENCE => {}
                None => self.lost = self.sent - self.reported,
            }
        }
        Ok(())
    }

    /// Says that it has ended, and makes the figure of the receiver's account.
    pub fn finish(self, raw: &mut Raw) -> Result<Figure> {
        raw.send_number(self.sent)?;
        while raw.receive_number()? != END {}
        let (count, nanoseconds) = (raw.receive_number()?, raw.receive_number()?);
        if count > self.sent || count < 2 {
            return Err(Failure(format!("{} datagrams sent, {count} received", self.sent)));
        }
        let seconds = nanoseconds as f64 / 1e9;
        Ok(Figure { value: count as f64 / seconds, p99: None, operations: count })
    }
}

fn write(batch: &mut Batch, size: usize, number: u64) {
    let end = batch.buffer.get_mut(..size).and_then(<[u8]>::last_chunk_mut);
    if let Some(end) = end {
        *end = number.to_le_bytes();
    }
}

fn read(batch: &Batch, size: usize) -> u64 {
    debug_assert!(size <= batch.slot);
    batch.buffer.get(..size).and_then(<[u8]>::last_chunk).copied().map_or(0, u64::from_le_bytes)
}

fn errno() -> libc::c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cold]
fn last(doing: &'static str) -> Failure {
    Failure::of(doing)(std::io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    #[test]
    fn datagrams_in_every_way_between_two_sockets() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        let (mut active, mut passive) = (Raw::new(one).unwrap(), Raw::new(other).unwrap());
        let short = Duration::from_millis(3);
        const WAITS: [Waiting; 4] = [Waiting::Spin, Waiting::SpinThenBlock, Waiting::Block, Waiting::Poll];
        let passive = thread::spawn(move || -> Result<()> {
            let udp = RawUdp::new(&mut passive, Ipv4Addr::LOCALHOST.into())?;
            WAITS.iter().try_for_each(|&wait| udp.pong(&mut passive, 64, wait))?;
            udp.drain(&mut passive, 1, false, Waiting::Spin)?;
            udp.drain(&mut passive, 32, false, Waiting::Block)?;
            udp.drain(&mut passive, 32, true, Waiting::Spin)
        });
        let udp = RawUdp::new(&mut active, Ipv4Addr::LOCALHOST.into()).unwrap();
        for wait in WAITS {
            active.receive_number().unwrap();
            assert!(udp.ping(64, wait, short).unwrap().value > 0.0);
        }
        for (list, cut) in [(1, false), (32, false), (32, true)] {
            assert!(udp.stream(&mut active, (1024, list), cut, short).unwrap().value > 0.0);
        }
        passive.join().unwrap().unwrap();
    }
}
