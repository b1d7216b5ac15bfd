//! Memory regions and the table of their STags.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use bitflags::bitflags;
use uwarp_wire::terminate::{RemoteProtection, TaggedBuffer, TerminateError};

use crate::error::VerbsError;
use crate::mem::{MemSeg, Unmapped, guard};
use crate::pd::Pd;
use crate::sync::{AtomicBool, AtomicU32, LazyLock, Ordering, RwLock, yield_now};

bitflags! {
    /// Rights to a region or queue pair; the bits are the verbs' own.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Access: u32 {
        /// Local work requests may write it.
        const LOCAL_WRITE = 1;
        /// The peer may write it.
        const REMOTE_WRITE = 1 << 1;
        /// The peer may read it.
        const REMOTE_READ = 1 << 2;
        /// The peer may use atomics on it.
        const REMOTE_ATOMIC = 1 << 3;
        /// Memory windows may be bound to it.
        const MW_BIND = 1 << 4;
        /// Offsets count from zero instead of from the address.
        const ZERO_BASED = 1 << 5;
        /// Pages need not be there at registration.
        const ON_DEMAND = 1 << 6;
        /// A hint about huge pages.
        const HUGETLB = 1 << 7;
        /// Flush to global visibility (RFC-less; accepted, no effect).
        const FLUSH_GLOBAL = 1 << 8;
        /// Flush to persistence (accepted, no effect).
        const FLUSH_PERSISTENT = 1 << 9;
        /// A hint that ordering does not matter.
        const RELAXED_ORDERING = 1 << 20;
    }
}

/// Why a stretch of memory may not be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AccessError {
    /// No region has this STag.
    InvalidStag,
    /// Outside the region.
    Bounds,
    /// The region does not grant the right.
    Rights,
    /// The region belongs to another protection domain.
    WrongPd,
    /// The region's memory is not there any more.
    Unmapped,
}

impl From<Unmapped> for AccessError {
    fn from(_: Unmapped) -> Self {
        Self::Unmapped
    }
}

impl AccessError {
    /// The Terminate for an RDMA Write or Read Response that failed the check (RFC 5041 section 7.2; rights are
    /// RDMAP's to report, RFC 5040 section 4.8).
    pub fn for_tagged(self) -> TerminateError {
        match self {
            Self::InvalidStag => TerminateError::TaggedBuffer(TaggedBuffer::InvalidStag),
            Self::Bounds => TerminateError::TaggedBuffer(TaggedBuffer::BaseOrBounds),
            Self::WrongPd => TerminateError::TaggedBuffer(TaggedBuffer::StagNotAssociated),
            Self::Rights => TerminateError::RemoteProtection(RemoteProtection::AccessRights),
            // Not the peer's fault.
            Self::Unmapped => TerminateError::DdpLocalCatastrophic,
        }
    }

    /// The Terminate for an RDMA Read Request that failed the check (RFC 5040 section 7.2).
    pub fn for_read_request(self) -> TerminateError {
        match self {
            Self::InvalidStag => TerminateError::RemoteProtection(RemoteProtection::InvalidStag),
            Self::Bounds => TerminateError::RemoteProtection(RemoteProtection::BaseOrBounds),
            Self::WrongPd => TerminateError::RemoteProtection(RemoteProtection::StagNotAssociated),
            Self::Rights => TerminateError::RemoteProtection(RemoteProtection::AccessRights),
            Self::Unmapped => TerminateError::LocalCatastrophic,
        }
    }
}

/// A registered memory region. `stag` is both its local and its remote key.
#[derive(Debug)]
pub struct Mr {
    stag: u32,
    pd: Arc<Pd>,
    addr: u64,
    iova: u64,
    len: u64,
    access: Access,
    valid: AtomicBool,
    /// Receives and sends that use the memory at this moment.
    users: AtomicU32,
}

/// A stretch that is to be used, by offset and key.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    /// Key of the region.
    pub stag: u32,
    /// First offset.
    pub to: u64,
    /// Bytes.
    pub len: usize,
}

/// Proof that a region was valid when a use of its memory began; deregistration waits for its drop.
#[derive(Debug)]
pub struct MrUse(Arc<Mr>);

/// The same for a use that ends within the call that began it.
struct ShortUse<'a>(&'a Mr);

impl<'a> ShortUse<'a> {
    /// `None` when the key was taken back.
    fn begin(mr: &'a Mr) -> Option<Self> {
        // Counted first, looked at second; deregistration does it the other way round, so one of the two sees.
        mr.users.fetch_add(1, Ordering::SeqCst);
        let guard = Self(mr);
        mr.valid.load(Ordering::SeqCst).then_some(guard)
    }
}

impl Drop for ShortUse<'_> {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for MrUse {
    fn drop(&mut self) {
        self.0.users.fetch_sub(1, Ordering::Release);
    }
}

impl Mr {
    /// Registers `len` bytes at `addr`, which work requests and peers name by offsets from `iova` on.
    ///
    /// Fails with `Invalid` when rights contradict each other (remote write or atomics without local write) or the
    /// range wraps. Whether the memory is mapped is for the caller to check.
    pub fn register(
        pd: &Arc<Pd>,
        addr: u64,
        len: u64,
        iova: u64,
        access: Access,
    ) -> Result<Arc<Self>, VerbsError> {
        check_rights(access)?;
        let iova = if access.contains(Access::ZERO_BASED) { 0 } else { iova };
        // The whole address space is written as 0 and 2^64-1.
        if addr.checked_add(len).is_none() || iova.checked_add(len).is_none() {
            return Err(VerbsError::Invalid("the range wraps around the address space"));
        }
        guard::arm();
        TABLE.insert(|stag| Self::new(stag, pd, (addr, len, iova), access))
    }

    fn new(stag: u32, pd: &Arc<Pd>, (addr, len, iova): (u64, u64, u64), access: Access) -> Arc<Self> {
        Arc::new(Self {
            stag,
            pd: pd.clone(),
            addr,
            iova,
            len,
            access,
            valid: AtomicBool::new(true),
            users: AtomicU32::new(0),
        })
    }

    /// Its STag: local key and remote key.
    pub fn stag(&self) -> u32 {
        self.stag
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Address, length in bytes, and first offset.
    pub fn range(&self) -> (u64, u64, u64) {
        (self.addr, self.len, self.iova)
    }

    /// Its rights.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Takes the key back and waits until no receive or send uses the memory any more (microseconds: no use
    /// lasts longer than one system call). Doing it twice does nothing.
    pub fn deregister(&self) {
        self.invalidate();
        self.wait_for_users();
    }

    /// Also when a peer's Send with Invalidate was first: that one waits for nobody.
    fn wait_for_users(&self) {
        while self.users.load(Ordering::SeqCst) != 0 {
            yield_now();
        }
    }

    /// Takes the key back without waiting, as a Send with Invalidate does. Says whether it was valid.
    pub fn invalidate(&self) -> bool {
        // The number may be another region's by now.
        TABLE
            .remove_if(self.stag, |mr| std::ptr::eq(mr, self).then_some(()).ok_or(AccessError::InvalidStag))
            .is_ok()
    }

    /// Changes domain, range or rights. The old key dies; the new region has a new one, unless only the rights are different: the
    /// kernel's drivers keep the keys then (rxe and mlx4 always, mlx5 where it can change the rights in place), and programs have told
    /// them to their peers.
    pub fn reregister(
        &self,
        pd: Option<&Arc<Pd>>,
        range: Option<(u64, u64, u64)>,
        access: Option<Access>,
    ) -> Result<Arc<Self>, VerbsError> {
        if let (None, None, Some(access)) = (pd, range, access) {
            check_rights(access)?;
            let new = Self::new(self.stag, &self.pd, (self.addr, self.len, self.iova), access);
            if TABLE.replace(self, &new) {
                self.wait_for_users();
                return Ok(new);
            }
        }
        let (addr, len, iova) = range.unwrap_or((self.addr, self.len, self.iova));
        let new = Self::register(pd.unwrap_or(&self.pd), addr, len, iova, access.unwrap_or(self.access))?;
        self.deregister();
        Ok(new)
    }

    /// Checks a use of `len` bytes from offset `to` on.
    pub fn check(&self, pd: u32, to: u64, len: usize, need: Access) -> Result<MemSeg, AccessError> {
        if self.pd.id() != pd {
            return Err(AccessError::WrongPd);
        }
        let offset = to.checked_sub(self.iova).ok_or(AccessError::Bounds)?;
        if offset > self.len || len as u64 > self.len - offset {
            return Err(AccessError::Bounds);
        }
        if !self.access.contains(need) {
            return Err(AccessError::Rights);
        }
        Ok(MemSeg { addr: self.addr + offset, len })
    }

    /// Begins a use of the memory; `None` when the key was taken back.
    pub fn enter(self: &Arc<Self>) -> Option<MrUse> {
        // As a short use, which goes on.
        std::mem::forget(ShortUse::begin(self)?);
        Some(MrUse(self.clone()))
    }
}

fn check_rights(access: Access) -> Result<(), VerbsError> {
    let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
    if writes && !access.contains(Access::LOCAL_WRITE) {
        return Err(VerbsError::Invalid("remote write or atomic rights need local write"));
    }
    Ok(())
}

/// Finds regions by STag. Keeps the last one found: most streams use one or two.
#[derive(Debug, Default)]
pub struct MrCache {
    last: Option<Arc<Mr>>,
}

impl MrCache {
    /// The region with this STag.
    pub fn find(&mut self, stag: u32) -> Option<&Arc<Mr>> {
        let hit = self.last.as_ref().is_some_and(|mr| mr.stag == stag && mr.valid.load(Ordering::Acquire));
        if !hit {
            self.last = TABLE.find(stag);
        }
        self.last.as_ref()
    }

    /// Finds the region, checks the use and begins it.
    pub fn enter(&mut self, part: Part, pd: u32, need: Access) -> Result<(MemSeg, MrUse), AccessError> {
        loop {
            let mr = self.find(part.stag).ok_or(AccessError::InvalidStag)?;
            let seg = mr.check(pd, part.to, part.len, need)?;
            if let Some(guard) = mr.enter() {
                return Ok((seg, guard));
            }
            // Between the two the key was taken back, or has become that of a region with other rights: the table knows.
        }
    }

    /// Finds the region, checks the use and makes it: the memory is good until `copy` returns.
    pub fn with<T>(
        &mut self,
        part: Part,
        pd: u32,
        need: Access,
        copy: impl FnOnce(MemSeg) -> T,
    ) -> Result<T, AccessError> {
        loop {
            let mr = self.find(part.stag).ok_or(AccessError::InvalidStag)?;
            let seg = mr.check(pd, part.to, part.len, need)?;
            // If not, as in `enter`.
            if let Some(_use) = ShortUse::begin(mr) {
                return Ok(copy(seg));
            }
        }
    }
}

/// Invalidates the region with this STag if it belongs to `pd`, for local invalidation.
pub fn invalidate(stag: u32, pd: u32) -> Result<(), AccessError> {
    invalidate_if(stag, pd, |_| true)
}

/// The same for Send with Invalidate. A region that gives the peer no right at all is none of its business. Nor may it take one from other
/// streams (RFC 5040 section 8.1.1 rule 7), and a region serves every stream of its domain: docs/adr/012.
pub fn invalidate_remotely(stag: u32, pd: &Pd) -> Result<(), AccessError> {
    let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    invalidate_if(stag, pd.id(), |mr| mr.access.intersects(remote) && pd.streams() <= 1)
}

fn invalidate_if(stag: u32, pd: u32, may: impl FnOnce(&Mr) -> bool) -> Result<(), AccessError> {
    TABLE.remove_if(stag, |mr| {
        if mr.pd.id() != pd {
            return Err(AccessError::WrongPd);
        }
        may(mr).then_some(()).ok_or(AccessError::Rights)
    })
}

/// STags are drawn at random, so that knowing one says nothing about another (RFC 5042 section 5.1).
///
/// Regions in the table are valid, all others are not: both change under its lock.
struct Table {
    map: RwLock<HashMap<u32, Arc<Mr>, BuildHasherDefault<StagHasher>>>,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| Table { map: RwLock::default() });

impl Table {
    fn insert(&self, make: impl FnOnce(u32) -> Arc<Mr>) -> Result<Arc<Mr>, VerbsError> {
        let mut map = self.map.write();
        // Bounded: at a million regions one draw in 4,000 is taken.
        for _ in 0..64 {
            let stag = random_u32()?;
            // 0 is what peers write for "no STag", all ones for none too.
            if stag != 0 && stag != u32::MAX && !map.contains_key(&stag) {
                let mr = make(stag);
                map.insert(stag, mr.clone());
                return Ok(mr);
            }
        }
        Err(VerbsError::NoResources("STags"))
    }

    fn find(&self, stag: u32) -> Option<Arc<Mr>> {
        self.map.read().get(&stag).cloned()
    }

    /// Another region gets the key of `old`; not if that was taken back.
    fn replace(&self, old: &Mr, new: &Arc<Mr>) -> bool {
        let mut map = self.map.write();
        let place = map.get_mut(&old.stag).filter(|mr| std::ptr::eq(Arc::as_ptr(mr), old));
        let Some(place) = place else { return false };
        old.valid.store(false, Ordering::SeqCst);
        *place = new.clone();
        true
    }

    /// Takes the key back, if `may` has nothing against it.
    fn remove_if(
        &self,
        stag: u32,
        may: impl FnOnce(&Mr) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        let mut map = self.map.write();
        let mr = map.get(&stag).ok_or(AccessError::InvalidStag)?;
        may(mr)?;
        mr.valid.store(false, Ordering::SeqCst);
        map.remove(&stag);
        Ok(())
    }
}

/// Random bits from the system, fetched some at a time.
pub fn random_u32() -> Result<u32, VerbsError> {
    const AT_ONCE: usize = 64;
    thread_local! {
        static STOCK: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
    }
    STOCK
        .try_with(|stock| {
            let mut stock = stock.borrow_mut();
            if stock.is_empty() {
                let mut bytes = [0u8; 4 * AT_ONCE];
                getrandom::fill(&mut bytes).ok()?;
                let words =
                    bytes.chunks_exact(4).filter_map(|c| c.first_chunk().copied().map(u32::from_ne_bytes));
                stock.extend(words);
            }
            stock.pop()
        })
        .ok()
        .flatten()
        .ok_or(VerbsError::NoResources("random numbers"))
}

/// The keys are random already.
#[derive(Default)]
struct StagHasher(u64);

impl Hasher for StagHasher {
    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*b);
        }
    }

    fn write_u32(&mut self, stag: u32) {
        self.0 = u64::from(stag).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Access {
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ
    }

    #[test]
    fn bounds_are_exact() {
        let pd = Pd::new();
        let mr = Mr::register(&pd, 0x1000, 64, 0x1000, all()).unwrap();
        let check = |to, len| mr.check(pd.id(), to, len, Access::REMOTE_WRITE);
        assert!(check(0x1000, 64).is_ok());
        assert!(check(0x1040, 0).is_ok());
        assert_eq!(check(0x1000, 65), Err(AccessError::Bounds));
        assert_eq!(check(0xfff, 1), Err(AccessError::Bounds));
        assert_eq!(check(0x1041, 0), Err(AccessError::Bounds));
        assert_eq!(check(u64::MAX, 1), Err(AccessError::Bounds));
        assert_eq!(mr.check(pd.id() + 1, 0x1000, 1, Access::REMOTE_READ), Err(AccessError::WrongPd));
        assert_eq!(mr.check(pd.id(), 0x1000, 1, Access::REMOTE_ATOMIC), Err(AccessError::Rights));
    }

    #[test]
    fn whole_address_space_and_zero_length() {
        let pd = Pd::new();
        let mr = Mr::register(&pd, 0, u64::MAX, 0, Access::LOCAL_WRITE | Access::ON_DEMAND).unwrap();
        assert!(mr.check(pd.id(), u64::MAX - 8, 8, Access::LOCAL_WRITE).is_ok());
        let mr = Mr::register(&pd, 0x1000, 0, 0x1000, Access::LOCAL_WRITE).unwrap();
        assert!(mr.check(pd.id(), 0x1000, 0, Access::empty()).is_ok());
        assert_eq!(mr.check(pd.id(), 0x1000, 1, Access::empty()), Err(AccessError::Bounds));
    }

    #[test]
    fn remote_write_needs_local_write() {
        let pd = Pd::new();
        assert!(matches!(Mr::register(&pd, 0, 1, 0, Access::REMOTE_WRITE), Err(VerbsError::Invalid(_))));
    }

    /// The keys of a region changed with its rights, which its program had told its peers.
    #[test]
    fn a_change_of_rights_keeps_the_keys() {
        let pd = Pd::new();
        let mr = Mr::register(&pd, 0x1000, 64, 0x1000, all()).unwrap();
        let mut cache = MrCache::default();
        let mut may =
            |need| cache.enter(Part { stag: mr.stag(), to: 0x1000, len: 1 }, pd.id(), need).map(drop);
        assert_eq!(may(Access::REMOTE_WRITE), Ok(()));
        assert!(mr.reregister(None, None, Some(Access::REMOTE_WRITE)).is_err());
        assert_eq!(may(Access::REMOTE_WRITE), Ok(()));
        let fewer = mr.reregister(None, None, Some(Access::REMOTE_READ)).unwrap();
        assert_eq!(fewer.stag(), mr.stag());
        assert_eq!(may(Access::REMOTE_WRITE), Err(AccessError::Rights));
        assert_eq!(may(Access::REMOTE_READ), Ok(()));
        mr.deregister();
        assert_eq!(may(Access::REMOTE_READ), Ok(()), "the old one has nothing to take back");
        // A key that a peer has taken back does not come back to life.
        fewer.invalidate();
        let again = fewer.reregister(None, None, Some(all())).unwrap();
        assert_ne!(again.stag(), fewer.stag());
        again.deregister();
        assert_eq!(may(Access::REMOTE_READ), Err(AccessError::InvalidStag));
    }

    #[test]
    fn a_dead_key_is_not_found_again() {
        let pd = Pd::new();
        let mr = Mr::register(&pd, 0x1000, 64, 0x1000, all()).unwrap();
        let mut cache = MrCache::default();
        assert!(cache.find(mr.stag()).is_some());
        let guard =
            cache.enter(Part { stag: mr.stag(), to: 0x1000, len: 1 }, pd.id(), Access::REMOTE_READ).unwrap();
        drop(guard);
        mr.deregister();
        assert!(cache.find(mr.stag()).is_none());
        assert!(mr.enter().is_none());
    }

    /// A use that had found the old region failed, and cost its connection.
    #[test]
    fn a_change_of_rights_costs_no_use_that_is_under_way() {
        let pd = Pd::new();
        let mut mr = Mr::register(&pd, 0x1000, 64, 0x1000, all()).unwrap();
        let part = Part { stag: mr.stag(), to: 0x1000, len: 1 };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let user = scope.spawn(|| {
                let mut cache = MrCache::default();
                while !stop.load(Ordering::Relaxed) {
                    cache.with(part, pd.id(), Access::REMOTE_WRITE, |_| ())?;
                    cache.enter(part, pd.id(), Access::REMOTE_WRITE)?;
                }
                Ok::<_, AccessError>(())
            });
            for _ in 0..50_000 {
                mr = mr.reregister(None, None, Some(all())).unwrap();
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(user.join().unwrap(), Ok(()));
        });
    }
}
