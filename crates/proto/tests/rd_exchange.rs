//! An exchange with a peer that has its key and lies.

mod rd_hostile;

use proptest::collection::vec;
use proptest::prelude::*;

/// A chunk with a plausible header, its fields small numbers for the most part.
fn chunk() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![3 => 0u32..4, 1 => any::<u32>()];
    (1u8..12, any::<u8>(), vec(word, 0..12)).prop_map(|(code, flags, words)| {
        let mut chunk = vec![code, flags, 0, 0];
        words.into_iter().for_each(|word| chunk.extend(word.to_be_bytes()));
        chunk[3] = chunk.len() as u8;
        chunk
    })
}

/// An ACK that may be an honest one.
fn ack() -> impl Strategy<Value = Vec<u8>> {
    (1u32..6, 1u32..4, 1u16..3).prop_map(|(largest, floor, length)| {
        let mut ack = vec![1, 0, 0, 24];
        ack.extend(largest.to_be_bytes());
        ack.extend([0, 0, 0, 0, 0, 9, 1, 0]);
        ack.extend(floor.to_be_bytes());
        ack.extend([0, 0]);
        ack.extend(length.to_be_bytes());
        ack
    })
}

fn part() -> impl Strategy<Value = Vec<u8>> {
    let packet = vec(prop_oneof![3 => chunk(), 1 => ack()], 0..4).prop_map(|chunks| {
        let body = chunks.concat();
        let len = body.len().min(255);
        [vec![3, len as u8], body[..len].to_vec()].concat()
    });
    let other = (0u8..11, any::<u8>()).prop_map(|(kind, len)| vec![kind, len]);
    prop_oneof![3 => packet, 1 => other]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes(bytes in vec(any::<u8>(), 0..400)) {
        rd_hostile::exchange(&bytes);
    }

    #[test]
    fn plausible_lies(parts in vec(part(), 0..20)) {
        rd_hostile::exchange(&parts.concat());
    }
}
