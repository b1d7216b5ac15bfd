//! Sockets and sets by descriptor.
//!
//! The descriptor is a real one of the kernel, so that no other file or socket gets the same number. It is
//! good for nothing but the calls of this library, except that of an upgraded socket, which is the program's.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;
use rustix::io::Errno;
use uwarp_driver::{object_gone, object_made};

use crate::datagram::Datagrams;
use crate::set::Set;
use crate::socket::Socket;
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

static TABLE: RwLock<Option<HashMap<i32, Entry>>> = RwLock::new(None);

/// Enters a socket or set; returns its descriptor.
pub fn insert(fd: i32, entry: Entry) -> i32 {
    object_made();
    let old = TABLE.write().get_or_insert_default().insert(fd, entry);
    if let Some(old) = old {
        // The program closed it by close(2), and the number was given to the new one.
        old.disown_number();
        old.close();
        object_gone();
    }
    fd
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
    TABLE.read().as_ref()?.get(&fd).cloned()
}

/// The stream socket with this descriptor.
pub fn socket(fd: i32) -> Result<Arc<Socket>, Errno> {
    match find(fd) {
        Some(Entry::Socket(socket)) => Ok(socket),
        Some(Entry::Datagrams(_) | Entry::Upgraded(_)) => Err(Errno::OPNOTSUPP),
        _ => Err(Errno::BADF),
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
        _ => Err(Errno::BADF),
    }
}

/// The upgraded socket with this descriptor. `BADF`: it is not upgraded.
pub fn upgraded(fd: i32) -> Result<Arc<Upgraded>, Errno> {
    match find(fd) {
        Some(Entry::Upgraded(socket)) => Ok(socket),
        _ => Err(Errno::BADF),
    }
}

/// The upgraded socket with this descriptor, which is one of the kernel only from now on.
pub fn take_upgraded(fd: i32) -> Result<Arc<Upgraded>, Errno> {
    let mut table = TABLE.write();
    let table = table.as_mut().ok_or(Errno::BADF)?;
    match table.get(&fd) {
        Some(Entry::Upgraded(socket)) => {
            let socket = Arc::clone(socket);
            table.remove(&fd);
            object_gone();
            Ok(socket)
        }
        _ => Err(Errno::BADF),
    }
}

/// The set with this descriptor.
pub fn set(fd: i32) -> Result<Arc<Set>, Errno> {
    match find(fd) {
        Some(Entry::Set(set)) => Ok(set),
        Some(_) => Err(Errno::INVAL),
        None => Err(Errno::BADF),
    }
}

/// Removes a descriptor and closes what it is.
pub fn close(fd: i32) -> Result<(), Errno> {
    let entry = TABLE.write().as_mut().and_then(|table| table.remove(&fd)).ok_or(Errno::BADF)?;
    object_gone();
    entry.close();
    Ok(())
}
