//! A thread that polls looks at words of shared memory, in place of the queue pairs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use uwarp_mem::glance::Glance;
use uwarp_mem::shared::{LINE, Shared, Writers};
use uwarp_rnic::cq::{Coverage, Feeder};
use uwarp_rnic::event::{AsyncEvent, AsyncSink};
use uwarp_rnic::wr::{Wc, WcOpcode, WcStatus};
use uwarp_rnic::{Cq, wr};

struct Nobody;
impl AsyncSink for Nobody {
    fn async_event(&self, _: AsyncEvent) {}
}

/// A queue pair whose peer writes into a line of its own.
struct Peer {
    memory: Arc<Shared>,
    line: usize,
    asked: AtomicUsize,
}

impl Feeder for Peer {
    fn make_progress(&self, _: bool) -> Coverage {
        Coverage::Complete
    }

    fn glance(&self) -> Option<Glance> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let line = self.memory.line(self.line * LINE);
        let word = |word: u8| (word, line[usize::from(word)].load(Ordering::Relaxed));
        Some(Glance::new(self.memory.clone(), self.line * LINE, [word(0), word(2), word(4)]))
    }
}

impl Peer {
    fn says(&self, word: usize) {
        self.memory.line(self.line * LINE)[word].fetch_add(1, Ordering::Relaxed);
    }
}

fn queue_with_peers(count: u32) -> (Arc<Cq>, Arc<Shared>, Vec<Arc<Peer>>) {
    let memory = Arc::new(Shared::create(c"glances", 4096, Writers::All).unwrap().0);
    let cq = Cq::new(16, 0, None, Arc::new(Nobody));
    let peer = |line| Arc::new(Peer { memory: memory.clone(), line, asked: AtomicUsize::new(0) });
    let peers: Vec<_> = (0..count as usize).map(peer).collect();
    for (qpn, peer) in (1..).zip(&peers) {
        cq.add_feeder(qpn, Arc::downgrade(peer) as Weak<dyn Feeder>);
    }
    (cq, memory, peers)
}

fn quiet_polls(cq: &Cq) -> usize {
    (0..100).take_while(|_| cq.is_quiet()).count()
}

#[test]
fn glances_last_for_some_polls() {
    let (cq, _memory, peers) = queue_with_peers(1);
    assert_eq!(quiet_polls(&cq), 0, "nobody has looked yet");
    cq.glance_from_now();
    assert_eq!((quiet_polls(&cq), peers[0].asked.load(Ordering::Relaxed)), (15, 1));
}

#[test]
fn each_word_of_each_peer_is_news() {
    for (word, is_news) in [(0, true), (2, true), (4, true), (1, false), (3, false)] {
        for who in 0..2 {
            let (cq, _memory, peers) = queue_with_peers(2);
            cq.glance_from_now();
            assert!(cq.is_quiet());
            peers[who].says(word);
            assert_eq!(cq.is_quiet(), !is_news, "word {word} of peer {who}");
            assert_eq!(quiet_polls(&cq) == 0, is_news, "who has seen news looks at the queue pairs");
        }
    }
}

#[test]
fn a_completion_is_no_matter_for_glances() {
    let (cq, _memory, _peers) = queue_with_peers(1);
    cq.glance_from_now();
    assert!(cq.push(Wc::new(1, WcStatus::Success, WcOpcode::Recv, 1), false));
    assert!(!cq.is_quiet());
    assert_eq!(cq.poll(1, drop::<wr::Wc>), 1);
    assert!(cq.is_quiet());
}

#[test]
fn an_overflow_is_reported_at_once() {
    let (cq, _memory, _peers) = queue_with_peers(1);
    cq.glance_from_now();
    let pushed = (0..17).filter(|_| cq.push(Wc::new(1, WcStatus::Success, WcOpcode::Recv, 1), false)).count();
    assert_eq!((pushed, cq.poll(32, drop)), (16, 16));
    assert!(!cq.is_quiet());
    cq.glance_from_now();
    assert!(!cq.is_quiet());
}

/// Who comes, changes or goes ends what was seen of the others; and the memory is not kept.
#[test]
fn glances_end_with_their_feeders() {
    let changes: [fn(&Cq); 3] =
        [|cq| cq.remove_feeder(1), |cq| cq.set_needs_system(1, false), |cq| cq.add_feeder(7, no_feeder())];
    for change in changes {
        let (cq, memory, peers) = queue_with_peers(1);
        cq.glance_from_now();
        assert!(cq.is_quiet());
        change(&cq);
        assert!(!cq.is_quiet());
        drop(peers);
        assert_eq!(Arc::strong_count(&memory), 1);
    }
}

fn no_feeder() -> Weak<dyn Feeder> {
    Weak::<Peer>::new()
}

#[test]
fn three_peers_take_a_look() {
    let (cq, _memory, _peers) = queue_with_peers(3);
    cq.glance_from_now();
    assert!(!cq.is_quiet());
}
