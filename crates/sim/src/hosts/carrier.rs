//! The network as a carrier of the connection manager.

use std::net::SocketAddr;

use rustix::io::Errno;
use uwarp_llp::Link;
use uwarp_llp::carrier::{self, Bind, Bound, Carrier, Close, Ends, Got, Refusal, SetUp, TakePort, Watch};

use super::network::{Listening, Opening, TcpId, Watched, network, network_if_any};
use crate::net;

/// The carrier.
pub struct Simulated;

/// The only one.
pub static CARRIER: Simulated = Simulated;

struct Socket {
    local: SocketAddr,
}

struct Listener {
    local: SocketAddr,
}

struct Connection {
    id: TcpId,
    side: usize,
}

impl Carrier for Simulated {
    fn bind(&self, at: &Bind) -> Result<Box<dyn Bound>, Errno> {
        network(|network| {
            if let Some(errno) = network.refusal() {
                return Err(errno);
            }
            let mut local = at.address;
            if local.port() == 0 && at.port != TakePort::AtConnect {
                local.set_port(network.any_port());
            }
            Ok(Box::new(Socket { local }) as Box<dyn Bound>)
        })
    }
}

impl Bound for Socket {
    fn local(&self) -> SocketAddr {
        self.local
    }

    fn set_tos(&self, _: u8) -> Result<(), Errno> {
        Ok(())
    }

    fn listen(self: Box<Self>, _: usize) -> Result<Box<dyn carrier::Listening>, (Errno, Box<dyn Bound>)> {
        let local = self.local;
        let refused = network(|network| {
            if let Some(errno) = network.refusal() {
                return Some(errno);
            }
            if network.listening.contains_key(&local) {
                return Some(Errno::ADDRINUSE);
            }
            let listening = Listening { owner: network.running, backlog: Default::default(), news: 0 };
            network.listening.insert(local, listening);
            None
        });
        match refused {
            Some(errno) => Err((errno, self)),
            None => Ok(Box::new(Listener { local })),
        }
    }

    fn connect(self: Box<Self>, to: SocketAddr) -> Result<Box<dyn SetUp>, (Refusal, Box<dyn Bound>)> {
        let mut local = self.local;
        let id = network(|network| {
            if let Some(errno) = network.refusal() {
                return Err(errno);
            }
            if local.port() == 0 {
                local.set_port(network.any_port());
            }
            Ok(network.connect(local, to))
        });
        match id {
            Ok(id) => Ok(Box::new(Connection { id, side: 0 })),
            Err(errno) => Err((Refusal::Local(errno), self)),
        }
    }

    fn watch(&self) -> Watch<'_> {
        Watch::Itself
    }
}

impl carrier::Listening for Listener {
    fn accept(&self) -> Result<Option<Box<dyn SetUp>>, Errno> {
        network(|network| {
            if let Some(errno) = network.refusal() {
                return Err(errno);
            }
            let listening = network.listening.get_mut(&self.local);
            let id = listening.and_then(|listening| listening.backlog.pop_front());
            Ok(id.map(|id| Box::new(Connection { id, side: 1 }) as Box<dyn SetUp>))
        })
    }

    fn watch(&self) -> Watch<'_> {
        network(|network| network.watched = Some(Watched::Listening(self.local)));
        Watch::Itself
    }
}

/// An end of a connection that is there.
pub fn connection(id: TcpId, side: usize) -> Box<dyn SetUp> {
    Box::new(Connection { id, side })
}

impl SetUp for Connection {
    fn ends(&self) -> Ends {
        network(|network| {
            let ends = network.tcp.get(&self.id).map(|tcp| tcp.ends).expect("it is open");
            Ends { local: ends[self.side], peer: ends[1 - self.side] }
        })
    }

    fn set_tos(&self, _: u8) -> Result<(), Errno> {
        Ok(())
    }

    fn send_some(&self, bytes: &[u8]) -> Result<usize, Refusal> {
        network(|network| {
            let now = network.now;
            let tcp = network.tcp.get_mut(&self.id).ok_or(Refusal::Gone)?;
            match (self.side, tcp.state) {
                (0, Opening::Refused(at)) if at <= now => return Err(Refusal::Refused),
                (0, Opening::Syn(..) | Opening::Answered(_) | Opening::Refused(_)) => return Ok(0),
                _ => {}
            }
            match tcp.pipes[self.side].send(now, bytes) {
                Ok(sent) => {
                    tcp.set_up[self.side].0 += sent as u64;
                    network.activity += 1;
                    Ok(sent)
                }
                Err(net::Refusal::WouldBlock) => Ok(0),
                Err(net::Refusal::Reset) => Err(Refusal::Gone),
            }
        })
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<Got, Refusal> {
        network(|network| {
            let now = network.now;
            let tcp = network.tcp.get_mut(&self.id).ok_or(Refusal::Gone)?;
            match (self.side, tcp.state) {
                (0, Opening::Refused(at)) if at <= now => return Err(Refusal::Refused),
                (0, Opening::Syn(..) | Opening::Answered(_) | Opening::Refused(_)) => {
                    return Ok(Got::Nothing);
                }
                _ => {}
            }
            match tcp.pipes[1 - self.side].recv(now, buffer.len()) {
                Ok(bytes) if bytes.is_empty() => Ok(Got::End),
                Ok(bytes) => {
                    buffer[..bytes.len()].copy_from_slice(&bytes);
                    tcp.set_up[1 - self.side].1 += bytes.len() as u64;
                    network.activity += 1;
                    Ok(Got::Bytes(bytes.len()))
                }
                Err(net::Refusal::WouldBlock) => Ok(Got::Nothing),
                Err(net::Refusal::Reset) => Err(Refusal::Gone),
            }
        })
    }

    fn ended(&self) -> bool {
        network(|network| {
            let now = network.now;
            network.tcp.get(&self.id).is_none_or(|tcp| tcp.pipes[1 - self.side].hung_up(now))
        })
    }

    fn close(self: Box<Self>, how: Close) {
        network(|network| network.close(self.id, self.side, how == Close::Reset));
    }

    fn watch(&self) -> Watch<'_> {
        network(|network| network.watched = Some(Watched::Tcp(self.id, self.side)));
        Watch::Itself
    }

    /// A queue pair continues on the pipes themselves; see [`super::process`].
    fn into_link(self: Box<Self>) -> Link {
        unreachable!("streams of the simulator have no link")
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // At the end of a world, nothing is left to close.
        network_if_any(|network| network.close(self.id, self.side, false));
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        network_if_any(|network| {
            // After its process has ended, another one may have the port.
            let pid = network.running;
            if network.listening.get(&self.local).is_none_or(|listening| listening.owner != pid) {
                return;
            }
            let left = network.listening.remove(&self.local).map(|listening| listening.backlog);
            // What waits to be accepted is reset.
            left.into_iter().flatten().for_each(|id| network.close(id, 1, true));
        });
    }
}
