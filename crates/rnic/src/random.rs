//! Random words of the system, fetched some at a time.

use std::cell::RefCell;

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::error::VerbsError;
use crate::process::generation;

/// Words fetched in one call. The system gives up to 256 bytes as a whole.
const AT_ONCE: usize = 64;

/// Words of a thread that were not used yet. It has no destructor, so destructors of other thread-local data
/// can still draw.
struct Stock {
    words: [u32; AT_ONCE],
    left: usize,
    /// A fork copies the words. The child must not draw what its parent draws.
    generation: u32,
}

thread_local! {
    static STOCK: RefCell<Stock> =
        const { RefCell::new(Stock { words: [0; AT_ONCE], left: 0, generation: 0 }) };
}

/// A random word: nobody can guess it, also who has seen others.
pub fn random_u32() -> Result<u32, VerbsError> {
    let drawn = STOCK.with(|stock| match stock.try_borrow_mut() {
        Ok(mut stock) => stock.draw(generation()),
        // The handler of a signal that came in the middle of another draw.
        Err(_) => fetch::<1>().map(|[word]| word),
    });
    drawn.ok_or(VerbsError::NoResources("random numbers"))
}

impl Stock {
    /// In a process of this generation.
    fn draw(&mut self, generation: u32) -> Option<u32> {
        if self.left == 0 || self.generation != generation {
            self.left = 0;
            self.words = fetch()?;
            (self.left, self.generation) = (AT_ONCE, generation);
        }
        self.left -= 1;
        self.words.get_mut(self.left).map(std::mem::take)
    }
}

/// Not through the C library, whose call is a cancellation point: a thread that posts must not end here.
fn fetch<const N: usize>() -> Option<[u32; N]> {
    let mut bytes = [0u8; 4 * AT_ONCE];
    let wanted = bytes.get_mut(..4 * N)?;
    loop {
        match getrandom(&mut *wanted, GetRandomFlags::empty()) {
            Ok(got) if got == wanted.len() => break,
            // Interrupted, or cut short by a signal.
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(wanted.chunks_exact(4)) {
        *word = u32::from_ne_bytes(bytes.first_chunk().copied()?);
    }
    Some(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Parent and child drew the same keys.
    #[test]
    fn a_child_does_not_draw_what_its_parent_draws() {
        let mut stock = Stock { words: [0; AT_ONCE], left: 0, generation: 0 };
        stock.draw(0).unwrap();
        let copied = stock.words;
        assert_eq!(stock.draw(0), copied.get(AT_ONCE - 2).copied());
        let drawn = stock.draw(1).unwrap();
        assert!(!copied.contains(&drawn), "the child draws a word that the parent has, too");
    }
}
