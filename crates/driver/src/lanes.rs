//! Streams through memory, for the engine: finds the lanes that have news, and shows on the process's board
//! when threads sleep (`uwarp_llp::memory`).

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use uwarp_llp::memory::board::Board;
use uwarp_llp::memory::pair::Bell;
use uwarp_llp::memory::slab::Slab;
use uwarp_mem::shared::Refused;
use uwarp_process::RwLock;

use crate::engine::Engine;
use crate::raised::Look;
use crate::source::{Readiness, Source, Token};

/// All slabs of this process.
pub struct Lanes {
    board: Board,
    slabs: RwLock<Vec<Arc<Slab>>, 28>,
}

impl Lanes {
    pub(crate) fn start(engine: &Engine) -> Result<Arc<Self>, Refused> {
        let lanes = Arc::new(Self { board: Board::create()?, slabs: RwLock::default() });
        engine.add_look(lanes.clone());
        Ok(lanes)
    }

    /// What a peer needs to know whether this process sleeps.
    pub fn board(&self) -> BorrowedFd<'_> {
        self.board.fd()
    }

    /// From now on, news of this slab are found.
    pub fn add(&self, slab: Arc<Slab>) {
        self.slabs.write().push(slab);
    }

    /// No stream uses this slab any more.
    pub fn remove(&self, slab: &Arc<Slab>) {
        self.slabs.write().retain(|known| !Arc::ptr_eq(known, slab));
    }
}

impl Look for Lanes {
    fn sleep_begins(&self) {
        self.board.enter();
    }

    fn sleep_ends(&self) {
        self.board.leave();
    }

    fn harvest(&self, raise: &mut dyn FnMut(Token, Readiness)) {
        for slab in &*self.slabs.read() {
            slab.harvest(|name| raise(Token(name), Readiness::ANY));
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
