//! The device of a process: how it is opened, and what happens when the process exits.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_mem::guard;
use uwarp_rnic::VerbsError;
use uwarp_wire::crc::crc32c;

use crate::carriers;
use crate::config::Config;
use crate::fork;
use crate::linger;
use crate::nic::Nic;
use crate::stat;
use crate::trace;

/// The device, once it is open. A forked child may forget it.
static NIC: fork::Device<Arc<Nic>> = fork::Device::new();

/// When the library is loaded.
pub(crate) extern "C" fn prepare_for_forks() {
    fork::install(&NIC, linger::none_is_ours);
}

impl Nic {
    /// The device; the first call starts its engine and thread. Fails when the system gives no descriptors or
    /// threads.
    pub fn open() -> Result<Arc<Self>, VerbsError> {
        if let Some(nic) = NIC.lock().as_ref() {
            return Ok(nic.clone());
        }
        // Of two threads that come here at once, one has opened it for nothing.
        let file = trace::open_if_wanted();
        let mut opened = NIC.lock();
        if let Some(nic) = opened.as_ref() {
            return Ok(nic.clone());
        }
        // The backend finds out what the processor can do, in a cell of the standard library. Here a fork
        // waits for it, as for the device's lock.
        crc32c(&[0]);
        if !Config::get().guard {
            guard::turn_off();
        }
        if let Some(file) = file {
            trace::start(file);
        }
        let nic = Self::start().map_err(|e| {
            tracing::error!("cannot start: {e}{}", limit_behind(&e));
            VerbsError::NoResources("descriptors or threads")
        })?;
        *opened = Some(nic.clone());
        carriers::begin(&nic);
        drop(opened);
        stat::start(&nic);
        Ok(nic)
    }

    /// The device, if it is open.
    pub fn get() -> Option<Arc<Self>> {
        NIC.lock().clone()
    }
}

/// Which limit an error of the engine's start speaks of, and where it can be seen.
fn limit_behind(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        // Of all that is asked for, only a thread is refused so; of memory for its stack, too, by the C
        // library.
        Some(Errno::AGAIN) => {
            "; no thread is left below one of these limits: the user's (`ulimit -u`), the control group's \
             (pids.max in its directory below /sys/fs/cgroup; TasksMax= of a systemd unit, --pids-limit of a \
             container), the system's (`sysctl kernel.threads-max kernel.pid_max`), or that of address space \
             (`ulimit -v`)"
        }
        Some(Errno::MFILE) => "; the process's limit of descriptors is what `ulimit -n` says",
        Some(Errno::NFILE) => "; the whole system's limit is what `sysctl fs.file-max` says",
        _ => "",
    }
}

/// At exit: what was accepted from the program goes out, and unread bytes do not turn the close into a reset.
/// Also for a process that is about to end without exit, from any thread and any signal's handler; not from a
/// child of vfork(2).
pub extern "C" fn close_all() {
    /// Longest delay of an exit by a peer that takes nothing.
    const LIMIT: Duration = Duration::from_secs(2);
    // This thread may have been in the middle of anything, with any lock held, when a signal's handler called
    // exit: it only asks and waits.
    let end = Instant::now() + LIMIT;
    let nic = loop {
        match NIC.try_lock() {
            Some(nic) => break nic.clone(),
            None if Instant::now() < end => std::thread::sleep(Duration::from_micros(200)),
            None => return,
        }
    };
    let Some(nic) = nic else { return };
    while (!nic.engine().exit() || linger::open_streams() > 0) && Instant::now() < end {
        std::thread::sleep(Duration::from_micros(200));
    }
}
