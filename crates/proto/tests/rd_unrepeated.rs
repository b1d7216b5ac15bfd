//! Messages that are not repeated (docs/rd.md section 5.5), between two machines.

use std::time::{Duration, Instant};

use uwarp_proto::clock::Now;
use uwarp_proto::rd::{
    Action, Arrival, Config, Failure, Outgoing, PacketBuf, Placed, QpnPair, Rd, Route, Target, Ticket,
};
use uwarp_wire::rd::chunk::Reason;
use uwarp_wire::rd::segment::First;

const MS: Duration = Duration::from_millis(1);

struct Host {
    rd: Rd,
    route: Route,
    finished: Vec<(Ticket, Result<(), Failure>)>,
    arrivals: Vec<Arrival>,
}

impl Host {
    fn settle(&mut self) {
        while let Some(action) = self.rd.poll_action() {
            if let Action::Finished { ticket, outcome } = action {
                self.finished.push((ticket, outcome));
            }
        }
    }

    fn post(&mut self, now: &Now, len: u32, unrepeated: bool) -> Ticket {
        let message = Outgoing {
            pair: QpnPair { source: 1, destination: 2 },
            first: First { qkey: 7, ..First::default() },
            target: Target::Untagged { qn: 0, rsvdulp: 0x43, rsvdulp32: 0 },
            len,
            ordered: false,
            rnr_retry: 0,
            unrepeated,
        };
        self.rd.post(now, self.route, message).expect("there is room")
    }
}

/// Two hosts on a path of half a millisecond.
struct World {
    start: Instant,
    now: Duration,
    hosts: [Host; 2],
    /// When, to whom, what.
    flying: Vec<(Duration, usize, Vec<u8>)>,
    sent: u32,
    sent_by: [u32; 2],
    /// What becomes of segments that arrive.
    placed: Placed,
}

impl World {
    fn new() -> Self {
        Self::with(&Config::default())
    }

    fn with(config: &Config) -> Self {
        let start = Instant::now();
        let at = |host: usize| ([10, 0, 0, host as u8 + 1], 20_000).into();
        let host = |own: usize| Host {
            rd: Rd::new(&Now::at(start), *config, &[own as u8; 32]),
            route: Route { local: at(own), remote: at(1 - own) },
            finished: Vec::new(),
            arrivals: Vec::new(),
        };
        let (now, hosts, flying) = (Duration::ZERO, [host(0), host(1)], Vec::new());
        Self { start, now, hosts, flying, sent: 0, sent_by: [0; 2], placed: Placed::Done }
    }

    fn at(&self) -> Now {
        Now::at(self.start + self.now)
    }

    /// Until this time; `lost` says which packets do not arrive, by their count.
    fn run(&mut self, until: Duration, lost: impl Fn(u32) -> bool) {
        loop {
            let now = self.at();
            for from in 0..2 {
                let host = &mut self.hosts[from];
                host.settle();
                let mut packet = PacketBuf::new();
                packet.allow(44, 65_000);
                while host.rd.poll_transmit(&now, &mut packet).is_some() {
                    for nth in 0..packet.packets() {
                        let (mut bytes, zeros) = (Vec::new(), |len| std::iter::repeat_n(7, len as usize));
                        packet.assemble(nth, &mut bytes, |part, out| out.extend(zeros(part.len)));
                        self.sent += 1;
                        self.sent_by[from] += 1;
                        if !lost(self.sent) {
                            self.flying.push((self.now + MS / 2, 1 - from, bytes));
                        }
                    }
                    host.settle();
                }
            }
            let timers = self.hosts.iter().filter_map(|host| host.rd.poll_timeout());
            let timers = timers.map(|at| at.saturating_duration_since(self.start));
            let next = self.flying.iter().map(|(at, ..)| *at).chain(timers).min().unwrap_or(until);
            if next.max(self.now) >= until {
                self.now = until;
                return;
            }
            self.now = next.max(self.now);
            let now = self.at();
            let due = self.flying.extract_if(.., |(at, ..)| *at <= self.now).collect::<Vec<_>>();
            for (_, to, bytes) in due {
                let host = &mut self.hosts[to];
                let mut arrivals = Vec::new();
                host.rd.handle_input(&now, host.route, &bytes, &mut arrivals);
                for arrival in arrivals {
                    let mut more = Vec::new();
                    host.rd.on_placed(&now, &arrival, self.placed, &mut more);
                    assert!(more.is_empty());
                    host.arrivals.push(arrival);
                }
            }
            for host in &mut self.hosts {
                if host.rd.poll_timeout().is_some_and(|at| at <= now.get()) {
                    host.rd.handle_timeout(&now);
                }
            }
        }
    }

    fn unrepeated(&self, host: usize) -> impl Iterator<Item = &Arrival> {
        self.hosts[host].arrivals.iter().filter(|arrival| arrival.unrepeated)
    }
}

#[test]
fn what_is_lost_stays_lost_and_nobody_waits_for_it() {
    let mut world = World::new();
    let tickets: Vec<_> = (0..200).map(|_| world.hosts[0].post(&world.at(), 1000, true)).collect();
    // Whatever carries payload is among these; the contact is before, and its packets would be repeated.
    world.run(Duration::from_secs(5), |count| count > 10 && count.is_multiple_of(7));
    let finished: Vec<_> = tickets.iter().map(|ticket| (*ticket, Ok(()))).collect();
    assert_eq!(world.hosts[0].finished, finished, "all have left, in the order of the posts");
    let numbers: Vec<u64> = world.unrepeated(1).map(|arrival| arrival.message.number).collect();
    assert!((150..200).contains(&numbers.len()), "{} arrived", numbers.len());
    assert!(numbers.is_sorted_by(|a, b| a < b), "no number comes twice");
    assert_eq!(world.hosts[1].rd.held_bytes(), 0);
    // The exchange is as good as ever.
    let ticket = world.hosts[0].post(&world.at(), 100, false);
    world.run(Duration::from_secs(6), |_| false);
    assert_eq!(world.hosts[0].finished.last(), Some(&(ticket, Ok(()))));
}

/// Both ends speak first at the same moment. One of the two Opens is ignored in words, and what it carried
/// would be lost, although the network loses nothing.
#[test]
fn contact_from_both_sides_loses_nothing() {
    let mut world = World::new();
    for host in [0, 1] {
        (0..20).for_each(|_| {
            world.hosts[host].post(&world.at(), 100, true);
        });
    }
    world.run(Duration::from_secs(2), |_| false);
    for host in [0, 1] {
        assert_eq!(world.unrepeated(host).count(), 20);
        assert_eq!(world.hosts[host].finished.len(), 20);
    }
}

/// Each message of no flow is told of by itself, and all of them at once.
#[test]
fn refused_messages_are_given_up_together() {
    let mut world = World::new();
    world.hosts[0].post(&world.at(), 10, false);
    world.run(Duration::from_secs(1), |_| false);
    world.placed = Placed::Refused(Reason::Access);
    (0..16).for_each(|_| {
        world.hosts[0].post(&world.at(), 10, false);
    });
    let before = world.sent_by[0];
    world.run(world.now + MS * 3 / 2, |_| false);
    assert_eq!(world.hosts[0].finished.len(), 17);
    let sent = world.sent_by[0] - before;
    assert!(sent >= 17, "{sent} packets, where 16 messages of which the peer must hear take one each");
}

#[test]
fn a_long_message_leaves_in_order_and_beside_reliable_ones() {
    let mut world = World::new();
    let long = world.hosts[0].post(&world.at(), 1 << 20, true);
    let reliable = world.hosts[0].post(&world.at(), 1 << 16, false);
    world.run(Duration::from_secs(2), |_| false);
    let mut at = 0;
    for arrival in world.unrepeated(1) {
        assert_eq!((arrival.offset, arrival.message_len), (at, 1 << 20));
        assert_eq!(arrival.first.is_some(), at == 0, "the first segment has the key");
        at += match &arrival.bytes {
            uwarp_proto::rd::Bytes::Datagram(range) => u32::try_from(range.len()).unwrap(),
            _ => panic!("nothing of it is held or joined"),
        };
    }
    assert_eq!(at, 1 << 20);
    let mut behind = 0;
    // (Behind the contact, which carries reliable ones alone.)
    for arrival in world.hosts[1].arrivals.iter().skip_while(|arrival| !arrival.unrepeated) {
        behind = if arrival.unrepeated { 0 } else { behind + 1 };
        assert!(behind <= 2, "packets of both take turns");
    }
    // The reliable one, posted later and shorter, did not wait for the end of the other.
    assert_eq!(world.hosts[0].finished, [(reliable, Ok(())), (long, Ok(()))]);
}

#[test]
fn a_message_can_be_withdrawn_until_it_has_left() {
    let mut world = World::new();
    let [first, second, third] = [0; 3].map(|_| world.hosts[0].post(&world.at(), 1 << 20, true));
    world.hosts[0].rd.withdraw(&world.at(), second);
    // After the contact, the first one is under way.
    world.run(Duration::from_micros(3200), |_| false);
    assert!(world.unrepeated(1).count() > 0 && world.hosts[0].finished.len() == 1);
    world.hosts[0].rd.withdraw(&world.at(), first);
    world.run(Duration::from_secs(2), |_| false);
    let withdrawn = |ticket| (ticket, Err(Failure::Withdrawn));
    assert_eq!(world.hosts[0].finished, [withdrawn(second), withdrawn(first), (third, Ok(()))]);
    let of_third = world.unrepeated(1).filter(|arrival| arrival.message.number == 2);
    let bytes: usize = of_third
        .map(|arrival| match &arrival.bytes {
            uwarp_proto::rd::Bytes::Datagram(range) => range.len(),
            _ => 0,
        })
        .sum();
    assert_eq!(bytes, 1 << 20);
}

#[test]
fn who_is_not_there_is_given_up() {
    let mut world = World::new();
    let ticket = world.hosts[0].post(&world.at(), 100, true);
    world.run(Duration::from_secs(60), |_| true);
    assert_eq!(world.hosts[0].finished, [(ticket, Err(Failure::Silent))]);
    // With an exchange, the peer's silence is noticed too: what is queued does not wait for ever.
    let mut world = World::new();
    world.hosts[0].post(&world.at(), 100, true);
    world.run(Duration::from_secs(1), |_| false);
    let long = world.hosts[0].post(&world.at(), 1 << 24, true);
    world.run(Duration::from_secs(60), |_| true);
    assert_eq!(world.hosts[0].finished.last(), Some(&(long, Err(Failure::Silent))));
}

/// A virtual machine whose host is busy, a laptop that sleeps: nobody listened, and nothing was on its way.
#[test]
fn a_time_in_which_both_stood_still_ends_nothing() {
    let mut world = World::new();
    let ticket = world.hosts[0].post(&world.at(), 1 << 24, false);
    for _ in 0..2 {
        world.run(world.now + MS * 10, |_| false);
        assert_eq!(world.hosts[0].finished, [], "it is under way");
        world.flying.clear();
        world.now += Duration::from_secs(40);
    }
    world.run(world.now + Duration::from_secs(5), |_| false);
    assert_eq!(world.hosts[0].finished, [(ticket, Ok(()))]);
}

/// Nobody waits for their acknowledgements. Each would wake the sender's thread up, beside its program.
#[test]
fn acknowledgements_that_nobody_waits_for_ride_on_answers() {
    let mut world = World::new();
    world.hosts[0].post(&world.at(), 10, true);
    world.run(MS * 20, |_| false);
    let before = world.sent;
    for _ in 0..50 {
        for host in [0, 1] {
            world.hosts[host].post(&world.at(), 64, true);
            // It arrives, and is answered a little later.
            world.run(world.now + MS * 6 / 10, |_| false);
        }
    }
    assert_eq!(world.sent - before, 100, "one packet for each message");
    // One way: one for eight packets, and the last one after a millisecond.
    world.run(world.now + MS * 20, |_| false);
    let before = world.sent_by;
    for _ in 0..84 {
        world.hosts[0].post(&world.at(), 64, true);
        world.run(world.now + MS / 10, |_| false);
    }
    world.run(world.now + MS * 20, |_| false);
    assert_eq!([0, 1].map(|host| world.sent_by[host] - before[host]), [84, 11], "and no probe");
}

/// Where the window is full, it is asked for at once.
#[test]
fn acknowledgements_that_the_window_waits_for_come_at_once() {
    let mut world = World::with(&Config { window: 4 * 1452, ..Config::default() });
    world.hosts[0].post(&world.at(), 10, false);
    world.run(MS * 20, |_| false);
    let (start, count) = (world.now, world.unrepeated(1).count());
    (0..20).for_each(|_| {
        world.hosts[0].post(&world.at(), 1300, true);
    });
    while world.unrepeated(1).count() < count + 20 {
        world.run(world.now + MS / 10, |_| false);
    }
    let took = world.now - start;
    assert!(took < MS * 7, "{took:?} for seven windows at most, with a round trip of 1 ms");
}
