//! Begin and fork of the process.

use std::cell::UnsafeCell;
use std::net::{IpAddr, SocketAddr};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use uwarp_preload::rules::{self, Role, Rules, Trust, Way};

use crate::agree::{said, service, table};
use crate::{ending, fds, relay, sys};

static RULES: OnceLock<Rules> = OnceLock::new();
/// The process that the sockets are of.
static PROCESS: AtomicI32 = AtomicI32::new(0);
static FORKED: AtomicBool = AtomicBool::new(false);

#[cfg_attr(not(test), used)]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
static BEGIN: extern "C" fn() = begin;

/// Runs before the program, and before libraries that the program needs.
extern "C" fn begin() {
    let Some(given) = std::env::var_os(rules::VARIABLE) else { return };
    let rules = match Rules::read(&given.to_string_lossy()) {
        Ok(rules) => rules,
        Err(reason) => {
            // The command has checked them; but the variable may be set without it.
            sys::complain(&format!("{} is not used, and all sockets stay TCP: {reason}", rules::VARIABLE));
            return;
        }
    };
    if rules.is_empty() || RULES.set(rules).is_err() {
        return;
    }
    PROCESS.store(sys::pid(), Ordering::Relaxed);
    // Before there are threads: a child that was forked while one of them read it would wait for ever.
    said::is_wanted();
    // SAFETY: functions that live as long as the process: this library is never unloaded.
    unsafe {
        libc::pthread_atfork(Some(before), Some(parent), Some(forked));
    }
    fds::begin();
}

/// What a fork holds, so that no child finds it half changed.
struct Across(UnsafeCell<Option<(table::Table, service::Held, relay::Held)>>);

// SAFETY: only the thread that forks, and the one that is its copy, uses the cell.
unsafe impl Sync for Across {}

static ACROSS: Across = Across(UnsafeCell::new(None));

unsafe extern "C" fn before() {
    ending::stop_at_the_end();
    relay::before_children();
    let table = table::before_fork();
    let service = service::before_fork();
    let relay = relay::before_fork();
    // SAFETY: this thread has the locks.
    unsafe { *ACROSS.0.get() = Some((table, service, relay)) };
}

unsafe extern "C" fn parent() {
    // SAFETY: this thread has the locks.
    if let Some((mut table, service, relay)) = unsafe { (*ACROSS.0.get()).take() } {
        drop((service, relay));
        table::in_parent(&mut table);
    }
}

/// A child in which no rule has applied yet begins anew: daemons fork before they listen.
unsafe extern "C" fn forked() {
    // SAFETY: this thread is the copy of the one that has the locks, and there is no other.
    if let Some((mut table, service, relay)) = unsafe { (*ACROSS.0.get()).take() } {
        relay::in_child(relay);
        service::in_child(service);
        table::in_child(&mut table);
    }
    // Copies of what is behind stand-ins would keep the parent's connections open.
    for (_, sock) in fds::all().unwrap_or_default() {
        if let Some(conn) = sock.conn() {
            conn.close_copy();
            sock.close_copy();
        }
    }
    if crate::rsockets::is_loading() {
        FORKED.store(true, Ordering::Relaxed);
    } else {
        PROCESS.store(sys::pid(), Ordering::Relaxed);
    }
}

/// Whether this is a child of the process that opened the device, with memory of its own.
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Whether this is a child, possibly one that has its parent's memory (vfork): nothing may be changed there.
pub fn is_child() -> bool {
    is_forked() || sys::pid() != PROCESS.load(Ordering::Relaxed)
}

/// What a socket becomes.
pub fn decide(role: Role, address: SocketAddr) -> Way {
    match RULES.get() {
        // The device is the parent's.
        Some(rules) if !is_forked() => rules.decide(role, address),
        _ => Way::Tcp,
    }
}

/// Whether a connection that a listener of the kernel has accepted may become iWARP's, and who is believed
/// then.
pub fn upgrades(own: SocketAddr, peer: IpAddr) -> Option<Trust> {
    RULES.get().filter(|_| !is_forked())?.upgrades(own, peer)
}
