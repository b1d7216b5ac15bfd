//! The network between hosts: TCP as pairs of pipes, and UDP that loses, doubles, delays and corrupts.
//!
//! A thread has one network at a time: the loop that runs machines ([`uwarp_cm::machine::run`]) knows its
//! carrier for as long as the process lives, and a network is one world's.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;

use crate::net::Pipe;
use crate::{NetParams, Rng, Time};

/// Names a process, or a stranger. A process that starts again is another one.
pub type Pid = usize;

/// Names a TCP connection.
pub type TcpId = u32;

/// A SYN to a host that is down is repeated after this time; each further wait is twice as long.
const SYN_AGAIN: Time = 1_000_000_000;

/// A TCP connection; end 0 is the one that has connected.
#[derive(Debug)]
pub struct Tcp {
    /// Their addresses.
    pub ends: [SocketAddr; 2],
    /// Their processes.
    pub owners: [Pid; 2],
    /// What each end has sent.
    pub pipes: [Pipe; 2],
    /// How far it is.
    pub state: Opening,
    /// Ends that are closed.
    pub closed: [bool; 2],
    /// Bytes of set-up frames that each end has sent, and those that its peer has read as such.
    pub set_up: [(u64, u64); 2],
    /// Something has happened to it that is nobody's fault.
    pub broken_by_fault: bool,
    /// What each end sends comes back to it.
    pub to_itself: bool,
}

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// The SYN arrives then; after that many were lost.
    Syn(Time, u32),
    /// The end that has connected learns of it then.
    Answered(Time),
    /// The same, of a refusal.
    Refused(Time),
    /// Both ends have it.
    Open,
}

/// Listens.
#[derive(Debug)]
pub struct Listening {
    /// Its process.
    pub owner: Pid,
    /// Not accepted yet.
    pub backlog: VecDeque<TcpId>,
    /// How many have come.
    pub news: u64,
}

/// A datagram.
#[derive(Debug, Clone)]
pub struct Datagram {
    /// From where.
    pub from: SocketAddr,
    /// To where.
    pub to: SocketAddr,
    /// All of it.
    pub bytes: Vec<u8>,
}

/// See the head of this file.
#[derive(Debug)]
pub struct Network {
    /// The clock.
    pub now: Time,
    /// Whose calls are carried out.
    pub running: Pid,
    rng: Rng,
    params: NetParams,
    /// Datagrams in a thousand that are lost.
    pub loss: u32,
    /// Open connections.
    pub tcp: BTreeMap<TcpId, Tcp>,
    next: TcpId,
    next_port: u16,
    /// By address.
    pub listening: BTreeMap<SocketAddr, Listening>,
    /// Who has a port, of UDP and TCP.
    pub ports: BTreeMap<SocketAddr, Pid>,
    flying: BTreeMap<(Time, u64), Datagram>,
    sent: u64,
    /// Datagrams that the owners of addresses have sent.
    pub sent_from: BTreeMap<SocketAddr, u64>,
    /// What the system refuses to a process, and until when.
    pub refuses: BTreeMap<Pid, (Errno, Time)>,
    /// Hosts that are down, and until when.
    pub down: BTreeMap<IpAddr, Time>,
    /// Connections whose host is down: reset when it is up again and the peer sends.
    pub resets: Vec<(Time, TcpId)>,
    /// What was watched last: a connection and its end, or what listens.
    pub watched: Option<Watched>,
    /// Grows with whatever happens.
    pub activity: u64,
}

/// What a watch is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watched {
    /// An end of a connection.
    Tcp(TcpId, usize),
    /// What listens at this address.
    Listening(SocketAddr),
}

thread_local! {
    static NETWORK: RefCell<Option<Network>> = const { RefCell::new(None) };
}

/// Does something with the network of this thread's world.
///
/// # Panics
/// If there is none, or within another call.
pub fn network<T>(f: impl FnOnce(&mut Network) -> T) -> T {
    NETWORK.with_borrow_mut(|network| f(network.as_mut().expect("a world has a network")))
}

/// The same; `None`: the world has ended.
pub fn network_if_any<T>(f: impl FnOnce(&mut Network) -> T) -> Option<T> {
    NETWORK.with(|network| network.try_borrow_mut().ok().and_then(|mut network| network.as_mut().map(f)))
}

/// Gives this thread a network, or takes it away.
pub fn set_network(new: Option<Network>) {
    let old = NETWORK.with_borrow_mut(|network| std::mem::replace(network, new));
    drop(old);
}

impl Network {
    /// Without connections.
    pub fn new(rng: Rng, params: NetParams, loss: u32) -> Self {
        Self {
            now: 0,
            running: 0,
            rng,
            params,
            loss,
            tcp: BTreeMap::new(),
            next: 0,
            next_port: 50_000,
            listening: BTreeMap::new(),
            ports: BTreeMap::new(),
            flying: BTreeMap::new(),
            sent: 0,
            sent_from: BTreeMap::new(),
            refuses: BTreeMap::new(),
            down: BTreeMap::new(),
            resets: Vec::new(),
            watched: None,
            activity: 0,
        }
    }

    fn delay(&mut self) -> Time {
        let (low, high) = self.params.delay;
        low + self.rng.below(high.saturating_sub(low) + 1)
    }

    /// What the system refuses now to the process that runs.
    pub fn refusal(&self) -> Option<Errno> {
        self.refuses.get(&self.running).filter(|(_, until)| self.now < *until).map(|(errno, _)| *errno)
    }

    fn is_down(&self, host: IpAddr) -> bool {
        self.down.get(&host).is_some_and(|until| self.now < *until)
    }

    /// A port that nobody has used.
    pub fn any_port(&mut self) -> u16 {
        self.next_port += 1;
        self.next_port
    }

    /// Begins to connect.
    pub fn connect(&mut self, from: SocketAddr, to: SocketAddr) -> TcpId {
        let id = self.next;
        self.next += 1;
        let at = self.now + self.delay();
        let to_itself = from == to;
        let tcp = Tcp {
            ends: [from, to],
            owners: [self.running; 2],
            pipes: [0, 1].map(|_| Pipe::new(self.params, self.rng.fork(), None)),
            state: if to_itself { Opening::Open } else { Opening::Syn(at, 0) },
            closed: [false, to_itself],
            set_up: [(0, 0); 2],
            broken_by_fault: false,
            to_itself,
        };
        self.tcp.insert(id, tcp);
        self.activity += 1;
        id
    }

    /// Closes an end. With bytes that it has not read, the connection is reset.
    pub fn close(&mut self, id: TcpId, side: usize, reset: bool) {
        let now = self.now;
        let Some(tcp) = self.tcp.get_mut(&id) else { return };
        if std::mem::replace(&mut tcp.closed[side], true) {
            return;
        }
        self.activity += 1;
        if reset || tcp.pipes[1 - side].has_unread(now) {
            tcp.reset();
        } else {
            tcp.pipes[side].close(now);
        }
    }

    /// A process does not listen any more. Returns what it has not accepted.
    pub fn stop_listening(&mut self, pid: Pid) -> Vec<TcpId> {
        let of_it = self.listening.iter().filter(|(_, listening)| listening.owner == pid);
        let addresses: Vec<SocketAddr> = of_it.map(|(at, _)| *at).collect();
        let left = addresses.into_iter().filter_map(|at| self.listening.remove(&at));
        left.flat_map(|listening| listening.backlog).collect()
    }

    /// The process has ended: the system closes what it has.
    pub fn end_process(&mut self, pid: Pid) {
        self.ports.retain(|_, owner| *owner != pid);
        let waiting = self.stop_listening(pid);
        for id in waiting {
            self.close(id, 1, true);
        }
        let owned = |tcp: &Tcp, side: usize| tcp.owners[side] == pid && tcp.state == Opening::Open;
        let mut ends = Vec::new();
        for (id, tcp) in &mut self.tcp {
            ends.extend([0, 1].into_iter().filter(|side| owned(tcp, *side)).map(|side| (*id, side)));
            if tcp.owners[0] == pid && tcp.state != Opening::Open {
                ends.push((*id, 0));
            }
            tcp.broken_by_fault |= tcp.owners.contains(&pid);
        }
        for (id, side) in ends {
            self.close(id, side, false);
        }
    }

    /// Sends many datagrams at once, which arrive together: a step for each would take too long.
    pub fn flood(&mut self, from: SocketAddr, to: SocketAddr, all: impl Iterator<Item = Vec<u8>>) {
        self.activity += 1;
        let at = self.now + self.delay();
        for bytes in all {
            self.sent += 1;
            self.flying.insert((at, self.sent), Datagram { from, to, bytes });
        }
    }

    /// Sends a datagram.
    pub fn send(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        *self.sent_from.entry(from).or_default() += 1;
        self.send_as_stranger(from, to, bytes);
    }

    /// The same, by somebody who has that address now, or writes it.
    pub fn send_as_stranger(&mut self, from: SocketAddr, to: SocketAddr, bytes: &[u8]) {
        self.activity += 1;
        if self.is_down(from.ip()) || self.is_down(to.ip()) {
            return;
        }
        let copies = match self.rng.below(1000) {
            n if n < u64::from(self.loss) => 0,
            n if n >= 950 => 2,
            _ => 1,
        };
        for _ in 0..copies {
            let mut bytes = bytes.to_vec();
            let late = if self.rng.chance(50) { self.rng.below(2_000_000_000) } else { 0 };
            if self.loss > 0 && !bytes.is_empty() && self.rng.chance(20) {
                let at = self.rng.size(0, bytes.len() * 8 - 1);
                bytes[at / 8] ^= 1 << (at % 8);
            }
            let at = self.now + self.delay() + late;
            self.sent += 1;
            self.flying.insert((at, self.sent), Datagram { from, to, bytes });
        }
    }

    /// The next datagram that arrives now.
    pub fn take_datagram(&mut self) -> Option<Datagram> {
        let first = self.flying.first_entry().filter(|entry| entry.key().0 <= self.now)?;
        self.activity += 1;
        Some(first.remove())
    }

    /// What the network does by itself until now.
    pub fn step(&mut self) {
        let now = self.now;
        let due: Vec<TcpId> = self
            .tcp
            .iter()
            .filter(|(_, tcp)| match tcp.state {
                Opening::Syn(at, _) | Opening::Answered(at) => at <= now,
                Opening::Refused(_) => false,
                Opening::Open => true,
            })
            .map(|(id, _)| *id)
            .collect();
        for id in due {
            self.advance(id);
        }
        for (_, id) in self.resets.extract_if(.., |(at, _)| *at <= now) {
            if let Some(tcp) = self.tcp.get_mut(&id) {
                self.activity += 1;
                tcp.reset();
            }
        }
        self.tcp.retain(|_, tcp| tcp.closed != [true; 2]);
    }

    /// A host loses its power, and is up again later. Its processes are ended by the caller, afterwards.
    pub fn lose_power(&mut self, host: IpAddr, pid: Pid, until: Time) {
        self.down.insert(host, until);
        self.ports.retain(|_, owner| *owner != pid);
        let waiting = self.stop_listening(pid);
        for (id, tcp) in &mut self.tcp {
            for side in [0, 1] {
                if tcp.owners[side] == pid
                    && (tcp.state == Opening::Open || side == 0 || waiting.contains(id))
                {
                    // Silent, until the peer's system hears from the one that knows nothing of it.
                    tcp.closed[side] = true;
                    tcp.broken_by_fault = true;
                    self.resets.push((until, *id));
                }
            }
        }
    }

    fn advance(&mut self, id: TcpId) {
        let (now, delay) = (self.now, self.delay());
        let Some(tcp) = self.tcp.get_mut(&id) else { return };
        let [from, to] = tcp.ends;
        match tcp.state {
            Opening::Syn(_, lost) => {
                self.activity += 1;
                let down =
                    [from, to].iter().any(|end| self.down.get(&end.ip()).is_some_and(|until| now < *until));
                if tcp.closed[0] {
                    tcp.closed[1] = true;
                } else if down {
                    tcp.state = Opening::Syn(now + (SYN_AGAIN << lost.min(6)), lost + 1);
                } else if let Some(listening) = self.listening.get_mut(&to) {
                    tcp.owners[1] = listening.owner;
                    tcp.state = Opening::Answered(now + delay);
                    listening.backlog.push_back(id);
                    listening.news += 1;
                } else {
                    tcp.closed[1] = true;
                    tcp.state = Opening::Refused(now + delay);
                }
            }
            Opening::Answered(_) => {
                self.activity += 1;
                tcp.state = Opening::Open;
            }
            Opening::Open => {
                for side in [0, 1] {
                    // An end that is closed reads nothing any more.
                    let dark = self.resets.iter().any(|(_, dark)| *dark == id);
                    if tcp.closed[side] && tcp.pipes[1 - side].has_unread(now) && !tcp.to_itself && !dark {
                        self.activity += 1;
                        tcp.reset();
                    }
                }
                tcp.return_bytes(now);
            }
            Opening::Refused(_) => {}
        }
    }

    /// When something happens next.
    pub fn next(&self) -> Option<Time> {
        let now = self.now;
        let reset = self.resets.iter().map(|(at, _)| *at).min();
        let datagram = self.flying.first_key_value().map(|((at, _), _)| *at);
        let tcp = self.tcp.values().flat_map(|tcp| {
            let opening = match tcp.state {
                Opening::Syn(at, _) | Opening::Answered(at) | Opening::Refused(at) => Some(at),
                Opening::Open => None,
            };
            let [a, b] = &tcp.pipes;
            [opening, a.next_arrival(now), b.next_arrival(now)]
        });
        tcp.flatten().chain(datagram).chain(reset).filter(|at| *at > now).min()
    }

    /// What is known of a connection with these ends, as the first one sees it.
    pub fn find(&self, local: SocketAddr, peer: SocketAddr) -> Option<(TcpId, usize)> {
        self.tcp.iter().find_map(|(id, tcp)| match tcp.ends {
            [a, b] if (a, b) == (local, peer) => Some((*id, 0)),
            [a, b] if (b, a) == (local, peer) => Some((*id, 1)),
            _ => None,
        })
    }

    /// A number that grows with whatever an end can learn of its connection.
    pub fn news(&self, what: Watched) -> (u64, bool) {
        match what {
            Watched::Listening(at) => (self.listening.get(&at).map_or(0, |listening| listening.news), false),
            Watched::Tcp(id, side) => self.tcp.get(&id).map_or((0, false), |tcp| {
                let (opening, room) = match tcp.state {
                    Opening::Refused(at) if at <= self.now => (1, true),
                    Opening::Open => (2, tcp.pipes[side].has_room()),
                    _ if side == 1 => (2, true),
                    _ => (0, false),
                };
                (tcp.pipes[1 - side].news(self.now) + opening, room)
            }),
        }
    }
}

impl Tcp {
    /// Both ends learn of it.
    pub fn reset(&mut self) {
        for pipe in &mut self.pipes {
            pipe.reset();
        }
    }

    /// The pipe that this end reads, and the one that it writes.
    pub fn pipes(&mut self, side: usize) -> (&mut Pipe, &mut Pipe) {
        let [a, b] = &mut self.pipes;
        if side == 0 { (b, a) } else { (a, b) }
    }

    /// A connection with itself: what was sent comes back.
    fn return_bytes(&mut self, now: Time) {
        if !self.to_itself {
            return;
        }
        let (back, sent) = self.pipes(0);
        while back.has_room() {
            match sent.recv(now, 4096) {
                Ok(bytes) if bytes.is_empty() => return back.close(now),
                Ok(bytes) => _ = back.send(now, &bytes),
                Err(_) => return,
            }
        }
    }
}
