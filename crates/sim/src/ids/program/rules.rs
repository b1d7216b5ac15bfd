//! What holds after each step of a program, and at its end.

use uwarp_cm::machine::Machine as _;
use uwarp_cm::machine::listener::Listener;
use uwarp_cm::{EventKind, State};

use super::super::order::Role;
use super::Program;
use crate::Time;
use crate::hosts::network::network;

/// Within this time, a program that disconnects is told that it is: two seconds to send what is posted, two
/// until the peer's program has disconnected, and some more.
const LEAVES: Time = 5_000_000_000;

impl Program {
    /// After each step.
    pub(super) fn check(&self, now: Time) {
        assert!(self.budget.used() <= self.limit, "more places than there are");
        if let Some(backlog) = self.plan.listens {
            let requests = self.queue.iter().filter(|event| event.event.kind == EventKind::ConnectRequest);
            assert!(requests.count() <= Listener::backlog(backlog), "more requests than the backlog");
        }
        for pair in self.pairs.values() {
            let stream = pair.streams.stream.as_ref().map(|stream| (stream.id, stream.side));
            let gone = stream.and_then(|stream| self.gone.get(&pair.hooks.get(&stream)?.0));
            let limit = gone.map(|gone| (*gone).max(self.stopped) + LEAVES);
            assert!(limit.is_none_or(|limit| now < limit), "the stream of an id that has ended, at {now}");
        }
        for (key, node) in &self.nodes {
            let waits = match node.life.state() {
                State::Connecting | State::Accepting => node.life.poll_timeout().is_some() || node.is_busy(),
                State::Destroyed => {
                    assert_eq!(node.life.poll_timeout(), None, "a deadline of an id that has ended");
                    true
                }
                State::Closed => {
                    let told = node.order.outcome().is_some() || node.untold || node.waits || node.is_busy();
                    assert!(told, "id {key} is closed, and its program was not told, at {now}");
                    node.shell.conns.is_empty() || node.is_busy()
                }
                _ => true,
            };
            assert!(waits, "id {key} is {:?} and nothing ends that, at {now}", node.life.state());
            let requests = self.queue.iter().any(|event| event.owner == *key);
            if node.order.role == Role::Listens && !node.shell.conns.is_empty() && !requests {
                let limited = node.life.poll_timeout().is_some() || node.is_busy();
                assert!(limited, "id {key} holds connections without a limit, at {now}");
            }
            let leaves = node
                .disconnects
                .filter(|_| matches!(node.life.state(), State::Established | State::Responded));
            if let Some(since) = leaves {
                let limit = since.max(self.stopped) + LEAVES;
                assert!(now < limit, "id {key} has disconnected at {since}, and is not told, at {now}");
            }
            if node.waits && !node.is_busy() {
                panic!("a call on id {key} waits, and nothing ends that, at {now}");
            }
        }
    }

    /// Ends what it has.
    pub fn end(&mut self, now: Time) {
        network(|network| network.running = self.pid);
        self.stopped = 0;
        self.todo.clear();
        for key in self.nodes.keys().copied().collect::<Vec<_>>() {
            // Ids of requests that it has not taken end with their listener.
            let untaken = self.queue.iter().any(|event| event.id == key && event.owner != key);
            if !untaken && self.nodes.get(&key).is_some_and(|node| !node.order.destroyed) {
                self.destroy(now, key);
            }
        }
        for pair in self.pairs.keys().copied().collect::<Vec<_>>() {
            self.destroy_pair(now, pair);
        }
    }

    /// Nothing is left.
    pub fn check_end(&self) {
        let left: Vec<_> = self.nodes.iter().map(|(key, node)| (key, node.life.state())).collect();
        assert!(left.is_empty(), "ids are left: {left:?}");
        assert_eq!((self.budget.used(), self.queue.len()), (0, 0));
        let streams: usize = self.pairs.values().map(|pair| pair.streams.count()).sum();
        assert_eq!(streams, 0, "streams are left");
    }
}
