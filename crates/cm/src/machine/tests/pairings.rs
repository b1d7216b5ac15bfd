//! Each row of the table of [`super::State`], its deadlines, and the bounds of what strangers hold.

use uwarp_wire::introduction::{Cookie, Half, Introduction};

use super::super::testing::{self, Clock};
use super::connecting::{FIRST_PAUSE, FRESH};
use super::*;

/// Of this end's port, and of the peer's.
const PORT: u16 = 20_001;
const PEER_PORT: u16 = 20_002;
const QPN: u32 = (PORT as u32) << 8 | 7;
const PEER: u32 = (PEER_PORT as u32) << 8 | 7;
/// This end listens toward the first peer and connects toward the second one.
const LARGER: &str = "192.0.2.9:0";
const SMALLER: &str = "192.0.2.1:0";
const OWN: &str = "192.0.2.5:0";
const TOKEN: u64 = 0x1122;
const INCARNATION: u64 = 0x3344;
/// The PSN that this end expects, and the one that it begins with.
const EXPECTS: u32 = 0x00AB_CDEF;
const BEGINS: u32 = 0x0012_3456;

struct Bench {
    clock: Clock,
    pairings: Pairings,
    accepted: u16,
}

/// What a request shows.
#[derive(Clone, Copy)]
struct Shown {
    from: &'static str,
    source: u32,
    destination: u32,
    psns: Psns,
    cookie: Option<Cookie>,
}

fn peer_psns() -> Psns {
    Psns { expects: Some(BEGINS), begins: Some(EXPECTS) }
}

fn shown() -> Shown {
    Shown { from: LARGER, source: PEER, destination: QPN, psns: peer_psns(), cookie: None }
}

fn terms(psns: Psns) -> Terms {
    Terms { psns, retry_cnt: 7, rnr_retry: Some(7), min_rnr_timer: 12, placement_acks: true }
}

fn all() -> Psns {
    Psns { expects: Some(EXPECTS), begins: Some(BEGINS) }
}

impl Bench {
    fn with_places(places: usize) -> Self {
        let mut clock = Clock::new();
        clock.pass_ms(1);
        let settings = Settings {
            timeouts: Timeouts::default(),
            policy: testing::responder(),
            crc: true,
            markers: false,
            says_uwarp: true,
            budget: Budget::new(places),
        };
        let mut pairings = Pairings::new(&clock.now(), settings, &[7; 16]);
        pairings.alive(QPN, true);
        Self { clock, pairings, accepted: 0 }
    }

    fn new() -> Self {
        Self::with_places(64)
    }

    fn begin(&mut self, peer: &str) {
        self.begin_as(1, peer, terms(all()));
    }

    fn begin_as(&mut self, moves: u32, peer: &str, terms: Terms) {
        let path = Path { local: OWN.parse().unwrap(), peer: peer.parse().unwrap() };
        let now = self.clock.now();
        self.pairings.begin(&now, (QPN, moves), path, PEER, terms, INCARNATION, TOKEN);
    }

    fn phase(&self) -> &'static str {
        self.pairings.phases().find(|(qpn, ..)| *qpn == QPN).map_or("", |(_, phase, _)| phase)
    }

    fn input(&mut self, input: Input<'_>) {
        self.pairings.handle_input(&self.clock.now(), input);
    }

    fn stream(&mut self, conn: ConnKey, event: StreamEvent) {
        self.input(Input::Stream { conn, event });
    }

    fn actions(&mut self) -> Vec<Action<Infallible>> {
        std::iter::from_fn(|| self.pairings.poll_action()).collect()
    }

    /// The only connection that is closed now, if one is.
    fn closed(&mut self) -> Vec<ConnKey> {
        self.actions()
            .into_iter()
            .filter_map(|action| match action {
                Action::Close { conn, .. } => Some(conn),
                _ => None,
            })
            .collect()
    }

    fn datagrams(&mut self) -> Vec<(SocketAddr, ProofDatagram)> {
        let mut sent = Vec::new();
        while let Some(Transmit::Datagram { route, bytes }) = self.pairings.poll_transmit() {
            sent.push((route.to, datagram::parse_proof(bytes).unwrap()));
        }
        sent
    }

    /// All that is sent on a connection, which takes everything.
    fn sent(&mut self, conn: ConnKey) -> Vec<u8> {
        let mut all = Vec::new();
        while let Some(transmit) = self.pairings.poll_transmit() {
            let Transmit::Bytes { conn: on, bytes } = transmit else { continue };
            let count = bytes.len();
            if on == conn {
                all.extend_from_slice(bytes);
            }
            self.input(Input::Sent { conn: on, bytes: count });
        }
        all
    }

    /// The time moves on to the next deadline; returns how far that was.
    fn wait(&mut self) -> Duration {
        let before = self.clock.get();
        self.clock.reach(self.pairings.next_change().unwrap());
        let now = self.clock.now();
        self.pairings.handle_timeout(&now);
        assert!(self.pairings.next_change().is_none_or(|at| at > now.get()));
        // Repeated, it changes nothing.
        self.pairings.handle_timeout(&now);
        now.get() - before
    }

    fn pass_ms(&mut self, ms: u64) {
        self.clock.pass_ms(ms);
        self.pairings.handle_timeout(&self.clock.now());
    }

    // --- Of the listening end.

    /// A cookie for the owner of this number's port, made now.
    fn cookie(&mut self, from: &str, source: u32) -> Cookie {
        let from = address(from, port_of(source));
        let ask = ProofDatagram { source_qpn: source, destination_qpn: QPN, token: 9, cookie: None };
        let own = OWN.parse::<SocketAddr>().unwrap().ip();
        // Before the move, the first request waits for that.
        let answer = (0..2).find_map(|_| {
            self.input(Input::Datagram { from, to: own, bytes: &ask.to_bytes() });
            self.datagrams().pop()
        });
        let (to, reply) = answer.unwrap();
        assert_eq!((to, reply.token, reply.destination_qpn), (from, 9, source));
        reply.cookie.unwrap()
    }

    /// A connection whose request shows this.
    fn request(&mut self, shown: Shown) -> ConnKey {
        let cookie = shown.cookie.unwrap_or_else(|| self.cookie(shown.from, shown.source));
        let [expects, begins] =
            [shown.psns.expects, shown.psns.begins].map(|psn| psn.map(|psn| Half::Lower.of(psn)));
        let introduction = Introduction {
            source_qpn: shown.source,
            destination_qpn: shown.destination,
            expects,
            begins,
            incarnation: 0x5566,
            cookie,
        };
        self.raw_request(shown.from, &introduction.to_bytes())
    }

    fn raw_request(&mut self, from: &str, private_data: &[u8]) -> ConnKey {
        self.input(Input::Waiting);
        let conn = self
            .actions()
            .into_iter()
            .find_map(|action| if let Action::Accept { conn } = action { Some(conn) } else { None })
            .unwrap();
        self.accepted += 1;
        let ends = Ends { local: address(OWN, PORT), peer: address(from, 50_000 + self.accepted) };
        self.input(Input::Accepted { conn, ends });
        let next = self.actions().into_iter().find_map(|action| match action {
            Action::Accept { conn } => Some(conn),
            _ => None,
        });
        if let Some(conn) = next {
            self.input(Input::NotAccepted { conn, why: None });
        }
        let now = self.clock.now();
        let ask = Handshake::ask(&now, None, testing::initiator(), private_data).unwrap();
        let request = ask.poll_transmit().unwrap().to_vec();
        let mut rest = &request[..];
        while let Want::Bytes(want) = self.pairings.want(conn)
            && !rest.is_empty()
        {
            let (bytes, more) = rest.split_at(want.min(rest.len()));
            rest = more;
            self.input(Input::Bytes { conn, bytes });
        }
        assert!(rest.is_empty(), "the machine reads the whole request");
        conn
    }

    /// The words in which a connection is turned away.
    fn turned_away(&mut self, conn: ConnKey) -> Option<TurnedAway> {
        let reply = self.sent(conn);
        let closed = self.closed();
        assert!(closed.contains(&conn), "it is closed behind the words");
        match outcome(&reply)? {
            Event::Rejected(rejection) => TurnedAway::parse(&rejection.private_data),
            other => panic!("{other:?}"),
        }
    }

    /// The connection that is given to the queue pair.
    fn attached(&mut self, moves: u32) -> ConnKey {
        let actions = self.actions();
        let attach = actions.into_iter().find(|action| !matches!(action, Action::Look { .. }));
        let Some(Action::Attach { conn, to, .. }) = attach else { panic!("no Attach") };
        assert_eq!(to, Recipient::Number { qpn: QPN, moves });
        assert_eq!(self.phase(), "Attaching");
        conn
    }

    /// A stream on a request of the peer.
    fn listen_and_attach(&mut self) -> ConnKey {
        self.begin(LARGER);
        assert!(matches!(self.actions()[..], [Action::Listen]));
        self.clock.pass_ms(1);
        let conn = self.request(shown());
        assert_eq!(self.phase(), "Replying");
        self.sent(conn);
        assert_eq!(self.attached(1), conn);
        self.stream(conn, StreamEvent::Attached);
        assert_eq!(self.phase(), "Attached");
        conn
    }

    // --- Of the connecting end.

    fn give_cookie(&mut self) {
        let cookie = Some(Cookie { made: 1, hash: 2 });
        self.give(SMALLER, PEER_PORT, (PEER, QPN), TOKEN, cookie);
    }

    fn give(&mut self, ip: &str, port: u16, numbers: (u32, u32), token: u64, cookie: Option<Cookie>) {
        let (source_qpn, destination_qpn) = numbers;
        let reply = ProofDatagram { source_qpn, destination_qpn, token, cookie };
        let own = OWN.parse::<SocketAddr>().unwrap().ip();
        self.input(Input::Datagram { from: address(ip, port), to: own, bytes: &reply.to_bytes() });
    }

    /// The request that it sends on the connection that it begins.
    fn asked(&mut self) -> (ConnKey, Vec<u8>) {
        assert_eq!(self.phase(), "Asking");
        let actions = self.actions();
        let Some(Action::Connect { conn, from, to }) = actions.into_iter().next_back() else {
            panic!("no Connect")
        };
        assert_eq!((from, to), (Some(OWN.parse().unwrap()), address(SMALLER, PEER_PORT)));
        self.input(Input::Opened { conn, local: address(OWN, 50_000) });
        (conn, self.sent(conn))
    }

    /// The peer answers a request.
    fn answer(&mut self, conn: ConnKey, request: &[u8], how: impl FnOnce(&Introduction) -> Answer) {
        let now = self.clock.now();
        let mut responder = Handshake::await_request(&now, None, testing::responder(), None);
        let mut rest = request;
        let asked = loop {
            let Want::Bytes(want) = responder.want() else { panic!("a whole request") };
            let (bytes, more) = rest.split_at(want.min(rest.len()));
            rest = more;
            if let Some(Event::Requested(asked)) = responder.handle_input(Input::Bytes { conn, bytes }) {
                break asked;
            }
        };
        let introduction = Introduction::parse(&asked.private_data).unwrap();
        match how(&introduction) {
            Answer::Accept(reply) => {
                responder.accept(&now, testing::terms(), &reply.to_bytes()).unwrap();
            }
            Answer::Reject(why) => responder.reject(&now, &why.to_bytes()).unwrap(),
        }
        let reply = responder.poll_transmit().unwrap().to_vec();
        let mut rest = &reply[..];
        while let Want::Bytes(want) = self.pairings.want(conn)
            && !rest.is_empty()
        {
            let (bytes, more) = rest.split_at(want.min(rest.len()));
            rest = more;
            self.input(Input::Bytes { conn, bytes });
        }
    }

    /// A stream to the peer.
    fn connect_and_attach(&mut self) -> ConnKey {
        self.begin(SMALLER);
        self.give_cookie();
        let (conn, request) = self.asked();
        self.answer(conn, &request, |asked| Answer::Accept(reply_to(asked)));
        assert_eq!(self.attached(1), conn);
        conn
    }
}

enum Answer {
    Accept(Introduction),
    Reject(TurnedAway),
}

/// The peer's.
fn reply_to(asked: &Introduction) -> Introduction {
    Introduction {
        source_qpn: asked.destination_qpn,
        destination_qpn: asked.source_qpn,
        expects: Some(Half::Upper.of(BEGINS)),
        begins: Some(Half::Upper.of(EXPECTS)),
        incarnation: asked.incarnation,
        cookie: Cookie::NONE,
    }
}

fn address(ip: &str, port: u16) -> SocketAddr {
    let mut address: SocketAddr = ip.parse().unwrap();
    address.set_port(port);
    address
}

/// What a reply says.
fn outcome(reply: &[u8]) -> Option<Event> {
    let clock = Clock::new();
    let mut ask = Handshake::ask(&clock.now(), None, testing::initiator(), b"").unwrap();
    let conn = Space::new(99).name();
    let request = ask.poll_transmit().unwrap().len();
    ask.handle_input(Input::Sent { conn, bytes: request });
    let mut rest = reply;
    while let Want::Bytes(want) = ask.want()
        && !rest.is_empty()
    {
        let (bytes, more) = rest.split_at(want.min(rest.len()));
        rest = more;
        if let Some(event) = ask.handle_input(Input::Bytes { conn, bytes }) {
            return Some(event);
        }
    }
    None
}

fn ended() -> StreamEvent {
    StreamEvent::Ended(uwarp_driver::Disconnect::PeerClosed)
}

#[test]
fn the_smaller_end_listens_once_a_port() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    assert!(matches!(bench.actions()[..], [Action::Listen]));
    assert_eq!(bench.phase(), "Waiting");
    bench.pairings.end(QPN);
    bench.begin_as(2, LARGER, terms(all()));
    assert!(bench.actions().is_empty());
    assert_eq!((bench.phase(), bench.pairings.next_change()), ("Waiting", None));
}

/// The system refuses: queue pairs that wait must not wait forever.
#[test]
fn what_could_not_listen_tries_again() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    bench.actions();
    assert_eq!(bench.pairings.refused(QPN), None);
    bench.input(Input::NotListening(rustix::io::Errno::ADDRINUSE));
    assert_eq!(bench.pairings.refused(QPN), Some(rustix::io::Errno::ADDRINUSE), "for its owner");
    assert_eq!(bench.wait(), LONGEST_PAUSE);
    assert!(matches!(bench.actions()[..], [Action::Listen]));
    assert_eq!(bench.pairings.next_change(), None);
    bench.input(Input::NotListening(rustix::io::Errno::ADDRINUSE));
    // Nobody waits any more.
    bench.pairings.end(QPN);
    bench.wait();
    assert!(bench.actions().is_empty());
    assert_eq!(bench.pairings.next_change(), None);
}

#[test]
fn the_larger_end_asks_for_a_cookie_until_it_has_one() {
    let mut bench = Bench::new();
    bench.begin(SMALLER);
    let ask = ProofDatagram { source_qpn: QPN, destination_qpn: PEER, token: TOKEN, cookie: None };
    assert_eq!(bench.datagrams(), [(address(SMALLER, PEER_PORT), ask)]);
    for wait in [50, 100, 200, 400, 500, 500] {
        assert_eq!((bench.wait().as_millis(), bench.phase()), (wait, "AwaitCookie"));
        assert_eq!(bench.datagrams(), [(address(SMALLER, PEER_PORT), ask)]);
    }
    let cookie = Some(Cookie { made: 1, hash: 2 });
    for (ip, port, numbers, token) in [
        (SMALLER, PEER_PORT, (PEER, QPN), TOKEN + 1),
        (LARGER, PEER_PORT, (PEER, QPN), TOKEN),
        (SMALLER, PORT, (PEER, QPN), TOKEN),
        (SMALLER, PEER_PORT, (PEER + 1, QPN), TOKEN),
        (SMALLER, PEER_PORT, (PEER, QPN + 1), TOKEN),
    ] {
        bench.give(ip, port, numbers, token, cookie);
        assert_eq!(bench.phase(), "AwaitCookie", "{ip} {port} {numbers:x?} {token:x}");
    }
    // Meanwhile the TCP port was asked why.
    assert!(matches!(bench.actions()[..], [Action::Connect { .. }, Action::Close { .. }]));
    bench.give(SMALLER, PEER_PORT, (PEER, QPN), TOKEN, cookie);
    let (_, request) = bench.asked();
    assert!(!request.is_empty());
    // The second copy of it.
    bench.give(SMALLER, PEER_PORT, (PEER, QPN), TOKEN, cookie);
    assert!(bench.actions().is_empty());
}

#[test]
fn a_queue_pair_that_is_its_own_peer_connects_to_itself() {
    let mut bench = Bench::new();
    let path = Path { local: OWN.parse().unwrap(), peer: OWN.parse().unwrap() };
    let now = bench.clock.now();
    bench.pairings.begin(&now, (QPN, 1), path, QPN, terms(all()), INCARNATION, TOKEN);
    for refused in [true, false] {
        let actions = bench.actions();
        let [Action::Connect { conn, from, to }] = actions[..] else { panic!("{actions:?}") };
        assert_eq!((from, to), (Some(path.local), path.local));
        if refused {
            // No descriptors: they may come back.
            bench.input(Input::Failed {
                conn,
                why: uwarp_llp::carrier::Refusal::Local(rustix::io::Errno::MFILE),
            });
            assert_eq!((bench.phase(), bench.wait()), ("Paused", FIRST_PAUSE));
        } else {
            bench.input(Input::Opened { conn, local: address(OWN, 50_000) });
            assert_eq!(bench.attached(1), conn);
        }
    }
}

#[test]
fn a_fitting_reply_is_attached_and_others_are_not() {
    let unfit: [fn(&mut Introduction); 5] = [
        |reply| reply.incarnation += 1,
        |reply| reply.source_qpn += 1,
        |reply| reply.destination_qpn += 1,
        |reply| reply.begins = Some(Half::Upper.of(EXPECTS) ^ 1),
        |reply| (reply.begins, reply.expects) = (None, None),
    ];
    let mut bench = Bench::new();
    bench.begin(SMALLER);
    bench.give_cookie();
    for (n, change) in unfit.into_iter().enumerate() {
        let (conn, request) = bench.asked();
        bench.answer(conn, &request, |asked| {
            let mut reply = reply_to(asked);
            change(&mut reply);
            Answer::Accept(reply)
        });
        assert_eq!((bench.phase(), bench.closed()), ("Paused", vec![conn]), "{n}");
        assert_eq!(bench.wait(), (FIRST_PAUSE * (1 << n)).min(LONGEST_PAUSE));
    }
    let (conn, request) = bench.asked();
    let shows = {
        let mut shown = None;
        bench.answer(conn, &request, |asked| {
            shown = Some(*asked);
            Answer::Accept(reply_to(asked))
        });
        shown.unwrap()
    };
    assert_eq!((shows.source_qpn, shows.destination_qpn, shows.incarnation), (QPN, PEER, INCARNATION));
    assert_eq!(shows.cookie, Cookie { made: 1, hash: 2 });
    assert_eq!(shows.expects, Some(Half::Lower.of(EXPECTS)));
    assert_eq!(bench.attached(1), conn);
    assert_eq!(bench.pairings.want(conn), Want::Nothing, "the next byte is the stream's");
}

#[test]
fn a_rejection_needs_a_new_cookie_at_once_for_the_first_time() {
    let mut bench = Bench::new();
    bench.begin(SMALLER);
    for n in 0..3 {
        bench.datagrams();
        bench.give_cookie();
        let (conn, request) = bench.asked();
        bench.answer(conn, &request, |_| Answer::Reject(TurnedAway::Stale));
        assert_eq!(bench.closed(), [conn]);
        if n > 0 {
            assert_eq!(bench.phase(), "Paused");
            bench.wait();
        }
        assert_eq!((bench.phase(), bench.datagrams().len()), ("AwaitCookie", 1), "{n}");
    }
}

#[test]
fn a_failure_pauses_and_an_old_cookie_is_not_shown() {
    let mut bench = Bench::new();
    bench.begin(SMALLER);
    bench.give_cookie();
    let (conn, _) = bench.asked();
    let unreachable = uwarp_llp::carrier::Refusal::Unreachable(rustix::io::Errno::TIMEDOUT);
    bench.input(Input::Failed { conn, why: unreachable });
    assert_eq!((bench.phase(), bench.closed()), ("Paused", vec![]));
    assert_eq!(bench.wait(), FIRST_PAUSE);
    let (conn, _) = bench.asked();
    bench.clock.pass(FRESH);
    bench.input(Input::Failed { conn, why: unreachable });
    bench.wait();
    assert_eq!(bench.phase(), "AwaitCookie");
}

#[test]
fn a_proven_request_that_fits_is_accepted() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    bench.clock.pass_ms(1);
    let conn = bench.request(shown());
    assert_eq!((bench.phase(), bench.pairings.want(conn)), ("Replying", Want::End));
    let reply = bench.sent(conn);
    let Some(Event::Accepted(said)) = outcome(&reply) else { panic!("no acceptance") };
    let reply = Introduction::parse(&said.private_data).unwrap();
    assert_eq!((reply.source_qpn, reply.destination_qpn, reply.incarnation), (QPN, PEER, 0x5566));
    assert_eq!((reply.cookie, reply.begins), (Cookie::NONE, Some(Half::Upper.of(BEGINS))));
    bench.actions().retain(|action| !matches!(action, Action::Listen));
    assert_eq!(bench.phase(), "Attaching");
}

#[test]
fn a_reply_that_fails_makes_room_for_the_next_one() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    bench.clock.pass_ms(1);
    let first = bench.request(shown());
    let second = bench.request(shown());
    assert_eq!((bench.phase(), bench.pairings.held()), ("Replying", 1));
    bench.input(Input::End { conn: first });
    assert_eq!((bench.phase(), bench.pairings.held()), ("Replying", 0));
    bench.sent(second);
    assert_eq!((bench.phase(), bench.pairings.want(second)), ("Attaching", Want::Nothing));
}

#[test]
fn a_reply_that_nobody_takes_has_a_limit() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    bench.clock.pass_ms(1);
    let conn = bench.request(shown());
    bench.input(Input::Sent { conn, bytes: 0 });
    assert_eq!(bench.wait(), Timeouts::default().request);
    assert_eq!((bench.phase(), bench.closed()), ("Waiting", vec![conn]));
}

#[test]
fn what_does_not_fit_is_rejected_in_words() {
    let mut bench = Bench::new();
    let old = bench.cookie(LARGER, PEER);
    bench.pass_ms(1);
    bench.begin(LARGER);
    bench.clock.pass_ms(1);
    let other = PEER + 1;
    for (shown, why) in [
        (Shown { cookie: Some(Cookie::NONE), ..shown() }, TurnedAway::NoProof),
        (Shown { cookie: Some(old), from: SMALLER, ..shown() }, TurnedAway::NoProof),
        (Shown { destination: QPN + 1, ..shown() }, TurnedAway::NoQueuePair),
        (Shown { cookie: Some(old), ..shown() }, TurnedAway::Stale),
        (Shown { source: other, ..shown() }, TurnedAway::AnotherPeer),
        (Shown { from: SMALLER, ..shown() }, TurnedAway::AnotherPeer),
        (Shown { psns: Psns::default(), ..shown() }, TurnedAway::Psn),
    ] {
        let conn = bench.request(shown);
        assert_eq!((bench.turned_away(conn), bench.phase()), (Some(why), "Waiting"));
        assert_eq!(bench.pairings.held(), 0);
    }
    let mut version = Introduction { incarnation: 1, ..reply_to(&introduction()) }.to_bytes();
    version[3] = 1;
    let conn = bench.raw_request(LARGER, &version);
    assert_eq!(bench.turned_away(conn), Some(TurnedAway::Version));
    // It does not come from a queue pair.
    let conn = bench.raw_request(LARGER, b"GET / HTTP/1.1");
    assert!(bench.sent(conn).is_empty());
    assert_eq!(bench.closed(), [conn]);
}

fn introduction() -> Introduction {
    Introduction {
        source_qpn: PEER,
        destination_qpn: QPN,
        expects: None,
        begins: None,
        incarnation: 0,
        cookie: Cookie::NONE,
    }
}

#[test]
fn a_peer_that_shows_wrong_psns_is_rejected_unread_for_a_while() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    bench.clock.pass_ms(1);
    let wrong = Psns { begins: Some(EXPECTS ^ 1), ..peer_psns() };
    let conn = bench.request(Shown { psns: wrong, ..shown() });
    assert_eq!(bench.turned_away(conn), Some(TurnedAway::Psn));
    let conn = bench.request(shown());
    assert_eq!(bench.turned_away(conn), Some(TurnedAway::Psn), "also what fits");
    bench.pass_ms(500);
    bench.request(shown());
    assert_eq!(bench.phase(), "Replying");
}

#[test]
fn a_stream_counts_once_it_is_used() {
    for used in [true, false] {
        let mut bench = Bench::new();
        let conn = bench.listen_and_attach();
        bench.stream(conn, StreamEvent::Established);
        assert_eq!(bench.phase(), "Attached");
        if used {
            bench.stream(conn, StreamEvent::Used);
            assert_eq!(bench.phase(), "Up");
        }
        bench.stream(conn, ended());
        assert_eq!((bench.phase(), bench.closed()), (if used { "Over" } else { "Waiting" }, vec![]));
        assert_eq!(bench.pairings.next_change(), None);
    }
    let mut bench = Bench::new();
    let conn = bench.connect_and_attach();
    // The answer of the queue pair may come last.
    bench.stream(conn, ended());
    bench.stream(conn, StreamEvent::Attached);
    assert_eq!(bench.phase(), "Paused");
    bench.wait();
    assert_eq!(bench.phase(), "Asking");
}

#[test]
fn a_connection_that_the_queue_pair_refuses_is_closed() {
    let refused = || StreamEvent::Refused(uwarp_rnic::VerbsError::Invalid("another move"));
    let mut bench = Bench::new();
    let conn = bench.connect_and_attach();
    bench.stream(conn, refused());
    assert_eq!((bench.phase(), bench.closed()), ("Over", vec![conn]));
    assert_eq!(bench.pairings.next_change(), None);
    // Also if its move is over meanwhile, or another one has begun.
    for anew in [true, false] {
        let mut bench = Bench::new();
        let conn = bench.connect_and_attach();
        if anew {
            bench.begin_as(2, SMALLER, terms(all()));
        } else {
            bench.pairings.forget(&bench.clock.now(), QPN);
        }
        bench.stream(conn, refused());
        assert_eq!(bench.closed(), [conn]);
    }
}

#[test]
fn end_and_forget_leave_nothing() {
    // In each state.
    for state in 0..8 {
        let mut bench = Bench::new();
        let mut open = Vec::new();
        match state {
            0 => bench.begin(LARGER),
            1 => {
                bench.begin(LARGER);
                bench.clock.pass_ms(1);
                open.push(bench.request(shown()));
                open.push(bench.request(shown()));
            }
            2 => bench.begin(SMALLER),
            3 => {
                bench.begin(SMALLER);
                bench.give_cookie();
                open.push(bench.asked().0);
            }
            4 => {
                bench.begin(SMALLER);
                bench.give_cookie();
                let (conn, _) = bench.asked();
                bench.input(Input::Failed { conn, why: uwarp_llp::carrier::Refusal::Gone });
                bench.actions();
            }
            5 => _ = bench.connect_and_attach(),
            6 => {
                bench.listen_and_attach();
                open.push(bench.request(shown()));
            }
            _ => {
                let conn = bench.listen_and_attach();
                bench.stream(conn, StreamEvent::Used);
                bench.stream(conn, ended());
            }
        }
        bench.pairings.forget(&bench.clock.now(), QPN);
        for conn in &open {
            bench.sent(*conn);
        }
        let mut closed = bench.closed();
        closed.sort();
        open.sort();
        assert_eq!(closed, open, "state {state}");
        assert_eq!((bench.phase(), bench.pairings.held()), ("", 0));
        assert_eq!(bench.pairings.settings.budget.used(), 0, "state {state}");
        bench.pass_ms(60_000);
        assert_eq!(bench.pairings.next_change(), None, "state {state}");
    }
}

#[test]
fn early_requests_wait_for_the_move_and_bounded() {
    let mut bench = Bench::new();
    bench.listen_and_attach();
    bench.clock.pass_ms(1);
    // A newer one of the same peer replaces the older one.
    let first = bench.request(shown());
    assert_eq!(bench.pairings.want(first), Want::End);
    let second = bench.request(shown());
    assert_eq!(bench.turned_away(first), Some(TurnedAway::Crowded));
    // Four for a number.
    let others: Vec<ConnKey> =
        (1..=3).map(|n| bench.request(Shown { source: PEER + n, ..shown() })).collect();
    assert_eq!(bench.pairings.held(), 4);
    let fifth = bench.request(Shown { source: PEER + 9, ..shown() });
    assert_eq!(bench.turned_away(second), Some(TurnedAway::Crowded));
    // One hangs up.
    bench.input(Input::End { conn: others[0] });
    assert_eq!((bench.closed(), bench.pairings.held()), (vec![others[0]], 3));
    // The others have their time.
    assert_eq!(bench.wait(), EARLY_LIMIT);
    assert_eq!(bench.pairings.early().count(), 0);
    assert_eq!(bench.turned_away(others[1]), Some(TurnedAway::Crowded));
    bench.sent(fifth);
    assert_eq!((bench.pairings.held(), bench.pairings.settings.budget.used()), (0, 0));
}

#[test]
fn early_requests_with_older_cookies_are_rejected_at_the_move() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    bench.actions();
    bench.pairings.end(QPN);
    bench.clock.pass_ms(1);
    let conn = bench.request(shown());
    assert_eq!(bench.pairings.held(), 1);
    bench.clock.pass_ms(1);
    bench.begin_as(2, LARGER, terms(all()));
    assert_eq!(bench.turned_away(conn), Some(TurnedAway::Stale));
    assert_eq!(bench.phase(), "Waiting");
}

/// Every tenth peer got a cookie before the move, and connected in vain with it.
#[test]
fn a_cookie_that_is_asked_for_before_the_move_comes_with_it_and_counts() {
    let mut bench = Bench::new();
    let [peer, stranger] = [PEER, PEER + 0x100].map(|source| (source, address(LARGER, port_of(source))));
    let ask = |bench: &mut Bench, (source, from): (u32, SocketAddr)| {
        let ask = ProofDatagram { source_qpn: source, destination_qpn: QPN, token: 9, cookie: None };
        let to = OWN.parse::<SocketAddr>().unwrap().ip();
        bench.input(Input::Datagram { from, to, bytes: &ask.to_bytes() });
        bench.datagrams()
    };
    assert_eq!((ask(&mut bench, stranger), ask(&mut bench, peer)), (vec![], vec![]));
    bench.clock.pass_ms(1);
    bench.begin(LARGER);
    bench.clock.pass_ms(1);
    let now = bench.clock.now();
    bench.pairings.begun(&now, QPN);
    let answers = bench.datagrams();
    assert_eq!(answers.iter().map(|(to, _)| *to).collect::<Vec<_>>(), [peer.1], "the peer's alone");
    bench.request(Shown { cookie: answers[0].1.cookie, ..shown() });
    assert_eq!(bench.phase(), "Replying");
}

/// Somebody who asks in the peer's place, or the peer whose program is late, gets it at once.
#[test]
fn a_cookie_that_is_asked_for_twice_comes_before_the_move() {
    let mut bench = Bench::new();
    bench.request(shown());
    assert_eq!(bench.pairings.held(), 1, "it waits early");
}

/// Their words are sent, too.
#[test]
fn early_requests_make_room_for_new_connections() {
    let mut bench = Bench::with_places(3);
    bench.listen_and_attach();
    let early: Vec<ConnKey> = (1..=3).map(|n| bench.request(Shown { source: PEER + n, ..shown() })).collect();
    assert_eq!(bench.pairings.held(), 3);
    let cookie = bench.cookie(LARGER, PEER + 4);
    bench.input(Input::Waiting);
    assert_eq!(bench.pairings.early().count(), 2);
    let reply = bench.sent(early[0]);
    let Some(Event::Rejected(rejection)) = outcome(&reply) else { panic!("no words") };
    assert_eq!(TurnedAway::parse(&rejection.private_data), Some(TurnedAway::Crowded));
    let actions = bench.actions();
    let closed = |action: &Action<_>| matches!(action, Action::Close { conn, .. } if *conn == early[0]);
    assert!(actions.iter().any(closed));
    assert!(actions.iter().any(|action| matches!(action, Action::Accept { .. })));
    let _ = cookie;
}

#[test]
fn cookies_for_ports_that_nobody_names_are_limited() {
    let mut bench = Bench::new();
    bench.begin(LARGER);
    let ask = |bench: &mut Bench, from: SocketAddr| {
        let source_qpn = u32::from(from.port()) << 8;
        let ask = ProofDatagram { source_qpn, destination_qpn: QPN, token: 1, cookie: None };
        let own = OWN.parse::<SocketAddr>().unwrap().ip();
        bench.input(Input::Datagram { from, to: own, bytes: &ask.to_bytes() });
        bench.datagrams().len()
    };
    let answers: usize = (0..1500).map(|_| ask(&mut bench, address("198.51.100.1:0", 7))).sum();
    assert_eq!(answers, 1000);
    assert_eq!(ask(&mut bench, address(LARGER, PEER_PORT)), 1, "the peer's are not");
    bench.pass_ms(1000);
    assert_eq!(ask(&mut bench, address("198.51.100.1:0", 7)), 1);
    // From another port than that of the number that it names.
    let other = ProofDatagram { source_qpn: PEER, destination_qpn: QPN, token: 1, cookie: None };
    let own = OWN.parse::<SocketAddr>().unwrap().ip();
    bench.input(Input::Datagram { from: address(LARGER, PORT), to: own, bytes: &other.to_bytes() });
    assert!(bench.datagrams().is_empty());
}

#[test]
fn a_psn_that_is_said_late_is_shown_from_then_on() {
    let mut bench = Bench::new();
    bench.begin_as(1, LARGER, terms(Psns { expects: Some(EXPECTS), begins: None }));
    bench.clock.pass_ms(1);
    // The peer is in RTR, too: nothing is known to both.
    let conn = bench.request(Shown { psns: Psns { begins: None, ..peer_psns() }, ..shown() });
    assert_eq!(bench.turned_away(conn), Some(TurnedAway::Psn));
    bench.pairings.terms(QPN, terms(all()));
    bench.request(Shown { psns: Psns { begins: None, ..peer_psns() }, ..shown() });
    assert_eq!(bench.phase(), "Replying");
}

/// A queue pair that fails on its own ends the move that it failed in, and no later one.
#[test]
fn a_connecting_end_is_given_up_by_its_move() {
    let mut bench = Bench::new();
    bench.begin_as(1, SMALLER, terms(all()));
    assert_eq!(bench.pairings.due(&bench.clock.now()), []);
    bench.clock.reach(bench.pairings.next_change().unwrap());
    assert_eq!(bench.pairings.due(&bench.clock.now()), [(QPN, 1)]);
    bench.begin_as(2, SMALLER, terms(all()));
    bench.pairings.give_up(QPN, 1);
    assert!(bench.pairings.next_change().is_some(), "the second one goes on");
    bench.pairings.give_up(QPN, 2);
    assert_eq!(bench.pairings.next_change(), None);
}

/// Peers of another version try again and again, and all queue pairs of one port do.
#[test]
fn the_log_speaks_of_a_version_once_and_a_port_is_asked_in_turn() {
    let now = Clock::new().get();
    let later = |seconds| now + Duration::from_secs(seconds);
    let mut named = Named::default();
    assert_eq!([now, now, later(1), later(1)].map(|at| named.may_ask_why(at)), [true, false, true, false]);
    assert_eq!([named.say_version(), named.say_version()], [true, false]);
    assert!(!named.may_ask_why(later(9)), "it is known why");
}
