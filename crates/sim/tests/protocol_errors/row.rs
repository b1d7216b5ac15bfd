//! The parts of a row of the table, and how it is written.

use std::time::Duration;

use uwarp_proto::framing::{Framing, Mpa};
use uwarp_rnic::qp::StreamParams;
use uwarp_rnic::{Access, EventKind, WcStatus};

use crate::encoder::Quotes;
use crate::victim::Victim;

/// What the scripted peer sends.
pub struct Script {
    pub bytes: Vec<u8>,
    /// The ULPDU with the error.
    pub offending: Vec<u8>,
    /// The peer closes its side after it.
    pub end: bool,
}

/// The answer that is expected from the victim.
pub enum Answer {
    /// A Terminate with these codes and quotes, and nothing else.
    Terminate((u8, u8, u8), Quotes),
    /// Exactly this.
    Bytes(fn(&Victim) -> Vec<u8>),
}

type Completions = Vec<(u64, WcStatus)>;

/// One way to break the rules.
pub struct Row {
    pub name: &'static str,
    pub rule: &'static str,
    pub params: fn() -> StreamParams,
    pub access: Access,
    pub before: fn(&mut Victim),
    pub script: Box<dyn Fn(&Victim) -> Script>,
    pub answer: Answer,
    pub events: Vec<EventKind>,
    pub sends: Completions,
    pub recvs: Completions,
    pub written: Vec<(usize, usize)>,
    /// The row needs frames that arrive together.
    pub at_once: bool,
}

pub const FLUSHED: WcStatus = WcStatus::WrFlushErr;

/// A stranger with a read depth of one.
pub fn stranger() -> StreamParams {
    StreamParams { ird: 1, ord: 1, ..StreamParams::default() }
}

pub fn marked() -> StreamParams {
    let framing = Framing::Mpa(Mpa { receive_markers: true, ..Mpa::default() });
    StreamParams { framing, ..stranger() }
}

pub fn impatient() -> StreamParams {
    StreamParams { rnr_timeout: Some(Duration::from_millis(1)), ..stranger() }
}

pub fn uwarp() -> StreamParams {
    StreamParams { peer_is_uwarp: true, placement_acks: true, ..stranger() }
}

/// A row for a stream that ends with the victim's Terminate and leaves everything flushed.
pub fn bad(
    name: &'static str,
    codes: (u8, u8, u8),
    quotes: Quotes,
    rule: &'static str,
    script: impl Fn(&Victim) -> Script + 'static,
) -> Row {
    let event = match codes {
        (0, 1, _) | (1, 1, _) => EventKind::QpAccessErr,
        (0, 2, _) | (1, 2, _) => EventKind::QpReqErr,
        _ => EventKind::QpFatal,
    };
    Row {
        name,
        rule,
        params: stranger,
        access: Access::REMOTE_READ | Access::REMOTE_WRITE,
        before: |_| (),
        script: Box::new(script),
        answer: Answer::Terminate(codes, quotes),
        events: vec![event],
        sends: vec![(1, FLUSHED), (2, FLUSHED)],
        recvs: vec![(100, FLUSHED), (101, FLUSHED)],
        written: vec![],
        at_once: false,
    }
}

/// A row without an error: the stream continues.
pub fn good(
    name: &'static str,
    rule: &'static str,
    answer: fn(&Victim) -> Vec<u8>,
    script: impl Fn(&Victim) -> Script + 'static,
) -> Row {
    Row {
        answer: Answer::Bytes(answer),
        events: vec![],
        sends: vec![],
        recvs: vec![],
        ..bad(name, (0, 0, 0), Quotes::Nothing, rule, script)
    }
}

impl Row {
    pub fn params(self, params: fn() -> StreamParams) -> Self {
        Self { params, ..self }
    }

    pub fn before(self, before: fn(&mut Victim)) -> Self {
        Self { before, ..self }
    }

    pub fn sends(self, sends: &[(u64, WcStatus)]) -> Self {
        Self { sends: sends.to_vec(), ..self }
    }

    pub fn recvs(self, recvs: &[(u64, WcStatus)]) -> Self {
        Self { recvs: recvs.to_vec(), ..self }
    }

    pub fn written(self, at: usize, len: usize) -> Self {
        Self { written: vec![(at, len)], ..self }
    }

    pub fn written_at(self, places: &[(usize, usize)]) -> Self {
        Self { written: places.to_vec(), ..self }
    }

    pub fn at_once(self) -> Self {
        Self { at_once: true, ..self }
    }
}
