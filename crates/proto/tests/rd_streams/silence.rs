//! Peers that say nothing: stopped, killed or out of reach.

use std::net::SocketAddr;
use std::time::Duration;

use uwarp_proto::rd::{Failure, PortAnswer, Route, StreamEnd, Ticket};

use super::world::{MS, Path, World};

/// A world with a stream on which one byte has gone.
fn with_stream() -> (World, Ticket) {
    let mut world = World::new(1, Path::default());
    let ours = world.open();
    let now = world.at();
    world.hosts[0].send(&now, ours, b"x");
    world.run_for(10 * MS);
    (world, ours)
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
