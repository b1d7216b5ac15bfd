//! Sockets by descriptor.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use uwarp_process::{Mutex, RwLock};

use crate::socket::{Socket, VerbsStream};

/// Descriptors below this have a byte of their own.
const MOST: usize = 1 << 20;

/// Whether a descriptor may be in the table, so that calls for others take no lock: they may be the handler's
/// of a signal, or a forked child's.
static ENTERED: [AtomicU8; MOST] = [const { AtomicU8::new(0) }; MOST];
/// One without a byte was entered: from then on those are looked up in the table.
static BEYOND: AtomicBool = AtomicBool::new(false);
/// The process whose table this is.
static OWNER: AtomicU32 = AtomicU32::new(0);

static TABLE: RwLock<Option<HashMap<i32, Arc<Socket>>>, 28> = RwLock::new(None);

/// Which socket it was, and its stream.
type Closing = ((u64, u64), Weak<VerbsStream>);

/// Those whose stream goes on in the background after their close.
static CLOSING: Mutex<Vec<Closing>, 29> = Mutex::new(Vec::new());

/// The stream of a socket that is being closed goes on.
pub fn goes_on(inode: (u64, u64), stream: &Arc<VerbsStream>) {
    let mut closing = CLOSING.lock();
    closing.retain(|(_, stream)| stream.strong_count() > 0);
    closing.push((inode, Arc::downgrade(stream)));
}

fn byte(fd: i32) -> Option<&'static AtomicU8> {
    ENTERED.get(usize::try_from(fd).ok()?)
}

/// Whether the table may have this descriptor. Takes no lock.
pub fn may_have(fd: i32) -> bool {
    match byte(fd) {
        Some(byte) => byte.load(Ordering::Acquire) != 0,
        None => fd >= 0 && BEYOND.load(Ordering::Acquire),
    }
}

/// The socket with this descriptor.
pub fn find(fd: i32) -> Option<Arc<Socket>> {
    if !may_have(fd) {
        return None;
    }
    TABLE.read().as_ref()?.get(&fd).cloned()
}

/// Enters a socket. `ALREADY`: it is entered under this or another descriptor, or its stream goes on after a
/// close of another one.
pub fn insert(fd: i32, socket: &Arc<Socket>) -> Result<(), Errno> {
    let goes_on = |(inode, stream): &Closing| *inode == socket.inode() && stream.strong_count() > 0;
    let mut table = TABLE.write();
    let entries = table.get_or_insert_default();
    if CLOSING.lock().iter().any(goes_on) || entries.values().any(|entered| entered.inode() == socket.inode())
    {
        return Err(Errno::ALREADY);
    }
    let old = entries.insert(fd, Arc::clone(socket));
    OWNER.store(std::process::id(), Ordering::Relaxed);
    match byte(fd) {
        Some(byte) => byte.store(1, Ordering::Release),
        None => BEYOND.store(true, Ordering::Release),
    }
    drop(table);
    // The program closed it by close(2), and the number was given to another one.
    drop(old);
    Ok(())
}

/// Removes a socket. Its descriptor is one of the kernel only from now on.
pub fn remove(fd: i32, socket: &Arc<Socket>) {
    let mut table = TABLE.write();
    let Some(entries) = table.as_mut() else { return };
    if entries.get(&fd).is_some_and(|entered| Arc::ptr_eq(entered, socket)) {
        entries.remove(&fd);
        forget(fd);
    }
}

/// In a forked child, which closes its copy of a descriptor: its number is another file's from now on.
pub fn forget(fd: i32) {
    if let Some(byte) = byte(fd) {
        byte.store(0, Ordering::Release);
    }
}

/// Whether this process has made the entries. A child of vfork(2) has not: it shares its parent's memory.
pub fn is_ours() -> bool {
    OWNER.load(Ordering::Relaxed) == std::process::id()
}

/// All of them, for the end of the process.
pub fn all() -> Vec<Arc<Socket>> {
    TABLE.read().iter().flat_map(|entries| entries.values().cloned()).collect()
}
