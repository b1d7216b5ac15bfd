//! What a process has once, and what of it a forked child makes anew.
//!
//! A child is forked while other threads are anywhere: with any lock held, and with any value half changed.
//! In the child these threads do not exist. So it begins a new [`generation`]: it never looks at a value that
//! was made in another one, nor takes its locks. The parent's memory stays as it is; its descriptors are
//! closed by number ([`record`]).

mod futex;
mod generation;
mod locks;
pub mod log_file;
mod once;
mod order;
mod ranks;
pub mod record;
mod rights;
mod thread;

pub use generation::{Birth, begin_anew, forked, generation};
pub use locks::{Condvar, Mutex, MutexGuard, RawMutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
pub use once::{Making, Once, OnceValue, PerProcess};
pub use record::Descriptor;
pub use rights::has_more_rights_than_its_caller;
pub use thread::thread;
