//! Memory regions: who may use which memory, and for how long.

mod keys;
mod window;

pub use crate::random::random_u32;
pub use keys::{invalidate, invalidate_remotely};
pub use window::{Bind, WindowType, add_window, bind_window, remove_window, unbind_windows_of};

use std::sync::Arc;

use bitflags::bitflags;
use uwarp_wire::rdmap::Right;
use uwarp_wire::terminate::{RemoteProtection, TaggedBuffer, TerminateError};

use crate::error::VerbsError;
use crate::pd::Pd;
use crate::sync::{AtomicBool, AtomicU32, Ordering, yield_now};
use keys::TABLE;
use uwarp_mem::{MemSeg, Unmapped, guard};
use window::Window;

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
        /// Pages need not be mapped at registration.
        const ON_DEMAND = 1 << 6;
        /// A hint about huge pages.
        const HUGETLB = 1 << 7;
        /// Flush to global visibility (in no RFC; accepted, no effect).
        const FLUSH_GLOBAL = 1 << 8;
        /// Flush to persistence (accepted, no effect).
        const FLUSH_PERSISTENT = 1 << 9;
        /// A hint that ordering does not matter.
        const RELAXED_ORDERING = 1 << 20;
    }
}

impl Access {
    /// What an operation of the peer needs, by its row of the opcode table.
    #[inline]
    pub fn needed(right: Option<Right>) -> Self {
        match right {
            None => Self::empty(),
            Some(Right::LocalWrite) => Self::LOCAL_WRITE,
            Some(Right::RemoteWrite) => Self::REMOTE_WRITE,
            Some(Right::RemoteRead) => Self::REMOTE_READ,
            Some(Right::RemoteAtomic) => Self::REMOTE_ATOMIC,
        }
    }
}

/// Why a range of memory may not be used.
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
    /// The region's memory is not mapped any more.
    Unmapped,
}

impl From<Unmapped> for AccessError {
    fn from(_: Unmapped) -> Self {
        Self::Unmapped
    }
}

impl AccessError {
    /// The Terminate for an RDMA Write or Read Response that failed the check (RFC 5041 section 7.2; RDMAP
    /// reports missing rights, RFC 5040 section 4.8).
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
    /// Receives and sends that use the memory at this moment, through windows too.
    users: AtomicU32,
    /// Windows that are bound to it.
    windows: AtomicU32,
    /// For a window: what it is bound to.
    window: Option<Window>,
}

/// A range of memory to use, by offset and key.
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
    /// `None` if the region was invalidated.
    fn begin(mr: &'a Mr) -> Option<Self> {
        // Count first, then look. Deregistration does these in the opposite order, so at least one of the two
        // sees the other.
        mr.begin_use();
        let guard = Self(mr);
        mr.valid.load(Ordering::SeqCst).then_some(guard)
    }
}

impl Drop for ShortUse<'_> {
    fn drop(&mut self) {
        self.0.end_use();
    }
}

impl Drop for MrUse {
    fn drop(&mut self) {
        self.0.end_use();
    }
}

impl Mr {
    /// Registers `len` bytes at `addr`. Work requests and peers name them by offsets that begin at `iova`.
    ///
    /// Fails with `Invalid` if rights contradict each other (remote write or atomics without local write) or
    /// the range wraps. The caller checks whether the memory is mapped.
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
        Arc::new(Self::unshared(stag, pd, (addr, len, iova), access))
    }

    fn unshared(stag: u32, pd: &Arc<Pd>, (addr, len, iova): (u64, u64, u64), access: Access) -> Self {
        Self {
            stag,
            pd: pd.clone(),
            addr,
            iova,
            len,
            access,
            valid: AtomicBool::new(true),
            users: AtomicU32::new(0),
            windows: AtomicU32::new(0),
            window: None,
        }
    }

    /// A use through a window is also a use of the region: meanwhile a peer may invalidate the window, which
    /// waits for nothing, and then the program may deregister the region.
    fn begin_use(&self) {
        self.users.fetch_add(1, Ordering::SeqCst);
        if let Some(window) = &self.window {
            window.region.users.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn end_use(&self) {
        if let Some(window) = &self.window {
            window.region.users.fetch_sub(1, Ordering::Release);
        }
        self.users.fetch_sub(1, Ordering::Release);
    }

    fn has_windows(&self) -> bool {
        self.windows.load(Ordering::SeqCst) != 0
    }

    /// Whether this user may use it.
    fn check_user(&self, user: User) -> Result<(), AccessError> {
        match (&self.window, user) {
            (None, _) => Ok(()),
            // A window has no local key.
            (Some(_), User::Program) => Err(AccessError::InvalidStag),
            (Some(window), User::PeerOf(qpn)) => {
                window.qpn.is_none_or(|own| own == qpn).then_some(()).ok_or(AccessError::WrongPd)
            }
        }
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

    /// Invalidates the key and waits until no receive or send uses the memory any more (microseconds: no use
    /// lasts longer than one turn of a queue pair, or one system call). A second call does nothing. Returns
    /// false and does nothing while memory windows are bound to the region.
    pub fn deregister(&self) -> bool {
        // Not whether it has windows now: the last one may have gone in between, by a peer's Send with
        // Invalidate, and the key would be good while the program frees the memory.
        if !self.invalidate() && self.valid.load(Ordering::SeqCst) {
            return false;
        }
        self.wait_for_users();
        true
    }

    /// Called even if a peer's Send with Invalidate has invalidated the region: that does not wait for users.
    pub(crate) fn wait_for_users(&self) {
        while self.users.load(Ordering::SeqCst) != 0 {
            yield_now();
        }
    }

    /// Invalidates the key without waiting, as a Send with Invalidate does. Returns whether it was valid and
    /// no memory window was bound to the region.
    pub fn invalidate(&self) -> bool {
        // The key may belong to another region by now.
        TABLE
            .remove_if(self.stag, |mr| std::ptr::eq(mr, self).then_some(()).ok_or(AccessError::InvalidStag))
            .is_ok()
    }

    /// Changes domain, range or rights. The old key becomes invalid and the new region gets a new one, unless
    /// only the rights change: then the kernel's drivers keep the keys (rxe and mlx4 always, mlx5 where it
    /// can change the rights in place), and programs have sent them to their peers.
    pub fn reregister(
        &self,
        pd: Option<&Arc<Pd>>,
        range: Option<(u64, u64, u64)>,
        access: Option<Access>,
    ) -> Result<Arc<Self>, VerbsError> {
        if self.has_windows() {
            return Err(VerbsError::Busy);
        }
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
        if !self.deregister() {
            new.deregister();
            return Err(VerbsError::Busy);
        }
        Ok(new)
    }

    /// Checks a use of `len` bytes at offset `to`.
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

    /// Begins a use of the memory; `None` if the region was invalidated.
    pub fn enter(self: &Arc<Self>) -> Option<MrUse> {
        // Begun as a short use, but not ended here.
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

/// Where the key of a region comes from.
#[derive(Debug, Default, Clone, Copy)]
enum User {
    /// From a work request.
    #[default]
    Program,
    /// From the peer of this queue pair.
    PeerOf(u32),
}

/// Finds regions by STag. Keeps the last one found: most streams use one or two.
#[derive(Debug, Default)]
pub struct MrCache {
    last: Option<Arc<Mr>>,
    /// A use of `last` has begun ([`Self::with_more`]).
    in_use: bool,
    user: User,
}

impl MrCache {
    /// For keys that the peer of this queue pair names. (The default is for keys in work requests.)
    pub fn of_peer(qpn: u32) -> Self {
        Self { last: None, in_use: false, user: User::PeerOf(qpn) }
    }

    /// The region with this STag.
    pub fn find(&mut self, stag: u32) -> Option<&Arc<Mr>> {
        let hit = self.last.as_ref().is_some_and(|mr| mr.stag == stag && mr.valid.load(Ordering::Acquire));
        if !hit {
            self.end_use();
            self.last = TABLE.find(stag);
        }
        self.last.as_ref()
    }

    /// Finds the region, checks the use and begins it.
    pub fn enter(&mut self, part: Part, pd: u32, need: Access) -> Result<(MemSeg, MrUse), AccessError> {
        loop {
            let user = self.user;
            let mr = self.find(part.stag).ok_or(AccessError::InvalidStag)?;
            mr.check_user(user)?;
            let seg = mr.check(pd, part.to, part.len, need)?;
            if let Some(guard) = mr.enter() {
                return Ok((seg, guard));
            }
            // In between, the region was invalidated, or its key now belongs to a region with other rights.
            // Look again in the table.
        }
    }

    /// Finds the region, checks the use and calls `copy`: the memory stays registered until `copy` returns.
    pub fn with<T>(
        &mut self,
        part: Part,
        pd: u32,
        need: Access,
        copy: impl FnOnce(MemSeg) -> T,
    ) -> Result<T, AccessError> {
        loop {
            let user = self.user;
            let mr = self.find(part.stag).ok_or(AccessError::InvalidStag)?;
            mr.check_user(user)?;
            let seg = mr.check(pd, part.to, part.len, need)?;
            // Otherwise look again, as in `enter`.
            if let Some(_use) = ShortUse::begin(mr) {
                return Ok(copy(seg));
            }
        }
    }

    /// As [`Self::with`], where more uses of the same region will follow soon: counting each of them costs as
    /// much as a small copy. The region stays registered until [`Self::end_use`], which the caller calls
    /// before it does anything that may wait for other threads.
    #[inline]
    pub fn with_more<T>(
        &mut self,
        part: Part,
        pd: u32,
        need: Access,
        copy: impl FnOnce(MemSeg) -> T,
    ) -> Result<T, AccessError> {
        loop {
            let user = self.user;
            let mr = self.find(part.stag).ok_or(AccessError::InvalidStag)?;
            mr.check_user(user)?;
            let seg = mr.check(pd, part.to, part.len, need)?;
            // (What is invalidated meanwhile is not found again, although it is still in use.)
            if self.in_use || self.begin_use() {
                return Ok(copy(seg));
            }
        }
    }

    fn begin_use(&mut self) -> bool {
        // Ended by `end_use`.
        self.in_use = self.last.as_deref().and_then(ShortUse::begin).map(std::mem::forget).is_some();
        self.in_use
    }

    /// The region may be deregistered from now on.
    #[inline]
    pub fn end_use(&mut self) {
        if std::mem::take(&mut self.in_use)
            && let Some(mr) = &self.last
        {
            mr.end_use();
        }
    }
}

impl Drop for MrCache {
    fn drop(&mut self) {
        self.end_use();
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

    /// A change of rights changed the keys, which the program had sent to its peers.
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
        assert_eq!(may(Access::REMOTE_READ), Ok(()), "the old region has no key left to invalidate");
        // A key that a peer has invalidated does not become valid again.
        fewer.invalidate();
        let again = fewer.reregister(None, None, Some(all())).unwrap();
        assert_ne!(again.stag(), fewer.stag());
        again.deregister();
        assert_eq!(may(Access::REMOTE_READ), Err(AccessError::InvalidStag));
    }

    #[test]
    fn several_uses_are_counted_as_one_until_they_end() {
        let pd = Pd::new();
        let regions = [0, 1].map(|_| Mr::register(&pd, 0x1000, 64, 0x1000, all()).unwrap());
        let users = || [0, 1].map(|n: usize| regions[n].users.load(Ordering::SeqCst));
        let mut cache = MrCache::default();
        let touch = |cache: &mut MrCache, n: usize| {
            let part = Part { stag: regions[n].stag(), to: 0x1000, len: 8 };
            cache.with_more(part, pd.id(), Access::REMOTE_WRITE, |_| ())
        };
        assert_eq!([touch(&mut cache, 0), touch(&mut cache, 0)], [Ok(()); 2]);
        assert_eq!(users(), [1, 0]);
        assert_eq!(touch(&mut cache, 1), Ok(()));
        assert_eq!(users(), [0, 1], "one region at a time");
        regions[1].invalidate();
        assert_eq!(touch(&mut cache, 1), Err(AccessError::InvalidStag));
        assert_eq!(users(), [0, 0]);
        assert_eq!(touch(&mut cache, 0), Ok(()));
        drop(cache);
        assert_eq!(users(), [0, 0]);
        regions[0].deregister();
    }

    #[test]
    fn an_invalidated_key_is_not_found_again() {
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

    /// A use that had found the old region failed, and so did its connection.
    #[test]
    fn a_change_of_rights_fails_no_use_in_progress() {
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
