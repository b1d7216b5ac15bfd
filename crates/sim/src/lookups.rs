//! Hosts whose programs use rdma_cm's ids of datagrams: the machine of an id (`Life`, with the lookups'
//! `Client` and `Server` inside) with the connection manager's own loop, over a network that loses, doubles,
//! delays and corrupts datagrams.
//!
//! ```text
//!   script, faults ─▶ Lookups ── clock, who goes next, checks after each step
//!                        ├── Client ── an id that asks, on a port of its own
//!                        ├── Server ── an id that listens, ids of requests, a program that answers
//!                        ├── Stranger
//!                        └── network ── UDP, and what a host says of a port that nobody has
//! ```
//!
//! A seed repeats a run. With `UWARP_SIM_TRACE` in the environment, events are printed.

pub mod client;
pub mod server;
pub mod stranger;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use crate::hosts::host;
use crate::hosts::network::{Datagram, Network, network, set_network};
use crate::{NetParams, Rng, Time};
use client::{Client, Outcome};
use server::{Answered, Plan, Server};
use stranger::Stranger;

/// Steps that no run needs: a run with more hangs.
const MOST_STEPS: u64 = 400_000;

/// `RDMA_PS_UDP` on the wire.
pub const UDP: u16 = 0x0111;

/// Where the server is.
pub fn server_at() -> SocketAddr {
    (host(1), 7471).into()
}

/// Where this client is.
pub fn client_at(number: u32) -> SocketAddr {
    (host(2), 30_000 + number as u16).into()
}

/// What happens at a time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// The server's process begins, if nobody has its port.
    Start(Plan),
    /// It ends.
    Kill,
    /// It does not run, until then.
    StopServer(Time),
    /// Its program destroys the listener, and listens again at once.
    ListenAgain,
    /// A client asks, in this port space.
    Ask(u32, u16),
    /// Its program destroys the id.
    Destroy(u32),
    /// It does not run, until then.
    Stop(u32, Time),
    /// A stranger begins: an index into those of the world.
    Stranger(usize),
    /// It ends.
    StrangerEnds(usize),
    /// Datagrams that are lost, of a thousand.
    Loss(u32),
}

/// A world.
pub struct Lookups {
    seed: u64,
    rng: Rng,
    /// The clock.
    pub now: Time,
    /// All of them.
    pub clients: BTreeMap<u32, Client>,
    /// The one that lives.
    pub server: Option<Server>,
    /// All of them.
    pub strangers: Vec<Stranger>,
    script: VecDeque<(Time, Event)>,
    /// Rounds in which something has happened.
    pub steps: u64,
    /// What happens at a step.
    pub at_step: Option<(u64, Vec<(Time, Event)>)>,
    /// What programs have answered, by the number of the queue pair.
    answered: BTreeMap<u32, Answered>,
    /// Port spaces that have been served.
    spaces: BTreeSet<u16>,
    /// Hosts say that a port is nobody's: to whom, and when that arrives.
    refusals: VecDeque<(Time, SocketAddr)>,
    servers: u32,
    trace: bool,
}

impl Drop for Lookups {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed is {} (step {}, at {} ns)", self.seed, self.steps, self.now);
        } else {
            set_network(None);
        }
    }
}

impl Lookups {
    /// An empty world.
    pub fn new(seed: u64, net: NetParams) -> Self {
        let mut rng = Rng::new(seed);
        set_network(Some(Network::new(rng.fork(), net, 0)));
        Self {
            seed,
            rng,
            now: 0,
            clients: BTreeMap::new(),
            server: None,
            strangers: Vec::new(),
            script: VecDeque::new(),
            steps: 0,
            at_step: None,
            answered: BTreeMap::new(),
            spaces: BTreeSet::new(),
            refusals: VecDeque::new(),
            servers: 0,
            trace: std::env::var_os("UWARP_SIM_TRACE").is_some(),
        }
    }

    /// Adds to the script; events of one time happen in the order in which they were added.
    pub fn schedule(&mut self, at: Time, event: Event) {
        let place = self.script.partition_point(|(other, _)| *other <= at);
        self.script.insert(place, (at, event));
    }

    /// Runs until then.
    ///
    /// # Panics
    /// If a rule is broken.
    pub fn run_until(&mut self, end: Time) {
        let begin = self.steps;
        loop {
            if self.step() {
                assert!(self.steps - begin < MOST_STEPS, "the run does not end");
                continue;
            }
            let script = self.script.front().map(|(at, _)| *at);
            let strangers = self.strangers.iter().filter_map(Stranger::next_time);
            let clients = self.clients.values().filter_map(Client::next_time);
            let server = self.server.as_ref().and_then(Server::next_time);
            let refusals = self.refusals.iter().map(|(at, _)| *at);
            let all = strangers.chain(clients).chain(server).chain(script).chain(refusals);
            let next = all.chain(network(|network| network.next())).min();
            let next = next.map_or(end, |next| next.max(self.now + 1));
            if next >= end {
                self.now = self.now.max(end);
                network(|network| network.now = self.now);
                return;
            }
            self.now = next;
            network(|network| network.now = next);
        }
    }

    /// One round. Returns whether something has happened.
    fn step(&mut self) -> bool {
        let before = network(|network| network.activity);
        let mut did = false;
        while self.script.front().is_some_and(|(at, _)| *at <= self.now) {
            if let Some((_, event)) = self.script.pop_front() {
                self.event(event);
                did = true;
            }
        }
        if let Some((_, events)) = self.at_step.take_if(|(step, _)| *step <= self.steps) {
            events.into_iter().for_each(|(after, event)| self.schedule(self.now + after, event));
            did = true;
        }
        while let Some(datagram) = network(Network::take_datagram) {
            did = true;
            self.arrives(datagram);
        }
        while let Some(at) = self.refusals.iter().position(|(at, _)| *at <= self.now) {
            did = true;
            let (_, to) = self.refusals.remove(at).expect("it is there");
            let asks = self.clients.values_mut().find(|client| client.at == to);
            asks.into_iter().for_each(Client::no_listener);
        }
        let mut order: Vec<u32> = self.clients.keys().copied().collect();
        crate::end::shuffle(&mut self.rng, &mut order);
        for number in order {
            let Some(client) = self.clients.get_mut(&number) else { continue };
            let (turned, outcome) = client.turn(self.now);
            did |= turned;
            if let Some(outcome) = outcome {
                self.check_outcome(number, &outcome);
            }
        }
        if let Some(server) = &mut self.server {
            did |= server.turn(self.now);
            for answered in server.answers.drain(..) {
                self.answered.insert(answered.qpn, answered);
            }
        }
        for stranger in &mut self.strangers {
            did |= stranger.turn(self.now);
        }
        did |= network(|network| network.activity) != before;
        self.steps += u64::from(did);
        did
    }

    fn arrives(&mut self, datagram: Datagram) {
        let Datagram { from, to, .. } = datagram;
        if let Some(client) = self.clients.values_mut().find(|client| client.at == to) {
            // Its socket is connected.
            if from == server_at() {
                client.inbox.push_back(datagram);
            }
        } else if let Some(server) = self.server.as_mut().filter(|_| to == server_at()) {
            server.inbox.push_back(datagram);
        } else if let Some(stranger) = self.strangers.iter_mut().find(|stranger| stranger.receives_at(to)) {
            stranger.inbox.push_back(datagram);
        } else if self.rng.chance(900) {
            self.refusals.push_back((self.now + 1 + self.rng.below(1_000_000), from));
        }
    }

    fn event(&mut self, event: Event) {
        if self.trace {
            eprintln!("{:>12} step {} {event:?}", self.now, self.steps);
        }
        let now = self.now;
        match event {
            Event::Start(plan) => {
                let is_free = network(|network| !network.ports.contains_key(&server_at()));
                if self.server.is_none() && is_free {
                    self.servers += 1;
                    self.spaces.insert(plan.port_space);
                    self.server = Some(Server::new(now, self.servers, plan, self.rng.fork()));
                }
            }
            Event::Kill => {
                if self.server.take().is_some() {
                    network(|network| network.ports.remove(&server_at()));
                }
            }
            Event::StopServer(until) => {
                if let Some(server) = &mut self.server {
                    server.stopped = until;
                }
            }
            Event::ListenAgain => {
                if let Some(server) = &mut self.server {
                    server.listen_again(now);
                }
            }
            Event::Ask(number, port_space) => {
                let client = Client::new(now, number, port_space, self.rng.draw() as u32);
                self.clients.insert(number, client);
            }
            Event::Destroy(number) => {
                if let Some(client) = self.clients.get_mut(&number) {
                    client.destroy(now);
                }
            }
            Event::Stop(number, until) => {
                if let Some(client) = self.clients.get_mut(&number) {
                    client.stopped = until;
                }
            }
            Event::Stranger(index) => self.strangers[index].begin(now),
            Event::StrangerEnds(index) => self.strangers[index].end(),
            Event::Loss(loss) => network(|network| network.loss = loss),
        }
    }

    /// What a client is told is what a program has said, of this client's own question.
    fn check_outcome(&self, number: u32, outcome: &Outcome) {
        let client = &self.clients[&number];
        match outcome {
            Outcome::Found { qpn, qkey, data } => {
                if self.strangers.iter().any(|stranger| stranger.has_lied(*qpn)) {
                    return;
                }
                let answered = self.answered.get(qpn).unwrap_or_else(|| panic!("nobody has said {qpn:#x}"));
                assert_eq!((answered.to, &answered.question), (client.at, &client.question));
                assert_eq!((answered.qkey, &answered.data), (Some(*qkey), data));
            }
            Outcome::Refused(data) => {
                let of_it = |answered: &Answered| answered.to == client.at && answered.qkey.is_none();
                let said = self.answered.values().any(|answered| of_it(answered) && answered.data == *data);
                assert!(said, "client {number} is refused, and no program has refused it");
            }
            Outcome::Unsupported => {
                let others = self.spaces.iter().any(|space| *space != client.port_space);
                assert!(others, "client {number} is told of another port space");
            }
            Outcome::Absent => {
                let told = client.refused.is_some_and(|at| at >= client.begun + client::ABSENT);
                assert!(told, "client {number}: nobody has said that there is no listener");
            }
            Outcome::Silence => {
                assert!(self.now >= client.begun + client::PATIENCE, "client {number} gives up early");
            }
        }
    }

    /// All that live have been answered. Returns how many clients got a queue pair.
    pub fn check_answered(&self) -> usize {
        let mut found = 0;
        for (number, client) in &self.clients {
            match (&client.outcome, client.is_destroyed()) {
                (Some(Outcome::Found { .. }), _) => found += 1,
                (Some(Outcome::Refused(_) | Outcome::Unsupported), _) | (None, true) => {}
                (outcome, _) => panic!("client {number} was told {outcome:?}"),
            }
        }
        found
    }

    /// Ends everything and checks that nothing is left.
    pub fn end(&mut self) {
        self.strangers.iter_mut().for_each(Stranger::end);
        self.script.clear();
        let now = self.now;
        self.clients.values_mut().for_each(|client| client.destroy(now));
        if let Some(server) = &mut self.server {
            server.end(now);
        }
        self.run_until(self.now + 10_000_000_000);
        self.clients.values().for_each(Client::check_end);
        self.server.iter().for_each(Server::check_end);
    }
}
