//! Lanes whose memory anybody writes, by steps at random.
#![cfg(not(miri))]

mod hostile;

/// Steps, from a seed.
fn steps(seed: u64, count: usize, harmless: bool) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    let mut bytes = Vec::new();
    for _ in 0..count {
        // The steps beyond spoil the memory, or end the stream.
        let kinds = if harmless { 7 } else { 12 };
        bytes.push(next() % (2 * kinds));
        bytes.extend((1..hostile::STEP).map(|_| next()));
    }
    bytes
}

#[test]
fn every_byte_arrives_in_order() {
    for seed in 0..300 {
        hostile::lane(&steps(seed * 7919 + 3, 60, true));
    }
}

#[test]
fn who_writes_the_memory_spoils_his_stream_only() {
    for seed in 0..600 {
        hostile::lane(&steps(seed * 104_729 + 1, 40, false));
    }
}
