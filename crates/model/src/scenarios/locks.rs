//! The lock of a queue pair, and the memory regions that it uses.

use std::sync::Arc;

use uwarp_rnic::Pd;

use crate::attended::Attended;
use crate::mr::{self, Access, Bind, Mr, MrCache, Part, WindowType};
use crate::sync::{AtomicBool, Ordering, yield_now};
use crate::sys::{Thread, start};

/// A reduced queue pair: events that arrive without the lock, and what was done with them.
struct Busy {
    lock: Attended<u64, 18>,
    news: AtomicBool,
}

impl Busy {
    fn new() -> Arc<Self> {
        Arc::new(Self { lock: Attended::new(0), news: AtomicBool::new(false) })
    }

    fn work(&self, done: &mut u64) {
        if self.news.swap(false, Ordering::SeqCst) {
            *done += 1;
        }
    }

    fn release(&self, done: crate::sync::MutexGuard<'_, u64, 18>) {
        self.lock.release(done, |_| (), |done| self.work(done));
    }

    /// As `Qp::look`.
    fn look(&self) {
        if let Some(mut done) = self.lock.look() {
            self.work(&mut done);
            self.release(done);
        }
    }

    /// As `Qp::ready`.
    fn ready(&self) {
        self.news.store(true, Ordering::SeqCst);
        self.look();
    }

    /// As `Qp::post_send`.
    fn post(&self) {
        let mut done = self.lock.lock();
        // It only sends and checks for no event.
        *done += 0;
        self.release(done);
    }

    /// As `Qp::post_recv`.
    fn post_without_looking(&self) {
        let done = self.lock.lock();
        if self.lock.let_go(done) {
            self.look();
        }
    }

    /// As `Qp::make_progress`.
    fn make_progress(&self) {
        if let Some(mut done) = self.lock.try_lock() {
            let before = *done;
            self.work(&mut done);
            if *done == before && !self.lock.kicked() {
                if self.lock.let_go(done) {
                    self.look();
                }
            } else {
                self.release(done);
            }
        }
    }
}

/// If a thread brings an event and finds the lock taken, the holder of the lock handles the event, however it
/// holds and releases the lock.
pub fn no_readiness_is_lost() {
    let busy = Busy::new();
    let ways: [fn(&Busy); 5] = [
        Busy::ready,
        |busy| {
            busy.ready();
            busy.ready();
        },
        Busy::post,
        |busy| {
            busy.post_without_looking();
            busy.post_without_looking();
        },
        |busy| {
            busy.make_progress();
            busy.make_progress();
        },
    ];
    let threads = ways.map(|way| {
        let busy = busy.clone();
        start(move || way(&busy))
    });
    threads.into_iter().for_each(Thread::join);
    assert!(!busy.news.load(Ordering::SeqCst), "news came and nobody looks");
    assert!(*busy.lock.lock() > 0);
}

/// The program may free memory once its region is deregistered, even if another thread invalidated the key
/// and uses were in progress.
pub fn deregistering_waits_for_uses() {
    let pd = Pd::new();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mr = Mr::register(&pd, 0x1000, 64, 0x1000, rights).unwrap();
    let freed = Arc::new(AtomicBool::new(false));
    let used = |freed: &AtomicBool| {
        assert!(!freed.load(Ordering::SeqCst), "memory is used that was given back");
        yield_now();
        assert!(!freed.load(Ordering::SeqCst), "memory was given back while it is used");
    };
    let part = Part { stag: mr.stag(), to: 0x1000, len: 8 };
    let short = {
        let (freed, pd) = (freed.clone(), pd.clone());
        start(move || {
            let mut cache = MrCache::default();
            while cache.with(part, pd.id(), Access::REMOTE_WRITE, |_| used(&freed)).is_ok() {}
        })
    };
    let several = {
        let (freed, pd) = (freed.clone(), pd.clone());
        start(move || {
            let mut cache = MrCache::default();
            let mut uses = 0..2;
            while uses.all(|_| cache.with_more(part, pd.id(), Access::REMOTE_WRITE, |_| used(&freed)).is_ok())
            {
                cache.end_use();
                uses = 0..2;
            }
        })
    };
    let long = {
        let (freed, pd) = (freed.clone(), pd.clone());
        start(move || {
            let mut cache = MrCache::default();
            for _ in 0..2 {
                if let Ok((_, guard)) = cache.enter(part, pd.id(), Access::REMOTE_WRITE) {
                    used(&freed);
                    drop(guard);
                }
            }
        })
    };
    let peer = {
        let pd = pd.clone();
        start(move || {
            let _ = mr::invalidate_remotely(part.stag, &pd, 1);
        })
    };
    mr.deregister();
    freed.store(true, Ordering::SeqCst);
    [short, several, long, peer].into_iter().for_each(Thread::join);
    assert!(MrCache::default().find(part.stag).is_none());
}

/// For peers a region stays valid while its rights change: uses continue, and its key can be invalidated.
pub fn rights_change_beside_uses_and_invalidation() {
    let pd = Pd::new();
    let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let mr = Mr::register(&pd, 0x1000, 64, 0x1000, rights).unwrap();
    let part = Part { stag: mr.stag(), to: 0x1000, len: 8 };
    let user = {
        let pd = pd.clone();
        start(move || {
            let mut cache = MrCache::default();
            assert_eq!(cache.with(part, pd.id(), Access::REMOTE_WRITE, |_| ()), Ok(()));
            assert!(cache.enter(part, pd.id(), Access::REMOTE_WRITE).is_ok());
            assert_eq!(mr::invalidate_remotely(part.stag, &pd, 1), Ok(()));
        })
    };
    let new = mr.reregister(None, None, Some(rights | Access::REMOTE_READ)).unwrap();
    user.join();
    assert!(MrCache::default().find(part.stag).is_none(), "a key that was taken back is valid");
    new.deregister();
}

/// A region and a window of type 2 that queue pair 1 has bound to all of it.
fn region_with_a_window(pd: &Arc<Pd>) -> (Arc<Mr>, Bind) {
    let mr = Mr::register(pd, 0x1000, 64, 0x1000, Access::LOCAL_WRITE | Access::MW_BIND).unwrap();
    let key = mr::add_window(pd.id(), WindowType::Two).unwrap();
    let bind = Bind { key, region: mr.stag(), addr: 0x1000, len: 64, access: Access::REMOTE_WRITE };
    mr::bind_window(pd, 1, &bind).unwrap();
    (mr, bind)
}

/// The program may free memory once its region is deregistered, although the peer takes the last window
/// away at that moment, writes through it, and the program binds it again.
pub fn a_region_with_windows_is_busy_or_gone() {
    let pd = Pd::new();
    let (mr, bind) = region_with_a_window(&pd);
    let freed = Arc::new(AtomicBool::new(false));
    let part = Part { stag: bind.key, to: 0x1000, len: 8 };
    let user = {
        let (freed, pd) = (freed.clone(), pd.clone());
        start(move || {
            let mut peer = MrCache::of_peer(1);
            for _ in 0..2 {
                let _ = peer.with(part, pd.id(), Access::REMOTE_WRITE, |_| {
                    assert!(!freed.load(Ordering::SeqCst), "memory is used that was given back");
                    yield_now();
                    assert!(!freed.load(Ordering::SeqCst), "memory was given back while it is used");
                });
            }
        })
    };
    let peer = {
        let pd = pd.clone();
        start(move || {
            let _ = mr::invalidate_remotely(bind.key, &pd, 1);
        })
    };
    let program = {
        let pd = pd.clone();
        start(move || {
            if mr::bind_window(&pd, 1, &bind).is_ok() {
                let _ = mr::invalidate(bind.key, pd.id(), 1);
            }
        })
    };
    while !mr.deregister() {
        yield_now();
    }
    freed.store(true, Ordering::SeqCst);
    assert!(MrCache::default().find(mr.stag()).is_none(), "the key of a deregistered region is good");
    assert!(mr::bind_window(&pd, 1, &bind).is_err(), "a window is bound to a region that is gone");
    [user, peer, program].into_iter().for_each(Thread::join);
    mr::remove_window(bind.key);
}

/// The program deallocates a window while its queue pair is moved to RESET and the peer writes: the window
/// goes once, and its region can go when nobody uses the memory any more.
pub fn a_window_goes_once_and_its_region_after_it() {
    let pd = Pd::new();
    let (mr, bind) = region_with_a_window(&pd);
    let part = Part { stag: bind.key, to: 0x1000, len: 8 };
    let gone = Arc::new(AtomicBool::new(false));
    let user = {
        let (gone, pd) = (gone.clone(), pd.clone());
        start(move || {
            let mut peer = MrCache::of_peer(1);
            for _ in 0..2 {
                let _ = peer.with(part, pd.id(), Access::REMOTE_WRITE, |_| {
                    assert!(!gone.load(Ordering::SeqCst), "a window is used that is no more");
                    yield_now();
                    assert!(!gone.load(Ordering::SeqCst), "a window went while it was used");
                });
            }
        })
    };
    let reset = start(|| mr::unbind_windows_of(1));
    mr::remove_window(bind.key);
    reset.join();
    // RESET waits for no use; the region waits for all.
    assert!(mr.deregister(), "a region has windows that are gone");
    gone.store(true, Ordering::SeqCst);
    user.join();
}
