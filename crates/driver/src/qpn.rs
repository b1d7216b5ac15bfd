//! Queue pair numbers, and the registry of the queue pairs that have them.
//!
//! A number is `port << 8 | slot`, so that an address and a number name a queue pair without a name service.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use rustix::io::Errno;
use uwarp_llp::carrier::{Bind, Bound, Carrier, Options, TakePort, tcp::Tcp};
use uwarp_llp::udp;
use uwarp_process::Mutex;
use uwarp_rnic::VerbsError;

use crate::config::Config;

/// 256 numbers on one port, which is held in TCP and in UDP.
struct Port {
    port: u16,
    used: [u64; 4],
    /// Numbers that are not used.
    free: u16,
    next: u8,
    /// Until it listens, which is another owner's then.
    tcp: Option<Box<dyn Bound>>,
    udp: Arc<udp::Socket>,
}

/// Allocates numbers and finds queue pairs by them. Opens a port's sockets when the first number on it is
/// needed.
///
/// A number is taken until its queue pair is dropped. The registry finds the queue pair until it is
/// destroyed, which is earlier. `Q`: a reference that keeps nothing alive.
pub(crate) struct Numbers<Q> {
    ports: Mutex<Vec<Port>, 19>,
    registered: Mutex<Registry<Q>, 19>,
}

/// Numbers of one port, a bit for each, by their low byte.
pub type Slots = [u64; 4];

struct Registry<Q> {
    queue_pairs: BTreeMap<u32, Registered<Q>>,
    /// The same by port. Bring-up by number looks at them after each change, so they must be cheap to copy.
    slots: BTreeMap<u16, Slots>,
}

struct Registered<Q> {
    qp: Q,
    /// See [`Numbers::set_context`]; 0 before that.
    context: u64,
}

impl<Q> Default for Numbers<Q> {
    fn default() -> Self {
        let registry = Registry { queue_pairs: BTreeMap::new(), slots: BTreeMap::new() };
        Self { ports: Mutex::default(), registered: Mutex::new(registry) }
    }
}

/// Never a queue pair: the destination of multicast.
const RESERVED: u32 = 0xFF_FFFF;

impl<Q: Clone> Numbers<Q> {
    pub fn take(&self) -> Result<u32, VerbsError> {
        let mut ports = self.ports.lock();
        for port in ports.iter_mut().filter(|port| port.free > 0) {
            if let Some(qpn) = port.take() {
                return Ok(qpn);
            }
        }
        let mut port = open_port().ok_or_else(|| {
            tracing::warn!(
                "no port for queue pairs: every 256 of a process need one that is free in TCP and UDP{}",
                match &Config::get().ports {
                    Some(range) if *range.start() < 1024 => format!(
                        " in UWARP_PORT_RANGE={}-{} (ports below 1024 are for root alone, unless the system \
                         is told otherwise)",
                        range.start(),
                        range.end()
                    ),
                    Some(range) => format!(" in UWARP_PORT_RANGE={}-{}", range.start(), range.end()),
                    None => ", and two descriptors (see `ulimit -n`)".into(),
                }
            );
            VerbsError::NoResources("ports for queue pair numbers")
        })?;
        let qpn = port.take().ok_or(VerbsError::NoResources("queue pair numbers"))?;
        ports.push(port);
        Ok(qpn)
    }

    pub fn give(&self, qpn: u32) {
        let mut ports = self.ports.lock();
        if let Some(port) = ports.iter_mut().find(|p| u32::from(p.port) == qpn >> 8) {
            let slot = (qpn & 0xFF) as usize;
            port.free += u16::from(port.used[slot / 64] >> (slot % 64) & 1 == 1);
            port.used[slot / 64] &= !(1 << (slot % 64));
        }
    }

    /// The UDP socket of a number that was taken.
    pub fn datagrams(&self, qpn: u32) -> Option<Arc<udp::Socket>> {
        let ports = self.ports.lock();
        ports.iter().find(|p| u32::from(p.port) == qpn >> 8).map(|p| p.udp.clone())
    }

    /// Any number of a port that is open.
    pub fn any_of_port(&self) -> Option<u32> {
        self.ports.lock().first().map(|port| u32::from(port.port) << 8)
    }

    /// What is bound to the port of a number that was taken, and does not listen yet. Once for each port.
    pub fn take_streams(&self, qpn: u32) -> Option<Box<dyn Bound>> {
        let mut ports = self.ports.lock();
        find_port(&mut ports, qpn)?.tcp.take()
    }

    /// It could not listen, and stays bound.
    pub fn return_streams(&self, qpn: u32, bound: Box<dyn Bound>) {
        if let Some(port) = find_port(&mut self.ports.lock(), qpn) {
            port.tcp = Some(bound);
        }
    }

    pub fn register(&self, qpn: u32, qp: Q) {
        let mut registered = self.registered.lock();
        registered.queue_pairs.insert(qpn, Registered { qp, context: 0 });
        let (port, word, bit) = place(qpn);
        registered.slots.entry(port).or_default()[word] |= bit;
    }

    /// Whether it was registered.
    pub fn unregister(&self, qpn: u32) -> bool {
        let mut registered = self.registered.lock();
        let (port, word, bit) = place(qpn);
        if let Some(slots) = registered.slots.get_mut(&port) {
            slots[word] &= !bit;
        }
        registered.queue_pairs.remove(&qpn).is_some()
    }

    pub fn find(&self, qpn: u32) -> Option<Q> {
        self.registered.lock().queue_pairs.get(&qpn).map(|registered| registered.qp.clone())
    }

    /// The registered numbers of a port.
    pub fn of_port(&self, port: u16) -> Slots {
        self.registered.lock().slots.get(&port).copied().unwrap_or_default()
    }

    /// All that are registered, in the order of their numbers.
    pub fn all(&self) -> Vec<Q> {
        self.registered.lock().queue_pairs.values().map(|registered| registered.qp.clone()).collect()
    }

    /// Records which opened device a queue pair belongs to.
    pub fn set_context(&self, qpn: u32, context: u64) {
        if let Some(registered) = self.registered.lock().queue_pairs.get_mut(&qpn) {
            registered.context = context;
        }
    }

    /// All that are registered and belong to an opened device.
    pub fn of_context(&self, context: u64) -> Vec<Q> {
        let registered = self.registered.lock();
        registered.queue_pairs.values().filter(|r| r.context == context).map(|r| r.qp.clone()).collect()
    }
}

impl Port {
    /// Numbers are taken in turn, so that a number is not used again at once.
    fn take(&mut self) -> Option<u32> {
        for step in 0..=255u8 {
            let slot = self.next.wrapping_add(step);
            let (word, bit) = (usize::from(slot / 64), slot % 64);
            let qpn = u32::from(self.port) << 8 | u32::from(slot);
            if self.used[word] >> bit & 1 == 0 && qpn != RESERVED {
                self.used[word] |= 1 << bit;
                self.free -= 1;
                self.next = slot.wrapping_add(1);
                return Some(qpn);
            }
        }
        // Only the reserved number was left.
        self.free = 0;
        None
    }
}

/// A number's port, and where its bit is in [`Slots`].
fn place(qpn: u32) -> (u16, usize, u64) {
    let [_, high, low, slot] = qpn.to_be_bytes();
    (u16::from_be_bytes([high, low]), usize::from(slot / 64), 1 << (slot % 64))
}

fn find_port(ports: &mut [Port], qpn: u32) -> Option<&mut Port> {
    ports.iter_mut().find(|port| u32::from(port.port) == qpn >> 8)
}

fn open_port() -> Option<Port> {
    match &Config::get().ports {
        Some(range) => open_one_of(range.clone()),
        // The system chooses; several tries, because the port must be free in TCP and in UDP.
        None => open_one_of(std::iter::repeat_n(0, 64)),
    }
}

/// The first of these ports that is free. One that connections of an earlier run have, in TIME_WAIT, is taken
/// only if all have: a port is bound long before it listens, and it is only ours alone when it has begun to.
fn open_one_of(candidates: impl Iterator<Item = u16> + Clone) -> Option<Port> {
    let open = |port, take| {
        let tcp = bind(port, take)?;
        let port = tcp.local().port();
        let udp = udp::Socket::bind(port).ok()?;
        Some(Port { port, used: [0; 4], free: 256, next: 0, tcp: Some(tcp), udp: Arc::new(udp) })
    };
    let unused = candidates.clone().find_map(|port| open(port, TakePort::NowIfUnused));
    unused.or_else(|| candidates.filter(|port| *port != 0).find_map(|port| open(port, TakePort::Now)))
}

/// TCP on all addresses of both families, or of IPv4 alone where the system has no IPv6.
fn bind(port: u16, take: TakePort) -> Option<Box<dyn Bound>> {
    let options = Options { afonly: Some(false), ..Options::default() };
    let at = |address| Tcp.bind(&Bind { address, port: take, options });
    match at(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))) {
        Err(Errno::AFNOSUPPORT) => at(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).ok(),
        both => both.ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_are_given_back_serve_before_another_port_is_opened() {
        let numbers = Numbers::<()>::default();
        let all: Vec<u32> = (0..256).map(|_| numbers.take().unwrap()).collect();
        assert!(all.iter().all(|qpn| qpn >> 8 == all[0] >> 8));
        numbers.give(all[9]);
        numbers.give(all[9]);
        assert_eq!(numbers.take().unwrap(), all[9]);
        assert_ne!(numbers.take().unwrap() >> 8, all[0] >> 8);
    }

    /// One of few ports, after a run of which a connection is left in TIME_WAIT.
    fn used_port() -> u16 {
        let bound = bind(0, TakePort::Now).unwrap();
        let port = bound.local().port();
        let listening = bound.listen(1).map_err(|(errno, _)| errno).unwrap();
        let mut client = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
        let accepted = loop {
            if let Some(accepted) = listening.accept().unwrap() {
                break accepted;
            }
        };
        accepted.close(uwarp_llp::carrier::Close::Finish);
        assert_eq!(std::io::Read::read(&mut client, &mut [0]).unwrap(), 0);
        port
    }

    /// With `UWARP_PORT_RANGE`, a program that was started again within a minute found no port.
    #[test]
    fn a_port_of_an_earlier_run_serves_a_restart_but_an_unused_one_goes_first() {
        let used = used_port();
        let opened = open_one_of([used].into_iter()).expect("the port of the earlier run");
        assert_eq!(opened.port, used);
        drop(opened);
        let unused = bind(0, TakePort::Now).unwrap().local().port();
        let opened = open_one_of([used, unused].into_iter()).expect("a port");
        assert_eq!(opened.port, unused);
    }

    /// The same number of IPv4 was taken, and IPv6 connections reached the other program.
    #[test]
    fn a_port_that_another_program_has_in_one_family_is_not_taken() {
        let Ok(other) = Tcp.bind(&Bind {
            address: SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
            port: TakePort::Now,
            options: Options { afonly: Some(true), ..Options::default() },
        }) else {
            return; // No IPv6.
        };
        assert!(open_one_of([other.local().port()].into_iter()).is_none());
    }

    #[test]
    fn what_listens_for_a_port_is_taken_once_and_given_back_if_it_could_not() {
        let numbers = Numbers::<()>::default();
        let (one, other) = (numbers.take().unwrap(), numbers.take().unwrap());
        let bound = numbers.take_streams(one).unwrap();
        assert!(numbers.take_streams(other).is_none(), "the same port");
        let port = bound.local().port();
        assert_eq!(u32::from(port), one >> 8);
        numbers.return_streams(other, bound);
        assert_eq!(numbers.take_streams(one).unwrap().local().port(), port);
    }

    #[test]
    fn a_queue_pair_is_found_by_its_number_until_it_is_unregistered() {
        let numbers = Numbers::default();
        for (qpn, pair) in (10..).zip(["a", "b", "c"]) {
            numbers.register(qpn, pair);
        }
        numbers.set_context(10, 7);
        numbers.set_context(12, 7);
        assert_eq!((numbers.find(11), numbers.of_context(7)), (Some("b"), vec!["a", "c"]));
        assert_eq!((numbers.of_port(0), numbers.of_port(1)), ([7 << 10, 0, 0, 0], [0; 4]));
        assert!(numbers.unregister(12) && !numbers.unregister(12));
        assert_eq!(numbers.of_port(0), [3 << 10, 0, 0, 0]);
        assert_eq!((numbers.find(12), numbers.of_context(7).len(), numbers.all().len()), (None, 1, 2));
    }

    #[test]
    fn numbers_name_a_port_and_go_round() {
        let numbers = Numbers::<()>::default();
        let a = numbers.take().unwrap();
        let b = numbers.take().unwrap();
        assert_eq!(a >> 8, b >> 8);
        assert_ne!(a, b);
        numbers.give(a);
        assert_ne!(numbers.take().unwrap(), a);
        let many: std::collections::HashSet<u32> = (0..600).map(|_| numbers.take().unwrap()).collect();
        assert_eq!(many.len(), 600);
    }
}
