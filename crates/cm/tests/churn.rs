//! Connections are made and cancelled at any moment, by several threads at once: nothing may hang, panic or
//! be left over.

mod common;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use uwarp_cm::{Cm, ConnParam, EventChannel, EventKind, GetError, Id, Timeouts};
use uwarp_driver::{Nic, Qp};

use common::qp;

/// Longest the whole may take; reached only when something hangs.
const PATIENCE: Duration = Duration::from_secs(100);
const CLIENTS: u64 = 3;
const ROUNDS: u32 = 150;

/// Xorshift: the same choices in each run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % sides
    }
}

fn non_blocking(channel: &EventChannel) {
    // SAFETY: the channel outlives the borrow.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(channel.fd()) };
    let flags = rustix::fs::fcntl_getfl(fd).unwrap();
    rustix::fs::fcntl_setfl(fd, flags | rustix::fs::OFlags::NONBLOCK).unwrap();
}

fn client(cm: &Arc<Cm>, at: SocketAddr, seed: u64) {
    let mut dice = Dice(seed);
    let channel = EventChannel::new(cm.nic()).unwrap();
    non_blocking(&channel);
    for _ in 0..ROUNDS {
        let id = Id::new(cm, &channel);
        let qp = qp();
        id.resolve_address(None, at).unwrap();
        id.resolve_route().unwrap();
        id.connect(&qp, ConnParam::DEFAULT, b"churn").unwrap();
        let patience = dice.roll(4);
        let mut ended = false;
        for _ in 0..patience * 200 {
            match channel.get() {
                Ok(event) => {
                    let kind = event.kind;
                    event.acknowledge();
                    match kind {
                        EventKind::Established if dice.roll(2) == 0 => id.disconnect().unwrap(),
                        EventKind::Established => qp.destroy(),
                        EventKind::AddressResolved | EventKind::RouteResolved => {}
                        _ => ended = true,
                    }
                }
                Err(GetError::WouldBlock) => std::thread::yield_now(),
                Err(GetError::Interrupted | GetError::NothingYet) => {}
                Err(GetError::Closed) => unreachable!("nobody closes it"),
            }
            if ended {
                break;
            }
        }
        match dice.roll(3) {
            0 => {
                let _ = id.disconnect();
            }
            1 => qp.destroy(),
            _ => {}
        }
        id.destroy();
        qp.destroy();
    }
    assert!(channel.is_empty());
}

fn server(listener: &Arc<Id>, stop: &AtomicBool) {
    let mut dice = Dice(0x5EED);
    let channel = listener.channel();
    let mut alive: Vec<(Arc<Id>, Arc<Qp>)> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let event = match channel.get() {
            Ok(event) => event,
            Err(_) => {
                std::thread::yield_now();
                continue;
            }
        };
        let (id, kind) = (Arc::clone(&event.id), event.kind);
        event.acknowledge();
        match kind {
            EventKind::ConnectRequest => match dice.roll(5) {
                0 => {
                    let _ = id.reject(b"churn");
                    id.destroy();
                }
                1 => id.destroy(),
                _ => {
                    let qp = qp();
                    if id.accept(&qp, None, b"").is_ok() {
                        alive.push((id, qp));
                    } else {
                        id.destroy();
                    }
                }
            },
            EventKind::Established if dice.roll(3) == 0 => id.disconnect().unwrap(),
            EventKind::Established => {}
            _ => {
                if let Some(at) = alive.iter().position(|(other, _)| Arc::ptr_eq(other, &id)) {
                    let (id, qp) = alive.swap_remove(at);
                    id.destroy();
                    qp.destroy();
                }
            }
        }
    }
    for (id, qp) in alive {
        id.destroy();
        qp.destroy();
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn churn() {
    let (done, waiting) = mpsc::channel();
    std::thread::spawn(move || {
        let cm = Cm::new(&Nic::open().unwrap(), Timeouts::default());
        // The first queue pair brings the sockets of the device's numbers.
        let _kept = qp();
        let before = descriptors();
        let channel = EventChannel::new(cm.nic()).unwrap();
        non_blocking(&channel);
        let listener = Id::new(&cm, &channel);
        listener.bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let at = listener.local_address().unwrap();
        listener.listen(16).unwrap();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| server(&listener, &stop));
            let clients: Vec<_> = (0..CLIENTS)
                .map(|n| {
                    scope.spawn({
                        let cm = &cm;
                        move || client(cm, at, n + 7)
                    })
                })
                .collect();
            for thread in clients {
                thread.join().unwrap();
            }
            stop.store(true, Ordering::Relaxed);
        });
        listener.destroy();
        assert!(channel.is_empty());
        drop((listener, channel));
        // Closed streams linger for a bounded time.
        while descriptors() > before {
            std::thread::sleep(Duration::from_millis(10));
        }
        done.send(()).unwrap();
    });
    waiting.recv_timeout(PATIENCE).expect("something hangs, or descriptors are left open");
}
