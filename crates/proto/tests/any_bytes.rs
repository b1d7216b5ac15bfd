//! The framer and the set-up machines on random bytes, and on bytes that are nearly valid.

mod hostile;

use proptest::collection::vec;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 1000,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn framer(bytes in vec(any::<u8>(), 0..3000)) {
        hostile::framer(&bytes);
    }

    #[test]
    fn framer_with_short_lengths(
        flags: u8,
        frames in vec((0u16..2000, vec(any::<u8>(), 0..40)), 0..5),
    ) {
        let mut bytes = vec![flags & !3];
        for (len, start) in frames {
            let at = bytes.len();
            bytes.extend(len.to_be_bytes());
            bytes.extend(start);
            bytes.resize((at + 2 + usize::from(len)).next_multiple_of(4) + 5, 0);
        }
        hostile::framer(&bytes);
    }

    #[test]
    fn datagram(bytes in vec(any::<u8>(), 0..200)) {
        hostile::datagram(&bytes);
    }

    #[test]
    fn setup(bytes in vec(any::<u8>(), 0..700)) {
        hostile::setup(&bytes);
    }

    #[test]
    fn setup_with_a_valid_start(
        config: [u8; 4],
        flags: u8,
        revision in 0u8..4,
        len in 0u16..600,
        rest in vec(any::<u8>(), 0..600),
    ) {
        let mut bytes = config.to_vec();
        bytes.extend([flags, revision]);
        bytes.extend(len.to_be_bytes());
        bytes.extend(rest);
        hostile::setup(&bytes);
    }
}
