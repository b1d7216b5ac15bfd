//! A queue pair of an unreliable connection, as the calls of a program see it, and its part in the turns of
//! its port: its messages ride in the exchanges of reliable datagrams (docs/rd.md section 5.5).

use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Instant;

use uwarp_proto::rd::{self, MessageId, PostError};
use uwarp_rnic::ah::Endpoint;
use uwarp_rnic::cq::{Coverage, Feeder};
use uwarp_rnic::qp::{
    Drops, Now, QpAttr, QpInit, QpModify, RdSegment, Snapshot, UcCore, UcMessage, UcPlaced,
};
use uwarp_rnic::{RecvWr, SendWr, VerbsError, WcStatus};

use super::itself::{MOMENT, NO_EXCHANGE, PIECE, TURN};
use super::penalty::Penalties;
use super::{Exchanges, Owner, Turn, answers, segment_of};
use crate::nic::Nic;
use crate::pair::QueuePair;
use crate::shell::{Shell, post_each, post_together};
use crate::sync::{Mutex, MutexGuard};
use crate::ud::DatagramPort;

/// A queue pair of an unreliable connection.
pub struct UcQp {
    pub(super) me: Weak<Self>,
    shell: Shell,
    port: Arc<DatagramPort>,
    exchanges: Arc<Exchanges>,
    pub(super) inner: Mutex<UcCore, 18>,
    destroyed: Mutex<bool, 19>,
}

impl UcQp {
    /// Makes a queue pair in RESET. Fails when a limit of the device is exceeded or no number is free.
    pub fn create(nic: &Arc<Nic>, mut init: QpInit) -> Result<Arc<Self>, VerbsError> {
        let shell = Shell::admit(nic, &mut init)?;
        let qpn = shell.qpn();
        let port = nic.datagram_port(qpn)?;
        let (exchanges, core) = (port.exchanges()?, UcCore::new(qpn, init));
        let qp = Arc::new_cyclic(|me: &Weak<Self>| Self {
            me: me.clone(),
            shell,
            port,
            exchanges,
            inner: Mutex::new(core),
            destroyed: Mutex::new(false),
        });
        qp.exchanges.enter_unrepeated(&qp);
        let feeder: Weak<dyn Feeder> = qp.me.clone();
        qp.shell.arrive(&QueuePair::Uc(qp.clone()), &feeder);
        qp.shell.fed_by(None);
        Ok(qp)
    }

    /// Its number.
    pub fn qpn(&self) -> u32 {
        self.shell.qpn()
    }

    /// Posts messages. On a refusal, says which one (the ones before it are posted) and why. Never blocks.
    pub fn post_send<'a>(&self, wrs: impl Iterator<Item = SendWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let turn = self.exchanges.turn.lock();
        let mut core = self.inner.lock();
        let result = post_each(wrs, |wr| core.post_send(wr));
        self.send_posted(turn, core);
        result
    }

    /// As [`Self::post_send`], but if one is refused, none is posted.
    pub fn post_send_together<'a>(
        &self,
        wrs: impl Iterator<Item = SendWr<'a>> + Clone,
    ) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let turn = self.exchanges.turn.lock();
        let mut core = self.inner.lock();
        let result = post_together(&mut *core, wrs, UcCore::check_send, UcCore::post_checked);
        self.send_posted(turn, core);
        result
    }

    fn send_posted(&self, mut turn: MutexGuard<'_, Turn, 17>, mut core: MutexGuard<'_, UcCore, 18>) {
        let now = Now::unread();
        turn.post_unrepeated(&now, self, &mut core);
        turn.withdraw_unrepeated(&mut core);
        drop(core);
        self.exchanges.finish(&mut turn, &now);
        let sent = std::mem::take(&mut turn.outbox.sent);
        self.exchanges.release(turn);
        // A thread that posts without end must not lose what comes meanwhile.
        self.port.has_sent(sent);
    }

    /// Posts receives. On a refusal, says which one (the ones before it are posted) and why. Never blocks.
    pub fn post_recv<'a>(&self, wrs: impl Iterator<Item = RecvWr<'a>>) -> Result<(), (usize, VerbsError)> {
        if self.shell.is_parents() {
            return Err((0, VerbsError::Forked));
        }
        let mut core = self.inner.lock();
        post_each(wrs, |wr| core.post_recv(wr))
    }

    /// Changes attributes or state. `peer`: the host of the peer, if that is among the changes; its port is
    /// ignored.
    pub fn modify(&self, change: &QpModify, peer: Option<Endpoint>) -> Result<(), VerbsError> {
        if self.shell.is_parents() {
            return Err(VerbsError::Forked);
        }
        let now = Now::unread();
        let mut turn = self.exchanges.turn.lock();
        let mut core = self.inner.lock();
        let result = core.modify(change, peer);
        turn.withdraw_unrepeated(&mut core);
        turn.post_unrepeated(&now, self, &mut core);
        drop(core);
        self.exchanges.end(turn, &now);
        result
    }

    /// Its attributes.
    pub fn query(&self) -> QpAttr {
        self.inner.lock().query()
    }

    /// Its attributes, its peer, what it has done, and what it has dropped.
    pub fn look_at(&self) -> (QpAttr, Option<Endpoint>, Snapshot, Drops) {
        let core = self.inner.lock();
        (core.query(), core.peer(), core.snapshot(), core.drops())
    }

    /// Destroys the queue pair: no completion and no event follows.
    pub fn destroy(&self) {
        if std::mem::replace(&mut *self.destroyed.lock(), true) {
            return;
        }
        self.shell.stop_feeding();
        if self.shell.is_parents() {
            // Its exchanges are the parent's.
            return;
        }
        let now = Now::unread();
        let mut turn = self.exchanges.turn.lock();
        turn.unrepeated.qps.remove(&self.qpn());
        let mut core = self.inner.lock();
        let (counters, drops) = (core.snapshot().counters, core.drops());
        core.destroy();
        turn.withdraw_unrepeated(&mut core);
        drop(core);
        if turn.is_deserted() {
            turn.port = Some(Arc::clone(&self.port));
        }
        self.exchanges.end(turn, &now);
        self.shell.depart(counters, drops);
    }
}

impl Feeder for UcQp {
    fn make_progress(&self, in_earnest: bool) -> Coverage {
        self.port.make_progress(in_earnest)
    }

    fn rest(&self) {
        self.exchanges.poll(self.port.engine());
    }
}

impl Drop for UcQp {
    fn drop(&mut self) {
        self.destroy();
    }
}

/// A message of this process to itself. It never leaves it.
struct Own {
    qp: Weak<UcQp>,
    request: u64,
    route: rd::Route,
    message: rd::Outgoing,
    number: u64,
    /// Up to here it was copied.
    at: u32,
}

/// What a port has for unreliable connections.
#[derive(Default)]
pub(super) struct Unrepeated {
    pub qps: rustc_hash::FxHashMap<u32, Weak<UcQp>>,
    to_itself: VecDeque<Own>,
    next: u64,
    piece: Vec<u8>,
    until: Option<Instant>,
    /// Of PSNs: those of an exchange, at a queue pair.
    guesses: Penalties,
}

impl Unrepeated {
    /// When there is something to do again.
    pub fn timeout(&self) -> Option<Instant> {
        self.until
    }
}

impl Exchanges {
    /// The queue pair is one of its port's from now on.
    fn enter_unrepeated(&self, qp: &Arc<UcQp>) {
        let mut turn = self.turn.lock();
        turn.unrepeated.qps.insert(qp.qpn(), Arc::downgrade(qp));
        // The queue pair has it, too.
        turn.port = None;
        self.release(turn);
    }
}

impl Turn {
    /// No queue pair needs the port.
    pub(super) fn is_deserted(&self) -> bool {
        self.qps.values().all(|qp| qp.strong_count() == 0)
            && self.unrepeated.qps.values().all(|qp| qp.strong_count() == 0)
    }

    fn call_unrepeated<R>(&mut self, qp: &UcQp, call: impl FnOnce(&mut UcCore) -> R) -> R {
        let mut core = qp.inner.lock();
        let result = call(&mut core);
        self.withdraw_unrepeated(&mut core);
        result
    }

    /// What the queue pair has given up must not be sent any more.
    fn withdraw_unrepeated(&mut self, core: &mut UcCore) {
        self.withdrawn.extend(std::iter::from_fn(|| core.take_withdrawn()));
    }

    /// Hands over what a queue pair has to send. Its lock is held.
    fn post_unrepeated(&mut self, now: &Now, qp: &UcQp, core: &mut UcCore) {
        while let Some(UcMessage { request, endpoint, message }) = core.next_message() {
            let Ok(route) = qp.exchanges.route_to(&endpoint) else {
                core.finished(request, false);
                continue;
            };
            match self.machine.post(now, route, message) {
                Ok(ticket) => {
                    core.assign(request, ticket);
                    self.owners.insert(ticket, Owner::Unrepeated { qp: qp.me.clone(), request });
                }
                Err(PostError::Itself) => {
                    let own = &mut self.unrepeated;
                    own.next += 1;
                    let (qp, number) = (qp.me.clone(), own.next);
                    own.to_itself.push_back(Own { qp, request, route, message, number, at: 0 });
                }
                Err(PostError::TooManyPeers | PostError::Closed) => core.finished(request, false),
            }
        }
    }

    /// A message has left, or its exchange has ended and it will not. Nobody is told: it is lost.
    pub(super) fn finished_unrepeated(&mut self, qp: &Weak<UcQp>, request: u64, has_left: bool) {
        if let Some(qp) = qp.upgrade() {
            self.call_unrepeated(&qp, |core| core.finished(request, has_left));
        }
    }

    /// Its memory could not be read.
    pub(super) fn fail_unrepeated(&mut self, qp: &Weak<UcQp>, request: u64) {
        if let Some(qp) = qp.upgrade() {
            self.call_unrepeated(&qp, |core| core.fail(request, WcStatus::LocProtErr));
        }
    }

    /// Places a segment that has come, or drops it.
    pub(super) fn place_unrepeated(&mut self, now: &Now, arrival: &rd::Arrival, datagram: &[u8]) {
        self.place_segment(now, arrival.pair.destination, &segment_of(arrival, datagram));
    }

    fn place_segment(&mut self, now: &Now, qpn: u32, segment: &RdSegment<'_>) {
        let Some(qp) = self.unrepeated.qps.get(&qpn).and_then(Weak::upgrade) else { return };
        let exchange = segment.message.exchange;
        if answers::name_memory(&segment.ddp) && self.penalties.refuses(now, exchange) {
            return self.call_unrepeated(&qp, UcCore::refuse);
        }
        // Whoever takes the port of a peer that has ended must not find the PSN by trying. (What comes late
        // for an earlier life of the queue pair comes with an exchange that it knows, as a rule.)
        let place = exchange << 24 | u64::from(qpn);
        let is_known = qp.inner.lock().knows(exchange);
        if !is_known && self.unrepeated.guesses.refuses(now, place) {
            return self.call_unrepeated(&qp, UcCore::refuse_stranger);
        }
        match self.call_unrepeated(&qp, |core| core.place(segment)) {
            // This process itself has nothing to guess.
            _ if exchange == NO_EXCHANGE => {}
            UcPlaced::Fine => {}
            // Who guesses the names of memory hears no answer, and could do it all the faster.
            UcPlaced::NoRight => self.penalties.note(now, exchange),
            UcPlaced::NoPsn => self.unrepeated.guesses.note(now, place),
        }
    }

    /// Moves messages of this process to itself.
    pub(super) fn run_own_unrepeated(&mut self, now: &Now) {
        if self.unrepeated.to_itself.is_empty()
            || self.unrepeated.until.is_some_and(|until| now.get() < until)
        {
            return;
        }
        self.unrepeated.until = None;
        let mut piece = std::mem::take(&mut self.unrepeated.piece);
        let mut left = TURN;
        while let Some(mut own) = self.unrepeated.to_itself.pop_front() {
            if left == 0 {
                self.unrepeated.until = Some(now.get() + MOMENT);
                self.unrepeated.to_itself.push_front(own);
                break;
            }
            // (None: it has ended.)
            let Some(qp) = own.qp.upgrade() else { continue };
            let count = (own.message.len - own.at).min(PIECE).min(left);
            left = left.saturating_sub(count.max(1));
            piece.clear();
            if !self.call_unrepeated(&qp, |core| core.fill(own.request, own.at, count, &mut piece)) {
                self.call_unrepeated(&qp, |core| core.fail(own.request, WcStatus::LocProtErr));
                continue;
            }
            let (message, end) = (own.message, own.at + count);
            let segment = RdSegment {
                message: MessageId { exchange: NO_EXCHANGE, number: own.number },
                source_qpn: message.pair.source,
                remote: own.route.remote,
                offset: own.at,
                message_len: message.len,
                first: (own.at == 0).then_some(message.first),
                ddp: message.target.header(own.number, own.at, end == message.len),
                bytes: (&piece[..]).into(),
            };
            self.place_segment(now, message.pair.destination, &segment);
            own.at = end;
            if end == message.len {
                self.call_unrepeated(&qp, |core| core.finished(own.request, true));
            } else {
                self.unrepeated.to_itself.push_front(own);
            }
        }
        self.unrepeated.piece = piece;
    }
}
