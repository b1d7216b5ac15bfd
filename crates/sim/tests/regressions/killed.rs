//! Ends of a stream with acknowledgements: what a sender may count on (docs/adr/009).

use uwarp_proto::setup::PeerData;
use uwarp_rnic::WcStatus;
use uwarp_rnic::qp::{QpModify, QpState, StreamParams};
use uwarp_sim::NetParams;
use uwarp_sim::Side::{A, B};

use super::duo::{Duo, SEND, params};

/// How the receiver ends, at a moment that the seed decides.
#[derive(Clone, Copy, PartialEq, Debug)]
enum How {
    Killed,
    Disconnects,
    ToErr,
    ToReset,
}

/// Both know how the other one ends a stream.
fn infiniband() -> [StreamParams; 2] {
    let peer = Some(PeerData { placement_acks: true, ..PeerData::new() });
    params().map(|p| StreamParams { placement_acks: true, infiniband: true, peer, ..p })
}

/// What became of a run: messages that the receiver had placed, and those that succeeded at the sender.
#[derive(Debug)]
struct Outcome {
    placed: usize,
    good: usize,
    /// The receiver's system has reset the connection.
    reset: bool,
}

/// The receiver answers a message, so that it holds acknowledgements back, and ends while more come.
/// `receives` of those have one posted.
fn run(seed: u64, how: How, receives: u64) -> Outcome {
    let net = NetParams { piece: 300, stalls: 100, stall: 40_000, ..NetParams::default() };
    let mut duo = Duo::with_seed(infiniband(), net, seed);
    for (side, other) in [(A, B), (B, A)] {
        duo.recv(other, 100, 0, 64);
        let sge = duo.sge(side, 0, 8);
        duo.queue(side, 100, SEND, sge);
        duo.world.settle_for(200_000);
    }
    for id in 0..receives {
        duo.recv(B, id, 0, 4096);
    }
    let before = (duo.sends(A).len(), duo.recvs(B).len());
    assert_eq!(before, (1, 1));
    for id in 0..8 {
        let sge = duo.sge(A, 0, 1 << (id + 3));
        duo.queue(A, id, SEND, sge);
    }
    duo.world.pump(A);
    duo.world.settle_for(seed * 7919 % 120_000);
    match how {
        How::Killed => duo.world.kill(B),
        How::Disconnects => duo.world.disconnect(B),
        How::ToErr | How::ToReset => {
            let state = Some(if how == How::ToErr { QpState::Err } else { QpState::Reset });
            duo.world.end(B).core.modify(&QpModify { state, ..QpModify::default() }).unwrap();
        }
    }
    duo.world.settle();
    let good = duo.sends(A).iter().filter(|(_, status)| *status == WcStatus::Success).count();
    // (RESET has dropped the completions.)
    let placed = duo.world.end(B).core.snapshot().counters.received.send.messages as usize - 1;
    Outcome { placed, good, reset: duo.world.pipe(B).is_reset() }
}

/// It is counted that an orderly end says what was read: 35 of 36 failed. And that it says nothing else: not
/// that what a living library drops was placed, nor what was set aside.
#[test]
fn what_succeeds_was_placed_and_an_orderly_end_costs_nothing_that_was() {
    let mut seen = [0; 3];
    for how in [How::Killed, How::Disconnects, How::ToErr, How::ToReset] {
        for seed in 0..600 {
            let outcome = run(seed, how, seed % 9);
            let Outcome { placed, good, reset } = outcome;
            assert!(good <= placed, "{how:?}, seed {seed}: {outcome:?}");
            assert!(reset || good == placed, "{how:?}, seed {seed}: {outcome:?}");
            assert!(!reset || how == How::Killed, "{how:?}, seed {seed}: {outcome:?}");
            if how == How::Killed {
                seen[usize::from(reset)] += 1;
                seen[2] += usize::from(!reset && (1..8).contains(&placed));
            }
        }
    }
    assert!(
        seen.iter().all(|n| *n > 20),
        "ends in order, resets, ends in order between two messages: {seen:?}"
    );
}
