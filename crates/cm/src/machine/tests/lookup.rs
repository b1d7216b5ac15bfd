//! Each row of the two tables, and lookups over a network that loses, doubles, delays and corrupts.

use super::super::Space;
use super::super::testing::{Clock, Random, Seed};
use super::*;

/// `RDMA_PS_UDP` on the wire.
const UDP: u16 = 0x0111;
const KEY: [u8; 16] = [3; 16];
const PATIENCE: Duration = Duration::from_secs(60);

fn server_at() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], 7471))
}

fn client_at(number: usize) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 2], 10_000 + u16::try_from(number).unwrap()))
}

fn client(clock: &Clock, transaction: u32, patience: Duration) -> Client {
    let lookup =
        Lookup { server: server_at(), port_space: UDP, transaction, private_data: b"question", patience };
    Client::new(&clock.now(), &lookup).unwrap()
}

/// All that a machine sends now, and where to.
fn sent(machine: &mut impl Machine) -> Vec<(Route, Vec<u8>)> {
    let mut all = Vec::new();
    while let Some(Transmit::Datagram { route, bytes }) = machine.poll_transmit() {
        all.push((route, bytes.to_vec()));
    }
    all
}

fn reports<M: Machine>(machine: &mut M) -> Vec<M::Report> {
    std::iter::from_fn(|| machine.poll_action())
        .map(|action| match action {
            Action::Report(report) => report,
            _ => panic!("an action that lookups do not have"),
        })
        .collect()
}

/// The one Request that a client sends now, as its cookie.
fn request_of(client: &mut Client) -> u64 {
    let all = sent(client);
    let [(route, bytes)] = &all[..] else { panic!("not one Request: {all:?}") };
    assert_eq!(*route, Route { to: server_at(), from: None });
    let datagram = Datagram::parse(bytes).unwrap();
    assert!(datagram.is_intact());
    let request = Request::parse(&datagram).unwrap();
    assert_eq!((request.transaction, request.port_space, request.service_port), (7, UDP, 7471));
    assert_eq!(request.private_data, b"question");
    request.cookie
}

fn reply_bytes(transaction: u32, status: Status, cookie: u64) -> Vec<u8> {
    let (qpn, qkey) = if status == Status::Success { (5, 6) } else { (0, 0) };
    let reply = Reply { transaction, qpn, qkey, status, cookie, private_data: b"data" };
    let mut bytes = vec![0; reply.buffer_len()];
    reply.emit(&mut bytes);
    bytes
}

fn receive(machine: &mut impl Machine, clock: &Clock, from: SocketAddr, bytes: &[u8]) {
    machine.handle_input(&clock.now(), Input::Datagram { from, to: server_at().ip(), bytes });
}

/// Nothing is sent, reported or waited for, whatever comes.
fn is_over(client: &mut Client, clock: &Clock) {
    for _ in 0..2 {
        assert_eq!((client.poll_timeout(), sent(client).len(), reports(client)), (None, 0, vec![]));
        client.handle_timeout(&clock.now());
        client.handle_input(&clock.now(), Input::NoListener);
        receive(client, clock, server_at(), &reply_bytes(7, Status::Success, 0));
    }
}

#[test]
fn a_reply_ends_a_lookup() {
    let data = b"data".to_vec();
    for (status, found) in [
        (Status::Success, Found::QueuePair { qpn: 5, qkey: 6, private_data: data.clone() }),
        (Status::Rejected, Found::Refused(Status::Rejected, data.clone())),
        (Status::Unsupported, Found::Refused(Status::Unsupported, data.clone())),
        (Status::NoQueuePair, Found::Refused(Status::NoQueuePair, data.clone())),
        (Status::Unknown(77), Found::Refused(Status::Unknown(77), data.clone())),
    ] {
        let clock = Clock::new();
        let mut client = client(&clock, 7, PATIENCE);
        assert_eq!(request_of(&mut client), 0);
        receive(&mut client, &clock, server_at(), &reply_bytes(7, status, 0));
        assert_eq!(reports(&mut client), [found]);
        is_over(&mut client, &clock);
    }
}

#[test]
fn other_datagrams_change_nothing() {
    let mut clock = Clock::new();
    let mut client = client(&clock, 7, PATIENCE);
    request_of(&mut client);
    let good = reply_bytes(7, Status::Success, 0);
    let mut corrupt = good.clone();
    corrupt[30] ^= 1;
    let request = sent(&mut self::client(&clock, 7, PATIENCE)).remove(0).1;
    let before = client.poll_timeout();
    for bytes in [&b""[..], b"noise", &good[..40], &corrupt, &request, &reply_bytes(8, Status::Success, 0)] {
        receive(&mut client, &clock, server_at(), bytes);
    }
    let conn = Space::new(0).name();
    for input in [Input::Waiting, Input::Delivered, Input::End { conn }, Input::Unpolled(true)] {
        client.handle_input(&clock.now(), input);
    }
    assert_eq!((sent(&mut client).len(), reports(&mut client), client.poll_timeout()), (0, vec![], before));
    assert_eq!(client.want(conn), Want::Nothing);
    clock.pass_ms(50);
    client.handle_timeout(&clock.now());
    assert_eq!(request_of(&mut client), 0);
}

#[test]
fn a_request_is_repeated_after_growing_pauses() {
    let mut clock = Clock::new();
    let mut client = client(&clock, 7, PATIENCE);
    request_of(&mut client);
    for pause in [50, 100, 200, 400, 800, 1600, 2000, 2000, 2000] {
        let deadline = clock.get() + Duration::from_millis(pause);
        assert_eq!(client.poll_timeout(), Some(deadline));
        clock.reach(deadline - Duration::from_nanos(1));
        client.handle_timeout(&clock.now());
        assert_eq!(sent(&mut client), [], "early");
        clock.reach(deadline);
        client.handle_timeout(&clock.now());
        client.handle_timeout(&clock.now());
        assert_eq!(request_of(&mut client), 0);
    }
}

#[test]
fn the_first_cookie_is_returned_at_once_and_further_ones_in_time() {
    let mut clock = Clock::new();
    let mut client = client(&clock, 7, PATIENCE);
    assert_eq!(request_of(&mut client), 0);
    receive(&mut client, &clock, server_at(), &reply_bytes(7, Status::CookieRequired, 11));
    assert_eq!(request_of(&mut client), 11);
    // The answer to a Request that was sent twice, and one with another cookie.
    for cookie in [11, 12, 12] {
        receive(&mut client, &clock, server_at(), &reply_bytes(7, Status::CookieRequired, cookie));
        assert_eq!((sent(&mut client), reports(&mut client)), (vec![], vec![]));
    }
    clock.pass_ms(50);
    client.handle_timeout(&clock.now());
    assert_eq!(request_of(&mut client), 12);
    receive(&mut client, &clock, server_at(), &reply_bytes(7, Status::Success, 0));
    assert_eq!(reports(&mut client).len(), 1);
    is_over(&mut client, &clock);
}

/// A server cannot make a client send as often as it likes.
#[test]
fn a_cookie_of_zero_is_returned_once() {
    let clock = Clock::new();
    let mut client = client(&clock, 7, PATIENCE);
    request_of(&mut client);
    let zero = reply_bytes(7, Status::CookieRequired, 0);
    receive(&mut client, &clock, server_at(), &zero);
    assert_eq!(request_of(&mut client), 0);
    receive(&mut client, &clock, server_at(), &zero);
    assert_eq!(sent(&mut client), []);
}

#[test]
fn a_missing_listener_is_believed_after_a_while() {
    let mut clock = Clock::new();
    let mut client = client(&clock, 7, PATIENCE);
    client.handle_input(&clock.now(), Input::NoListener);
    clock.pass_ms(349);
    client.handle_input(&clock.now(), Input::NoListener);
    assert_eq!(reports(&mut client), []);
    clock.pass_ms(1);
    client.handle_input(&clock.now(), Input::NoListener);
    client.handle_input(&clock.now(), Input::NoListener);
    assert_eq!(reports(&mut client), [Found::Absent]);
    is_over(&mut client, &clock);
}

#[test]
fn patience_has_an_end() {
    let mut clock = Clock::new();
    let mut client = client(&clock, 7, Duration::from_millis(120));
    let begun = clock.get();
    clock.pass_ms(50);
    client.handle_timeout(&clock.now());
    assert_eq!(client.poll_timeout(), Some(begun + Duration::from_millis(120)));
    clock.pass_ms(69);
    client.handle_timeout(&clock.now());
    assert_eq!(reports(&mut client), []);
    clock.pass_ms(1);
    client.handle_timeout(&clock.now());
    client.handle_timeout(&clock.now());
    assert_eq!(reports(&mut client), [Found::Silence]);
    is_over(&mut client, &clock);
    // As long as a clock can hold, and longer.
    assert!(self::client(&clock, 7, Duration::MAX).poll_timeout().is_some());
}

#[test]
fn a_cancelled_lookup_reports_nothing() {
    let clock = Clock::new();
    let mut fresh = client(&clock, 7, PATIENCE);
    let mut found = client(&clock, 7, PATIENCE);
    receive(&mut found, &clock, server_at(), &reply_bytes(7, Status::Success, 0));
    for client in [&mut fresh, &mut found] {
        client.cancel();
        is_over(client, &clock);
    }
}

#[test]
fn too_much_private_data_is_refused() {
    let clock = Clock::new();
    let mut lookup = Lookup {
        server: server_at(),
        port_space: UDP,
        transaction: 7,
        private_data: &[0; 180],
        patience: PATIENCE,
    };
    assert!(Client::new(&clock.now(), &lookup).is_ok());
    lookup.private_data = &[0; 181];
    assert!(matches!(Client::new(&clock.now(), &lookup), Err(CmError::Invalid(_))));
}

fn server(clock: &Clock, backlog: usize) -> Server {
    Server::new(&clock.now(), &KEY, UDP, backlog)
}

/// A client's Request, as its bytes.
fn request_bytes(transaction: u32, port_space: u16, cookie: u64) -> Vec<u8> {
    let request = Request { transaction, port_space, service_port: 7471, cookie, private_data: b"hi" };
    let mut bytes = vec![0; request.buffer_len()];
    request.emit(&mut bytes);
    bytes
}

fn ask(server: &mut Server, clock: &Clock, number: usize, transaction: u32, cookie: u64) {
    receive(server, clock, client_at(number), &request_bytes(transaction, UDP, cookie));
}

/// The Replies that a server sends now, all of them to this client: status, cookie.
fn replies(server: &mut Server, number: usize) -> Vec<(Status, u64)> {
    let shortest = request_bytes(0, UDP, 0).len();
    let read = |(route, bytes): (Route, Vec<u8>)| {
        assert_eq!(route, Route { to: client_at(number), from: Some(server_at().ip()) });
        assert!(bytes.len() <= shortest, "no answer is longer than its question");
        let datagram = Datagram::parse(&bytes).unwrap();
        assert!(datagram.is_intact());
        let reply = Reply::parse(&datagram).unwrap();
        (reply.status, reply.cookie)
    };
    sent(server).into_iter().map(read).collect()
}

fn asked(server: &mut Server) -> Question {
    let all = reports(server);
    let [Asked { question, private_data }] = &all[..] else { panic!("not one Request: {all:?}") };
    assert_eq!(private_data, b"hi");
    *question
}

#[test]
fn a_repeated_request_is_one_question() {
    let clock = Clock::new();
    let mut server = server(&clock, 4);
    ask(&mut server, &clock, 1, 7, 0);
    ask(&mut server, &clock, 1, 7, 0);
    let question = asked(&mut server);
    assert_eq!((question.from, question.to), (client_at(1), server_at().ip()));
    assert_eq!(replies(&mut server, 1), []);
    let too_long = [0; 137];
    assert!(matches!(server.answer(&question, (5, 6), &too_long), Err(CmError::Invalid(_))));
    assert!(matches!(server.refuse(&question, &too_long), Err(CmError::Invalid(_))));
    assert_eq!(replies(&mut server, 1), []);
    server.answer(&question, (5, 6), &[0; 136]).unwrap();
    let first = sent(&mut server);
    ask(&mut server, &clock, 1, 7, 99);
    assert_eq!(sent(&mut server), first, "alike");
    // Another client's, and another of this client.
    ask(&mut server, &clock, 2, 7, 0);
    let other = asked(&mut server);
    server.refuse(&other, b"no").unwrap();
    assert_eq!(replies(&mut server, 2), [(Status::Rejected, 0)]);
    ask(&mut server, &clock, 1, 8, 0);
    asked(&mut server);
    assert_eq!(server.poll_timeout(), None);
}

#[test]
fn other_datagrams_are_no_questions() {
    let clock = Clock::new();
    let mut server = server(&clock, 4);
    let good = request_bytes(7, UDP, 0);
    let mut corrupt = good.clone();
    corrupt[60] ^= 1;
    for bytes in [&b""[..], b"noise", &good[..100], &corrupt, &reply_bytes(7, Status::Success, 0)] {
        receive(&mut server, &clock, client_at(1), bytes);
    }
    server.handle_input(&clock.now(), Input::NoListener);
    server.handle_input(&clock.now(), Input::Waiting);
    server.handle_timeout(&clock.now());
    assert_eq!((sent(&mut server), reports(&mut server)), (vec![], vec![]));
    for _ in 0..2 {
        receive(&mut server, &clock, client_at(1), &request_bytes(7, 2, 0));
        assert_eq!(replies(&mut server, 1), [(Status::Unsupported, 0)]);
    }
    assert_eq!((reports(&mut server), server.remembered.len()), (vec![], 0));
    assert_eq!(server.want(Space::new(0).name()), Want::Nothing);
}

#[test]
fn a_busy_server_wants_its_cookie_back_before_it_remembers() {
    let mut clock = Clock::new();
    let mut server = server(&clock, 4);
    // Half of the backlog.
    for transaction in [1, 2] {
        ask(&mut server, &clock, 1, transaction, 0);
        asked(&mut server);
    }
    ask(&mut server, &clock, 1, 3, 0);
    let [(Status::CookieRequired, cookie)] = replies(&mut server, 1)[..] else { panic!("no cookie") };
    assert_ne!(cookie, 0);
    // For another transaction, of another client, changed.
    for (number, transaction, cookie) in [(1, 4, cookie), (2, 3, cookie), (1, 3, cookie ^ 2)] {
        ask(&mut server, &clock, number, transaction, cookie);
        assert!(matches!(replies(&mut server, number)[..], [(Status::CookieRequired, _)]));
    }
    assert_eq!((reports(&mut server), server.remembered.len()), (vec![], 2));
    // At its limit, and returned again.
    clock.pass(Duration::from_secs(64));
    ask(&mut server, &clock, 1, 3, cookie);
    ask(&mut server, &clock, 1, 3, 0);
    asked(&mut server);
    assert_eq!(replies(&mut server, 1), []);
    // Expired, for another one.
    clock.pass(Duration::from_secs(64));
    ask(&mut server, &clock, 1, 4, 0);
    let [(Status::CookieRequired, cookie)] = replies(&mut server, 1)[..] else { panic!("no cookie") };
    clock.pass(Duration::from_secs(128));
    ask(&mut server, &clock, 1, 4, cookie);
    assert!(matches!(replies(&mut server, 1)[..], [(Status::CookieRequired, _)]));
    assert_eq!(reports(&mut server), []);
}

#[test]
fn a_full_backlog_is_silent() {
    let clock = Clock::new();
    let mut server = server(&clock, 1);
    let ask_with_cookie = |server: &mut Server, transaction| {
        ask(server, &clock, 1, transaction, 0);
        let [(Status::CookieRequired, cookie)] = replies(server, 1)[..] else { panic!("no cookie") };
        ask(server, &clock, 1, transaction, cookie);
        assert_eq!(replies(server, 1), []);
    };
    ask(&mut server, &clock, 1, 1, 0);
    let question = asked(&mut server);
    ask_with_cookie(&mut server, 2);
    assert_eq!(reports(&mut server), []);
    // An answer makes room.
    server.answer(&question, (5, 6), b"").unwrap();
    assert_eq!(replies(&mut server, 1), [(Status::Success, 0)]);
    ask(&mut server, &clock, 1, 2, 0);
    asked(&mut server);
}

/// Answered ones go first: the program still has the others, and each would be reported again.
#[test]
fn memory_is_bounded_and_keeps_what_waits() {
    let clock = Clock::new();
    let mut server = server(&clock, usize::MAX);
    assert_eq!(server.backlog, REMEMBERED / 2);
    let proof = Proof::new(&clock.now(), &KEY);
    ask(&mut server, &clock, 1, 0, 0);
    let first = asked(&mut server);
    for transaction in 1..2 * u32::try_from(REMEMBERED).unwrap() {
        let remembered = server.remembered.len();
        assert!(remembered <= REMEMBERED);
        ask(&mut server, &clock, 1, transaction, 0);
        // Although none but the first one waits.
        let busy = matches!(replies(&mut server, 1)[..], [(Status::CookieRequired, _)]);
        assert_eq!(busy, remembered >= REMEMBERED / 2);
        if busy {
            let cookie = proof.make_short(&clock.now(), client_at(1), &transaction.to_be_bytes());
            ask(&mut server, &clock, 1, transaction, cookie);
        }
        let question = asked(&mut server);
        server.answer(&question, (5, 6), b"").unwrap();
        assert_eq!(replies(&mut server, 1), [(Status::Success, 0)]);
    }
    assert_eq!(server.remembered.len(), REMEMBERED);
    ask(&mut server, &clock, 1, 0, 0);
    assert_eq!((replies(&mut server, 1), reports(&mut server)), (vec![], vec![]), "it still waits");
    server.answer(&first, (5, 6), b"").unwrap();
    assert_eq!(replies(&mut server, 1), [(Status::Success, 0)]);
    // One that was forgotten is still answered.
    let forgotten = Question { transaction: 1, ..first };
    server.answer(&forgotten, (5, 6), b"").unwrap();
    assert_eq!(replies(&mut server, 1), [(Status::Success, 0)]);
    assert_eq!(server.remembered.len(), REMEMBERED);
    // What is not sent is bounded, too.
    for transaction in 0..1000 {
        receive(&mut server, &clock, client_at(1), &request_bytes(transaction, 2, 0));
    }
    assert_eq!(replies(&mut server, 1).len(), REPLIES);
}

#[test]
fn a_closed_listener_is_silent() {
    let clock = Clock::new();
    let mut server = server(&clock, 4);
    ask(&mut server, &clock, 1, 1, 0);
    let question = asked(&mut server);
    ask(&mut server, &clock, 1, 2, 0);
    receive(&mut server, &clock, client_at(1), &request_bytes(3, 2, 0));
    server.cancel();
    assert_eq!((sent(&mut server), reports(&mut server)), (vec![], vec![]));
    assert_eq!(server.answer(&question, (5, 6), b""), Ok(()));
    assert_eq!(server.refuse(&question, b""), Ok(()));
    ask(&mut server, &clock, 1, 4, 0);
    assert_eq!((sent(&mut server), reports(&mut server), server.remembered.len()), (vec![], vec![], 0));
}

/// A datagram on its way: when it arrives, whether it goes to the server, of which client, bytes.
type OnTheWay = (Instant, bool, usize, Vec<u8>);

struct Network {
    random: Random,
    loss: usize,
    on_the_way: Vec<OnTheWay>,
}

impl Network {
    /// Lost, doubled, delayed, corrupted, in any order.
    fn carry(&mut self, now: Instant, to_server: bool, number: usize, bytes: &[u8]) {
        let random = &mut self.random;
        for _ in 0..1 + usize::from(random.one_in(5)) {
            if random.below(100) < self.loss {
                continue;
            }
            let mut bytes = bytes.to_vec();
            if random.one_in(20) {
                let at = random.below(bytes.len());
                bytes[at] ^= 1 << random.below(8);
            }
            let delay = Duration::from_millis(random.below(120) as u64);
            self.on_the_way.push((now + delay, to_server, number, bytes));
        }
    }

    fn arrived(&mut self, now: Instant) -> Option<OnTheWay> {
        let at = self.on_the_way.iter().position(|(when, ..)| *when <= now)?;
        Some(self.on_the_way.swap_remove(at))
    }
}

/// How often each was tried, in all runs.
#[derive(Default)]
struct Tried {
    answered: u32,
    refused: u32,
    silent: u32,
    cookies: u32,
}

const CLIENTS: usize = 12;

/// One run: a server, its clients, and the program that answers.
struct Trial {
    clock: Clock,
    begun: Instant,
    patience: Duration,
    network: Network,
    server: Server,
    clients: Vec<Client>,
    /// When the program answers which question, of which client.
    questions: Vec<(Instant, Question, usize)>,
    /// Whose question the program was told of.
    reported: [bool; CLIENTS],
    /// How each lookup ended.
    found: Vec<Option<Found>>,
}

impl Trial {
    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut clock = Clock::new();
        let network =
            Network { random: Random::new(seed + 1000), loss: random.below(31), on_the_way: Vec::new() };
        let server = server(&clock, 1 + random.below(8));
        let patience = Duration::from_secs(1 + random.below(20) as u64);
        // Their Requests are near the end of a period of cookies in some runs.
        clock.pass(Duration::from_millis(random.below(130_000) as u64));
        let client = |number: usize| {
            let lookup = Lookup {
                server: server_at(),
                port_space: UDP,
                transaction: 7,
                private_data: &[u8::try_from(number).unwrap()],
                patience,
            };
            Client::new(&clock.now(), &lookup).unwrap()
        };
        Self {
            clients: (0..CLIENTS).map(client).collect(),
            begun: clock.get(),
            clock,
            patience,
            network,
            server,
            questions: Vec::new(),
            reported: [false; CLIENTS],
            found: vec![None; CLIENTS],
        }
    }

    /// Runs until each lookup has ended and the network is empty.
    fn run(&mut self, tried: &mut Tried) {
        while self.found.iter().any(Option::is_none) || !self.network.on_the_way.is_empty() {
            for number in 0..CLIENTS {
                self.poll_client(number);
            }
            self.take_questions();
            self.answer_questions();
            self.send_replies(tried);
            self.arrive();
            let limit = self.begun + self.patience + Duration::from_secs(1);
            assert!(self.clock.get() <= limit, "no end");
        }
        for number in 0..CLIENTS {
            self.check(number, tried);
        }
    }

    fn poll_client(&mut self, number: usize) {
        let Self { clock, network, .. } = self;
        let (client, found) = (&mut self.clients[number], &mut self.found[number]);
        client.handle_timeout(&clock.now());
        assert!(client.poll_timeout().is_none_or(|deadline| deadline > clock.get()));
        let ended = found.is_some();
        for (route, bytes) in sent(client) {
            assert!(!ended && route.to == server_at());
            network.carry(clock.get(), true, number, &bytes);
        }
        for new in reports(client) {
            assert!(!ended, "{new:?} after the end");
            *found = Some(new);
        }
        assert_eq!(client.poll_timeout().is_none(), found.is_some());
    }

    fn take_questions(&mut self) {
        for Asked { question, private_data } in reports(&mut self.server) {
            let number = usize::from(private_data[0]);
            assert_eq!(question.from, client_at(number));
            assert!(!std::mem::replace(&mut self.reported[number], true), "one question twice");
            let wait = Duration::from_millis(self.network.random.below(400) as u64);
            self.questions.push((self.clock.get() + wait, question, number));
        }
        assert!(self.questions.len() <= self.server.backlog);
    }

    /// The program refuses every fourth client.
    fn answer_questions(&mut self) {
        let Self { clock, server, questions, .. } = self;
        questions.retain(|(when, question, number)| {
            let now = *when <= clock.get();
            if now && number.is_multiple_of(4) {
                server.refuse(question, &[*number as u8]).unwrap();
            } else if now {
                server.answer(question, (*number as u32 + 1, 9), &[*number as u8]).unwrap();
            }
            !now
        });
    }

    fn send_replies(&mut self, tried: &mut Tried) {
        for (route, bytes) in sent(&mut self.server) {
            let number = usize::from(route.to.port()) - 10_000;
            let datagram = Datagram::parse(&bytes).unwrap();
            tried.cookies += u32::from(Reply::parse(&datagram).unwrap().status == Status::CookieRequired);
            self.network.carry(self.clock.get(), false, number, &bytes);
        }
    }

    /// One datagram arrives, or time passes.
    fn arrive(&mut self) {
        let Self { clock, server, clients, .. } = self;
        match self.network.arrived(clock.get()) {
            Some((_, true, number, bytes)) => receive(server, clock, client_at(number), &bytes),
            Some((_, false, number, bytes)) => receive(&mut clients[number], clock, server_at(), &bytes),
            None => clock.pass_ms(1),
        }
    }

    /// What this client found is its own.
    fn check(&mut self, number: usize, tried: &mut Tried) {
        match self.found[number].take().unwrap() {
            Found::QueuePair { qpn, qkey: 9, private_data } => {
                assert_eq!((qpn as usize, &private_data[..]), (number + 1, &[number as u8][..]));
                assert!(self.reported[number] && !number.is_multiple_of(4));
                tried.answered += 1;
            }
            Found::Refused(Status::Rejected, private_data) => {
                assert_eq!(private_data, [number as u8]);
                assert!(self.reported[number] && number.is_multiple_of(4));
                tried.refused += 1;
            }
            Found::Silence => tried.silent += 1,
            other => panic!("{other:?}"),
        }
    }
}

/// Each client gets its own answer or none in time; the program gets each question once; and a busy server
/// does not turn away a client whose Request was doubled.
#[test]
fn lookups_over_a_bad_network() {
    let mut tried = Tried::default();
    for seed in 0..300 {
        let seed = Seed(seed);
        Trial::new(seed.0).run(&mut tried);
    }
    let Tried { answered, refused, silent, cookies } = tried;
    let counts = [answered, refused, silent, cookies];
    assert!(counts.iter().all(|&times| times > 100), "what is not tried is not tested: {counts:?}");
}
