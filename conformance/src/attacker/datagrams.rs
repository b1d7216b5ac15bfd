//! An attacker that has made contact over reliable datagrams: it has an exchange with the victim, and says in
//! it what it likes. Layouts are from docs/rd.md, not from uwarp's code.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use super::peer::PATIENCE;
use crate::{Context, Outcome, fail, require};

const PACKET: u8 = 0;
const HELLO: u8 = 1;
const CHALLENGE: u8 = 2;
const OPEN: u8 = 3;
const UNKNOWN: u8 = 4;

/// Flags of STREAM: the service follows; nothing follows the bytes; acknowledge at once.
pub const OPENS: u8 = 0x80;
/// The end.
pub const FIN: u8 = 0x40;
const AT_ONCE: u8 = 0x04;
/// The feature of streams.
const STREAMS: u32 = 1;

/// A whole packet with its CRC.
fn packet(kind: u8, [from, to]: [u16; 2], key: u64, number: u32, body: &[u8]) -> Vec<u8> {
    let mut out = vec![1];
    out.extend(from.to_be_bytes());
    out.extend([1, 0x40 | kind]);
    out.extend(to.to_be_bytes());
    out.push(0);
    out.extend(key.to_be_bytes());
    out.extend(number.to_be_bytes());
    out.extend(body);
    out.extend(crc32c::crc32c(&out).to_le_bytes());
    out
}

fn chunk(kind: u8, flags: u8, rest: &[&[u8]]) -> Vec<u8> {
    let rest = rest.concat();
    let len = (rest.len() + 4) as u16;
    let [high, low] = len.to_be_bytes();
    [&[kind, flags, high, low], &rest[..]].concat()
}

/// Bytes of a stream.
pub fn stream(number: u32, position: u32, service: Option<u32>, flags: u8, bytes: &[u8]) -> Vec<u8> {
    let service = service.map(u32::to_be_bytes);
    let opens = if service.is_some() { OPENS } else { 0 };
    let service = service.as_ref().map_or(&[][..], |bytes| bytes);
    chunk(3, flags | opens | AT_ONCE, &[&number.to_be_bytes(), &position.to_be_bytes(), service, bytes])
}

/// STREAM-CREDIT.
pub fn credit(number: u32, limit: u32) -> Vec<u8> {
    chunk(9, 0, &[&number.to_be_bytes(), &limit.to_be_bytes()])
}

/// STREAM-RESET.
pub fn reset(number: u32) -> Vec<u8> {
    chunk(10, 0, &[&number.to_be_bytes(), &[0; 4]])
}

/// PING.
pub fn ping() -> Vec<u8> {
    chunk(7, 0, &[])
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).and_then(|word| word.try_into().ok()).map_or(0, u32::from_be_bytes)
}

/// An exchange with the victim.
#[derive(Debug)]
pub struct Exchange {
    socket: UdpSocket,
    ports: [u16; 2],
    own_key: u64,
    key: u64,
    number: u32,
    /// The victim's packets that have come: all below the first, and those.
    largest: u32,
    /// The largest of the own packets that the victim has acknowledged.
    pub acknowledged: u32,
    /// What has come of each stream in its order, and whether its end has.
    pub came: BTreeMap<u32, (Vec<u8>, bool)>,
    /// Streams that the victim has reset, and how often it said so.
    pub resets: BTreeMap<u32, usize>,
    /// It says nothing of what has come.
    pub is_silent: bool,
    opened: u32,
}

impl Exchange {
    /// Makes contact with the process of this port of this host.
    pub fn begin(port: u16) -> Outcome<Self> {
        let socket = UdpSocket::bind("127.0.0.1:0").context("a UDP socket")?;
        socket.connect(("127.0.0.1", port)).context("the victim's address")?;
        let own = socket.local_addr().context("the own address")?.port();
        let own_key = 0x5EED_0000_0000_0000 | u64::from(own) << 16 | u64::from(std::process::id() & 0xFFFF);
        let ports = [own, port];
        let mut body = vec![1, 0, 0, 0];
        body.extend(STREAMS.to_be_bytes());
        body.resize(72, 0);
        let mut exchange = Self {
            socket,
            ports,
            own_key,
            key: 0,
            number: 1,
            largest: 0,
            acknowledged: 0,
            came: BTreeMap::new(),
            resets: BTreeMap::new(),
            is_silent: false,
            opened: 0,
        };
        let deadline = Instant::now() + PATIENCE;
        let cookie = loop {
            exchange.put(&packet(HELLO, ports, own_key, 0, &body))?;
            let answer = exchange.get(Duration::from_millis(100))?;
            if let Some(answer) = answer.filter(|answer| answer.len() == 52 && answer[4] == 0x40 | CHALLENGE)
            {
                break answer[28..44].to_vec();
            }
            require!(Instant::now() < deadline, "no Challenge");
        };
        exchange.key = u64::from_be_bytes(cookie[..8].try_into().context("a key")?);
        let mut open = own_key.to_be_bytes().to_vec();
        open.extend(&cookie[8..]);
        open.extend(port.to_be_bytes());
        open.extend([1, 0]);
        open.extend(STREAMS.to_be_bytes());
        open.extend(ping());
        while exchange.acknowledged == 0 {
            exchange.put(&packet(OPEN, ports, exchange.key, 1, &open))?;
            exchange.read(Duration::from_millis(100))?;
            require!(Instant::now() < deadline, "the Open is not answered");
        }
        Ok(exchange)
    }

    /// The next number of a stream of its own.
    pub fn new_stream(&mut self) -> u32 {
        self.opened += 1;
        (self.opened - 1) << 1
    }

    fn put(&self, bytes: &[u8]) -> Outcome {
        match self.socket.send(bytes) {
            Ok(_) => Ok(()),
            Err(e) => fail!("sending: {e}"),
        }
    }

    fn get(&self, limit: Duration) -> Outcome<Option<Vec<u8>>> {
        use std::io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        self.socket.set_read_timeout(Some(limit)).context("time limit")?;
        let mut buffer = vec![0; 65_536];
        match self.socket.recv(&mut buffer) {
            Ok(len) => {
                buffer.truncate(len);
                Ok(Some(buffer))
            }
            Err(e) if matches!(e.kind(), WouldBlock | TimedOut | Interrupted) => Ok(None),
            Err(e) => fail!("receiving: {e}"),
        }
    }

    /// Sends these chunks in one packet. Returns its number.
    pub fn send(&mut self, chunks: &[u8]) -> Outcome<u32> {
        self.number += 1;
        self.put(&packet(PACKET, self.ports, self.key, self.number, chunks))?;
        Ok(self.number)
    }

    /// Sends them until the victim has acknowledged a packet with them.
    pub fn say(&mut self, chunks: &[u8]) -> Outcome {
        let deadline = Instant::now() + PATIENCE;
        let first = self.send(chunks)?;
        loop {
            self.read(Duration::from_millis(50))?;
            if self.acknowledged >= first {
                return Ok(());
            }
            require!(Instant::now() < deadline, "not acknowledged");
            self.send(chunks)?;
        }
    }

    /// Many packets, no faster than the victim answers: it loses few.
    pub fn flood(&mut self, packets: impl Iterator<Item = Vec<u8>>) -> Outcome {
        for (n, chunks) in packets.enumerate() {
            self.send(&chunks)?;
            if n % 32 == 31 {
                let last = self.send(&ping())?;
                let until = Instant::now() + Duration::from_millis(20);
                while self.acknowledged < last && Instant::now() < until {
                    self.read(Duration::from_millis(5))?;
                }
            }
        }
        Ok(())
    }

    /// Reads what comes, at most for so long, until something has.
    pub fn read(&mut self, limit: Duration) -> Outcome {
        let mut next = self.get(limit)?;
        let mut elicits = false;
        while let Some(bytes) = next {
            elicits |= self.take(&bytes)?;
            next = self.get(Duration::from_micros(1))?;
        }
        if elicits && !self.is_silent {
            // All that came: what was lost on the way is not missed here.
            let mut rest = self.largest.to_be_bytes().to_vec();
            rest.extend([0, 0, 0, 0, 1, 0, 1, 0]);
            rest.extend(1u32.to_be_bytes());
            rest.extend([0, 0]);
            rest.extend((self.largest.min(0xFFFF) as u16).to_be_bytes());
            self.send(&chunk(1, 0, &[&rest]))?;
        }
        Ok(())
    }

    /// Returns whether the packet must be acknowledged.
    fn take(&mut self, bytes: &[u8]) -> Outcome<bool> {
        if bytes.len() < 24 || bytes[8..16] != self.own_key.to_be_bytes() {
            return Ok(false);
        }
        require!(bytes[4] != 0x40 | UNKNOWN, "the victim does not know the exchange");
        self.largest = self.largest.max(word(bytes, 16));
        let mut rest = &bytes[20..bytes.len() - 4];
        let mut elicits = false;
        while let [kind, flags, high, low, ..] = *rest {
            let len = usize::from(u16::from_be_bytes([high, low]));
            let Some(one) = rest.get(..len).filter(|one| one.len() >= 4) else { fail!("a chunk cut short") };
            rest = &rest[len..];
            match kind {
                0 => {}
                1 => self.acknowledged = self.acknowledged.max(word(one, 4)),
                3 => {
                    elicits = true;
                    self.take_bytes(one, flags);
                }
                10 => {
                    elicits = true;
                    *self.resets.entry(word(one, 4)).or_default() += 1;
                }
                _ => elicits = true,
            }
        }
        Ok(elicits)
    }

    fn take_bytes(&mut self, one: &[u8], flags: u8) {
        let data = one.get(if flags & OPENS == 0 { 12 } else { 16 }..).unwrap_or_default();
        let (bytes, is_over) = self.came.entry(word(one, 4)).or_default();
        let from = word(one, 8) as usize;
        if bytes.len() >= from && from + data.len() > bytes.len() {
            bytes.truncate(from);
            bytes.extend(data);
        }
        *is_over |= flags & FIN != 0;
    }

    /// Waits until so many bytes have come of a stream.
    pub fn wait_for(&mut self, number: u32, count: usize) -> Outcome<Vec<u8>> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let came = self.came.get(&number).map(|(bytes, _)| bytes);
            if let Some(bytes) = came.filter(|bytes| bytes.len() >= count) {
                return Ok(bytes.clone());
            }
            require!(Instant::now() < deadline, "{count} bytes of stream {number} do not come");
            require!(!self.resets.contains_key(&number), "stream {number} was reset");
            self.read(Duration::from_millis(20))?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Examples A.8 and A.10 of docs/rd.md.
    #[test]
    fn packets_are_those_of_the_page() {
        let body = chunk(3, OPENS | FIN, &[&7u32.to_be_bytes(), &[0; 4], &0x4E20u32.to_be_bytes(), b"bytes"]);
        let made = packet(PACKET, [20_001, 20_000], 0xFEDC_BA98_7654_3210, 11, &body);
        assert_eq!(made[made.len() - 4..], [0xb3, 0x12, 0x49, 0x1c]);
        let made = packet(UNKNOWN, [20_000, 20_001], 0xFEDC_BA98_7654_3210, 0, &[]);
        assert_eq!(made[made.len() - 4..], [0x88, 0x7e, 0x1c, 0x99]);
    }
}
