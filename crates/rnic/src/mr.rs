//! Memory regions, memory windows bound to them (docs/adr/030), and the table of their STags.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use bitflags::bitflags;
use uwarp_wire::rdmap::Right;
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

/// What makes an [`Mr`] a bound memory window: a part of another region, with rights of its own and for peers
/// only.
#[derive(Debug)]
struct Window {
    /// The region, which cannot be deregistered while the window is bound.
    region: Arc<Mr>,
    /// For type 2: the queue pair whose peer alone may use the window.
    qpn: Option<u32>,
}

/// The two types of memory windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WindowType {
    /// Every queue pair of the domain may use it. Binding it gives it another key and ends an earlier
    /// binding.
    One,
    /// Only the queue pair that has bound it may use it. The program chooses the key's last byte. It must be
    /// invalidated before it is bound again.
    Two,
}

/// What a bind work request requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bind {
    /// The new key; all but the last byte name the window.
    pub key: u32,
    /// Key of the region.
    pub region: u32,
    /// First offset in the region.
    pub addr: u64,
    /// Bytes; zero unbinds a window of type 1.
    pub len: u64,
    /// What the peer may do, and whether its offsets count from zero.
    pub access: Access,
}

/// The part of a window's key that never changes.
const WINDOW_NAME: u32 = !0xFF;

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
    /// lasts longer than one system call). A second call does nothing. Returns false and does nothing while
    /// memory windows are bound to the region.
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
    fn wait_for_users(&self) {
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
    user: User,
}

impl MrCache {
    /// For keys that the peer of this queue pair names. (The default is for keys in work requests.)
    pub fn of_peer(qpn: u32) -> Self {
        Self { user: User::PeerOf(qpn), ..Self::default() }
    }

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
}

/// Invalidates the region with this STag, or the window that queue pair `qpn` has bound, if it belongs to
/// `pd`: for local invalidation.
pub fn invalidate(stag: u32, pd: u32, qpn: u32) -> Result<(), AccessError> {
    invalidate_if(stag, pd, qpn, |_| true)
}

/// The same for Send with Invalidate. A peer must not invalidate a region that gives it no right. Nor may it
/// take a region from other streams (RFC 5040 section 8.1.1 rule 7), and a region serves every stream of its
/// domain: docs/adr/012.
pub fn invalidate_remotely(stag: u32, pd: &Pd, qpn: u32) -> Result<(), AccessError> {
    let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    invalidate_if(stag, pd.id(), qpn, |mr| mr.access.intersects(remote) && pd.streams() <= 1)
}

/// `may` decides for regions. Only its queue pair can invalidate a window of type 2; a window of type 1
/// cannot be invalidated.
fn invalidate_if(stag: u32, pd: u32, qpn: u32, may: impl FnOnce(&Mr) -> bool) -> Result<(), AccessError> {
    TABLE.remove_if(stag, |mr| {
        if mr.pd.id() != pd {
            return Err(AccessError::WrongPd);
        }
        let may = mr.window.as_ref().map_or_else(|| may(mr), |window| window.qpn == Some(qpn));
        may.then_some(()).ok_or(AccessError::Rights)
    })
}

/// Makes the name of a memory window, and returns its first key. The last byte of the key changes with each
/// binding.
pub fn add_window(pd: u32, kind: WindowType) -> Result<u32, VerbsError> {
    let mut keys = TABLE.keys.write();
    // Bounded, as for regions.
    for _ in 0..64 {
        let key = random_u32()?;
        let name = key & WINDOW_NAME;
        let taken = name == 0
            || name == WINDOW_NAME
            || keys.windows.contains_key(&name)
            || (name..=name | 0xFF).any(|key| keys.regions.contains_key(&key));
        if !taken {
            keys.windows.insert(name, Named { pd, kind, key });
            return Ok(key);
        }
    }
    Err(VerbsError::NoResources("STags"))
}

/// Removes a window, bound or not, by any of its keys. Waits until nothing uses its memory any more.
pub fn remove_window(key: u32) {
    let bound = {
        let mut keys = TABLE.keys.write();
        let named = keys.windows.remove(&(key & WINDOW_NAME));
        named.and_then(|named| keys.remove(named.key))
    };
    if let Some(bound) = bound {
        bound.wait_for_users();
    }
}

/// Binds a window, for queue pair `qpn` of domain `pd`.
pub fn bind_window(pd: &Arc<Pd>, qpn: u32, bind: &Bind) -> Result<(), AccessError> {
    let mut keys = TABLE.keys.write();
    let name = bind.key & WINDOW_NAME;
    let named = *keys.windows.get(&name).ok_or(AccessError::InvalidStag)?;
    if named.pd != pd.id() {
        return Err(AccessError::WrongPd);
    }
    let two = named.kind == WindowType::Two;
    // InfiniBand volume 1, section 10.6.7.2: a bound window of type 2 must not be bound again, and none must
    // be bound to zero bytes.
    if two && (bind.len == 0 || keys.regions.contains_key(&named.key)) {
        return Err(AccessError::Rights);
    }
    let window = if bind.len == 0 { None } else { Some(bound_window(&keys, pd, qpn, bind, two)?) };
    keys.remove(named.key);
    if let Some(window) = window {
        if let Some(Window { region, .. }) = &window.window {
            region.windows.fetch_add(1, Ordering::SeqCst);
        }
        keys.regions.insert(bind.key, Arc::new(window));
    }
    keys.windows.insert(name, Named { key: bind.key, ..named });
    Ok(())
}

/// Checks a bind request and makes the bound window.
fn bound_window(keys: &Keys, pd: &Arc<Pd>, qpn: u32, bind: &Bind, two: bool) -> Result<Mr, AccessError> {
    let region = keys.regions.get(&bind.region).filter(|mr| mr.window.is_none());
    let region = region.ok_or(AccessError::InvalidStag)?;
    let len = usize::try_from(bind.len).map_err(|_| AccessError::Bounds)?;
    let seg = region.check(pd.id(), bind.addr, len, Access::MW_BIND)?;
    if region.access.contains(Access::ZERO_BASED) || check_rights(bind.access | region.access).is_err() {
        return Err(AccessError::Rights);
    }
    let iova = if bind.access.contains(Access::ZERO_BASED) { 0 } else { bind.addr };
    let window = Window { region: region.clone(), qpn: two.then_some(qpn) };
    let range = (seg.addr, bind.len, iova);
    Ok(Mr { window: Some(window), ..Mr::unshared(bind.key, pd, range, bind.access) })
}

/// Unbinds the windows of queue pair `qpn`, which is reset or destroyed: its next peer must not use them.
pub fn unbind_windows_of(qpn: u32) {
    if TABLE.keys.read().windows.is_empty() {
        return;
    }
    let mut keys = TABLE.keys.write();
    let of_it = |mr: &&Arc<Mr>| mr.window.as_ref().is_some_and(|window| window.qpn == Some(qpn));
    let bound: Vec<u32> = keys
        .windows
        .values()
        .filter_map(|named| keys.regions.get(&named.key).filter(of_it).map(|mr| mr.stag))
        .collect();
    for key in bound {
        keys.remove(key);
    }
}

/// STags are random, so a peer that knows one cannot guess another (RFC 5042 section 5.1).
///
/// Regions in the table are valid, all others are not: a region enters, leaves and changes validity under the
/// table's lock.
struct Table {
    keys: RwLock<Keys>,
}

type ByKey<T> = HashMap<u32, T, BuildHasherDefault<StagHasher>>;

#[derive(Default)]
struct Keys {
    /// Includes bound windows.
    regions: ByKey<Arc<Mr>>,
    /// All windows, by the part of their keys that never changes. No region has a key that could become a key
    /// of a window.
    windows: ByKey<Named>,
}

/// A window, bound or not.
#[derive(Debug, Clone, Copy)]
struct Named {
    pd: u32,
    kind: WindowType,
    /// Its present key, or its last one.
    key: u32,
}

static TABLE: LazyLock<Table> = LazyLock::new(|| Table { keys: RwLock::default() });

impl Keys {
    fn remove(&mut self, stag: u32) -> Option<Arc<Mr>> {
        let mr = self.regions.remove(&stag)?;
        mr.valid.store(false, Ordering::SeqCst);
        if let Some(window) = &mr.window {
            window.region.windows.fetch_sub(1, Ordering::SeqCst);
        }
        Some(mr)
    }
}

impl Table {
    fn insert(&self, make: impl FnOnce(u32) -> Arc<Mr>) -> Result<Arc<Mr>, VerbsError> {
        let mut keys = self.keys.write();
        // The number of tries is bounded: with a million regions one draw in 4,000 is taken.
        for _ in 0..64 {
            let stag = random_u32()?;
            let taken = keys.regions.contains_key(&stag) || keys.windows.contains_key(&(stag & WINDOW_NAME));
            // Peers write 0 for "no STag"; all ones means none too.
            if stag != 0 && stag != u32::MAX && !taken {
                let mr = make(stag);
                keys.regions.insert(stag, mr.clone());
                return Ok(mr);
            }
        }
        Err(VerbsError::NoResources("STags"))
    }

    fn find(&self, stag: u32) -> Option<Arc<Mr>> {
        self.keys.read().regions.get(&stag).cloned()
    }

    /// Gives the key of `old` to another region; fails if `old` was invalidated, or has windows.
    fn replace(&self, old: &Mr, new: &Arc<Mr>) -> bool {
        let mut keys = self.keys.write();
        let place = keys.regions.get_mut(&old.stag).filter(|mr| std::ptr::eq(Arc::as_ptr(mr), old));
        let Some(place) = place.filter(|mr| !mr.has_windows()) else { return false };
        old.valid.store(false, Ordering::SeqCst);
        *place = new.clone();
        true
    }

    /// Invalidates the key, if `may` allows it and no window is bound to the region.
    fn remove_if(
        &self,
        stag: u32,
        may: impl FnOnce(&Mr) -> Result<(), AccessError>,
    ) -> Result<(), AccessError> {
        let mut keys = self.keys.write();
        let mr = keys.regions.get(&stag).ok_or(AccessError::InvalidStag)?;
        may(mr)?;
        if mr.has_windows() {
            return Err(AccessError::Rights);
        }
        keys.remove(stag);
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

    const WINDOW: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

    fn region_for_windows(pd: &Arc<Pd>) -> Arc<Mr> {
        Mr::register(pd, 0x1000, 64, 0x1000, Access::LOCAL_WRITE | Access::MW_BIND).unwrap()
    }

    fn bind_of(key: u32, region: &Mr) -> Bind {
        Bind { key, region: region.stag(), addr: 0x1010, len: 16, access: WINDOW }
    }

    fn use_of(user: &mut MrCache, pd: &Pd, key: u32, to: u64) -> Result<MemSeg, AccessError> {
        user.with(Part { stag: key, to, len: 1 }, pd.id(), Access::REMOTE_WRITE, |seg| seg)
    }

    #[test]
    fn a_window_gives_its_part_to_peers_only_and_keeps_its_region_registered() {
        let pd = Pd::new();
        let region = region_for_windows(&pd);
        let key = add_window(pd.id(), WindowType::One).unwrap();
        let (mut peer, mut program) = (MrCache::of_peer(7), MrCache::default());
        assert_eq!(use_of(&mut peer, &pd, key, 0x1010), Err(AccessError::InvalidStag), "not bound");
        bind_window(&pd, 7, &bind_of(key, &region)).unwrap();
        assert_eq!(use_of(&mut peer, &pd, key, 0x101F), Ok(MemSeg { addr: 0x101F, len: 1 }));
        assert_eq!(use_of(&mut peer, &pd, key, 0x1020), Err(AccessError::Bounds));
        assert_eq!(use_of(&mut peer, &pd, key, 0x100F), Err(AccessError::Bounds));
        assert_eq!(use_of(&mut peer, &pd, region.stag(), 0x1010), Err(AccessError::Rights));
        assert_eq!(use_of(&mut program, &pd, key, 0x1010), Err(AccessError::InvalidStag));
        assert!(use_of(&mut MrCache::of_peer(8), &pd, key, 0x1010).is_ok(), "type 1 belongs to the domain");
        assert!(!region.deregister() && !region.invalidate());
        assert_eq!(region.reregister(None, None, Some(Access::empty())).err(), Some(VerbsError::Busy));
        assert_eq!(invalidate(region.stag(), pd.id(), 7), Err(AccessError::Rights));
        assert_eq!(invalidate(key, pd.id(), 7), Err(AccessError::Rights), "type 1 is bound again instead");
        assert_eq!(invalidate_remotely(key, &pd, 7), Err(AccessError::Rights));
        // With another key; the old one is invalid. Then unbound.
        let next = key ^ 1;
        bind_window(&pd, 7, &bind_of(next, &region)).unwrap();
        assert_eq!(use_of(&mut peer, &pd, key, 0x1010), Err(AccessError::InvalidStag));
        assert!(use_of(&mut peer, &pd, next, 0x1010).is_ok());
        bind_window(&pd, 7, &Bind { len: 0, ..bind_of(key, &region) }).unwrap();
        assert_eq!(use_of(&mut peer, &pd, next, 0x1010), Err(AccessError::InvalidStag));
        assert!(region.deregister());
        remove_window(key);
        assert_eq!(bind_window(&pd, 7, &bind_of(key, &region)), Err(AccessError::InvalidStag));
    }

    #[test]
    fn a_window_of_type_2_belongs_to_its_queue_pair() {
        let pd = Pd::new();
        let region = region_for_windows(&pd);
        let key = add_window(pd.id(), WindowType::Two).unwrap();
        let zero = Bind { access: WINDOW | Access::ZERO_BASED, ..bind_of(key, &region) };
        bind_window(&pd, 7, &zero).unwrap();
        let (mut peer, mut other) = (MrCache::of_peer(7), MrCache::of_peer(8));
        assert_eq!(use_of(&mut peer, &pd, key, 3), Ok(MemSeg { addr: 0x1013, len: 1 }));
        assert_eq!(use_of(&mut other, &pd, key, 3), Err(AccessError::WrongPd));
        assert_eq!(bind_window(&pd, 7, &zero), Err(AccessError::Rights), "bound already");
        assert_eq!(invalidate(key, pd.id(), 8), Err(AccessError::Rights));
        assert_eq!(invalidate_remotely(key, &pd, 8), Err(AccessError::Rights));
        // This does not depend on how many streams the domain has.
        let _streams = [pd.begin_stream(), pd.begin_stream()];
        assert_eq!(invalidate_remotely(key, &pd, 7), Ok(()));
        assert_eq!(use_of(&mut peer, &pd, key, 3), Err(AccessError::InvalidStag));
        bind_window(&pd, 8, &zero).unwrap();
        assert!(use_of(&mut other, &pd, key, 3).is_ok());
        assert_eq!(bind_window(&pd, 8, &Bind { len: 0, ..zero }), Err(AccessError::Rights));
        unbind_windows_of(7);
        assert!(use_of(&mut other, &pd, key, 3).is_ok());
        unbind_windows_of(8);
        assert_eq!(use_of(&mut other, &pd, key, 3), Err(AccessError::InvalidStag));
        bind_window(&pd, 7, &zero).unwrap();
        remove_window(key);
        assert_eq!(use_of(&mut peer, &pd, key, 3), Err(AccessError::InvalidStag));
        assert!(region.deregister());
    }

    #[test]
    fn what_a_window_cannot_be_bound_to() {
        let (pd, other) = (Pd::new(), Pd::new());
        let key = add_window(pd.id(), WindowType::Two).unwrap();
        let region = region_for_windows(&pd);
        let bind = bind_of(key, &region);
        let register = |access| Mr::register(&pd, 0x1000, 64, 0x1000, access).unwrap();
        let with = |mr: &Mr| bind_window(&pd, 7, &Bind { region: mr.stag(), ..bind });
        assert_eq!(with(&register(Access::LOCAL_WRITE)), Err(AccessError::Rights), "no right to bind");
        assert_eq!(with(&register(Access::MW_BIND)), Err(AccessError::Rights), "no local writes");
        let zero = Access::LOCAL_WRITE | Access::MW_BIND | Access::ZERO_BASED;
        assert!(with(&register(zero)).is_err(), "a region with offsets from zero");
        assert_eq!(with(&region_for_windows(&other)), Err(AccessError::WrongPd));
        assert_eq!(bind_window(&other, 7, &bind), Err(AccessError::WrongPd));
        assert_eq!(bind_window(&pd, 7, &Bind { region: 1, ..bind }), Err(AccessError::InvalidStag));
        for (addr, len) in [(0xFFF, 16), (0x1031, 16), (0x1000, 65), (0x1000, u64::MAX), (u64::MAX, 2)] {
            assert_eq!(bind_window(&pd, 7, &Bind { addr, len, ..bind }), Err(AccessError::Bounds));
        }
        bind_window(&pd, 7, &bind).unwrap();
        let second = add_window(pd.id(), WindowType::Two).unwrap();
        let on_window = Bind { key: second, region: key, ..bind };
        assert_eq!(bind_window(&pd, 7, &on_window), Err(AccessError::InvalidStag), "a window on a window");
        remove_window(key);
        remove_window(second);
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
