//! Does this host have what the library needs: descriptors, sockets, an interface, cores, ports?

use std::env;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::io::Errno;
use rustix::net::sockopt;
use rustix::process::{Resource, getrlimit};
use rustix::system::uname;
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use uwarp_driver::address::lid_of;
use uwarp_driver::{Config, host};

use super::{Check, scheduling};
use crate::cli::PortRange;
use crate::interfaces;
use crate::run::DESCRIPTORS_WANTED;

/// Queue pairs that share one port, and so one listener.
const QUEUE_PAIRS_PER_PORT: u32 = 256;

pub fn checks() -> Vec<Check> {
    let mut checks = vec![
        descriptors(),
        memory(),
        kernel(),
        loopback(),
        one_host(),
        interface(),
        udp(),
        buffers(),
        datagrams(),
        cores(),
        ports(),
    ];
    checks.extend(scheduling::check());
    checks.extend(proc());
    checks.extend(adapters());
    checks.extend(lids());
    checks
}

fn descriptors() -> Check {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.current.unwrap_or(u64::MAX);
    // As `uwarp run` does: the limit is never lowered.
    let raised = limit.maximum.unwrap_or(u64::MAX).min(DESCRIPTORS_WANTED).max(current);
    let words = |limit: u64| if limit == u64::MAX { "no limit".to_owned() } else { limit.to_string() };
    let found = format!(
        "{} now, {} for programs under `uwarp run`; each connection takes one",
        words(current),
        words(raised)
    );
    let remedy = "raise the hard limit: LimitNOFILE= of a systemd unit, --ulimit nofile= of a container, or \
                  /etc/security/limits.conf";
    match limit.maximum.unwrap_or(u64::MAX) {
        0..64 => Check::fail("descriptors", found, remedy),
        64..4096 => Check::warn("descriptors", found, remedy),
        _ => Check::ok("descriptors", found),
    }
}

fn memory() -> Check {
    Check::ok("memory", "registered memory is not locked, so the limit on locked memory does not matter")
}

/// If a sandbox refuses one of these, nothing works.
fn kernel() -> Check {
    let name = "kernel";
    let release = uname().release().to_string_lossy().into_owned();
    let tried: [(&str, io::Result<()>); 5] = [
        ("epoll_create1, epoll_wait", waits()),
        ("eventfd2", eventfd(0, EventfdFlags::CLOEXEC).map(drop).map_err(Into::into)),
        (
            "timerfd_create",
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).map(drop).map_err(Into::into),
        ),
        ("accept4", accepts()),
        ("clone3 (a thread)", thread::Builder::new().spawn(|| ()).map(drop)),
    ];
    let refusal = tried.into_iter().find_map(|(call, tried)| Some((call, tried.err()?)));
    match refusal {
        None => Check::ok(
            name,
            format!("Linux {release}; epoll, eventfd, timerfd and threads are allowed; no module is needed"),
        ),
        // As Rust's name for EAGAIN is; clone3 gives it at a limit.
        Some((call, error)) if error.kind() == io::ErrorKind::WouldBlock => Check::fail(
            name,
            format!("no thread can be started: {call}: {error}"),
            "raise the limit on processes: `ulimit -u`, pids.max of the control group",
        ),
        Some((call, error)) if error.raw_os_error() == Some(Errno::MFILE.raw_os_error()) => Check::fail(
            name,
            format!("no descriptor is left: {call}: {error}"),
            "raise the limit on descriptors: `ulimit -n`",
        ),
        Some((call, error)) => Check::fail(
            name,
            format!("Linux {release} refuses {call}: {error}"),
            "a sandbox (seccomp) forbids it; run outside of it or allow the call",
        ),
    }
}

fn waits() -> io::Result<()> {
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    epoll::wait(&epoll, spare_capacity(&mut Vec::with_capacity(1)), Some(&Timespec::default()))?;
    Ok(())
}

/// Where there is no loopback, another check says so.
fn accepts() -> io::Result<()> {
    let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) else { return Ok(()) };
    listener.set_nonblocking(true)?;
    match listener.accept() {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        other => other.map(drop),
    }
}

/// In the ib view: which addresses can be shown as a LID, which has 16 bits.
fn lids() -> Option<Check> {
    let view = env::var("UWARP_VIEW").ok().filter(|view| view.eq_ignore_ascii_case("ib"));
    view.map(|_| lids_of(&interfaces::list().unwrap_or_default()))
}

fn lids_of(interfaces: &[interfaces::Interface]) -> Check {
    let usable = interfaces.iter().filter(|interface| interface.is_usable());
    let addresses: Vec<_> = usable.flat_map(|interface| interface.addresses.iter()).collect();
    let v4 = addresses.iter().filter_map(|address| match address {
        IpAddr::V4(v4) => Some(*v4),
        IpAddr::V6(_) => None,
    });
    let shown = v4.filter(|v4| lid_of((*v4).into()) != 0).map(|v4| {
        let [a, b, ..] = v4.octets();
        format!("{v4} is LID {}, and LIDs name hosts of {a}.{b}.0.0/16", lid_of(v4.into()))
    });
    let shown: Vec<_> = shown.collect();
    let none = "IPv6 addresses, and those of other networks, have no LID: programs need a GID for them";
    match shown.is_empty() {
        false => Check::ok("lids", format!("{}. {none}", shown.join("; "))),
        true => {
            Check::warn("lids", format!("no address of this host can be shown as a LID. {none}"), "add -g 0")
        }
    }
}

/// Other RDMA devices of this host.
fn adapters() -> Option<Check> {
    let entries = fs::read_dir("/sys/class/infiniband").ok()?.flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<_> = names.filter(|name| !name.starts_with("uwarp")).collect();
    names.sort();
    (!names.is_empty()).then(|| {
        Check::ok(
            "adapters",
            format!(
                "this host has {}, too. Under `uwarp run` programs see uwarp's devices alone, by verbs and \
                 by rdma_cm; a program that looks below /sys itself needs --files on for that",
                names.join(", ")
            ),
        )
    })
}

/// Only worth a line if it is missing.
fn proc() -> Option<Check> {
    let there = Path::new("/proc/self").exists();
    (!there).then(|| {
        Check::warn(
            "proc",
            "/proc is not mounted: programs run, but uwarp stat finds none, and GID 0 may be another address \
             than the default route's",
            "mount it: `--proc /proc` of bwrap",
        )
    })
}

fn loopback() -> Check {
    let name = "loopback";
    let through = |address: SocketAddr| -> io::Result<()> {
        let listener = TcpListener::bind(address)?;
        TcpStream::connect(listener.local_addr()?)?;
        Ok(())
    };
    let v4 = through((Ipv4Addr::LOCALHOST, 0).into());
    let v6 = through((Ipv6Addr::LOCALHOST, 0).into());
    match (v4, v6) {
        (Ok(()), Ok(())) => Check::ok(name, "TCP connections over 127.0.0.1 and ::1 work"),
        (Ok(()), Err(error)) => Check::ok(name, format!("TCP over 127.0.0.1 works; IPv6 does not ({error})")),
        (Err(error), _) => Check::fail(
            name,
            format!("no TCP connection over 127.0.0.1: {error}"),
            "in a new network namespace: ip link set lo up",
        ),
    }
}

/// What carries streams between programs of this host.
fn one_host() -> Check {
    let name = "one host";
    let links = &Config::get().links;
    if links.need_no_memory() {
        return Check::ok(
            name,
            "programs of this host use TCP, as UWARP_LINK says; without it they share memory where they can",
        );
    }
    match host::obstacle() {
        None => Check::ok(
            name,
            "programs of one user share memory, which tcpdump does not see; it does with UWARP_LINK=tcp",
        ),
        Some(why) => Check::warn(
            name,
            format!("programs of this host use TCP: {why}"),
            "allow memfd_create, eventfd2 and Unix sockets with passed descriptors",
        ),
    }
}

fn interface() -> Check {
    let name = "interface";
    let interfaces = match interfaces::list() {
        Ok(interfaces) => interfaces,
        Err(error) => {
            return Check::fail(name, format!("cannot list interfaces: {error}"), "allow netlink sockets");
        }
    };
    let words: Vec<_> = interfaces
        .iter()
        .filter(|interface| interface.is_usable())
        .flat_map(|interface| interface.addresses.iter().map(move |address| (interface, address)))
        .filter(|(_, address)| !interfaces::is_link_local(address))
        .map(|(interface, address)| format!("{address} ({})", interface.name))
        .collect();
    match words[..] {
        [] => Check::warn(
            name,
            "no interface but loopback is up with an address: peers can only be on this host",
            "for other hosts, bring one up: ip link set NAME up; ip address add ADDRESS/PREFIX dev NAME",
        ),
        _ => Check::ok(
            name,
            format!(
                "{}; peers must reach {} directly, without NAT",
                words.join(", "),
                match words.len() {
                    1 => "this address",
                    _ => "these addresses",
                }
            ),
        ),
    }
}

/// Connected queue pairs prove their numbers by UDP when programs join them by number. This finds a firewall
/// of this host; one between hosts is found by trying only.
fn udp() -> Check {
    let all = interfaces::list().unwrap_or_default();
    let mut addresses: Vec<IpAddr> = all
        .iter()
        .filter(|interface| interface.is_usable())
        .flat_map(|interface| interface.addresses.iter().copied())
        .filter(|address| !interfaces::is_link_local(address))
        .collect();
    if addresses.is_empty() {
        // As the device has it then.
        addresses.push(Ipv4Addr::LOCALHOST.into());
    }
    let range = env::var("UWARP_PORT_RANGE").ok().and_then(|text| text.parse().ok());
    let failures = addresses.iter().filter_map(|&address| {
        let error = datagram_to_itself(address, range.as_ref()).err()?;
        Some((address, error))
    });
    udp_works(&addresses, &failures.collect::<Vec<_>>())
}

fn udp_works(addresses: &[IpAddr], failures: &[(IpAddr, io::Error)]) -> Check {
    let name = "udp";
    if failures.is_empty() {
        let words: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
        return Check::ok(name, format!("datagrams to {} come back", words.join(", ")));
    }
    let words: Vec<String> = failures.iter().map(|(address, error)| format!("{address}: {error}")).collect();
    let unreachable = failures.iter().all(|(_, error)| error.kind() == io::ErrorKind::NetworkUnreachable);
    Check::fail(
        name,
        format!(
            "a UDP datagram does not come back from this host's own address ({}): queue pairs that programs \
             connect by number do not connect, and datagram queue pairs receive nothing",
            words.join("; ")
        ),
        match unreachable {
            true => "in a new network namespace: ip link set lo up",
            false => "let the firewall of this host pass UDP as well as TCP, on the ports of --port-range",
        },
    )
}

/// Sends a datagram to an address of this host, from and to ports that a queue pair could have.
fn datagram_to_itself(address: IpAddr, range: Option<&PortRange>) -> io::Result<()> {
    const TRIES: u8 = 3;
    let ports = range.map_or(0..=0, |range| range.first..=range.last);
    let mut free = ports.filter_map(|port| UdpSocket::bind((address, port)).ok());
    let Some(to) = free.next() else { return UdpSocket::bind((address, 0)).map(drop) };
    // A range may have one port.
    let from = match range {
        Some(_) => free.next(),
        None => Some(UdpSocket::bind((address, 0))?),
    };
    let from = from.as_ref().unwrap_or(&to);
    to.set_read_timeout(Some(Duration::from_millis(500)))?;
    let mut last = io::Error::from(io::ErrorKind::TimedOut);
    for text in 0..TRIES {
        from.send_to(&[text], to.local_addr()?)?;
        match to.recv(&mut [0; 8]) {
            Ok(_) => return Ok(()),
            Err(error) => last = error,
        }
    }
    Err(match last.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => io::Error::other("nothing came within 1.5 s"),
        _ => last,
    })
}

fn buffers() -> Check {
    const WANTED: u64 = 1 << 20;
    let name = "buffers";
    let limit = |variable: &str| {
        let text = fs::read_to_string(format!("/proc/sys/net/{variable}")).ok()?;
        text.split_whitespace().last()?.parse::<u64>().ok()
    };
    let small: Vec<_> = ["ipv4.tcp_wmem", "ipv4.tcp_rmem"]
        .into_iter()
        .map(|variable| (variable, limit(&variable.replace('.', "/"))))
        .filter(|(_, limit)| limit.is_some_and(|limit| limit < WANTED))
        .collect();
    let kib =
        |variable: &str| limit(variable).map_or("?".to_owned(), |bytes| format!("{} KiB", bytes / 1024));
    let found = format!(
        "TCP grows its buffers up to {} for sending and {} for receiving",
        kib("ipv4/tcp_wmem"),
        kib("ipv4/tcp_rmem")
    );
    match small[..] {
        [] => Check::ok(name, found),
        _ => {
            let commands: Vec<_> = small
                .iter()
                .map(|(variable, _)| format!("sysctl -w net.{variable}='4096 131072 6291456'"))
                .collect();
            Check::warn(name, format!("{found}, which bounds throughput"), commands.join("; "))
        }
    }
}

/// Room for datagrams that wait until a program polls; the library requests this size.
fn datagrams() -> Check {
    const WANTED: usize = 4 << 20;
    let room = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).ok().and_then(|socket| {
        if sockopt::set_socket_recv_buffer_size_force(&socket, WANTED).is_err() {
            sockopt::set_socket_recv_buffer_size(&socket, WANTED).ok()?;
        }
        // The system returns twice the requested size: the other half is for its own bookkeeping.
        sockopt::socket_recv_buffer_size(&socket).ok().map(|bytes| bytes / 2)
    });
    room_for_datagrams(room)
}

fn room_for_datagrams(room: Option<usize>) -> Check {
    const ENOUGH: usize = 1 << 20;
    let name = "datagrams";
    let found = |room: usize| format!("{} KiB of datagrams wait while a program does not poll", room / 1024);
    match room {
        Some(room @ ENOUGH..) => Check::ok(name, found(room)),
        Some(room) => Check::warn(
            name,
            format!("only {}; more are lost (UD queue pairs only)", found(room)),
            "sysctl -w net.core.rmem_max=4194304",
        ),
        None => Check::warn(name, "no UDP socket: UD queue pairs cannot be made", "allow UDP sockets"),
    }
}

fn cores() -> Check {
    let name = "cores";
    match thread::available_parallelism().map(usize::from) {
        Err(error) => Check::warn(name, format!("cannot count them: {error}"), "nothing depends on it"),
        Ok(1) => Check::warn(
            name,
            "one core for two programs that poll: they yield it to each other, but one that spins on its \
             memory keeps it for a time slice",
            "prefer polling or events to spinning on memory (ib_write_lat), or give more cores",
        ),
        Ok(count @ 2..4) => Check::ok(
            name,
            format!("{count}: enough for two programs that poll; leave UWARP_PROGRESS at auto"),
        ),
        Ok(count) => Check::ok(name, format!("{count}: UWARP_PROGRESS=spin can lower latency")),
    }
}

fn ports() -> Check {
    let name = "ports";
    let text = env::var("UWARP_PORT_RANGE").unwrap_or_default();
    // The check of settings reports a value that is not a range.
    if let Ok(PortRange { first, last }) = text.parse() {
        // The first ports show whether the range is in use or forbidden.
        let sample: Vec<_> = (first..=last).take(64).collect();
        let refusals: Vec<_> = sample
            .iter()
            .filter_map(|&port| {
                let at = (Ipv4Addr::UNSPECIFIED, port);
                TcpListener::bind(at).map(drop).and_then(|()| UdpSocket::bind(at)).err()
            })
            .collect();
        let free = sample.len().saturating_sub(refusals.len());
        let found = format!(
            "{free} of the first {} in UWARP_PORT_RANGE={text} are free in TCP and UDP",
            sample.len()
        );
        return match refusals.first() {
            Some(error) if free == 0 => Check::fail(
                name,
                format!("{found}: {error}"),
                "choose ports above 1023 that nothing listens on",
            ),
            _ => {
                Check::ok(name, format!("{found}; {QUEUE_PAIRS_PER_PORT} queue pairs of a process share one"))
            }
        };
    }
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let bounds: Vec<u32> = range.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    let [first, last] = bounds[..] else {
        return Check::ok(
            name,
            "any that the kernel assigns, in TCP and UDP; UWARP_PORT_RANGE limits them for a firewall",
        );
    };
    let found =
        format!("any from {first} to {last}, in TCP and UDP; UWARP_PORT_RANGE limits them for a firewall");
    match last.saturating_sub(first) {
        0..1000 => Check::warn(
            name,
            format!("the kernel assigns only ports from {first} to {last}, and each connection takes one"),
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        ),
        _ => Check::ok(name, found),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_without_a_lid_are_said() {
        let interface = |addresses: &[&str]| interfaces::Interface {
            name: "eth0".to_owned(),
            up: true,
            loopback: false,
            addresses: addresses.iter().map(|address| address.parse().unwrap()).collect(),
        };
        let check = lids_of(&[interface(&["192.0.2.7", "fd00::7"])]);
        assert_eq!(check.status, super::super::Status::Ok);
        assert!(check.found.starts_with("192.0.2.7 is LID 519, and LIDs name hosts of 192.0.0.0/16"));
        let check = lids_of(&[interface(&["10.1.0.0", "fd00::7"])]);
        assert_eq!(check.status, super::super::Status::Warn, "{}", check.found);
    }

    use crate::doctor::Status;

    #[test]
    fn little_room_for_datagrams_is_warned_of_with_the_remedy() {
        // Linux' default limit for processes without special rights.
        let check = room_for_datagrams(Some(212_992));
        assert_eq!(check.status, Status::Warn);
        assert!(check.found.starts_with("only 208 KiB"), "{}", check.found);
        assert_eq!(check.remedy.as_deref(), Some("sysctl -w net.core.rmem_max=4194304"));
        assert_eq!(room_for_datagrams(Some(4 << 20)).status, Status::Ok);
        assert_eq!(room_for_datagrams(None).status, Status::Warn);
    }
}
