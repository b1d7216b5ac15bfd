//! A futex(2) in the model, and the locks that a thread holds. If a thread is never woken, all threads wait
//! in the end, and Shuttle says so.

use std::cell::Cell;
use std::time::Duration;

use shuttle::sync::{Condvar, Mutex};

pub use shuttle::hint::spin_loop;
pub use shuttle::sync::atomic::{AtomicU32, Ordering};

use crate::order::Held;

/// Each look is a place where the scheduler may switch.
pub const LOOKS: u32 = 2;
pub const ALL: u32 = u32::MAX;

shuttle::lazy_static! {
    /// The words at which threads sleep, first come, first served; with a number for each sleep.
    static ref ASLEEP: Mutex<Vec<(usize, u64)>> = Mutex::new(Vec::new());
    static ref SLEEPS: shuttle::sync::atomic::AtomicU64 = shuttle::sync::atomic::AtomicU64::new(0);
    static ref WOKEN: Condvar = Condvar::new();
}

fn name(word: &AtomicU32) -> usize {
    std::ptr::from_ref(word).addr()
}

/// Nothing here waits with a limit.
pub fn sleep(word: &AtomicU32, value: u32, _: Option<Duration>) {
    let mut asleep = ASLEEP.lock().unwrap();
    if word.load(Ordering::SeqCst) != value {
        return;
    }
    let me = (name(word), SLEEPS.fetch_add(1, Ordering::SeqCst));
    asleep.push(me);
    while asleep.contains(&me) {
        asleep = WOKEN.wait(asleep).unwrap();
    }
}

pub fn wake(word: &AtomicU32, threads: u32) {
    let mut left = threads;
    ASLEEP.lock().unwrap().retain(|(at, _)| {
        let stays = *at != name(word) || left == 0;
        left -= u32::from(!stays);
        stays
    });
    WOKEN.notify_all();
}

shuttle::thread_local! {
    static HELD: Cell<Held> = Cell::new(Held::none());
}

pub fn held<T>(change: impl FnOnce(&mut Held) -> T) -> T {
    HELD.with(|cell| {
        let mut held = cell.get();
        let result = change(&mut held);
        cell.set(held);
        result
    })
}

pub fn out_of_order(words: &str) -> ! {
    panic!("{words}")
}
