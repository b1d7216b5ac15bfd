//! What a thread looks at to see whether the other process has said anything.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::shared::Shared;

/// Words of a line that the other process writes, with the values that are no news. Keeps the memory.
#[derive(Debug)]
pub struct Glance {
    memory: Arc<Shared>,
    at: usize,
    words: [u8; 3],
    values: [u64; 3],
}

impl Glance {
    /// Three words of the line at `at`, each with its value.
    pub fn new(memory: Arc<Shared>, at: usize, words: [(u8, u64); 3]) -> Self {
        Self { memory, at, words: words.map(|(word, _)| word), values: words.map(|(_, value)| value) }
    }

    /// Whether all of them are as they were. Some loads, and no more.
    #[inline]
    pub fn shows_nothing(&self) -> bool {
        let line = self.memory.line(self.at);
        let mut same = self.words.iter().zip(&self.values);
        same.all(|(&word, &value)| line[usize::from(word & 7)].load(Ordering::Acquire) == value)
    }
}
