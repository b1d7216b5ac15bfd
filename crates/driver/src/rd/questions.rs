//! Questions for the ports of silent peers ([`rd::Action::AskPort`]): is a process still there?
//!
//! A system may refuse a port only so often: Linux sends about one such answer in a second to a host, and six
//! at first (`net.ipv4.icmp_ratelimit`). So there is one question at a time to an address, whichever ports of
//! this process wait for an answer; each is over within a second, and the machine repeats it. (Before contact
//! it lasts longer: the own system then finds out that no host has the address.)

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use uwarp_llp::asked_port::{AskedPort, Said};
use uwarp_process::{Birth, PerProcess};
use uwarp_proto::rd;
use uwarp_wire::rd::{Header, Kind, VERSION};

use crate::fork::Uncancelled;
use crate::sync::Mutex;

/// Questions of the process at a time; each has a descriptor.
const MOST: usize = 63;
/// When the answer is looked for, from the question on. After the last time there is none.
const LOOKS: [Duration; 10] = [
    Duration::from_millis(1),
    Duration::from_millis(5),
    Duration::from_millis(25),
    Duration::from_millis(100),
    Duration::from_millis(400),
    Duration::from_millis(1000),
    Duration::from_millis(2000),
    Duration::from_millis(3000),
    Duration::from_millis(3300),
    Duration::from_millis(3600),
];
/// As many of them where it is not known whether the host is there.
const LOOKS_FOR_PORT: usize = 6;
/// Questions that wait for a place at most. The machine repeats those that find none. (One before contact is
/// not: that connection fails as if the system had said nothing.)
const MOST_WAITING: usize = 1024;
/// A question that has no place is tried again after this time.
const AGAIN: Duration = Duration::from_millis(50);

/// The addresses that are asked.
static ASKED: PerProcess<Mutex<Vec<IpAddr>, 29>> = PerProcess::new(Mutex::default);

/// The right to ask an address.
struct Place(IpAddr, Birth);

impl Place {
    fn take(address: IpAddr) -> Option<Self> {
        let mut asked = ASKED.lock();
        let is_free = asked.len() < MOST && !asked.contains(&address);
        is_free.then(|| asked.push(address))?;
        Some(Self(address, Birth::here()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.1.is_parents() {
            return;
        }
        let mut asked = ASKED.lock();
        if let Some(at) = asked.iter().position(|address| *address == self.0) {
            asked.swap_remove(at);
        }
    }
}

struct Question {
    remote: SocketAddr,
    port: AskedPort,
    since: Instant,
    looks: usize,
    most_looks: usize,
    _place: Place,
}

impl Question {
    fn look_at(&self) -> Instant {
        self.since + LOOKS.get(self.looks).copied().unwrap_or(Duration::ZERO)
    }

    /// `Some`: it is over.
    fn look(&mut self, now: Instant) -> Option<Said> {
        while self.look_at() <= now {
            let said = self.port.look();
            self.looks += 1;
            if said != Said::Nothing || self.looks >= self.most_looks {
                return Some(said);
            }
        }
        None
    }
}

/// A question that has no place yet.
struct Waiting {
    route: rd::Route,
    most_looks: usize,
    urgent: bool,
}

/// Those of one port of this process.
#[derive(Default)]
pub(super) struct Questions {
    open: Vec<Question>,
    /// Those that are urgent come first.
    waiting: VecDeque<Waiting>,
    again_at: Option<Instant>,
}

impl Questions {
    pub fn is_empty(&self) -> bool {
        self.open.is_empty() && self.waiting.is_empty()
    }

    /// When [`Self::run`] has something to do.
    pub fn timeout(&self) -> Option<Instant> {
        self.open.iter().map(Question::look_at).chain(self.again_at).min()
    }

    /// The port of this peer is to be asked for; `urgent`: before those that are not.
    pub fn ask(&mut self, now: Instant, route: rd::Route, urgent: bool) {
        self.ask_for(now, route, LOOKS_FOR_PORT, urgent);
    }

    /// The same before contact.
    pub fn ask_host(&mut self, now: Instant, route: rd::Route) {
        self.ask_for(now, route, LOOKS.len(), true);
    }

    /// Whether an answer of this port may still come.
    pub fn is_open(&self, remote: SocketAddr) -> bool {
        self.open.iter().any(|question| question.remote == remote)
            || self.waiting.iter().any(|other| other.route.remote == remote)
    }

    fn ask_for(&mut self, now: Instant, route: rd::Route, most_looks: usize, urgent: bool) {
        let waiting = &mut self.waiting;
        if urgent && waiting.back().is_some_and(|last| !last.urgent) {
            waiting.retain(|other| other.urgent || other.route.remote != route.remote);
            // Those that are not urgent come last, and may be lost: then it is known later what refusals are
            // worth.
            waiting.truncate(MOST_WAITING - 1);
        }
        if self.waiting.len() < MOST_WAITING && !self.is_open(route.remote) {
            let at = match urgent {
                true => self.waiting.iter().position(|other| !other.urgent).unwrap_or(self.waiting.len()),
                false => self.waiting.len(),
            };
            self.waiting.insert(at, Waiting { route, most_looks, urgent });
            self.again_at = Some(now);
        }
    }

    /// Asks, and returns what has come of it.
    pub fn run(&mut self, now: Instant) -> SmallVec<[(SocketAddr, Said); 1]> {
        // What is closed here are descriptors, in calls of the program's that are no cancellation points.
        let _uncancelled = Uncancelled::begin();
        if self.again_at.is_some_and(|at| at <= now) {
            self.waiting.retain(|next| !begin(&mut self.open, now, next.route, next.most_looks));
            self.again_at = (!self.waiting.is_empty()).then(|| now + AGAIN);
        }
        let mut answers = SmallVec::new();
        self.open.retain_mut(|question| {
            let answer = question.look(now);
            answers.extend(answer.map(|answer| (question.remote, answer)));
            answer.is_none()
        });
        if !answers.is_empty() && self.waiting.front().is_some_and(|next| next.urgent) {
            // There is a place now. (What is not urgent leaves it to the other ports of this process.)
            self.again_at = Some(now);
        }
        answers
    }
}

/// Returns whether it has no place to wait for.
fn begin(open: &mut Vec<Question>, now: Instant, route: rd::Route, most_looks: usize) -> bool {
    let rd::Route { local, remote } = route;
    let Some(place) = Place::take(remote.ip()) else { return false };
    // Nobody answers "unknown" without an exchange, and nothing follows from it.
    let datagram = |port| {
        let header = Header {
            version: VERSION,
            kind: Kind::Unknown,
            source_port: port,
            destination_port: remote.port(),
            key: 0,
            number: 0,
        };
        header.to_packet().to_vec()
    };
    match AskedPort::ask(local.ip(), remote, datagram) {
        Ok(port) => open.push(Question { remote, port, since: now, looks: 0, most_looks, _place: place }),
        // It is asked for again.
        Err(error) => tracing::debug!(%remote, "cannot ask whether a silent peer is there: {error}"),
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(local: u8, remote: u8, port: u16) -> rd::Route {
        let at = |last: u8, port| SocketAddr::new([127, 0, 9, last].into(), port);
        rd::Route { local: at(local, 20_000), remote: at(remote, port) }
    }

    /// Whatever happens within so many milliseconds.
    fn run(questions: &mut Questions, time: u64) -> Vec<(u16, Said)> {
        let mut answers = Vec::new();
        for _ in 0..time {
            std::thread::sleep(Duration::from_millis(1));
            let some = questions.run(Instant::now());
            answers.extend(some.into_iter().map(|(remote, answer)| (remote.port(), answer)));
        }
        answers
    }

    #[test]
    fn one_port_of_an_address_is_asked_for_at_a_time() {
        let bind = || std::net::UdpSocket::bind("127.0.9.2:0").expect("a port");
        let (holder, free) = (bind(), bind());
        let port = |socket: &std::net::UdpSocket| socket.local_addr().expect("its address").port();
        let (taken, free_port) = (port(&holder), port(&free));
        drop(free);
        let mut questions = Questions::default();
        let mut others = Questions::default();
        let now = Instant::now();
        questions.ask(now, route(1, 2, taken), true);
        questions.ask(now, route(1, 2, taken), true);
        questions.ask(now, route(1, 2, free_port), true);
        others.ask(now, route(1, 2, free_port), true);
        assert!(questions.run(now).is_empty() && others.run(now).is_empty());
        assert_eq!((questions.open.len(), questions.waiting.len(), others.open.len()), (1, 1, 0));
        let mut answers = run(&mut questions, 1500);
        answers.sort_by_key(|(port, _)| *port == free_port);
        assert_eq!(answers, [(taken, Said::Nothing), (free_port, Said::Refused)]);
        assert_eq!(run(&mut others, 1500), [(free_port, Said::Refused)]);
        assert!(questions.is_empty() && others.is_empty() && others.timeout().is_none());
        drop(holder);
    }
}
