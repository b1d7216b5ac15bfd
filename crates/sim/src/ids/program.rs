//! A program that uses rdma_cm, with its event channel, its queue pairs and many threads.

mod calls;
mod pair;
mod rules;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use uwarp_cm::event::ConnParam;
use uwarp_cm::machine::budget::Budget;
use uwarp_cm::machine::life::{IdEvent, Life, Report, Rules};
use uwarp_cm::machine::listener::Listener;
use uwarp_cm::machine::run::Deferred;
use uwarp_cm::machine::{ConnKey, Input, Machine, StreamEvent};
use uwarp_cm::{EventKind, Timeouts};
use uwarp_llp::carrier::{Bind, Carrier, Options, TakePort};
use uwarp_proto::setup::{Negotiated, ResponderPolicy, Revision};
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Disconnect, QpModify, QpState};

use super::node::{Key, Node, Note, Out, PairKey};
use super::order::Role;
use crate::hosts::at;
use crate::hosts::carrier::CARRIER;
use crate::hosts::network::{Pid, TcpId, network};
use crate::hosts::streams::News;
use crate::{Rng, Time, time};
pub(crate) use pair::{QueuePair, stream_params};

/// How long the end of a stream may be held back for completions.
const UNPOLLED: Time = 50_000_000;
/// What a program does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Its address, and the port that it listens on or names its queue pairs after.
    pub at: SocketAddr,
    /// It listens, with this backlog.
    pub listens: Option<i32>,
    /// When it connects, after it has begun, and to whom.
    pub connects: Vec<(Time, SocketAddr)>,
    /// The view of its device.
    pub infiniband: bool,
    /// It shows its peers that it is uwarp.
    pub knows_peers: bool,
    /// How long each thing that it does may take.
    pub slow: Time,
    /// How long the thread that serves a new stream may be busy with others.
    pub busy: Time,
    /// How often it connects again, to the same peer, as soon as a connection is established.
    pub again: u32,
    /// Of a thousand requests: rejected; neither answered nor destroyed.
    pub rejects: [u32; 2],
    /// Of a thousand connections: by number.
    pub by_number: u32,
    /// Of a thousand events: another thread makes an odd call.
    pub odd: u32,
    /// Of a thousand connections: disconnected by this program.
    pub disconnects: u32,
}

/// A call of the program on an id, or on the id's queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call {
    ResolveAddress(SocketAddr),
    ResolveRoute,
    Connect,
    Accept,
    Reject,
    Adopt,
    Establish,
    Disconnect,
    Destroy,
    DestroyPair,
    FailPair,
}

const ODD: [Call; 8] = [
    Call::Accept,
    Call::Reject,
    Call::Adopt,
    Call::Disconnect,
    Call::Destroy,
    Call::DestroyPair,
    Call::FailPair,
    Call::Connect,
];

struct Queued {
    /// The id that the event is about, and who accounts for it.
    id: Key,
    owner: Key,
    event: IdEvent,
}

/// A process.
pub struct Program {
    /// Its name.
    pub pid: Pid,
    /// What it does.
    pub plan: Plan,
    /// Its ids.
    pub nodes: BTreeMap<Key, Node>,
    /// Requests that were reported in this turn.
    pub requests: Vec<Key>,
    /// Does nothing until then.
    pub stopped: Time,
    /// Connections and requests that came to an end, by how.
    pub outcomes: BTreeMap<&'static str, usize>,
    /// Messages that have come.
    pub received: usize,
    /// When ids have ended.
    gone: BTreeMap<Key, Time>,
    pairs: BTreeMap<PairKey, QueuePair>,
    /// Queue pairs that no id has.
    spare: Vec<PairKey>,
    queue: VecDeque<Queued>,
    /// When the thread that reads events takes the next one.
    reads: Time,
    todo: Vec<(Time, Key, Call)>,
    posted: Vec<(Key, Note)>,
    budget: Budget,
    limit: usize,
    next: u32,
    rng: Rng,
    trace: bool,
}

impl Program {
    /// A program that begins.
    pub fn new(pid: Pid, plan: Plan, limit: usize, rng: Rng, now: Time, trace: bool) -> Self {
        network(|network| network.running = pid);
        let mut program = Self {
            pid,
            nodes: BTreeMap::new(),
            requests: Vec::new(),
            stopped: 0,
            outcomes: BTreeMap::new(),
            received: 0,
            gone: BTreeMap::new(),
            pairs: BTreeMap::new(),
            spare: Vec::new(),
            queue: VecDeque::new(),
            reads: 0,
            todo: Vec::new(),
            posted: Vec::new(),
            budget: Budget::new(limit),
            limit,
            next: 0,
            rng,
            trace,
            plan,
        };
        if let Some(backlog) = program.plan.listens {
            program.listen(now, backlog);
        }
        for (after, to) in program.plan.connects.clone() {
            let role = if program.rng.chance(program.plan.by_number) {
                Role::ConnectsByNumber
            } else {
                Role::Connects
            };
            let key = program.create(Life::new(program.rules()), role);
            program.todo.push((now + after, key, Call::ResolveAddress(to)));
        }
        program
    }

    fn rules(&self) -> Rules {
        let policy = ResponderPolicy {
            max_revision: Revision::Two,
            crc: true,
            markers: false,
            know_peers: self.plan.knows_peers,
            max_ird: 16,
            host: None,
        };
        Rules { timeouts: Timeouts::default(), infiniband: self.plan.infiniband, policy }
    }

    fn name(&mut self) -> u32 {
        self.next += 1;
        self.next
    }

    fn create(&mut self, life: Life, role: Role) -> Key {
        let key = self.name();
        self.nodes.insert(key, Node::new(life, role));
        key
    }

    fn listen(&mut self, now: Time, backlog: i32) {
        let key = self.create(Life::new(self.rules()), Role::Listens);
        let at = self.plan.at;
        let bind = Bind { address: at, port: TakePort::Now, options: Options::default() };
        let Ok(bound) = CARRIER.bind(&bind) else { return };
        let budget = self.budget.clone();
        self.with_node(now, key, |node| {
            node.shell.conns.set_bound(bound);
            node.life.bind(at).expect("it is new");
            node.life.listen(Listener::backlog(backlog), budget).expect("it is bound");
            node.waits = true;
        });
    }

    /// Some time for the program.
    fn soon(&mut self) -> Time {
        let limit = [self.plan.slow, self.plan.slow / 50, 1][self.rng.size(0, 2)];
        self.rng.below(limit + 1)
    }

    fn schedule(&mut self, now: Time, key: Key, call: Call) {
        let after = self.soon();
        self.todo.push((now + after, key, call));
    }

    // --- The threads.

    /// Does something of what there is to do, in an order of its own. Returns whether there was anything.
    pub fn turn(&mut self, now: Time) -> bool {
        if now < self.stopped {
            return false;
        }
        network(|network| network.running = self.pid);
        let before = network(|network| network.activity);
        let mut did = false;
        let mut order: Vec<Key> = self.nodes.keys().copied().collect();
        crate::end::shuffle(&mut self.rng, &mut order);
        for key in order {
            did |= self.node_turn(now, key);
        }
        for pair in self.pairs.keys().copied().collect::<Vec<_>>() {
            did |= self.pump(now, pair);
        }
        self.deliver();
        while let Some(due) = self.todo.iter().position(|(at, ..)| *at <= now) {
            let (_, key, call) = self.todo.remove(due);
            self.call(now, key, call);
            did = true;
        }
        if !self.queue.is_empty() && self.reads <= now {
            self.take_event(now);
            self.reads = now + self.soon();
            did = true;
        }
        self.check(now);
        let busy = self.nodes.values().any(Node::is_busy);
        did || busy || network(|network| network.activity) != before
    }

    /// When something is to be done.
    pub fn next_time(&mut self, now: Time) -> Option<Time> {
        if now < self.stopped {
            return Some(self.stopped);
        }
        let machines = self.nodes.values().filter_map(|node| node.life.poll_timeout()).map(time);
        let calls = self.todo.iter().map(|(at, ..)| *at);
        let reads = (!self.queue.is_empty()).then_some(self.reads);
        let pairs = self
            .pairs
            .values_mut()
            .filter_map(|pair| if now < pair.busy { Some(pair.busy) } else { pair.streams.next_time() });
        machines.chain(calls).chain(reads).chain(pairs).min()
    }

    fn node_turn(&mut self, now: Time, key: Key) -> bool {
        let Some(mut node) = self.nodes.remove(&key) else { return false };
        let time = at(now);
        self.prepare(&mut node, now);
        let mut did = node.handle_timeout(now);
        did |= node.shell.report_readiness(&mut node.life, &time);
        self.run(now, key, &mut node);
        // What threads without the lock do comes later, in between other things.
        for _ in 0..2 {
            if self.rng.chance(600) {
                self.prepare(&mut node, now);
                did |= node.handle_note(&time);
            } else {
                did |= self.carry_out(now, key, &mut node);
            }
            self.run(now, key, &mut node);
        }
        if node.is_over() {
            assert_eq!(node.life.poll_timeout(), None, "a deadline of an id that has ended");
        } else {
            self.nodes.insert(key, node);
        }
        self.deliver();
        did
    }

    /// As the shell, before the machine learns of anything.
    fn prepare(&self, node: &mut Node, now: Time) {
        if node.by_number.is_some_and(|pair| !self.pairs.contains_key(&pair)) {
            node.life.pair_is_gone(&at(now));
        }
    }

    fn with_node(&mut self, now: Time, key: Key, f: impl FnOnce(&mut Node)) {
        let Some(mut node) = self.nodes.remove(&key) else { return };
        self.prepare(&mut node, now);
        f(&mut node);
        self.run(now, key, &mut node);
        self.nodes.insert(key, node);
        self.deliver();
    }

    fn run(&mut self, now: Time, key: Key, node: &mut Node) {
        let pair = node.pair.and_then(|pair| self.pairs.get(&pair));
        let unpolled = pair.is_some_and(|pair| !pair.streams.end.is_empty_of_completions());
        for out in node.run(&at(now), self.plan.at, unpolled) {
            match out {
                Out::Event(event) => self.report(now, key, node, event, unpolled),
                Out::Request(new, set_up) => {
                    node.order.report(EventKind::ConnectRequest, now, self.plan.infiniband);
                    let mut request = Node::new(new.life, Role::Accepts);
                    request.origin = new.conn.map(|conn| (key, conn));
                    if let (Some(conn), Some(set_up)) = (new.conn, set_up) {
                        request.shell.conns.insert(conn, set_up);
                    }
                    let id = self.name();
                    self.nodes.insert(id, request);
                    self.queue.push_back(Queued { id, owner: key, event: new.event });
                    self.requests.push(id);
                }
            }
        }
        if let Some(answer) = node.answer.take_if(|_| node.waits) {
            node.waits = false;
            self.answered(now, key, node, answer);
        }
        assert!(node.answer.is_none(), "an answer, and no call waits for it");
    }

    fn report(&mut self, now: Time, key: Key, node: &mut Node, event: IdEvent, unpolled: bool) {
        if self.trace {
            eprintln!("{now:>12} {} id {key}: {:?} {}", self.pid, event.kind, event.status);
        }
        node.order.report(event.kind, now, self.plan.infiniband);
        if event.kind == EventKind::Disconnected && !node.left {
            let early = node.peer_closed.is_some_and(|at| unpolled && now < at + UNPOLLED);
            assert!(!early, "DISCONNECTED overtakes the completions of the peer's last messages");
        }
        self.queue.push_back(Queued { id: key, owner: key, event });
    }

    fn deliver(&mut self) {
        for (key, note) in std::mem::take(&mut self.posted) {
            if let Some(node) = self.nodes.get_mut(&key) {
                node.notes.push_back(note);
            }
        }
    }

    fn carry_out(&mut self, now: Time, key: Key, node: &mut Node) -> bool {
        match node.shell.deferred.pop_front() {
            None => return false,
            Some(Deferred::Attach { conn, said, param, .. }) => {
                self.attach(now, key, node, conn, &said, param)
            }
            Some(Deferred::Disconnect(conn, answered)) => {
                let pair = node.pair.and_then(|pair| self.pairs.get_mut(&pair));
                if let Some((_, number)) = node.stream.filter(|(of, _)| *of == conn)
                    && let Some(pair) = pair
                    && pair.count == number
                {
                    pair.streams.answer();
                    pair.streams.end.core.disconnect(&at(now), answered);
                    self.pump_of(now, node.pair);
                }
            }
            Some(Deferred::Fail) => {
                self.modify_pair(now, node.pair, QpState::Err);
                node.life.handle_input(&at(now), Input::Flushed);
            }
            Some(Deferred::Report(Report::Settled(conn))) => {
                if let Some(listener) = node.listener() {
                    self.posted.push((listener, Note::Settled(conn)));
                }
            }
            Some(Deferred::Report(_) | Deferred::Answer(_)) => unreachable!("done at once"),
        }
        let posted = std::mem::take(&mut self.posted);
        for (of, note) in posted {
            if of == key { node.notes.push_back(note) } else { self.posted.push((of, note)) }
        }
        true
    }

    fn attach(
        &mut self,
        now: Time,
        key: Key,
        node: &mut Node,
        conn: ConnKey,
        said: &Negotiated,
        param: ConnParam,
    ) {
        let Some(set_up) = node.shell.conns.take(conn) else { return };
        let infiniband = self.plan.infiniband;
        let busy = if self.rng.chance(300) { self.rng.below(self.plan.busy + 1) } else { 0 };
        let attached = match node.pair.and_then(|pair| self.pairs.get_mut(&pair)) {
            None => Err((VerbsError::Invalid("the queue pair is destroyed"), set_up)),
            Some(pair) => {
                let timer = pair.streams.end.core.query().min_rnr_timer;
                let params = stream_params(said, param, timer, infiniband);
                pair.streams.attach(now, conn, set_up, params).map(|(id, side)| {
                    pair.count += 1;
                    pair.busy = now + busy;
                    pair.hooks.insert((id, side), (key, conn));
                    Node::check_set_up(id);
                    pair.count
                })
            }
        };
        let event = match attached {
            Ok(number) => {
                node.stream = Some((conn, number));
                // Its first events may come before the answer, or after it.
                if self.rng.chance(500) {
                    self.pump_of(now, node.pair);
                    for (of, note) in std::mem::take(&mut self.posted) {
                        if of == key { node.notes.push_back(note) } else { self.posted.push((of, note)) }
                    }
                    while self.rng.chance(500) && node.handle_note(&at(now)) {
                        self.run(now, key, node);
                    }
                }
                StreamEvent::Attached
            }
            Err((why, set_up)) => {
                node.shell.conns.insert(conn, set_up);
                StreamEvent::Refused(why)
            }
        };
        node.life.handle_input(&at(now), Input::Stream { conn, event });
    }

    // --- Queue pairs.

    fn create_pair(&mut self) -> PairKey {
        if let Some(pair) = self.spare.pop() {
            return pair;
        }
        let key = self.name();
        let qpn = (u32::from(self.plan.at.port()) << 8) + (key & 255);
        let mut pair = QueuePair::new(qpn);
        pair.init();
        self.pairs.insert(key, pair);
        key
    }

    fn modify_pair(&mut self, now: Time, pair: Option<PairKey>, to: QpState) {
        let Some(queue_pair) = pair.and_then(|pair| self.pairs.get_mut(&pair)) else { return };
        let change = QpModify { state: Some(to), ..QpModify::default() };
        // Refused where the state does not allow it.
        let _ = queue_pair.streams.modify(now, &change);
        self.pump_of(now, pair);
    }

    fn destroy_pair(&mut self, now: Time, pair: PairKey) {
        let Some(queue_pair) = self.pairs.get_mut(&pair) else { return };
        queue_pair.streams.forget_reports();
        queue_pair.hooks.clear();
        self.modify_pair(now, Some(pair), QpState::Reset);
        if self.pairs.get(&pair).is_some_and(|pair| pair.streams.count() > 0) {
            // What it closes is closed in the background.
            let Some(queue_pair) = self.pairs.remove(&pair) else { return };
            let background = self.name();
            self.pairs.insert(background, queue_pair);
        } else {
            self.pairs.remove(&pair);
        }
    }

    fn pump_of(&mut self, now: Time, pair: Option<PairKey>) {
        if let Some(pair) = pair {
            self.pump(now, pair);
        }
    }

    fn pump(&mut self, now: Time, pair: PairKey) -> bool {
        let polls = self.rng.chance(400);
        let Some(queue_pair) = self.pairs.get_mut(&pair) else { return false };
        if now < queue_pair.busy {
            return false;
        }
        let mut news = Vec::new();
        let mut did = queue_pair.streams.pump(now, &mut news);
        for news in news {
            let (id, side, event) = match news {
                News::Established(_, id, side) => (id, side, StreamEvent::Established),
                News::Ended(_, id, side, why) => (id, side, StreamEvent::Ended(why)),
            };
            let Some((key, conn)) = queue_pair.hooks.get(&(id, side)).copied() else { continue };
            if event == StreamEvent::Ended(Disconnect::PeerClosed)
                && let Some(node) = self.nodes.get_mut(&key)
            {
                node.peer_closed = Some(now);
            }
            self.posted.push((key, Note::Stream(conn, event)));
        }
        if polls {
            did |= !queue_pair.streams.end.is_empty_of_completions();
            queue_pair.streams.end.sends();
            self.received += queue_pair.receive();
        }
        did
    }

    /// The connection of an id's stream, its side, and the process at the other end.
    pub fn stream(&self, key: Key) -> Option<(TcpId, usize, Pid)> {
        let pair = self.pairs.get(&self.nodes.get(&key)?.pair?)?;
        let stream = pair.streams.stream.as_ref()?;
        let owners = network(|network| network.tcp.get(&stream.id).map(|tcp| tcp.owners))?;
        Some((stream.id, stream.side, owners[1 - stream.side]))
    }

    // --- What the program does.

    fn take_event(&mut self, now: Time) {
        let Some(Queued { id, owner, event }) = self.queue.pop_front() else { return };
        if event.kind == EventKind::ConnectRequest {
            if let Some(listener) = self.nodes.get_mut(&owner) {
                listener.notes.push_back(Note::Delivered);
            }
        } else if event.kind != EventKind::Disconnected {
            self.check_pair(id, event.kind);
        }
        let Plan { rejects: [rejects, ignores], odd, disconnects, .. } = self.plan;
        let next = match event.kind {
            EventKind::AddressResolved => Some(Call::ResolveRoute),
            EventKind::RouteResolved => Some(Call::Connect),
            EventKind::ConnectRequest => match self.rng.below(1000) {
                n if n < u64::from(rejects) => {
                    Some(if self.rng.chance(500) { Call::Reject } else { Call::Destroy })
                }
                n if n < u64::from(rejects + ignores) => None,
                _ => Some(Call::Accept),
            },
            EventKind::ConnectResponse => Some(Call::Adopt),
            EventKind::Established => {
                self.send(now, id);
                self.connect_again(now, id);
                self.rng.chance(disconnects).then_some(Call::Disconnect)
            }
            EventKind::Disconnected => {
                if self.rng.chance(500) {
                    self.schedule(now, id, Call::Disconnect);
                }
                // Some programs wait for TIMEWAIT_EXIT.
                self.rng.chance(700).then_some(Call::Destroy)
            }
            EventKind::TimewaitExit
            | EventKind::Rejected
            | EventKind::Unreachable
            | EventKind::ConnectError => Some(Call::Destroy),
            _ => None,
        };
        if let Some(call) = next {
            self.schedule(now, id, call);
        }
        if self.rng.chance(odd) {
            let call = ODD[self.rng.size(0, ODD.len() - 1)];
            self.schedule(now, id, call);
        }
    }

    fn connect_again(&mut self, now: Time, id: Key) {
        let Some(node) = self.nodes.get(&id).filter(|node| node.order.role == Role::Connects) else { return };
        let Some(peer) = node.life.peer().filter(|_| self.plan.again > 0) else { return };
        self.plan.again -= 1;
        let key = self.create(Life::new(self.rules()), Role::Connects);
        self.todo.push((now, key, Call::ResolveAddress(peer)));
    }

    /// What a program finds that looks at its queue pair when it is told.
    fn check_pair(&self, id: Key, kind: EventKind) {
        let Some(node) = self.nodes.get(&id).filter(|node| !node.left) else { return };
        let Some(pair) = node.pair.and_then(|pair| self.pairs.get(&pair)) else { return };
        let state = pair.streams.end.core.query().state;
        match (node.order.role, kind) {
            (Role::Connects, EventKind::Rejected) | (Role::Accepts, EventKind::Unreachable) => {
                assert_eq!(state, QpState::Err, "the queue pair of a connection that failed: {kind:?}");
            }
            (_, EventKind::Established) => {
                assert!(
                    matches!(state, QpState::Rts | QpState::Err),
                    "the queue pair of a connection that is established is in {state:?}"
                );
            }
            _ => {}
        }
    }

    /// Sends messages that name their connection and end.
    fn send(&mut self, now: Time, key: Key) {
        let Some((id, side, _)) = self.stream(key) else { return };
        let Some(pair) = self.nodes.get(&key).and_then(|node| node.pair) else { return };
        if let Some(pair) = self.pairs.get_mut(&pair)
            && pair.sent == 0
        {
            pair.send(id, side);
        }
        self.pump(now, pair);
    }

    /// A call on the last id that is not a listener.
    pub fn call_last(&mut self, now: Time, call: Call) {
        let last = self.nodes.iter().rev().find(|(_, node)| node.order.role != Role::Listens);
        if let Some((key, _)) = last
            && now >= self.stopped
            && !self.queue.iter().any(|queued| queued.id == *key && queued.owner != *key)
        {
            network(|network| network.running = self.pid);
            let key = *key;
            self.call(now, key, call);
        }
    }
}
