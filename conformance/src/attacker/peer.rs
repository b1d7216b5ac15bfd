//! One TCP connection of the attacker: it can write any bytes, and it reads what comes back.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::encode::{Codes, Seen, Setup, Tagged, WRITE, unframe};
use crate::{Context, Outcome, fail, require};

/// How long the attacker waits for an answer or an end. It only bounds a hang; no time is measured.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A connection.
#[derive(Debug)]
pub struct Peer {
    /// The socket.
    pub tcp: TcpStream,
    /// The reply to the attacker's request.
    pub reply: Option<Setup>,
    /// The victim was asked for markers.
    pub markers: bool,
    got: Vec<u8>,
}

/// How the victim ended a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// It closed its side.
    Closed,
    /// It reset the connection.
    Reset,
    /// Not at all, in the time given.
    Open,
}

/// Everything that came after set-up.
#[derive(Debug)]
pub struct Answer {
    /// Whole segments.
    pub seen: Vec<Seen>,
    /// How it ended.
    pub end: End,
}

impl Answer {
    /// The codes of the Terminate, which must be the last segment if there is one.
    pub fn terminate(&self) -> Outcome<Option<Codes>> {
        let codes: Vec<_> = self.seen.iter().map(Seen::codes).collect();
        require!(
            codes.iter().rev().skip(1).all(Option::is_none),
            "something follows the Terminate: {:?}",
            self.seen
        );
        Ok(codes.last().copied().flatten())
    }
}

impl Peer {
    /// Connects and sends nothing.
    pub fn connect(port: u16) -> Outcome<Self> {
        let tcp = TcpStream::connect(("127.0.0.1", port)).context("connect")?;
        Self::over(tcp)
    }

    /// Over a connection that the victim has made.
    pub fn over(tcp: TcpStream) -> Outcome<Self> {
        tcp.set_nodelay(true).context("TCP_NODELAY")?;
        tcp.set_read_timeout(Some(PATIENCE)).context("time limit")?;
        tcp.set_write_timeout(Some(PATIENCE)).context("time limit")?;
        Ok(Self { tcp, reply: None, markers: false, got: Vec::new() })
    }

    /// Connects, sends this request and reads the reply, which must accept.
    pub fn set_up(port: u16, request: &Setup) -> Outcome<Self> {
        let mut peer = Self::connect(port)?;
        peer.markers = request.flags & super::encode::MARKERS != 0;
        peer.send(&request.bytes())?;
        let reply = peer.read_setup()?;
        let Some(reply) = reply else { fail!("no reply to {request:?}") };
        require!(reply.flags & super::encode::REJECT == 0, "rejected: {reply:?}");
        peer.reply = Some(reply);
        Ok(peer)
    }

    /// The usual connection: revision 2, and the zero-length Write that says that we are ready. The victim is
    /// then established.
    pub fn established(port: u16) -> Outcome<Self> {
        let mut peer = Self::set_up(port, &Setup::request2())?;
        peer.send(&Tagged::write(0, 0, 0).fpdu())?;
        Ok(peer)
    }

    /// As [`Self::established`], with an attacker that claims to be uwarp: version 1, without features.
    pub fn uwarp(port: u16) -> Outcome<Self> {
        let mut peer = Self::set_up(port, &Setup::uwarp())?;
        let flags = peer.reply.as_ref().map_or(0, |r| r.flags);
        require!(flags & super::encode::UWARP_B != 0, "not taken for uwarp: flags {flags:#x}");
        peer.send(&Tagged::write(0x0100_E000, 0, 0).fpdu())?;
        Ok(peer)
    }

    /// Sends all bytes. It is no error if the victim has hung up: the attacker continues.
    pub fn send(&mut self, bytes: &[u8]) -> Outcome {
        self.send_while_wanted(bytes).map(drop)
    }

    /// As [`Self::send`]; `false`: the victim has hung up.
    pub fn send_while_wanted(&mut self, bytes: &[u8]) -> Outcome<bool> {
        match self.tcp.write_all(bytes) {
            Err(e) if gone(e.kind()) => Ok(false),
            Err(e) => fail!("sending {} bytes: {e}", bytes.len()),
            Ok(()) => Ok(true),
        }
    }

    /// Sends in pieces of this size, each with a system call of its own.
    pub fn send_in(&mut self, bytes: &[u8], piece: usize) -> Outcome {
        bytes.chunks(piece).try_for_each(|part| self.send(part))
    }

    /// Sends as much as the victim takes within `limit`; returns how much that was.
    pub fn flood(&mut self, bytes: &[u8], limit: Duration) -> Outcome<usize> {
        self.tcp.set_nonblocking(true).context("non-blocking")?;
        let deadline = Instant::now() + limit;
        let mut sent = 0;
        while sent < bytes.len() && Instant::now() < deadline {
            match self.tcp.write(&bytes[sent..]) {
                Ok(n) => sent += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(2)),
                Err(e) if gone(e.kind()) => break,
                Err(e) => fail!("sending: {e}"),
            }
        }
        self.tcp.set_nonblocking(false).context("blocking")?;
        Ok(sent)
    }

    /// Reads one set-up frame; `None` when the victim hangs up instead.
    pub fn read_setup(&mut self) -> Outcome<Option<Setup>> {
        let mut fixed = [0; 20];
        if !self.read_exact(&mut fixed)? {
            return Ok(None);
        }
        let length = u16::from_be_bytes([fixed[18], fixed[19]]);
        let mut private_data = vec![0; usize::from(length)];
        require!(self.read_exact(&mut private_data)?, "a set-up frame cut short");
        let mut key = [0; 16];
        key.copy_from_slice(&fixed[..16]);
        Ok(Some(Setup { key, flags: fixed[16], revision: fixed[17], length: None, private_data }))
    }

    /// `false`: the victim hung up before the first byte.
    fn read_exact(&mut self, buffer: &mut [u8]) -> Outcome<bool> {
        let mut have = 0;
        while have < buffer.len() {
            match self.tcp.read(&mut buffer[have..]) {
                Ok(0) if have == 0 => return Ok(false),
                Err(e) if have == 0 && gone(e.kind()) => return Ok(false),
                Ok(0) => fail!("hung up after {have} of {} bytes", buffer.len()),
                Ok(n) => have += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => fail!("reading: {e}"),
            }
        }
        Ok(true)
    }

    /// The next segment from the victim, on a stream without markers.
    pub fn segment(&mut self) -> Outcome<Seen> {
        let deadline = Instant::now() + PATIENCE;
        let mut buffer = vec![0; 64 << 10];
        loop {
            let (seen, _) = unframe(&self.got, false, true).context("what came back")?;
            if let Some(first) = seen.into_iter().next() {
                let len = (2 + first.ulpdu.len()).next_multiple_of(4) + 4;
                self.got.drain(..len.min(self.got.len()));
                return Ok(first);
            }
            require!(Instant::now() < deadline, "no segment came");
            match self.tcp.read(&mut buffer) {
                Ok(0) => fail!("hung up where a segment was due"),
                Ok(n) => self.got.extend(&buffer[..n]),
                Err(e) => fail!("reading: {e}"),
            }
        }
    }

    /// Waits until so many bytes have come that nobody has read yet, and leaves them where they are.
    pub fn arrived(&mut self, bytes: usize) -> Outcome {
        let deadline = Instant::now() + PATIENCE;
        let mut buffer = vec![0; bytes];
        while self.tcp.peek(&mut buffer).context("what came back")? < bytes {
            require!(Instant::now() < deadline, "{bytes} bytes do not come");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Reads to the end, at most for `limit`.
    pub fn read_to_end(&mut self, limit: Duration) -> Outcome<Answer> {
        let deadline = Instant::now() + limit;
        let mut buffer = vec![0; 64 << 10];
        let end = loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break End::Open;
            }
            self.tcp.set_read_timeout(Some(left)).context("time limit")?;
            match self.tcp.read(&mut buffer) {
                Ok(0) => break End::Closed,
                Ok(n) => self.got.extend(&buffer[..n]),
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break End::Open,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if gone(e.kind()) => break End::Reset,
                Err(e) => fail!("reading: {e}"),
            }
        };
        self.tcp.set_read_timeout(Some(PATIENCE)).context("time limit")?;
        let (seen, rest) = unframe(&self.got, self.markers, true).context("what came back")?;
        require!(rest == 0 || end != End::Closed, "{rest} bytes came back that are no FPDU");
        self.got.clear();
        Ok(Answer { seen, end })
    }

    /// Reads what comes until the victim ends the stream.
    pub fn answer(&mut self) -> Outcome<Answer> {
        let answer = self.read_to_end(PATIENCE)?;
        require!(answer.end != End::Open, "the victim does not end the stream");
        Ok(answer)
    }

    /// Closes the attacker's side for writing.
    pub fn finish(&self) {
        let _ = self.tcp.shutdown(std::net::Shutdown::Write);
    }

    /// Resets the connection.
    pub fn reset(self) {
        let _ = rustix::net::sockopt::set_socket_linger(&self.tcp, Some(Duration::ZERO));
    }

    /// The next segment that is no acknowledgement of what was placed (between uwarp ends).
    pub fn message(&mut self) -> Outcome<Seen> {
        loop {
            let seen = self.segment()?;
            if seen.opcode() != UWARP_ACK {
                return Ok(seen);
            }
        }
    }

    /// Waits until the victim has asked for this many Reads, and returns their sinks' STags.
    pub fn sinks(&mut self, count: usize) -> Outcome<Vec<u32>> {
        (0..count)
            .map(|_| {
                let seen = self.message()?;
                require!(seen.opcode() == super::encode::READ_REQUEST, "no Read Request: {seen:?}");
                Ok(seen.word(18))
            })
            .collect()
    }

    /// Drops an expected zero-length Write of the victim's (its indication, when it is the initiator).
    pub fn expect_rtr(&mut self) -> Outcome<Seen> {
        let seen = self.segment()?;
        require!(seen.opcode() == WRITE && seen.payload().is_empty(), "no ready-to-receive Write: {seen:?}");
        Ok(seen)
    }
}

const UWARP_ACK: u8 = 0xF;

/// The other end is gone.
fn gone(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted)
}
