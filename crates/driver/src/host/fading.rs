//! What is left when two processes do not speak any more: slabs whose lanes streams still use. When the last
//! stream has left one, its memory is given back.

use std::sync::Arc;
use std::time::{Duration, Instant};

use uwarp_llp::memory::slab::Slab;
use uwarp_process::{Mutex, OnceValue};

use crate::engine::Engine;
use crate::lanes::Lanes;
use crate::source::{Readiness, Source, Token};

/// How soon it looks again whether streams have left, and how seldom in the end: the time doubles. Most leave
/// as soon as their program has heard that the peer is gone.
const SOON: Duration = Duration::from_millis(20);
const SELDOM: Duration = Duration::from_secs(10);

pub(super) struct Fading {
    engine: Arc<Engine>,
    lanes: Arc<Lanes>,
    token: OnceValue<Token>,
    /// Those that are in use, and when to look again.
    slabs: Mutex<(Vec<Arc<Slab>>, Duration), 26>,
    bell: Option<Token>,
}

impl Fading {
    /// Nobody begins anything more with these slabs. `bell`: watched for their sake.
    pub fn begin(engine: &Arc<Engine>, lanes: &Arc<Lanes>, slabs: Vec<Arc<Slab>>, bell: Option<Token>) {
        let (engine, lanes, slabs) = (engine.clone(), lanes.clone(), Mutex::new((slabs, SOON)));
        let fading = Arc::new(Self { engine, lanes, token: OnceValue::new(), slabs, bell });
        let token = fading.engine.new_token(fading.clone());
        fading.token.get_or_make(|| token);
        fading.look();
    }

    fn look(&self) {
        let Some(token) = self.token.get() else { return };
        let mut state = self.slabs.lock();
        let (slabs, again) = &mut *state;
        let (left, used) = std::mem::take(slabs).into_iter().partition(has_no_streams);
        *slabs = used;
        let (is_over, after) = (slabs.is_empty(), *again);
        *again = (after * 2).min(SELDOM);
        drop(state);
        let left: Vec<Arc<Slab>> = left;
        left.iter().for_each(|slab| self.lanes.remove(slab));
        if is_over {
            self.bell.into_iter().for_each(|bell| self.engine.deregister(bell));
            self.engine.deregister(*token);
        } else {
            self.engine.set_timer(*token, Some(Instant::now() + after));
        }
    }
}

/// Whether no end of a lane is left: only who keeps it for new ones, and [`Lanes`], have it.
pub(super) fn has_no_streams(slab: &Arc<Slab>) -> bool {
    Arc::strong_count(slab) <= 2
}

impl Source for Fading {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        self.look();
    }
}
