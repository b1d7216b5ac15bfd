//! Sockets of another user or of another host: `py/stranger.py` makes them, and the attacker writes their
//! bytes. What the system lets a process bind or connect is decided by who makes the socket.

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use super::numbers::{Cookie, cookie_of, cookie_request, request, said};
use super::peer::{PATIENCE, Peer};
use crate::netns::NetNs;
use crate::{Context, Outcome, fail};

/// The user that it is; no other process of a test is.
const USER: &str = "65534";

/// A process of another user in this network namespace.
#[derive(Debug)]
pub struct Stranger {
    process: Child,
    lines: UnixStream,
}

/// A port that it has.
#[derive(Debug)]
pub struct Port {
    /// Of UDP.
    pub udp: UdpSocket,
    /// Of TCP, listening.
    pub tcp: TcpListener,
}

/// What became of a request.
#[derive(Debug)]
pub enum Tried {
    /// It was accepted, with this introduction.
    Accepted(Peer, Vec<u8>),
    /// It was turned away with this code, 0 if none was said.
    Rejected(u8),
    /// The connection was closed.
    Closed,
    /// Neither, yet.
    Waits(Peer),
}

impl Stranger {
    /// Starts it.
    pub fn start(ns: &NetNs) -> Outcome<Self> {
        let (lines, theirs) = UnixStream::pair().context("a pair of sockets")?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", ns.name(), "setpriv"]);
        command.args([format!("--reuid={USER}"), format!("--regid={USER}"), "--clear-groups".into()]);
        // Not from its file, and not the first one in PATH: the user may have no right to read those.
        command.args(["/usr/bin/python3", "-c", include_str!("../../py/stranger.py")]);
        let process = command.stdin(Stdio::from(OwnedFd::from(theirs))).spawn().context("python3")?;
        lines.set_read_timeout(Some(2 * PATIENCE)).context("time limit")?;
        Ok(Self { process, lines })
    }

    fn sockets(&mut self, line: &str) -> Outcome<Vec<OwnedFd>> {
        self.lines.write_all(format!("{line}\n").as_bytes()).context("the stranger")?;
        let mut byte = [0];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut byte)];
        recvmsg(&self.lines, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC).context("the stranger")?;
        let rights = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(rights) => Some(rights),
            _ => None,
        });
        let sockets: Vec<OwnedFd> = rights.flatten().collect();
        if sockets.is_empty() {
            let mut error = [0; 200];
            let more = self.lines.read(&mut error).unwrap_or(0);
            let first = char::from(byte[0]);
            fail!("the stranger: {line}: {first}{}", String::from_utf8_lossy(&error[..more]));
        }
        Ok(sockets)
    }

    /// Takes a port, in UDP and in TCP; 0: any.
    pub fn bind(&mut self, address: &str, port: u16) -> Outcome<Port> {
        let sockets = self.sockets(&format!("bind {address} {port}"))?;
        let Ok([udp, tcp]) = <[OwnedFd; 2]>::try_from(sockets) else { fail!("not two sockets") };
        let udp = UdpSocket::from(udp);
        udp.set_read_timeout(Some(PATIENCE / 30)).context("time limit")?;
        Ok(Port { udp, tcp: TcpListener::from(tcp) })
    }

    /// Connects to there, and sends nothing.
    pub fn connect(&mut self, address: &str, port: u16) -> Outcome<Peer> {
        let socket = self.sockets(&format!("connect {address} {port}"))?.pop();
        let Some(socket) = socket else { fail!("no connection") };
        Peer::over(TcpStream::from(socket))
    }

    /// Sends a request of MPA with this introduction to there.
    pub fn request(&mut self, address: &str, port: u16, introduction: &[u8]) -> Outcome<Peer> {
        let mut peer = self.connect(address, port)?;
        peer.send(&request(introduction).bytes())?;
        Ok(peer)
    }

    /// The same, and what becomes of it within half a second.
    pub fn try_request(&mut self, address: &str, port: u16, introduction: &[u8]) -> Outcome<Tried> {
        Tried::of(self.request(address, port, introduction)?)
    }
}

impl Tried {
    /// What has become of a request.
    pub fn of(mut peer: Peer) -> Outcome<Tried> {
        peer.tcp.set_read_timeout(Some(PATIENCE / 120)).context("time limit")?;
        let waits = peer.tcp.peek(&mut [0]).is_err_and(|e| e.kind() == std::io::ErrorKind::WouldBlock);
        peer.tcp.set_read_timeout(Some(PATIENCE)).context("time limit")?;
        if waits {
            return Ok(Tried::Waits(peer));
        }
        let Some(reply) = peer.read_setup()? else { return Ok(Tried::Closed) };
        let words = said(&reply).to_vec();
        if reply.flags & super::encode::REJECT != 0 {
            return Ok(Tried::Rejected(words.get(7).copied().unwrap_or(0)));
        }
        peer.reply = Some(reply);
        Ok(Tried::Accepted(peer, words))
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Port {
    /// Its number.
    pub fn number(&self) -> Outcome<u16> {
        Ok(self.udp.local_addr().context("its address")?.port())
    }

    /// Asks there for a cookie, three times at most. `None`: no answer.
    pub fn cookie(&self, to: (&str, u16), source: u32, destination: u32) -> Outcome<Option<Cookie>> {
        for token in 1..=3 {
            self.udp.send_to(&cookie_request(source, destination, token), to).context("asking")?;
            let mut bytes = [0; 512];
            if let Ok(len) = self.udp.recv(&mut bytes)
                && let Some(cookie) = cookie_of(&bytes[..len], token)
            {
                return Ok(Some(cookie));
            }
        }
        Ok(None)
    }
}
