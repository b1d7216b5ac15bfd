//! What reliable datagrams get of a bottleneck (`uwarp_sim::sharing`): under random loss, beside themselves,
//! beside CUBIC, and when the delay jumps. The whole table of docs/rd.md section 7.1 is printed by
//!
//! ```text
//! cargo test -p uwarp-sim --test sharing -- --ignored --nocapture
//! ```

use uwarp_sim::rooms;
use uwarp_sim::sharing::{Bottleneck, Kind, Outcome, run};

const MS: u64 = 1_000_000;

const FAST: Bottleneck = Bottleneck {
    name: "5 GB/s, 20 us, 1 MB in flight",
    rate: 5_000_000_000,
    round_trip: 20_000,
    queue: 2_900_000,
    loss: 0,
    duration: 150 * MS,
    most_in_flight: 1_000_000,
    spike: 0,
    late: 0,
    lateness: 0,
    alarm: 0,
};
const TEN: Bottleneck = Bottleneck {
    name: "10 Gb/s, 50 us, queue 300 KB",
    rate: 1_250_000_000,
    round_trip: 50_000,
    queue: 300_000,
    duration: 500 * MS,
    most_in_flight: 2_000_000,
    ..FAST
};
const ONE: Bottleneck = Bottleneck {
    name: "1 Gb/s, 1 ms, queue as the path",
    rate: 125_000_000,
    round_trip: MS,
    queue: 125_000,
    duration: 4000 * MS,
    ..TEN
};
const TENTH: Bottleneck = Bottleneck {
    name: "100 Mb/s, 2 ms, queue 64",
    rate: 12_500_000,
    round_trip: 2 * MS,
    queue: 94_000,
    duration: 20_000 * MS,
    ..TEN
};

/// That of `uwarp bench sharing`, whose ends sleep: their alarms are late.
const FAR: Bottleneck = Bottleneck {
    name: "100 Mb/s, 10 ms, queue as the path",
    rate: 12_500_000,
    round_trip: 10 * MS,
    queue: 125_000,
    duration: 4000 * MS,
    alarm: MS / 2,
    ..TEN
};

fn alone(kind: Kind, path: Bottleneck) -> Outcome {
    run(1, path, &[(kind, 0)]).remove(0)
}

/// The goodput with this loss, as a share of that without.
fn share(kind: Kind, path: Bottleneck, loss: u32) -> f64 {
    alone(kind, Bottleneck { loss, ..path }).goodput / alone(kind, path).goodput
}

/// The share of the first, and what both use of the link; means of some seeds. The second begins later.
fn sharing(path: Bottleneck, first: Kind, second: Kind, seeds: u64) -> (f64, f64) {
    let mut sums = (0.0, 0.0);
    for seed in 0..seeds {
        // The beginning is drawn by the seed: nothing else is random without loss.
        let later = 200 * MS + seed * 7 * MS;
        let both = run(seed, path, &[(first, 0), (second, later)]);
        let all = both[0].goodput + both[1].goodput;
        sums.0 += both[0].goodput / all;
        sums.1 += all / path.rate as f64;
    }
    (sums.0 / seeds as f64, sums.1 / seeds as f64)
}

fn with_queue(path: Bottleneck, quarters: u64) -> Bottleneck {
    Bottleneck { queue: path.bytes() * quarters / 4, ..path }
}

#[test]
fn one_percent_of_loss_costs_a_tenth_at_most() {
    let short = Bottleneck { duration: 1000 * MS, ..ONE };
    let kept = share(Kind::Rd, short, 10);
    assert!(kept >= 0.9, "{kept:.3}");
}

/// The first measurement of a path that was not simulated: a pause took what its alarm said and what the
/// alarm was late, so a window of 42 packets brought what 25 bring, was no longer "used", and did not grow.
#[test]
fn alarms_that_are_late_cost_nothing() {
    for alarm in [100_000, MS / 2, MS] {
        let path = Bottleneck { alarm, ..FAR };
        let clean = alone(Kind::Rd, path).goodput;
        assert!(clean > 0.9 * path.rate as f64, "{alarm}: {:.2}", clean / path.rate as f64);
        let lossy = alone(Kind::Rd, Bottleneck { loss: 10, ..path }).goodput;
        assert!(lossy > 0.9 * clean, "{alarm}: {:.2}", lossy / clean);
    }
}

/// On the same path, where packets were late by a third of the round trip, each counted as lost.
#[test]
fn packets_that_are_late_cost_a_tenth_at_most() {
    let clean = alone(Kind::Rd, FAR).goodput;
    for late in [10, 100, 300] {
        let path = Bottleneck { late, lateness: 5 * MS, ..FAR };
        let kept = alone(Kind::Rd, path).goodput / clean;
        assert!(kept > 0.9, "{late} in 1,000: {kept:.2}");
    }
}

#[test]
fn much_loss_is_slow_and_goes_on() {
    let short = Bottleneck { duration: 4000 * MS, ..TENTH };
    for loss in [50, 200] {
        // A message that fails would panic.
        let outcome = alone(Kind::Rd, Bottleneck { loss, ..short });
        assert!(outcome.goodput > 0.01 * short.rate as f64, "{loss}: {outcome:?}");
    }
}

/// 0.4 to 0.7 is what should be. It does not reach that beside CUBIC in a queue of four packets, where a loss
/// costs it 17 % and CUBIC 30 % (docs/rd.md section 7.1).
const SHORT_QUEUE: (u64, Kind) = (1, Kind::Cubic);
const SHORT_QUEUE_SHARE: f64 = 0.75;

#[test]
fn a_link_is_shared_with_others() {
    for quarters in [1, 4, 16] {
        let path = with_queue(Bottleneck { duration: 10_000 * MS, ..TENTH }, quarters);
        for second in [Kind::Rd, Kind::Cubic] {
            let (share, used) = sharing(path, Kind::Rd, second, 2);
            let falls_short = (quarters, second) == SHORT_QUEUE;
            let most = if falls_short { SHORT_QUEUE_SHARE } else { 0.7 };
            assert!((0.4..most).contains(&share), "beside {second:?}, queue {quarters}/4: {share:.2}");
            assert!(used > 0.8, "{used:.2}");
        }
    }
}

#[test]
fn a_spike_of_delay_does_not_end_it() {
    let path = Bottleneck { duration: 4000 * MS, ..TENTH };
    let calm = alone(Kind::Rd, path).goodput;
    for spike in [20, 200] {
        let late = alone(Kind::Rd, Bottleneck { spike: spike * MS, ..path }).goodput;
        assert!(late > 0.8 * calm, "{spike} ms: {late:.0} of {calm:.0}");
    }
}

#[test]
#[ignore = "prints the tables of docs/rd.md; some minutes"]
fn the_whole_table() {
    println!("| path | | lossless, of the link | 1 % | 2 % | 5 % | 20 % |\n|---|---|---|---|---|---|---|");
    let far = Bottleneck { duration: 20_000 * MS, ..FAR };
    for path in [FAST, TEN, ONE, TENTH, far] {
        for kind in [Kind::Rd, Kind::Cubic, Kind::Bbr] {
            let clean = alone(kind, path).goodput;
            let lossy: Vec<String> = [10, 20, 50, 200]
                .map(|loss| alone(kind, Bottleneck { loss, ..path }).goodput / clean)
                .map(|share| format!("{share:.2}"))
                .to_vec();
            let clean = clean / path.rate as f64;
            println!("| {} | {kind:?} | {clean:.2} | {} |", path.name, lossy.join(" | "));
        }
    }
    println!("\n| path | queue | first, second | share of the first | link used |\n|---|---|---|---|---|");
    for path in [ONE, Bottleneck { duration: 40_000 * MS, ..TENTH }, far] {
        for quarters in [1, 4, 16] {
            let pairs = [
                (Kind::Rd, Kind::Rd),
                (Kind::Rd, Kind::Cubic),
                (Kind::Cubic, Kind::Cubic),
                (Kind::Rd, Kind::Bbr),
                (Kind::Cubic, Kind::Bbr),
            ];
            for (first, second) in pairs {
                let (share, used) = sharing(with_queue(path, quarters), first, second, 3);
                let queue = quarters as f64 / 4.0;
                println!("| {} | {queue} | {first:?}, {second:?} | {share:.2} | {used:.2} |", path.name);
            }
        }
    }
}

/// The stock `rmem_max`, which the kernel doubles.
const STOCK: u64 = 2 * 212_992;

/// One stream to a receiver that looks at its socket every 100 µs.
const SMALL: rooms::Plan = rooms::Plan {
    senders: 1,
    rate: 5_000_000_000,
    delay: 20_000,
    loss: 0,
    socket: STOCK,
    believed: STOCK,
    every: 100_000,
    message: 64 * 1024,
    duration: 30 * MS,
};

#[test]
fn a_stream_does_not_overrun_a_small_socket() {
    for message in [64 * 1024, 700] {
        let plan = rooms::Plan { message, ..SMALL };
        let outcome = rooms::run(1, plan);
        // Without a limit it does, and what it loses is little more than what the credit costs.
        let without = rooms::run(1, rooms::Plan { believed: STOCK * 100, ..plan });
        assert!(outcome.dropped == 0 && without.dropped > 0, "{outcome:?}, {without:?}");
        assert!(outcome.bytes() * 4 > without.bytes() * 3, "{outcome:?}, {without:?}");
    }
}

#[test]
fn many_share_a_small_socket() {
    for senders in [8, 40] {
        let plan = rooms::Plan { senders, ..SMALL };
        let outcome = rooms::run(1, plan);
        let without = rooms::run(1, rooms::Plan { believed: STOCK * 100, ..plan });
        // All begin at once, and then nobody has heard how many they are.
        let share = |outcome: &rooms::Outcome| f64::from(outcome.dropped) / outcome.arrived as f64;
        assert!(share(&outcome) < 0.02 && share(&without) > 0.03, "{outcome:?}, {without:?}");
        let (least, most) = (outcome.of_senders.iter().min(), outcome.of_senders.iter().max());
        assert!(outcome.of_senders.len() == usize::from(senders), "{outcome:?}");
        assert!(least.zip(most).is_some_and(|(least, most)| least * 2 > *most), "{outcome:?}");
    }
}

/// If credit were a sum, the charge of each lost packet would be gone.
#[test]
fn loss_takes_no_credit_away() {
    let slow = rooms::Plan { rate: 12_500_000, delay: 2 * MS, duration: 10_000 * MS, ..SMALL };
    let outcome = rooms::run(1, rooms::Plan { loss: 10, ..slow });
    assert!(outcome.tenths[9] * 2 > outcome.tenths[0], "{outcome:?}");
    assert!(outcome.bytes() as f64 > 0.9 * 125e6, "{outcome:?}");
}
