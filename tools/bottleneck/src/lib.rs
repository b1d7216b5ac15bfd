//! A path between two network namespaces that is as slow, as long and as bad as one asks for: a TUN device in
//! each, and two threads that carry the packets between them.
//!
//! ```text
//!   device ─▶ loss ─▶ queue with a rate, drops at its tail ─▶ delay, now and then more ─▶ device
//! ```
//!
//! What the kernel's netem does, for kernels without it. Times are as exact as a thread's sleep (some 50 µs
//! on a quiet machine, a time slice beside programs that spin), so paths below half a millisecond are not
//! what they say.
//!
//! | module | what it holds |
//! |---|---|
//! | [`shape`] | what happens to a packet and when, as a function of the times at which packets come |
//! | [`tun`] | the devices (the `unsafe` room) |
//! | here | the threads |

mod shape;
#[allow(unsafe_code)]
mod tun;

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

pub use shape::Shape;
use shape::{Fate, Lane};

/// Packets of this length at most: what a TUN device can have as its MTU.
const LONGEST: usize = 65_535;

/// What one direction has done.
#[derive(Debug, Default)]
struct Counters {
    carried: AtomicU64,
    lost: AtomicU64,
    full: AtomicU64,
    too_long: AtomicU64,
    late: AtomicU64,
    most: AtomicU64,
}

/// What one direction has done so far, in packets but for `most_bytes`.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Written to the other device.
    pub carried: u64,
    /// Lost at random.
    pub lost: u64,
    /// Dropped because the queue was full.
    pub full: u64,
    /// Lost because they were longer than the path takes.
    pub too_long: u64,
    /// Later than those behind them.
    pub late: u64,
    /// Bytes under way at once, at most.
    pub most_bytes: u64,
}

/// Both directions. Dropped, the devices are gone.
#[derive(Debug)]
pub struct Bottleneck {
    counters: [Arc<Counters>; 2],
    shapes: [Arc<Mutex<Shape>>; 2],
    stop: Arc<OwnedFd>,
    threads: Vec<JoinHandle<()>>,
}

/// The name of the device in each namespace.
pub const DEVICE: &str = "tun0";

impl Bottleneck {
    /// Makes a device named [`DEVICE`] in each of two namespaces (files below `/run/netns`, or
    /// `/proc/PID/ns/net`) and begins to carry packets: those that the first sends as the first shape says.
    /// The devices have no addresses and are down; `seed` draws what is random.
    ///
    /// # Errors Without `CAP_NET_ADMIN` in both namespaces and `CAP_SYS_ADMIN` here (EPERM), or without
    /// `/dev/net/tun`.
    pub fn between(namespaces: [File; 2], shapes: [Shape; 2], seed: u64) -> io::Result<Bottleneck> {
        let [near, far] = namespaces.map(|namespace| tun::device_in(namespace, DEVICE));
        let (near, far) = (Arc::new(near?), Arc::new(far?));
        let mut path = Bottleneck {
            counters: Default::default(),
            shapes: shapes.map(|shape| Arc::new(Mutex::new(shape))),
            stop: Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?),
            threads: Vec::new(),
        };
        for (way, (from, to)) in [(near.clone(), far.clone()), (far, near)].into_iter().enumerate() {
            let (counters, shape) = (path.counters[way].clone(), path.shapes[way].clone());
            let stop = path.stop.clone();
            let lane = Lane::new(seed.wrapping_add(way as u64));
            let carrier = Carrier { from, to, stop, shape, counters, lane, began: Instant::now() };
            let thread = std::thread::Builder::new().name("bottleneck".into());
            path.threads.push(thread.spawn(|| carrier.run())?);
        }
        Ok(path)
    }

    /// From now on it is so.
    pub fn reshape(&self, shapes: [Shape; 2]) {
        for (place, shape) in self.shapes.iter().zip(shapes) {
            *place.lock().unwrap_or_else(|e| e.into_inner()) = shape;
        }
    }

    /// Of each direction.
    pub fn counts(&self) -> [Counts; 2] {
        [0, 1].map(|way| {
            let Counters { carried, lost, full, too_long, late, most } = &*self.counters[way];
            let [carried, lost, full, too_long, late, most_bytes] =
                [carried, lost, full, too_long, late, most].map(|counter| counter.load(Relaxed));
            Counts { carried, lost, full, too_long, late, most_bytes }
        })
    }
}

impl Drop for Bottleneck {
    fn drop(&mut self) {
        // An eventfd takes it but for a count that nobody reaches.
        _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        for thread in self.threads.drain(..) {
            _ = thread.join();
        }
    }
}

/// One direction.
struct Carrier {
    from: Arc<OwnedFd>,
    to: Arc<OwnedFd>,
    stop: Arc<OwnedFd>,
    shape: Arc<Mutex<Shape>>,
    counters: Arc<Counters>,
    lane: Lane,
    began: Instant,
}

impl Carrier {
    fn run(mut self) {
        // Sleeps end when they should, and not when the system finds it convenient. A kernel that refuses is
        // less exact.
        _ = rustix::thread::set_current_timer_slack(NonZeroU64::new(1));
        let mut buffer = vec![0; LONGEST];
        loop {
            self.take(&mut buffer);
            let next = self.give();
            if self.sleep(next) {
                return;
            }
        }
    }

    fn now(&self) -> Duration {
        self.began.elapsed()
    }

    /// Takes what the device has, up to a number: what is due goes on between.
    fn take(&mut self, buffer: &mut [u8]) {
        const AT_ONCE: usize = 32;
        let shape = *self.shape.lock().unwrap_or_else(|e| e.into_inner());
        for _ in 0..AT_ONCE {
            // EIO: the device is down.
            let Ok(length) = rustix::io::read(&self.from, &mut *buffer) else { break };
            let now = self.now();
            let counter = match self.lane.arrives(&shape, now, &buffer[..length]) {
                Fate::Goes => None,
                Fate::Late => Some(&self.counters.late),
                Fate::Lost => Some(&self.counters.lost),
                Fate::NoRoom => Some(&self.counters.full),
                Fate::TooLong => Some(&self.counters.too_long),
            };
            if let Some(counter) = counter {
                counter.fetch_add(1, Relaxed);
            }
            self.counters.most.fetch_max(self.lane.bytes(), Relaxed);
        }
    }

    /// Gives the other device what is due. When the next is.
    fn give(&mut self) -> Option<Duration> {
        loop {
            let now = self.now();
            match self.lane.due(now) {
                // It may be down: a wire that is not plugged in.
                Ok(packet) => {
                    if rustix::io::write(&self.to, &packet).is_ok() {
                        self.counters.carried.fetch_add(1, Relaxed);
                    }
                }
                Err(next) => return next,
            }
        }
    }

    /// Until there is something to take, or `until`. Whether it is over.
    fn sleep(&self, until: Option<Duration>) -> bool {
        // A device that is down reports an error at once, and again.
        const DOWN: Duration = Duration::from_millis(1);
        let timeout = until.map(|until| until.saturating_sub(self.now()));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut fds = [PollFd::new(&*self.from, PollFlags::IN), PollFd::new(&*self.stop, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return true,
        }
        if fds[0].revents().contains(PollFlags::ERR) {
            std::thread::sleep(DOWN);
        }
        !fds[1].revents().is_empty()
    }
}
