//! Memory windows (docs/adr/030): parts of regions, with keys and rights of their own, for peers only.

use std::sync::Arc;

use super::keys::{Keys, Named, TABLE};
use super::{Access, AccessError, Mr, check_rights};
use crate::error::VerbsError;
use crate::pd::Pd;
use crate::random::random_u32;
use crate::sync::Ordering;

/// What makes an [`Mr`] a bound memory window: a part of another region, with rights of its own and for peers
/// only.
#[derive(Debug)]
pub(super) struct Window {
    /// The region, which cannot be deregistered while the window is bound.
    pub(super) region: Arc<Mr>,
    /// For type 2: the queue pair whose peer alone may use the window.
    pub(super) qpn: Option<u32>,
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
pub(super) const WINDOW_NAME: u32 = !0xFF;

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

/// Binds a window, for queue pair `qpn` of domain `pd`. Waits until nothing uses the memory that it was bound
/// to.
pub fn bind_window(pd: &Arc<Pd>, qpn: u32, bind: &Bind) -> Result<(), AccessError> {
    // Not under the table's lock, which others need to end their uses.
    if let Some(before) = replace_binding(pd, qpn, bind)? {
        before.wait_for_users();
    }
    Ok(())
}

/// Binds a window; returns what it was before.
fn replace_binding(pd: &Arc<Pd>, qpn: u32, bind: &Bind) -> Result<Option<Arc<Mr>>, AccessError> {
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
    let before = keys.remove(named.key);
    if let Some(window) = window {
        if let Some(Window { region, .. }) = &window.window {
            region.windows.fetch_add(1, Ordering::SeqCst);
        }
        keys.regions.insert(bind.key, Arc::new(window));
    }
    keys.windows.insert(name, Named { key: bind.key, ..named });
    Ok(before)
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

#[cfg(test)]
mod tests {
    use super::super::{MrCache, Part, invalidate, invalidate_remotely};
    use super::*;
    use uwarp_mem::MemSeg;

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

    /// A peer's message was still written there when the work request was complete.
    #[test]
    fn c13_local_invalidation_rebinding_and_unbinding_wait_for_a_receive_in_progress() {
        use std::sync::atomic::{AtomicBool, Ordering};

        let pd = Pd::new();
        let region = region_for_windows(&pd);
        let key = add_window(pd.id(), WindowType::One).unwrap();
        let bound = bind_of(key, &region);
        let plain =
            Mr::register(&pd, 0x1000, 64, 0x1000, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
        type Take<'a> = &'a (dyn Fn() -> Result<(), AccessError> + Sync);
        let takes: [(u32, Take<'_>); 3] = [
            (plain.stag(), &|| invalidate(plain.stag(), pd.id(), 7)),
            (key, &|| bind_window(&pd, 7, &Bind { key: key ^ 1, ..bound })),
            (key ^ 1, &|| bind_window(&pd, 7, &Bind { key, len: 0, ..bound })),
        ];
        bind_window(&pd, 7, &bound).unwrap();
        for (stag, take) in takes {
            let part = Part { stag, to: 0x1010, len: 1 };
            let (_, receiving) = MrCache::of_peer(8).enter(part, pd.id(), Access::REMOTE_WRITE).unwrap();
            let placed = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let taken = scope.spawn(|| {
                    let taken = take();
                    assert!(placed.load(Ordering::SeqCst), "it did not wait");
                    taken
                });
                // Too short a time only makes the test weaker.
                std::thread::sleep(std::time::Duration::from_millis(20));
                placed.store(true, Ordering::SeqCst);
                drop(receiving);
                assert_eq!(taken.join().unwrap(), Ok(()));
            });
        }
        assert!(region.deregister());
        remove_window(key);
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
}
