//! Reliable datagrams over lossy links, in thousands of worlds. What must hold stands in
//! `uwarp_sim::reliable`.
//!
//! Mutations of the machine that were tried, each alone, with 40 worlds for each plan; what failed first:
//!
//! | mutation | what failed |
//! |-|-|
//! | messages are known by packet number only | placed after its delivery, ten tests |
//! | messages above the floor are forgotten | the same, nine tests |
//! | messages under way move to the next exchange | the same, late copies and restarts |
//! | a cookie is good for 64 s | the same, late copies |
//! | an exchange is forgotten after 6 s | the same, late copies |
//! | the token of an exchange that failed is forgotten | the same, late copies and the stranger |
//! | the token of a Cross is forgotten | the same, six tests |
//! | the smaller end does not wait for Cross | the same, four tests |
//! | ordered Writes are placed on arrival | placed before its predecessor, seven tests |
//! | a Send takes its receive before its predecessor | no rest, few receives and one flow |
//! | a message is Done when its packets are acknowledged | Done and not delivered, five tests |
//! | VERDICT is sent once | a message has not ended, four tests |
//! | VERDICT is sent until any segment comes | the same, refused messages |
//! | ABANDON is sent once | the same, three tests |
//! | ABANDON names one message, the first first | placed behind one that failed since, three tests |
//! | Behind forgets failed messages | delivered after what was posted later, two tests |
//! | a refused message counts as ended | placed before its predecessor, refused messages |
//! | a message fails before its turn | delivered before its predecessor, refused in one flow |
//! | no PING for a message that is not Done | messages fail, rests and bad links |
//! | an Open without a right cookie is answered with Cross | placed after its delivery, restarts |
//! | an ordered Write is placed in any order of its bytes | bytes before it are missing, eight tests |
//! | only the stuck message gives its receive back | no rest, one flow with cuts |
//! | VERDICT on that only with a later segment | a message has not ended, three tests |
//! | of a flow, the first receive is taken back first | receives out of order, one flow with cuts |
//! | a VERDICT of an earlier try counts | failed after too few refusals, few receives |
//! | an acknowledgement of an earlier try counts | a message has not ended, few receives and one flow |
//! | a probe repeats the oldest packet, and none is a PING | the same, one flow |
//! | Cross is sent once | messages fail, three tests |
//! | Unknown is longer than what it answers | more to a stranger than came, two tests |
//! | "not ready" replaces a refusal | no rest, refused in one flow |
//! | a withdrawn message under way is forgotten | a message has not ended, withdrawn messages |
//! | what is queued behind a withdrawn message goes on | delivered before its predecessor, the same |
//! | a withdrawn message is abandoned before its turn | the same |
//! | after Cross, withdrawn messages move | has ended twice, the same |
//! | a repair longer than what is held is not taken | a message has not ended, 250 worlds of cut repairs |
//!
//! `UWARP_SIM_SEED` runs each test with this seed alone, `UWARP_SIM_WORLDS` so many of them.

use uwarp_sim::links::LinkParams;
use uwarp_sim::reliable::{MS, Plan, SEC, Tally, run};

/// Runs many seeds of a plan. A failure names its seed.
fn worlds(name: &str, count: u64, plan: Plan) -> Tally {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let seeds = match number("UWARP_SIM_SEED") {
        Some(seed) => seed..seed + 1,
        None => 1..1 + number("UWARP_SIM_WORLDS").unwrap_or(count),
    };
    let mut all = Tally::default();
    for seed in seeds {
        let ran = std::panic::catch_unwind(|| run(seed, plan));
        let tally = ran.unwrap_or_else(|_| panic!("{name}: UWARP_SIM_SEED={seed}"));
        all.done += tally.done;
        all.failed += tally.failed;
        all.packets += tally.packets;
        all.long += tally.long;
        all.lost += tally.lost;
        all.held += tally.held;
        all.joined += tally.joined;
        all.taken_back += tally.taken_back;
        all.no_receive += tally.no_receive;
        all.withdrawn += tally.withdrawn;
    }
    println!("{name}: {all:?}");
    all
}

const BAD: LinkParams = LinkParams {
    rate: 0,
    queue: 0,
    delay: (10_000, 30_000),
    spikes: 10,
    spike: 3 * MS,
    loss: 50,
    reordering: 100,
    reordering_by: 200_000,
    duplication: 50,
    duplication_by: 2 * MS,
    corruption: 10,
    mtu: 65_507,
};

#[test]
fn on_a_good_link_everything_is_done() {
    let tally = worlds("good", 50, Plan::default());
    assert_eq!((tally.failed, tally.lost, tally.taken_back), (0, 0, 0), "{tally:?}");
    assert!(tally.joined > 0, "{tally:?}");
}

#[test]
fn whatever_a_link_loses_copies_delays_or_corrupts_arrives_once() {
    for loss in [10, 50, 200] {
        let links = LinkParams { loss, ..BAD };
        let tally = worlds("bad link", 60, Plan { links, processes: 3, ..Plan::default() });
        assert_eq!(tally.failed, 0, "{tally:?}");
        assert!(tally.lost > 0 && tally.held > 0);
    }
}

#[test]
fn repairs_that_are_cut_in_other_places_are_taken() {
    // Acknowledgements ride on data in both directions, so segments have many lengths.
    let links = LinkParams { loss: 100, reordering: 400, reordering_by: MS, ..BAD };
    let plan = Plan { ordered: 1000, long: 700, writes: 500, pause: 50_000, ..Plan::default() };
    let tally = worlds("cut in other places", 250, Plan { links, ..plan });
    assert_eq!(tally.failed, 0, "{tally:?}");
    assert!(tally.held > 0, "{tally:?}");
}

#[test]
fn with_reordering_alone_next_to_nothing_unordered_is_held() {
    let links = LinkParams { loss: 0, corruption: 0, ..BAD };
    let plan = Plan { links, ordered: 0, writes: 0, long: 400, ..Plan::default() };
    let tally = worlds("reordering", 30, plan);
    // Only of the first message of a process to a queue pair, which has not shown its Q_Key before.
    assert!(tally.failed == 0 && tally.held <= 30, "{tally:?}");
}

#[test]
fn a_message_that_finds_no_receive_waits_or_fails() {
    let plan = Plan { receives: 1, late_receives: 3 * MS, links: BAD, ordered: 800, ..Plan::default() };
    let tally = worlds("few receives", 60, plan);
    assert_eq!(tally.failed, 0, "{tally:?}");
    assert!(tally.no_receive > 0);
    let tally = worlds("few receives, few retries", 60, Plan { rnr_retry: 1, ..plan });
    assert!(tally.failed > 0 && tally.done > tally.failed, "{tally:?}");
}

#[test]
fn a_refused_message_fails_in_its_turn_and_nothing_behind_it_is_seen() {
    let plan = Plan { refused: 60, ordered: 900, writes: 600, links: BAD, processes: 3, ..Plan::default() };
    let tally = worlds("refused", 60, plan);
    assert!(tally.failed > 0 && tally.done > tally.failed, "{tally:?}");
}

#[test]
fn a_message_refused_early_waits_for_its_turn_to_fail() {
    // Long Sends that lack a part, and behind them one that is refused at once.
    let links = LinkParams { loss: 100, ..BAD };
    let plan =
        Plan { one_pair: true, refused: 100, ordered: 1000, long: 500, pause: 50_000, ..Plan::default() };
    let tally = worlds("refused in one flow", 200, Plan { links, ..plan });
    assert!(tally.failed > 0 && tally.done > 0, "{tally:?}");
}

#[test]
fn what_was_failed_never_comes_after_what_was_posted_later() {
    // Messages fail at their first refusal, while copies of them are still on their way.
    let links = LinkParams { loss: 100, spikes: 200, spike: MS, reordering: 300, ..BAD };
    let plan = Plan {
        one_pair: true,
        links,
        ordered: 1000,
        writes: 500,
        long: 0,
        receives: 1,
        late_receives: 400_000,
        rnr_retry: 0,
        pause: 100_000,
        ..Plan::default()
    };
    let tally = worlds("failed at once", 200, plan);
    assert!(tally.failed > 0 && tally.done > 0, "{tally:?}");
}

#[test]
fn messages_that_are_withdrawn() {
    let plan = Plan {
        withdrawals: 100,
        links: BAD,
        processes: 3,
        ordered: 800,
        long: 500,
        pause: MS,
        ..Plan::default()
    };
    for (name, plan) in [
        ("withdrawn", plan),
        ("withdrawn, few receives", Plan { receives: 1, late_receives: 3 * MS, pause: 100_000, ..plan }),
        ("withdrawn, refused", Plan { refused: 60, pause: 100_000, ..plan }),
        ("withdrawn, one flow", Plan { one_flow: true, receives: 4, pause: 50_000, ..plan }),
        ("withdrawn, one pair", Plan { one_pair: true, receives: 4, pause: 50_000, ..plan }),
        ("withdrawn, restarts", Plan { kills: 20, leaves: 20, pause: 2 * MS, ..plan }),
        ("withdrawn, rests", Plan { rests: 100, messages: 100, withdrawals: 200, ..plan }),
        (
            "withdrawn, contact",
            Plan { links: LinkParams { loss: 300, ..BAD }, rests: 300, pause: 30 * MS, ..plan },
        ),
        (
            "withdrawn, cuts",
            Plan { cuts: 20, cut: 3 * SEC, stops: 10, stop: 3 * SEC, pause: 20 * MS, ..plan },
        ),
    ] {
        let tally = worlds(name, 40, plan);
        assert!(tally.withdrawn > 0 && tally.failed >= tally.withdrawn && tally.done > 0, "{tally:?}");
    }
}

#[test]
fn processes_that_die_leave_and_come_back_on_the_same_port() {
    let plan = Plan { kills: 20, leaves: 20, links: BAD, processes: 3, pause: 2 * MS, ..Plan::default() };
    let tally = worlds("restarts", 100, plan);
    assert!(tally.failed > 0 && tally.done > tally.failed, "{tally:?}");
}

#[test]
fn one_way_partitions_and_processes_that_stop() {
    let plan = Plan {
        cuts: 10,
        cut: 3 * SEC,
        stops: 10,
        stop: 3 * SEC,
        links: BAD,
        pause: 20 * MS,
        ..Plan::default()
    };
    let tally = worlds("cuts", 60, plan);
    assert!(tally.done > tally.failed, "{tally:?}");
    let tally = worlds("long cuts", 60, Plan { cut: 40 * SEC, stop: 40 * SEC, pause: 300 * MS, ..plan });
    assert!(tally.failed > 0, "{tally:?}");
}

#[test]
fn paths_become_longer_and_shorter() {
    let plan = Plan { paths: 20, long: 700, pause: 2 * MS, ..Plan::default() };
    let tally = worlds("paths", 100, plan);
    assert_eq!(tally.failed, 0, "{tally:?}");
    // After a path was found to be shorter, nothing longer is tried for ten minutes.
    assert!(tally.long * 10 > tally.packets, "{tally:?}");
    let tally = worlds("paths that lose", 100, Plan { links: BAD, ..plan });
    assert_eq!(tally.failed, 0, "{tally:?}");
}

#[test]
fn exchanges_rest_and_are_forgotten() {
    let plan = Plan { rests: 100, messages: 100, links: BAD, ..Plan::default() };
    let tally = worlds("rests", 60, plan);
    assert_eq!(tally.failed, 0, "{tally:?}");
}

#[test]
fn a_stranger_changes_nothing_and_gets_no_more_than_it_sent() {
    let plan = Plan { stranger: true, links: LinkParams { loss: 0, ..BAD }, processes: 3, ..Plan::default() };
    let tally = worlds("stranger", 60, plan);
    assert_eq!(tally.failed, 0, "{tally:?}");
    worlds("stranger and restarts", 60, Plan { kills: 20, leaves: 10, pause: 2 * MS, ..plan });
}

#[test]
fn a_late_copy_of_an_open_delivers_nothing() {
    // Two processes that often begin at the same time, forget each other, fail and come back.
    let links = LinkParams { loss: 300, ..BAD };
    let plan = Plan { stranger: true, links, rests: 300, messages: 60, pause: 3 * SEC, ..Plan::default() };
    worlds("late copies", 100, plan);
    worlds("late copies, restarts", 100, Plan { kills: 100, leaves: 100, ..plan });
    worlds("late copies, cuts", 100, Plan { cuts: 200, cut: 30 * SEC, ..plan });
}

#[test]
fn one_flow_uses_its_receives_in_order() {
    let plan = Plan { one_flow: true, links: BAD, long: 600, receives: 4, ..Plan::default() };
    let tally = worlds("one flow", 60, plan);
    assert_eq!(tally.failed, 0, "{tally:?}");
    let stuck = Plan { cuts: 60, cut: 4 * SEC, pause: 20 * MS, ..plan };
    let tally = worlds("one flow, cuts", 100, stuck);
    assert!(tally.taken_back > 0 && tally.done > 0, "{tally:?}");
}
