//! The locks of `uwarp-process`, over the model's futex(2).

use std::sync::Arc;

use shuttle::thread::{JoinHandle, spawn, yield_now};

use crate::process_locks::{Condvar, Mutex, RwLock};

fn join(threads: Vec<JoinHandle<()>>) {
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

/// A thread that sleeps is woken when the lock is free, whoever takes it between.
pub fn a_mutex_has_one_holder_and_is_passed_on() {
    let count = Arc::new(Mutex::new(0));
    let adds = |count: Arc<Mutex<u32, 1>>| {
        move || {
            for _ in 0..2 {
                let mut guard = count.lock();
                let before = *guard;
                yield_now();
                *guard = before + 1;
            }
        }
    };
    join((0..3).map(|_| spawn(adds(Arc::clone(&count)))).collect());
    assert_eq!(*count.lock(), 6);
    assert!(count.try_lock().is_some());
}

/// Readers see whole values, and all get in.
pub fn a_writer_is_alone_and_readers_and_writers_get_in() {
    let pair = Arc::new(RwLock::new((0, 0)));
    let writes = |pair: Arc<RwLock<(u32, u32), 1>>| {
        move || {
            for _ in 0..2 {
                let mut both = pair.write();
                both.0 += 1;
                yield_now();
                both.1 += 1;
            }
        }
    };
    let reads = |pair: Arc<RwLock<(u32, u32), 1>>| {
        move || {
            for _ in 0..2 {
                let both = pair.read();
                let first = both.0;
                yield_now();
                assert_eq!(first, both.1);
            }
        }
    };
    let writers = (0..2).map(|_| spawn(writes(Arc::clone(&pair)))).collect();
    join((0..2).map(|_| spawn(reads(Arc::clone(&pair)))).collect());
    join(writers);
    assert_eq!(*pair.read(), (2 * 2, 2 * 2));
    assert!(pair.try_write().is_some());
}

/// Those that wait for the last change hear of it, although nobody makes a system call for those before.
pub fn who_waits_for_the_last_change_hears_of_it() {
    let left = Arc::new((Mutex::new(3), Condvar::new()));
    let waits = |left: Arc<(Mutex<u32, 1>, Condvar)>| {
        move || {
            let mut count = left.0.lock();
            while *count != 0 {
                left.1.wait(&mut count);
            }
        }
    };
    let takes = |left: Arc<(Mutex<u32, 1>, Condvar)>| {
        move || {
            let mut count = left.0.lock();
            *count -= 1;
            if *count == 0 {
                left.1.notify_all();
            }
        }
    };
    let waiting = (0..2).map(|_| spawn(waits(Arc::clone(&left)))).collect();
    join((0..3).map(|_| spawn(takes(Arc::clone(&left)))).collect());
    join(waiting);
}
