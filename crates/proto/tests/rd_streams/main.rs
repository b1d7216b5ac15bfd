//! Streams of bytes (docs/rd.md section 5.6), between two machines over a path that loses, copies and delays.

mod silence;
mod strangers;
mod world;

use std::time::Duration;

use proptest::prelude::*;
use uwarp_proto::rd::{Failure, StreamEnd, Ticket};

use world::{Host, LONG, MS, Path, SERVICE, World};

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(seed | 1) >> 3) as u8).collect()
}

#[test]
fn bytes_go_both_ways_and_the_stream_ends_when_both_have_finished() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"request");
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    assert_eq!(world.end(1, theirs).came, b"request");
    let now = world.at();
    world.hosts[1].send(&now, theirs, b"reply");
    world.hosts[1].rd.finish_stream(&now, theirs);
    world.run_for(10 * MS);
    let end = world.end(0, ours);
    assert_eq!((&end.came[..], end.finished, end.released, end.ended), (&b"reply"[..], true, 7, None));
    let now = world.at();
    world.hosts[0].send(&now, ours, b" and the last");
    world.hosts[0].rd.finish_stream(&now, ours);
    world.run_for(10 * MS);
    assert_eq!(world.end(1, theirs).came, b"request and the last");
    for (host, stream) in [(0, ours), (1, theirs)] {
        assert_eq!(world.end(host, stream).ended, Some(StreamEnd::Closed));
    }
    world.check_empty();
}

/// A known peer answers the first bytes in one round trip.
#[test]
fn a_known_peer_has_the_first_bytes_after_one_way() {
    let mut world = World::new(1, Path::default());
    let first = world.open();
    let now = world.at();
    world.hosts[0].send(&now, first, b"x");
    world.run_for(10 * MS);
    let second = world.open();
    let now = world.at();
    world.hosts[0].send(&now, second, b"request");
    world.run_for(MS / 4);
    assert_eq!(world.end(1, world.hosts[1].opened[1]).came, b"request");
}

#[test]
fn nobody_sends_more_than_the_other_program_takes() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let data = bytes(7, LONG);
    let now = world.at();
    world.hosts[0].send(&now, ours, &data);
    world.run_for(MS * 5 / 4);
    let theirs = world.hosts[1].opened[0];
    world.hosts[1].streams.get_mut(&theirs).unwrap().is_lazy = true;
    world.run_for(50 * MS);
    let stuck = world.end(1, theirs).readable;
    assert!(stuck < LONG as u64 - 200_000, "{stuck}");
    // A window that stays closed for long is no silence of the peer, and costs no more than its PINGs.
    let before = world.packets;
    world.run_for(Duration::from_secs(40));
    assert!(world.packets - before < 60, "{}", world.packets - before);
    assert_eq!((world.end(1, theirs).readable, world.end(0, ours).ended), (stuck, None));
    world.hosts[1].streams.get_mut(&theirs).unwrap().is_lazy = false;
    world.run_for(100 * MS);
    assert!(world.end(1, theirs).came == data);
}

#[test]
fn a_service_that_nobody_has_resets_the_stream() {
    let mut world = World::new(1, Path::default());
    world.hosts[1].rd.take_streams(SERVICE, false);
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"request");
    world.run_for(10 * MS);
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Reset));
    assert!(world.hosts[1].opened.is_empty());
    world.check_empty();
}

#[test]
fn a_reset_reaches_the_peer_although_it_is_lost_at_first() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"request");
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[1].rd.reset_stream(&now, theirs);
    world.run_for(MS);
    world.path.loss = 0;
    world.run_for(100 * MS);
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Reset));
    world.check_empty();
}

#[test]
fn a_stream_that_is_left_is_sent_to_its_end() {
    for peer_finishes in [false, true] {
        let mut world = World::new(1, Path { loss: 50, ..Path::default() });
        let ours = world.open();
        let now = world.at();
        world.hosts[0].send(&now, ours, &bytes(3, 50_000));
        world.hosts[0].streams.get_mut(&ours).unwrap().is_left = true;
        world.hosts[0].rd.leave_stream(&now, ours);
        world.run_for(300 * MS);
        let theirs = world.hosts[1].opened[0];
        assert!(world.end(1, theirs).came == bytes(3, 50_000) && world.end(1, theirs).finished);
        if peer_finishes {
            let now = world.at();
            world.hosts[1].rd.finish_stream(&now, theirs);
        }
        world.run_for(Duration::from_secs(1));
        assert!(world.end(0, ours).ended.is_some() && world.end(1, theirs).ended.is_some());
        world.check_empty();
    }
}

/// Its end may arrive before bytes in front of it, which are sent again then.
#[test]
fn a_stream_that_ends_is_whole_whatever_is_lost() {
    let (mut made, mut handled) = (0, 0);
    for seed in 0..300 {
        let (leaves, peer_finishes) = (seed % 2 == 0, seed % 4 < 2);
        let mut world = World::new(seed * 7919, Path { loss: 50, late: 100, ..Path::default() });
        let ours = world.open();
        let now = world.at();
        let all = bytes(seed, 50_000);
        world.hosts[0].send(&now, ours, &all);
        if leaves {
            world.hosts[0].streams.get_mut(&ours).unwrap().is_left = true;
            world.hosts[0].rd.leave_stream(&now, ours);
        } else {
            world.hosts[0].rd.finish_stream(&now, ours);
        }
        world.run_for(50 * MS);
        if let Some(theirs) = world.hosts[1].opened.first().copied().filter(|_| peer_finishes) {
            let now = world.at();
            world.hosts[1].rd.finish_stream(&now, theirs);
        }
        world.run_for(Duration::from_secs(10));
        let theirs = world.end(1, world.hosts[1].opened[0]);
        assert!(theirs.finished && theirs.came == all, "seed {seed}: {} bytes came", theirs.came.len());
        (made, handled) = (world.made_together.max(made), world.handled_together.max(handled));
    }
    assert!(made > 1 && handled > 1, "{made} packets were made together, {handled} handled");
}

/// Packets that come joined and go beyond it are no worse off than those that come one by one.
#[test]
fn what_there_is_room_for_is_taken() {
    for seed in 0..50 {
        let mut world = World::new(seed * 7919, Path::default());
        world.hosts[1].is_lazy = true;
        let (ours, now) = (world.open(), world.at());
        world.hosts[0].send(&now, ours, &bytes(seed, LONG));
        while world.hosts[1].opened.is_empty() {
            world.run_for(MS / 10);
        }
        // The first packet goes alone; behind its acknowledgement the others come.
        world.run_for(MS);
        let came = world.end(1, world.hosts[1].opened[0]).readable;
        assert!(came <= 4096 && came + 1472 > 4096, "seed {seed}: {came} bytes");
    }
}

/// Half a minute, whatever the peer takes.
#[test]
fn a_stream_that_is_left_does_not_stay_for_ever() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    let theirs = world.hosts[1].opened[0];
    world.hosts[1].streams.get_mut(&theirs).unwrap().is_lazy = true;
    let now = world.at();
    world.hosts[0].send(&now, ours, &bytes(3, LONG));
    world.hosts[0].streams.get_mut(&ours).unwrap().is_left = true;
    world.hosts[0].rd.leave_stream(&now, ours);
    world.run_for(Duration::from_secs(31));
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Reset));
    world.run_for(10 * MS);
    assert_eq!(world.end(1, theirs).ended, Some(StreamEnd::Reset));
    world.check_empty();
}

#[test]
fn a_peer_that_is_gone_ends_streams() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    world.path.loss = 1000;
    world.run_for(Duration::from_secs(70));
    let theirs = world.hosts[1].opened[0];
    for (host, stream) in [(0, ours), (1, theirs)] {
        assert_eq!(world.end(host, stream).ended, Some(StreamEnd::Failed(Failure::Silent)));
    }
    // And one that never was there.
    let again = world.open();
    world.run_for(Duration::from_secs(20));
    assert_eq!(world.end(0, again).ended, Some(StreamEnd::Failed(Failure::Silent)));
    world.check_empty();
}

/// Two programs of which each answers what it has got after some time; how many packets a message and its
/// answer take.
fn packets_of_a_round(world: &mut World, ends: [Ticket; 2], thinks: Duration) -> u64 {
    const ROUNDS: u64 = 50;
    let step = MS / 100;
    let mut before = 0;
    // The first rounds show what the peer is like.
    for round in 0..ROUNDS + 2 {
        if round == 2 {
            before = world.packets;
        }
        for host in [0, 1] {
            let now = world.at();
            let had = world.end(1 - host, ends[1 - host]).readable;
            world.hosts[host].send(&now, ends[host], b"0123456789");
            while world.end(1 - host, ends[1 - host]).readable < had + 10 {
                world.run_for(step);
            }
            world.run_for(thinks);
        }
    }
    let packets = world.packets - before;
    assert!(packets.is_multiple_of(ROUNDS), "{packets}");
    packets / ROUNDS
}

/// An acknowledgement goes with the answer, if there is one soon, and else at once.
#[test]
fn who_answers_at_once_sends_one_packet_for_each_message() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"request");
    world.run_for(10 * MS);
    let ends = [ours, world.hosts[1].opened[0]];
    assert_eq!(packets_of_a_round(&mut world, ends, Duration::ZERO), 2);
    assert_eq!(packets_of_a_round(&mut world, ends, MS / 50), 2);
    assert_eq!(packets_of_a_round(&mut world, ends, MS), 4, "one that thinks");
    // Then none waits for the time after which the peer acknowledges by itself.
    let now = world.at();
    let released = world.end(0, ours).released;
    world.hosts[0].send(&now, ours, b"0123456789");
    let sent_at = world.now;
    while world.end(0, ours).released == released {
        world.run_for(MS / 100);
    }
    let took = world.now - sent_at;
    assert!(took < MS * 2 / 5 + MS / 25, "{took:?} with a round trip of 0.4 ms, and 0.05 ms of delay");
    assert_eq!(packets_of_a_round(&mut world, ends, Duration::ZERO), 2, "and back");
}

/// An exchange without streams rests after 30 s, and is forgotten after 60 s.
#[test]
fn an_idle_stream_keeps_its_exchange() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(Duration::from_secs(200));
    let theirs = world.hosts[1].opened[0];
    let now = world.at();
    world.hosts[1].send(&now, theirs, b"still here");
    world.run_for(MS);
    assert_eq!(world.end(0, ours).came, b"still here");
    assert!(world.packets < 200, "{}", world.packets);
}

#[test]
fn a_restarted_peer_ends_streams() {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    world.hosts[1] = Host::new(1, world.start);
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    world.run_for(Duration::from_secs(1));
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Failed(Failure::Restarted)));
    assert!(world.hosts[1].opened.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whatever the path does, each byte comes once and in its order.
    #[test]
    fn every_byte_comes_once_and_in_order(
        seed: u64,
        loss in 0u64..250,
        copies in 0u64..300,
        late in 0u64..300,
        streams in 1usize..5,
        writes in prop::collection::vec((0usize..5, any::<bool>(), 1usize..40_000, 0u64..3000), 1..25),
    ) {
        let mut world = World::new(seed, Path { loss, copies, late });
        let ours: Vec<Ticket> = (0..streams).map(|_| world.open()).collect();
        let now = world.at();
        for stream in &ours {
            world.hosts[0].send(&now, *stream, &[stream_byte(*stream, &ours)]);
        }
        for (which, back, len, pause) in writes {
            let stream = ours[which % streams];
            let now = world.at();
            let first = stream_byte(stream, &ours);
            let theirs = world.hosts[1].opened.iter().copied().find(|theirs| {
                world.end(1, *theirs).readable > 0 && world.end(1, *theirs).came[0] == first
            });
            let data = bytes(seed ^ len as u64, len);
            match theirs.filter(|_| back) {
                Some(theirs) => world.hosts[1].send(&now, theirs, &data),
                None => world.hosts[0].send(&now, stream, &data),
            }
            world.run_for(Duration::from_micros(pause));
        }
        let now = world.at();
        for stream in &ours {
            world.hosts[0].rd.finish_stream(&now, *stream);
        }
        world.run_for(Duration::from_secs(9));
        world.path = Path::default();
        world.run_for(Duration::from_secs(20));
        prop_assert_eq!(world.hosts[1].opened.len(), streams);
        let now = world.at();
        for theirs in world.hosts[1].opened.clone() {
            prop_assert!(world.end(1, theirs).finished);
            let first = world.end(1, theirs).came[0];
            let ours = ours.iter().copied().find(|ours| world.end(0, *ours).sent[0] == first);
            let ours = ours.expect("a stream of ours");
            let ends = [world.end(0, ours), world.end(1, theirs)];
            for (a, b) in [(ends[0], ends[1]), (ends[1], ends[0])] {
                prop_assert!(a.sent == b.came && b.readable == a.sent.len() as u64);
                prop_assert_eq!(a.released, a.sent.len() as u64);
            }
            world.hosts[1].rd.finish_stream(&now, theirs);
        }
        world.run_for(Duration::from_secs(1));
        for host in &world.hosts {
            prop_assert!(host.streams.values().all(|end| end.ended == Some(StreamEnd::Closed)));
        }
        world.check_empty();
    }
}

fn stream_byte(stream: Ticket, all: &[Ticket]) -> u8 {
    all.iter().position(|other| *other == stream).expect("one of them") as u8
}
