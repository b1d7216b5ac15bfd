//! Reliable datagrams (docs/rd.md): the queue pairs of a port, the machine that has their exchanges, and the
//! packets of its UDP socket.
//!
//! All of it happens in *turns*, under one lock: a datagram that has come, a post, a timer, room in the
//! socket. In a turn, a queue pair is locked for as long as it takes to place a segment, to read payload or
//! to complete a request. What follows from all that goes out at the end of the turn ([`Exchanges::end`]),
//! because a packet may say that a message is done, so it must be done before.
//!
//! There is a machine for each port of queue pair numbers.
//
// TODO(docs/rd.md section 8): one for the process, on its first port, once a process can prove its further
// ports with CLAIM. Until then two processes with more than 256 queue pairs each have several exchanges.
//
// TODO(docs/rd.md section 8): one lock for each exchange, when the machine has them apart. A turn is some
// microseconds long, and a fraction of a millisecond where a process sends much to itself; threads that post
// to different peers wait for each other meanwhile.

#[path = "rd/answers.rs"]
mod answers;
#[path = "rd/backlog.rs"]
mod backlog;
#[path = "rd/contacts.rs"]
mod contacts;
#[path = "rd/itself.rs"]
mod itself;
#[path = "rd/outbox.rs"]
mod outbox;
#[path = "rd/owner.rs"]
mod owner;
#[path = "rd/penalty.rs"]
mod penalty;
#[path = "rd/questions.rs"]
mod questions;
#[path = "rd/queue_pair.rs"]
mod queue_pair;
#[path = "rd/streams.rs"]
mod streams;
#[path = "rd/unrepeated.rs"]
mod unrepeated;

pub use queue_pair::RdQp;
pub(crate) use streams::StreamPort;
pub use unrepeated::UcQp;

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_llp::route::source_for;
use uwarp_llp::udp::{self, Incoming};
use uwarp_proto::rd::{self, Action, Bytes, Failure, PacketBuf, Payload, Placed, PostError, Rd, Ticket};
use uwarp_rnic::ah::Endpoint;
use uwarp_rnic::mr::random_u32;
use uwarp_rnic::qp::{Arrival, Now, RdBytes, RdCore, RdMessage, RdSegment};
use uwarp_rnic::{VerbsError, WcStatus, trace};
use uwarp_wire::rd::chunk::Reason;

use crate::address;
use crate::alarm::Alarm;
use crate::attended::Attended;
use crate::engine::Engine;
use crate::linger;
use crate::source::{Readiness, Source};
use crate::sync::{AtomicBool, AtomicU64, Mutex, MutexGuard, Ordering};
use crate::ud::{AwaitsRoom, DatagramPort};
use answers::Answers;
use itself::ToItself;
use outbox::Outbox;
use owner::{Fill, Owner};
use penalty::Penalties;
use streams::{Streams, Wanting};
use unrepeated::Unrepeated;

/// The socket's count of lost datagrams is looked at this often, while some come.
const DROPS_EVERY: Duration = Duration::from_millis(1);
/// How long an exit waits for the lock of a turn. No turn is nearly as long.
const EXIT_PATIENCE: Duration = Duration::from_millis(50);
/// How long an exit waits for what is under way, at most. After it, the peers hear that this process leaves.
const LONGEST_LEAVING: Duration = Duration::from_secs(1);
const AT_NEXT_POLL: u64 = 0;
const NOT_DUE: u64 = u64::MAX;
/// Bytes of the longest packet at first: of an IPv6 packet on an Ethernet.
const PACKET_LEN: usize = 1452;
/// Bytes of the longest packet that is taken: of jumbo frames, and of anything that fits the slots.
const MOST_TAKEN: usize = 64_000;
/// Where packets stay on the host. With its headers, one fits into 16 KiB of the system's memory; a longer
/// one would be charged to the receiver's socket as twice as much.
const LOCAL_PACKET_LEN: usize = 61 * 256;

/// What the lock guards.
struct Turn {
    machine: Rd,
    /// Requests and answers by the machine's name for their messages.
    owners: FxHashMap<Ticket, Owner>,
    answers: Answers,
    penalties: Penalties,
    /// Queue pairs of which requests may go on when the machine may be called again.
    waiting: Vec<Arc<RdQp>>,
    /// Messages that their queue pairs have given up.
    withdrawn: Vec<Ticket>,
    qps: FxHashMap<u32, Weak<RdQp>>,
    unrepeated: Unrepeated,
    streams: Streams,
    arrivals: Vec<rd::Arrival>,
    /// Those that are being placed; empty between the turns.
    batch: Vec<rd::Arrival>,
    packet: PacketBuf,
    outbox: Outbox,
    to_itself: ToItself,
    alarm: Alarm,
    alarm_at: Option<Instant>,
    /// When the socket's count of drops was looked at last.
    drops_at: Option<Instant>,
    /// The port, while there is no queue pair that has it, and the machine still knows a peer: what that
    /// repeats is answered, and its late packets are known.
    port: Option<Arc<DatagramPort>>,
    leaving: Leaving,
    /// When it says goodbye at the latest.
    leave_by: Option<Instant>,
}

/// How far the exit of the process has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Leaving {
    No,
    /// When its requests are done, it says goodbye.
    Waiting,
    Closing,
    Gone,
}

/// The reliable datagrams of a port.
pub(crate) struct Exchanges {
    me: Weak<Self>,
    port: Weak<DatagramPort>,
    engine: Arc<Engine>,
    number: u16,
    turn: Attended<Turn, 17>,
    /// The socket has room again.
    room: AtomicBool,
    /// Streams that want something.
    wanting: Wanting,
    /// The port that a turn does not need any more, until it has ended; and that there is one.
    over: Mutex<Option<Arc<DatagramPort>>, 19>,
    is_over: AtomicBool,
    /// For a thread that polls: when the machine has something to do, in nanoseconds of the engine's clock,
    /// [`AT_NEXT_POLL`] or [`NOT_DUE`].
    due: AtomicU64,
    /// When a thread polled last, and when the socket was found empty last, by the same clock; 0: the machine
    /// knows.
    polled_at: AtomicU64,
    empty_at: AtomicU64,
}

impl Exchanges {
    /// Those of `port`, whose number is `number`.
    pub fn new(port: &Arc<DatagramPort>, number: u16) -> Result<Arc<Self>, VerbsError> {
        let mut seed = [0; 32];
        for part in seed.chunks_exact_mut(4) {
            part.copy_from_slice(&random_u32()?.to_ne_bytes());
        }
        let (packet_len, local_packet_len) = (PACKET_LEN, LOCAL_PACKET_LEN);
        let most_taken = MOST_TAKEN;
        let config = rd::Config { packet_len, local_packet_len, most_taken, ..rd::Config::default() };
        let mut machine = Rd::new(&Now::unread(), config, &seed);
        machine.set_room(port.socket().room() as u64);
        Ok(Arc::new_cyclic(|me: &Weak<Self>| {
            let source: Weak<dyn Source> = me.clone();
            Self {
                me: me.clone(),
                port: Arc::downgrade(port),
                engine: Arc::clone(port.engine()),
                number,
                turn: Attended::new(Turn {
                    machine,
                    owners: FxHashMap::default(),
                    answers: Answers::default(),
                    penalties: Penalties::default(),
                    waiting: Vec::new(),
                    withdrawn: Vec::new(),
                    qps: FxHashMap::default(),
                    unrepeated: Unrepeated::default(),
                    streams: Streams::default(),
                    arrivals: Vec::new(),
                    batch: Vec::new(),
                    packet: PacketBuf::new(),
                    outbox: Outbox::default(),
                    to_itself: ToItself::default(),
                    alarm: Alarm::new(port.engine(), source),
                    alarm_at: None,
                    drops_at: None,
                    port: None,
                    leaving: Leaving::No,
                    leave_by: None,
                }),
                room: AtomicBool::new(false),
                wanting: Wanting::default(),
                over: Mutex::new(None),
                is_over: AtomicBool::new(false),
                due: AtomicU64::new(NOT_DUE),
                polled_at: AtomicU64::new(0),
                empty_at: AtomicU64::new(0),
            }
        }))
    }

    /// From which address of this host to which a message goes.
    fn route_to(&self, endpoint: &Endpoint) -> Result<rd::Route, Errno> {
        let from = match endpoint.from {
            Some(from) => from,
            None => source_for(None, endpoint.to, true)?,
        };
        Ok(rd::Route { local: SocketAddr::new(from, self.number), remote: endpoint.to })
    }

    /// Packets of this service have come: those of one receive call, all under one lock. What follows from
    /// them goes out with [`Self::after_input`].
    pub fn take<'a>(&'a self, engine: &'a Engine) -> Taking<'a> {
        let (mut turn, now) = (self.turn.lock(), Now::unread());
        let empty_at = self.empty_at.swap(0, Ordering::Relaxed);
        if empty_at != 0 {
            turn.machine.on_socket_empty(&Now::at(engine.instant(empty_at)));
        }
        Taking { exchanges: self, engine, turn: Some(turn), now, handled: 0 }
    }

    /// The port has found its socket empty, or has slept until something came.
    pub fn found_empty(&self, engine: &Engine) {
        // Most often in a poll, which has just read the clock.
        let polled = self.polled_at.swap(0, Ordering::Relaxed);
        let at = if polled == 0 { engine.now() } else { polled };
        self.empty_at.store(at.max(1), Ordering::Relaxed);
    }

    /// The port has received for now. `polls`: in a poll of the program. Then an acknowledgement waits for
    /// the next poll, because until then there may be an answer with which it can go. Returns how many
    /// packets it sent.
    pub fn after_input(&self, polls: bool) -> usize {
        self.after_input_in(self.turn.lock(), polls)
    }

    fn after_input_in(&self, mut turn: MutexGuard<'_, Turn, 17>, polls: bool) -> usize {
        let now = Now::unread();
        turn.look_for_drops(&now, self.port.upgrade().as_deref());
        if polls {
            self.set_alarm_at(&mut turn, &now, now.get());
            self.due.store(AT_NEXT_POLL, Ordering::Relaxed);
            self.release(turn);
            return 0;
        }
        self.end(turn, &now)
    }

    /// A thread polls: does what is due. Returns how many packets it sent.
    pub fn poll(&self, engine: &Engine) -> usize {
        let (due, now) = (self.due.load(Ordering::Relaxed), engine.now());
        self.polled_at.store(now, Ordering::Relaxed);
        if now >= due { self.do_what_is_due() } else { 0 }
    }

    /// Does what is due, or has the thread do it whose turn it is. Returns how many packets it sent.
    // TODO: a thread that has jumped out of a call, from the handler of a signal, has the lock for ever. Here
    // nobody waits for it, but input does, as with every datagram queue pair (docs/contracts.md).
    fn do_what_is_due(&self) -> usize {
        let Some(mut turn) = self.turn.look() else { return 0 };
        let now = Now::unread();
        turn.machine.handle_timeout(&now);
        self.end(turn, &now)
    }

    /// Does and sends what follows from this turn, and gives the lock back. Returns how many packets it sent.
    fn end(&self, mut turn: MutexGuard<'_, Turn, 17>, now: &Now) -> usize {
        let before = turn.outbox.sent;
        self.finish(&mut turn, now);
        let sent = turn.outbox.sent.saturating_sub(before);
        self.release(turn);
        sent
    }

    fn release(&self, turn: MutexGuard<'_, Turn, 17>) {
        self.turn.release(
            turn,
            |_| (),
            |turn| {
                let now = Now::unread();
                turn.machine.handle_timeout(&now);
                self.finish(turn, &now);
            },
        );
        // Looked at first, as most turns have none of it: a swap is a locked instruction.
        if self.is_over.load(Ordering::Relaxed) && self.is_over.swap(false, Ordering::AcqRel) {
            // Behind the lock of a turn: it may be the last one.
            let port = self.over.lock().take();
            drop(port);
        }
    }

    fn finish(&self, turn: &mut Turn, now: &Now) {
        turn.drop_withdrawn(now);
        if self.room.load(Ordering::Relaxed) && self.room.swap(false, Ordering::AcqRel) {
            turn.outbox.is_blocked = false;
        }
        turn.act(now);
        self.run_streams(turn, now);
        turn.run_own(now);
        turn.run_own_unrepeated(now);
        turn.act(now);
        self.transmit(turn, now);
        turn.leave(now);
        if turn.leaving == Leaving::Closing {
            self.transmit(turn, now);
            turn.leave(now);
        }
        self.set_alarm(turn, now);
        let is_over = turn.port.is_some() && turn.machine.peers() == 0 && turn.owners.is_empty();
        if is_over {
            *self.over.lock() = turn.port.take();
            self.is_over.store(true, Ordering::Release);
        }
    }

    fn set_alarm(&self, turn: &mut Turn, now: &Now) {
        let (own, unrepeated) = (turn.to_itself.timeout(), turn.unrepeated.timeout());
        let leave_by = turn.leave_by.filter(|_| turn.leaving == Leaving::Waiting);
        let due = [turn.machine.poll_timeout(), own, unrepeated, turn.streams.timeout(), leave_by];
        let due = due.into_iter().flatten().min();
        let Some(due) = due else { return self.due.store(NOT_DUE, Ordering::Relaxed) };
        self.due.store(self.engine.nanos(due).max(1), Ordering::Relaxed);
        self.set_alarm_at(turn, now, due);
    }

    /// The alarm is moved to an earlier time only: most calls then need nothing of the engine. Where a thread
    /// polls, that does what is due, and the alarm is for the case that it stops.
    fn set_alarm_at(&self, turn: &mut Turn, now: &Now, due: Instant) {
        let engine = &*self.engine;
        let alive = engine.pace.spans().alive();
        let polls = engine.last_poll.age(engine.nanos(now.get())).is_some_and(|age| age < alive);
        // Without room nothing goes out, whatever is due, and the system says when there is some.
        let waits = polls || turn.outbox.is_blocked;
        let due = if waits { due.max(now.get() + alive) } else { due };
        // An alarm that has rung is gone.
        if turn.alarm_at.is_none_or(|at| due < at || at <= now.get()) {
            turn.alarm.set(due);
            turn.alarm_at = Some(due);
        }
    }

    /// Sends what the machine has to send, as long as the socket takes it.
    fn transmit(&self, turn: &mut Turn, now: &Now) {
        let mut port = None;
        loop {
            while turn.outbox.wants_more() && turn.make_packet(now) {}
            if turn.outbox.is_blocked || turn.outbox.is_empty() {
                return;
            }
            if port.is_none() {
                port = self.port.upgrade();
            }
            let Some(port) = &port else { return };
            self.send_some(turn, port);
        }
    }

    fn send_some(&self, turn: &mut Turn, port: &DatagramPort) {
        let outbox = &mut turn.outbox;
        let Some((route, bytes, len)) = outbox.first() else { return };
        let sent = port.send_joined(route, bytes, len);
        match sent {
            Ok(count) => outbox.took(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                outbox.is_blocked = true;
                let me: Weak<dyn AwaitsRoom> = self.me.clone();
                port.block(me);
            }
            Err(error) => {
                // Lost, like one that is dropped on the way.
                tracing::debug!(to = %route.to, "packet not sent: {error}");
                outbox.took(1);
            }
        }
    }

    /// The process exits.
    pub fn exit(&self) {
        let Some(mut turn) = self.turn.try_lock_for(EXIT_PATIENCE) else { return };
        let now = Now::unread();
        if turn.leaving == Leaving::No {
            linger::stream_begins();
            turn.leaving = Leaving::Waiting;
            turn.leave_by = Some(now.get() + LONGEST_LEAVING);
            turn.refuse_waiting(&now);
        }
        self.end(turn, &now);
    }

    /// The queue pair is one of its port's from now on.
    fn enter(&self, qp: &Arc<RdQp>) {
        let mut turn = self.turn.lock();
        turn.qps.insert(qp.qpn(), Arc::downgrade(qp));
        // The queue pair has it, too.
        turn.port = None;
        self.release(turn);
    }
}

/// See [`Exchanges::take`].
pub(crate) struct Taking<'a> {
    exchanges: &'a Exchanges,
    engine: &'a Engine,
    /// There until the end.
    turn: Option<MutexGuard<'a, Turn, 17>>,
    now: Now,
    /// So many of the next datagrams were handled with the last one.
    handled: usize,
}

impl Taking<'_> {
    /// [`Exchanges::after_input`], in the same turn.
    pub fn finish(mut self, polls: bool) -> usize {
        self.turn.take().map_or(0, |turn| self.exchanges.after_input_in(turn, polls))
    }

    /// One packet, and behind it those that the system has joined to it. Each of them is the next one then.
    pub fn input(&mut self, joined: &[u8], incoming: &Incoming) {
        let Some(turn) = &mut self.turn else { return };
        let turn = &mut **turn;
        if trace::is_on() {
            let packet = joined.get(..incoming.len).unwrap_or(&[]);
            trace::unclaimed(trace::Way::In, incoming.from, packet, None);
        }
        if self.handled > 0 {
            self.handled -= 1;
            return;
        }
        let local = SocketAddr::new(incoming.to, self.exchanges.number);
        let route = rd::Route { local, remote: incoming.from };
        let machine = &mut turn.machine;
        self.handled = machine.handle_joined(&self.now, route, joined, incoming.len, &mut turn.arrivals) - 1;
        if turn.machine.has_stream_events() {
            turn.stream_events(self.engine, joined);
        }
        turn.place(&self.now, joined);
        turn.act(&self.now);
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        if let Some(turn) = self.turn.take() {
            self.exchanges.release(turn);
        }
    }
}

impl AwaitsRoom for Exchanges {
    fn has_room(&self) {
        self.room.store(true, Ordering::Release);
        let _ = self.do_what_is_due();
    }
}

impl Source for Exchanges {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        let _ = self.do_what_is_due();
    }
}

impl Turn {
    /// Places what has come, in its order.
    fn place(&mut self, now: &Now, datagram: &[u8]) {
        let mut batch = std::mem::take(&mut self.batch);
        while !self.arrivals.is_empty() {
            std::mem::swap(&mut batch, &mut self.arrivals);
            for arrival in batch.drain(..) {
                if arrival.unrepeated {
                    self.place_unrepeated(now, &arrival, datagram);
                    continue;
                }
                let placed = self.place_one(now, &arrival, datagram);
                self.machine.on_placed(now, &arrival, placed, &mut self.arrivals);
            }
        }
        self.batch = batch;
        self.post_answers(now);
    }

    /// Calls a queue pair. Any call may end it, if its completion queue is full.
    fn call<R>(&mut self, qp: &RdQp, call: impl FnOnce(&mut RdCore) -> R) -> R {
        let mut core = qp.inner.lock();
        let result = call(&mut core);
        self.withdrawn.extend(std::iter::from_fn(|| core.take_withdrawn()));
        result
    }

    fn finished(&mut self, now: &Now, owner: &Owner, outcome: Result<(), Failure>) {
        let (qp, request) = match owner {
            Owner::Request { qp, request } => (qp, *request),
            Owner::Answer(answer) => return self.answer_ended(answer),
            Owner::Unrepeated { qp, request } => {
                return self.finished_unrepeated(qp, *request, outcome.is_ok());
            }
            // Its end is an event of its own.
            Owner::Stream(_) => return,
        };
        if let Some(qp) = qp.upgrade() {
            let waits = self.call(&qp, |core| {
                core.finished(request, outcome);
                core.waits()
            });
            if waits {
                self.go_on(now, &qp);
            }
        }
    }

    /// A request has ended, and one behind it had to wait for that.
    fn go_on(&mut self, now: &Now, qp: &RdQp) {
        let mut core = qp.inner.lock();
        self.post(now, qp, &mut core);
        self.withdraw(&mut core);
    }

    fn place_one(&mut self, now: &Now, arrival: &rd::Arrival, datagram: &[u8]) -> Placed {
        let Some(qp) = self.find(arrival.pair.destination) else {
            return Placed::Refused(Reason::InvalidDestination);
        };
        let exchange = arrival.message.exchange;
        let asks = answers::asks(&arrival.ddp);
        if answers::name_memory(&arrival.ddp) && self.penalties.refuses(now, exchange) {
            return Placed::Refused(Reason::Access);
        }
        if asks && self.answers.are_too_many(exchange) {
            return answers::NOT_NOW;
        }
        let segment = segment_of(arrival, datagram);
        // TODO(docs/rd.md section 7.2): `Rd::may_bind`, once a message beyond the bound can be told "not
        // now". Told "no receive", one of a sender without retries fails although there are receives.
        let placed = self.place_in(&qp, &segment, &arrival.route);
        if asks {
            self.take_answer(&qp, arrival.route, exchange);
        }
        if placed == Placed::Refused(Reason::Access) {
            self.penalties.note(now, exchange);
        }
        placed
    }

    /// An answer that cannot be placed ends its request, and one behind that may have waited for it.
    fn place_in(&mut self, qp: &Arc<RdQp>, segment: &RdSegment<'_>, route: &rd::Route) -> Placed {
        let (placed, waits, woken) =
            self.call(qp, |core| (core.place(segment, &arrival_of(route)), core.waits(), core.take_woken()));
        woken.wake();
        if waits && !self.waiting.last().is_some_and(|last| Arc::ptr_eq(last, qp)) {
            self.waiting.push(Arc::clone(qp));
        }
        placed
    }

    fn find(&self, qpn: u32) -> Option<Arc<RdQp>> {
        self.qps.get(&qpn)?.upgrade()
    }

    /// Does what the machine asks for.
    fn act(&mut self, now: &Now) {
        while let Some(action) = self.machine.poll_action() {
            match action {
                Action::Finished { ticket, outcome } => {
                    if let Some(owner) = self.owners.remove(&ticket) {
                        self.finished(now, &owner, outcome);
                    }
                }
                Action::Deliver { route, message, pair, .. } => {
                    if let Some(qp) = self.find(pair.destination)
                        && let Some(answered) = self.call(&qp, |core| core.deliver(message))
                    {
                        self.machine.answered(now, route, answered);
                        self.owners.remove(&answered);
                        self.go_on(now, &qp);
                    }
                }
                Action::AskLength { route } => {
                    if let Some(limit) = address::longest_datagram(route.local.ip(), route.remote) {
                        self.machine.search(now, route, limit);
                    }
                }
                Action::AskPort { route, urgent } => self.streams.questions.ask(now.get(), route, urgent),
                Action::TakeBack { message, pair } => {
                    if let Some(qp) = self.find(pair.destination) {
                        self.call(&qp, |core| core.take_back(message)).wake();
                    }
                }
            }
        }
    }

    /// The socket has room for so much, and what comes beyond that is lost: then peers get less credit. (Also
    /// if it was others' datagrams: there is no telling.)
    fn look_for_drops(&mut self, now: &Now, port: Option<&DatagramPort>) {
        if self.drops_at.is_some_and(|at| now.get() < at + DROPS_EVERY) {
            return;
        }
        self.drops_at = Some(now.get());
        if let Some(drops) = port.and_then(|port| port.socket().drops()) {
            self.machine.on_drops(now, drops);
        }
    }

    /// Makes a packet for the outbox; returns whether there was one to make.
    fn make_packet(&mut self, now: &Now) -> bool {
        let (packets, bytes) = self.outbox.room();
        self.packet.allow(packets, bytes);
        let Some(route) = self.machine.poll_transmit(now, &mut self.packet) else { return false };
        if self.packet.packets() > 1 {
            self.put_run(now, route);
            self.act(now);
            return true;
        }
        let start = self.outbox.bytes.len();
        let mut unreadable = SmallVec::<[Ticket; 2]>::new();
        let has_rest = loop {
            let (owners, mut failed) = (&self.owners, SmallVec::<[Ticket; 2]>::new());
            self.packet.assemble(0, &mut self.outbox.bytes, |payload: &Payload, out: &mut Vec<u8>| {
                let owner = owners.get(&payload.ticket);
                if !owner.is_some_and(|owner| owner.fill(payload.offset, payload.len, out)) {
                    failed.push(payload.ticket);
                }
            });
            if failed.is_empty() {
                break true;
            }
            // The others of the packet go. Those that are not repeated count as sent already.
            self.outbox.bytes.truncate(start);
            let has_rest = self.packet.leave_out(|ticket| failed.contains(&ticket));
            unreadable.append(&mut failed);
            if !has_rest {
                break false;
            }
        };
        if has_rest {
            put_packet(&mut self.outbox, route, start);
        }
        for ticket in unreadable {
            self.cannot_be_read(now, ticket);
        }
        if self.machine.has_actions() {
            // Messages that are not repeated have left with it.
            self.act(now);
        }
        true
    }

    /// The packets that were made together: of one message, which is locked once.
    fn put_run(&mut self, now: &Now, route: rd::Route) {
        let Some(payload) = self.packet.payloads().first().copied() else { return };
        let (packet, outbox, packets) = (&self.packet, &mut self.outbox, self.packet.packets());
        let put_all = |fill: &mut Fill<'_>| {
            (0..packets).all(|nth| {
                let (start, mut good) = (outbox.bytes.len(), true);
                packet.assemble(nth, &mut outbox.bytes, |part, out| good = fill(part.offset, part.len, out));
                match good {
                    true => put_packet(outbox, route, start),
                    false => outbox.bytes.truncate(start),
                }
                good
            })
        };
        let owner = self.owners.get(&payload.ticket);
        if !owner.is_some_and(|owner| owner.with_bytes(put_all)) {
            self.cannot_be_read(now, payload.ticket);
        }
    }

    /// The memory of a message must not be read any more: it fails.
    #[cold]
    fn cannot_be_read(&mut self, now: &Now, ticket: Ticket) {
        self.machine.withdraw(now, ticket);
        match self.owners.remove(&ticket) {
            Some(Owner::Request { qp, request }) => {
                if let Some(qp) = qp.upgrade() {
                    self.call(&qp, |core| core.fail(request, WcStatus::LocProtErr));
                }
            }
            Some(Owner::Answer(answer)) => self.answer_instead(now, &answer),
            Some(Owner::Unrepeated { qp, request }) => {
                self.fail_unrepeated(&qp, request);
                // Those behind it are flushed with it.
                self.drop_withdrawn(now);
            }
            // It keeps all that is asked for.
            Some(Owner::Stream(_)) => self.machine.reset_stream(now, ticket),
            None => {}
        }
    }

    /// Hands over what a queue pair has to send. Its lock is held.
    fn post(&mut self, now: &Now, qp: &RdQp, core: &mut RdCore) {
        while let Some(RdMessage { request, endpoint, message }) = core.next_message() {
            let owner = Owner::Request { qp: qp.me.clone(), request };
            let route = match qp.exchanges.route_to(&endpoint) {
                Ok(route) => route,
                Err(error) => {
                    tracing::debug!(to = %endpoint.to, "no route: {error}");
                    core.finished(request, Err(Failure::Silent));
                    continue;
                }
            };
            match self.machine.post(now, route, message) {
                Ok(ticket) => {
                    core.assign(request, ticket);
                    self.owners.insert(ticket, owner);
                }
                Err(PostError::Itself) => self.to_itself.post(owner, route, message),
                Err(PostError::TooManyPeers | PostError::Closed) => {
                    core.finished(request, Err(Failure::Silent));
                }
            }
        }
    }

    /// What the queue pair has given up must not be sent any more.
    fn withdraw(&mut self, core: &mut RdCore) {
        self.withdrawn.extend(std::iter::from_fn(|| core.take_withdrawn()));
    }

    /// The machine sends nothing more of what queue pairs have given up.
    fn drop_withdrawn(&mut self, now: &Now) {
        for ticket in std::mem::take(&mut self.withdrawn) {
            self.machine.withdraw(now, ticket);
            self.owners.remove(&ticket);
        }
    }

    /// Goes on with the exit of the process, if it exits.
    fn leave(&mut self, now: &Now) {
        // Nothing may end what no queue pair has, such as a connection that is being made.
        let is_late = self.leave_by.is_some_and(|at| at <= now.get());
        if self.leaving == Leaving::Waiting && (self.owners.is_empty() || is_late) {
            self.machine.close(now);
            self.leaving = Leaving::Closing;
        }
        // What has left by its completion may wait for room in the socket.
        let is_sent = self.outbox.is_empty();
        if self.leaving == Leaving::Closing && self.machine.is_closed() && is_sent {
            self.leaving = Leaving::Gone;
            linger::stream_given_up();
        }
    }
}

/// The last bytes of the outbox, from `start` on, are a packet.
fn put_packet(outbox: &mut Outbox, route: rd::Route, start: usize) {
    if trace::is_on() {
        let packet = outbox.bytes.get(start..).unwrap_or(&[]);
        trace::unclaimed(trace::Way::Out, route.remote, packet, None);
    }
    outbox.add(udp::Route { to: route.remote, from: Some(route.local.ip()) }, start);
}

/// A segment that has come, as its queue pair takes it.
fn segment_of<'a>(arrival: &'a rd::Arrival, datagram: &'a [u8]) -> RdSegment<'a> {
    let bytes = match &arrival.bytes {
        Bytes::Datagram(range) => datagram.get(range.clone()).unwrap_or(&[]).into(),
        Bytes::Joined(pieces) => {
            let from = datagram.get(pieces.first().start..).unwrap_or(&[]);
            RdBytes::pieces(from, pieces.first().len(), pieces.stride(), pieces.count())
        }
        Bytes::Held(bytes) => bytes[..].into(),
    };
    RdSegment {
        message: arrival.message,
        source_qpn: arrival.pair.source,
        remote: arrival.route.remote,
        offset: arrival.offset,
        message_len: arrival.message_len,
        first: arrival.first,
        ddp: arrival.ddp,
        bytes,
    }
}

/// How a segment came, as its queue pair wants it.
fn arrival_of(route: &rd::Route) -> Arrival {
    Arrival { from: route.remote.ip(), to: route.local.ip(), slid: crate::ud::shown_lid(route.remote.ip()) }
}
