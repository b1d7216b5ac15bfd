//! Every parser on arbitrary bytes, and on bytes that are nearly valid.

mod roundtrip;

use proptest::prelude::*;

/// The first bytes pass the version checks, so that random bytes reach the code after them.
fn nearly_meaningful() -> impl Strategy<Value = Vec<u8>> {
    let control = prop_oneof![Just(0x41u8), Just(0xC1), Just(0x01), Just(0x81), any::<u8>()];
    let rdmap = prop_oneof![0x40u8..=0x4F, any::<u8>()];
    (control, rdmap, any::<bool>(), prop::collection::vec(any::<u8>(), 0..120)).prop_map(
        |(control, rdmap, first_segment, mut rest)| {
            if let (true, Some(mo)) = (first_segment, rest.get_mut(12..16)) {
                mo.fill(0);
            }
            rest.splice(0..0, [control, rdmap]);
            rest
        },
    )
}

/// A Terminate whose first byte is an existing layer and type, in either order, followed by few or no bytes.
fn nearly_terminate() -> impl Strategy<Value = Vec<u8>> {
    (0u8..4, 0u8..4, prop_oneof![0u8..10, Just(0xFF)], any::<u8>(), prop::collection::vec(any::<u8>(), 1..60))
        .prop_map(|(layer, etype, code, hdrct, mut rest)| {
            rest.splice(0..0, [layer << 4 | etype, code, hdrct]);
            rest
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        roundtrip::check(&bytes);
    }

    #[test]
    fn bytes_with_a_valid_start(bytes in nearly_meaningful()) {
        roundtrip::check(&bytes);
    }

    #[test]
    fn bytes_like_a_terminate(bytes in nearly_terminate()) {
        roundtrip::check(&bytes);
    }
}
