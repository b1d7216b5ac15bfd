//! What a program calls, and what it does with the answer.

use std::collections::VecDeque;

use rustix::io::Errno;
use uwarp_cm::event::ConnParam;
use uwarp_cm::machine::life::{Life, Ours, Pair};
use uwarp_cm::machine::run::Deferred;
use uwarp_cm::state::Step;
use uwarp_cm::{CmError, EventKind, State};
use uwarp_rnic::qp::QpState;

use super::super::node::{Key, Node};
use super::super::order::Role;
use super::{Call, Program, Queued};
use crate::Time;
use crate::hosts::at;

impl Program {
    pub(super) fn call(&mut self, now: Time, key: Key, call: Call) {
        let Some(node) = self.nodes.get_mut(&key).filter(|node| !node.order.destroyed) else { return };
        let waits = matches!(call, Call::Connect | Call::Accept | Call::Adopt | Call::Establish);
        if node.waits && waits {
            return;
        }
        if self.trace {
            eprintln!("{now:>12} {} id {key}: {call:?} in {:?}", self.pid, node.life.state());
        }
        let time = at(now);
        match call {
            Call::ResolveAddress(to) => {
                let source = self.plan.at.ip();
                self.with_node(now, key, |node| _ = node.life.resolve_address(to, Ok(source)));
            }
            Call::ResolveRoute => self.with_node(now, key, |node| _ = node.life.resolve_route()),
            Call::Connect => self.connect(now, key),
            Call::Accept => self.accept(now, key),
            Call::Reject => self.with_node(now, key, |node| {
                node.untold |= node.life.reject(&time, b"no").is_ok();
            }),
            Call::Adopt => self.adopt(now, key),
            Call::Establish => self.ask(now, key, |life| life.establish(), |_| ()),
            Call::Disconnect => self.disconnect(now, key),
            Call::Destroy => self.destroy(now, key),
            Call::DestroyPair => {
                node.left = true;
                if let Some(pair) = node.pair.or(node.by_number) {
                    self.destroy_pair(now, pair);
                    let own = self.nodes.get(&key).is_some_and(|node| node.pair.is_some());
                    if own {
                        self.with_node(now, key, |node| node.life.queue_pair_destroyed(&time));
                    }
                }
            }
            Call::FailPair => {
                node.left = true;
                let pair = node.pair;
                self.modify_pair(now, pair, QpState::Err);
                self.deliver();
            }
        }
    }

    fn ask(
        &mut self,
        now: Time,
        key: Key,
        f: impl FnOnce(&mut Life) -> Result<(), CmError>,
        begun: impl FnOnce(&mut Node),
    ) {
        self.with_node(now, key, |node| {
            if f(&mut node.life).is_ok() {
                node.waits = true;
                begun(node);
            }
        });
    }

    fn connect(&mut self, now: Time, key: Key) {
        let role = self.nodes[&key].order.role;
        if self.nodes[&key].life.check(Step::Connect).is_err() {
            return;
        }
        let number = self.create_pair();
        let qpn = self.pairs[&number].qpn;
        let own = role == Role::Connects;
        let pair = if own { Pair::Own(qpn) } else { Pair::Number(qpn) };
        let ours = Ours { pair, min_rnr_timer: 12, private_data: b"" };
        let time = at(now);
        self.ask(
            now,
            key,
            |life| life.connect(&time, ours, ConnParam::DEFAULT),
            |node| {
                node.order.begun = now.max(1);
                (node.pair, node.by_number) = if own { (Some(number), None) } else { (None, Some(number)) };
            },
        );
    }

    fn accept(&mut self, now: Time, key: Key) {
        if self.nodes[&key].life.check(Step::Accept).is_err() {
            return;
        }
        let number = self.create_pair();
        let ours = Ours { pair: Pair::Own(self.pairs[&number].qpn), min_rnr_timer: 12, private_data: b"" };
        let time = at(now);
        // The peer can connect again as soon as it has the reply.
        if let Some((listener, conn)) = self.nodes[&key].origin {
            self.with_node(now, listener, |node| node.life.answered(&time, conn));
        }
        self.ask(
            now,
            key,
            |life| life.accept(&time, ours, None),
            |node| {
                node.order.accepted = Some(now);
                node.pair = Some(number);
            },
        );
    }

    fn adopt(&mut self, now: Time, key: Key) {
        let Some(pair) = self.nodes[&key].by_number.filter(|pair| self.pairs.contains_key(pair)) else {
            return;
        };
        self.ask(now, key, |life| life.adopt(), |node| (node.pair, node.by_number) = (Some(pair), None));
        self.schedule(now, key, Call::Establish);
    }

    fn disconnect(&mut self, now: Time, key: Key) {
        let time = at(now);
        let mut leaves = false;
        self.with_node(now, key, |node| {
            node.left = true;
            let there = matches!(node.life.state(), State::Established | State::Responded);
            node.disconnects = node.disconnects.or(there.then_some(now));
            leaves = node.life.disconnect(&time).unwrap_or_default();
        });
        let pair = self.nodes.get(&key).and_then(|node| node.pair);
        if leaves && let Some(queue_pair) = pair.and_then(|pair| self.pairs.get_mut(&pair)) {
            queue_pair.streams.answer();
            queue_pair.streams.end.core.leave_gone_peer();
            self.pump_of(now, pair);
        }
    }

    pub(super) fn destroy(&mut self, now: Time, key: Key) {
        let time = at(now);
        self.with_node(now, key, |node| {
            node.shell.deferred.retain(|deferred| !matches!(deferred, Deferred::Fail));
            node.life.destroy(&time);
            node.order.destroyed = true;
            // Its ports are closed with it.
            node.shell.conns.close_ports();
        });
        let (gone, left) = std::mem::take(&mut self.queue).into_iter().partition(|event| event.owner == key);
        self.queue = left;
        let gone: VecDeque<Queued> = gone;
        for Queued { id, event, .. } in gone {
            if event.kind == EventKind::ConnectRequest {
                self.destroy(now, id);
            }
        }
        self.todo.retain(|(_, of, _)| *of != key);
        self.gone.insert(key, now);
        let node = self.nodes.get(&key);
        let (pair, outcome) = node.map_or((None, None), |node| (node.pair, node.order.outcome()));
        let outcome = match outcome {
            Some(EventKind::Established) => "established",
            Some(EventKind::ConnectResponse) => "by number",
            Some(EventKind::Rejected) => "rejected",
            Some(EventKind::Unreachable) => "unreachable",
            Some(_) => "failed",
            None => "none",
        };
        *self.outcomes.entry(outcome).or_default() += 1;
        let Some(pair) = pair.filter(|pair| self.pairs.contains_key(pair)) else { return };
        // Most programs destroy it. Some use it again.
        if self.rng.chance(700) {
            self.destroy_pair(now, pair);
        } else if self.rng.chance(700) {
            self.modify_pair(now, Some(pair), QpState::Reset);
            if let Some(queue_pair) = self.pairs.get_mut(&pair) {
                queue_pair.init();
                self.spare.push(pair);
            }
        }
    }

    pub(super) fn answered(&mut self, now: Time, key: Key, node: &mut Node, answer: Result<(), Errno>) {
        if self.trace {
            eprintln!("{now:>12} {} id {key}: returns {answer:?}", self.pid);
        }
        if answer.is_ok() || node.order.destroyed {
            return;
        }
        node.untold = true;
        match node.order.role {
            // This host has refused, and may take it later.
            Role::Connects | Role::ConnectsByNumber if node.life.state() == State::RouteResolved => {
                (node.pair, node.by_number) = (None, None);
                self.todo.push((now + 100_000_000, key, Call::Connect));
            }
            Role::Listens => {}
            _ => self.schedule(now, key, Call::Destroy),
        }
    }
}
