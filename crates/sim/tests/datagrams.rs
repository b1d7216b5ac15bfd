//! Datagram queue pairs over a bad network (see `uwarp_sim::datagrams`), and with arbitrary datagrams between
//! arbitrary calls.

mod cases;

use proptest::collection::vec;
use proptest::prelude::*;
use uwarp_rnic::qp::Drops;
use uwarp_sim::datagram_calls;
use uwarp_sim::datagrams::{Faults, Tally, run};

const STEPS: usize = 400;

/// Runs many seeds; returns their counts.
fn seeds(faults: Faults) -> Vec<Tally> {
    (1..=30).map(|seed| run(seed, faults, STEPS)).collect()
}

#[test]
fn on_a_good_network_every_datagram_is_received_once() {
    for tally in seeds(Faults::default()) {
        assert_eq!((tally.received, tally.drops), (tally.sent, Drops::default()), "{tally:?}");
        assert!(tally.sent > STEPS as u64 / 2, "{tally:?}");
    }
}

#[test]
fn lost_duplicated_and_reordered_datagrams_affect_no_others() {
    let faults = Faults { loss: 200, duplication: 200, reordering: 500, ..Faults::default() };
    for tally in seeds(faults) {
        assert_eq!(tally.received, tally.arrived, "{tally:?}");
        assert!(tally.lost > 0 && tally.received > tally.sent / 2, "{tally:?}");
    }
}

#[test]
fn corrupted_datagrams_are_never_received() {
    for tally in seeds(Faults { corruption: 300, reordering: 300, ..Faults::default() }) {
        assert_eq!(tally.malformed, tally.arrived - tally.received, "{tally:?}");
        assert!(tally.malformed > 0);
    }
}

#[test]
fn missing_and_short_receives_are_counted() {
    let tallies = seeds(Faults { scarce_receives: true, duplication: 500, ..Faults::default() });
    let drops = tallies.iter().fold(Drops::default(), |mut all, tally| {
        all += tally.drops;
        all
    });
    assert!(drops.too_long > 0 && drops.no_receive > 0, "{drops:?}");
    assert_eq!((drops.state, drops.qkey, drops.unsent), (0, 0, 0));
}

#[test]
fn peers_that_die_and_come_back_receive_only_their_own_datagrams() {
    let faults = Faults { death: 50, reordering: 500, duplication: 200, ..Faults::default() };
    assert!(seeds(faults).iter().all(|tally| tally.received > 0));
}

#[test]
fn everything_at_once() {
    let faults = Faults {
        loss: 100,
        duplication: 100,
        reordering: 300,
        corruption: 50,
        death: 20,
        modify: 50,
        refusal: 50,
        mistake: 100,
        scarce_receives: true,
    };
    let tallies = seeds(faults);
    let drops = tallies.iter().fold(Drops::default(), |mut all, tally| {
        all += tally.drops;
        all
    });
    assert!(drops.qkey > 0 && drops.unsent > 0, "{drops:?}");
    assert!(tallies.iter().any(|tally| tally.unknown > 0));
}

proptest! {
    #![proptest_config(cases::config(400))]

    #[test]
    fn any_calls_and_any_datagrams(bytes in vec(any::<u8>(), 0..600)) {
        datagram_calls::check(&bytes);
    }

    /// Calls that are mostly legal, and datagrams that are mostly well formed.
    #[test]
    fn sensible_calls_and_datagrams(flags: u8, steps in vec((0u8..16, vec(0u8..12, 0..24)), 0..60)) {
        let mut input = vec![flags];
        for (kind, arguments) in steps {
            input.push(kind);
            input.extend(arguments);
        }
        datagram_calls::check(&input);
    }
}
