//! The lower layers that connections are made over, by the rules of `UWARP_LINK`: TCP, and streams of
//! reliable datagrams where a rule names them, or the peer has no link of its own ([`crate::places`]).
//! (Memory follows on TCP: [`crate::host`].)
//!
//! A program binds and listens before it is known who comes, so what it has bound is TCP's port. Where a rule
//! may choose reliable datagrams for that port, the port of the same number in UDP listens, too.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_llp::carrier::{
    Bind, Bound, Carrier, Close, Ends, Got, Listening, Refusal, SetUp, TakePort, Watch, tcp::Tcp,
};
use uwarp_llp::link::Kind;
use uwarp_llp::{Link, udp};
use uwarp_process::{Mutex, PerProcess};

use crate::config::{Config, LinkChoice};
use crate::nic::Nic;
use crate::places::Place;

/// What connects and listens.
pub fn carrier() -> &'static dyn Carrier {
    if Config::get().links.may_choose_rd() { &ByRule } else { &Tcp }
}

/// What is bound to a port in TCP, as [`carrier`] would have bound it.
pub fn with_rules(tcp: Box<dyn Bound>) -> Box<dyn Bound> {
    if Config::get().links.may_choose_rd() { Box::new(Either { tcp, _kept: None }) } else { tcp }
}

/// Ports that are tried until one is free in UDP.
const TRIES: u32 = 16;

struct ByRule;

impl Carrier for ByRule {
    /// A port that the system chooses is taken in UDP, too: the program may listen on it.
    fn bind(&self, at: &Bind) -> Result<Box<dyn Bound>, Errno> {
        let mut tcp = Tcp.bind(at)?;
        let mut kept = None;
        if at.address.port() == 0 && at.port != TakePort::AtConnect {
            for _ in 0..TRIES {
                let port = tcp.local().port();
                if let Ok(udp) = udp::Socket::bind(port) {
                    kept = Some(Kept::new(port, udp));
                    break;
                }
                tcp = Tcp.bind(at)?;
            }
        }
        Ok(Box::new(Either { tcp, _kept: kept }))
    }
}

struct Either {
    tcp: Box<dyn Bound>,
    _kept: Option<Kept>,
}

/// A port in UDP that is kept for whatever listens on the one of the same number in TCP: so no other process
/// has it when the program listens. It is in [`KNOWN`] until then, and no longer than this.
struct Kept(u64);

impl Kept {
    fn new(port: u16, socket: udp::Socket) -> Self {
        let mut known = KNOWN.lock();
        known.count += 1;
        // A forked child may drop what its parent has made, and counts anew.
        let name = u64::from(std::process::id()) << 32 | known.count;
        known.kept.push((name, port, socket));
        Self(name)
    }

    /// The socket of this port, whoever has bound it.
    fn take(port: u16) -> Option<udp::Socket> {
        let mut known = KNOWN.lock();
        let at = known.kept.iter().position(|(_, of, _)| *of == port)?;
        Some(known.kept.swap_remove(at).2)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        KNOWN.lock().kept.retain(|(name, ..)| *name != self.0);
    }
}

impl Bound for Either {
    fn local(&self) -> SocketAddr {
        self.tcp.local()
    }

    fn set_tos(&self, tos: u8) -> Result<(), Errno> {
        self.tcp.set_tos(tos)
    }

    fn listen(self: Box<Self>, backlog: usize) -> Result<Box<dyn Listening>, (Errno, Box<dyn Bound>)> {
        let local = self.local();
        if !Config::get().links.may_choose_rd_at(local.port()) {
            return self.tcp.listen(backlog).map_err(|(errno, tcp)| (errno, with_rules(tcp)));
        }
        let service = u32::from(local.port());
        let at = local.ip().to_canonical();
        let udp = Kept::take(local.port());
        let rd = device().and_then(|nic| nic.stream_port_at(local.port(), udp)?.listen(service, at));
        match rd {
            Ok(rd) => match self.tcp.listen(backlog) {
                Ok(tcp) => Ok(Box::new(Both { tcp, rd, local })),
                Err((errno, tcp)) => Err((errno, with_rules(tcp))),
            },
            Err(errno) => {
                tracing::error!(
                    port = local.port(),
                    "UWARP_LINK has a rule for reliable datagrams, but UDP cannot listen: {errno}"
                );
                Err((errno, self))
            }
        }
    }

    fn connect(self: Box<Self>, to: SocketAddr) -> Result<Box<dyn SetUp>, (Refusal, Box<dyn Bound>)> {
        let to = plain(to);
        // A queue pair that is joined with itself has one socket, which is connected with itself.
        let own = self.local();
        let is_itself = (to.ip(), to.port()) == (own.ip().to_canonical(), own.port());
        let (by_rd, place) = match Config::get().links.choose(to.ip(), to.port()) {
            _ if is_itself => (false, None),
            LinkChoice::Hybrid(most) => {
                let place = Place::take(to, most);
                (place.is_none(), place)
            }
            choice => (choice == LinkChoice::Rd, None),
        };
        if !by_rd {
            let tcp = self.tcp.connect(to).map_err(|(why, tcp)| (why, with_rules(tcp)))?;
            return Ok(match place {
                Some(place) => Box::new(Own { tcp, _place: place }),
                None => tcp,
            });
        }
        let from = Some(self.local().ip().to_canonical()).filter(|ip| !ip.is_unspecified());
        let service = u32::from(to.port());
        let connected = device().and_then(|nic| match nic.stream_port()?.connect(from, to, service) {
            // That is the port itself.
            Err(Errno::LOOP) => nic.second_stream_port()?.connect(from, to, service),
            connected => connected,
        });
        connected.map_err(|errno| (Refusal::from_errno(errno), self as Box<dyn Bound>))
    }

    fn watch(&self) -> Watch<'_> {
        self.tcp.watch()
    }
}

/// A mapped address as one of IPv4. A link-local one keeps its interface (RFC 4007 section 6).
fn plain(address: SocketAddr) -> SocketAddr {
    match address.ip().to_canonical() {
        ip @ IpAddr::V4(_) => SocketAddr::new(ip, address.port()),
        IpAddr::V6(_) => address,
    }
}

#[derive(Default)]
struct Known {
    /// The device, for a caller that may hold locks.
    device: Weak<Nic>,
    /// Ports of UDP by the names of those who keep them.
    kept: Vec<(u64, u16, udp::Socket)>,
    /// How many there were.
    count: u64,
}

static KNOWN: PerProcess<Mutex<Known, 29>> = PerProcess::new(Mutex::default);

/// The device is open.
pub(crate) fn begin(nic: &Arc<Nic>) {
    KNOWN.lock().device = Arc::downgrade(nic);
}

fn device() -> Result<Arc<Nic>, Errno> {
    KNOWN.lock().device.upgrade().ok_or(Errno::NODEV)
}

/// A port of both.
struct Both {
    tcp: Box<dyn Listening>,
    rd: Box<dyn Listening>,
    local: SocketAddr,
}

impl Both {
    /// The UDP socket has all addresses of this host, and all peers.
    fn takes(&self, ends: Ends) -> bool {
        let ip = self.local.ip();
        let is_here = ip.is_unspecified() || ends.local.ip() == ip.to_canonical();
        is_here && Config::get().links.choose(ends.peer.ip(), self.local.port()).allows_rd()
    }
}

impl Listening for Both {
    fn accept(&self) -> Result<Option<Box<dyn SetUp>>, Errno> {
        if let Some(connection) = self.tcp.accept()? {
            return Ok(Some(connection));
        }
        while let Some(stream) = self.rd.accept()? {
            if self.takes(stream.ends()) {
                return Ok(Some(stream));
            }
            stream.close(Close::Reset);
        }
        Ok(None)
    }

    fn watch(&self) -> Watch<'_> {
        match self.tcp.watch() {
            Watch::Descriptor(fd) => Watch::Both(fd),
            other => other,
        }
    }

    fn name(&self, name: u64) {
        self.rd.name(name);
    }
}

/// A connection of a peer that has a place. The stream that begins on it has its own ([`Place::hold`]).
struct Own {
    tcp: Box<dyn SetUp>,
    _place: Place,
}

impl SetUp for Own {
    fn ends(&self) -> Ends {
        self.tcp.ends()
    }

    fn set_tos(&self, tos: u8) -> Result<(), Errno> {
        self.tcp.set_tos(tos)
    }

    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal> {
        self.tcp.send_some(bytes)
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal> {
        self.tcp.receive(buffer)
    }

    fn ended(&self) -> bool {
        self.tcp.ended()
    }

    fn close(self: Box<Self>, how: Close) {
        self.tcp.close(how);
    }

    fn watch(&self) -> Watch<'_> {
        self.tcp.watch()
    }

    fn name(&self, name: u64) {
        self.tcp.name(name);
    }

    fn kind(&self) -> Kind {
        self.tcp.kind()
    }

    fn into_link(self: Box<Self>) -> Link {
        self.tcp.into_link()
    }
}
