//! One id: its machine, and what stands for its shell (`uwarp_cm`'s `id.rs`, `owner.rs`, `runner.rs`).

use std::collections::VecDeque;

use rustix::io::Errno;
use uwarp_cm::machine::life::{IdEvent, Life, NewId, Report};
use uwarp_cm::machine::run::Deferred;
use uwarp_cm::machine::{ConnKey, Input, Machine, StreamEvent};
use uwarp_llp::carrier::SetUp;
use uwarp_rnic::qp::Now;

use super::order::{Order, Role};
use crate::hosts::network::network;
use crate::hosts::shell::Shell;
use crate::{Time, instant};

/// Names an id of a program.
pub type Key = u32;
/// Names a queue pair of a program.
pub type PairKey = u32;

/// What has happened, in order.
#[derive(Debug)]
pub enum Note {
    /// To a stream.
    Stream(ConnKey, StreamEvent),
    /// The queue pair has failed.
    Flushed,
    /// To a listener: the program has one of its requests.
    Delivered,
    /// To a listener: a request is decided.
    Settled(ConnKey),
}

/// What an id does at once, for its program.
pub enum Out {
    /// An event.
    Event(IdEvent),
    /// A request, with its connection.
    Request(Box<NewId>, Option<Box<dyn SetUp>>),
}

/// An id.
pub struct Node {
    /// The machine under test.
    pub life: Life,
    /// What is around it.
    pub shell: Shell<Report>,
    /// What its thread does next.
    pub notes: VecDeque<Note>,
    /// Of a request: its listener, which may have ended, and the connection's name there.
    pub origin: Option<(Key, ConnKey)>,
    /// The queue pair of the connection.
    pub pair: Option<PairKey>,
    /// The queue pair that the program moves itself, until it has the connection.
    pub by_number: Option<PairKey>,
    /// The connection of the last stream, and which one of the queue pair it is.
    pub stream: Option<(ConnKey, u32)>,
    /// A call of the program that waits for its answer.
    pub waits: bool,
    /// What that returns.
    pub answer: Option<Result<(), Errno>>,
    /// What it has reported.
    pub order: Order,
    /// The peer has closed the stream at this time.
    pub peer_closed: Option<Time>,
    /// The program has ended the connection, or broken it.
    pub left: bool,
    /// It may close without an event: it was rejected, or the program's call has failed.
    pub untold: bool,
    /// When it has disconnected a connection that was there.
    pub disconnects: Option<Time>,
}

impl Node {
    /// A new id.
    pub fn new(life: Life, role: Role) -> Self {
        Self {
            life,
            shell: Shell::default(),
            notes: VecDeque::new(),
            origin: None,
            pair: None,
            by_number: None,
            stream: None,
            waits: false,
            answer: None,
            order: Order::new(role),
            peer_closed: None,
            left: false,
            untold: false,
            disconnects: None,
        }
    }

    /// The listener that it came from.
    pub fn listener(&self) -> Option<Key> {
        self.origin.map(|(listener, _)| listener)
    }

    /// The machine runs until nothing is left to do without waiting.
    #[must_use]
    pub fn run(&mut self, now: &Now, at: std::net::SocketAddr, unpolled: bool) -> Vec<Out> {
        let mut before = std::mem::take(&mut self.shell.deferred);
        self.shell.run(&mut self.life, (at, false), unpolled, now);
        let results = std::mem::take(&mut self.shell.deferred);
        let mut out = Vec::new();
        for result in results {
            match result {
                // What other threads must see at once.
                Deferred::Report(Report::Event(event)) => out.push(Out::Event(event)),
                Deferred::Report(Report::Request(new)) => {
                    let set_up = new.conn.and_then(|conn| self.shell.conns.take(conn));
                    out.push(Out::Request(new, set_up));
                }
                Deferred::Answer(answer) => {
                    assert!(self.answer.is_none(), "a call is answered twice");
                    self.answer = Some(answer);
                }
                result => before.push_back(result),
            }
        }
        self.shell.deferred = before;
        if self.order.destroyed {
            self.shell.conns.close_ports();
        }
        out
    }

    /// Deadlines that have come.
    pub fn handle_timeout(&mut self, now: Time) -> bool {
        if self.life.poll_timeout().is_none_or(|at| at > instant(now)) {
            return false;
        }
        self.life.handle_timeout(&crate::hosts::at(now));
        let next = self.life.poll_timeout();
        assert!(next.is_none_or(|at| at > instant(now)), "a deadline is over after handle_timeout");
        true
    }

    /// What has happened, one after the other.
    pub fn handle_note(&mut self, now: &Now) -> bool {
        let Some(note) = self.notes.pop_front() else { return false };
        let input = match note {
            Note::Stream(conn, event) => Input::Stream { conn, event },
            Note::Flushed => Input::Flushed,
            Note::Delivered => Input::Delivered,
            Note::Settled(conn) => Input::Settled(conn),
        };
        self.life.handle_input(now, input);
        true
    }

    /// Something waits for one of its threads.
    pub fn is_busy(&self) -> bool {
        !self.shell.deferred.is_empty() || !self.notes.is_empty()
    }

    /// Nothing of it is left.
    pub fn is_over(&self) -> bool {
        self.order.destroyed && !self.is_busy() && self.shell.conns.is_empty() && !self.waits
    }

    /// No byte of a stream was read as a part of its set-up.
    pub fn check_set_up(id: crate::hosts::network::TcpId) {
        let set_up = network(|network| network.tcp.get(&id).map(|tcp| tcp.set_up)).unwrap_or_default();
        for (sent, read) in set_up {
            assert!(read <= sent, "{read} bytes were read as set-up frames, and {sent} were sent");
        }
    }
}
