//! Strangers: other users' programs, with ports of their own or one that a process has left. They know all
//! numbers and whatever was sent to them, and never the half of a packet sequence number that they were not
//! shown.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use uwarp_proto::datagram;
use uwarp_proto::setup::{
    AcceptParams, Depths, Initiator, InitiatorConfig, PeerData, Responder, ResponderPolicy, Revision,
};
use uwarp_rnic::ah::port_of;
use uwarp_wire::datagram::proof::Proof;
use uwarp_wire::introduction::{Cookie, Introduction};

use super::network::{Datagram, Listening, Opening, Pid, TcpId, network};
use super::process::SECRET;
use crate::{Rng, Time};

/// More than any budget of the worlds.
const MOST_CONNECTIONS: usize = 80;

/// A stranger.
pub struct Stranger {
    /// Its name.
    pub pid: Pid,
    /// Its address and port.
    pub at: SocketAddr,
    /// Whether it has the port; otherwise it has the address alone, and names the port.
    pub has_port: bool,
    /// The queue pairs of this port that it names as its own.
    pub own: Vec<u32>,
    /// The queue pairs that it goes for, and their processes' ports.
    pub targets: Vec<(SocketAddr, u32)>,
    /// PSNs that everybody knows are not guessed: they are 0.
    pub knows_psns: bool,
    /// When it does the next thing, and when it stops.
    pub wake: Time,
    /// See [`Self::wake`].
    pub until: Time,
    /// How often it asks for thousands of cookies at once.
    pub floods: u32,
    /// Datagrams that have come to it.
    pub inbox: VecDeque<Datagram>,
    /// Answers that have come, each once.
    pub answers: BTreeMap<u64, SocketAddr>,
    began: Time,
    cookies: Vec<(SocketAddr, Cookie)>,
    /// Introductions that were sent to it.
    heard: Vec<Introduction>,
    conns: Vec<Talk>,
    rng: Rng,
}

struct Talk {
    id: TcpId,
    side: usize,
    read: Vec<u8>,
    request: Option<Responder>,
    answered: bool,
}

impl Stranger {
    /// One that begins at `wake`.
    pub fn new(pid: Pid, at: SocketAddr, wake: Time, until: Time, rng: Rng) -> Self {
        Self {
            pid,
            at,
            has_port: false,
            own: Vec::new(),
            targets: Vec::new(),
            knows_psns: false,
            wake,
            until,
            floods: 0,
            began: wake,
            inbox: VecDeque::new(),
            answers: BTreeMap::new(),
            cookies: Vec::new(),
            heard: Vec::new(),
            conns: Vec::new(),
            rng,
        }
    }

    /// Takes its port, and listens.
    pub fn begin(&mut self) {
        network(|network| {
            self.has_port = !network.ports.contains_key(&self.at);
            if self.has_port {
                network.ports.insert(self.at, self.pid);
                let listening = Listening { owner: self.pid, backlog: VecDeque::new(), news: 0 };
                network.listening.insert(self.at, listening);
            }
        });
    }

    /// Gives its port back, and keeps what it has learned.
    pub fn leave(&mut self) {
        self.has_port = false;
        network(|network| {
            network.ports.retain(|_, owner| *owner != self.pid);
            let waiting = network.stop_listening(self.pid);
            waiting.into_iter().for_each(|id| network.close(id, 1, true));
        });
    }

    /// Its program ends.
    pub fn end(&mut self) {
        self.conns.clear();
        self.wake = Time::MAX;
        network(|network| network.end_process(self.pid));
    }

    /// Does something at random. Returns whether it did.
    pub fn turn(&mut self, now: Time) -> bool {
        let read = self.read(now);
        if now < self.wake {
            return read;
        }
        network(|network| network.running = self.pid);
        // In a world that takes long it does less and less.
        let pause = 80_000_000.max((now - self.began.min(now)) / 20);
        self.wake = now + 1_000_000 + self.rng.below(pause);
        if self.conns.len() > MOST_CONNECTIONS {
            self.hang_up();
        }
        if now >= self.until {
            self.end();
            return true;
        }
        match self.rng.below(12) {
            0 | 1 => self.ask(),
            2 if self.floods > 0 => self.flood(),
            2..=7 => self.connect(),
            8 => self.babble(now),
            9 | 10 => self.hang_up(),
            // Five for one number.
            _ => (0..5).for_each(|_| self.connect()),
        }
        true
    }

    fn target(&mut self) -> (SocketAddr, u32) {
        self.targets[self.rng.size(0, self.targets.len() - 1)]
    }

    fn own_number(&mut self) -> u32 {
        self.own[self.rng.size(0, self.own.len() - 1)]
    }

    fn ask(&mut self) {
        let (to, destination_qpn) = self.target();
        let source_qpn = self.own_number();
        let token = self.rng.draw();
        let proof = Proof { source_qpn, destination_qpn, token, cookie: None };
        let mut from = self.at;
        if !self.has_port {
            from.set_port(network(|network| network.any_port()));
        }
        network(|network| network.send(from, to, &proof.to_bytes()));
    }

    fn flood(&mut self) {
        self.floods -= 1;
        let (to, destination_qpn) = self.target();
        let source_qpn = self.own[0];
        let first = self.rng.draw() >> 1;
        let asks = (first..first + 2500)
            .map(|token| Proof { source_qpn, destination_qpn, token, cookie: None }.to_bytes().to_vec());
        network(|network| network.flood(self.at, to, asks));
    }

    fn half(&mut self) -> Option<u16> {
        match self.rng.below(3) {
            0 => None,
            _ if self.knows_psns => Some(0),
            // Never right: who guesses 12 bits is right once in 4,096 times, and this is not what is tested.
            _ => Some(0xFFF),
        }
    }

    fn introduction(&mut self, destination_qpn: u32) -> Introduction {
        let cookie = match (self.rng.below(4), self.cookies.len()) {
            (0, _) | (_, 0) => Cookie::NONE,
            (1, _) => Cookie { made: self.rng.below(1 << 40), hash: self.rng.draw() },
            (2, _) => self.cookies[0].1,
            (_, n) => self.cookies[n - 1].1,
        };
        if !self.heard.is_empty() && self.rng.chance(300) {
            let heard = self.heard[self.rng.size(0, self.heard.len() - 1)];
            return Introduction { cookie, ..heard };
        }
        Introduction {
            source_qpn: self.own_number(),
            destination_qpn,
            expects: self.half(),
            begins: self.half(),
            incarnation: self.rng.draw(),
            cookie,
        }
    }

    fn connect(&mut self) {
        let (to, qpn) = self.target();
        let introduction = self.introduction(qpn).to_bytes();
        let request = match self.rng.below(6) {
            // Silent.
            0 => Vec::new(),
            1 => {
                let mut bytes = vec![0; self.rng.size(1, 600)];
                self.rng.fill(&mut bytes);
                bytes
            }
            kind => {
                let config = InitiatorConfig {
                    revision: Revision::Two,
                    crc: true,
                    markers: false,
                    depths: Depths::negotiated(16, 16),
                    max_ird: 16,
                    peer: self.rng.chance(500).then(|| PeerData { qpn, ..PeerData::new() }),
                    peer_in_request: self.rng.chance(500),
                };
                let mut initiator = Initiator::new(config, &introduction).expect("it fits");
                let mut request = initiator.poll_transmit().expect("a request");
                if kind == 2 {
                    request.truncate(self.rng.size(1, request.len() - 1));
                }
                request
            }
        };
        let port = network(|network| network.any_port());
        let from = SocketAddr::new(self.at.ip(), port);
        let id = network(|network| {
            let id = network.connect(from, to);
            let now = network.now;
            if let Some(tcp) = network.tcp.get_mut(&id)
                && !request.is_empty()
            {
                // The system sends it once the connection is there.
                _ = tcp.pipes[0].send(now, &request);
            }
            id
        });
        self.conns.push(Talk { id, side: 0, read: Vec::new(), request: None, answered: true });
    }

    /// Bytes of no meaning, on a connection that it has.
    fn babble(&mut self, now: Time) {
        let mut bytes = vec![0; self.rng.size(1, 64)];
        self.rng.fill(&mut bytes);
        if let Some(talk) = self.pick() {
            let (id, side) = (talk.id, talk.side);
            network(|network| {
                if let Some(tcp) = network.tcp.get_mut(&id) {
                    _ = tcp.pipes[side].send(now, &bytes);
                }
            });
        }
    }

    fn pick(&mut self) -> Option<&mut Talk> {
        let n = self.rng.size(0, self.conns.len().saturating_sub(1));
        self.conns.get_mut(n)
    }

    fn hang_up(&mut self) {
        let reset = self.rng.chance(500);
        if self.conns.is_empty() {
            return;
        }
        let n = self.rng.size(0, self.conns.len() - 1);
        let talk = self.conns.swap_remove(n);
        network(|network| network.close(talk.id, talk.side, reset));
    }

    /// Takes what has come. Replies to requests, at random.
    fn read(&mut self, now: Time) -> bool {
        let mut did = false;
        while let Some(Datagram { from, bytes, .. }) = self.inbox.pop_front() {
            did = true;
            let Some(proof) = datagram::parse_proof(&bytes) else { continue };
            match proof.cookie {
                Some(cookie) => {
                    self.answers.insert(proof.token, from);
                    self.cookies.push((from, cookie));
                }
                // It gives away a cookie of no meaning.
                None if self.rng.chance(700) => {
                    let cookie = Cookie { made: self.rng.below(1 << 40), hash: self.rng.draw() };
                    let reply = Proof {
                        source_qpn: proof.destination_qpn,
                        destination_qpn: proof.source_qpn,
                        token: proof.token,
                        cookie: Some(cookie),
                    };
                    network(|network| network.send(self.at, from, &reply.to_bytes()));
                }
                None => {}
            }
        }
        let accepted = network(|network| match network.listening.get_mut(&self.at) {
            Some(listening) if listening.owner == self.pid => listening.backlog.pop_front(),
            _ => None,
        });
        if let Some(id) = accepted {
            did = true;
            let policy = ResponderPolicy {
                max_revision: Revision::Two,
                crc: true,
                markers: false,
                know_peers: true,
                max_ird: 16,
                host: None,
            };
            let request = Some(Responder::new(policy));
            self.conns.push(Talk { id, side: 1, read: Vec::new(), request, answered: false });
        }
        self.read_connections(now) || did
    }

    fn read_connections(&mut self, now: Time) -> bool {
        let mut did = false;
        let mut gone = Vec::new();
        for talk in 0..self.conns.len() {
            let Talk { id, side, read, request, answered } = &mut self.conns[talk];
            let (id, side) = (*id, *side);
            let most = request.as_ref().filter(|_| !*answered).map_or(4096, Responder::want);
            let got = network(|network| {
                let tcp = network.tcp.get_mut(&id)?;
                if tcp.state != Opening::Open && side == 0 {
                    return Some(Vec::new());
                }
                match tcp.pipes[1 - side].recv(now, most) {
                    Ok(bytes) if bytes.is_empty() => None,
                    Ok(bytes) => Some(bytes),
                    Err(crate::net::Refusal::WouldBlock) => Some(Vec::new()),
                    Err(crate::net::Refusal::Reset) => None,
                }
            });
            let Some(got) = got else {
                gone.push(talk);
                continue;
            };
            if got.is_empty() {
                continue;
            }
            did = true;
            read.extend(&got);
            assert!(!read.windows(SECRET.len()).any(|bytes| bytes == SECRET), "a stranger reads a message");
            if let Some(responder) = request
                && !*answered
                && let Ok(Some(asked)) = responder.handle_input(&got)
            {
                *answered = true;
                let heard = Introduction::parse(&asked.private_data);
                self.heard.extend(heard);
                self.reply(now, talk, heard);
            }
        }
        for talk in gone.into_iter().rev() {
            let talk = self.conns.swap_remove(talk);
            network(|network| network.close(talk.id, talk.side, false));
        }
        did
    }

    fn reply(&mut self, now: Time, talk: usize, heard: Option<Introduction>) {
        let kind = self.rng.below(5);
        let (expects, begins) = (self.half(), self.half());
        let Talk { id, side, request, .. } = &mut self.conns[talk];
        let (id, side) = (*id, *side);
        let Some(responder) = request else { return };
        let bytes = match (kind, heard) {
            // Silence after the request.
            (0, _) | (_, None) => return,
            (1, _) => {
                let _ = responder.reject(b"no");
                responder.poll_transmit()
            }
            (_, Some(heard)) => {
                let said = Introduction {
                    source_qpn: heard.destination_qpn,
                    destination_qpn: heard.source_qpn,
                    expects,
                    begins,
                    incarnation: heard.incarnation,
                    cookie: Cookie::NONE,
                };
                let peer = PeerData { qpn: said.source_qpn, ..PeerData::new() };
                let params = AcceptParams { depths: Depths::negotiated(16, 16), peer };
                let _ = responder.accept(params, &said.to_bytes());
                responder.poll_transmit()
            }
        };
        network(|network| {
            if let Some(tcp) = network.tcp.get_mut(&id) {
                _ = tcp.pipes[side].send(now, &bytes.unwrap_or_default());
            }
        });
    }

    /// The number of a queue pair's port.
    pub fn port(qpn: u32) -> u16 {
        port_of(qpn)
    }
}
