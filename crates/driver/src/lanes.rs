//! Streams through memory, for the engine: finds the lanes that have news, and shows on the process's board
//! when threads sleep (`uwarp_llp::memory`).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use uwarp_llp::memory::board::Board;
use uwarp_llp::memory::pair::Bell;
use uwarp_llp::memory::slab::Slab;
use uwarp_mem::shared::Refused;
use uwarp_process::{RwLock, RwLockWriteGuard};

use crate::engine::Engine;
use crate::patience::pause;
use crate::raised::Look;
use crate::source::{Readiness, Source, Token};

/// Lists of slabs. One is enough, unless a thread has jumped out of a look, from the handler of a signal: its
/// list is read by others, and never changed again.
const LISTS: usize = 16;
/// So often a list is tried before the next one is taken, in between with a pause.
const TRIES: usize = 200;
const PAUSE: Duration = Duration::from_micros(100);

/// All slabs of this process.
pub struct Lanes {
    board: Board,
    slabs: [RwLock<Vec<Arc<Slab>>, 28>; LISTS],
    /// How many lists are used.
    lists: AtomicUsize,
}

impl Lanes {
    pub(crate) fn start(engine: &Engine) -> Result<Arc<Self>, Refused> {
        let lanes = Arc::new(Self {
            board: Board::create()?,
            slabs: std::array::from_fn(|_| RwLock::default()),
            lists: AtomicUsize::new(1),
        });
        engine.add_look(lanes.clone());
        Ok(lanes)
    }

    /// What a peer needs to know whether this process sleeps.
    pub fn board(&self) -> BorrowedFd<'_> {
        self.board.fd()
    }

    /// From now on, news of this slab are found.
    pub fn add(&self, slab: Arc<Slab>) {
        for (n, list) in (1..).zip(&self.slabs) {
            if let Some(mut list) = change(list) {
                list.push(slab);
                self.lists.fetch_max(n, Ordering::SeqCst);
                return;
            }
        }
        tracing::error!("a stream in memory is not served: {LISTS} threads have jumped out of a call");
    }

    /// No stream uses this slab any more.
    pub fn remove(&self, slab: &Arc<Slab>) {
        for list in self.lists() {
            let is_there = list.read().iter().any(|known| Arc::ptr_eq(known, slab));
            if is_there && let Some(mut list) = change(list) {
                list.retain(|known| !Arc::ptr_eq(known, slab));
            }
        }
    }

    fn lists(&self) -> impl Iterator<Item = &RwLock<Vec<Arc<Slab>>, 28>> {
        self.slabs.iter().take(self.lists.load(Ordering::SeqCst))
    }
}

/// The list, to change it; `None`: a thread that reads it does not come back. Nobody is kept from reading
/// meanwhile.
fn change(list: &RwLock<Vec<Arc<Slab>>, 28>) -> Option<RwLockWriteGuard<'_, Vec<Arc<Slab>>, 28>> {
    list.try_write().or_else(|| {
        (0..TRIES).find_map(|_| {
            pause(PAUSE);
            list.try_write()
        })
    })
}

impl Look for Lanes {
    fn sleep_begins(&self) {
        self.board.enter();
    }

    fn sleep_ends(&self) {
        self.board.leave();
    }

    fn harvest(&self, raise: &mut dyn FnMut(Token, Readiness)) {
        for list in self.lists() {
            for slab in &*list.read() {
                slab.harvest(|name| raise(Token(name), Readiness::ANY));
            }
        }
    }
}

/// The bell by which a peer wakes this process. What was rung for, a look finds.
struct Rung {
    lanes: Arc<Lanes>,
    /// Open as long as it is watched.
    _bell: Bell,
}

impl Source for Rung {
    /// Each ring is reported to one thread, which need not be the one that sleeps.
    fn ready(&self, _: Readiness) {
        self.lanes.board.heard();
    }

    fn timeout(&self) {}
}

impl Lanes {
    /// From now on this bell wakes a thread that sleeps; until [`Engine::deregister`].
    pub fn watch_bell(self: &Arc<Self>, engine: &Engine, bell: Bell) -> io::Result<Token> {
        let fd = bell.raw();
        let rung = Rung { lanes: self.clone(), _bell: bell };
        engine.register_bell(fd, Arc::new(rung))
    }
}
