//! One end of a measurement: a process that takes orders on its standard input and answers on its standard output.

use std::hint::black_box;
use std::io::{self, BufRead, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use nix::sched::CloneFlags;
use rustix::process::Signal;
use rustix::thread::CpuSet;

use super::dispatch::Counter;
use super::fabric::crowd::Crowd;
use super::fabric::{Libraries, Link, Listener};
use super::protocol::{
    Answer, Failure, Figure, Job, LARGEST, Many, Order, Result, Role, Transport, Wait, Work,
};
use super::raw::Raw;
use super::raw_many::RawCrowd;
use super::weight;
use super::{paths, rdma};
use crate::cli::BenchEndArgs;
use crate::libdir;

/// Runs until standard input ends, or the command does.
pub fn run(args: &BenchEndArgs) -> ExitCode {
    // Whatever an end is doing, it does not outlive the command. That one may be gone already; then input has ended too.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    crate::run::raise_descriptor_limit();
    let mut end = End::default();
    let mut started = match args.network_namespace {
        true => nix::sched::unshare(CloneFlags::CLONE_NEWNET).map_err(Failure::of("a network namespace")),
        false => Ok(()),
    };
    for line in io::stdin().lock().lines() {
        let order = line.map_err(|e| e.to_string()).and_then(|line| {
            serde_json::from_str::<Order>(&line).map_err(|e| format!("order not understood: {e}"))
        });
        let answer = std::mem::replace(&mut started, Ok(()))
            .and_then(|()| order.map_err(Failure))
            .and_then(|order| end.obey(order));
        let answer = answer.unwrap_or_else(Answer::Failed);
        let mut out = io::stdout().lock();
        let sent = serde_json::to_writer(&mut out, &answer).map_err(io::Error::from);
        if sent.and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush()).is_err() {
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}

#[derive(Default)]
struct End {
    libraries: Option<&'static Libraries>,
    listening: Option<(TcpListener, Listener)>,
    connected: Option<(Raw, Link)>,
    counter: Option<Counter>,
    crowds: Option<(RawCrowd, Crowd)>,
    /// The cores that the measuring thread had at first.
    allowed: Option<CpuSet>,
}

const NEAR: &str = "uwb0";
const FAR: &str = "uwb1";

impl End {
    fn obey(&mut self, order: Order) -> Result<Answer> {
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
                let (socket, _) = raw.accept().map_err(Failure::of("accept"))?;
                self.connected = Some((Raw::new(socket)?, rdma.accept()?));
            }
            Order::Connect { raw, rdma } => {
                let socket = TcpStream::connect(raw).map_err(Failure::of("connect"))?;
                self.connected = Some((Raw::new(socket)?, Link::connect(self.libraries()?, rdma)?));
            }
            Order::Pin { core } => self.pin(core)?,
            Order::Run { job, role } => return self.job(job, role),
            Order::Gather { listen, most } => {
                let crowd = Crowd::new(self.libraries()?, listen, most)?;
                let mut raw = RawCrowd::default();
                let port = listen.map_or(Ok(0), |address| raw.listen(address))?;
                let answer = Answer::Listening { raw: port, rdma: crowd.port };
                self.crowds = Some((raw, crowd));
                return Ok(answer);
            }
            Order::Many(many) => return self.many(many),
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

    /// For the calling thread alone: those of the library have been started before, and stay free.
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

    fn many(&mut self, many: Many) -> Result<Answer> {
        let (raws, crowd) = self.crowds.as_mut().ok_or_else(|| Failure::new("no crowd"))?;
        let control = self.connected.as_mut().map(|(raw, _)| raw);
        let control = control.ok_or_else(|| Failure::new("not connected"));
        Ok(match many {
            Many::Accept { transport, count } => {
                match transport {
                    Transport::Raw => raws.accept(count)?,
                    Transport::Uwarp => crowd.accept(count)?,
                }
                Answer::Done
            }
            Many::Connect { transport, to, count, at_once } => Answer::Figure(match transport {
                Transport::Raw => raws.connect(to, count, at_once)?,
                Transport::Uwarp => crowd.connect(to, count, at_once)?,
            }),
            Many::Leave { transport } => {
                match transport {
                    Transport::Raw => raws.close(),
                    Transport::Uwarp => drop(crowd.leave()?),
                }
                Answer::Done
            }
            Many::Disconnect { transport: Transport::Raw } => {
                raws.close();
                Answer::Done
            }
            Many::Disconnect { transport: Transport::Uwarp } => Answer::Figure(crowd.disconnect()?),
            Many::Traffic => {
                crowd.traffic()?;
                Answer::Done
            }
            Many::Weigh => Answer::Weight(weight::weigh(crowd.len() as u64)?),
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

    fn job(&mut self, job: Job, role: Role) -> Result<Answer> {
        let (raw, link) = self.connected.as_mut().ok_or_else(|| Failure::new("not connected"))?;
        let time = Duration::from_millis(job.milliseconds);
        if let Work::Path(path) = job.work {
            if role == Role::Active {
                if self.counter.is_none() {
                    self.counter = Some(Counter::new()?);
                }
                let Some(counter) = &mut self.counter else { return Ok(Answer::Done) };
                return paths::walk(link, raw, counter, path, time).map(Answer::Calls);
            }
            if let Some(work) = path.opposite() {
                passive(raw, link, Transport::Uwarp, work)?;
            }
            return Ok(Answer::Done);
        }
        match role {
            Role::Active => active(raw, link, job.transport, job.work, time).map(Answer::Figure),
            Role::Passive => passive(raw, link, job.transport, job.work).map(|()| Answer::Done),
        }
    }
}

fn active(raw: &mut Raw, link: &Link, transport: Transport, work: Work, time: Duration) -> Result<Figure> {
    match (transport, work) {
        (Transport::Raw, Work::PingPong { wait, size }) => raw.ping(size as usize, spins(wait), time),
        (Transport::Raw, Work::Stream { size, .. }) => raw.stream(size as usize, time),
        (Transport::Raw, Work::Rate { size, list, .. }) => {
            let figure = raw.stream((size * list) as usize, time)?;
            Ok(Figure {
                value: figure.value / f64::from(size),
                operations: figure.operations * u64::from(list),
                ..figure
            })
        }
        (Transport::Uwarp, Work::PingPong { wait, size }) => rdma::ping(link, raw, wait, size, time),
        (Transport::Uwarp, Work::Stream { size, window, target }) => {
            rdma::stream(link, raw, size, window, target, time)
        }
        (Transport::Uwarp, Work::Rate { size, list, depth, target }) => {
            rdma::rate(link, raw, size, (list, depth), target, time)
        }
        (_, Work::Crc { size }) => Ok(crc(size, time)),
        (_, Work::Path(_)) => Err(Failure::new("paths are counted, not timed")),
    }
}

fn passive(raw: &mut Raw, link: &Link, transport: Transport, work: Work) -> Result<()> {
    match (transport, work) {
        (Transport::Raw, Work::PingPong { wait, size }) => raw.pong(size as usize, spins(wait)),
        (Transport::Raw, Work::Stream { size, .. }) => raw.drain(size as usize),
        // A reader that knows of no messages takes what there is.
        (Transport::Raw, Work::Rate { .. }) => raw.drain(64 * 1024),
        (Transport::Uwarp, Work::PingPong { wait, size }) => rdma::pong(link, raw, wait, size),
        (Transport::Uwarp, Work::Stream { size, target, .. }) => rdma::sink(link, raw, size, target),
        (Transport::Uwarp, Work::Rate { size, list, depth, target }) => {
            rdma::count(link, raw, size, (list, depth), target)
        }
        (_, Work::Crc { .. } | Work::Path(_)) => Ok(()),
    }
}

fn spins(wait: Wait) -> bool {
    matches!(wait, Wait::Spin | Wait::Memory)
}

/// The CRC over bytes that stay in cache.
fn crc(size: u32, time: Duration) -> Figure {
    let bytes: Vec<u8> = (0..size.min(LARGEST)).map(|i| i as u8).collect();
    let start = Instant::now();
    let mut operations = 0_u64;
    loop {
        black_box(uwarp_wire::crc::crc32c(black_box(&bytes)));
        operations += 1;
        let elapsed = start.elapsed();
        if elapsed >= time {
            let value = operations as f64 * bytes.len() as f64 / elapsed.as_secs_f64();
            return Figure { value, p99: None, operations };
        }
    }
}

/// Takes our device of the pair into use; which of the two it is, its name says.
fn address_device(address: IpAddr, mtu: u32) -> Result<()> {
    let device = if ip(&["link", "show", NEAR]).is_ok() { NEAR } else { FAR };
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
