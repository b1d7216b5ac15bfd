//! Lanes whose memory anybody writes, by steps at random.
#![cfg(not(miri))]

mod hostile;

/// Steps, from a seed.
fn steps(seed: u64, count: usize, kinds: u8) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    let mut bytes = Vec::new();
    for _ in 0..count {
        bytes.push(next() % (2 * kinds));
        bytes.extend((1..hostile::STEP).map(|_| next()));
    }
    bytes
}

// The steps beyond these spoil the memory, or end the stream.

#[test]
fn every_byte_arrives_in_order() {
    for seed in 0..300 {
        hostile::lane(&steps(seed * 7919 + 3, 60, 7));
    }
}

#[test]
fn who_writes_the_memory_spoils_his_stream_only() {
    for seed in 0..600 {
        hostile::lane(&steps(seed * 104_729 + 1, 40, 12));
    }
}

#[test]
fn every_datagram_arrives_whole_or_is_counted() {
    for seed in 0..200 {
        hostile::datagrams(&steps(seed * 7919 + 3, 120, 7));
    }
}

#[test]
fn who_writes_the_memory_spoils_his_datagrams_only() {
    for seed in 0..400 {
        hostile::datagrams(&steps(seed * 104_729 + 1, 60, 9));
    }
}
