//! Memory for queue pairs that are joined with themselves: UCX makes one for what a rank sends to itself,
//! and NCCL one for its flushes. A lane of theirs has one end, which reads what it has written. No other
//! process is asked, and none is shown anything.

use std::io;
use std::sync::Arc;

use uwarp_llp::memory::board::PeerBoard;
use uwarp_llp::memory::lane::End;
use uwarp_llp::memory::pair::{Bell, Pair};
use uwarp_llp::memory::slab::Slab;
use uwarp_mem::shared::Refused;

use crate::engine::Engine;
use crate::lanes::Lanes;
use crate::source::Token;

/// The slabs of these lanes.
pub(crate) struct ToItself {
    engine: Arc<Engine>,
    lanes: Arc<Lanes>,
    /// Of this process with itself: a thread that writes wakes another one that sleeps.
    pair: Arc<Pair>,
    watched: Token,
    slabs: Vec<Arc<Slab>>,
}

impl ToItself {
    pub fn start(engine: &Arc<Engine>, lanes: &Arc<Lanes>) -> io::Result<Self> {
        let refused = |_| io::Error::from(io::ErrorKind::OutOfMemory);
        let board = PeerBoard::open(lanes.board().try_clone_to_owned()?).map_err(refused)?;
        let (bell, rings) = (Bell::create()?, |bell: &Bell| bell.fd().try_clone_to_owned());
        let pair = Arc::new(Pair::new(board, Bell::from_peer(rings(&bell)?)?));
        let watched = lanes.watch_bell(engine, bell)?;
        Ok(Self { engine: engine.clone(), lanes: lanes.clone(), pair, watched, slabs: Vec::new() })
    }

    /// A lane for one more stream.
    pub fn lane(&mut self) -> Result<End, Refused> {
        // One is kept for the next streams.
        let mut keeps = true;
        self.slabs.retain(|slab| {
            let stays = slab.is_used() || std::mem::take(&mut keeps);
            if !stays {
                self.lanes.remove(slab);
            }
            stays
        });
        let taken = self.slabs.iter().find_map(|slab| Some((slab.clone(), slab.take_lane()?)));
        let (slab, lane) = match taken {
            Some(taken) => taken,
            None => {
                let slab = Slab::create_alone(self.pair.clone())?;
                let lane = slab.take_lane().ok_or(Refused::Size)?;
                self.lanes.add(slab.clone());
                self.slabs.push(slab.clone());
                (slab, lane)
            }
        };
        Ok(End::new(slab, lane))
    }
}

impl Drop for ToItself {
    fn drop(&mut self) {
        if self.engine.birth.is_parents() {
            return;
        }
        self.engine.deregister(self.watched);
        self.slabs.iter().for_each(|slab| self.lanes.remove(slab));
    }
}
