//! Data on an established stream, as an adapter would send and serve it: Sends both ways, a Write and a Read
//! of the program into the replica's memory, and a Write and a Read of the replica into the program's.

use uwarp_conformance::attacker::encode::{
    Marked, READ_REQUEST, READ_RESPONSE, ReadRequest, SEND, Seen, TERMINATE, Tagged, Untagged, WRITE, fpdu,
};
use uwarp_conformance::attacker::peer::Peer;
use uwarp_conformance::{Outcome, fail, require};

use crate::adapter::{Adapter, Rtr};

/// As `c/adapter_peer.c` has them.
const MESSAGE: usize = 64;
const LENGTH: usize = 3000;

/// The replica's memory, and the sink of its Read.
const STAG: u32 = 0x00C0_FFEE;
const BASE: u64 = 0x0001_0000_0000;
const SINK: (u32, u64) = (0x00BE_EF00, 0x40);
/// Payload of one segment, as an adapter cuts it for Ethernet's usual MTU.
const SEGMENT: usize = 1408;

/// What a segment was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    EmptyWrite,
    EmptyRead,
    Written,
    Served,
    Response { last: bool },
    Message(Vec<u8>),
}

/// Who reads: a depth of 0 forbids it.
#[derive(Debug, Clone, Copy)]
pub struct Reads {
    pub program: bool,
    pub adapter: bool,
}

/// A stream.
pub struct Talk<'a> {
    peer: &'a mut Peer,
    adapter: &'a dyn Adapter,
    /// uwarp has requested markers.
    marked: Option<Marked>,
    memory: Vec<u8>,
    written: usize,
    sink: Vec<u8>,
    /// Sends that were sent, and that came; Read Requests likewise.
    sends: (u32, u32),
    reads: (u32, u32),
}

/// The content of kind `seed`.
fn content(seed: usize, length: usize) -> Vec<u8> {
    (0..length).map(|i| (i * 7 + i / 251 + seed * 59) as u8).collect()
}

fn number(seen: &Seen, at: usize) -> u64 {
    u64::from(seen.word(at)) << 32 | u64::from(seen.word(at + 4))
}

impl<'a> Talk<'a> {
    /// `markers`: uwarp has requested them.
    pub fn new(peer: &'a mut Peer, adapter: &'a dyn Adapter, markers: bool) -> Self {
        let seed = if adapter.spoils() { 9 } else { 3 };
        let memory = [vec![0; LENGTH], content(seed, LENGTH)].concat();
        let (written, sink, marked) = (0, vec![0; LENGTH], markers.then(Marked::default));
        Self { peer, adapter, marked, memory, written, sink, sends: (0, 0), reads: (0, 0) }
    }

    fn post(&mut self, ulpdu: &[u8]) -> Outcome {
        let bytes = match &mut self.marked {
            Some(marked) => marked.fpdu(ulpdu, 0),
            None => fpdu(ulpdu),
        };
        self.peer.send(&bytes)
    }

    /// The initiator's first FPDU.
    pub fn begin(&mut self, rtr: Rtr) -> Outcome {
        let Some(ulpdu) = rtr.ulpdu() else { return Ok(()) };
        self.post(&ulpdu)?;
        if let Rtr::Read { sink, .. } = rtr {
            self.reads.0 = 1;
            let seen = self.peer.segment()?;
            let answers = seen.opcode() == READ_RESPONSE
                && seen.payload().is_empty()
                && (seen.stag(), number(&seen, 6)) == sink;
            require!(answers, "no answer to the Read of no data: {seen:?}");
        }
        Ok(())
    }

    /// The responder's. Says what it was, and whether it is of this kind.
    pub fn await_rtr(&mut self, agreed: Rtr) -> Outcome<(&'static str, bool)> {
        match self.next()? {
            Event::EmptyWrite => Ok(("a Write of no data", !matches!(agreed, Rtr::Read { .. }))),
            Event::EmptyRead => Ok(("a Read of no data", !matches!(agreed, Rtr::Write { .. }))),
            other => fail!("the first FPDU is {other:?}"),
        }
    }

    /// All of it. `first`: the program sends before it has received anything.
    pub fn exchange(&mut self, reads: Reads, first: bool) -> Outcome {
        let may = [u8::from(reads.program), 0, 0, 0];
        let place = [&STAG.to_be_bytes()[..], &BASE.to_be_bytes(), &may].concat();
        self.say(&place, 1)?;
        if first {
            require!(self.hear()? == content(8, MESSAGE), "the program's first Send differs");
        }
        let theirs = self.hear()?;
        require!(self.written == LENGTH, "{} bytes of the program's Write", self.written);
        require!(self.memory[..LENGTH] == content(2, LENGTH), "its Write has other content");
        require!(theirs.len() == MESSAGE && theirs[16..] == content(5, MESSAGE - 16), "its Send differs");
        let seen = Seen { ulpdu: theirs };
        let (rkey, at) = (seen.word(0), number(&seen, 4));
        self.write(rkey, at)?;
        if reads.adapter {
            self.read(rkey, at + LENGTH as u64)?;
            require!(self.sink == content(4, LENGTH), "the Read has other content");
        }
        self.say(&[0; 16], 6)
    }

    /// Serves what comes until uwarp ends the stream, and says how: for a stream that went wrong.
    pub fn serve_to_the_end(&mut self) -> Outcome<String> {
        let mut said = String::new();
        while let Ok(seen) = self.peer.segment() {
            if let Some((layer, kind, code)) = seen.codes() {
                said += &format!("sends Terminate {layer}/{kind}/{code} and ");
            } else if seen.opcode() == READ_REQUEST {
                self.serve(&seen)?;
            }
        }
        Ok(format!("uwarp {said}hangs up"))
    }

    /// Waits for a Send, and serves what comes before.
    fn hear(&mut self) -> Outcome<Vec<u8>> {
        loop {
            if let Event::Message(message) = self.next()? {
                return Ok(message);
            }
        }
    }

    fn say(&mut self, start: &[u8], seed: usize) -> Outcome {
        self.sends.0 += 1;
        let message = [start, &content(seed, MESSAGE - start.len())].concat();
        self.post(&Untagged::new(SEND, 0, self.sends.0, message).ulpdu())
    }

    fn write(&mut self, rkey: u32, at: u64) -> Outcome {
        segments(WRITE, rkey, at, &content(7, LENGTH)).iter().try_for_each(|ulpdu| self.post(ulpdu))
    }

    fn read(&mut self, rkey: u32, at: u64) -> Outcome {
        self.reads.0 += 1;
        let request = ReadRequest { sink: SINK, size: LENGTH as u32, source: (rkey, at) };
        self.post(&Untagged::new(READ_REQUEST, 1, self.reads.0, request.bytes()).ulpdu())?;
        loop {
            if self.next()? == (Event::Response { last: true }) {
                return Ok(());
            }
        }
    }

    /// The next segment, answered if it asks for something.
    pub fn next(&mut self) -> Outcome<Event> {
        let seen = self.peer.segment()?;
        let payload = seen.payload();
        let tagged = seen.ulpdu.first().is_some_and(|b| b & 0x80 != 0);
        let stag_0 = tagged && seen.stag() == 0 && self.adapter.refuses_stag_0();
        require!(!stag_0, "STag 0, which this adapter takes for an error: {seen:?}");
        match seen.opcode() {
            WRITE if payload.is_empty() => Ok(Event::EmptyWrite),
            WRITE => {
                let place = place(&seen, STAG, BASE, LENGTH)?;
                self.memory[place..place + payload.len()].copy_from_slice(payload);
                self.written += payload.len();
                Ok(Event::Written)
            }
            READ_REQUEST => {
                self.reads.1 += 1;
                require!((seen.word(6), seen.word(10)) == (1, self.reads.1), "queue or MSN of {seen:?}");
                self.serve(&seen)
            }
            READ_RESPONSE => {
                let place = place(&seen, SINK.0, SINK.1, LENGTH)?;
                self.sink[place..place + payload.len()].copy_from_slice(payload);
                Ok(Event::Response { last: seen.ulpdu[0] & 0x40 != 0 })
            }
            SEND => {
                self.sends.1 += 1;
                let fields = (seen.word(6), seen.word(10), seen.word(14));
                require!(fields == (0, self.sends.1, 0), "queue, MSN or offset of {seen:?}");
                Ok(Event::Message(payload.to_vec()))
            }
            TERMINATE => fail!("a Terminate: {:?}", seen.codes()),
            other => fail!("opcode {other}: {seen:?}"),
        }
    }

    /// Answers a Read: one of no data without a look at its STags, as RFC 5040 section 5.2 has it.
    fn serve(&mut self, seen: &Seen) -> Outcome<Event> {
        let (sink, size, source) =
            ((seen.word(18), number(seen, 22)), seen.word(30) as usize, (seen.word(34), number(seen, 38)));
        if size == 0 {
            self.post(&Tagged::new(READ_RESPONSE, sink.0, sink.1, 0).ulpdu())?;
            return Ok(Event::EmptyRead);
        }
        let from = source.1.wrapping_sub(BASE) as usize;
        let data = self.memory.get(from..from.saturating_add(size));
        let Some(data) = data.filter(|_| source.0 == STAG) else { fail!("a Read of {source:?}") };
        segments(READ_RESPONSE, sink.0, sink.1, data).iter().try_for_each(|ulpdu| self.post(ulpdu))?;
        Ok(Event::Served)
    }
}

/// Where a tagged segment goes in memory of this name.
fn place(seen: &Seen, stag: u32, base: u64, length: usize) -> Outcome<usize> {
    let at = number(seen, 6).wrapping_sub(base) as usize;
    let end = at.saturating_add(seen.payload().len());
    require!(seen.stag() == stag && end <= length, "a segment for memory that it may not touch: {seen:?}");
    Ok(at)
}

/// A tagged message as ULPDUs; only the last segment says that it is the last.
fn segments(opcode: u8, stag: u32, at: u64, data: &[u8]) -> Vec<Vec<u8>> {
    let count = data.len().div_ceil(SEGMENT);
    let segment = |(n, payload): (usize, &[u8])| {
        let mut segment = Tagged::new(opcode, stag, at + (n * SEGMENT) as u64, 0);
        segment.payload = payload.to_vec();
        if n + 1 < count { segment.more().ulpdu() } else { segment.ulpdu() }
    };
    data.chunks(SEGMENT).enumerate().map(segment).collect()
}
