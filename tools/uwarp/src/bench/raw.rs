//! The measure that uwarp is held against: the same traffic over a bare TCP socket.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::protocol::{Failure, Figure, LARGEST, Result};
use super::stats;

/// A connected socket with buffers for sending and receiving.
pub struct Raw {
    socket: TcpStream,
    source: Vec<u8>,
    sink: Vec<u8>,
}

/// In the last word of a ping: this is the last one.
const LAST: u64 = 1 << 63;

impl Raw {
    pub fn new(socket: TcpStream) -> Result<Raw> {
        socket.set_nodelay(true).map_err(Failure::of("TCP_NODELAY"))?;
        let buffer = || vec![0; LARGEST as usize];
        Ok(Raw { socket, source: buffer(), sink: buffer() })
    }

    /// The active side of a ping-pong.
    pub fn ping(&mut self, size: usize, spin: bool, time: Duration) -> Result<Figure> {
        let (mut out, mut back) = (message(size)?, message(size)?);
        let mut halves = Vec::with_capacity(1 << 20);
        let start = Instant::now();
        let (mut last, mut number) = (start, 0_u64);
        loop {
            number += 1;
            let over = last - start >= time;
            put(&mut out, if over { number | LAST } else { number });
            self.send(&out)?;
            self.receive(&mut back, spin)?;
            if word(&back) & !LAST != number {
                return Err(Failure::new("raw TCP brought a wrong message"));
            }
            let now = Instant::now();
            halves.push(half(now - last));
            last = now;
            if over {
                break;
            }
        }
        ping_figure(&mut halves)
    }

    /// The passive side.
    pub fn pong(&mut self, size: usize, spin: bool) -> Result<()> {
        let mut message = message(size)?;
        loop {
            self.receive(&mut message, spin)?;
            self.send(&message)?;
            if word(&message) & LAST != 0 {
                return Ok(());
            }
        }
    }

    /// Sends for about `time` in calls of `size` bytes; the figure is bytes a second until the other side has them.
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

    /// Receives such a stream in calls of up to `size` bytes, and says how much it was.
    pub fn drain(&mut self, size: usize) -> Result<()> {
        let block = self.sink.get_mut(..size).ok_or_else(too_large)?;
        let mut count = 0_u64;
        loop {
            let n = (&self.socket).read(block).map_err(Failure::of("raw TCP: receive"))?;
            count += n as u64;
            match block.get(..n).and_then(<[u8]>::last) {
                Some(0) => {}
                Some(_) => break,
                None => return Err(closed()),
            }
        }
        self.send_number(count)
    }

    /// One number, blocking. Also how ends that must not use uwarp for it tell each other something.
    pub fn send_number(&mut self, number: u64) -> Result<()> {
        (&self.socket).write_all(&number.to_le_bytes()).map_err(Failure::of("raw TCP: send"))
    }

    pub fn receive_number(&mut self) -> Result<u64> {
        let mut bytes = [0; 8];
        (&self.socket).read_exact(&mut bytes).map_err(Failure::of("raw TCP: receive"))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// As [`Raw::receive_number`], if it has begun to come.
    pub fn number_if_there(&mut self) -> Result<Option<u64>> {
        match rustix::net::recv(&self.socket, &mut [0; 1], RecvFlags::DONTWAIT | RecvFlags::PEEK) {
            Ok(_) => self.receive_number().map(Some),
            Err(Errno::AGAIN) => Ok(None),
            Err(error) => Err(Failure(format!("raw TCP: receive: {error}"))),
        }
    }

    fn send(&self, message: &[u8]) -> Result<()> {
        match rustix::net::send(&self.socket, message, SendFlags::NOSIGNAL) {
            Ok(n) if n == message.len() => Ok(()),
            Ok(_) => Err(Failure::new("raw TCP took a part of a small message")),
            Err(error) => Err(Failure(format!("raw TCP: send: {error}"))),
        }
    }

    fn receive(&self, message: &mut [u8], spin: bool) -> Result<()> {
        let flags = if spin { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
        let mut filled = 0;
        while let Some(rest) = message.get_mut(filled..).filter(|rest| !rest.is_empty()) {
            match rustix::net::recv(&self.socket, rest, flags) {
                Ok((_, 0)) => return Err(closed()),
                Ok((_, n)) => filled += n,
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(Failure(format!("raw TCP: receive: {error}"))),
            }
        }
        Ok(())
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

fn message(size: usize) -> Result<Vec<u8>> {
    if (8..=LARGEST as usize).contains(&size) { Ok(vec![0; size]) } else { Err(too_large()) }
}

fn put(message: &mut [u8], number: u64) {
    if let Some(end) = message.last_chunk_mut() {
        *end = number.to_le_bytes();
    }
}

fn word(message: &[u8]) -> u64 {
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
    fn ping_pong_of_both_kinds_then_streams_on_one_connection() {
        let (mut active, mut passive) = pair();
        let short = Duration::from_millis(5);
        let passive = thread::spawn(move || {
            passive.pong(64, true)?;
            passive.pong(64, false)?;
            passive.drain(4096)?;
            passive.drain(1 << 20)
        });
        assert!(active.ping(64, true, short).unwrap().value > 0.0);
        assert!(active.ping(64, false, short).unwrap().operations > 0);
        assert!(active.stream(65536, short).unwrap().value > 0.0);
        assert!(active.stream(1 << 20, Duration::ZERO).unwrap().operations == 1);
        passive.join().unwrap().unwrap();
    }
}
