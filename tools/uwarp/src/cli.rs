//! The command line, and the environment variable behind each option of `uwarp run`.
//!
//! `--help` and the man page are made from this file. The library itself reads only the environment, so that
//! it can be used without the command.

use std::ffi::OsString;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::LazyLock;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Where the library is, for the command; the library does not read it.
pub const LIBDIR_VARIABLE: &str = "UWARP_LIBDIR";

/// RDMA on any Linux box: a software RNIC in a library
#[derive(Parser)]
#[command(name = "uwarp", version = env!("UWARP_VERSION"), long_version = LONG_VERSION.as_str())]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

static LONG_VERSION: LazyLock<String> = LazyLock::new(|| {
    format!(
        "{}\nwire: iWARP over TCP (RFC 5040, 5041, 5044, 6581), MPA revisions 1 and 2; \
         between uwarp ends protocol version {}",
        env!("UWARP_VERSION"),
        uwarp_proto::setup::peer::VERSION
    )
});

#[derive(Subcommand)]
pub enum Command {
    /// Run an unmodified RDMA program over uwarp
    #[command(override_usage = "uwarp run [OPTIONS] -- PROGRAM [ARGS]...")]
    Run(RunArgs),
    /// Run an MPI program over uwarp: set what its MPI needs, and say what that is
    #[command(override_usage = "uwarp mpi [OPTIONS] -- mpirun [ARGS]...")]
    Mpi(MpiArgs),
    /// Show the devices that programs see under uwarp
    Devices(DevicesArgs),
    /// Find what would stop a program from running over uwarp, and suggest a remedy
    Doctor(DoctorArgs),
    /// Show what your processes do over uwarp: traffic of each queue pair, stalls, retransmissions, errors
    Stat(StatArgs),
    /// Measure uwarp, beside raw TCP sockets in the same run
    Bench(BenchArgs),
    /// One end of a measurement; `uwarp bench` starts two
    #[command(hide = true)]
    BenchEnd(BenchEndArgs),
    /// Fill a directory with the files that show the device; `uwarp run --files on` starts it
    #[command(hide = true)]
    Files(FilesArgs),
    /// Print the man page as roff
    #[command(hide = true)]
    Man,
}

#[derive(Args)]
pub struct RunArgs {
    /// Say on standard error what the program sees, and why
    #[arg(short, long)]
    pub verbose: bool,
    #[command(flatten)]
    pub device: DeviceOptions,
    #[command(flatten)]
    pub options: RunOptions,
    /// The program and its arguments; write `--` before it, so that its options are not taken for uwarp's
    #[arg(value_name = "PROGRAM", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub program: Vec<OsString>,
}

#[derive(Args)]
pub struct MpiArgs {
    /// How messages travel [default: rc, or ofi where the MPI has neither UCX nor a way of its own]
    #[arg(long, value_name = "HOW")]
    pub transport: Option<Transport>,
    /// Let ranks of one host use shared memory; off sends their messages over uwarp, too
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub shared_memory: Switch,
    /// Print what would be set and run, and do not run it
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub device: DeviceOptions,
    #[command(flatten)]
    pub options: RunOptions,
    /// The launcher of Open MPI, MPICH, Intel MPI or MVAPICH2 and its arguments; write `--` before it
    #[arg(value_name = "LAUNCHER", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub program: Vec<OsString>,
}

/// `--transport`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// UCX with connected queue pairs; MVAPICH2's own
    Rc,
    /// UCX with datagrams only: the memory does not grow with the number of ranks; MVAPICH2's own
    Ud,
    /// MVAPICH2 with datagrams, and connected queue pairs for ranks that send each other large messages
    Hybrid,
    /// libfabric with connected queue pairs
    Ofi,
    /// The openib BTL of Open MPI 4, with the device shown as InfiniBand
    Openib,
    /// The MPI's own TCP, without uwarp, to compare
    Tcp,
}

#[derive(Args)]
pub struct FilesArgs {
    /// The directory
    #[arg(value_name = "DIRECTORY")]
    pub directory: PathBuf,
}

#[derive(Args)]
pub struct DevicesArgs {
    #[command(flatten)]
    pub device: DeviceOptions,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct DoctorArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// A program to check; it is not run
    #[arg(value_name = "PROGRAM", trailing_var_arg = true)]
    pub program: Vec<OsString>,
}

#[derive(Args)]
pub struct StatArgs {
    /// Print JSON: one object, or with --watch one for each interval
    #[arg(long)]
    pub json: bool,
    /// Print again every SECONDS seconds, with rates [default: 1]
    #[arg(long, value_name = "SECONDS", value_parser = seconds, num_args = 0..=1,
          default_missing_value = "1")]
    pub watch: Option<f64>,
    /// Show only this process; may be given several times
    #[arg(long, value_name = "PID", value_parser = process)]
    pub pid: Vec<u32>,
    /// Show this many queue pairs of each process, the busiest first
    #[arg(long, value_name = "NUMBER", default_value_t = 20, value_parser = within::<usize, 0, 1000000>)]
    pub top: usize,
}

#[derive(Args)]
pub struct BenchArgs {
    /// What to measure
    #[arg(value_name = "WHAT")]
    pub what: BenchWhat,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Only for mpi: print the table in Markdown, as in docs/performance.md
    #[arg(long, conflicts_with = "json")]
    pub markdown: bool,
    /// Also show each figure's target, and with which settings raw TCP was fastest
    #[arg(long)]
    pub targets: bool,
    /// Measure for a short time only, to see whether anything is broken
    #[arg(long)]
    pub quick: bool,
    /// Time for each figure over all rounds, once for raw TCP and once for uwarp; the trials of raw TCP are
    /// extra [default: 2, with --quick 0.6; sockets: 0.5, with --quick 0.06]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,
    /// Number of rounds; in each, raw TCP and uwarp are measured in turn [default: 9, with --quick 3]
    #[arg(long, value_name = "NUMBER", value_parser = within::<u32, 1, 1000>)]
    pub rounds: Option<u32>,
    /// Measure between two network namespaces over a veth pair instead of loopback; needs root
    #[arg(long)]
    pub netns: bool,
    /// MTU of the veth pair [default: 1500]
    #[arg(long, value_name = "BYTES", requires = "netns",
          value_parser = within::<u32, 576, 65535>)]
    pub mtu: Option<u32>,
    /// When to pin the measuring thread of each end to a core of its own
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = BenchPin::Spinning)]
    pub pin: BenchPin,
    /// Measure only the figures whose name begins with NAME; may be given several times
    #[arg(long, value_name = "NAME")]
    pub only: Vec<String>,
    /// Only for memory: instead of its usual figures, what LEAST to MOST peers cost, by a connection each
    /// over TCP, memory and reliable datagrams, and by one queue pair of datagrams, unreliable and reliable
    #[arg(long, value_name = "LEAST..MOST", value_parser = peers)]
    pub peers: Option<[u32; 2]>,
    /// Write a plot to FILE, as SVG: of sockets and mpi over the size of messages, of memory with --peers
    /// over their number
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Only for mpi: the launcher of the MPI [default: mpirun]. Its mpicc compiles what is measured. As root,
    /// Open MPI wants OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 in the environment
    #[arg(long, value_name = "LAUNCHER")]
    pub launcher: Option<OsString>,
    /// Only for mpi: the number of ranks [default: one for each core, 2 to 16]
    #[arg(long, value_name = "NUMBER", value_parser = within::<u32, 2, 1024>)]
    pub ranks: Option<u32>,
}

/// What `uwarp bench` measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchWhat {
    /// Ping-pongs of 64 bytes
    Latency,
    /// A small request, an RDMA Write or Read of 4 to 64 KiB, and a small response, as in storage protocols
    Transactions,
    /// RDMA Writes, Sends and RDMA Reads of 64 KiB to 4 MiB, one way
    Bandwidth,
    /// The same with 4 to 64 KiB and the settings of ib_write_bw, ib_send_bw and ib_read_bw: each message is
    /// posted by itself
    Messages,
    /// RDMA Writes of 64 bytes, one way
    Rate,
    /// Datagrams beside raw UDP: ping-pongs (reliable ones, too), one way, beside a connection, and memory of
    /// many peers
    Datagrams,
    /// System calls that posting and polling make
    Syscalls,
    /// Connections made in a second, one at a time and many at once
    Connections,
    /// Memory and processor time of 10,000 idle connections, and what they cost a busy one; memory for 4 to
    /// 64 peers, by connections and by datagrams
    Memory,
    /// An MPI program over each transport of `uwarp mpi`, beside the MPI's own TCP: ping-pongs, streams,
    /// collectives, one-sided operations, memory
    Mpi,
    /// UCX's ucx_perftest over each transport that it has for uwarp, beside UCX's TCP, and on one host its
    /// own shared memory
    Ucx,
    /// Socket programs by message size, ping-pongs and one way: plain sockets, behind the preloaded
    /// library, in IWARP_MODE by calls and by descriptors, over rsockets
    Sockets,
    /// Ping-pongs of 64 bytes where processors are few or slow: on one processor, beside a loop for each
    /// processor, and emulated by qemu-user, each beside raw TCP that spins and that blocks
    Crowded,
    /// A server that is one event loop, and its clients in another one: requests a second, processor time,
    /// system calls and sleeps at both ends, over memory and TCP, beside raw TCP sockets
    Loops,
    /// Instructions, locked instructions and copies of a message, at both ends and in all threads, counted by
    /// callgrind of the package valgrind
    Instructions,
    /// What streams of reliable datagrams get of a path of 100 Mbit/s and 10 ms that is made for it: alone,
    /// beside each other and beside TCP; with packets that are lost, late or come twice. Needs root
    Sharing,
    /// All of them except mpi, ucx, sockets, crowded, loops, instructions and sharing
    All,
}

/// `--pin`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchPin {
    /// If both ends spin; if they block, the system chooses the cores
    Spinning,
    /// Always
    Always,
    /// Never
    Never,
}

#[derive(Args)]
pub struct BenchEndArgs {
    /// Create a network namespace first, and measure in it
    #[arg(long)]
    pub network_namespace: bool,
    /// Measure in the network namespace of this process
    #[arg(long, value_name = "PID", conflicts_with = "network_namespace")]
    pub namespace_of: Option<u32>,
}

/// How the device appears to programs. The wire is iWARP in each case.
#[derive(Args, Default)]
pub struct DeviceOptions {
    /// Show the device as an iWARP RNIC, as RoCE v2 or as InfiniBand [default: roce]
    #[arg(long = "as", value_name = "VIEW", env = "UWARP_VIEW", hide_env_values = true, ignore_case = true)]
    pub view: Option<View>,
    /// Show one device with all addresses, or one for each network interface [default: one]
    #[arg(long, value_name = "HOW", env = "UWARP_DEVICES", hide_env_values = true, ignore_case = true)]
    pub devices: Option<DeviceModel>,
}

#[derive(Args, Default)]
pub struct RunOptions {
    /// Log to standard error: off, error, warn, info, debug or trace, or a filter such as
    /// warn,uwarp_cm=debug [default: warn]
    #[arg(long, value_name = "LEVEL", env = "UWARP_LOG", hide_env_values = true, value_parser = log_filter)]
    pub log: Option<String>,
    /// Append what --log asks for to FILE instead; warnings and errors go to standard error, too. In the name
    /// %p is the process, %h the host, and %% a percent sign
    #[arg(long, value_name = "FILE", env = "UWARP_LOG_FILE", hide_env_values = true)]
    pub log_file: Option<PathBuf>,
    /// Write a trace of every iWARP segment and datagram to FILE; `-` is standard error
    #[arg(long, value_name = "FILE", env = "UWARP_TRACE", hide_env_values = true)]
    pub trace: Option<PathBuf>,
    /// Use a CRC over every FPDU; off takes effect only if the peer agrees [default: on]
    #[arg(long, value_name = "on|off", env = "UWARP_CRC", hide_env_values = true, ignore_case = true)]
    pub crc: Option<Switch>,
    /// Request MPA markers from peers; without a value: on [default: off]
    #[arg(long, value_name = "on|off", env = "UWARP_MARKERS", hide_env_values = true, ignore_case = true,
          num_args = 0..=1, default_missing_value = "on")]
    pub markers: Option<Switch>,
    /// The MPA revision that a connection begins with [default: 2]
    #[arg(long, value_name = "1|2", env = "UWARP_MPA_REVISION", hide_env_values = true,
          value_parser = within::<u8, 1, 2>)]
    pub mpa_revision: Option<u8>,
    /// Serve peers in a thread that sleeps when idle (auto), or in one that never sleeps and needs a core of
    /// its own (spin) [default: auto]
    #[arg(long, value_name = "HOW", env = "UWARP_PROGRESS", hide_env_values = true, ignore_case = true)]
    pub progress: Option<Progress>,
    /// The ports of queue pairs, in TCP and in UDP: let a firewall pass both [default: any]
    #[arg(long, value_name = "FIRST-LAST", env = "UWARP_PORT_RANGE", hide_env_values = true)]
    pub port_range: Option<PortRange>,
    /// The UDP port of multicast groups; must be the same on all hosts [default: 18514]
    #[arg(long, value_name = "PORT", env = "UWARP_MCAST_PORT", hide_env_values = true,
          value_parser = within::<u16, 1, 65535>)]
    pub mcast_port: Option<u16>,
    /// In the roce and ib views: which peers other than uwarp must confirm placement, by a zero-length RDMA
    /// Read, before a Send or Write completes. auto: those that cannot be Linux siw, which answers some of
    /// these Reads wrongly; on: all; off: none [default: auto]
    #[arg(long, value_name = "auto|on|off", env = "UWARP_ASK", hide_env_values = true, ignore_case = true)]
    pub ask: Option<Ask>,
    /// What carries streams. auto: memory that two processes of one host share where both ends can, otherwise
    /// their TCP connection, and `uwarp stat` says why; tcp; memory; rd: reliable datagrams over UDP;
    /// hybrid:N: auto for the first N peers, rd for all others. A connection that cannot have memory or rd
    /// fails with EOPNOTSUPP. Or rules for peers, of which the first that matches decides:
    /// memory:127.0.0.0/8,tcp:10.0.0.5:7471,rd:[fd00::/8]
    /// (LINK:PEER[/BITS][:PORT[-LAST]]; the port is the listening end's). tcpdump and tshark see no memory
    /// [default: auto]
    #[arg(long, value_name = "auto|tcp|memory|rd|hybrid:N|RULES", env = "UWARP_LINK", hide_env_values = true,
          value_parser = link_rules)]
    pub link: Option<String>,
    /// How long messages of datagrams may be (the port's active MTU). auto: 4096 bytes, in parts where a
    /// packet of the path is shorter, or in IP fragments toward peers that take no parts; interface: as long
    /// as a packet of the interface, 1024 bytes over Ethernet [default: auto]
    #[arg(
        long,
        value_name = "auto|interface",
        env = "UWARP_UD_MTU",
        hide_env_values = true,
        ignore_case = true
    )]
    pub ud_mtu: Option<UdMtu>,
    /// Let `uwarp stat` see the program [default: on]
    #[arg(long, value_name = "on|off", env = "UWARP_STAT", hide_env_values = true, ignore_case = true)]
    pub stat: Option<Switch>,
    /// Catch faults at registered memory that the program has unmapped, so that only the connection fails;
    /// use off for programs that handle such faults themselves [default: on]
    #[arg(long, value_name = "on|off", env = "UWARP_GUARD", hide_env_values = true, ignore_case = true)]
    pub guard: Option<Switch>,
    /// Show the device below /sys/class/infiniband and /dev/infiniband to the program and its children. auto:
    /// if the program names these paths, is linked to a library that looks there (UCX, an MPI, NCCL), or is a
    /// shell, an interpreter or a launcher; `uwarp doctor -- PROGRAM` says which [default: off]
    #[arg(long, value_name = "auto|on|off", env = "UWARP_FILES", hide_env_values = true, ignore_case = true)]
    pub files: Option<Files>,
    /// Switch TCP sockets of the program to iWARP, where RULE says so. rsockets:port=5001: all of this port;
    /// the other end must use rsockets, too. upgrade:all: those whose other end, on this host, has such a
    /// rule. upgrade:address=10.0.0.0/8,key=FILE: also on other hosts, if both ends have the same key (32
    /// hexadecimal digits); no-other-users in place of key=FILE if you trust everything that runs on both.
    /// `@FILE` reads rules from a file. Without RULE, the rules of the variable apply; without any, all
    /// sockets stay TCP. With `--log info`, `upgrade` says for each connection if it switched to iWARP, and
    /// if not, why
    #[arg(long, value_name = "RULE", env = "UWARP_SOCKETS", hide_env_values = true, num_args = 0..=1,
          require_equals = true, default_missing_value = "", value_parser = socket_rules)]
    pub sockets: Option<String>,
}

/// `--as`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum View {
    /// RNIC, transport iWARP
    Iwarp,
    /// Channel adapter, link layer Ethernet, GID type RoCE v2
    Roce,
    /// Channel adapter, link layer InfiniBand
    Ib,
}

impl View {
    /// As the option names it.
    pub fn name(self) -> &'static str {
        match self {
            View::Iwarp => "iwarp",
            View::Roce => "roce",
            View::Ib => "ib",
        }
    }
}

/// `--devices`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceModel {
    /// One device, uwarp0, with all addresses
    One,
    /// uwarp0, uwarp1 and so on, each with the addresses of one interface; the default route's is the first
    PerInterface,
}

/// `--files`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Files {
    /// If the program looks there, or may
    Auto,
    /// Always
    #[value(aliases = ["1", "yes", "true"])]
    On,
    /// Never
    #[value(aliases = ["0", "no", "false"])]
    Off,
}

/// `--crc`, `--markers`, `--stat`, `--guard`. The other words are those that the library takes, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Switch {
    #[value(aliases = ["1", "yes", "true"])]
    On,
    #[value(aliases = ["0", "no", "false"])]
    Off,
}

/// `--ask`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Ask {
    /// Those that cannot be Linux siw
    Auto,
    /// All
    #[value(aliases = ["1", "yes", "true"])]
    On,
    /// None
    #[value(aliases = ["0", "no", "false"])]
    Off,
}

/// `--progress`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Progress {
    /// A thread that sleeps until it is needed
    Auto,
    /// A thread that never sleeps
    Spin,
}

/// `--ud-mtu`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UdMtu {
    /// 4096 bytes, in parts where that is longer than a packet of the path
    Auto,
    /// As long as a packet of the interface
    Interface,
}

/// `--log`: as `UWARP_LOG`.
fn log_filter(text: &str) -> Result<String, String> {
    uwarp_driver::config::check_log_filter(text).map(|()| text.to_owned())
}

/// `--port-range`: two ports, both included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortRange {
    pub first: u16,
    pub last: u16,
}

impl FromStr for PortRange {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let malformed = "write two port numbers, such as 20000-20015";
        let (first, last) = text.split_once('-').ok_or(malformed)?;
        let port = |text: &str| text.trim().parse::<u16>().map_err(|_| malformed);
        let range = PortRange { first: port(first)?, last: port(last)? };
        match range {
            PortRange { first: 0, .. } => Err("port 0 is not a port"),
            PortRange { first, last } if first > last => Err("the first port is above the last"),
            _ => Ok(range),
        }
    }
}

impl DeviceOptions {
    /// The variables for the library; an option that was not given sets none.
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        [("UWARP_VIEW", self.view.map(word)), ("UWARP_DEVICES", self.devices.map(word))]
            .into_iter()
            .filter_map(|(name, value)| Some((name, value?)))
            .collect()
    }
}

impl RunOptions {
    /// See [`DeviceOptions::environment`].
    pub fn environment(&self) -> Vec<(&'static str, OsString)> {
        // The program may change its directory before the library opens the file.
        let absolute = |file: &PathBuf| match file.as_os_str() == "-" {
            true => "-".into(),
            false => std::path::absolute(file).unwrap_or_else(|_| file.clone()).into_os_string(),
        };
        [
            ("UWARP_LOG", self.log.as_ref().map(OsString::from)),
            ("UWARP_LOG_FILE", self.log_file.as_ref().map(absolute)),
            ("UWARP_TRACE", self.trace.as_ref().map(absolute)),
            ("UWARP_CRC", self.crc.map(word)),
            ("UWARP_MARKERS", self.markers.map(word)),
            ("UWARP_MPA_REVISION", self.mpa_revision.map(|revision| revision.to_string().into())),
            ("UWARP_PROGRESS", self.progress.map(word)),
            (
                "UWARP_PORT_RANGE",
                self.port_range.map(|range| format!("{}-{}", range.first, range.last).into()),
            ),
            ("UWARP_MCAST_PORT", self.mcast_port.map(|port| port.to_string().into())),
            ("UWARP_ASK", self.ask.map(word)),
            ("UWARP_LINK", self.link.as_ref().map(OsString::from)),
            ("UWARP_UD_MTU", self.ud_mtu.map(word)),
            ("UWARP_STAT", self.stat.map(word)),
            ("UWARP_GUARD", self.guard.map(word)),
            ("UWARP_FILES", self.files.map(word)),
            // Without a rule, what is in the environment stays.
            ("UWARP_SOCKETS", self.sockets.as_deref().filter(|rules| !rules.is_empty()).map(OsString::from)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
    }
}

/// `--link`
fn link_rules(text: &str) -> Result<String, String> {
    text.parse::<uwarp_driver::config::Links>().map(|_| text.to_owned())
}

/// `--sockets`: rules, or `@` and a file with rules, whose name is made absolute.
fn socket_rules(text: &str) -> Result<String, String> {
    uwarp_preload::rules::Rules::read(text)?;
    Ok(match text.strip_prefix('@').map(std::path::absolute) {
        Some(Ok(file)) => format!("@{}", file.display()),
        _ => text.to_owned(),
    })
}

/// A number that is not below `LEAST` and not above `MOST`.
fn within<T: TryFrom<u32>, const LEAST: u32, const MOST: u32>(text: &str) -> Result<T, String> {
    let number = text.parse().ok().filter(|number| (LEAST..=MOST).contains(number));
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| format!("write a number from {LEAST} to {MOST}"))
}

/// Such as "1..4096", or one number.
fn peers(text: &str) -> Result<[u32; 2], &'static str> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| text.parse().ok().filter(|number| (1..=4096).contains(number));
    match (number(least), number(most)) {
        (Some(least), Some(most)) if least <= most => Ok([least, most]),
        _ => Err("write two numbers of peers from 1 to 4096, the lesser first, such as 1..4096"),
    }
}

fn process(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "write the number of a process")
}

fn seconds(text: &str) -> Result<f64, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=3600.0).contains(seconds));
    seconds.ok_or("write a number of seconds, 0.01 to 3600")
}

fn word(value: impl ValueEnum) -> OsString {
    value.to_possible_value().map(|value| value.get_name().into()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, FromArgMatches};

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// Parses as the command does, without the environment of this test.
    fn parse_run(line: &[&str]) -> RunArgs {
        let command = Cli::command().mut_subcommand("run", |run| run.mut_args(|option| option.env(None)));
        let matches = command.try_get_matches_from(["uwarp", "run"].iter().chain(line)).unwrap();
        let Command::Run(args) = Cli::from_arg_matches(&matches).unwrap().command else { unreachable!() };
        args
    }

    #[test]
    fn every_option_of_run_reaches_the_variable_it_names() {
        let given: &[(&str, &[&str], &str)] = &[
            ("UWARP_VIEW", &["--as", "roce"], "roce"),
            ("UWARP_DEVICES", &["--devices", "per-interface"], "per-interface"),
            ("UWARP_LOG", &["--log", "uwarp_cm=debug"], "uwarp_cm=debug"),
            ("UWARP_LOG_FILE", &["--log-file", "/a/%p.log"], "/a/%p.log"),
            ("UWARP_TRACE", &["--trace", "-"], "-"),
            ("UWARP_TRACE", &["--trace", "/a/b"], "/a/b"),
            ("UWARP_CRC", &["--crc", "off"], "off"),
            ("UWARP_MARKERS", &["--markers"], "on"),
            ("UWARP_MARKERS", &["--markers", "0"], "off"),
            ("UWARP_CRC", &["--crc", "False"], "off"),
            ("UWARP_MPA_REVISION", &["--mpa-revision", "1"], "1"),
            ("UWARP_PROGRESS", &["--progress", "spin"], "spin"),
            ("UWARP_PORT_RANGE", &["--port-range", "20000-20015"], "20000-20015"),
            ("UWARP_MCAST_PORT", &["--mcast-port", "20001"], "20001"),
            ("UWARP_ASK", &["--ask", "auto"], "auto"),
            ("UWARP_ASK", &["--ask", "on"], "on"),
            ("UWARP_LINK", &["--link", "memory:127.0.0.1,tcp"], "memory:127.0.0.1,tcp"),
            ("UWARP_UD_MTU", &["--ud-mtu", "interface"], "interface"),
            ("UWARP_STAT", &["--stat", "off"], "off"),
            ("UWARP_FILES", &["--files", "on"], "on"),
            ("UWARP_FILES", &["--files", "auto"], "auto"),
            ("UWARP_GUARD", &["--guard", "off"], "off"),
            ("UWARP_SOCKETS", &["--sockets=rsockets:port=80"], "rsockets:port=80"),
        ];
        for (name, words, value) in given {
            let args = parse_run(&[words, &["--", "rping", "-s"][..]].concat());
            assert_eq!(args.program, ["rping", "-s"]);
            let environment: Vec<_> =
                args.device.environment().into_iter().chain(args.options.environment()).collect();
            assert_eq!(environment, [(*name, OsString::from(value))], "{words:?}");
        }
        let run = Cli::command().find_subcommand("run").unwrap().clone();
        for option in run.get_arguments().filter(|option| option.get_long().is_some()) {
            // What the command says is not the library's.
            if ["help", "verbose"].iter().any(|own| option.get_id() == *own) {
                continue;
            }
            let variable = option.get_env().unwrap_or_else(|| panic!("{option} has no variable"));
            assert!(given.iter().any(|(name, ..)| *name == variable), "{option} is not in the table above");
        }
    }

    #[test]
    fn sockets_without_a_rule_leave_the_variable() {
        let args = parse_run(&["--sockets", "--", "curl"]);
        assert_eq!((args.options.sockets.as_deref(), args.program), (Some(""), vec!["curl".into()]));
        assert_eq!(parse_run(&["--sockets", "--", "curl"]).options.environment(), []);
    }

    #[test]
    fn socket_rules_are_checked_and_files_made_absolute() {
        assert!(socket_rules("udp").unwrap_err().contains("is none of"));
        assert!(link_rules("ring").unwrap_err().contains("is none of"));
        assert!(socket_rules("@/does/not/exist").is_err());
        let file = socket_rules("@Cargo.toml").unwrap_err();
        // It was read: its first line is no rule.
        assert!(file.contains("the rule"), "{file}");
    }

    #[test]
    fn trace_file_is_made_absolute() {
        let options = RunOptions { trace: Some("t.txt".into()), ..Default::default() };
        let [(_, value)] = options.environment().try_into().unwrap();
        assert!(PathBuf::from(value).is_absolute());
    }

    #[test]
    fn programs_keep_their_own_options_without_a_double_dash() {
        let args = parse_run(&["--crc", "off", "rping", "--log", "-s"]);
        assert_eq!(args.program, ["rping", "--log", "-s"]);
    }

    #[test]
    fn port_ranges_that_make_no_sense_are_refused() {
        for text in ["", "5", "5-", "-5", "0-9", "9-5", "1-65536", "a-b", "1-2-3"] {
            assert!(text.parse::<PortRange>().is_err(), "{text}");
        }
        assert_eq!("7-7".parse(), Ok(PortRange { first: 7, last: 7 }));
    }
}
