//! Messages of a process to itself. They never leave it, so they need no exchange: the bytes go from one
//! queue pair's memory to the other's, in the order of the posts.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Weak;
use std::time::{Duration, Instant};

use uwarp_proto::rd::{self, Failure, MessageId, Placed, QpnPair, rnr_delay};
use uwarp_rnic::WcStatus;
use uwarp_rnic::qp::{Now, RdSegment};
use uwarp_wire::rd::chunk::Reason;

use super::{Owner, RdQp, Turn, answers};

/// Bytes that are copied at a time, over this buffer.
pub(super) const PIECE: u32 = 64 * 1024;
/// Bytes of one turn. The rest follows after a moment in which others have theirs.
pub(super) const TURN: u32 = 1 << 20;
pub(super) const MOMENT: Duration = Duration::from_micros(20);
/// `rnr_retry` without a limit.
const RETRY_FOREVER: u8 = 7;
/// The machine counts its exchanges from 1.
pub(super) const NO_EXCHANGE: u64 = 0;

struct Message {
    owner: Owner,
    route: rd::Route,
    message: rd::Outgoing,
    number: u64,
    /// Up to here it was copied.
    at: u32,
    retries: u8,
    /// It waits for a receive until then.
    until: Option<Instant>,
}

/// See the head of this file.
#[derive(Default)]
pub(super) struct ToItself {
    messages: VecDeque<Message>,
    next: u64,
    piece: Vec<u8>,
}

impl ToItself {
    pub fn post(&mut self, owner: Owner, route: rd::Route, message: rd::Outgoing) {
        self.next += 1;
        let (number, retries) = (self.next, message.rnr_retry);
        self.messages.push_back(Message { owner, route, message, number, at: 0, retries, until: None });
    }

    /// This queue pair has receives again: who waits for one tries now.
    pub fn on_receives_posted(&mut self, qpn: u32) {
        for message in &mut self.messages {
            if message.message.pair.destination == qpn {
                message.until = None;
            }
        }
    }

    /// When there is something to do again.
    pub fn timeout(&self) -> Option<Instant> {
        self.messages.iter().filter_map(|message| message.until).min()
    }
}

/// How far a message has come.
enum Moved {
    Whole,
    /// It goes on later: where `until` says, or when those before it have ended.
    Partly,
    Failed(Failure),
}

impl Turn {
    /// Moves what can be moved, and the answers to that.
    pub(super) fn run_own(&mut self, now: &Now) {
        let mut left = TURN;
        while !self.to_itself.messages.is_empty() {
            let posted = self.to_itself.next;
            self.run_once(now, &mut left);
            self.post_answers(now);
            if self.to_itself.next == posted {
                return;
            }
        }
    }

    fn run_once(&mut self, now: &Now, left: &mut u32) {
        let mut kept = VecDeque::new();
        // Flows of which a message waits or has failed: those behind it wait, or fail with it.
        let (mut waiting, mut broken) = (BTreeSet::<QpnPair>::new(), BTreeSet::<QpnPair>::new());
        for mut message in std::mem::take(&mut self.to_itself.messages) {
            let (pair, ordered) = (message.message.pair, message.message.ordered);
            let moved = if ordered && broken.contains(&pair) {
                Moved::Failed(Failure::Flushed)
            } else if ordered && waiting.contains(&pair) {
                Moved::Partly
            } else {
                self.move_one(now, &mut message, left)
            };
            match moved {
                // Its answer ends it.
                Moved::Whole if message.message.target.is_answered() => {}
                Moved::Whole => self.finished(now, &message.owner, Ok(())),
                Moved::Partly => {
                    waiting.insert(pair);
                    kept.push_back(message);
                }
                Moved::Failed(failure) => {
                    broken.insert(pair);
                    self.failed(now, &message.owner, failure);
                }
            }
        }
        // What was posted meanwhile is behind them.
        kept.append(&mut self.to_itself.messages);
        self.to_itself.messages = kept;
    }

    /// What is withdrawn here cannot be read, or its request has ended.
    fn failed(&mut self, now: &Now, owner: &Owner, failure: Failure) {
        match owner {
            Owner::Answer(answer) if failure == Failure::Withdrawn => self.replace_answer(answer),
            Owner::Request { qp, request } if failure == Failure::Withdrawn => {
                if let Some(qp) = qp.upgrade() {
                    self.call(&qp, |core| core.fail(*request, WcStatus::LocProtErr));
                }
            }
            _ => self.finished(now, owner, Err(failure)),
        }
    }

    fn move_one(&mut self, now: &Now, message: &mut Message, left: &mut u32) -> Moved {
        if message.until.is_some_and(|until| now.get() < until) {
            return Moved::Partly;
        }
        message.until = None;
        let mut piece = std::mem::take(&mut self.to_itself.piece);
        let moved = self.copy(now, message, left, &mut piece);
        self.to_itself.piece = piece;
        moved
    }

    fn copy(&mut self, now: &Now, message: &mut Message, left: &mut u32, piece: &mut Vec<u8>) -> Moved {
        let (outgoing, owner) = (message.message, message.owner.clone());
        let (len, pair) = (outgoing.len, outgoing.pair);
        let id = MessageId { exchange: NO_EXCHANGE, number: message.number };
        loop {
            if *left == 0 {
                message.until = Some(now.get() + MOMENT);
                return Moved::Partly;
            }
            let count = (len - message.at).min(PIECE).min(*left);
            *left -= count.max(1);
            piece.clear();
            if !owner.fill(message.at, count, piece) {
                self.give_back(message);
                return Moved::Failed(Failure::Withdrawn);
            }
            let Some(to) = self.find(pair.destination) else {
                return Moved::Failed(Failure::Refused(Reason::InvalidDestination));
            };
            let is_send = outgoing.target.takes_receive();
            let segment = RdSegment {
                message: id,
                source_qpn: pair.source,
                remote: message.route.remote,
                offset: message.at,
                message_len: len,
                first: (message.at == 0 || !is_send).then_some(outgoing.first),
                ddp: outgoing.target.header(message.number, message.at, message.at + count == len),
                bytes: (&piece[..]).into(),
            };
            let asks = outgoing.target.is_answered();
            let placed = if asks && self.answers.are_too_many(NO_EXCHANGE) {
                answers::NOT_NOW
            } else {
                self.place_in(&to, &segment, &message.route)
            };
            if asks {
                self.take_answer(&to, message.route, NO_EXCHANGE);
            }
            match placed {
                Placed::Done => message.at += count,
                Placed::Refused(reason) => {
                    self.give_back(message);
                    return Moved::Failed(Failure::Refused(reason));
                }
                Placed::NoReceive(_) if message.retries == 0 && placed != answers::NOT_NOW => {
                    return Moved::Failed(Failure::NoReceive);
                }
                Placed::NoReceive(timer) => {
                    let counts = message.retries != RETRY_FOREVER && placed != answers::NOT_NOW;
                    message.retries -= u8::from(counts);
                    message.until = Some(now.get() + rnr_delay(timer));
                    return Moved::Partly;
                }
            }
            if message.at == len {
                let waits = self.call(&to, |core| {
                    core.deliver(id);
                    core.waits()
                });
                if waits {
                    self.go_on(now, &to);
                }
                return Moved::Whole;
            }
        }
    }

    /// The receiver of a message that ends before it is whole has its receive back.
    fn give_back(&mut self, message: &Message) {
        if message.at > 0
            && let Some(to) = self.find(message.message.pair.destination)
        {
            let id = MessageId { exchange: NO_EXCHANGE, number: message.number };
            self.call(&to, |core| core.take_back(id)).wake();
        }
    }

    /// A queue pair ends. Nothing of it is sent to this process any more, and it takes no rest of what it has
    /// begun to take: its number may be another one's at once. No queue pair is locked.
    pub(super) fn withdraw_own(&mut self, now: &Now, qp: &Weak<RdQp>, qpn: u32) {
        let (ends, mut stays) = std::mem::take(&mut self.to_itself.messages)
            .into_iter()
            .partition::<Vec<_>, _>(|message| message.owner.is_of(qp));
        let is_cut = |message: &mut Message| message.message.pair.destination == qpn && message.at > 0;
        let cut: Vec<_> = stays.extract_if(.., is_cut).collect();
        self.to_itself.messages = stays.into();
        // The last first, so that the receives come back in their order.
        for message in cut.iter().rev() {
            self.give_back(message);
            self.finished(now, &message.owner, Err(Failure::Refused(Reason::Aborted)));
        }
        for message in ends.iter().rev() {
            self.give_back(message);
            self.failed(now, &message.owner, Failure::Withdrawn);
        }
        self.post_answers(now);
    }
}
