//! A program's memory in a simulation.

use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Mutex, PoisonError};

use uwarp_mem::{self as mem, MemSeg};
use uwarp_rnic::{Access, Mr, Pd};

/// Memory for regions. The bytes are atomic, because a queue pair writes them by address while we hold a
/// reference.
#[derive(Debug)]
pub struct Arena {
    /// A few more than the arena has: its first byte is at a multiple of 8, for atomic operations.
    bytes: Box<[AtomicU8]>,
    len: usize,
    addr: u64,
    regions: Mutex<Vec<Arc<Mr>>>,
}

/// Deregisters its regions: all regions of a process are in one table, and one process runs millions of
/// simulations.
impl Drop for Arena {
    fn drop(&mut self) {
        for region in self.regions.get_mut().unwrap_or_else(PoisonError::into_inner) {
            region.invalidate();
        }
    }
}

impl Arena {
    /// `len` zero bytes.
    pub fn new(len: usize) -> Self {
        let bytes: Box<[AtomicU8]> = (0..len + 7).map(|_| AtomicU8::new(0)).collect();
        let addr = (bytes.as_ptr().expose_provenance() as u64).next_multiple_of(8);
        Self { bytes, len, addr, regions: Mutex::default() }
    }

    /// A copy of `bytes`.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        let arena = Self::new(bytes.len());
        arena.write(0, bytes);
        arena
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len.min(self.bytes.len())
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the byte at `offset`.
    pub fn addr(&self, offset: usize) -> u64 {
        assert!(offset <= self.len());
        self.addr + offset as u64
    }

    /// A copy of these bytes.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len());
        let mut out = Vec::new();
        mem::copy_out(MemSeg { addr: self.addr(offset), len }, &mut out).expect("mapped");
        out
    }

    /// All of it.
    pub fn snapshot(&self) -> Vec<u8> {
        self.read(0, self.len())
    }

    /// Writes `bytes`.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len());
        mem::copy_in(MemSeg { addr: self.addr(offset), len: bytes.len() }, bytes).expect("mapped");
    }

    /// Registers a part of it, named by its own addresses (or from 0 with [`Access::ZERO_BASED`]).
    pub fn register(&self, pd: &Arc<Pd>, offset: usize, len: usize, access: Access) -> Arc<Mr> {
        assert!(offset + len <= self.len());
        let addr = self.addr(offset);
        let region =
            Mr::register(pd, addr, len as u64, addr, access).expect("the range and the rights are good");
        self.regions.lock().unwrap_or_else(PoisonError::into_inner).push(region.clone());
        region
    }
}
