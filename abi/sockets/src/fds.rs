//! What each descriptor of the process is.
//!
//! One byte for each, which every call reads first; nothing else happens for descriptors that no rule
//! concerns. Descriptors above [`MOST`] are the kernel's in any case.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

use rustc_hash::FxHashMap;
use uwarp_process::RwLock;

use crate::sock::Sock;

const MOST: usize = 1 << 20;

/// A TCP socket that neither connects nor listens yet: a rule may choose it.
const CANDIDATE: u8 = 1;
/// A rule has chosen it; it is in [`SOCKS`].
const RULED: u8 = 2;
/// Beside `RULED`: the program wants it to survive exec.
const KEPT: u8 = 4;
/// A descriptor of this library, which the program knows nothing of.
const OWN: u8 = 8;

/// A connection of the kernel's that may become iWARP's; it is in `agree::table`.
const ASKING: u8 = 16;
/// A listener of the kernel's, whose connections may become iWARP's.
const OFFERING: u8 = 32;
/// Beside `CANDIDATE`: another descriptor is the same socket.
const COPIED: u8 = 64;

/// In the data section without content: pages come into being when a rule chooses something.
static KINDS: [AtomicU8; MOST] = [const { AtomicU8::new(0) }; MOST];
/// How many descriptors are ruled.
static RULED_NOW: AtomicUsize = AtomicUsize::new(0);
/// How many descriptors are asking.
static ASKING_NOW: AtomicUsize = AtomicUsize::new(0);
/// There are rules.
static RULES: AtomicBool = AtomicBool::new(false);

/// (The process's own numbers: nobody chooses them so that they collide.)
static SOCKS: RwLock<Option<FxHashMap<c_int, Arc<Sock>>>, 29> = RwLock::new(None);

#[inline]
fn kind(fd: c_int) -> Option<&'static AtomicU8> {
    KINDS.get(usize::try_from(fd).ok()?)
}

#[inline]
fn has(fd: c_int, bit: u8) -> bool {
    kind(fd).is_some_and(|kind| kind.load(Ordering::Relaxed) & bit != 0)
}

/// Whether a rule has chosen it.
#[inline]
pub fn is_ruled(fd: c_int) -> bool {
    has(fd, RULED)
}

/// Whether it is a connection that may become iWARP's.
#[inline]
pub fn is_asking(fd: c_int) -> bool {
    has(fd, ASKING)
}

/// Whether its bytes are this library's business.
#[inline]
pub fn is_mediated(fd: c_int) -> bool {
    has(fd, RULED | ASKING)
}

/// Whether its connections may become iWARP's.
#[inline]
pub fn is_offering(fd: c_int) -> bool {
    has(fd, OFFERING)
}

/// Whether another descriptor is the same socket, which may become iWARP's.
pub fn is_copied(fd: c_int) -> bool {
    has(fd, COPIED)
}

/// Whether a rule may choose it.
#[inline]
pub fn is_candidate(fd: c_int) -> bool {
    has(fd, CANDIDATE)
}

/// Whether it may get a stand-in.
#[inline]
pub fn may_change(fd: c_int) -> bool {
    has(fd, CANDIDATE | ASKING)
}

/// Whether it is this library's.
#[inline]
pub fn is_own(fd: c_int) -> bool {
    has(fd, OWN)
}

/// Whether it is anything but a descriptor that no rule concerns.
#[inline]
pub fn is_special(fd: c_int) -> bool {
    kind(fd).is_some_and(|kind| kind.load(Ordering::Relaxed) != 0)
}

/// Whether any descriptor is ruled.
#[inline]
pub fn any_ruled() -> bool {
    RULED_NOW.load(Ordering::Relaxed) != 0
}

/// Whether there is any descriptor whose readiness is this library's business.
#[inline]
pub fn any_mediated() -> bool {
    // In this order: who sees that the last one is not asking any more sees that it is ruled ([`enter`]).
    ASKING_NOW.load(Ordering::Acquire) != 0 || any_ruled()
}

/// Whether there is any connection that may become iWARP's.
#[inline]
pub fn any_asking() -> bool {
    ASKING_NOW.load(Ordering::Relaxed) != 0
}

/// Whether there are rules.
#[inline]
pub fn rules_apply() -> bool {
    RULES.load(Ordering::Relaxed)
}

/// From now on there are rules.
pub fn begin() {
    RULES.store(true, Ordering::Relaxed);
}

/// A new TCP socket.
pub fn enter_candidate(fd: c_int) {
    if let Some(kind) = kind(fd) {
        kind.store(CANDIDATE, Ordering::Relaxed);
    }
}

/// A descriptor of this library.
pub fn enter_own(fd: c_int) {
    if let Some(kind) = kind(fd) {
        kind.store(OWN, Ordering::Relaxed);
    }
}

/// A connection that may become iWARP's. False: its number is too large.
pub fn enter_asking(fd: c_int) -> bool {
    let Some(kind) = kind(fd) else { return false };
    if kind.swap(ASKING, Ordering::Release) & ASKING == 0 {
        ASKING_NOW.fetch_add(1, Ordering::Relaxed);
    }
    true
}

/// A listener whose connections may become iWARP's.
pub fn enter_offering(fd: c_int) {
    if let Some(kind) = kind(fd) {
        kind.store(OFFERING, Ordering::Relaxed);
    }
}

/// Two descriptors are one socket that a rule may choose.
pub fn enter_copied(old: c_int, new: c_int) {
    for fd in [old, new] {
        if let Some(kind) = kind(fd) {
            kind.store(CANDIDATE | COPIED, Ordering::Relaxed);
        }
    }
}

/// No rule concerns it any more.
pub fn forget(fd: c_int) {
    if let Some(kind) = kind(fd)
        && kind.swap(0, Ordering::Relaxed) & ASKING != 0
    {
        ASKING_NOW.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A rule has chosen this descriptor. False: its number is too large.
pub fn enter(fd: c_int, sock: Arc<Sock>, kept: bool) -> bool {
    let Some(kind) = kind(fd) else { return false };
    let old = SOCKS.write().get_or_insert_default().insert(fd, sock);
    if old.is_none() {
        RULED_NOW.fetch_add(1, Ordering::Relaxed);
    }
    if kind.swap(RULED | if kept { KEPT } else { 0 }, Ordering::AcqRel) & ASKING != 0 {
        ASKING_NOW.fetch_sub(1, Ordering::Release);
    }
    true
}

/// The socket with this descriptor.
pub fn find(fd: c_int) -> Option<Arc<Sock>> {
    SOCKS.read().as_ref()?.get(&fd).cloned()
}

/// The same, if no other thread is changing the table. In a child, another thread of the parent's may have
/// been doing that for ever.
pub fn find_now(fd: c_int) -> Option<Arc<Sock>> {
    SOCKS.try_read()?.as_ref()?.get(&fd).cloned()
}

/// Takes the descriptor out of the table.
pub fn remove(fd: c_int) -> Option<Arc<Sock>> {
    forget(fd);
    let sock = SOCKS.write().as_mut()?.remove(&fd)?;
    RULED_NOW.fetch_sub(1, Ordering::Relaxed);
    Some(sock)
}

/// All sockets; `None` if another thread is changing the table.
pub fn all() -> Option<Vec<(c_int, Arc<Sock>)>> {
    let socks = SOCKS.try_read()?;
    Some(socks.iter().flatten().map(|(fd, sock)| (*fd, Arc::clone(sock))).collect())
}

/// Descriptors from `first` to `last` that are not the kernel's alone.
pub fn special_within(first: u32, last: u32) -> Vec<c_int> {
    let last = (last as usize).min(MOST - 1);
    let range = KINDS.get(first as usize..=last).unwrap_or_default();
    let special = range.iter().enumerate().filter(|(_, kind)| kind.load(Ordering::Relaxed) != 0);
    special.filter_map(|(at, _)| c_int::try_from(first as usize + at).ok()).collect()
}

/// Whether the program wants a ruled descriptor to survive exec. It does not, but the program reads what it
/// set.
pub fn is_kept(fd: c_int) -> bool {
    has(fd, KEPT)
}

/// Sets it.
pub fn set_kept(fd: c_int, kept: bool) {
    if let Some(kind) = kind(fd) {
        let _ = match kept {
            true => kind.fetch_or(KEPT, Ordering::Relaxed),
            false => kind.fetch_and(!KEPT, Ordering::Relaxed),
        };
    }
}
