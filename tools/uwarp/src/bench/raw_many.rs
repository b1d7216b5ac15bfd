//! What many connections are compared with: as many bare TCP connections, made and taken the same way.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::time::Instant;

use rustix::event::{Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto};

use super::protocol::{Failure, Figure, Result};
use super::raw::{half, ping_figure};
use super::ways::{Waiting, Way};

/// One end of many TCP connections.
#[derive(Default)]
pub struct RawCrowd {
    listener: Option<TcpListener>,
    members: Vec<OwnedFd>,
}

/// The backlog of uwarp's own listeners in the kernel.
const BACKLOG: i32 = 1024;

impl RawCrowd {
    /// Listens; returns the port.
    pub fn listen(&mut self, address: IpAddr) -> Result<u16> {
        let listener = TcpListener::bind((address, 0)).map_err(Failure::of("listen"))?;
        net::listen(&listener, BACKLOG).map_err(Failure::of("listen"))?;
        let port = listener.local_addr().map_err(Failure::of("listen"))?.port();
        self.listener = Some(listener);
        Ok(port)
    }

    /// Makes connections, up to `at_once` at a time. One is established when the byte has come that the other
    /// end sends after `accept`: as with uwarp, both programs then know of it.
    pub fn connect(&mut self, to: SocketAddr, count: u32, at_once: u32, way: Way) -> Result<Figure> {
        let spins = matches!(way, Way::Open { connect: Waiting::Spin, .. });
        if at_once == 1 {
            return self.connect_in_turn(to, count, spins);
        }
        let timeout = if spins { Some(Timespec::default()) } else { None };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(Failure::of("epoll"))?;
        let mut halves = Vec::with_capacity(count as usize);
        let mut begins = Vec::with_capacity(count as usize);
        let first = self.members.len();
        let start = Instant::now();
        let (mut begun, mut standing) = (0, 0);
        let mut events = Vec::with_capacity(64);
        while standing < count {
            while begun < count && begun - standing < at_once {
                begins.push(Instant::now());
                let fd = connecting(to, false)?;
                let data = epoll::EventData::new_u64(begun.into());
                epoll::add(&epoll, &fd, data, epoll::EventFlags::IN).map_err(Failure::of("epoll"))?;
                self.members.push(fd);
                begun += 1;
            }
            events.clear();
            match epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(Failure(format!("epoll: {error}"))),
            }
            for event in &events {
                let index = event.data.u64() as usize;
                let (Some(fd), Some(begin)) = (self.members.get(first + index), begins.get(index)) else {
                    continue;
                };
                match net::recv(fd, &mut [0; 1], RecvFlags::DONTWAIT) {
                    Ok((1, _)) => {}
                    Ok(_) => return Err(Failure::new("raw TCP: the peer closed")),
                    Err(Errno::AGAIN) => continue,
                    Err(error) => return Err(Failure(format!("raw TCP: {error}"))),
                }
                epoll::delete(&epoll, fd).map_err(Failure::of("epoll"))?;
                // Twice, because the summary is of halves.
                halves.push(half(begin.elapsed() * 2));
                standing += 1;
            }
        }
        let seconds = start.elapsed().as_secs_f64();
        let p99 = ping_figure(&mut halves)?.p99;
        Ok(Figure { value: f64::from(count) / seconds, p99, operations: count.into() })
    }

    /// The same, one at a time and without epoll.
    fn connect_in_turn(&mut self, to: SocketAddr, count: u32, spins: bool) -> Result<Figure> {
        let flags = if spins { RecvFlags::DONTWAIT } else { RecvFlags::empty() };
        let mut halves = Vec::with_capacity(count as usize);
        let start = Instant::now();
        for _ in 0..count {
            let begin = Instant::now();
            let fd = connecting(to, !spins)?;
            loop {
                match net::recv(&fd, &mut [0; 1], flags) {
                    Ok((1, _)) => break,
                    Ok(_) => return Err(Failure::new("raw TCP: the peer closed")),
                    Err(Errno::AGAIN | Errno::INTR | Errno::NOTCONN) => {}
                    Err(error) => return Err(Failure(format!("raw TCP: {error}"))),
                }
            }
            // Twice, because the summary is of halves.
            halves.push(half(begin.elapsed() * 2));
            self.members.push(fd);
        }
        let seconds = start.elapsed().as_secs_f64();
        let p99 = ping_figure(&mut halves)?.p99;
        Ok(Figure { value: f64::from(count) / seconds, p99, operations: count.into() })
    }

    /// Takes `count` connections.
    pub fn accept(&mut self, count: u32, way: Way) -> Result<()> {
        let listener = self.listener.as_ref().ok_or_else(|| Failure::new("not listening"))?;
        let spins = matches!(way, Way::Open { accept: Waiting::Spin, .. });
        listener.set_nonblocking(spins).map_err(Failure::of("listen"))?;
        for _ in 0..count {
            let fd = loop {
                match net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    answer => break answer.map_err(Failure::of("accept"))?,
                }
            };
            net::sockopt::set_tcp_nodelay(&fd, true).map_err(Failure::of("TCP_NODELAY"))?;
            net::send(&fd, &[1], SendFlags::NOSIGNAL).map_err(Failure::of("raw TCP: send"))?;
            self.members.push(fd);
        }
        Ok(())
    }

    /// Closes all of them.
    pub fn close(&mut self) {
        self.members.clear();
    }
}

fn connecting(to: SocketAddr, blocks: bool) -> Result<OwnedFd> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = if blocks { SocketFlags::CLOEXEC } else { SocketFlags::CLOEXEC | SocketFlags::NONBLOCK };
    let fd = net::socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP))
        .map_err(Failure::of("socket"))?;
    net::sockopt::set_tcp_nodelay(&fd, true).map_err(Failure::of("TCP_NODELAY"))?;
    match net::connect(&fd, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(fd),
        Err(error) => Err(Failure(format!("raw TCP: connect: {error}"))),
    }
}
