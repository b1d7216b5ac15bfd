//! Connections that may become streams, while the program still has the kernel's socket; and what a fork does
//! to them.
//!
//! After a fork, two processes have a connection. It may become a stream of one of them only if the other
//! does not use it: then a server can accept in one process and serve in another. So that both know, a page
//! of shared memory has a word for each of them. The first process that uses the connection claims it; if
//! another one uses it, too, before it is a stream, it stays TCP for both.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use uwarp_process::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::conn::{Conn, Stage};
use super::kernel;
use super::said::{self, Why};
use super::service;
use crate::sys::Deferred;
use crate::{fds, sys};

/// By descriptor. Held during a fork; it works in the child, since its state is in itself.
static DIRECT: RwLock<Option<HashMap<c_int, Arc<Conn>>>, 1> = RwLock::new(None);

/// All of them, to change.
pub type Table = RwLockWriteGuard<'static, Option<HashMap<c_int, Arc<Conn>>>, 1>;

fn read() -> RwLockReadGuard<'static, Option<HashMap<c_int, Arc<Conn>>>, 1> {
    DIRECT.read()
}

/// Locks it.
pub fn change() -> Table {
    DIRECT.write()
}

/// What keeps a descriptor from getting a stand-in, until it is dropped.
pub struct Still {
    _table: RwLockReadGuard<'static, Option<HashMap<c_int, Arc<Conn>>>, 1>,
    _signals: Deferred,
}

/// For a call of the kernel's, which does not wait, on a descriptor that may get a stand-in: whoever looks
/// what the descriptor is, and then calls, calls on something else as soon as another thread is in between.
/// `None`: it has a stand-in, or gets none.
#[inline]
pub fn still(fd: c_int) -> Option<Still> {
    if fds::may_change(fd) { keep_still(fd) } else { None }
}

fn keep_still(fd: c_int) -> Option<Still> {
    let signals = Deferred::begin();
    let still = Still { _table: read(), _signals: signals };
    fds::may_change(fd).then_some(still)
}

/// The same for what changes the table.
pub struct Changing {
    /// All of them.
    pub table: Table,
    _signals: Deferred,
}

/// No descriptor gets a stand-in, or is taken out of the tables of descriptors, until this is dropped.
pub fn changing() -> Changing {
    let signals = Deferred::begin();
    Changing { table: change(), _signals: signals }
}

/// Waits until a connection that is getting a stand-in just now has it.
pub fn settle() {
    drop(read());
}

/// The program has this connection by this descriptor. False: it stays TCP.
pub fn enter(fd: c_int, conn: Arc<Conn>) -> bool {
    let mut table = change();
    // Another thread may have copied it since it was connected, and nobody knows of the copy.
    !fds::is_copied(fd) && enter_in(&mut table, fd, conn)
}

/// The same, with the table locked.
pub fn enter_in(table: &mut Table, fd: c_int, conn: Arc<Conn>) -> bool {
    let entered = fds::enter_asking(fd);
    if entered {
        table.get_or_insert_default().insert(fd, conn);
    }
    entered
}

/// The connection with this descriptor.
pub fn find(fd: c_int) -> Option<Arc<Conn>> {
    read().as_ref()?.get(&fd).cloned()
}

/// The descriptors of a connection, which are the caller's to put something in the place of.
pub fn descriptors(table: &Table, conn: &Conn) -> Vec<c_int> {
    let entries = table.iter().flatten().filter(|(_, other)| other.key == conn.key);
    entries.map(|(fd, _)| *fd).collect()
}

/// A descriptor of the connection by which nothing can be done, to show it. The caller closes it.
pub fn path_of(conn: &Conn) -> Option<c_int> {
    // The program closes none of them while the table is locked.
    let table = read();
    if conn.tcp() >= 0 {
        return kernel::path_of(conn.tcp());
    }
    let mut entries = table.iter().flatten();
    let direct = entries.find(|(_, other)| other.key == conn.key).map(|(fd, _)| *fd);
    kernel::path_of(direct?)
}

/// The program closes a descriptor, or it is another one's already.
pub fn remove(fd: c_int) {
    let conn = {
        let mut table = change();
        fds::forget(fd);
        let Some(conn) = table.as_mut().and_then(|table| table.remove(&fd)) else { return };
        if table.iter().flatten().any(|(_, other)| other.key == conn.key) {
            return;
        }
        conn
    };
    conn.closed.store(true, Ordering::Release);
    if conn.stage() == Stage::Direct && conn.is_used() {
        said::decided(&conn, Some(Why::Ended));
    }
    service::forget(conn.key);
}

/// The process ends: what has become of connections that were not decided.
pub fn end() {
    let conns: HashMap<usize, Arc<Conn>> =
        read().iter().flatten().map(|(_, conn)| (conn.key, Arc::clone(conn))).collect();
    for conn in conns.values().filter(|conn| conn.is_used()) {
        said::decided(conn, Some(Why::Ended));
    }
}

/// The connection stays TCP, and its descriptors are the kernel's alone.
pub fn stay_tcp(conn: &Conn, why: Why) {
    let stays = stay_tcp_in(&mut change(), conn, why);
    // If it has got a stand-in meanwhile, only the service shows in it what comes.
    if stays {
        service::forget(conn.key);
    }
}

/// The same, with the table locked. The service goes on with it. False: it has a stand-in already.
pub fn stay_tcp_in(table: &mut Table, conn: &Conn, why: Why) -> bool {
    let inbound = conn.inbound.lock();
    let outbound = conn.outbound.lock();
    if conn.stage() != Stage::Direct {
        return conn.stage() == Stage::Tcp;
    }
    for fd in descriptors(table, conn) {
        fds::forget(fd);
        if let Some(table) = &mut **table {
            table.remove(&fd);
        }
    }
    conn.enter(Stage::Tcp);
    drop((inbound, outbound));
    said::decided(conn, Some(why));
    true
}

/// After this the program does with the descriptor what this library cannot see, so it stays TCP.
pub fn veto(fd: c_int) {
    if let Some(conn) = find(fd) {
        if let Some(shared) = &*conn.shared.lock() {
            shared.veto();
        }
        conn.agreement.lock().veto();
        stay_tcp(&conn, Why::Vetoed);
    }
}

/// Before a program is started without a fork: what it may have stays TCP.
pub fn before_spawn() {
    let inherited =
        |fd: c_int| sys::fcntl(fd, libc::F_GETFD, 0).is_ok_and(|flags| flags & libc::FD_CLOEXEC == 0);
    let stays: Vec<c_int> = {
        let table = read();
        let all = table.iter().flatten();
        all.filter(|(fd, conn)| conn.is_used() || inherited(**fd)).map(|(fd, _)| *fd).collect()
    };
    stays.into_iter().for_each(veto);
}

const WORDS: usize = 1024;
/// A relative has used it while another one had claimed it.
const VETOED: u32 = u32::MAX;
/// Beside a process's number: the connection is its stream.
const COMMITTED: u32 = 1 << 31;

/// Shared memory of a family of processes.
struct Page(*mut c_void);

// SAFETY: its words are atomic.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

impl Page {
    fn new() -> Option<Arc<Self>> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
        // SAFETY: new memory, at an address of the system's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), WORDS * 4, access, kind, -1, 0) };
        (at != libc::MAP_FAILED).then(|| Arc::new(Self(at)))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // SAFETY: what was mapped, which nobody uses any more.
        unsafe { libc::munmap(self.0, WORDS * 4) };
    }
}

/// A word in shared memory: 0, or the process that has claimed the connection.
pub struct Shared(Arc<Page>, usize);

/// What a process may do with a connection.
pub enum Claim {
    /// It may become a stream here.
    Ours,
    /// It stays TCP.
    Nobodys,
    /// It is another process's stream.
    Others,
}

impl Shared {
    fn word(&self) -> &AtomicU32 {
        // SAFETY: within the page, which is mapped, and aligned.
        unsafe { &*self.0.0.cast::<AtomicU32>().add(self.1) }
    }

    fn pid() -> u32 {
        sys::pid().cast_unsigned() & !COMMITTED
    }

    /// This process uses the connection.
    pub fn claim(&self) -> Claim {
        let own = Self::pid();
        let word = self.word();
        let decide = |word: u32| match word {
            0 => Some(own),
            VETOED => None,
            word if word & !COMMITTED == own || word & COMMITTED != 0 => None,
            _ => Some(VETOED),
        };
        let _ = word.fetch_update(Ordering::AcqRel, Ordering::Acquire, decide);
        match word.load(Ordering::Acquire) {
            VETOED => Claim::Nobodys,
            word if word & !COMMITTED == own => Claim::Ours,
            _ => Claim::Others,
        }
    }

    /// The connection becomes a stream of this process. False: it must not.
    pub fn commit(&self) -> bool {
        let own = Self::pid();
        self.word().compare_exchange(own, own | COMMITTED, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Nobody may make it a stream, unless somebody has.
    fn veto(&self) {
        let decide = |word: u32| (word & COMMITTED == 0).then_some(VETOED);
        let _ = self.word().fetch_update(Ordering::AcqRel, Ordering::Acquire, decide);
    }
}

/// Before a fork: locks the table, and gives each connection a word.
pub fn before_fork() -> Table {
    let table = change();
    let conns = table.iter().flatten().map(|(_, conn)| conn);
    let mut page: Option<Arc<Page>> = None;
    let mut next = 0;
    for conn in conns {
        let mut shared = conn.shared.lock();
        if conn.is_used() {
            // The child may pass it on by `exec`, which is not seen: without a word it stays TCP.
            if let Some(shared) = &*shared {
                shared.veto();
            }
            continue;
        }
        if shared.is_some() || conn.stage() != Stage::Direct {
            continue;
        }
        if next == WORDS || page.is_none() {
            (page, next) = (Page::new(), 0);
        }
        if let Some(page) = &page {
            conn.side.lock().share();
            *shared = Some(Shared(Arc::clone(page), next));
            next += 1;
        }
    }
    table
}

/// In the parent: what has no word, for want of memory or because it is in use, stays TCP.
pub fn in_parent(table: &mut Table) {
    let conns: Vec<Arc<Conn>> = table.iter().flatten().map(|(_, conn)| Arc::clone(conn)).collect();
    for conn in conns {
        if conn.shared.lock().is_none() {
            stay_tcp_in(table, &conn, Why::Vetoed);
        }
    }
}

/// In a child: the same connections, with no past.
pub fn in_child(table: &mut Table) {
    let mut anew: HashMap<usize, Option<Arc<Conn>>> = HashMap::new();
    let before = table.take().unwrap_or_default();
    for (fd, conn) in &before {
        let new = anew.entry(conn.key).or_insert_with(|| conn.for_child(service::nonce()));
        match new {
            Some(new) => {
                table.get_or_insert_default().insert(*fd, Arc::clone(new));
            }
            None => fds::forget(*fd),
        }
    }
}
