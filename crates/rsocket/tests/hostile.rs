//! A peer that says anything: the checks of the fuzz target `rsocket`, on random input.

#[path = "hostile/mod.rs"]
mod hostile;

use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]
    #[test]
    fn nothing_that_a_peer_says_breaks_a_stream(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        hostile::check(&bytes);
    }
}
