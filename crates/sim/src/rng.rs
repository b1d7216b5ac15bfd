//! Random numbers that a seed repeats.

/// SplitMix64. Implemented here, so that a seed in an old report still means the same run after any update of
/// dependencies.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator that repeats itself for the same seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.draw() % n }
    }

    /// A size from `low` to `high`, both included.
    pub fn size(&mut self, low: usize, high: usize) -> usize {
        low + usize::try_from(self.below((high.saturating_sub(low) as u64).saturating_add(1))).unwrap_or(0)
    }

    /// True `permille` times in a thousand.
    pub fn chance(&mut self, permille: u32) -> bool {
        self.below(1000) < u64::from(permille)
    }

    /// A generator of its own for a part of the run, so that one part's draws do not shift another's.
    pub fn fork(&mut self) -> Self {
        Self(self.draw())
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.draw().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}
