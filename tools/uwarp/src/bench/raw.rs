//! What uwarp is compared with: the same traffic over a bare TCP socket.

use std::io::{Read, Write};
use std::net::{IpAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, sockopt};

use super::protocol::{Failure, Figure, LARGEST, Result, Verb};
use super::stats;
use super::ways::{Buffers, FIXED, PATIENCE, Waiting, Way};

/// One connection for each kind of socket buffers: a size once set cannot be made automatic again.
pub struct Raws {
    /// Also carries the ends' messages to each other.
    pub system: Raw,
    fixed: Raw,
}

impl Raws {
    /// `next` gives the connections, in the same order at both ends.
    pub fn new(mut next: impl FnMut() -> Result<TcpStream>) -> Result<Raws> {
        let system = Raw::new(next()?)?;
        let fixed = next()?;
        sockopt::set_socket_send_buffer_size(&fixed, FIXED).map_err(Failure::of("SO_SNDBUF"))?;
        sockopt::set_socket_recv_buffer_size(&fixed, FIXED).map_err(Failure::of("SO_RCVBUF"))?;
        Ok(Raws { system, fixed: Raw::new(fixed)? })
    }

    /// Lets them use this congestion control.
    pub fn set_congestion(&self, control: &str) -> Result<()> {
        [&self.system, &self.fixed].into_iter().try_for_each(|raw| {
            sockopt::set_tcp_congestion(&raw.socket, control).map_err(Failure::of("TCP_CONGESTION"))
        })
    }

    /// The connection for this way.
    pub fn of(&mut self, way: Way) -> &mut Raw {
        match way {
            Way::Calls { buffers: Buffers::Fixed, .. } => &mut self.fixed,
            Way::Calls { .. } | Way::Wait(_) | Way::Eventfds | Way::Open { .. } | Way::Datagrams { .. } => {
                &mut self.system
            }
        }
    }
}

/// A connected socket with buffers for sending and receiving.
pub struct Raw {
    socket: TcpStream,
    source: Vec<u8>,
    sink: Vec<u8>,
}

/// In the last word of a ping: this is the last one.
const LAST: u64 = 1 << 63;
/// Bytes of a transaction's request, of its response, and of the request for its payload.
pub const REQUEST: u32 = 64;

impl Raw {
    pub fn new(socket: TcpStream) -> Result<Raw> {
        socket.set_nodelay(true).map_err(Failure::of("TCP_NODELAY"))?;
        let buffer = || vec![0; LARGEST as usize];
        Ok(Raw { socket, source: buffer(), sink: buffer() })
    }

    /// Our address and the peer's.
    pub fn addresses(&self) -> Result<(IpAddr, IpAddr)> {
        let own = self.socket.local_addr().map_err(Failure::of("raw TCP: address"))?;
        let peer = self.socket.peer_addr().map_err(Failure::of("raw TCP: address"))?;
        Ok((own.ip(), peer.ip()))
    }

    /// The active side of a ping-pong.
    pub fn ping(&mut self, size: usize, wait: Waiting, time: Duration) -> Result<Figure> {
        let (mut out, mut back) = (message(size)?, message(size)?);
        let mut trips = Trips::start(time);
        while let Some(number) = trips.next() {
            put(&mut out, number);
            self.send(&out)?;
            self.receive(&mut back, wait)?;
            trips.end(word(&back))?;
        }
        trips.figure(2)
    }

    /// The passive side.
    pub fn pong(&mut self, size: usize, wait: Waiting) -> Result<()> {
        let mut message = message(size)?;
        loop {
            self.receive(&mut message, wait)?;
            self.send(&message)?;
            if word(&message) & LAST != 0 {
                return Ok(());
            }
        }
    }

    /// The active side of transactions, in the messages of the same with verbs. Where the peer would Write,
    /// payload and response come in one call; where it would Read, it requests the payload.
    pub fn request(&mut self, verb: Verb, size: usize, wait: Waiting, time: Duration) -> Result<Figure> {
        let (mut out, mut back) = (message(REQUEST as usize)?, message(REQUEST as usize)?);
        let mut payload = message(size)?;
        let mut both = message(size + REQUEST as usize)?;
        let mut trips = Trips::start(time);
        while let Some(number) = trips.next() {
            put(&mut out, number);
            self.send(&out)?;
            let answer = if verb == Verb::Read {
                self.receive(&mut back, wait)?;
                put(&mut payload, number);
                self.send(&payload)?;
                self.receive(&mut back, wait)?;
                word(&back)
            } else {
                self.receive(&mut both, wait)?;
                word(&both)
            };
            trips.end(answer)?;
        }
        trips.figure(1)
    }

    /// The passive side.
    pub fn respond(&mut self, verb: Verb, size: usize, wait: Waiting) -> Result<()> {
        let mut request = message(REQUEST as usize)?;
        let mut payload = message(size)?;
        let mut both = message(size + REQUEST as usize)?;
        loop {
            self.receive(&mut request, wait)?;
            if verb == Verb::Read {
                self.send(&request)?;
                self.receive(&mut payload, wait)?;
                self.send(&request)?;
            } else {
                put(&mut both, word(&request));
                self.send(&both)?;
            }
            if word(&request) & LAST != 0 {
                return Ok(());
            }
        }
    }

    /// Sends for about `time` in calls of `size` bytes; the figure is bytes a second until the other side has
    /// them.
    pub fn stream(&mut self, size: usize, time: Duration) -> Result<Figure> {
        let block = self.source.get_mut(..size).ok_or_else(too_large)?;
        block.fill(0);
        let start = Instant::now();
        let mut blocks = 0_u64;
        loop {
            // The stream is zeros and ends with a one: a reader of any block size sees the end.
            let over = start.elapsed() >= time;
            if over && let Some(end) = block.last_mut() {
                *end = 1;
            }
            (&self.socket).write_all(block).map_err(Failure::of("raw TCP: send"))?;
            blocks += 1;
            if over {
                break;
            }
        }
        let sent = blocks * size as u64;
        let counted = self.receive_number()?;
        let seconds = start.elapsed().as_secs_f64();
        if counted != sent {
            return Err(Failure(format!("raw TCP: {sent} bytes sent, {counted} received")));
        }
        Ok(Figure { value: sent as f64 / seconds, p99: None, operations: blocks })
    }

    /// Receives such a stream in calls of up to `size` bytes, and returns how much it was.
    pub fn drain(&mut self, size: usize, wait: Waiting) -> Result<()> {
        let flags = if wait == Waiting::Spin { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
        let block = self.sink.get_mut(..size).ok_or_else(too_large)?;
        let mut count = 0_u64;
        loop {
            let n = match rustix::net::recv(&self.socket, &mut *block, flags) {
                Ok((_, n)) => n,
                Err(Errno::AGAIN | Errno::INTR) => continue,
                Err(error) => return Err(Failure(format!("raw TCP: receive: {error}"))),
            };
            count += n as u64;
            match block.get(..n).and_then(<[u8]>::last) {
                Some(0) => {}
                Some(_) => break,
                None => return Err(closed()),
            }
        }
        self.send_number(count)
    }

    /// One number, blocking. Also for messages between the ends that must not go over uwarp.
    pub fn send_number(&mut self, number: u64) -> Result<()> {
        (&self.socket).write_all(&number.to_le_bytes()).map_err(Failure::of("raw TCP: send"))
    }

    pub fn receive_number(&mut self) -> Result<u64> {
        let mut bytes = [0; 8];
        (&self.socket).read_exact(&mut bytes).map_err(Failure::of("raw TCP: receive"))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Several at once.
    pub fn send_numbers(&mut self, numbers: &[u64]) -> Result<()> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        (&self.socket).write_all(&bytes).map_err(Failure::of("raw TCP: send"))
    }

    /// As many as the peer has sent.
    pub fn receive_numbers(&mut self, count: usize) -> Result<Vec<u64>> {
        let mut bytes = vec![0; count * 8];
        (&self.socket).read_exact(&mut bytes).map_err(Failure::of("raw TCP: receive"))?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }

    /// As [`Raw::receive_number`], if it has begun to come.
    pub fn number_if_there(&mut self) -> Result<Option<u64>> {
        match rustix::net::recv(&self.socket, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok(_) => self.receive_number().map(Some),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(Failure(format!("raw TCP: receive: {error}"))),
        }
    }

    fn send(&self, mut message: &[u8]) -> Result<()> {
        while !message.is_empty() {
            match rustix::net::send(&self.socket, message, SendFlags::NOSIGNAL) {
                Ok(n) => message = message.get(n..).unwrap_or(&[]),
                Err(Errno::INTR) => {}
                Err(error) => return Err(Failure(format!("raw TCP: send: {error}"))),
            }
        }
        Ok(())
    }

    fn receive(&self, message: &mut [u8], wait: Waiting) -> Result<()> {
        let flags = match wait {
            Waiting::Block => RecvFlags::WAITALL,
            Waiting::Spin | Waiting::SpinThenBlock | Waiting::Poll => RecvFlags::DONTWAIT,
        };
        let mut filled = 0;
        // When the first look found nothing.
        let mut waiting_since: Option<Instant> = None;
        while let Some(rest) = message.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            let patient = waiting_since.is_none_or(|since| since.elapsed() < PATIENCE);
            let flags = match wait {
                Waiting::SpinThenBlock if !patient => RecvFlags::WAITALL,
                _ => flags,
            };
            if wait == Waiting::Poll {
                let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
                rustix::event::poll(&mut fds, None).map_err(Failure::of("raw TCP: poll"))?;
            }
            match rustix::net::recv(&self.socket, rest, flags) {
                Ok((_, 0)) => return Err(closed()),
                Ok((_, n)) => filled += n,
                Err(Errno::AGAIN) if wait == Waiting::SpinThenBlock => {
                    waiting_since.get_or_insert_with(Instant::now);
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(Failure(format!("raw TCP: receive: {error}"))),
            }
        }
        Ok(())
    }
}

/// The clock of the active side: numbers the round trips, and marks the last.
pub struct Trips {
    time: Duration,
    start: Instant,
    last: Instant,
    number: u64,
    over: bool,
    /// Nanoseconds of each.
    trips: Vec<u32>,
}

impl Trips {
    pub fn start(time: Duration) -> Trips {
        let trips = Vec::with_capacity(1 << 20);
        let start = Instant::now();
        Trips { time, start, last: start, number: 0, over: false, trips }
    }

    /// The number to send next, with the mark of the last one where it is that; `None` after it.
    #[inline]
    pub fn next(&mut self) -> Option<u64> {
        if self.over {
            return None;
        }
        self.number += 1;
        self.over = self.last - self.start >= self.time;
        Some(if self.over { self.number | LAST } else { self.number })
    }

    /// The answer is there; it must be of the number.
    #[inline]
    pub fn end(&mut self, answer: u64) -> Result<()> {
        let now = Instant::now();
        if answer & !LAST != self.number {
            return Err(Failure::new("a wrong message came back"));
        }
        self.trips.push(u32::try_from((now - self.last).as_nanos()).unwrap_or(u32::MAX));
        self.last = now;
        Ok(())
    }

    /// With 2, of half a round trip.
    pub fn figure(self, divisor: u32) -> Result<Figure> {
        self.late_figure(divisor, Duration::ZERO)
    }

    /// The same where the ends were late by so much in each round trip.
    pub fn late_figure(mut self, divisor: u32, late: Duration) -> Result<Figure> {
        let late = u32::try_from(late.as_nanos()).unwrap_or(u32::MAX);
        self.trips.iter_mut().for_each(|trip| *trip = trip.saturating_sub(late) / divisor);
        ping_figure(&mut self.trips)
    }
}

/// Half of a round trip in nanoseconds.
pub fn half(trip: Duration) -> u32 {
    u32::try_from(trip.as_nanos() / 2).unwrap_or(u32::MAX)
}

pub fn ping_figure(halves: &mut [u32]) -> Result<Figure> {
    let operations = halves.len() as u64;
    let (value, p99) = stats::summary(halves).ok_or_else(|| Failure::new("no time to measure anything"))?;
    Ok(Figure { value, p99: Some(p99), operations })
}

/// What the messages of a stream hold where a ping has its number. A datagram of a stream may be late: one
/// that comes in the ping-pong behind it must not be taken for a ball, least of all for the last one.
pub const NO_NUMBER: u64 = 0;

/// Whether a ping's number marks it as the last.
pub fn is_last(number: u64) -> bool {
    number & LAST != 0
}

fn message(size: usize) -> Result<Vec<u8>> {
    if (8..=LARGEST as usize).contains(&size) { Ok(vec![0; size]) } else { Err(too_large()) }
}

pub fn put(message: &mut [u8], number: u64) {
    if let Some(end) = message.last_chunk_mut() {
        *end = number.to_le_bytes();
    }
}

pub fn word(message: &[u8]) -> u64 {
    message.last_chunk().copied().map_or(0, u64::from_le_bytes)
}

fn too_large() -> Failure {
    Failure(format!("messages hold 8 to {LARGEST} bytes"))
}

fn closed() -> Failure {
    Failure::new("the other end has closed its raw TCP connection")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::thread;

    fn pair() -> (Raw, Raw) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (other, _) = listener.accept().unwrap();
        (Raw::new(one).unwrap(), Raw::new(other).unwrap())
    }

    #[test]
    fn everything_in_every_way_on_one_connection() {
        let (mut active, mut passive) = pair();
        let short = Duration::from_millis(3);
        const WAITS: [Waiting; 4] = [Waiting::Spin, Waiting::SpinThenBlock, Waiting::Block, Waiting::Poll];
        let passive = thread::spawn(move || -> Result<()> {
            for wait in WAITS {
                passive.pong(64, wait)?;
                passive.respond(Verb::Write, 65536, wait)?;
                passive.respond(Verb::Read, 65536, wait)?;
            }
            passive.drain(4096, Waiting::Block)?;
            passive.drain(1 << 20, Waiting::Spin)
        });
        for wait in WAITS {
            assert!(active.ping(64, wait, short).unwrap().value > 0.0);
            assert!(active.request(Verb::Write, 65536, wait, short).unwrap().p99 > Some(0.0));
            assert!(active.request(Verb::Read, 65536, wait, short).unwrap().operations > 0);
        }
        assert!(active.stream(65536, short).unwrap().value > 0.0);
        assert!(active.stream(1 << 20, Duration::ZERO).unwrap().operations == 1);
        passive.join().unwrap().unwrap();
    }
}
