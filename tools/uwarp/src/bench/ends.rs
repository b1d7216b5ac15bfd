//! The two ends as the command handles them: it starts them, connects them, sends them orders, and ends them
//! by their process ids.

use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use serde::Serialize;
use uwarp_bottleneck::{Bottleneck, Shape};

use super::MTU;
use super::protocol::{Answer, Calls, Carrier, Failure, Figure, Job, Order, Result, Role, Sockets};

/// Where the two ends are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Loopback,
    /// Two network namespaces with a pair of Ethernet devices between them.
    Namespaces {
        mtu: u32,
    },
}

/// What carries the messages between the ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Link {
    Tcp,
    Memory,
    Udp,
    /// Connections over reliable datagrams.
    Rd,
}

impl Link {
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Memory => "memory",
            Self::Udp => "UDP",
            Self::Rd => "rd",
        }
    }

    /// The setting that demands it of the library.
    pub fn setting(self) -> (&'static str, OsString) {
        let name = match self {
            Self::Memory => "memory",
            Self::Rd => "rd",
            Self::Tcp | Self::Udp => "tcp",
        };
        ("UWARP_LINK", name.into())
    }
}

/// What the two ends share their processors with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Setting {
    /// Nothing that the command knows of.
    #[default]
    Quiet,
    /// All threads of both ends run on one processor.
    OneProcessor,
    /// A loop that computes runs for each processor.
    Crowded,
    /// Programs and library are emulated by qemu-user, so each of their instructions takes many; the system's
    /// do not.
    Emulated,
    /// Under callgrind, which counts instructions. `VALGRIND_OPTS` has its options.
    Counted,
}

/// Two connected processes.
pub struct Ends {
    active: End,
    passive: End,
    _loops: Vec<Loop>,
    /// Where the passive end listens.
    pub address: IpAddr,
}

/// Added to the time that an order takes by itself.
pub const PATIENCE: Duration = Duration::from_secs(15);
const VALGRIND: &str = "valgrind";

impl Ends {
    /// Starts both with `environment` added to our own, and connects them over raw TCP and over uwarp.
    pub fn start(place: Place, environment: &[(&'static str, OsString)], setting: Setting) -> Result<Ends> {
        let mut ends = Ends::apart(place, environment, setting)?;
        if setting == Setting::OneProcessor {
            // Before the library starts its threads, which then run where this one does.
            let there = Order::Pin { core: Some(0) };
            ends.both(&there, &there, PATIENCE)?;
        }
        ends.connect()?;
        Ok(ends)
    }

    /// Starts both in network namespaces of their own, with a path between them, and connects them.
    pub fn along(
        shapes: [Shape; 2],
        seed: u64,
        environment: &[(&'static str, OsString)],
    ) -> Result<(Ends, Bottleneck)> {
        let mut ends = Ends::homes([Home::New; 2], environment, Setting::Quiet)?;
        // Each has its namespace when it answers.
        ends.active.request(&Order::Start, PATIENCE)?;
        ends.passive.request(&Order::Start, PATIENCE)?;
        let [active, passive] = ends.processes().map(|id| File::open(format!("/proc/{id}/ns/net")));
        let opened = active.and_then(|active| Ok([active, passive?]));
        let namespaces = opened.map_err(Failure::of("a network namespace"))?;
        let path = Bottleneck::between(namespaces, shapes, seed)
            .map_err(Failure::of("a TUN device (/dev/net/tun) in a network namespace"))?;
        ends.address_devices(MTU)?;
        ends.connect()?;
        Ok((ends, path))
    }

    /// Starts two more where these are, and connects them.
    pub fn beside(&self, environment: &[(&'static str, OsString)]) -> Result<Ends> {
        let mut ends = Ends::homes(self.processes().map(Home::Of), environment, Setting::Quiet)?;
        ends.address = self.address;
        ends.connect()?;
        Ok(ends)
    }

    /// Lets the connections over raw TCP use this congestion control.
    pub fn set_congestion(&mut self, control: &str) -> Result<()> {
        let order = Order::Congestion { control: control.to_owned() };
        self.both(&order, &order, PATIENCE).map(drop)
    }

    fn connect(&mut self) -> Result<()> {
        let address = self.address;
        let listening = self.passive.request(&Order::Listen { address }, PATIENCE)?;
        let Answer::Listening { raw, rdma } = listening else { return Err(out_of_turn()) };
        self.passive.send(&Order::Accept)?;
        let order =
            Order::Connect { raw: SocketAddr::new(address, raw), rdma: SocketAddr::new(address, rdma) };
        // The error of the side that failed is more useful than the report that the other side waits.
        self.active.request(&order, PATIENCE)?;
        self.passive.receive(PATIENCE).map(drop)
    }

    /// Starts both for a program of sockets, and connects them as it does.
    pub fn with_sockets(
        place: Place,
        environment: &[(&'static str, OsString)],
        carrier: Carrier,
        setting: Setting,
    ) -> Result<Ends> {
        let mut ends = Ends::apart(place, environment, setting)?;
        let address = ends.address;
        let listen = Order::Sockets(Sockets::Listen { carrier, address });
        let Answer::Listening { raw, .. } = ends.passive.request(&listen, PATIENCE)? else {
            return Err(out_of_turn());
        };
        let to = SocketAddr::new(address, raw);
        let connect = Order::Sockets(Sockets::Connect { carrier, to });
        ends.both(&Order::Sockets(Sockets::Accept), &connect, PATIENCE)?;
        Ok(ends)
    }

    /// Two processes that do nothing: for programs that run in their namespaces.
    pub fn unconnected(place: Place) -> Result<Ends> {
        Ends::apart(place, &[], Setting::Quiet)
    }

    /// The passive end's.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Not connected yet.
    fn apart(place: Place, environment: &[(&'static str, OsString)], setting: Setting) -> Result<Ends> {
        match place {
            Place::Loopback => Ends::homes([Home::Here; 2], environment, setting),
            Place::Namespaces { mtu } => {
                let mut ends = Ends::homes([Home::New; 2], environment, setting)?;
                ends.join(mtu)?;
                Ok(ends)
            }
        }
    }

    fn homes(
        [active, passive]: [Home; 2],
        environment: &[(&'static str, OsString)],
        setting: Setting,
    ) -> Result<Ends> {
        let loops = if setting == Setting::Crowded { Loop::for_each_processor()? } else { Vec::new() };
        Ok(Ends {
            active: End::start(active, environment, setting)?,
            passive: End::start(passive, environment, setting)?,
            _loops: loops,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
        })
    }

    /// Gives the measuring thread at each end a core of its own, or leaves both to the system.
    pub fn pin(&mut self, pin: bool) -> Result<()> {
        self.active.request(&Order::Pin { core: pin.then_some(0) }, PATIENCE)?;
        self.passive.request(&Order::Pin { core: pin.then_some(1) }, PATIENCE)?;
        Ok(())
    }

    /// The namespaces have no names and go away with their processes, and the devices with them.
    fn join(&mut self, mtu: u32) -> Result<()> {
        // The peer must have its namespace before a device can be put there.
        self.passive.request(&Order::Start, PATIENCE)?;
        self.active.request(&Order::Pair { peer: self.passive.child.id() }, PATIENCE)?;
        self.address_devices(mtu)
    }

    fn address_devices(&mut self, mtu: u32) -> Result<()> {
        let [near, far] = [1, 2].map(|host| IpAddr::V4(Ipv4Addr::new(10, 77, 7, host)));
        self.passive.request(&Order::Address { address: far, mtu }, PATIENCE)?;
        self.active.request(&Order::Address { address: near, mtu }, PATIENCE)?;
        self.address = far;
        Ok(())
    }

    /// Runs a job and returns what the active end measured.
    pub fn measure(&mut self, job: Job) -> Result<Figure> {
        match self.run(job)? {
            Answer::Figure(figure) => Ok(figure),
            _ => Err(out_of_turn()),
        }
    }

    pub fn count(&mut self, job: Job) -> Result<Calls> {
        match self.run(job)? {
            Answer::Calls(calls) => Ok(calls),
            _ => Err(out_of_turn()),
        }
    }

    fn run(&mut self, job: Job) -> Result<Answer> {
        let patience = PATIENCE + Duration::from_millis(job.milliseconds);
        let passive = Order::Run { job, role: Role::Passive };
        self.both(&passive, &Order::Run { job, role: Role::Active }, patience).map(|(_, active)| active)
    }

    /// Their process ids: the active end's and the passive end's.
    pub fn processes(&self) -> [u32; 2] {
        [self.active.child.id(), self.passive.child.id()]
    }

    /// Gives an order to each end; their answers, the passive end's first.
    pub fn both(&mut self, passive: &Order, active: &Order, patience: Duration) -> Result<(Answer, Answer)> {
        self.passive.send(passive)?;
        self.active.send(active)?;
        let start = Instant::now();
        // The passive end's error first: the active one only waits then.
        let mut passive = None;
        let active = loop {
            if passive.is_none() && self.passive.readable(Duration::ZERO)? {
                passive = Some(self.passive.receive(Duration::ZERO)?);
            }
            if self.active.readable(Duration::from_millis(100))? {
                break self.active.receive(Duration::ZERO)?;
            }
            if start.elapsed() > patience {
                return Err(Failure(format!(
                    "a measuring process did not answer within {} s",
                    patience.as_secs()
                )));
            }
        };
        let passive = match passive {
            Some(passive) => passive,
            None => self.passive.receive(PATIENCE)?,
        };
        Ok((passive, active))
    }
}

struct End {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

/// Where a process of ours lives.
#[derive(Clone, Copy)]
enum Home {
    Here,
    /// In a network namespace of its own.
    New,
    /// In that of another process.
    Of(u32),
}

impl End {
    fn start(home: Home, environment: &[(&'static str, OsString)], setting: Setting) -> Result<End> {
        let executable = std::env::current_exe().map_err(Failure::of("cannot find my own executable"))?;
        let emulator = format!("qemu-{}", std::env::consts::ARCH);
        let mut command = match setting {
            Setting::Emulated => {
                let mut command = Command::new(&emulator);
                command.arg(executable);
                command
            }
            Setting::Counted => {
                let mut command = Command::new(VALGRIND);
                command.args(["--tool=callgrind", "-q", "--fair-sched=yes"]).arg(executable);
                command
            }
            _ => Command::new(executable),
        };
        command.arg("bench-end").stdin(Stdio::piped()).stdout(Stdio::piped());
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        match home {
            Home::Here => {}
            Home::New => _ = command.arg("--network-namespace"),
            Home::Of(process) => _ = command.arg("--namespace-of").arg(process.to_string()),
        }
        let mut child = command.spawn().map_err(|error| match setting {
            Setting::Emulated if error.kind() == std::io::ErrorKind::NotFound => {
                Failure(format!("there is no {emulator} here: install the package qemu-user"))
            }
            Setting::Counted if error.kind() == std::io::ErrorKind::NotFound => {
                Failure(format!("there is no {VALGRIND} here: install the package valgrind"))
            }
            _ => Failure(format!("cannot start a measuring process: {error}")),
        })?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(orders), Some(answers)) => Ok(End { child, orders, answers: BufReader::new(answers) }),
            _ => Err(Failure::new("cannot start a measuring process: it has no pipes")),
        }
    }

    fn request(&mut self, order: &Order, patience: Duration) -> Result<Answer> {
        self.send(order)?;
        self.receive(patience)
    }

    fn send(&mut self, order: &Order) -> Result<()> {
        let mut line = serde_json::to_vec(order).map_err(Failure::of("order"))?;
        line.push(b'\n');
        self.orders.write_all(&line).map_err(Failure::of("a measuring process has ended"))
    }

    fn receive(&mut self, patience: Duration) -> Result<Answer> {
        if !self.readable(patience)? {
            return Err(Failure(format!(
                "a measuring process did not answer within {} s",
                patience.as_secs()
            )));
        }
        let mut line = String::new();
        // Answers are written at once, so a readable pipe has a whole line or its end.
        let length =
            self.answers.read_line(&mut line).map_err(Failure::of("a measuring process's answer"))?;
        if length == 0 {
            let status = self.child.wait().map_err(Failure::of("a measuring process's status"))?;
            return Err(Failure(format!("a measuring process has ended with {status}")));
        }
        match serde_json::from_str(&line).map_err(Failure::of("a measuring process's answer"))? {
            Answer::Failed(failure) => Err(failure),
            answer => Ok(answer),
        }
    }

    fn readable(&self, patience: Duration) -> Result<bool> {
        if !self.answers.buffer().is_empty() {
            return Ok(true);
        }
        let mut fds = [PollFd::new(self.answers.get_ref(), PollFlags::IN)];
        let patience = Timespec::try_from(patience).map_err(Failure::of("time"))?;
        match rustix::event::poll(&mut fds, Some(&patience)) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(Failure(format!("a measuring process's answer: {error}"))),
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // It may be in the middle of a spin. Fails only when it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process that computes, until this is dropped; not for ever if that does not happen.
struct Loop(Child);

impl Loop {
    fn for_each_processor() -> Result<Vec<Loop>> {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        (0..processors).map(|_| Loop::start()).collect()
    }

    fn start() -> Result<Loop> {
        // The limit of processor time ends it in any case.
        let mut command = Command::new("sh");
        command.args(["-c", "ulimit -t 600; while :; do :; done"]).stdin(Stdio::null());
        command.spawn().map(Loop).map_err(Failure::of("cannot start a loop that computes"))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        // Fails only when it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn out_of_turn() -> Failure {
    Failure::new("a measuring process gave the wrong kind of answer")
}
