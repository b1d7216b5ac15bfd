//! One end of a measurement: a process that reads orders from its standard input and answers on its standard
//! output.

use std::io::{self, BufRead, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::process::{Command, ExitCode};
use std::time::Duration;

use nix::sched::CloneFlags;
use rustix::process::Signal;
use rustix::thread::CpuSet;

use super::dispatch::Counter;
use super::fabric::by_number::ByNumber;
use super::fabric::crowd::Crowd;
use super::fabric::datagram::{Peers, Service};
use super::fabric::{Libraries, Link, Listener};
use super::instructions::{callgrind, turns};
use super::protocol::{
    Answer, Counted, Failure, Figure, Job, Many, Order, Over, Pattern, Result, Role, Sockets, Wait, Work,
};
use super::raw::{Raw, Raws};
use super::raw_many::RawCrowd;
use super::raw_udp::RawUdp;
use super::sockets::calls;
use super::ways::Way;
use super::{datagrams, eventfds, flow, fused, paths, rdma, usage};
use crate::cli::BenchEndArgs;
use crate::libdir;

/// Runs until standard input ends, or the command does.
pub fn run(args: &BenchEndArgs) -> ExitCode {
    // An end must not outlive the command. If the command has ended already, standard input has ended, too.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    crate::run::raise_descriptor_limit();
    let mut end = End::default();
    let mut started = match (args.network_namespace, args.namespace_of) {
        (true, _) => {
            nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(Failure::of("a network namespace"))
        }
        (false, Some(process)) => join(process),
        (false, None) => Ok(()),
    };
    for line in io::stdin().lock().lines() {
        let order = line
            .map_err(|e| e.to_string())
            .and_then(|line| serde_json::from_str::<Order>(&line).map_err(|e| format!("invalid order: {e}")));
        let answer = std::mem::replace(&mut started, Ok(()))
            .and_then(|()| order.map_err(Failure))
            .and_then(|order| end.execute(order));
        let answer = answer.unwrap_or_else(Answer::Failed);
        let mut out = io::stdout().lock();
        let sent = serde_json::to_writer(&mut out, &answer).map_err(io::Error::from);
        if sent.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

/// Goes into the network namespace of another end.
fn join(process: u32) -> Result<()> {
    let there = std::fs::File::open(format!("/proc/{process}/ns/net"));
    let there = there.map_err(Failure::of("the other end's network namespace"))?;
    nix::sched::setns(there, CloneFlags::CLONE_NEWNET).map_err(Failure::of("setns"))
}

#[derive(Default)]
struct End {
    libraries: Option<&'static Libraries>,
    listening: Option<(TcpListener, Listener)>,
    connected: Option<(Raws, Link)>,
    /// Made when they are first needed, so that other figures are measured in a process without them.
    raw_udp: Option<RawUdp>,
    datagrams: Option<Link>,
    reliable: Option<Link>,
    peers: Option<Peers>,
    counter: Option<Counter>,
    crowds: Option<(RawCrowd, Crowd)>,
    by_number: Option<ByNumber>,
    sockets: (Option<calls::Listener>, Option<calls::Connection>),
    /// The cores that the measuring thread had at first.
    allowed: Option<CpuSet>,
}

const NEAR: &str = "uwb0";
const FAR: &str = "uwb1";

impl End {
    fn execute(&mut self, order: Order) -> Result<Answer> {
        match order {
            Order::Start => {}
            Order::Pair { peer } => {
                let peer = peer.to_string();
                ip(&["link", "add", NEAR, "type", "veth", "peer", "name", FAR, "netns", &peer])?;
            }
            Order::Address { address, mtu } => address_device(address, mtu)?,
            Order::Listen { address } => {
                let raw = TcpListener::bind((address, 0)).map_err(Failure::of("listen"))?;
                let rdma = Listener::new(self.libraries()?, address)?;
                let port = raw.local_addr().map_err(Failure::of("listen"))?.port();
                let answer = Answer::Listening { raw: port, rdma: rdma.port };
                self.listening = Some((raw, rdma));
                return Ok(answer);
            }
            Order::Accept => {
                let (raw, rdma) = self.listening.take().ok_or_else(|| Failure::new("not listening"))?;
                let raws = Raws::new(|| Ok(raw.accept().map_err(Failure::of("accept"))?.0))?;
                self.connected = Some((raws, rdma.accept()?));
            }
            Order::Connect { raw, rdma } => {
                let raws = Raws::new(|| TcpStream::connect(raw).map_err(Failure::of("connect")))?;
                self.connected = Some((raws, Link::connect(self.libraries()?, rdma)?));
            }
            Order::Pin { core } => self.pin(core)?,
            Order::Congestion { control } => {
                let (raws, _) = self.connected.as_ref().ok_or_else(|| Failure::new("not connected"))?;
                raws.set_congestion(&control)?;
            }
            Order::Run { job, role } => return self.job(job, role),
            Order::Gather { listen, most, shared_receives } => {
                let crowd = Crowd::new(self.libraries()?, listen, most, shared_receives)?;
                let mut raw = RawCrowd::default();
                let port = listen.map_or(Ok(0), |address| raw.listen(address))?;
                let answer = Answer::Listening { raw: port, rdma: crowd.port };
                self.crowds = Some((raw, crowd));
                return Ok(answer);
            }
            Order::Many(many) => return self.many(many),
            Order::Peers { count, role, most, reliable } => {
                let service = if reliable { Service::Reliable } else { Service::Unreliable };
                return self.peers((count as usize, most as usize), role, service);
            }
            Order::Sockets(order) => return self.sockets(order),
            Order::Count { what, role, messages } => self.count(what, role, messages)?,
            Order::CountAll { begin: true } => callgrind::begin(),
            Order::CountAll { begin: false } => callgrind::end(),
        }
        Ok(Answer::Done)
    }

    fn libraries(&mut self) -> Result<&'static Libraries> {
        if self.libraries.is_none() {
            let directory = libdir::find().map_err(|reason| Failure(reason.to_string()))?;
            self.libraries = Some(Libraries::load(&directory)?);
        }
        self.libraries.ok_or_else(|| Failure::new("no library"))
    }

    /// For the calling thread only: the library's threads have been started before, and stay free.
    fn pin(&mut self, core: Option<usize>) -> Result<()> {
        let allowed = match self.allowed {
            Some(allowed) => allowed,
            None => rustix::thread::sched_getaffinity(None).map_err(Failure::of("sched_getaffinity"))?,
        };
        self.allowed = Some(allowed);
        let cores: Vec<_> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        let wanted = core.and_then(|core| cores.get(core % cores.len().max(1)));
        let wanted = wanted.map_or(allowed, |&core| {
            let mut one = CpuSet::new();
            one.set(core);
            one
        });
        rustix::thread::sched_setaffinity(None, &wanted).map_err(Failure::of("sched_setaffinity"))
    }

    fn bring_up(&mut self, count: u32, role: Role) -> Result<Figure> {
        let libraries = self.libraries()?;
        let pairs = match self.by_number.take() {
            Some(pairs) => pairs,
            None => ByNumber::new(libraries, count)?,
        };
        let (raws, _) = self.connected.as_mut().ok_or_else(|| Failure::new("not connected"))?;
        self.by_number.insert(pairs).bring_up(&mut raws.system, count, role == Role::Active)
    }

    fn many(&mut self, many: Many) -> Result<Answer> {
        if let Many::BringUp { count, role } = many {
            return self.bring_up(count, role).map(Answer::Figure);
        }
        let (raws, crowd) = self.crowds.as_mut().ok_or_else(|| Failure::new("no crowd"))?;
        let control = self.connected.as_mut().map(|(raws, _)| &mut raws.system);
        let control = control.ok_or_else(|| Failure::new("not connected"));
        Ok(match many {
            Many::Accept { over, count } => {
                match over {
                    Over::Raw(way) => raws.accept(count, way)?,
                    Over::Uwarp => crowd.accept(count)?,
                }
                Answer::Done
            }
            Many::Connect { over, to, count, at_once } => Answer::Figure(match over {
                Over::Raw(way) => raws.connect(to, count, at_once, way)?,
                Over::Uwarp => crowd.connect(to, count, at_once)?,
            }),
            Many::BringUp { .. } => Answer::Done,
            Many::Leave { over } => {
                match over {
                    Over::Raw(_) => raws.close(),
                    Over::Uwarp => drop(crowd.leave()?),
                }
                Answer::Done
            }
            Many::Disconnect { over: Over::Raw(_) } => {
                raws.close();
                Answer::Done
            }
            Many::Disconnect { over: Over::Uwarp } => Answer::Figure(crowd.disconnect()?),
            Many::Traffic => {
                crowd.traffic()?;
                Answer::Done
            }
            Many::Usage => Answer::Usage(usage::measure(crowd.len() as u64)?),
            Many::Answer => {
                crowd.answer(control?)?;
                Answer::Done
            }
            Many::Ping { one, milliseconds } => {
                Answer::Figure(crowd.ping(control?, one, Duration::from_millis(milliseconds))?)
            }
            Many::Stream { one, milliseconds } => {
                Answer::Figure(crowd.stream(control?, one, Duration::from_millis(milliseconds))?)
            }
            Many::Serve { count, milliseconds } => {
                Answer::Spread(crowd.serve(control?, count, Duration::from_millis(milliseconds))?)
            }
        })
    }

    fn sockets(&mut self, order: Sockets) -> Result<Answer> {
        let (listener, connection) = &mut self.sockets;
        match order {
            Sockets::Listen { carrier, address } => {
                let raw = listener.insert(calls::Listener::new(carrier, address)?).port;
                return Ok(Answer::Listening { raw, rdma: 0 });
            }
            Sockets::Accept => {
                let listener = listener.take().ok_or_else(|| Failure::new("not listening"))?;
                *connection = Some(listener.accept()?);
            }
            Sockets::Connect { carrier, to } => {
                *connection = Some(calls::Connection::connect(carrier, to)?);
            }
            Sockets::Traffic { pattern, size, spin, role, milliseconds } => {
                let connection = connection.as_mut().ok_or_else(|| Failure::new("not connected"))?;
                let (size, time) = (size as usize, Duration::from_millis(milliseconds));
                let figure = match pattern {
                    Pattern::PingPong => connection.ping(size, spin, role, time)?,
                    Pattern::Stream => connection.stream(size, spin, role, time)?,
                };
                return Ok(figure.map_or(Answer::Done, Answer::Figure));
            }
        }
        Ok(Answer::Done)
    }

    fn count(&mut self, what: Counted, role: Role, messages: u32) -> Result<()> {
        let (raws, link) = self.connected.as_mut().ok_or_else(|| Failure::new("not connected"))?;
        let raw = &mut raws.system;
        let own = match what {
            Counted::Datagram => Some((&mut self.datagrams, Service::Unreliable)),
            Counted::Reliable => Some((&mut self.reliable, Service::Reliable)),
            _ => None,
        };
        let link = match own {
            Some((own, service)) => match own {
                Some(own) => &*own,
                none => none.insert(link.datagrams(service, raw)?),
            },
            None => link,
        };
        let crowd = self.crowds.as_ref().map(|(_, crowd)| crowd);
        turns::count((link, crowd), raw, what, role, messages)
    }

    fn peers(&mut self, (count, most): (usize, usize), role: Role, service: Service) -> Result<Answer> {
        let (raws, link) = self.connected.as_mut().ok_or_else(|| Failure::new("not connected"))?;
        let raw = &mut raws.system;
        let own = if service == Service::Reliable { &mut self.reliable } else { &mut self.datagrams };
        if own.is_none() {
            *own = Some(link.datagrams(service, raw)?);
        }
        let Some(link) = own else { return Ok(Answer::Done) };
        let peers = self.peers.get_or_insert_with(|| Peers::with_room(most));
        match role {
            Role::Active => {
                link.visit_peers(raw, peers, count)?;
                Ok(Answer::Usage(usage::measure(count as u64)?))
            }
            Role::Passive => {
                link.serve_peers(raw, peers, count, service)?;
                Ok(Answer::Usage(usage::measure(count as u64)?))
            }
        }
    }

    /// Traffic of datagrams; the ends exchange their addresses over `raw`.
    fn datagram_job(&mut self, job: Job, role: Role) -> Result<Answer> {
        let (raws, link) = self.connected.as_mut().ok_or_else(|| Failure::new("not connected"))?;
        let raw = &mut raws.system;
        let time = Duration::from_millis(job.milliseconds);
        match job.over {
            Over::Raw(way) => {
                if self.raw_udp.is_none() {
                    self.raw_udp = Some(RawUdp::new(raw, link.datagram_address(raw)?)?);
                }
                let Some(udp) = &self.raw_udp else { return Ok(Answer::Done) };
                raw_datagrams(udp, raw, way, job.work, role, time)
            }
            Over::Uwarp => {
                let reliable = matches!(job.work, Work::Reliable { .. } | Work::ReliableStream { .. });
                let own = if reliable { &mut self.reliable } else { &mut self.datagrams };
                if own.is_none() {
                    let service = if reliable { Service::Reliable } else { Service::Unreliable };
                    *own = Some(link.datagrams(service, raw)?);
                }
                let Some(link) = own else { return Ok(Answer::Done) };
                let spin = Wait::Spin;
                match (job.work, role) {
                    (Work::Datagram { size } | Work::Reliable { size }, Role::Active) => {
                        rdma::ping(link, raw, spin, size, time).map(Answer::Figure)
                    }
                    (Work::Datagram { size } | Work::Reliable { size }, Role::Passive) => {
                        rdma::pong(link, raw, spin, size).map(|()| Answer::Done)
                    }
                    (Work::Datagrams { size, list, depth }, Role::Active) => {
                        datagrams::stream(link, raw, size, (list, depth), time).map(Answer::Figure)
                    }
                    (Work::ReliableStream { size, window, wait }, Role::Active) => {
                        datagrams::reliable_stream(link, raw, (size, window, wait), time).map(Answer::Figure)
                    }
                    (Work::ReliableStream { wait, .. }, Role::Passive) => {
                        datagrams::take_all(link, raw, wait).map(|()| Answer::Done)
                    }
                    _ => datagrams::sink(link, raw).map(|()| Answer::Done),
                }
            }
        }
    }

    fn job(&mut self, job: Job, role: Role) -> Result<Answer> {
        if job.work.is_of_datagrams() {
            return self.datagram_job(job, role);
        }
        let (raws, link) = self.connected.as_mut().ok_or_else(|| Failure::new("not connected"))?;
        let time = Duration::from_millis(job.milliseconds);
        if let (Work::Path(path), Role::Active) = (job.work, role) {
            if self.counter.is_none() {
                self.counter = Some(Counter::new()?);
            }
            let Some(counter) = &mut self.counter else { return Ok(Answer::Done) };
            return paths::walk(link, &mut raws.system, counter, path, time).map(Answer::Calls);
        }
        match (job.over, role) {
            (Over::Raw(way), Role::Active) => raw_active(raws, way, job.work, time).map(Answer::Figure),
            (Over::Raw(way), Role::Passive) => raw_passive(raws, way, job.work).map(|()| Answer::Done),
            (Over::Uwarp, Role::Active) => active(raws, link, job.work, time).map(Answer::Figure),
            (Over::Uwarp, Role::Passive) => passive(raws, link, job.work).map(|()| Answer::Done),
        }
    }
}

fn raw_datagrams(
    udp: &RawUdp,
    raw: &mut Raw,
    way: Way,
    work: Work,
    role: Role,
    time: Duration,
) -> Result<Answer> {
    match (work, way, role) {
        (Work::Datagram { size } | Work::Reliable { size }, Way::Wait(wait), Role::Active) => {
            raw.receive_number()?;
            udp.ping(size as usize, wait, time).map(Answer::Figure)
        }
        (Work::Datagram { size } | Work::Reliable { size }, Way::Wait(wait), Role::Passive) => {
            udp.pong(raw, size as usize, wait).map(|()| Answer::Done)
        }
        (Work::ReliableStream { .. }, Way::Datagrams { send, cut, .. }, Role::Active) => {
            let (size, list) = udp.packets(send);
            let figure = udp.stream(raw, (size, list), cut, time)?;
            Ok(Answer::Figure(Figure { value: figure.value * size as f64, ..figure }))
        }
        (Work::ReliableStream { .. }, Way::Datagrams { receive, joined, wait, .. }, Role::Passive) => {
            udp.drain(raw, receive as usize, joined, wait).map(|()| Answer::Done)
        }
        (Work::Datagrams { size, .. }, Way::Datagrams { send, cut, .. }, Role::Active) => {
            udp.stream(raw, (size as usize, send as usize), cut, time).map(Answer::Figure)
        }
        (Work::Datagrams { .. }, Way::Datagrams { receive, joined, wait, .. }, Role::Passive) => {
            udp.drain(raw, receive as usize, joined, wait).map(|()| Answer::Done)
        }
        _ => Err(Failure::new("raw UDP has no way to do this")),
    }
}

fn raw_active(raws: &mut Raws, way: Way, work: Work, time: Duration) -> Result<Figure> {
    let raw = raws.of(way);
    match (work, way) {
        (Work::PingPong { size, .. }, Way::Wait(wait)) => raw.ping(size as usize, wait, time),
        (Work::PingPong { .. }, Way::Eventfds) => eventfds::ping(raw, time),
        (Work::Transaction { verb, size }, Way::Wait(wait)) => raw.request(verb, size as usize, wait, time),
        (Work::Stream { .. }, Way::Calls { send, .. }) => raw.stream(send as usize, time),
        (Work::Rate { size, .. }, Way::Calls { send, .. }) => {
            let figure = raw.stream(send as usize, time)?;
            let operations = figure.operations * u64::from(send / size);
            Ok(Figure { value: figure.value / f64::from(size), operations, ..figure })
        }
        _ => Err(not_for_raw()),
    }
}

fn raw_passive(raws: &mut Raws, way: Way, work: Work) -> Result<()> {
    let raw = raws.of(way);
    match (work, way) {
        (Work::PingPong { size, .. }, Way::Wait(wait)) => raw.pong(size as usize, wait),
        (Work::PingPong { .. }, Way::Eventfds) => eventfds::pong(raw),
        (Work::Transaction { verb, size }, Way::Wait(wait)) => raw.respond(verb, size as usize, wait),
        (Work::Stream { .. } | Work::Rate { .. }, Way::Calls { receive, wait, .. }) => {
            raw.drain(receive as usize, wait)
        }
        _ => Err(not_for_raw()),
    }
}

fn active(raws: &mut Raws, link: &Link, work: Work, time: Duration) -> Result<Figure> {
    let raw = &mut raws.system;
    match work {
        Work::PingPong { wait, size } => rdma::ping(link, raw, wait, size, time),
        Work::Transaction { verb, size } => rdma::request(link, raw, verb, size, time),
        Work::Stream { flow, target } => flow::stream(link, raw, flow, target, time),
        Work::Rate { size, list, depth, target } => flow::rate(link, raw, size, (list, depth), target, time),
        Work::CopyCrc { size } => fused::measure(size, time),
        Work::Datagram { .. }
        | Work::Reliable { .. }
        | Work::ReliableStream { .. }
        | Work::Datagrams { .. } => Err(Failure::new("datagrams are not a connection's")),
        Work::Path(_) => Err(Failure::new("paths are counted, not timed")),
    }
}

fn passive(raws: &mut Raws, link: &Link, work: Work) -> Result<()> {
    let raw = &mut raws.system;
    match work {
        Work::PingPong { wait, size } => rdma::pong(link, raw, wait, size),
        Work::Transaction { verb, size } => rdma::respond(link, raw, verb, size),
        Work::Stream { flow, target } => flow::sink(link, raw, flow, target),
        Work::Rate { size, list, depth, target } => flow::count(link, raw, size, (list, depth), target),
        Work::CopyCrc { .. }
        | Work::Datagram { .. }
        | Work::Reliable { .. }
        | Work::ReliableStream { .. }
        | Work::Datagrams { .. } => Ok(()),
        Work::Path(path) => path.opposite().map_or(Ok(()), |work| passive(raws, link, work)),
    }
}

fn not_for_raw() -> Failure {
    Failure::new("raw TCP has no way to do this")
}

/// Configures our device: one of the pair, whose name shows which, or that of a path.
fn address_device(address: IpAddr, mtu: u32) -> Result<()> {
    let devices = [NEAR, FAR, uwarp_bottleneck::DEVICE];
    let device = devices.into_iter().find(|device| ip(&["link", "show", device]).is_ok());
    let device = device.ok_or_else(|| Failure::new("there is no device to give an address"))?;
    let (mtu, address) = (mtu.to_string(), format!("{address}/24"));
    ip(&["address", "add", &address, "dev", device])?;
    ip(&["link", "set", device, "mtu", &mtu, "up"])?;
    ip(&["link", "set", "lo", "up"])
}

fn ip(arguments: &[&str]) -> Result<()> {
    let output =
        Command::new("ip").args(arguments).output().map_err(Failure::of("ip (of package iproute2)"))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(Failure(format!("ip {}: {}", arguments.join(" "), words.trim())))
}
