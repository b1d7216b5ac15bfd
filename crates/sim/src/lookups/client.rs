//! A client: an id that asks, on a port of its own.

use std::collections::VecDeque;
use std::net::SocketAddr;

use rustix::io::Errno;
use uwarp_cm::event::EventKind::{self, *};
use uwarp_cm::machine::life::{IdEvent, Life, Report};
use uwarp_cm::machine::run::Deferred;
use uwarp_cm::machine::{Input, Machine as _};
use uwarp_cm::{State, Timeouts};
use uwarp_wire::datagram::lookup::Status;

use super::server::rules;
use super::{client_at, server_at};
use crate::hosts::at;
use crate::hosts::network::{Datagram, network};
use crate::hosts::shell::Shell;
use crate::{Time, instant, time};

const MS: Time = 1_000_000;
/// How long it asks: the connection manager's limit for a reply.
pub const PATIENCE: Time = 60_000 * MS;
/// Before this time after its first Request, a missing listener is not reported.
pub const ABSENT: Time = 350 * MS;

/// What a client's program is told.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Outcome {
    Found { qpn: u32, qkey: u32, data: Vec<u8> },
    Refused(Vec<u8>),
    Unsupported,
    Absent,
    Silence,
}

/// See the head of this file.
pub struct Client {
    /// Its address.
    pub at: SocketAddr,
    /// When it began to ask.
    pub begun: Time,
    /// What it asks.
    pub question: Vec<u8>,
    /// In which port space.
    pub port_space: u16,
    /// Datagrams of the server that have arrived.
    pub inbox: VecDeque<Datagram>,
    /// What its program was told.
    pub outcome: Option<Outcome>,
    /// When its host has heard last that nobody has the port.
    pub refused: Option<Time>,
    /// Does not run until then.
    pub stopped: Time,
    refusals: u32,
    destroyed: bool,
    /// Sent until it was over.
    sent: Option<u64>,
    life: Life,
    shell: Shell<Report>,
    events: Vec<EventKind>,
}

impl Client {
    /// One that begins to ask. `transaction`: random.
    pub fn new(now: Time, number: u32, port_space: u16, transaction: u32) -> Self {
        let here = client_at(number);
        // So that the server's program knows in which port space it is asked.
        let question = [&number.to_be_bytes()[..], &port_space.to_be_bytes()].concat();
        let mut life = Life::of_datagrams(rules(), port_space);
        assert_eq!(Timeouts::default().reply.as_nanos(), u128::from(PATIENCE));
        life.resolve_address(server_at(), Ok(here.ip())).expect("it is new");
        life.resolve_route().expect("its address is resolved");
        life.look_up(&at(now), transaction, &question).expect("its route is resolved");
        let mut client = Self {
            at: here,
            begun: now,
            question,
            port_space,
            inbox: VecDeque::new(),
            outcome: None,
            refused: None,
            stopped: 0,
            refusals: 0,
            destroyed: false,
            sent: None,
            life,
            shell: Shell::default(),
            events: Vec::new(),
        };
        client.run(now);
        assert_eq!(client.events, [AddressResolved, RouteResolved]);
        client
    }

    /// Its host has heard that nobody has the port.
    pub fn no_listener(&mut self) {
        self.refusals += 1;
    }

    /// The program destroys the id.
    pub fn destroy(&mut self, now: Time) {
        if !self.destroyed {
            self.destroyed = true;
            self.stopped = 0;
            self.life.destroy(&at(now));
            self.run(now);
        }
    }

    /// Whether the program has destroyed it.
    pub fn is_destroyed(&self) -> bool {
        self.destroyed
    }

    /// Does what there is to do. Returns whether there was anything, and what the program is told.
    pub fn turn(&mut self, now: Time) -> (bool, Option<Outcome>) {
        if now < self.stopped {
            return (false, None);
        }
        let mut did = false;
        if self.life.poll_timeout().is_some_and(|at| at <= instant(now)) {
            self.life.handle_timeout(&at(now));
            let next = self.life.poll_timeout();
            assert!(next.is_none_or(|at| at > instant(now)), "a deadline is over after handle_timeout");
            did = true;
        }
        let told = self.outcome.is_some();
        self.run(now);
        while self.refusals > 0 {
            self.refusals -= 1;
            // A socket that is closed hears nothing.
            if self.life.socket() == uwarp_cm::machine::life::Socket::Asking {
                self.refused = Some(now);
            }
            self.life.handle_input(&at(now), Input::NoListener);
            self.run(now);
            did = true;
        }
        while let Some(Datagram { from, to, bytes }) = self.inbox.pop_front() {
            self.life.handle_input(&at(now), Input::Datagram { from, to: to.ip(), bytes: &bytes });
            self.run(now);
            did = true;
        }
        self.check(now);
        (did, self.outcome.clone().filter(|_| !told))
    }

    fn run(&mut self, now: Time) {
        self.shell.run(&mut self.life, (self.at, false), false, &at(now));
        while let Some(deferred) = self.shell.deferred.pop_front() {
            match deferred {
                Deferred::Report(Report::Event(event)) => self.told(event),
                _ => panic!("an action that lookups do not have"),
            }
        }
    }

    fn told(&mut self, event: IdEvent) {
        assert!(!self.destroyed, "{:?} of an id that has ended", event.kind);
        let fits = matches!(
            (self.events.last(), event.kind),
            (None, AddressResolved)
                | (Some(AddressResolved), RouteResolved)
                | (Some(RouteResolved), Established | Unreachable)
        );
        assert!(fits, "{:?} after {:?}", event.kind, self.events);
        self.events.push(event.kind);
        let IdEvent { kind, status, datagram, private_data: data, .. } = event;
        let errno = |errno: Errno| -errno.raw_os_error();
        self.outcome = match (kind, status) {
            (Established, 0) => {
                let found = datagram.expect("it names a queue pair");
                assert_eq!((found.local, found.peer), (SocketAddr::new(self.at.ip(), 0), server_at()));
                assert_eq!(self.life.state(), State::Established, "when its program is told");
                Some(Outcome::Found { qpn: found.qpn, qkey: found.qkey, data })
            }
            (Unreachable, status) => {
                assert_eq!(self.life.state(), State::Closed, "when its program is told");
                Some(match status {
                    n if n == i32::from(Status::Rejected.code()) => Outcome::Refused(data),
                    n if n == i32::from(Status::Unsupported.code()) => Outcome::Unsupported,
                    n if n == errno(Errno::CONNREFUSED) => Outcome::Absent,
                    n if n == errno(Errno::TIMEDOUT) => Outcome::Silence,
                    n => panic!("a client is told {n}"),
                })
            }
            _ => None,
        };
    }

    /// After each step.
    fn check(&mut self, now: Time) {
        let sent = network(|network| network.sent_from.get(&self.at).copied().unwrap_or_default());
        let over = self.outcome.is_some() || self.destroyed;
        assert_eq!(self.life.poll_timeout().is_none(), over, "whether a deadline is left");
        if over {
            assert_eq!(*self.sent.get_or_insert(sent), sent, "it asks although its lookup is over");
            return;
        }
        assert_eq!(self.life.state(), State::Connecting);
        let limit = (self.begun + PATIENCE).max(self.stopped);
        assert!(now < limit, "nothing ends the lookup of {}", self.at);
        // Each Request but the first follows a pause, and a single one a cookie.
        let (mut passed, mut pause, mut most) = (50 * MS, 50 * MS, 2);
        while passed <= now - self.begun {
            pause = (2 * pause).min(2000 * MS);
            passed += pause;
            most += 1;
        }
        assert!(sent <= most, "{sent} Requests of {} where {most} are due", self.at);
    }

    /// When something is to be done.
    pub fn next_time(&self) -> Option<Time> {
        let waits = !self.inbox.is_empty() || self.refusals > 0;
        let deadline = self.life.poll_timeout().map(time);
        let next = if waits { Some(self.stopped) } else { deadline };
        next.map(|at| at.max(self.stopped))
    }

    /// Nothing is left.
    pub fn check_end(&self) {
        assert_eq!((self.life.state(), self.life.poll_timeout()), (State::Destroyed, None));
    }
}
