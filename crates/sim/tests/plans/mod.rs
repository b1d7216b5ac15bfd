//! Strategies for plans.

use proptest::collection::vec;
use proptest::prelude::*;
use uwarp_rnic::qp::QpCaps;
use uwarp_sim::workload::{Abort, Kind, Op, Plan, StreamPlan, WindowPlan};
use uwarp_sim::{Fault, NetParams, Side};

/// What goes wrong in a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    None,
    Flip,
    Break,
    Abort,
}

fn side() -> impl Strategy<Value = Side> {
    prop_oneof![Just(Side::A), Just(Side::B)]
}

fn len() -> impl Strategy<Value = u32> {
    prop_oneof![
        2 => Just(0u32),
        6 => 1u32..300,
        3 => 300u32..9_000,
        2 => 9_000u32..70_000,
        1 => 70_000u32..200_000,
    ]
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![
        4 => Just(Kind::Send),
        1 => Just(Kind::SendInvalidate),
        2 => Just(Kind::SendImmediate),
        4 => Just(Kind::Write),
        3 => Just(Kind::WriteImmediate),
        3 => Just(Kind::Read),
        1 => Just(Kind::ReadInvalidate),
        1 => Just(Kind::LocalInvalidate),
        2 => Just(Kind::FetchAdd),
        1 => Just(Kind::CmpSwap),
        1 => Just(Kind::CmpSwapDiffers),
    ]
}

fn window() -> impl Strategy<Value = Option<WindowPlan>> {
    let window =
        any::<[bool; 3]>().prop_map(|[two, zero_based, again]| WindowPlan { two, zero_based, again });
    prop::option::weighted(0.4, window)
}

fn op() -> impl Strategy<Value = Op> {
    (
        (side(), kind(), len(), vec(any::<u16>(), 0..4), vec(any::<u16>(), 0..4), 0u16..40),
        (any::<bool>(), prop::bool::weighted(0.2), any::<bool>(), any::<bool>()),
        (0u64..400_000, prop_oneof![3 => Just(0u64), 1 => 0u64..3_000_000], window()),
    )
        .prop_map(
            |(
                (side, kind, len, cuts, peer_cuts, slack),
                (signaled, fence, solicited, inline),
                (at, recv_at, window),
            )| {
                Op {
                    side,
                    kind,
                    len,
                    cuts,
                    peer_cuts,
                    slack,
                    signaled,
                    fence,
                    solicited,
                    inline,
                    window,
                    at,
                    recv_at,
                }
            },
        )
}

fn stream() -> impl Strategy<Value = StreamPlan> {
    (
        (prop::bool::weighted(0.7), [prop::bool::weighted(0.25), prop::bool::weighted(0.25)], any::<bool>()),
        (any::<bool>(), 100u32..9_200, 0u8..3),
        ([0u16..5, 0u16..5], [0u16..5, 0u16..5], prop_oneof![3 => Just(0u32), 1 => 1u32..6]),
    )
        .prop_map(|((crc, markers, uwarp), (acks, emss, rtr), (ird, ord, msn_to_wrap))| StreamPlan {
            crc,
            markers,
            uwarp,
            acks,
            emss,
            rtr,
            ird,
            ord,
            msn_to_wrap,
        })
}

fn net() -> impl Strategy<Value = NetParams> {
    (0u64..20_000, 0u64..30_000, prop_oneof![1usize..100, 100usize..2_000, 2_000usize..200_000])
        .prop_flat_map(|(low, more, piece)| {
            // Small pieces through a large buffer only cost time.
            let capacity = prop_oneof![Just(1usize << 18), 300usize..40_000];
            (Just((low, low + more)), Just(piece), capacity, 0u32..40, 0u64..2_000_000)
        })
        .prop_map(|(delay, piece, capacity, stalls, stall)| NetParams {
            delay,
            piece,
            capacity,
            stalls,
            stall,
        })
}

fn caps() -> impl Strategy<Value = QpCaps> {
    (1u32..12, 1u32..12, 1u32..5, 1u32..5, 0u32..300).prop_map(|(s, r, sg, rg, inline)| QpCaps {
        max_send_wr: s,
        max_recv_wr: r,
        max_send_sge: sg,
        max_recv_sge: rg,
        max_inline_data: inline,
    })
}

fn faults(trouble: Trouble) -> BoxedStrategy<[Option<Fault>; 2]> {
    let at = prop_oneof![0u64..60, 0u64..2_000, 0u64..300_000].boxed();
    let one = match trouble {
        Trouble::None | Trouble::Abort => return Just([None, None]).boxed(),
        Trouble::Flip => (at, 0u8..8).prop_map(|(at, bit)| Fault::Flip { at, bit }).boxed(),
        Trouble::Break => (at, any::<bool>())
            .prop_map(|(at, reset)| if reset { Fault::Reset { at } } else { Fault::End { at } })
            .boxed(),
    };
    (any::<bool>(), one).prop_map(|(a, f)| if a { [Some(f), None] } else { [None, Some(f)] }).boxed()
}

fn abort(trouble: Trouble) -> BoxedStrategy<Option<(u64, Abort)>> {
    if trouble != Trouble::Abort {
        return Just(None).boxed();
    }
    let what = (side(), 0u8..9, any::<u16>()).prop_map(|(side, what, n)| match what {
        0 => Abort::Disconnect(side),
        1 => Abort::Error(side),
        2 => Abort::Reset(side),
        3..=5 => Abort::Deregister(side, n),
        _ => Abort::Unbind(side, n),
    });
    (0u64..1_500_000, what).prop_map(Some).boxed()
}

/// A plan with this trouble in it.
pub fn plan(trouble: Trouble) -> impl Strategy<Value = Plan> {
    (
        (any::<u64>(), stream(), net(), faults(trouble), abort(trouble)),
        (caps(), any::<[bool; 3]>(), vec(op(), 1..14)),
    )
        .prop_map(|((seed, stream, net, faults, abort), (caps, switches, ops))| Plan {
            seed,
            stream,
            net,
            faults,
            abort,
            caps,
            shared_recv: switches[0],
            one_region: switches[1],
            sq_sig_all: switches[2],
            ops,
        })
}
