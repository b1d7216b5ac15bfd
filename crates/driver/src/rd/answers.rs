//! Answers to requests of peers: RDMA Reads, atomic operations. An answer is a message of its own, which is
//! repeated until it is Done. If its memory cannot be read any more, the peer gets a message that says so.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;
use uwarp_proto::rd::{self, Outgoing, Placed, PostError, QpnPair};
use uwarp_rnic::qp::{AnswerBytes, Now, RdAnswer};
use uwarp_wire::ddp::{self, QN_READ_REQUEST};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::segment::First;
use uwarp_wire::rdmap::{Control, Opcode};

use super::{Owner, RdQp, Turn};

/// Answers to one peer that are not Done: twice as many as it may ask for. Further requests come again.
const MOST: u32 = 128;
/// What those are told: the timer of 80 us, and that the next try costs no retry.
pub(super) const NOT_NOW: Placed = Placed::NoReceive(0x80 | 6);
/// An answer needs no receive, so it is never without one.
const RETRY_FOREVER: u8 = 7;

/// An answer that is not Done.
pub(super) struct PeerAnswer {
    /// The queue pair that was asked.
    pub qp: Weak<RdQp>,
    answer: RdAnswer,
    pair: QpnPair,
    route: rd::Route,
    exchange: u64,
}

impl PeerAnswer {
    /// Adds bytes of it to `out`; returns whether it could.
    pub fn fill(&self, offset: u32, len: u32, out: &mut Vec<u8>) -> bool {
        match &self.answer.bytes {
            AnswerBytes::Memory { .. } => {
                let fill = |qp: Arc<RdQp>| qp.inner.lock().fill_answer(&self.answer, offset, len, out);
                self.qp.upgrade().is_some_and(fill)
            }
            AnswerBytes::Own(bytes) => {
                let part = bytes.get(offset as usize..).and_then(|rest| rest.get(..len as usize));
                part.map(|part| out.extend_from_slice(part)).is_some()
            }
        }
    }
}

/// See the head of this file.
#[derive(Default)]
pub(super) struct Answers {
    /// How many are not Done, by the exchange in which they were asked for.
    counts: FxHashMap<u64, u32>,
    /// Not posted yet.
    next: VecDeque<PeerAnswer>,
}

impl Answers {
    pub fn are_too_many(&self, exchange: u64) -> bool {
        self.counts.get(&exchange).is_some_and(|count| *count >= MOST)
    }

    fn add(&mut self, answer: PeerAnswer) {
        *self.counts.entry(answer.exchange).or_insert(0) += 1;
        self.next.push_back(answer);
    }
}

/// Whether a message is a request that is answered.
pub(super) fn asks(ddp: &ddp::Header) -> bool {
    matches!(ddp, ddp::Header::Untagged(ddp) if ddp.qn == QN_READ_REQUEST)
}

/// Whether a message names memory of its receiver. (The answer to a Read names a request.)
pub(super) fn name_memory(ddp: &ddp::Header) -> bool {
    match ddp {
        ddp::Header::Tagged(ddp) => {
            matches!(Control::parse(ddp.rsvdulp).opcode, Opcode::Write | Opcode::WriteRecord)
        }
        ddp::Header::Untagged(_) => asks(ddp),
    }
}

impl Turn {
    /// Takes the answer to what was just placed, to be posted when the machine may be called again.
    pub(super) fn take_answer(&mut self, qp: &Arc<RdQp>, route: rd::Route, exchange: u64) {
        let Some(answer) = qp.inner.lock().take_answer() else { return };
        let pair = QpnPair { source: qp.qpn(), destination: answer.destination };
        self.answers.add(PeerAnswer { qp: qp.me.clone(), answer, pair, route, exchange });
    }

    /// Posts the answers, and requests that may have waited for one.
    pub(super) fn post_answers(&mut self, now: &Now) {
        for qp in std::mem::take(&mut self.waiting) {
            self.go_on(now, &qp);
        }
        while let Some(answer) = self.answers.next.pop_front() {
            let message = Outgoing {
                pair: answer.pair,
                first: First::default(),
                target: answer.answer.target,
                len: answer.answer.len(),
                ordered: false,
                rnr_retry: RETRY_FOREVER,
                unrepeated: false,
            };
            let route = answer.route;
            let answer = Arc::new(answer);
            match self.machine.post(now, route, message) {
                Ok(ticket) => {
                    self.owners.insert(ticket, Owner::Answer(answer));
                }
                Err(PostError::Itself) => self.to_itself.post(Owner::Answer(answer), route, message),
                // Who has asked hears that the exchange is over.
                Err(PostError::TooManyPeers | PostError::Closed) => self.answer_ended(&answer),
            }
        }
    }

    pub(super) fn answer_ended(&mut self, answer: &PeerAnswer) {
        if let Some(count) = self.answers.counts.get_mut(&answer.exchange) {
            *count -= 1;
            if *count == 0 {
                self.answers.counts.remove(&answer.exchange);
            }
        }
    }

    /// The memory of an answer cannot be read any more.
    pub(super) fn answer_instead(&mut self, now: &Now, answer: &PeerAnswer) {
        self.replace_answer(answer);
        self.post_answers(now);
    }

    /// The same, for when the machine may be called again.
    pub(super) fn replace_answer(&mut self, answer: &PeerAnswer) {
        self.answer_ended(answer);
        if matches!(answer.answer.bytes, AnswerBytes::Own(_)) {
            return;
        }
        let reason = if answer.qp.strong_count() == 0 { Reason::Aborted } else { Reason::Access };
        let PeerAnswer { qp, pair, route, exchange, .. } = answer;
        self.answers.add(PeerAnswer {
            qp: qp.clone(),
            answer: answer.answer.instead(reason),
            pair: *pair,
            route: *route,
            exchange: *exchange,
        });
    }
}
