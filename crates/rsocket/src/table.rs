//! Sockets and sets by descriptor.
//!
//! The descriptor is a real one of the kernel, so that no other file or socket gets the same number. It is
//! good for nothing but the calls of this library, except that of an upgraded socket, which is the program's.
//! Sockets of `libuwarp-sockets.so` have numbers that are no descriptors.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;
use rustix::io::Errno;
use uwarp_process::{PerProcess, RwLock, forked};

use crate::datagram::Datagrams;
use crate::set::Set;
use crate::socket::Socket;
use crate::stream::Stream;
use crate::upgrade::Upgraded;

/// What a descriptor is.
#[derive(Clone)]
pub enum Entry {
    /// A socket.
    Socket(Arc<Socket>),
    /// A datagram socket.
    Datagrams(Arc<Datagrams>),
    /// A socket of the kernel that was upgraded in place; the descriptor is the kernel's.
    Upgraded(Arc<Upgraded>),
    /// A set of descriptors.
    Set(Arc<Set>),
}

/// Descriptors below this have a byte of their own.
const MOST: usize = 1 << 20;

/// In [`KINDS`]: an upgraded socket. Any other entry is `OTHER`.
const UPGRADED: u8 = 1;
const OTHER: u8 = 2;

/// What each descriptor is, so that calls for descriptors that are not in the table take no lock. A child
/// that was forked while another thread held the lock would wait for it for ever, and so would the handler of
/// a signal. In the data section without content: pages come into being when a descriptor is entered.
static KINDS: [AtomicU8; MOST] = [const { AtomicU8::new(0) }; MOST];
/// A descriptor without a byte was entered: from then on those are looked up in the table.
static BEYOND: AtomicBool = AtomicBool::new(false);
/// The process whose table this is.
static OWNER: AtomicU32 = AtomicU32::new(0);

#[derive(Default)]
struct Table {
    /// (The process's own numbers: nobody chooses them so that they collide.)
    entries: FxHashMap<i32, Entry>,
    /// Upgraded sockets by inode. A socket has one stream, however many descriptors it has.
    inodes: HashMap<(u64, u64), i32>,
    /// Those whose stream goes on in the background after their close.
    closing: Vec<((u64, u64), Weak<Stream>)>,
}

/// A child has none of its parent's sockets.
static TABLE: PerProcess<RwLock<Option<Table>, 29>> = PerProcess::new(RwLock::default);

impl Table {
    fn insert(&mut self, fd: i32, entry: Entry) -> Option<Entry> {
        let kind = if let Entry::Upgraded(socket) = &entry {
            self.inodes.insert(socket.inode(), fd);
            UPGRADED
        } else {
            OTHER
        };
        let old = self.entries.insert(fd, entry);
        self.forget_inode(fd, old.as_ref());
        OWNER.store(std::process::id(), Ordering::Relaxed);
        match byte(fd) {
            Some(byte) => byte.store(kind, Ordering::Release),
            None => BEYOND.store(true, Ordering::Release),
        }
        old
    }

    fn remove(&mut self, fd: i32) -> Option<Entry> {
        let old = self.entries.remove(&fd)?;
        self.forget_inode(fd, Some(&old));
        forget(fd);
        Some(old)
    }

    fn forget_inode(&mut self, fd: i32, old: Option<&Entry>) {
        if let Some(Entry::Upgraded(old)) = old
            && self.inodes.get(&old.inode()) == Some(&fd)
            && !matches!(self.entries.get(&fd), Some(Entry::Upgraded(new)) if new.inode() == old.inode())
        {
            self.inodes.remove(&old.inode());
        }
    }
}

fn byte(fd: i32) -> Option<&'static AtomicU8> {
    KINDS.get(usize::try_from(fd).ok()?)
}

/// What a descriptor may be; 0: none of ours. Takes no lock.
#[inline]
fn kind(fd: i32) -> u8 {
    match byte(fd) {
        Some(byte) => byte.load(Ordering::Acquire),
        None if fd >= 0 && BEYOND.load(Ordering::Acquire) => UPGRADED | OTHER,
        None => 0,
    }
}

/// Whether the table may have this descriptor. Takes no lock.
#[inline]
pub fn may_have(fd: i32) -> bool {
    kind(fd) != 0
}

/// Whether it may be an upgraded socket. Takes no lock.
#[inline]
pub fn may_be_upgraded(fd: i32) -> bool {
    kind(fd) & UPGRADED != 0
}

/// In a forked child, which closes its copy of a descriptor: its number is another file's from now on.
pub fn forget(fd: i32) {
    if let Some(byte) = byte(fd) {
        byte.store(0, Ordering::Release);
    }
}

/// Whether this process has made the entries of the table. A child of vfork(2) has not: it shares its
/// parent's memory, and no handler of a fork has run in it.
pub fn is_ours() -> bool {
    OWNER.load(Ordering::Relaxed) == std::process::id()
}

/// Enters a socket or set; returns its descriptor.
pub fn insert(fd: i32, entry: Entry) -> i32 {
    let old = TABLE.write().get_or_insert_default().insert(fd, entry);
    replaced(old);
    fd
}

/// Enters a socket that is about to be upgraded. `ALREADY`: it is entered already, under this or another
/// descriptor of the same socket, or its stream goes on after a close of another descriptor.
pub fn insert_upgraded(fd: i32, socket: &Arc<Upgraded>) -> Result<(), Errno> {
    let mut table = TABLE.write();
    let entries = table.get_or_insert_default();
    entries.closing.retain(|(_, stream)| stream.strong_count() > 0);
    let closing = entries.closing.iter().any(|(inode, _)| *inode == socket.inode());
    if closing || entries.inodes.contains_key(&socket.inode()) {
        return Err(Errno::ALREADY);
    }
    let old = entries.insert(fd, Entry::Upgraded(Arc::clone(socket)));
    drop(table);
    replaced(old);
    Ok(())
}

/// The program closed it by close(2), and the number was given to another one.
fn replaced(old: Option<Entry>) {
    if let Some(old) = old {
        old.disown_number();
        old.close();
    }
}

impl Entry {
    fn disown_number(&self) {
        match self {
            Self::Socket(socket) => socket.disown_number(),
            Self::Datagrams(socket) => socket.disown_number(),
            Self::Set(set) => set.disown_number(),
            // The number was never ours.
            Self::Upgraded(_) => {}
        }
    }

    fn close(&self) {
        match self {
            Self::Socket(socket) => socket.close(),
            Self::Datagrams(socket) => socket.close(),
            Self::Set(set) => set.close(),
            Self::Upgraded(socket) => socket.close(None),
        }
    }
}

/// What has this descriptor.
pub fn find(fd: i32) -> Option<Entry> {
    if !may_have(fd) {
        return None;
    }
    TABLE.read().as_ref()?.entries.get(&fd).cloned()
}

/// What is wrong with a descriptor that the table does not have. `NODEV`: in a child, it may be a socket of
/// its parent's.
fn missing(fd: i32) -> Errno {
    if is_parents(fd) { Errno::NODEV } else { Errno::BADF }
}

/// Whether this process is a child, and the descriptor a copy of one of its parent's sockets: as long as it
/// was not closed by a call of this library.
pub fn is_parents(fd: i32) -> bool {
    if !forked() || kind(fd) == 0 {
        return false;
    }
    let table = TABLE.read();
    // Once more, with the table locked: another thread may just have closed a socket of this process.
    kind(fd) != 0 && table.as_ref().is_none_or(|table| !table.entries.contains_key(&fd))
}

/// The stream socket with this descriptor.
pub fn socket(fd: i32) -> Result<Arc<Socket>, Errno> {
    match find(fd) {
        Some(Entry::Socket(socket)) => Ok(socket),
        Some(Entry::Datagrams(_) | Entry::Upgraded(_)) => Err(Errno::OPNOTSUPP),
        _ => Err(missing(fd)),
    }
}

/// A socket of either type.
#[derive(Clone)]
pub enum Any {
    /// Of streams.
    Stream(Arc<Socket>),
    /// Of datagrams.
    Datagrams(Arc<Datagrams>),
}

/// The socket with this descriptor, of either type.
pub fn any(fd: i32) -> Result<Any, Errno> {
    match find(fd) {
        Some(Entry::Socket(socket)) => Ok(Any::Stream(socket)),
        Some(Entry::Datagrams(socket)) => Ok(Any::Datagrams(socket)),
        _ => Err(missing(fd)),
    }
}

/// The upgraded socket with this descriptor. `BADF`: it is not upgraded.
pub fn upgraded(fd: i32) -> Result<Arc<Upgraded>, Errno> {
    if !may_be_upgraded(fd) {
        return Err(Errno::BADF);
    }
    match find(fd) {
        Some(Entry::Upgraded(socket)) => Ok(socket),
        _ => Err(Errno::BADF),
    }
}

/// Removes an upgraded socket. Its descriptor is one of the kernel only from now on.
pub fn remove_upgraded(fd: i32, socket: &Arc<Upgraded>) {
    let mut table = TABLE.write();
    let Some(table) = table.as_mut() else { return };
    if matches!(table.entries.get(&fd), Some(Entry::Upgraded(entered)) if Arc::ptr_eq(entered, socket)) {
        table.closing.retain(|(_, stream)| stream.strong_count() > 0);
        table.closing.push((socket.inode(), Arc::downgrade(socket.stream())));
        table.remove(fd);
    }
}

/// The set with this descriptor.
pub fn set(fd: i32) -> Result<Arc<Set>, Errno> {
    match find(fd) {
        Some(Entry::Set(set)) => Ok(set),
        Some(_) => Err(Errno::INVAL),
        None => Err(missing(fd)),
    }
}

/// Removes a descriptor and closes what it is.
pub fn close(fd: i32) -> Result<(), Errno> {
    if !may_have(fd) {
        return Err(Errno::BADF);
    }
    let entry = TABLE.write().as_mut().and_then(|table| table.remove(fd)).ok_or(Errno::BADF)?;
    entry.close();
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    /// As in a child that was forked while another thread held the lock, or in the handler of a signal.
    #[test]
    fn descriptors_that_are_not_ours_are_found_without_the_lock() {
        let (done, is_done) = mpsc::channel();
        let held = TABLE.write();
        std::thread::spawn(move || {
            for fd in [-1, 0, 7, MOST as i32 - 1, MOST as i32, i32::MAX] {
                assert!(find(fd).is_none() && !may_have(fd));
                assert_eq!(upgraded(fd).err(), Some(Errno::BADF));
                assert_eq!(socket(fd).err(), Some(Errno::BADF));
                assert_eq!(close(fd).err(), Some(Errno::BADF));
            }
            done.send(()).unwrap();
        });
        let waited = is_done.recv_timeout(Duration::from_secs(60));
        drop(held);
        waited.unwrap();
    }
}
