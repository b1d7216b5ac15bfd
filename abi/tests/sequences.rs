//! Random sequences of C calls; see `sequences/mod.rs`. The fuzz target `c_api` does the same for longer.

#[path = "sequences/mod.rs"]
mod sequences;

/// Bytes that are the same in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u8 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 32) as u8
    }
}

#[test]
fn any_sequence_of_calls_is_survived() {
    let mut random = Random(0x2545_F491_4F6C_DD1D);
    for _ in 0..300 {
        // A device's usual objects first, so that more than creation fails.
        let mut bytes = vec![0, 2, 0, 0, 200, 7, 2, 0, 50, 200, 7, 6, 8, 0, 0, 60, 0, 8, 0, 1, 60, 0];
        bytes.extend([15, 0, 0, 1, 16, 16, 4, 4, 64, 0, 1]);
        let len = usize::from(random.next()) * 8;
        bytes.extend((0..len).map(|_| random.next()));
        sequences::check(&bytes);
    }
}

/// A connection from beginning to end: a listener, both sides, events in between.
#[test]
fn a_connection_is_within_reach() {
    let mut bytes = vec![0, 2, 0, 0, 200, 7, 8, 0, 1, 60, 0];
    bytes.extend([25, 0, 0, 28, 0, 29, 0, 4, 25, 0, 0, 30, 1, 0]);
    // Queue pair of the client, connect, wait.
    bytes.extend([31, 1, 1, 0, 0, 0, 16, 16, 4, 4, 64, 0, 1, 32, 1, 5, 1, 1, 7, 7, 1, 0, 34, 7, 34, 7]);
    // The request is the third id.
    bytes
        .extend([31, 2, 1, 0, 0, 0, 16, 16, 4, 4, 64, 0, 1, 32, 2, 5, 1, 1, 7, 7, 1, 1, 34, 7, 34, 7, 34, 7]);
    bytes.extend([23, 1, 1, 0, 20, 0, 0, 21, 0, 0, 1, 0, 10, 0, 0, 2, 2, 0, 0, 34, 7, 12, 0, 8]);
    bytes.extend([32, 1, 0, 0, 0, 0, 0, 1, 3, 34, 7]);
    sequences::check(&bytes);
}
