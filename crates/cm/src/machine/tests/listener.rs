//! Listening, with a clock and peers that the tests move.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use uwarp_llp::carrier::Refusal;
use uwarp_proto::setup::{Initiator, InitiatorConfig, PeerData};

use super::super::testing::{self, Clock, Random, Seed};
use super::*;

/// A request; with the number of its queue pair, unless that is 0.
fn request(qpn: u32) -> Vec<u8> {
    let peer = PeerData { qpn, ..PeerData::new() };
    let config = InitiatorConfig { peer: Some(peer), peer_in_request: qpn != 0, ..testing::initiator() };
    Initiator::new(config, b"hello").unwrap().poll_transmit().unwrap()
}

fn peer(host: u8) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, 0, host), 40_000))
}

fn ends(peer: SocketAddr) -> Ends {
    Ends { local: SocketAddr::from((Ipv4Addr::new(10, 0, 0, 1), 7000)), peer }
}

/// A machine, its clock, and the shell's side of it.
struct World {
    clock: Clock,
    listener: Listener,
    budget: Budget,
    /// In the kernel, not accepted yet.
    queue: VecDeque<SocketAddr>,
    /// What accepting fails with.
    refuses: Option<Errno>,
    /// Accepted, and the machine's.
    open: Vec<ConnKey>,
    /// Those of the last burst.
    accepted: Vec<ConnKey>,
    closed: Vec<ConnKey>,
    /// The owner's.
    reported: Vec<(ConnKey, Box<Handshake>)>,
    accepts: usize,
}

impl World {
    fn new(places: usize, backlog: usize) -> Self {
        Self::with(Budget::new(places), Clock::new(), backlog)
    }

    fn with(budget: Budget, clock: Clock, backlog: usize) -> Self {
        let settings = Settings {
            timeouts: Timeouts::default(),
            policy: testing::responder(),
            backlog,
            budget: budget.clone(),
        };
        let listener = Listener::new(Space::new(5), settings);
        Self {
            clock,
            listener,
            budget,
            queue: VecDeque::new(),
            refuses: None,
            open: Vec::new(),
            accepted: Vec::new(),
            closed: Vec::new(),
            reported: Vec::new(),
            accepts: 0,
        }
    }

    /// Takes one action.
    fn act(&mut self) -> bool {
        let Some(action) = self.listener.poll_action() else { return false };
        match action {
            Action::Accept { conn } => {
                assert!(self.listener.silent.len() < self.budget.used(), "its place is taken");
                self.accepts += 1;
                let now = self.clock.now();
                if let Some(errno) = self.refuses {
                    self.listener.handle_input(&now, Input::NotAccepted { conn, why: Some(errno) });
                } else if let Some(peer) = self.queue.pop_front() {
                    self.open.push(conn);
                    self.accepted.push(conn);
                    self.listener.handle_input(&now, Input::Accepted { conn, ends: ends(peer) });
                } else {
                    self.listener.handle_input(&now, Input::NotAccepted { conn, why: None });
                }
            }
            Action::Close { conn, how } => {
                assert_eq!(how, Close::Finish);
                self.lose(conn);
                self.closed.push(conn);
            }
            Action::Report(Report::Requested { conn, ends, handshake, .. }) => {
                assert_eq!(ends.local.port(), 7000);
                self.lose(conn);
                self.reported.push((conn, handshake));
            }
            action => panic!("{action:?}"),
        }
        true
    }

    fn lose(&mut self, conn: ConnKey) {
        let at = self.open.iter().position(|open| *open == conn).expect("a connection that is open");
        self.open.remove(at);
    }

    fn run(&mut self) {
        while self.act() {}
        assert!(self.listener.poll_transmit().is_none());
    }

    fn input(&mut self, input: Input<'_>) {
        self.listener.handle_input(&self.clock.now(), input);
        self.run();
    }

    /// So many connections of this peer arrive; returns those that are accepted at once.
    fn connect(&mut self, peer: SocketAddr, times: usize) -> Vec<ConnKey> {
        self.accepted.clear();
        self.queue.extend(std::iter::repeat_n(peer, times));
        self.input(Input::Waiting);
        self.accepted.clone()
    }

    fn send(&mut self, conn: ConnKey, mut bytes: &[u8]) {
        while let Want::Bytes(want) = self.listener.want(conn)
            && !bytes.is_empty()
        {
            let (now, rest) = bytes.split_at(want.min(bytes.len()));
            bytes = rest;
            self.listener.handle_input(&self.clock.now(), Input::Bytes { conn, bytes: now });
        }
        self.run();
    }

    /// A connection whose request comes with it.
    fn ask(&mut self, peer: SocketAddr) -> ConnKey {
        let conn = self.connect(peer, 1)[0];
        self.send(conn, &request(0));
        conn
    }

    fn pass_ms(&mut self, ms: u64) {
        self.clock.pass_ms(ms);
        self.listener.handle_timeout(&self.clock.now());
        self.run();
        self.check();
    }

    fn answer(&mut self, conn: ConnKey) {
        self.listener.answered(&self.clock.now(), conn);
    }

    fn names(&self) -> Vec<ConnKey> {
        self.reported.iter().map(|(conn, _)| *conn).collect()
    }

    /// Nothing waits without a deadline, but for the program.
    fn check(&self) {
        let listener = &self.listener;
        let deadline = listener.poll_timeout();
        assert!(deadline.is_none_or(|deadline| deadline > self.clock.get()));
        if !listener.silent.is_empty() {
            assert!(deadline.is_some());
        }
        let for_the_program = listener.undelivered >= listener.settings.backlog;
        if !listener.complete.is_empty() && !for_the_program {
            assert!(listener.look.is_some());
        }
        if listener.waiting && !listener.is_behind() && listener.opening.is_none() {
            assert!(listener.starved.is_some() || listener.no_descriptors.is_some());
        }
        assert!(listener.undelivered <= listener.settings.backlog);
        let held = listener.silent.len() + listener.complete.len();
        assert_eq!(self.open.len(), held);
    }

    /// Nothing is left of it.
    fn over(&mut self) {
        assert!(self.open.is_empty());
        assert_eq!(self.budget.used(), 0);
        assert_eq!(self.listener.poll_timeout(), None);
        let before = format!("{:?}", self.listener);
        self.pass_ms(100_000);
        assert_eq!(format!("{:?}", self.listener), before);
    }
}

#[test]
fn the_program_sets_the_backlog_within_limits() {
    assert_eq!([-1, 0, 1, 7, 1024, 1025].map(Listener::backlog), [1024, 1024, 1, 7, 1024, 1024]);
}

#[test]
fn a_request_is_reported_with_everything_that_the_owner_needs() {
    let mut world = World::new(8, 8);
    let [conn] = world.connect(peer(2), 1)[..] else { panic!() };
    assert_eq!(world.listener.poll_timeout(), Some(world.clock.get() + Duration::from_secs(5)));
    assert_eq!(world.budget.used(), 1);
    let whole = request(0);
    world.send(conn, &whole[..7]);
    assert_eq!(world.listener.want(conn), Want::Bytes(13));
    world.send(conn, &whole[7..]);
    let (reported, mut handshake) = world.reported.pop().unwrap();
    assert_eq!((reported, handshake.want()), (conn, Want::Nothing));
    assert!(handshake.accept(&world.clock.now(), testing::terms(), b"").is_ok());
    assert_eq!((world.listener.want(conn), world.listener.undelivered), (Want::Nothing, 1));
    world.over();
}

#[test]
fn a_silent_connection_is_closed_after_its_limit() {
    let mut world = World::new(8, 8);
    let first = world.connect(peer(2), 1)[0];
    world.pass_ms(1000);
    let second = world.connect(peer(2), 1)[0];
    world.send(second, b"MPA");
    world.pass_ms(3999);
    assert_eq!(world.closed, []);
    world.pass_ms(1);
    assert_eq!(world.closed, [first]);
    world.pass_ms(1000);
    assert_eq!(world.closed, [first, second]);
    world.over();
}

#[test]
fn a_silent_connection_that_ends_is_closed_and_one_that_broke_is_not() {
    let mut world = World::new(8, 8);
    let conns = world.connect(peer(2), 3);
    world.input(Input::End { conn: conns[0] });
    world.send(conns[1], b"GET / HTTP/1.1\r\n\r\n\r\n");
    assert_eq!(world.closed, conns[..2]);
    world.lose(conns[2]);
    world.input(Input::Failed { conn: conns[2], why: Refusal::Gone });
    assert_eq!(world.closed.len(), 2);
    world.over();
}

#[test]
fn inputs_for_others_change_nothing() {
    let mut world = World::new(8, 8);
    let asked = world.ask(peer(2));
    let gone = world.connect(peer(2), 1)[0];
    world.input(Input::End { conn: gone });
    let before = format!("{:?}", world.listener);
    for conn in [asked, gone, Space::new(9).name()] {
        world.input(Input::End { conn });
        world.input(Input::Bytes { conn, bytes: b"MPA" });
        world.input(Input::Failed { conn, why: Refusal::Gone });
        world.input(Input::Accepted { conn, ends: ends(peer(3)) });
        world.input(Input::NotAccepted { conn, why: None });
        world.input(Input::Room { conn });
    }
    world.input(Input::NoListener);
    assert_eq!(format!("{:?}", world.listener), before);
    world.answer(gone);
    assert_eq!(format!("{:?}", world.listener), before);
}

#[test]
fn an_errno_is_no_end() {
    let mut world = World::new(8, 8);
    world.refuses = Some(Errno::MFILE);
    world.connect(peer(2), 1);
    assert_eq!((world.accepts, world.budget.used()), (1, 0));
    world.input(Input::Waiting);
    world.pass_ms(99);
    assert_eq!(world.accepts, 1);
    world.pass_ms(1);
    assert_eq!(world.accepts, 2);
    world.refuses = None;
    world.pass_ms(100);
    assert_eq!(world.open.len(), 1);

    // Errors of the one connection: the next one may be good.
    world.refuses = Some(Errno::CONNABORTED);
    world.listener.handle_input(&world.clock.now(), Input::Waiting);
    world.act();
    world.refuses = None;
    world.queue.push_back(peer(2));
    world.run();
    assert_eq!(world.open.len(), 2);
}

#[test]
fn requests_are_reported_in_the_order_of_their_connections() {
    let mut world = World::new(8, 8);
    let conns = world.connect(peer(2), 3);
    world.send(conns[2], &request(0));
    world.send(conns[1], &request(0));
    assert_eq!(world.names(), []);
    world.pass_ms(9);
    assert_eq!(world.names(), []);
    world.send(conns[0], &request(0));
    assert_eq!(world.names(), conns);
}

#[test]
fn a_silent_connection_does_not_delay_others_for_long() {
    let mut world = World::new(8, 8);
    let conns = world.connect(peer(2), 2);
    world.send(conns[1], &request(0));
    assert_eq!(world.listener.poll_timeout(), Some(world.clock.get() + IN_ORDER));
    world.pass_ms(10);
    assert_eq!(world.names(), [conns[1]]);
    let third = world.connect(peer(2), 1)[0];
    world.send(third, &request(0));
    assert_eq!(world.names(), [conns[1], third], "the first one has had its time");
    let fourth = world.connect(peer(2), 2);
    world.send(fourth[1], &request(0));
    world.input(Input::End { conn: fourth[0] });
    assert_eq!(world.names().last(), Some(&fourth[1]), "it is gone");
}

#[test]
fn a_request_waits_for_established_of_the_connection_that_caused_it() {
    let mut world = World::new(8, 8);
    let first = world.ask(peer(2));
    world.answer(first);
    world.pass_ms(1);
    let second = world.ask(peer(2));
    let other = world.ask(peer(3));
    assert_eq!(world.names(), [first, other], "another peer does not wait");
    world.input(Input::Settled(first));
    assert_eq!(world.names(), [first, other, second]);

    world.answer(second);
    world.pass_ms(1);
    let third = world.ask(peer(2));
    world.pass_ms(198);
    assert_eq!(world.names().last(), Some(&second));
    world.pass_ms(1);
    assert_eq!(world.names().last(), Some(&third), "its indication never comes");
}

#[test]
fn connections_that_a_peer_begins_at_once_do_not_wait_for_each_other() {
    let mut world = World::new(8, 8);
    let conns = world.connect(peer(2), 2);
    world.send(conns[0], &request(0));
    world.pass_ms(1);
    world.answer(conns[0]);
    world.send(conns[1], &request(0));
    assert_eq!(world.names(), conns);
}

/// One local process delayed all others of its host by up to 200 ms for each of its connections.
#[test]
fn a_request_does_not_wait_for_other_processes_of_its_host() {
    let mut world = World::new(8, 8);
    let mut ask = |qpn, from| {
        world.pass_ms(1);
        let conn = world.connect(from, 1)[0];
        world.send(conn, &request(qpn));
        let reported = world.names().contains(&conn);
        world.answer(conn);
        reported
    };
    assert!(ask(0x00_1001, peer(2)));
    assert!(ask(0x00_2001, peer(2)), "the number of another port");
    assert!(!ask(0x00_1002, peer(2)), "a number of the same port");
    assert!(ask(0x00_1003, peer(3)), "of another host");
    let mapped = |host| SocketAddr::from((Ipv4Addr::new(10, 0, 0, host).to_ipv6_mapped(), 1));
    assert!(!ask(0x00_1004, mapped(3)), "an address has one form");
    assert!(ask(0x00_1004, SocketAddr::from((Ipv6Addr::LOCALHOST, 1))));
}

/// 2,000 complete requests were held with a backlog of 4, while one accepted peer stayed silent.
#[test]
fn complete_requests_obey_the_backlog() {
    let mut world = World::new(1024, 4);
    let first = world.ask(peer(2));
    world.input(Input::Delivered);
    world.answer(first);
    world.pass_ms(1);
    for _ in 0..2000 {
        if let [conn] = world.connect(peer(2), 1)[..] {
            world.send(conn, &request(0));
        }
    }
    assert_eq!((world.open.len(), world.reported.len()), (4, 1));
    assert_eq!(world.queue.len(), 1996, "they wait in the kernel");
    world.pass_ms(200);
    assert_eq!((world.open.len(), world.reported.len()), (0, 5));
    world.input(Input::Delivered);
    assert!(!world.open.is_empty(), "with room comes the next connection");
}

#[test]
fn no_more_requests_are_reported_than_the_backlog() {
    let mut world = World::new(64, 2);
    let conns = world.connect(peer(2), 5);
    for conn in &conns {
        world.send(*conn, &request(0));
    }
    assert_eq!((world.names(), world.open.len()), (conns[..2].to_vec(), 3));
    assert_eq!(world.budget.used(), 3, "complete ones count");
    assert_eq!(world.listener.poll_timeout(), None, "the program's time");
    world.queue.push_back(peer(3));
    world.input(Input::Waiting);
    assert_eq!(world.queue.len(), 1);
    for taken in 3..=5 {
        world.input(Input::Delivered);
        assert_eq!(world.reported.len(), taken);
        assert_eq!(world.queue.len(), 1, "three more are complete or not taken");
    }
    world.input(Input::Delivered);
    assert_eq!((world.queue.len(), world.open.len()), (0, 1));
}

#[test]
fn the_oldest_silent_connection_makes_room_after_its_grace() {
    // Of 9 places one machine gets 8.
    let mut world = World::new(9, 64);
    let flood = world.connect(peer(2), 12);
    assert_eq!((flood.len(), world.queue.len()), (8, 4));
    assert!(world.listener.is_starved());
    world.pass_ms(99);
    world.input(Input::Waiting);
    assert_eq!(world.closed, []);
    world.pass_ms(101);
    // One more than is needed: there is room before it is known that no connection waits any more.
    assert_eq!(world.closed, flood[..5]);
    assert_eq!((world.open.len(), world.queue.len()), (7, 0));
    let honest = world.ask(peer(3));
    assert_eq!(world.closed, flood[..6]);
    world.pass_ms(10);
    assert_eq!(world.names(), [honest]);
}

#[test]
fn complete_requests_make_no_room() {
    let mut world = World::new(9, 64);
    let first = world.ask(peer(2));
    world.answer(first);
    world.pass_ms(1);
    let waiting: Vec<_> = (0..4).map(|_| world.ask(peer(2))).collect();
    let silent = world.connect(peer(3), 5);
    assert_eq!((silent.len(), world.budget.used()), (4, 8));
    world.pass_ms(199);
    assert_eq!(world.names()[1..], waiting);
    assert_eq!((world.closed.len(), world.queue.len()), (0, 0), "reported ones made room");
}

/// Each listener had the whole budget: five of them together took all descriptors.
#[test]
fn listeners_of_a_process_share_its_budget() {
    let budget = Budget::new(64);
    let mut clock = Clock::new();
    let mut worlds: Vec<World> =
        (0..5).map(|_| World::with(budget.clone(), Clock::at(clock.get()), 1024)).collect();
    for _ in 0..20 {
        for world in &mut worlds {
            world.connect(peer(2), 30);
        }
        assert!(budget.used() <= 64);
        clock.pass_ms(200);
        for world in &mut worlds {
            world.pass_ms(200);
        }
    }
    let held: usize = worlds.iter().map(|world| world.open.len()).sum();
    assert_eq!(budget.used(), held);
    // A listener that nobody floods takes connections beside them.
    let mut quiet = World::with(budget.clone(), clock, 4);
    let conn = quiet.ask(peer(3));
    assert_eq!(quiet.names(), [conn]);
    drop(worlds);
    assert_eq!(budget.used(), 0);
}

#[test]
fn a_place_that_another_machine_gives_back_is_found() {
    let budget = Budget::new(2);
    let mut world = World::with(budget.clone(), Clock::new(), 4);
    let others = [budget.take(0).unwrap(), budget.take(0).unwrap()];
    world.connect(peer(2), 1);
    assert!(world.listener.is_starved());
    world.pass_ms(100);
    assert!(world.open.is_empty());
    drop(others);
    world.pass_ms(100);
    assert_eq!(world.open.len(), 1);
    assert!(!world.listener.is_starved());
}

/// The pairings keep places for requests that came early, and can give one back.
#[test]
fn an_owner_that_keeps_places_makes_room() {
    let budget = Budget::new(1);
    let mut world = World::with(budget.clone(), Clock::new(), 4);
    let early = budget.take(0).unwrap();
    world.connect(peer(2), 1);
    assert!(world.listener.is_starved());
    drop(early);
    world.listener.accept_more(&world.clock.now());
    world.run();
    assert_eq!(world.open.len(), 1);
}

#[test]
fn a_cancelled_listener_leaves_nothing() {
    let mut world = World::new(64, 2);
    let conns = world.connect(peer(2), 6);
    for conn in &conns[..4] {
        world.send(*conn, &request(0));
    }
    world.answer(conns[0]);
    // One request is reported and not polled.
    world.listener.handle_input(&world.clock.now(), Input::Delivered);
    world.listener.handle_input(&world.clock.now(), Input::Waiting);
    world.listener.cancel();
    world.run();
    assert_eq!(world.reported.len(), 2);
    world.closed.sort();
    assert_eq!(world.closed, conns[2..]);
    world.over();
    let before = format!("{:?}", world.listener);
    world.input(Input::Settled(conns[0]));
    world.answer(conns[1]);
    assert_eq!(format!("{:?}", world.listener), before);
}

/// One run with any peers and any program.
struct Trial {
    random: Random,
    places: usize,
    world: World,
    /// How many reported requests the program has taken.
    taken: usize,
    /// Requests that the program has taken and that are not settled.
    undecided: Vec<ConnKey>,
}

impl Trial {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let places = 1 + random.below(24);
        let backlog = 1 + random.below(6);
        Self { random, places, world: World::new(places, backlog), taken: 0, undecided: Vec::new() }
    }

    fn step(&mut self) {
        let Self { random, world, .. } = self;
        let conn = (!world.open.is_empty()).then(|| world.open[random.below(world.open.len())]);
        match (random.below(20), conn) {
            (0..5, _) => {
                let host = 2 + u8::try_from(random.below(3)).unwrap();
                world.connect(peer(host), 1 + random.below(4));
            }
            (5..10, Some(conn)) => {
                let whole = request(if random.one_in(2) { 0x1000 << random.below(3) } else { 0 });
                let part = if random.one_in(3) { random.below(whole.len()) } else { whole.len() };
                world.send(conn, &whole[..part]);
            }
            (10, Some(conn)) => world.input(Input::End { conn }),
            (11, Some(conn)) if world.listener.silent.contains_key(&conn) => {
                world.lose(conn);
                world.input(Input::Failed { conn, why: Refusal::Gone });
            }
            (12, _) => world.refuses = random.one_in(2).then_some(Errno::MFILE),
            (13..15, _) if self.taken < world.reported.len() => {
                let conn = self.take();
                if self.random.one_in(2) {
                    self.world.answer(conn);
                }
            }
            (15, _) if !self.undecided.is_empty() => {
                let conn = self.undecided.swap_remove(random.below(self.undecided.len()));
                world.input(Input::Settled(conn));
            }
            (16, _) => self.reach_deadline(),
            (_, _) => world.pass_ms([0, 1, 10, 150][random.below(4)]),
        }
    }

    /// The program takes one request.
    fn take(&mut self) -> ConnKey {
        let (conn, _) = self.world.reported[self.taken];
        self.taken += 1;
        self.world.input(Input::Delivered);
        self.undecided.push(conn);
        conn
    }

    fn reach_deadline(&mut self) {
        if let Some(deadline) = self.world.listener.poll_timeout() {
            self.world.clock.reach(deadline);
        }
        self.world.pass_ms(0);
    }

    /// The bounds hold. Returns whether places are missing, the program is behind, and the order delays one.
    fn check(&self) -> [bool; 3] {
        let world = &self.world;
        world.check();
        let listener = &world.listener;
        assert_eq!(world.budget.used(), world.open.len());
        assert!(world.budget.used() <= self.places);
        let not_taken = world.reported.len() - self.taken;
        assert_eq!(listener.undelivered, not_taken);
        assert!(listener.reported.len() + listener.answered.len() <= not_taken + self.undecided.len());
        if listener.is_starved() {
            let oldest = listener.silent.values().map(|silent| silent.accepted).min();
            assert!(oldest.is_none_or(|oldest| oldest + GRACE > world.clock.get()));
        }
        [listener.is_starved(), listener.is_behind(), listener.look.is_some()]
    }

    /// Without further connections and with a program that takes its requests, all is over in time.
    fn finish(&mut self) {
        assert!(self.world.reported.iter().all(|(conn, _)| !self.world.closed.contains(conn)));
        self.world.refuses = None;
        self.world.queue.clear();
        for _ in 0..self.world.open.len() + self.world.reported.len() + 40 {
            while self.taken < self.world.reported.len() {
                self.take();
            }
            for conn in self.undecided.drain(..) {
                self.world.input(Input::Settled(conn));
            }
            self.reach_deadline();
        }
        assert!(self.world.listener.reported.is_empty() && self.world.listener.answered.is_empty());
        self.world.over();
    }
}

/// Any peers and any program: the bounds hold, nothing waits for ever, and nothing is left.
#[test]
fn any_order_of_events() {
    let mut seen = [0_usize; 4];
    for seed in 0..1000 {
        let seed = Seed(seed);
        let mut trial = Trial::new(seed.0);
        for _ in 0..300 {
            trial.step();
            for (times, now) in seen.iter_mut().zip(trial.check()) {
                *times += usize::from(now);
            }
        }
        trial.finish();
        seen[3] += trial.world.reported.len();
    }
    assert!(seen.iter().all(|&times| times > 1000), "what is not tried is not tested: {seen:?}");
}
