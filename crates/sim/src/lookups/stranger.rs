//! Strangers: they ask in the name of addresses that nobody has, replay cookies, send noise, and answer in
//! the server's place while they have its port. They know everything but the transactions of lookups, which
//! are random.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;

use uwarp_wire::datagram::Datagram as Parsed;
use uwarp_wire::datagram::lookup::{Reply, Request, Status};

use super::{UDP, client_at, server_at};
use crate::hosts::host;
use crate::hosts::network::{Datagram, network};
use crate::{Rng, Time};

/// What a stranger does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It asks in the name of addresses that nobody has.
    Spoofs,
    /// It asks from a port of its own, and uses the cookies that it gets for anything.
    Asks,
    /// It sends noise, to the server and in the server's name to clients.
    Noise,
    /// It takes the server's port, and answers.
    Poses,
}

/// See the head of this file.
pub struct Stranger {
    /// What it does.
    pub kind: Kind,
    /// Datagrams that have come to it.
    pub inbox: VecDeque<Datagram>,
    wake: Time,
    at: SocketAddr,
    has_port: bool,
    cookies: Vec<u64>,
    lies: BTreeSet<u32>,
    rng: Rng,
}

/// Whether nobody has this address.
pub fn is_spoofed(address: SocketAddr) -> bool {
    address.ip() == host(7)
}

impl Stranger {
    /// One that has not begun.
    pub fn new(kind: Kind, rng: Rng) -> Self {
        let at = if kind == Kind::Poses { server_at() } else { (host(3), 40_000).into() };
        let (inbox, cookies, lies) = Default::default();
        Self { kind, inbox, wake: Time::MAX, at, has_port: false, cookies, lies, rng }
    }

    /// It begins.
    pub fn begin(&mut self, now: Time) {
        self.wake = now;
        self.has_port = match self.kind {
            Kind::Asks => true,
            Kind::Poses => network(|network| *network.ports.entry(self.at).or_insert(1000) == 1000),
            Kind::Spoofs | Kind::Noise => false,
        };
    }

    /// It ends.
    pub fn end(&mut self) {
        self.wake = Time::MAX;
        if std::mem::take(&mut self.has_port) && self.kind == Kind::Poses {
            network(|network| network.ports.remove(&self.at));
        }
    }

    /// Whether datagrams to this address come to it.
    pub fn receives_at(&self, at: SocketAddr) -> bool {
        self.has_port && self.at == at
    }

    /// Whether it has named this queue pair in the server's place.
    pub fn has_lied(&self, qpn: u32) -> bool {
        self.lies.contains(&qpn)
    }

    /// When it does the next thing.
    pub fn next_time(&self) -> Option<Time> {
        Some(self.wake).filter(|at| *at < Time::MAX)
    }

    /// Does something at random. Returns whether it did.
    pub fn turn(&mut self, now: Time) -> bool {
        let mut did = false;
        while let Some(Datagram { from, bytes, .. }) = self.inbox.pop_front() {
            did = true;
            match self.kind {
                Kind::Poses => self.pose(from, &bytes),
                _ => self.cookies.extend(cookie_of(&bytes)),
            }
        }
        if now < self.wake {
            return did;
        }
        self.wake = now + 1_000_000 + self.rng.below(200_000_000);
        match self.kind {
            Kind::Spoofs => {
                for _ in 0..self.rng.size(1, 20) {
                    let from = (host(7), 1 + self.rng.below(60_000) as u16).into();
                    self.ask(from);
                }
            }
            Kind::Asks => (0..self.rng.size(1, 20)).for_each(|_| self.ask(self.at)),
            Kind::Noise => self.noise(),
            Kind::Poses => {}
        }
        true
    }

    fn ask(&mut self, from: SocketAddr) {
        let cookie = match self.rng.below(3) {
            0 => 0,
            1 => self.rng.draw(),
            _ if self.cookies.is_empty() => 1,
            _ => self.cookies[self.rng.size(0, self.cookies.len() - 1)],
        };
        let port_space: u16 = if self.rng.chance(900) { UDP } else { 0x0106 };
        let question = [&self.rng.draw().to_be_bytes()[..], &port_space.to_be_bytes()].concat();
        let request = Request {
            transaction: self.rng.draw() as u32,
            port_space,
            service_port: server_at().port(),
            cookie,
            private_data: &question,
        };
        let mut bytes = vec![0; request.buffer_len()];
        request.emit(&mut bytes);
        network(|network| network.send(from, server_at(), &bytes));
    }

    fn noise(&mut self) {
        let client = client_at(self.rng.below(8) as u32);
        let mut bytes = match self.rng.below(3) {
            0 => vec![0; self.rng.size(0, 300)],
            n => {
                let status = [Status::Success, Status::CookieRequired, Status::Rejected, Status::Unknown(9)]
                    [self.rng.size(0, 3)];
                let mut bytes = self.reply(self.rng.clone().draw() as u32, status, 0xBAD);
                self.rng.draw();
                if n == 1 {
                    let at = self.rng.size(0, bytes.len() - 1);
                    bytes[at] ^= 1;
                }
                bytes
            }
        };
        if self.rng.chance(200) {
            self.rng.fill(&mut bytes);
        }
        network(|network| {
            network.send_as_stranger(server_at(), client, &bytes);
            network.send((host(3), 9).into(), server_at(), &bytes);
        });
    }

    fn reply(&self, transaction: u32, status: Status, qpn: u32) -> Vec<u8> {
        let is_found = status == Status::Success;
        let (qpn, qkey) = if is_found { (qpn, 1) } else { (0, 0) };
        let cookie = if status == Status::CookieRequired { self.rng.clone().draw() } else { 0 };
        let reply = Reply { transaction, qpn, qkey, status, cookie, private_data: b"" };
        let mut bytes = vec![0; reply.buffer_len()];
        reply.emit(&mut bytes);
        bytes
    }

    /// In the server's place: a wrong queue pair, cookies one after the other, and what fits no lookup.
    fn pose(&mut self, to: SocketAddr, bytes: &[u8]) {
        let request = Parsed::parse(bytes).ok().filter(Parsed::is_intact);
        let transaction = request.and_then(|request| Some(Request::parse(&request).ok()?.transaction));
        let Some(transaction) = transaction else { return };
        let replies = match self.rng.below(4) {
            0 => Vec::new(),
            1 => {
                let qpn = 0xE0_0000 + self.rng.below(1000) as u32;
                self.lies.insert(qpn);
                vec![self.reply(transaction, Status::Success, qpn)]
            }
            2 => vec![self.reply(transaction.wrapping_add(1), Status::Success, 0xBAD)],
            _ => (0..20).map(|_| self.reply(transaction, Status::CookieRequired, 0)).collect(),
        };
        for reply in replies {
            network(|network| network.send_as_stranger(self.at, to, &reply));
        }
    }
}

fn cookie_of(bytes: &[u8]) -> Option<u64> {
    let datagram = Parsed::parse(bytes).ok().filter(Parsed::is_intact)?;
    let reply = Reply::parse(&datagram).ok()?;
    (reply.status == Status::CookieRequired).then_some(reply.cookie)
}
