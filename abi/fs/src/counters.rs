//! The port's counters: what the processes of this user report to `uwarp stat` (`uwarp-driver`'s `stat`),
//! summed up, and written into the tree when a program opens one of the files or their directory.
//!
//! A process that has ended reports nothing any more, so these numbers can go down, unlike an adapter's.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read, Write as _};
use std::mem;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

/// Beginning of the sockets' names, as the library has it.
const NAME: &str = "uwarp-stat-";
/// How long the processes may take to answer, all together: one that is stopped never does.
const PATIENCE: Duration = Duration::from_millis(250);
/// Below the port's directory.
const STANDARD: &str = "counters";
const OWN: &str = "hw_counters";

/// What the processes say, summed up.
#[derive(Default)]
struct Sum {
    sent: Traffic,
    received: Traffic,
    numbers: [u64; NUMBERS.len()],
    dropped: u64,
}

#[derive(Default)]
struct Traffic {
    messages: u64,
    bytes: u64,
}

/// Counters whose names are the same in the reports and in hw_counters.
const NUMBERS: [&str; 7] = [
    "receive_stalls",
    "room_stalls",
    "retransmits",
    "terminates_sent",
    "terminates_received",
    "failed",
    "flushed",
];
/// InfiniBand's counters of what cannot happen here, and of multicast, which uwarp does not count by itself.
const ALWAYS_ZERO: [&str; 13] = [
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_constraint_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "port_xmit_wait",
    "symbol_error",
];

impl Traffic {
    /// By opcode: `{"send":{"messages":…,"bytes":…},…}`.
    fn add(&mut self, by_opcode: &Value) {
        let number = |of: &Value, name| of.get(name).and_then(Value::as_u64).unwrap_or(0);
        for opcode in by_opcode.as_object().into_iter().flat_map(|opcodes| opcodes.values()) {
            self.messages += number(opcode, "messages");
            self.bytes += number(opcode, "bytes");
        }
    }
}

impl Sum {
    /// A line of a report. The first one holds what queue pairs did that are gone.
    fn add(&mut self, line: &Value) {
        let counters = line.get("departed").unwrap_or(line);
        self.sent.add(counters.get("sent").unwrap_or(&Value::Null));
        self.received.add(counters.get("received").unwrap_or(&Value::Null));
        for (sum, name) in self.numbers.iter_mut().zip(NUMBERS) {
            *sum += counters.get(name).and_then(Value::as_u64).unwrap_or(0);
        }
        for drops in ["drops", "departed_drops", "unclaimed"].iter().filter_map(|name| line.get(name)) {
            let reasons = drops.as_object().into_iter().flat_map(|reasons| reasons.values());
            self.dropped += reasons.filter_map(Value::as_u64).sum::<u64>();
        }
    }

    /// Directory, name and value of each file.
    fn files(&self) -> Vec<(&'static str, &'static str, u64)> {
        let Self { sent, received, numbers, dropped } = self;
        // InfiniBand counts data in units of four bytes. A packet is a message here.
        let standard = [
            ("port_xmit_data", sent.bytes / 4),
            ("port_rcv_data", received.bytes / 4),
            ("port_xmit_packets", sent.messages),
            ("port_rcv_packets", received.messages),
            ("unicast_xmit_packets", sent.messages),
            ("unicast_rcv_packets", received.messages),
            ("port_rcv_errors", 0),
            ("port_xmit_discards", *dropped),
        ];
        let own = [
            ("sent_messages", sent.messages),
            ("sent_bytes", sent.bytes),
            ("received_messages", received.messages),
            ("received_bytes", received.bytes),
            ("dropped_datagrams", *dropped),
        ];
        let always_zero = ALWAYS_ZERO.into_iter().map(|name| (name, 0));
        let own = own.into_iter().chain(NUMBERS.into_iter().zip(*numbers));
        let standard = standard.into_iter().chain(always_zero).map(|(name, value)| (STANDARD, name, value));
        standard.chain(own.map(|(name, value)| (OWN, name, value))).collect()
    }
}

/// Writes the counter that a path names, or all of them, into the tree below `root`.
pub fn write(root: &[u8], meant: &[u8]) {
    let path = Path::new(OsStr::from_bytes(meant));
    let Some(port) = path.ancestors().find(|above| above.parent().is_some_and(|dir| dir.ends_with("ports")))
    else {
        return;
    };
    let Ok(below) = port.strip_prefix("/") else { return };
    let port = Path::new(OsStr::from_bytes(root)).join(below);
    let files = sum().files();
    let one = files.iter().any(|(directory, name, _)| path.ends_with(Path::new(directory).join(name)));
    for (directory, name, value) in files {
        if !one || path.ends_with(Path::new(directory).join(name)) {
            // What cannot be written stays as it was.
            let _ = replace(&port.join(directory), name, value);
        }
    }
}

/// A reader sees the old number or the new one, never half of it.
fn replace(directory: &Path, name: &str, value: u64) -> io::Result<()> {
    // A name that no listing of another thread shows for long, and that only this thread writes.
    // SAFETY: only asks for a number.
    let thread = unsafe { libc::syscall(libc::SYS_gettid) };
    let new = directory.join(format!(".{name}.{thread}"));
    // One that a thread of this number has left behind when it was killed.
    let _ = fs::remove_file(&new);
    // Not through a link, nor into a file that is there.
    File::create_new(&new)?.write_all(format!("{value}\n").as_bytes())?;
    fs::rename(&new, directory.join(name))
}

fn sum() -> Sum {
    // SAFETY: only asks for a number.
    let user = unsafe { libc::getuid() };
    let mut sum = Sum::default();
    let Ok(sockets) = fs::read_to_string("/proc/net/unix") else { return sum };
    let beginning = format!("@{NAME}{user}-");
    // A socket stands there once for itself and once for each connection that waits.
    let mut names: Vec<_> = sockets
        .lines()
        .filter_map(|line| line.split_ascii_whitespace().last()?.strip_prefix('@'))
        .filter(|name| name.len() >= beginning.len() && format!("@{name}").starts_with(&beginning))
        .collect();
    names.sort_unstable();
    names.dedup();
    let deadline = Instant::now() + PATIENCE;
    // All are asked before the first is heard, so that one that is stopped delays no other.
    let sockets: Vec<_> = names.into_iter().filter_map(|name| connect(name, user)).collect();
    for socket in sockets {
        for line in BufReader::new(Until { socket, deadline }).lines().map_while(Result::ok) {
            if let Ok(line) = serde_json::from_str(&line) {
                sum.add(&line);
            }
        }
    }
    sum
}

/// What a process says until the deadline.
struct Until {
    socket: UnixStream,
    deadline: Instant,
}

impl Read for Until {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let now = Instant::now();
        // A process that has answered in time is still heard, but none without end.
        if now > self.deadline + PATIENCE {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let left = self.deadline.saturating_duration_since(now);
        // No time at all is an error.
        self.socket.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        self.socket.read(buffer)
    }
}

/// Never waits; only to a process of this user.
fn connect(name: &str, user: libc::uid_t) -> Option<UnixStream> {
    // SAFETY: all zero is a valid address; the kernel reads as much of it as the length says, and writes a
    // structure of the size that it is given.
    unsafe {
        let kind = libc::SOCK_STREAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
        let fd = libc::socket(libc::AF_UNIX, kind, 0);
        if fd < 0 {
            return None;
        }
        let fd = OwnedFd::from_raw_fd(fd);
        let mut address: libc::sockaddr_un = mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        // The first byte is zero: an abstract name.
        for (to, from) in address.sun_path.get_mut(1..)?.iter_mut().zip(name.bytes()) {
            *to = from.cast_signed() as libc::c_char;
        }
        let length = mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
        let length = libc::socklen_t::try_from(length).ok()?;
        if libc::connect(fd.as_raw_fd(), (&raw const address).cast(), length) != 0 {
            return None;
        }
        let mut peer: libc::ucred = mem::zeroed();
        let mut size = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
        let (to, size) = ((&raw mut peer).cast(), &raw mut size);
        if libc::getsockopt(fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, to, size) != 0
            || peer.uid != user
        {
            return None;
        }
        let socket = UnixStream::from(fd);
        socket.set_nonblocking(false).ok()?;
        Some(socket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_are_summed_up() {
        let mut sum = Sum::default();
        for line in [
            r#"{"pid":1,"departed":{"sent":{"send":{"messages":1,"bytes":8}},"received":{},"failed":2},
                "departed_drops":{"q_key":3},"unclaimed":{"a":1}}"#,
            r#"{"qpn":5,"sent":{"send":{"messages":2,"bytes":100},"write":{"messages":1,"bytes":4}},
                "received":{"read_response":{"messages":7,"bytes":9}},"failed":1,"drops":{"q_key":1}}"#,
        ] {
            sum.add(&serde_json::from_str(line).unwrap());
        }
        let files = sum.files();
        let value = |name| files.iter().find(|(_, found, _)| *found == name).unwrap().2;
        for (name, expected) in [
            ("sent_messages", 4),
            ("sent_bytes", 112),
            ("port_xmit_data", 28),
            ("received_bytes", 9),
            ("port_rcv_data", 2),
            ("failed", 3),
            ("dropped_datagrams", 5),
            ("symbol_error", 0),
        ] {
            assert_eq!(value(name), expected, "{name}");
        }
    }

    #[test]
    fn one_counter_is_written_or_all() {
        let root = std::env::temp_dir().join(format!("uwarp-fs-counters-{}", std::process::id()));
        let port = "sys/class/infiniband/uwarp0/ports/1";
        for directory in [STANDARD, OWN] {
            fs::create_dir_all(root.join(port).join(directory)).unwrap();
        }
        let count = |directory: &str| fs::read_dir(root.join(port).join(directory)).unwrap().count();
        let bytes = root.as_os_str().as_bytes();
        write(bytes, format!("/{port}/counters/symbol_error").as_bytes());
        assert_eq!((count(STANDARD), count(OWN)), (1, 0));
        assert_eq!(fs::read(root.join(port).join("counters/symbol_error")).unwrap(), b"0\n");
        write(bytes, format!("/{port}/hw_counters").as_bytes());
        assert!(count(STANDARD) > 10 && count(OWN) > 10);
        // Nothing that could be left half done.
        assert!(!root.join(port).join(".symbol_error").exists());
        fs::remove_dir_all(&root).unwrap();
    }
}
