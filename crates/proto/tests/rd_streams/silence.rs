//! Peers that say nothing: stopped, killed or out of reach.

use std::net::SocketAddr;
use std::time::Duration;

use uwarp_proto::rd::{Failure, PortAnswer, Route, StreamEnd, Ticket};

use super::world::{MS, Path, World};

/// A world with a stream on which one byte has gone, and in which the peer's port was tried.
fn with_stream_after(trial: PortAnswer) -> (World, Ticket) {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(150 * MS);
    assert_eq!((world.hosts[0].tried, world.hosts[0].asked), (1, 0));
    let now = world.at();
    world.hosts[0].port_is(&now, trial);
    (world, ours)
}

fn with_stream() -> (World, Ticket) {
    with_stream_after(PortAnswer::Nothing)
}

#[test]
fn the_port_of_a_silent_peer_is_asked_for_and_a_refusal_ends_its_streams() {
    let (mut world, ours) = with_stream();
    let other = world.open();
    let now = world.at();
    world.hosts[0].send(&now, other, b"x");
    world.run_for(10 * MS);
    // While it answers, a refusal is a lie.
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    world.hosts[0].send(&now, ours, b"y");
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    world.run_for(10 * MS);
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 0));
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"z");
    world.run_for(900 * MS);
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 0));
    world.run_for(200 * MS);
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 1));
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    for stream in [ours, other] {
        assert_eq!(world.end(0, stream).ended, Some(StreamEnd::Failed(Failure::Restarted)));
    }
}

/// A router that translates addresses, or a firewall, refuses what comes from another port.
#[test]
fn refusals_of_a_port_that_is_taken_are_worth_nothing() {
    let (mut world, ours) = with_stream_after(PortAnswer::Refused);
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    world.run_for(10 * MS);
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"z");
    for _ in 0..30 {
        world.run_for(Duration::from_secs(1));
        let now = world.at();
        world.hosts[0].port_is(&now, PortAnswer::Refused);
    }
    assert_eq!(world.end(0, ours).ended, None);
    world.path.loss = 0;
    world.run_for(Duration::from_secs(1));
    let theirs = world.hosts[1].opened[0];
    assert_eq!(world.end(1, theirs).came, b"xyz");
}

/// Three probes were not answered, so its packets were short for ten minutes.
#[test]
fn a_peer_whose_machine_stood_still_has_no_shorter_path() {
    let mut world = World::new(1, Path::default());
    world.hosts.iter_mut().for_each(|host| host.longest = 8972);
    let ours = world.open();
    let route = world.hosts[0].route;
    let say = |world: &mut World, bytes: usize| {
        let now = world.at();
        world.hosts[0].send(&now, ours, &vec![7; bytes]);
    };
    let len = |world: &World| world.hosts[0].rd.packet_len(route);
    for _ in 0..3 {
        say(&mut world, 100_000);
        world.run_for(50 * MS);
    }
    let long = len(&world);
    assert!(long > Some(4000), "{long:?}");
    say(&mut world, 100_000);
    world.still_until = world.now + 900 * MS;
    world.run_for(800 * MS);
    assert!(len(&world) < Some(1500), "{:?}", len(&world));
    world.run_for(200 * MS);
    say(&mut world, 100_000);
    world.run_for(50 * MS);
    assert_eq!(len(&world), long);
    let theirs = world.hosts[1].opened[0];
    assert_eq!(world.end(1, theirs).taken, 500_000);
}

/// It said nothing after the first refusal, so it may be dead.
#[test]
fn a_refusal_that_was_never_tried_counts_after_ten_seconds() {
    let (mut world, ours) = with_stream_after(PortAnswer::Refused);
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    for seconds in 1..=11 {
        world.run_for(Duration::from_secs(1));
        let now = world.at();
        world.hosts[0].port_is(&now, PortAnswer::Refused);
        let ended = world.end(0, ours).ended;
        assert_eq!(ended.is_some(), seconds >= 10, "{seconds} s: {ended:?}");
    }
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Failed(Failure::Restarted)));
}

/// The time in which nothing waited is no silence.
#[test]
fn three_seconds_of_rest_and_some_loss_are_no_doubt() {
    let (mut world, ours) = with_stream();
    world.run_for(Duration::from_secs(3));
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    for _ in 0..30 {
        world.run_for(10 * MS);
        let now = world.at();
        world.hosts[0].port_is(&now, PortAnswer::Refused);
    }
    world.path.loss = 0;
    world.run_for(Duration::from_secs(1));
    let theirs = world.hosts[1].opened[0];
    assert_eq!((world.end(0, ours).ended, world.hosts[0].asked), (None, 0));
    assert_eq!(world.end(1, theirs).came, b"xy");
}

/// It is stopped, or out of reach.
#[test]
fn streams_outlast_a_silent_peer_whose_port_is_not_refused() {
    let (mut world, ours) = with_stream();
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    for _ in 0..50 {
        world.run_for(Duration::from_secs(1));
        let now = world.at();
        world.hosts[0].port_is(&now, PortAnswer::Nothing);
    }
    assert!((5..=10).contains(&world.hosts[0].asked), "{}", world.hosts[0].asked);
    let answers = world.hosts[0].rd.stream_answers(&world.at(), ours).expect("a known stream");
    assert!(answers.doubtful, "another host may be switched off");
    world.path.loss = 0;
    world.run_for(Duration::from_secs(1));
    let theirs = world.hosts[1].opened[0];
    let now = world.at();
    world.hosts[1].send(&now, theirs, b"still here");
    world.run_for(10 * MS);
    assert_eq!(
        (&world.end(1, theirs).came[..], &world.end(0, ours).came[..]),
        (&b"xy"[..], &b"still here"[..])
    );
}

/// The own system would refuse a port that nobody has.
#[test]
fn streams_to_a_stopped_process_of_this_host_stay_for_minutes() {
    let mut world = World::new(1, Path::default());
    let at = |port| SocketAddr::new([10, 0, 0, 1].into(), port);
    world.hosts[0].route = Route { local: at(20_000), remote: at(20_001) };
    world.hosts[1].route = Route { local: at(20_001), remote: at(20_000) };
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"y");
    for _ in 0..600 {
        world.run_for(Duration::from_secs(1));
        let now = world.at();
        world.hosts.iter_mut().for_each(|host| host.port_is(&now, PortAnswer::Nothing));
    }
    let answers = world.hosts[0].rd.stream_answers(&world.at(), ours).expect("a known stream");
    assert!(!answers.doubtful, "it is stopped");
    world.path.loss = 0;
    world.run_for(Duration::from_secs(1));
    let theirs = world.hosts[1].opened[0];
    assert_eq!(world.end(1, theirs).came, b"xy");
    // And it may be killed after all.
    world.path.loss = 1000;
    let now = world.at();
    world.hosts[0].send(&now, ours, b"z");
    world.run_for(Duration::from_secs(2));
    let now = world.at();
    world.hosts[0].port_is(&now, PortAnswer::Refused);
    assert_eq!(world.end(0, ours).ended, Some(StreamEnd::Failed(Failure::Restarted)));
}
