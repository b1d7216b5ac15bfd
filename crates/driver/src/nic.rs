//! The device: limits, addresses, and the one engine behind it.

use std::collections::BTreeMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Arc, Once, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use uwarp_rnic::VerbsError;
use uwarp_rnic::mem::guard;
use uwarp_rnic::qp::{Counters, MAX_MESSAGE};

use crate::config::Config;
use crate::engine::Engine;
use crate::fork;
use crate::linger::open_streams;
use crate::qp::Qp;
use crate::qpn::Numbers;
use crate::stat;

/// What the device takes at most. Numbers of objects are for programs to go by, and no more is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Limits {
    pub max_mr_size: u64,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_sge_rd: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_pd: u32,
    pub max_qp_rd_atom: u32,
    pub max_inline: u32,
    pub max_message: u32,
}

const LIMITS: Limits = Limits {
    max_mr_size: u64::MAX,
    max_qp: 64 * 1024,
    max_qp_wr: 32 * 1024,
    max_sge: 32,
    max_sge_rd: 32,
    max_srq: 64 * 1024,
    max_srq_wr: 32 * 1024,
    max_srq_sge: 32,
    max_cq: 64 * 1024,
    max_cqe: 4 * 1024 * 1024,
    max_mr: 1024 * 1024,
    max_pd: 64 * 1024,
    max_qp_rd_atom: 128,
    max_inline: 1024,
    max_message: MAX_MESSAGE,
};

/// The device of this process.
pub struct Nic {
    engine: Arc<Engine>,
    pub(crate) numbers: Numbers,
    /// For whoever wants to see them all; by number.
    qps: Mutex<BTreeMap<u32, Weak<Qp>>>,
    departed: Mutex<Counters>,
}

/// Which limit an error of the engine's start speaks of, and where it can be seen.
fn limit_behind(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        // Of all that is asked for, only a thread is refused so; of memory for its stack, too, by the C library.
        Some(Errno::AGAIN) => {
            "; no thread is left below one of these limits: the user's (`ulimit -u`), the control group's (pids.max in its \
             directory below /sys/fs/cgroup; TasksMax= of a systemd unit, --pids-limit of a container), the system's \
             (`sysctl kernel.threads-max kernel.pid_max`), or that of address space (`ulimit -v`)"
        }
        Some(Errno::MFILE) => "; the process's limit of descriptors is what `ulimit -n` says",
        Some(Errno::NFILE) => "; the whole system's limit is what `sysctl fs.file-max` says",
        _ => "",
    }
}

/// The device, once it is open. A forked child may forget it.
pub(crate) static NIC: Mutex<Option<Arc<Nic>>> = Mutex::new(None);

impl Nic {
    /// The device; the first call starts its engine and thread. Fails when the system gives no descriptors or threads, or in a
    /// child that was forked while the program had something open.
    pub fn open() -> Result<Arc<Self>, VerbsError> {
        if fork::forked() {
            return Err(VerbsError::Forked);
        }
        static AT_EXIT: Once = Once::new();
        fork::install();
        if let Some(nic) = NIC.lock().as_ref() {
            return Ok(nic.clone());
        }
        // Of two threads that come here at once, one has opened it for nothing.
        let trace = crate::trace::open_if_wanted();
        let mut opened = NIC.lock();
        if let Some(nic) = opened.as_ref() {
            return Ok(nic.clone());
        }
        if !Config::get().guard {
            guard::turn_off();
        }
        if let Some(trace) = trace {
            crate::trace::start(trace);
        }
        let engine = Engine::start().map_err(|e| {
            tracing::error!("cannot start: {e}{}", limit_behind(&e));
            VerbsError::NoResources("descriptors or threads")
        })?;
        let nic = Arc::new(Self {
            engine,
            numbers: Numbers::default(),
            qps: Mutex::default(),
            departed: Mutex::default(),
        });
        *opened = Some(nic.clone());
        drop(opened);
        stat::start(&nic);
        AT_EXIT.call_once(|| fork::at_exit(close_all));
        Ok(nic)
    }

    /// The device, if it is open.
    pub fn get() -> Option<Arc<Self>> {
        if fork::forked() { None } else { NIC.lock().clone() }
    }

    /// The engine.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// A queue pair was made.
    pub(crate) fn arrive(&self, qp: &Arc<Qp>) {
        fork::object_made();
        self.qps.lock().insert(qp.qpn(), Arc::downgrade(qp));
    }

    /// A queue pair was destroyed, having done so much. Once for each.
    pub(crate) fn depart(&self, qpn: u32, counters: Counters) {
        if self.qps.lock().remove(&qpn).is_some() {
            fork::object_gone();
            *self.departed.lock() += counters;
        }
    }

    /// All queue pairs that are not destroyed, in the order of their numbers.
    pub(crate) fn queue_pairs(&self) -> Vec<Weak<Qp>> {
        self.qps.lock().values().cloned().collect()
    }

    /// What those did that are.
    pub(crate) fn departed(&self) -> Counters {
        *self.departed.lock()
    }

    /// The device's limits.
    pub fn limits(&self) -> &'static Limits {
        &LIMITS
    }

    /// The host's addresses, in the order of the GID table: the default route's interface first, loopback only if
    /// nothing else is up.
    pub fn addresses(&self) -> Vec<IpAddr> {
        crate::address::list().into_iter().map(|a| a.ip).collect()
    }
}

/// At exit: what was accepted from the program goes out, and unread bytes do not turn the close into a reset.
extern "C" fn close_all() {
    /// Longest delay of an exit by a peer that takes nothing.
    const LIMIT: Duration = Duration::from_secs(2);
    if fork::forked() {
        return;
    }
    // This thread may have been in the middle of anything, with any lock held, when a signal's handler called exit: it only
    // asks and waits.
    let end = Instant::now() + LIMIT;
    let nic = loop {
        match NIC.try_lock() {
            Some(nic) => break nic.clone(),
            None if Instant::now() < end => std::thread::sleep(Duration::from_micros(200)),
            None => return,
        }
    };
    let Some(nic) = nic else { return };
    while (!nic.engine().exit() || open_streams() > 0) && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(200));
    }
}
