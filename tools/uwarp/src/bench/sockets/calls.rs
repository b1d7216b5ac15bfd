//! The calls of programs of sockets: libc's, by their names, so that a preloaded library is called; those of
//! `<rdma/rsocket.h>`; those of `<uwarp_sockets.h>`.

use std::ffi::{c_int, c_void};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::ptr;
use std::time::{Duration, Instant};

use libc::{nfds_t, pollfd, sockaddr, socklen_t};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use uwarp_abi_types::verbs::{IBV_ACCESS_LOCAL_WRITE, ibv_mr, ibv_pd, ibv_qp, ibv_sge};

use crate::bench::fabric::{SocketAddress, check, last, symbol};
use crate::bench::protocol::{Carrier, Failure, Figure, Result, Role};
use crate::bench::raw::{Trips, is_last, put, word};
use crate::bench::ways;
use crate::libdir;

/// Longest message.
pub const LONGEST: usize = 1024 * 1024;
/// Descriptors for sending that are under way in a stream, and descriptors for receiving, always.
const WINDOW: u32 = 16;
/// What a receive call of a stream takes at most, and at least has room for: with less, programs make many
/// more calls than raw TCP at its best.
const TAKES: [usize; 2] = [64 * 1024, 256 * 1024];

fn lost(doing: &'static str) -> Failure {
    Failure(format!("{doing}: the connection has ended"))
}

/// The calls of one kind of socket.
struct Calls {
    socket: unsafe extern "C" fn(c_int, c_int, c_int) -> c_int,
    bind: unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int,
    listen: unsafe extern "C" fn(c_int, c_int) -> c_int,
    name: unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    accept: unsafe extern "C" fn(c_int, *mut sockaddr, *mut socklen_t) -> c_int,
    connect: unsafe extern "C" fn(c_int, *const sockaddr, socklen_t) -> c_int,
    set: unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, socklen_t) -> c_int,
    send: unsafe extern "C" fn(c_int, *const c_void, usize, c_int) -> isize,
    receive: unsafe extern "C" fn(c_int, *mut c_void, usize, c_int) -> isize,
}

const LIBC: Calls = Calls {
    socket: libc::socket,
    bind: libc::bind,
    listen: libc::listen,
    name: libc::getsockname,
    accept: libc::accept,
    connect: libc::connect,
    set: libc::setsockopt,
    send: libc::send,
    receive: libc::recv,
};

/// As `<uwarp_sockets.h>` has it.
const SOL_UWARP: c_int = 0x5557;
const IWARP_MODE: c_int = 1;
const INITIATOR: c_int = 1;
const RESPONDER: c_int = 2;
const RECV: u32 = 1;
const SEND: u32 = 2;

/// `struct uwarp_desc`
#[repr(C)]
struct Desc {
    id: u64,
    sg_list: *const ibv_sge,
    num_sge: u32,
    op: u32,
    remote_addr: u64,
    rkey: u32,
    flags: u32,
}

/// `struct uwarp_completion`
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Completion {
    id: u64,
    length: u64,
    op: u32,
    error: i32,
}

/// The calls for descriptors.
struct Extended {
    post: unsafe extern "C" fn(c_int, *const Desc, c_int) -> c_int,
    completions: unsafe extern "C" fn(c_int, *mut Completion, c_int) -> c_int,
    poll: unsafe extern "C" fn(*mut pollfd, nfds_t, c_int) -> c_int,
    qp: unsafe extern "C" fn(c_int) -> *mut ibv_qp,
    reg_mr: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
}

/// The one file of the library; it stays until the process ends.
fn library() -> Result<&'static Library> {
    let path = libdir::find().map_err(|reason| Failure(reason.to_string()))?.join(libdir::LIBRARY);
    let of = |path: &Path| -> std::result::Result<Library, libloading::Error> {
        // SAFETY: libuwarp has no constructor that requires anything of its caller.
        unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
    };
    let library = of(&path).map_err(|error| Failure(format!("{}: {error}", path.display())))?;
    Ok(Box::leak(Box::new(library)))
}

impl Calls {
    fn of(carrier: Carrier) -> Result<Calls> {
        // SAFETY: the types are those of the headers for these names.
        unsafe {
            Ok(match carrier {
                Carrier::Libc => LIBC,
                Carrier::Rsockets => {
                    let library = library()?;
                    Calls {
                        socket: symbol(library, c"rsocket")?,
                        bind: symbol(library, c"rbind")?,
                        listen: symbol(library, c"rlisten")?,
                        name: symbol(library, c"rgetsockname")?,
                        accept: symbol(library, c"raccept")?,
                        connect: symbol(library, c"rconnect")?,
                        set: symbol(library, c"rsetsockopt")?,
                        send: symbol(library, c"rsend")?,
                        receive: symbol(library, c"rrecv")?,
                    }
                }
                Carrier::IwarpMode | Carrier::Descriptors => {
                    let library = library()?;
                    Calls {
                        set: symbol(library, c"uwarp_setsockopt")?,
                        send: symbol(library, c"uwarp_send")?,
                        receive: symbol(library, c"uwarp_recv")?,
                        ..LIBC
                    }
                }
            })
        }
    }
}

impl Extended {
    fn load() -> Result<Extended> {
        let library = library()?;
        // SAFETY: the types are those of the headers for these names.
        unsafe {
            Ok(Extended {
                post: symbol(library, c"uwarp_post")?,
                completions: symbol(library, c"uwarp_get_completions")?,
                poll: symbol(library, c"uwarp_poll")?,
                qp: symbol(library, c"uwarp_socket_qp")?,
                reg_mr: symbol(library, c"ibv_reg_mr")?,
            })
        }
    }
}

/// A listening socket.
pub struct Listener {
    carrier: Carrier,
    calls: Calls,
    fd: c_int,
    pub port: u16,
}

impl Listener {
    pub fn new(carrier: Carrier, address: IpAddr) -> Result<Listener> {
        let calls = Calls::of(carrier)?;
        let at = SocketAddr::new(address, 0);
        let fd = stream_socket(&calls, at)?;
        let mut name = SocketAddress::new(at);
        let length = length_of(at);
        // SAFETY: the address is as long as it says.
        unsafe {
            check("bind", (calls.bind)(fd, name.as_mut_ptr(), length))?;
            check("listen", (calls.listen)(fd, 1))?;
            let mut room = length;
            check("getsockname", (calls.name)(fd, name.as_mut_ptr(), &mut room))?;
        }
        Ok(Listener { carrier, calls, fd, port: name.port() })
    }

    pub fn accept(self) -> Result<Connection> {
        // SAFETY: the address is not asked for.
        let fd = unsafe { (self.calls.accept)(self.fd, ptr::null_mut(), ptr::null_mut()) };
        // The listener stays open: a figure of a process with one descriptor more is the same.
        if fd < 0 { Err(last("accept")) } else { Connection::new(self.carrier, self.calls, fd, RESPONDER) }
    }
}

fn stream_socket(calls: &Calls, at: SocketAddr) -> Result<c_int> {
    let family = if at.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: it has no pointers.
    let fd = unsafe { (calls.socket)(family, libc::SOCK_STREAM, 0) };
    if fd < 0 { Err(last("socket")) } else { Ok(fd) }
}

fn length_of(at: SocketAddr) -> socklen_t {
    (match at {
        SocketAddr::V4(_) => size_of::<libc::sockaddr_in>(),
        SocketAddr::V6(_) => size_of::<libc::sockaddr_in6>(),
    }) as socklen_t
}

/// A connected socket with its buffers, until the process ends.
pub struct Connection {
    calls: Calls,
    fd: c_int,
    out: Vec<u8>,
    back: Vec<u8>,
    /// Of a socket whose messages go by descriptors.
    registered: Option<Registered>,
}

impl Connection {
    pub fn connect(carrier: Carrier, to: SocketAddr) -> Result<Connection> {
        let calls = Calls::of(carrier)?;
        let fd = stream_socket(&calls, to)?;
        let mut address = SocketAddress::new(to);
        // SAFETY: the address is as long as it says.
        check("connect", unsafe { (calls.connect)(fd, address.as_mut_ptr(), length_of(to)) })?;
        Connection::new(carrier, calls, fd, INITIATOR)
    }

    fn new(carrier: Carrier, calls: Calls, fd: c_int, role: c_int) -> Result<Connection> {
        let set = |level, name, value: c_int| {
            // SAFETY: the value is an int, and alive.
            unsafe { (calls.set)(fd, level, name, ptr::from_ref(&value).cast(), size_of::<c_int>() as u32) }
        };
        check("TCP_NODELAY", set(libc::IPPROTO_TCP, libc::TCP_NODELAY, 1))?;
        let mut registered = None;
        if matches!(carrier, Carrier::IwarpMode | Carrier::Descriptors) {
            check("IWARP_MODE", set(SOL_UWARP, IWARP_MODE, role))?;
        }
        if carrier == Carrier::Descriptors {
            registered = Some(Registered::new(Extended::load()?, fd)?);
        }
        Ok(Connection { calls, fd, out: vec![0; LONGEST], back: vec![0; LONGEST], registered })
    }

    /// One way or there and back, in this end's role.
    pub fn ping(&mut self, size: usize, spin: bool, role: Role, time: Duration) -> Result<Option<Figure>> {
        if !(8..=LONGEST).contains(&size) {
            return Err(too_large());
        }
        match (role, self.registered.take()) {
            (Role::Active, Some(mut registered)) => {
                let figure = registered.ping(size, time);
                self.registered = Some(registered);
                figure.map(Some)
            }
            (Role::Passive, Some(mut registered)) => {
                let done = registered.pong(size);
                self.registered = Some(registered);
                done.map(|()| None)
            }
            (Role::Active, None) => {
                let mut trips = Trips::start(time);
                while let Some(number) = trips.next() {
                    put(self.out.get_mut(..size).unwrap_or_default(), number);
                    self.send(size)?;
                    trips.end(self.receive(size, spin)?)?;
                }
                trips.figure(2).map(Some)
            }
            (Role::Passive, None) => loop {
                let number = self.receive(size, spin)?;
                put(self.out.get_mut(..size).unwrap_or_default(), number);
                self.send(size)?;
                if is_last(number) {
                    return Ok(None);
                }
            },
        }
    }

    /// Messages one way, in this end's role. The figure is bytes a second, until the receiver has said that
    /// it has them all.
    pub fn stream(&mut self, size: usize, spin: bool, role: Role, time: Duration) -> Result<Option<Figure>> {
        if !(64..=LONGEST).contains(&size) {
            return Err(too_large());
        }
        if let Some(mut registered) = self.registered.take() {
            let done = match role {
                Role::Active => registered.stream(size, time).map(Some),
                Role::Passive => registered.drain().map(|()| None),
            };
            self.registered = Some(registered);
            return done;
        }
        match role {
            Role::Active => self.send_for(size, time).map(Some),
            Role::Passive => {
                let count = self.drain(size, spin)?;
                put(self.out.get_mut(..8).unwrap_or_default(), count);
                self.send(8).map(|()| None)
            }
        }
    }

    /// The stream is zeros and ends with a one.
    fn send_for(&mut self, size: usize, time: Duration) -> Result<Figure> {
        self.out.get_mut(..size).ok_or_else(too_large)?.fill(0);
        let start = Instant::now();
        let mut count = 0_u64;
        loop {
            let over = start.elapsed() >= time;
            if over && let Some(end) = self.out.get_mut(size - 1) {
                *end = 1;
            }
            self.send(size)?;
            count += 1;
            if over {
                break;
            }
        }
        let (sent, arrived) = (count * size as u64, self.receive(8, false)?);
        throughput(sent, arrived, count, start)
    }

    fn drain(&mut self, size: usize, spin: bool) -> Result<u64> {
        let most = size.clamp(TAKES[0], TAKES[1]);
        let flags = if spin { libc::MSG_DONTWAIT } else { 0 };
        let mut count = 0;
        loop {
            // SAFETY: the buffer is ours, and longer.
            let n = unsafe { (self.calls.receive)(self.fd, self.back.as_mut_ptr().cast(), most, flags) };
            let n = match usize::try_from(n) {
                Ok(0) => return Err(lost("recv")),
                Ok(n) => n,
                Err(_) if waits() => continue,
                Err(_) => return Err(last("recv")),
            };
            count += n as u64;
            if self.back.get(n - 1) != Some(&0) {
                return Ok(count);
            }
        }
    }

    /// The first bytes of `out`.
    fn send(&mut self, size: usize) -> Result<()> {
        let mut sent = 0;
        while let Some(rest) = self.out.get(sent..size).filter(|rest| !rest.is_empty()) {
            // SAFETY: as many bytes as the slice has.
            let n =
                unsafe { (self.calls.send)(self.fd, rest.as_ptr().cast(), rest.len(), libc::MSG_NOSIGNAL) };
            match usize::try_from(n) {
                Ok(n) => sent += n,
                Err(_) if waits() => {}
                Err(_) => return Err(last("send")),
            }
        }
        Ok(())
    }

    /// Into `back`; its number. `spin`: looks for [`ways::PATIENCE`] before it blocks.
    fn receive(&mut self, size: usize, spin: bool) -> Result<u64> {
        let since = spin.then(Instant::now);
        let mut filled = 0;
        while filled < size {
            let patient = since.is_some_and(|since| since.elapsed() < ways::PATIENCE);
            let flags = if patient { libc::MSG_DONTWAIT } else { libc::MSG_WAITALL };
            let rest = self.back.get_mut(filled..size).unwrap_or_default();
            // SAFETY: room for as many bytes as the slice has.
            let n = unsafe { (self.calls.receive)(self.fd, rest.as_mut_ptr().cast(), rest.len(), flags) };
            match usize::try_from(n) {
                Ok(0) => return Err(lost("recv")),
                Ok(n) => filled += n,
                Err(_) if waits() => {}
                Err(_) => return Err(last("recv")),
            }
        }
        Ok(word(self.back.get(..size).unwrap_or_default()))
    }
}

/// The call has to be made again.
fn waits() -> bool {
    matches!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN | libc::EINTR))
}

fn too_large() -> Failure {
    Failure(format!("messages hold 64 to {LONGEST} bytes"))
}

fn throughput(sent: u64, arrived: u64, operations: u64, start: Instant) -> Result<Figure> {
    let seconds = start.elapsed().as_secs_f64();
    if arrived != sent {
        return Err(Failure(format!("{sent} bytes sent, {arrived} received")));
    }
    Ok(Figure { value: sent as f64 / seconds, p99: None, operations })
}

/// Registered memory and the descriptors that name it: a place to send from, one for the shortest messages,
/// and one to receive into, which all descriptors for receiving share.
struct Registered {
    calls: Extended,
    fd: c_int,
    memory: *mut u8,
    key: u32,
    /// Sends that are not completed.
    sending: u32,
}

const OUT: usize = 0;
const SHORT: usize = LONGEST;
const IN: usize = LONGEST + 64;
/// A message of this length ends a stream, or says how much has arrived.
const END: usize = 8;

impl Registered {
    fn new(calls: Extended, fd: c_int) -> Result<Registered> {
        let memory = Box::leak(vec![0_u64; (IN + LONGEST) / 8].into_boxed_slice()).as_mut_ptr().cast::<u8>();
        // SAFETY: a socket in IWARP_MODE.
        let qp = unsafe { (calls.qp)(fd) };
        if qp.is_null() {
            return Err(last("uwarp_socket_qp"));
        }
        // SAFETY: the queue pair is the socket's, and the memory is never freed.
        let mr =
            unsafe { (calls.reg_mr)((*qp).pd, memory.cast(), IN + LONGEST, IBV_ACCESS_LOCAL_WRITE as c_int) };
        if mr.is_null() {
            return Err(last("ibv_reg_mr"));
        }
        // SAFETY: the region is registered.
        let key = unsafe { (*mr).lkey };
        let mut registered = Registered { calls, fd, memory, key, sending: 0 };
        for _ in 0..WINDOW {
            registered.post(RECV, IN, LONGEST)?;
        }
        Ok(registered)
    }

    fn post(&mut self, op: u32, at: usize, length: usize) -> Result<()> {
        let addr = self.memory.expose_provenance() as u64 + at as u64;
        let piece = ibv_sge { addr, length: length as u32, lkey: self.key };
        let desc = Desc {
            id: u64::from(op),
            sg_list: &raw const piece,
            num_sge: 1,
            op,
            remote_addr: 0,
            rkey: 0,
            flags: 0,
        };
        loop {
            // SAFETY: one descriptor, whose piece outlives the call, of memory that is never freed.
            match unsafe { (self.calls.post)(self.fd, &desc, 1) } {
                1 => break,
                _ if waits() => self.wait(libc::POLLPRI)?,
                _ => return Err(last("uwarp_post")),
            }
        }
        self.sending += u32::from(op == SEND);
        Ok(())
    }

    fn wait(&self, events: i16) -> Result<()> {
        let mut fds = pollfd { fd: self.fd, events, revents: 0 };
        // SAFETY: one entry.
        match unsafe { (self.calls.poll)(&mut fds, 1, -1) } {
            -1 if !waits() => Err(last("uwarp_poll")),
            _ => Ok(()),
        }
    }

    /// Takes completions until one of a receive comes, with the length of its message; or, if `most` is
    /// given, until no more sends are under way.
    fn take(&mut self, most: Option<u32>) -> Result<Option<usize>> {
        loop {
            if most.is_some_and(|most| self.sending <= most) {
                return Ok(None);
            }
            let mut done = Completion::default();
            // SAFETY: room for one.
            match unsafe { (self.calls.completions)(self.fd, &mut done, 1) } {
                0 => self.wait(libc::POLLPRI)?,
                1 if done.error != 0 => {
                    let words = std::io::Error::from_raw_os_error(done.error);
                    return Err(Failure(format!("a descriptor ended with: {words}")));
                }
                1 if done.op == SEND => self.sending -= 1,
                1 => {
                    self.post(RECV, IN, LONGEST)?;
                    return Ok(Some(done.length as usize));
                }
                _ => return Err(last("uwarp_get_completions")),
            }
        }
    }

    /// The next message, of this length; its number.
    fn receive(&mut self, size: usize) -> Result<u64> {
        match self.take(None)? {
            Some(length) if length == size => {
                // SAFETY: inside the memory, and aligned: sizes are multiples of 8. The peer may write there,
                // so the word may be any; it is checked.
                Ok(unsafe { self.memory.add(IN + size - 8).cast::<u64>().read_volatile() })
            }
            _ => Err(Failure::new("a wrong message came")),
        }
    }

    /// A message of this length, whose last word is the number.
    fn send(&mut self, at: usize, size: usize, number: u64) -> Result<()> {
        // SAFETY: inside the memory, and aligned.
        unsafe { self.memory.add(at + size - 8).cast::<u64>().write_volatile(number) };
        self.post(SEND, at, size)
    }

    fn ping(&mut self, size: usize, time: Duration) -> Result<Figure> {
        let mut trips = Trips::start(time);
        while let Some(number) = trips.next() {
            self.send(OUT, size, number)?;
            trips.end(self.receive(size)?)?;
        }
        trips.figure(2)
    }

    fn pong(&mut self, size: usize) -> Result<()> {
        loop {
            let number = self.receive(size)?;
            self.send(OUT, size, number)?;
            if is_last(number) {
                return self.take(Some(0)).map(drop);
            }
        }
    }

    fn stream(&mut self, size: usize, time: Duration) -> Result<Figure> {
        let start = Instant::now();
        let mut count = 0_u64;
        while start.elapsed() < time {
            self.take(Some(WINDOW - 1))?;
            self.post(SEND, OUT, size)?;
            count += 1;
        }
        self.take(Some(WINDOW - 1))?;
        let sent = count * size as u64;
        self.send(SHORT, END, sent)?;
        let arrived = self.receive(END)?;
        self.take(Some(0))?;
        throughput(sent, arrived, count, start)
    }

    fn drain(&mut self) -> Result<()> {
        let mut count = 0;
        loop {
            match self.take(None)? {
                Some(END) => break,
                Some(length) => count += length as u64,
                None => {}
            }
        }
        self.send(SHORT, END, count)?;
        self.take(Some(0)).map(drop)
    }
}
