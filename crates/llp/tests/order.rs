//! News and sleep, and what the ends of a lane say, in every order that the memory model allows (loom). The
//! files are those of the library, compiled with loom's atomics. (`crates/model` tries the schedules of the
//! engine around them; it knows no order of memory.)

use loom::sync::Arc;
use loom::thread;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
    pub(crate) type Line = [AtomicU64; 8];
}

#[path = "../src/memory/bell.rs"]
mod bell;
#[allow(dead_code)]
#[path = "../src/memory/ledger.rs"]
mod ledger;

use ledger::{Mine, Theirs};
use sync::{AtomicU64, Line, Ordering};

/// One direction between two processes.
struct Pair {
    line: Line,
    data: AtomicU64,
    ready: AtomicU64,
    board: AtomicU64,
    rung: AtomicU64,
    rings: AtomicU64,
}

impl Pair {
    fn new() -> Arc<Self> {
        let word = || AtomicU64::new(0);
        Arc::new(Self {
            line: std::array::from_fn(|_| word()),
            data: word(),
            ready: word(),
            board: word(),
            rung: AtomicU64::new(u64::MAX),
            rings: word(),
        })
    }

    fn ring(&self) {
        self.rings.fetch_add(1, Ordering::SeqCst);
    }

    /// So many bytes, and then the news.
    fn send(&self, mine: &mut Mine, bytes: u64) {
        self.data.store(mine.tail + bytes, Ordering::Relaxed);
        mine.tail += bytes;
        mine.show_tail(&self.line);
        bell::tell(&self.ready, 1, &self.board, &self.rung, || self.ring());
    }

    /// A thread is about to sleep; returns whether it found news, and how many bytes it then saw.
    fn falls_asleep(&self, theirs: &mut Theirs) -> Option<u64> {
        bell::enter(&self.board);
        let found = bell::take(&self.ready) != 0;
        found.then(|| {
            bell::leave(&self.board);
            let tail = theirs.hear_tail(&self.line, 0).unwrap();
            assert!(self.data.load(Ordering::Relaxed) >= tail, "bytes that are not there");
            tail
        })
    }
}

/// What was sent is seen before the sleep, or the bell rings.
#[test]
fn no_news_are_slept_over() {
    loom::model(|| {
        let pair = Pair::new();
        let sender = thread::spawn({
            let pair = pair.clone();
            move || {
                let mut mine = Mine::default();
                pair.send(&mut mine, 1);
                pair.send(&mut mine, 1);
            }
        });
        let mut theirs = Theirs::default();
        let mut seen = pair.falls_asleep(&mut theirs);
        if seen.is_some_and(|tail| tail < 2) {
            seen = pair.falls_asleep(&mut theirs).or(seen);
        }
        sender.join().unwrap();
        assert!(seen == Some(2) || pair.rings.load(Ordering::SeqCst) > 0, "{seen:?}, and nobody rings");
    });
}

/// The same with the news told before they are ordered: what loom must find.
#[test]
#[should_panic(expected = "nobody rings")]
fn without_the_fence_news_are_lost() {
    loom::model(|| {
        let pair = Pair::new();
        pair.ready.store(1, Ordering::Relaxed);
        let sender = thread::spawn({
            let pair = pair.clone();
            move || {
                let mut mine = Mine::default();
                mine.tail = 1;
                mine.show_tail(&pair.line);
                // `tell`, but for its first line.
                if pair.ready.load(Ordering::SeqCst) & 1 == 0 {
                    pair.ready.fetch_or(1, Ordering::SeqCst);
                    pair.ring();
                }
            }
        });
        let seen = pair.falls_asleep(&mut Theirs::default());
        sender.join().unwrap();
        assert!(seen == Some(1) || pair.rings.load(Ordering::SeqCst) > 0, "{seen:?}, and nobody rings");
    });
}

/// A thread wakes, serves, and goes back to its program, while another one still sleeps.
#[test]
fn a_thread_that_still_sleeps_is_rung_for_again() {
    loom::model(|| {
        let pair = Pair::new();
        let mut mine = Mine::default();
        bell::enter(&pair.board);
        bell::enter(&pair.board);
        pair.send(&mut mine, 1);
        assert_eq!(pair.rings.load(Ordering::SeqCst), 1);
        let leader = thread::spawn({
            let pair = pair.clone();
            move || {
                bell::leave(&pair.board);
                bell::take(&pair.ready) != 0
            }
        });
        pair.send(&mut mine, 1);
        assert!(leader.join().unwrap());
        // It may have seen the second one, too; who sleeps on must hear of a third.
        let before = pair.rings.load(Ordering::SeqCst);
        let pending = pair.ready.load(Ordering::SeqCst) != 0;
        pair.send(&mut mine, 1);
        let rings = pair.rings.load(Ordering::SeqCst);
        assert!(rings > before || pending && before > 1, "{before} {rings}");
    });
}

/// A thread that polls takes the bell's report, looks, and goes back to its program; the sleeper sleeps on.
#[test]
fn a_thread_that_polls_does_not_silence_the_bell() {
    loom::model(|| {
        let pair = Pair::new();
        let mut mine = Mine::default();
        bell::enter(&pair.board);
        pair.send(&mut mine, 1);
        let poller = thread::spawn({
            let pair = pair.clone();
            move || {
                bell::heard(&pair.board);
                bell::take(&pair.ready);
                // It may have been told again meanwhile; what comes from here on is the sleeper's.
                Theirs::default().hear_tail(&pair.line, 0).unwrap()
            }
        });
        pair.send(&mut mine, 1);
        let seen = poller.join().unwrap();
        let rings = pair.rings.load(Ordering::SeqCst);
        assert!(seen == 2 || rings == 2, "{seen} {rings}");
    });
}

/// What an end says of itself comes before the bytes that it may be about: a Terminate is about the first
/// message that is not counted.
#[test]
fn counts_are_seen_with_the_bytes_behind_them() {
    loom::model(|| {
        let pair = Pair::new();
        let sender = thread::spawn({
            let pair = pair.clone();
            move || {
                let mut mine = Mine::default();
                mine.tail = 1;
                mine.acked(&pair.line, 7);
                mine.show_tail(&pair.line);
            }
        });
        if Theirs::default().hear_tail(&pair.line, 0) == Ok(1) {
            assert_eq!(Theirs::acked(&pair.line), 7);
        }
        sender.join().unwrap();
    });
}

/// Each end says first, and then looks at what the other one waits for.
#[test]
fn one_of_the_two_sees_the_other() {
    loom::model(|| {
        let lines = Arc::new([(), ()].map(|()| std::array::from_fn::<_, 8, _>(|_| AtomicU64::new(0))));
        let placer = thread::spawn({
            let lines = lines.clone();
            move || {
                Mine::default().acked(&lines[0], 5);
                sync::fence(Ordering::SeqCst);
                Theirs::want(&lines[1]) == 5
            }
        });
        Mine::default().wants(&lines[1], 5);
        sync::fence(Ordering::SeqCst);
        let seen = Theirs::acked(&lines[0]) == 5;
        assert!(placer.join().unwrap() || seen);
    });
}
