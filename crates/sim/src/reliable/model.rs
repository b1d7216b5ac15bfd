//! What must be true of messages, whatever machine carries them.

use std::collections::BTreeMap;

use uwarp_proto::rd::{Failure, QpnPair};

use crate::Time;

/// How a message is placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Kind {
    Send,
    Write,
    /// Takes a receive, too.
    WriteWithImmediate,
    /// Is answered by a message.
    Request,
}

impl Kind {
    /// Whether the message takes a receive.
    pub fn takes_receive(self) -> bool {
        matches!(self, Kind::Send | Kind::WriteWithImmediate)
    }
}

/// What a message is.
#[derive(Debug, Clone, Copy)]
pub struct MessageKey {
    /// The sender's host, and which of its processes.
    pub from: (usize, u32),
    /// The receiver's host.
    pub to: usize,
    /// From which queue pair to which.
    pub pair: QpnPair,
    /// How it is placed.
    pub kind: Kind,
    /// Bytes.
    pub len: u32,
    /// It is of an ordered flow.
    pub is_ordered: bool,
    /// Its receiver does not take it.
    pub is_refused: bool,
}

#[derive(Debug)]
struct Message {
    key: MessageKey,
    posted: Time,
    /// How often it was delivered.
    delivered: u32,
    /// Bytes of it were placed.
    is_seen: bool,
    outcome: Option<Result<(), Failure>>,
    /// How often it found no receive, or lost it.
    refusals: u32,
    /// Messages that were posted when it ended.
    ended_at: usize,
    /// Its process is gone, and nobody waits for its end.
    is_orphan: bool,
}

/// A flow: the sender's process, the receiver's host, the queue pairs.
type Flow = ((usize, u32), usize, QpnPair);

/// All messages.
#[derive(Debug, Default)]
pub struct Model {
    messages: Vec<Message>,
    flows: BTreeMap<Flow, Vec<usize>>,
    /// A message fails when it has found no receive more often than this; 7: never.
    rnr_retry: u8,
}

/// Messages of at most this length are in one packet.
pub(super) const SHORT: u32 = 300;

impl Model {
    /// Without messages.
    pub fn new(rnr_retry: u8) -> Self {
        Self { rnr_retry, ..Self::default() }
    }

    /// A message is posted. Returns its number.
    pub fn new_message(&mut self, now: Time, key: MessageKey) -> usize {
        let number = self.messages.len();
        let message = Message {
            key,
            posted: now,
            delivered: 0,
            is_seen: false,
            outcome: None,
            refusals: 0,
            ended_at: 0,
            is_orphan: false,
        };
        self.messages.push(message);
        if key.is_ordered {
            self.flows.entry((key.from, key.to, key.pair)).or_default().push(number);
        }
        number
    }

    /// What it is.
    pub fn key(&self, number: usize) -> &MessageKey {
        &self.messages[number].key
    }

    /// Its byte at an offset.
    pub fn byte(number: usize, offset: u32) -> u8 {
        (number as u32).wrapping_mul(0x9E37_79B9).wrapping_add(offset.wrapping_mul(0x85EB_CA6B)).to_be_bytes()
            [0]
    }

    /// A process is killed, or has left.
    pub fn killed(&mut self, host: usize, life: u32) {
        let of_it = self.messages.iter_mut().filter(|message| message.key.from == (host, life));
        of_it.for_each(|message| message.is_orphan = true);
    }

    /// The sender hears of the end.
    pub fn finished(&mut self, number: usize, outcome: Result<(), Failure>) {
        let posted = self.messages.len();
        let message = &mut self.messages[number];
        assert_eq!(message.outcome, None, "message {number} has ended twice: {outcome:?}");
        (message.outcome, message.ended_at) = (Some(outcome), posted);
        if outcome == Err(Failure::NoReceive) && message.key.len <= SHORT {
            let refusals = message.refusals;
            let may_fail = self.rnr_retry < 7 && refusals > u32::from(self.rnr_retry);
            assert!(may_fail, "message {number} has failed after {refusals} refusals");
        }
        if outcome.is_ok() {
            assert_eq!(message.delivered, 1, "message {number} is Done and was not delivered");
        }
    }

    /// How it has ended, as far as its sender knows.
    pub fn outcome(&self, number: usize) -> Option<Result<(), Failure>> {
        self.messages[number].outcome
    }

    /// A message finds no receive, or its receive is taken back.
    pub fn not_ready(&mut self, number: usize) {
        self.messages[number].refusals += 1;
    }

    /// Bytes of a message are written where the program can see them.
    pub fn placed(&mut self, number: usize) {
        let key = self.messages[number].key;
        assert!(!key.is_refused, "message {number} is placed, and was refused");
        assert_eq!(self.messages[number].delivered, 0, "message {number} is placed after its delivery");
        if key.is_ordered && key.kind != Kind::Send {
            self.check_turn(number, "placed");
        }
        self.messages[number].is_seen = true;
    }

    /// A message is delivered.
    pub fn delivered(&mut self, number: usize) {
        let message = &mut self.messages[number];
        message.delivered += 1;
        assert_eq!(message.delivered, 1, "message {number} is delivered twice: {:?}", message.key);
        assert!(!message.key.is_refused, "message {number} is delivered, and was refused");
        if message.key.is_ordered {
            self.check_turn(number, "delivered");
        }
    }

    /// All before it in its flow have been delivered, or have failed before it was posted, and none behind it
    /// was seen.
    fn check_turn(&self, number: usize, what: &str) {
        let key = self.messages[number].key;
        for other in &self.flows[&(key.from, key.to, key.pair)] {
            let message = &self.messages[*other];
            if *other < number {
                let has_failed = message.outcome.is_some_and(|outcome| outcome.is_err());
                let is_over = message.delivered > 0 || has_failed && message.ended_at <= number;
                assert!(is_over, "message {number} is {what} before {other}: {:?}, {key:?}", message.key);
            } else if *other > number {
                let is_seen = message.delivered > 0 || (message.is_seen && message.key.kind != Kind::Send);
                assert!(!is_seen, "message {number} is {what} after {other}: {:?}, {key:?}", message.key);
            }
        }
    }

    /// Every message has ended.
    pub fn check_ended(&self, now: Time) {
        for (number, message) in self.messages.iter().enumerate() {
            let has_ended = message.outcome.is_some() || message.is_orphan;
            assert!(
                has_ended,
                "message {number} has not ended after {} ms: delivered {}, {:?}",
                (now - message.posted) / 1_000_000,
                message.delivered,
                message.key
            );
            if message.key.is_refused && !message.is_orphan {
                assert!(message.outcome.is_some_and(|outcome| outcome.is_err()), "message {number}");
            }
        }
    }

    /// Done, and failed.
    pub fn counts(&self) -> (u64, u64) {
        let count = |is: bool| {
            let outcomes = self.messages.iter().filter_map(|message| message.outcome);
            outcomes.filter(|outcome| outcome.is_ok() == is).count() as u64
        };
        (count(true), count(false))
    }

    /// How many failed for a reason.
    pub fn failures(&self, failure: Failure) -> usize {
        self.messages.iter().filter(|message| message.outcome == Some(Err(failure))).count()
    }
}
