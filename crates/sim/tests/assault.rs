//! Arbitrary bytes into a queue pair (see `uwarp_sim::assault`), and plans from arbitrary bytes.

mod cases;

use proptest::collection::vec;
use proptest::prelude::*;
use uwarp_sim::workload::{self, Plan};
use uwarp_sim::{assault, interleave};

proptest! {
    #![proptest_config(cases::config(400))]

    #[test]
    fn raw_bytes(flags: u8, end in 0u8..2, piece: u8, bytes in vec(any::<u8>(), 0..400)) {
        let mut input = vec![flags, end * 2, piece];
        input.extend(bytes);
        assault::check(&input);
    }

    /// Frames whose fields are mostly what they should be.
    #[test]
    fn framed(flags: u8, end in 0u8..2, piece: u8, segments in vec(segment(), 0..8)) {
        let mut input = vec![flags & !2, end * 2 + 1, piece];
        for ulpdu in segments {
            input.extend((ulpdu.len() as u16).to_le_bytes());
            input.extend(ulpdu);
        }
        assault::check(&input);
    }

    /// Calls of the program between the bytes.
    #[test]
    fn calls_and_bytes(bytes in vec(any::<u8>(), 0..600)) {
        interleave::check(&bytes);
    }

    #[test]
    fn calls_and_frames(flags: u8, more: u8, steps in vec(step(), 0..40)) {
        let mut input = vec![flags & !2, more];
        input.extend(steps.into_iter().flatten());
        interleave::check(&input);
    }

    #[test]
    fn plans_from_bytes(bytes in vec(any::<u8>(), 0..120)) {
        workload::run(&Plan::from_bytes(&bytes));
    }
}

/// A step of `interleave`, mostly one that makes sense.
fn step() -> impl Strategy<Value = Vec<u8>> {
    let frame = (segment(), 0u8..16).prop_map(|(mut ulpdu, stretch)| {
        ulpdu.truncate(200);
        let mut out = vec![if stretch > 12 { 0x81 | (stretch & 7) << 4 } else { 1 }, ulpdu.len() as u8];
        out.extend(ulpdu);
        out
    });
    let call = (5u8..16, vec(0u8..12, 0..16)).prop_map(|(kind, mut args)| {
        args.insert(0, kind);
        args
    });
    // Binds a window, mostly to what only windows show, and takes it away now and then.
    let bind =
        (0u8..3, 5u8..8, any::<u8>(), 1u8.., any::<[u8; 3]>()).prop_map(|(window, slot, at, len, rest)| {
            vec![15, 2, window, slot, at, len, rest[0], rest[1], rest[2]]
        });
    let deallocate = (0u8..3).prop_map(|window| vec![15, 4, window]);
    prop_oneof![8 => frame, 8 => call, 3 => bind, 1 => deallocate]
}

/// Offsets that `interleave` makes addresses of, or takes as they are.
fn offset() -> impl Strategy<Value = u32> {
    prop_oneof![
        4 => small(),
        1 => (250u32..1_800).prop_map(|at| 6 << 16 | at),
        1 => (0u32..1_800).prop_map(|at| 1 << 24 | at),
    ]
}

fn small() -> impl Strategy<Value = u32> {
    prop_oneof![8 => 0u32..8, 1 => 8u32..2_100, 1 => any::<u32>()]
}

fn segment() -> impl Strategy<Value = Vec<u8>> {
    let payload = prop_oneof![Just(0usize), 1usize..100, Just(28), 100usize..2_040];
    (
        any::<bool>(),
        prop::bool::weighted(0.8),
        0u8..12,
        (small(), offset(), small(), small()),
        payload,
        any::<bool>(),
    )
        .prop_map(|(tagged, last, opcode, (a, b, c, d), len, request)| {
            let mut out = vec![u8::from(tagged) << 7 | u8::from(last) << 6 | 1, 0x40 | opcode];
            out.extend(a.to_be_bytes());
            if tagged {
                out.extend(u64::from(b).to_be_bytes());
            } else {
                for field in [if b > 0xFFFF { b >> 16 } else { b }, c, d] {
                    out.extend(field.to_be_bytes());
                }
            }
            if opcode == 10 {
                // An Atomic Request: the operation, its number, the target, data, masks.
                for field in [c % 4, d, a, 0, b, 0, 1, u32::MAX, u32::MAX, 0, 1, u32::MAX, u32::MAX] {
                    out.extend(field.to_be_bytes());
                }
            } else if request {
                for field in [1, 0, 0, a.min(3000), b, 0, c] {
                    out.extend(field.to_be_bytes());
                }
            } else {
                out.extend(std::iter::repeat_n(0xEE, len));
            }
            out
        })
}
