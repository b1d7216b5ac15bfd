//! A process on a host: the pairings of each of its ports with the connection manager's own loop, its queue
//! pairs, and what a program does with them. It stands for the shell (`uwarp_cm`'s `runner.rs`): the clock,
//! the order of notes, and the calls of queue pairs are here.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use uwarp_cm::Timeouts;
use uwarp_cm::event::ConnParam;
use uwarp_cm::machine::budget::Budget;
use uwarp_cm::machine::pairings::{Pairings, Settings, Terms, shown_psns};
use uwarp_cm::machine::run::Deferred;
use uwarp_cm::machine::{ConnKey, Input, Machine, Recipient, StreamEvent};
use uwarp_cm::pairing::Path;
use uwarp_llp::carrier::{Bind, Carrier, Options, TakePort};
use uwarp_proto::setup::{Negotiated, ResponderPolicy, Revision, Rtr};
use uwarp_rnic::qp::{Now, QpCaps, QpModify, QpState, StreamParams, rnr_limit};
use uwarp_rnic::{Access, Mr, RecvWr, SendFlags, SendOp, SendWr, Sge, VerbsError, Wc, WcStatus};

use super::carrier::CARRIER;
use super::network::{Datagram, Pid, TcpId, network};
use super::shell::Shell;
use super::streams::{News, Streams};
use crate::end::{End, EndConfig};
use crate::{Arena, Rng, Time, instant};

/// What a message says before the numbers: no stranger may see it.
pub const SECRET: &[u8; 8] = b"SeCrEt!!";
/// Bytes of a message.
const MESSAGE: usize = 16;
/// Receives that are posted, and messages that are sent, in a move.
pub const MESSAGES: usize = 2;

/// Whom a program has named, when it moved a queue pair to RTR.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Named {
    /// Whose queue pair.
    pub pid: Pid,
    /// Its address; the port does not count.
    pub address: IpAddr,
    /// Its number.
    pub qpn: u32,
    /// Which exchange of numbers it comes from.
    pub exchange: u32,
    /// The PSN that it begins with, and the one that this end begins with.
    pub psns: [u32; 2],
}

/// A queue pair and its program.
pub struct QueuePair {
    /// The queue pair.
    pub streams: Streams,
    /// Whom the program has named, until RESET.
    pub named: Option<Named>,
    /// Messages that were sent since, and those that have completed, well or not.
    pub sent: usize,
    /// Completed.
    pub completed: [usize; 2],
    /// Messages of the peer.
    pub received: usize,
    memory: Arena,
    region: std::sync::Arc<Mr>,
}

/// What has happened, in order.
enum Note {
    Stream(ConnKey, StreamEvent),
}

/// A port of queue pair numbers.
pub struct Port {
    /// Its address.
    pub at: SocketAddr,
    /// The machine under test.
    pub machine: Pairings,
    /// What is around it.
    pub shell: Shell<Infallible>,
    notes: VecDeque<Note>,
    /// Datagrams that have arrived.
    pub inbox: VecDeque<Datagram>,
}

/// A process.
pub struct Process {
    /// Its name.
    pub pid: Pid,
    /// Address and port of its first queue pair number.
    pub at: SocketAddr,
    /// All of them.
    pub ports: Vec<Port>,
    /// By number.
    pub queue_pairs: BTreeMap<u32, QueuePair>,
    /// The process's.
    pub budget: Budget,
    /// Its size.
    pub limit: usize,
    /// Does nothing until then.
    pub stopped: Time,
    rng: Rng,
    /// See [`super::Hosts`].
    pub infiniband: bool,
    /// The same.
    pub timeout: u8,
}

/// What went wrong, or what a world must know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seen {
    /// This queue pair has attached this end of a connection.
    Attached(u32, TcpId, usize),
    /// Its stream is up.
    Established(u32, TcpId, usize),
    /// It has ended.
    Ended(u32, TcpId, usize),
}

impl Process {
    /// A process with these ports, the first of them that of `at`. Nobody has them.
    pub fn new(pid: Pid, at: SocketAddr, ports: &[u16], limit: usize, mut rng: Rng) -> Self {
        network(|network| network.running = pid);
        let budget = Budget::new(limit);
        let ports = ports.iter().map(|port| {
            let at = SocketAddr::new(at.ip(), *port);
            Port::new(pid, at, budget.clone(), &mut rng)
        });
        Self {
            pid,
            at,
            ports: ports.collect(),
            queue_pairs: BTreeMap::new(),
            budget,
            limit,
            stopped: 0,
            rng,
            infiniband: true,
            timeout: 0,
        }
    }

    /// The port of this number: its place among them.
    fn port_of(&self, qpn: u32) -> usize {
        let of_it = |port: &Port| port.at.port() == uwarp_rnic::ah::port_of(qpn);
        self.ports.iter().position(of_it).expect("a number of this process")
    }

    fn machine(&mut self, qpn: u32) -> &mut Pairings {
        let port = self.port_of(qpn);
        &mut self.ports[port].machine
    }

    /// The pairings of all ports.
    pub fn phases(&self) -> impl Iterator<Item = (u32, &'static str, Option<std::time::Instant>)> {
        self.ports.iter().flat_map(|port| port.machine.phases())
    }

    // --- The program.

    /// Creates a queue pair.
    pub fn create(&mut self, qpn: u32) {
        let caps =
            QpCaps { max_send_wr: 8, max_recv_wr: 8, max_send_sge: 1, max_recv_sge: 1, max_inline_data: 0 };
        let end =
            End::new(EndConfig { caps, qpn, sq_sig_all: true, cq_depth: Some(64), ..EndConfig::default() });
        let memory = Arena::new(MESSAGE * 2 * MESSAGES);
        let region = memory.register(&end.pd, 0, memory.len(), Access::LOCAL_WRITE);
        let queue_pair = QueuePair {
            streams: Streams::new(end),
            named: None,
            sent: 0,
            completed: [0; 2],
            received: 0,
            memory,
            region,
        };
        self.queue_pairs.insert(qpn, queue_pair);
        self.machine(qpn).alive(qpn, true);
    }

    /// From RESET to RTR: the program has named a peer.
    pub fn move_to_rtr(&mut self, now: Time, qpn: u32, named: Named, seen: &mut Vec<Seen>) {
        let [theirs, _] = named.psns;
        if self.queue_pairs.get(&qpn).is_none_or(|qp| qp.streams.end.core.query().state != QpState::Reset) {
            return;
        }
        let init = QpModify { state: Some(QpState::Init), ..QpModify::default() };
        self.modify(now, qpn, &init, seen);
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else { return };
        queue_pair.named = Some(named);
        (queue_pair.sent, queue_pair.completed, queue_pair.received) = (0, [0; 2], 0);
        for n in 0..MESSAGES {
            let sge = queue_pair.sge(n);
            let wr = RecvWr { wr_id: n as u64, sges: &[sge] };
            queue_pair.streams.end.core.post_recv(&wr).expect("the queue is empty after RESET");
        }
        let rtr = QpModify {
            state: Some(QpState::Rtr),
            dest_qp_num: Some(named.qpn),
            rq_psn: Some(theirs),
            min_rnr_timer: Some(12),
            awaits_stream: true,
            ..QpModify::default()
        };
        self.modify(now, qpn, &rtr, seen);
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else { return };
        let moves = queue_pair.streams.end.core.awaits_stream().expect("it was moved to RTR");
        let terms = queue_pair.terms();
        let path = Path { local: SocketAddr::new(self.at.ip(), 0), peer: SocketAddr::new(named.address, 0) };
        let [incarnation, token] = [self.rng.draw(), self.rng.draw()];
        let now = crate::hosts::at(now);
        self.machine(qpn).begin(&now, (qpn, moves), path, named.qpn, terms, incarnation, token);
        // As in the shell, whose second call is later.
        self.machine(qpn).begun(&Now::at(now.get() + Duration::from_micros(1)), qpn);
    }

    /// From RTR to RTS: the program says its own PSN, and posts.
    pub fn move_to_rts(&mut self, now: Time, qpn: u32, seen: &mut Vec<Seen>) {
        let Some(queue_pair) = self.queue_pairs.get(&qpn) else { return };
        let Some(Named { psns: [_, own], exchange, .. }) = queue_pair.named else { return };
        if queue_pair.streams.end.core.query().state != QpState::Rtr {
            return;
        }
        let rts = QpModify {
            state: Some(QpState::Rts),
            sq_psn: Some(own),
            timeout: Some(self.timeout),
            retry_cnt: Some(7),
            rnr_retry: Some(7),
            ..QpModify::default()
        };
        self.modify(now, qpn, &rts, seen);
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else { return };
        let terms = queue_pair.terms();
        self.machine(qpn).terms(qpn, terms);
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else { return };
        for n in MESSAGES..2 * MESSAGES {
            let sge = queue_pair.sge(n);
            let mut message = SECRET.to_vec();
            message.extend(exchange.to_be_bytes());
            message.extend(qpn.to_be_bytes());
            queue_pair.memory.write(n * MESSAGE, &message);
            let wr = SendWr {
                wr_id: n as u64,
                op: SendOp::Send { invalidate: None },
                flags: SendFlags::SIGNALED,
                sges: &[sge],
            };
            queue_pair.streams.end.core.post_send(&wr).expect("the queue is empty after RESET");
            queue_pair.sent += 1;
        }
        self.pump(now, qpn, seen);
    }

    /// To RESET.
    pub fn reset(&mut self, now: Time, qpn: u32, seen: &mut Vec<Seen>) {
        let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
        self.modify(now, qpn, &reset, seen);
        self.machine(qpn).end(qpn);
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else { return };
        queue_pair.named = None;
        queue_pair.streams.end.sends();
        queue_pair.streams.end.recvs();
    }

    /// Destroys it.
    pub fn destroy(&mut self, now: Time, qpn: u32, seen: &mut Vec<Seen>) {
        self.machine(qpn).forget(&crate::hosts::at(now), qpn);
        let reset = QpModify { state: Some(QpState::Reset), ..QpModify::default() };
        self.modify(now, qpn, &reset, seen);
        if let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) {
            queue_pair.named = None;
        }
    }

    fn modify(&mut self, now: Time, qpn: u32, change: &QpModify, seen: &mut Vec<Seen>) {
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else { return };
        queue_pair.streams.modify(now, change).expect("the program knows the states");
        self.pump(now, qpn, seen);
    }

    // --- The shell.

    /// Does something of what there is to do, in an order of its own. Returns whether there was anything.
    pub fn turn(&mut self, now: Time, seen: &mut Vec<Seen>) -> bool {
        if now < self.stopped {
            return false;
        }
        network(|network| network.running = self.pid);
        let before = network(|network| network.activity);
        let mut did = false;
        let mut order: Vec<usize> = (0..self.ports.len()).collect();
        crate::end::shuffle(&mut self.rng, &mut order);
        for port in order {
            did |= self.port_turn(now, port, seen);
        }
        for qpn in self.queue_pairs.keys().copied().collect::<Vec<_>>() {
            did |= self.pump(now, qpn, seen);
        }
        did || network(|network| network.activity) != before || self.is_busy()
    }

    fn port_turn(&mut self, now: Time, port: usize, seen: &mut Vec<Seen>) -> bool {
        let time = crate::hosts::at(now);
        let of = &mut self.ports[port];
        let mut did = of.handle_timeout(now);
        while let Some(Datagram { from, to, bytes }) = of.inbox.pop_front() {
            of.machine.handle_input(&time, Input::Datagram { from, to: to.ip(), bytes: &bytes });
            of.run(&time);
            did = true;
        }
        did |= of.shell.report_readiness(&mut of.machine, &time);
        of.run(&time);
        // What threads without the lock do comes later, in between other things.
        for _ in 0..2 {
            if self.rng.chance(600) {
                did |= self.ports[port].note(&time);
            } else {
                did |= self.carry_out(now, port, seen);
            }
            self.ports[port].run(&time);
        }
        did
    }

    /// A call of the program runs the loop, before it returns.
    pub fn after_call(&mut self, now: Time) {
        self.ports.iter_mut().for_each(|port| port.run(&crate::hosts::at(now)));
    }

    fn carry_out(&mut self, now: Time, port: usize, seen: &mut Vec<Seen>) -> bool {
        match self.ports[port].shell.deferred.pop_front() {
            None => return false,
            Some(Deferred::Attach { conn, to, said, param }) => {
                self.attach(now, (port, conn), to, &said, param, seen)
            }
            Some(Deferred::Disconnect(..) | Deferred::Fail | Deferred::Answer(_)) => {
                unreachable!("pairings do none of them")
            }
            Some(Deferred::Report(never)) => match never {},
        }
        true
    }

    fn attach(
        &mut self,
        now: Time,
        (port, conn): (usize, ConnKey),
        to: Recipient,
        said: &Negotiated,
        param: ConnParam,
        seen: &mut Vec<Seen>,
    ) {
        let Some(set_up) = self.ports[port].shell.conns.take(conn) else { return };
        let Recipient::Number { qpn, moves } = to else { unreachable!("pairings name numbers") };
        assert_eq!(self.port_of(qpn), port, "a stream for a number of another port");
        let (why, set_up) = match self.queue_pairs.get_mut(&qpn) {
            Some(queue_pair) if queue_pair.streams.end.core.awaits_stream() == Some(moves) => {
                let attr = queue_pair.streams.end.core.query();
                let params = stream_params(said, param, attr.timeout, attr.min_rnr_timer, self.infiniband);
                match queue_pair.streams.attach(now, conn, set_up, params) {
                    Ok((id, side)) => {
                        seen.push(Seen::Attached(qpn, id, side));
                        // Its first events may come before the answer, or after it.
                        if self.rng.chance(500) {
                            self.pump(now, qpn, seen);
                        }
                        let attached = Note::Stream(conn, StreamEvent::Attached);
                        return self.ports[port].notes.push_back(attached);
                    }
                    Err(refused) => refused,
                }
            }
            _ => (VerbsError::Invalid("the queue pair does not wait for this stream"), set_up),
        };
        let port = &mut self.ports[port];
        port.shell.conns.insert(conn, set_up);
        port.notes.push_back(Note::Stream(conn, StreamEvent::Refused(why)));
    }

    /// Moves what can be moved of a queue pair. Returns whether anything was.
    fn pump(&mut self, now: Time, qpn: u32, seen: &mut Vec<Seen>) -> bool {
        let port = self.port_of(qpn);
        let notes = &mut self.ports[port].notes;
        let Some(queue_pair) = self.queue_pairs.get_mut(&qpn) else { return false };
        let mut news = Vec::new();
        let moved = queue_pair.streams.pump(now, &mut news);
        for news in news {
            match news {
                News::Established(conn, id, side) => {
                    seen.push(Seen::Established(qpn, id, side));
                    notes.push_back(Note::Stream(conn, StreamEvent::Established));
                }
                News::Ended(conn, id, side, why) => {
                    seen.push(Seen::Ended(qpn, id, side));
                    // The shell derives it: otherwise the queue pair waits for the next stream.
                    if queue_pair.streams.end.core.awaits_stream().is_none() {
                        notes.push_back(Note::Stream(conn, StreamEvent::Used));
                    }
                    notes.push_back(Note::Stream(conn, StreamEvent::Ended(why)));
                }
            }
        }
        let sends = queue_pair.streams.end.sends();
        let receives = queue_pair.streams.end.recvs();
        let did = moved || !sends.is_empty() || !receives.is_empty();
        let named = queue_pair.named;
        for wc in sends {
            queue_pair.completed[usize::from(wc.status != WcStatus::Success)] += 1;
        }
        for wc in receives {
            queue_pair.receive(&wc, named);
        }
        if did {
            network(|network| network.activity += 1);
        }
        did
    }

    /// When something is to be done.
    pub fn next_time(&mut self, now: Time) -> Option<Time> {
        if now < self.stopped {
            // Much may have come meanwhile.
            return Some(self.stopped);
        }
        let machines = self.ports.iter().filter_map(|port| port.machine.poll_timeout()).map(crate::time);
        let ends = self.queue_pairs.values_mut().filter_map(|qp| qp.streams.next_time());
        ends.chain(machines).min()
    }

    /// Whether something waits for a thread of this process.
    pub fn is_busy(&self) -> bool {
        self.ports.iter().any(Port::is_busy)
    }

    /// The connection of a queue pair, and whether it is established there.
    pub fn stream(&self, qpn: u32) -> Option<(TcpId, bool)> {
        let stream = self.queue_pairs.get(&qpn)?.streams.stream.as_ref()?;
        Some((stream.id, stream.established))
    }

    /// Connections that queue pairs have, or had and still close.
    pub fn streams(&self) -> usize {
        self.queue_pairs.values().map(|qp| qp.streams.count()).sum()
    }

    /// Whether a queue pair is in RTR or above, and whether it has said its PSN.
    pub fn is_up(&self, qpn: u32) -> Option<bool> {
        match self.queue_pairs.get(&qpn)?.streams.end.core.query().state {
            QpState::Rtr => Some(false),
            QpState::Rts => Some(true),
            _ => None,
        }
    }
}

impl Port {
    fn new(pid: Pid, at: SocketAddr, budget: Budget, rng: &mut Rng) -> Self {
        let now = network(|network| {
            network.ports.insert(at, pid);
            network.now
        });
        let policy = ResponderPolicy {
            max_revision: Revision::Two,
            crc: true,
            markers: false,
            know_peers: true,
            max_ird: 16,
            host: None,
        };
        let settings = Settings {
            timeouts: Timeouts::default(),
            policy,
            crc: true,
            markers: false,
            says_uwarp: true,
            budget,
        };
        let mut key = [0; 16];
        rng.fill(&mut key);
        let mut shell = Shell::default();
        let bound =
            CARRIER.bind(&Bind { address: at, port: TakePort::NowIfUnused, options: Options::default() });
        shell.conns.set_bound(bound.expect("nothing is refused yet"));
        let machine = Pairings::new(&crate::hosts::at(now), settings, &key);
        Self { at, machine, shell, notes: VecDeque::new(), inbox: VecDeque::new() }
    }

    fn handle_timeout(&mut self, now: Time) -> bool {
        if self.machine.poll_timeout().is_none_or(|at| at > instant(now)) {
            return false;
        }
        self.machine.handle_timeout(&crate::hosts::at(now));
        let next = self.machine.poll_timeout();
        assert!(next.is_none_or(|at| at > instant(now)), "a deadline is over after handle_timeout");
        true
    }

    fn run(&mut self, now: &Now) {
        self.shell.run(&mut self.machine, (self.at, false), false, now);
    }

    fn note(&mut self, now: &Now) -> bool {
        let Some(Note::Stream(conn, event)) = self.notes.pop_front() else { return false };
        self.machine.handle_input(now, Input::Stream { conn, event });
        true
    }

    /// Whether something waits for a thread of its process.
    fn is_busy(&self) -> bool {
        !self.shell.deferred.is_empty() || !self.notes.is_empty()
    }
}

impl QueuePair {
    fn sge(&self, n: usize) -> Sge {
        Sge { addr: self.memory.addr(n * MESSAGE), length: MESSAGE as u32, lkey: self.region.stag() }
    }

    fn terms(&self) -> Terms {
        let attr = self.streams.end.core.query();
        let said = attr.state != QpState::Rtr;
        Terms {
            psns: self.streams.end.core.psns(),
            retry_cnt: attr.retry_cnt,
            rnr_retry: said.then_some(attr.rnr_retry),
            min_rnr_timer: attr.min_rnr_timer,
            placement_acks: true,
        }
    }

    fn receive(&mut self, wc: &Wc, named: Option<Named>) {
        if wc.status != WcStatus::Success {
            return;
        }
        self.received += 1;
        let Some(named) = named else { return };
        let message = self.memory.read(usize::try_from(wc.wr_id).expect("small") * MESSAGE, MESSAGE);
        let (secret, numbers) = message.split_at(SECRET.len());
        assert_eq!((secret, wc.byte_len), (&SECRET[..], MESSAGE as u32), "what the peer's program has sent");
        assert_eq!(numbers[4..], named.qpn.to_be_bytes(), "the sender is whom the program has named");
        let exchange = u32::from_be_bytes([numbers[0], numbers[1], numbers[2], numbers[3]]);
        let known = named.psns == [0; 2];
        assert!(
            known || exchange == named.exchange,
            "a message of exchange {exchange}, not {}",
            named.exchange
        );
    }
}

/// As the shell's.
fn stream_params(
    said: &Negotiated,
    param: ConnParam,
    timeout: u8,
    min_rnr_timer: u8,
    infiniband: bool,
) -> StreamParams {
    StreamParams {
        initiator: said.initiator,
        framing: said.framing(),
        ird: said.ird,
        ord: said.ord,
        peer_is_uwarp: said.peer_is_uwarp,
        peer: said.peer,
        timeout,
        retry_cnt: param.retry_count.min(7),
        rtr: said.rtr,
        rtr_stag_to: said.rtr_stag_to,
        wait_first_frame: said.rtr != Rtr::None,
        rnr_timeout: rnr_limit(param.rnr_retry_count, min_rnr_timer),
        placement_acks: said.peer_is_uwarp,
        infiniband,
        by_number: true,
        psns: shown_psns(said),
        ..StreamParams::default()
    }
}

impl Process {
    /// What holds after each step.
    pub fn check(&self, now: Time) {
        assert!(self.budget.used() <= self.limit, "more places than there are");
        let pairs = self.phases().count();
        let held: usize = self.ports.iter().map(|port| port.shell.conns.len()).sum();
        assert!(held <= self.limit + pairs + self.ports.len(), "{held} connections are held");
        let mut early: BTreeMap<u32, Vec<(std::net::Ipv6Addr, u32)>> = BTreeMap::new();
        for (destination, source, from) in self.ports.iter().flat_map(|port| port.machine.early()) {
            let of_it = early.entry(destination).or_default();
            assert!(!of_it.contains(&(from, source)), "two early requests of one peer");
            of_it.push((from, source));
            assert!(of_it.len() <= uwarp_cm::machine::pairings::MOST_EARLY_EACH, "too many early requests");
        }
        for (qpn, phase, deadline) in self.phases() {
            let waits = match phase {
                "Waiting" | "Over" => true,
                // The answer of the queue pair is on its way.
                "Attaching" | "Joining" => self.is_busy(),
                "Attached" | "Up" => self.stream(qpn).is_some() || self.is_busy(),
                _ => deadline.is_some(),
            };
            assert!(waits, "queue pair {qpn:#x} is {phase} and nothing ends that, at {now}");
            // One that has failed by itself is in ERR until its program moves it.
            let waits = matches!(phase, "Waiting" | "Replying" | "AwaitCookie" | "Asking" | "Paused");
            if !self.is_busy() && self.is_up(qpn).is_some() {
                let core = self.queue_pairs[&qpn].streams.end.core.awaits_stream().is_some();
                assert_eq!(waits, core, "queue pair {qpn:#x} is {phase}: whether it waits for a stream");
            }
        }
        for port in self.ports.iter().filter(|port| !port.shell.conns.is_empty() && !port.is_busy()) {
            assert!(port.machine.poll_timeout().is_some(), "connections are held without a limit");
        }
    }
}
