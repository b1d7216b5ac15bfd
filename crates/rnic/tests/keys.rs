//! Keys of regions, for a peer that guesses them.

use std::collections::BTreeSet;

use uwarp_rnic::{Access, Mr, Pd};

/// RFC 5040 section 8.1.1 rule 8. If keys are random numbers, this fails once in many billion runs.
#[test]
fn keys_are_neither_in_sequence_nor_close_together() {
    const COUNT: usize = 1000;
    let pd = Pd::new();
    let memory = vec![0u8; 4096];
    let addr = memory.as_ptr().expose_provenance() as u64;
    let regions: Vec<_> =
        (0..COUNT).map(|_| Mr::register(&pd, addr, 4096, addr, Access::REMOTE_READ).unwrap()).collect();
    let keys: Vec<u32> = regions.iter().map(|region| region.stag()).collect();
    let different: BTreeSet<u32> = keys.iter().copied().collect();
    assert_eq!(different.len(), COUNT);
    assert!(!different.contains(&0) && !different.contains(&u32::MAX));
    // Of random numbers, one in 32,768 is as close as that to the one before.
    let close = keys.windows(2).filter(|pair| pair[0].abs_diff(pair[1]) < 1 << 16).count();
    assert!(close < 10, "{close} keys are close to the one before");
    for bit in 0..32 {
        let set = keys.iter().filter(|key| *key >> bit & 1 == 1).count();
        assert!((COUNT / 4..COUNT * 3 / 4).contains(&set), "bit {bit} is set in {set} keys of {COUNT}");
    }
}
