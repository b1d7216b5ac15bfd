//! What stands for the connection manager's shell (`uwarp_cm`'s `runner.rs`) around one machine: its
//! connections, what is deferred, and an edge-triggered poller.

use std::cell::Cell;
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::rc::{Rc, Weak};

use rustix::io::Errno;
use uwarp_cm::machine::run::{Conns, Deferred, Surroundings, run};
use uwarp_cm::machine::{ConnKey, Input, Machine};
use uwarp_llp::carrier::{self, Options};
use uwarp_llp::udp::Route;
use uwarp_rnic::qp::Now;

use super::carrier::CARRIER;
use super::network::{Watched as Place, network};

/// See the head of this file. `R`: the machine's reports.
pub struct Shell<R> {
    /// The machine's connections.
    pub conns: Conns<Rc<Cell<bool>>>,
    /// What a thread without the lock must do.
    pub deferred: VecDeque<Deferred<R>>,
    watches: Vec<Watch>,
}

struct Watch {
    conn: Option<ConnKey>,
    place: Place,
    seen: (u64, bool),
    again: bool,
    alive: Weak<Cell<bool>>,
}

struct Around<'a> {
    /// Where datagrams come from.
    at: SocketAddr,
    unpolled: bool,
    serves: bool,
    watches: &'a mut Vec<Watch>,
}

impl Surroundings for Around<'_> {
    type Watched = Rc<Cell<bool>>;

    fn watch(&mut self, conn: Option<ConnKey>, _: carrier::Watch<'_>) -> Result<Rc<Cell<bool>>, Errno> {
        let place = network(|network| network.watched.take()).expect("what is watched has said so");
        let watched = Rc::new(Cell::new(false));
        // What is there already is reported, too.
        let watch = Watch { conn, place, seen: (0, false), again: true, alive: Rc::downgrade(&watched) };
        self.watches.push(watch);
        Ok(watched)
    }

    fn again(&mut self, watched: &Rc<Cell<bool>>) {
        watched.set(true);
    }

    fn send(&mut self, route: Route, bytes: &[u8]) {
        let from = SocketAddr::new(route.from.unwrap_or(self.at.ip()), self.at.port());
        network(|network| network.send(from, route.to, bytes));
    }

    fn is_unpolled(&mut self) -> bool {
        self.unpolled
    }

    fn serve(&mut self) -> Option<Result<(), Errno>> {
        self.serves.then_some(Ok(()))
    }
}

impl<R> Default for Shell<R> {
    fn default() -> Self {
        let conns = Conns::new(&CARRIER, Options::default());
        Self { conns, deferred: VecDeque::new(), watches: Vec::new() }
    }
}

impl<R> Shell<R> {
    /// The connection manager's own loop. `at`: where datagrams come from; `serves`: they are received there;
    /// `unpolled`: completions wait.
    pub fn run<M: Machine<Report = R>>(
        &mut self,
        machine: &mut M,
        (at, serves): (SocketAddr, bool),
        unpolled: bool,
        now: &Now,
    ) {
        let mut around = Around { at, unpolled, serves, watches: &mut self.watches };
        let deferred = &mut self.deferred;
        run(machine, &mut self.conns, &mut around, &mut |result| deferred.push_back(result), now);
    }

    /// What has changed since the last report.
    pub fn report_readiness<M: Machine>(&mut self, machine: &mut M, now: &Now) -> bool {
        self.watches.retain(|watch| watch.alive.strong_count() > 0);
        let mut ready = Vec::new();
        for watch in &mut self.watches {
            let seen = network(|network| network.news(watch.place));
            let again = watch.alive.upgrade().is_some_and(|again| again.replace(false));
            if seen != watch.seen || std::mem::take(&mut watch.again) || again {
                watch.seen = seen;
                ready.push((watch.conn, seen.1));
            }
        }
        for (conn, writable) in &ready {
            match conn {
                None => machine.handle_input(now, Input::Waiting),
                Some(conn) => {
                    if self.conns.note(*conn, true, *writable) {
                        machine.handle_input(now, Input::Room { conn: *conn });
                    }
                }
            }
        }
        !ready.is_empty()
    }
}
