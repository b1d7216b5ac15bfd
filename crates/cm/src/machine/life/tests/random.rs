//! Random calls, inputs and times; what must hold after each.

use super::super::super::testing::{Random, Seed};
use super::*;

/// The table of parts, and what each state waits for.
// A table is read line by line.
#[allow(clippy::match_like_matches_macro)]
fn check(shell: &Shell) {
    use State as S;
    let life = &shell.life;
    let fits = match (&life.part, life.state()) {
        (Part::Nothing, S::Idle | S::Bound | S::AddressResolved | S::RouteResolved) => true,
        (Part::Nothing, S::Closed | S::Destroyed) => true,
        (Part::Listener(_), S::Listening) | (Part::Active(_), S::Connecting) => true,
        (Part::Attaching { .. } | Part::Stream { .. }, S::Connecting | S::Responded) => true,
        (Part::Attaching { .. } | Part::Stream { .. }, S::Accepting | S::Established) => true,
        (Part::Parked { .. }, S::Responded | S::Established) | (Part::Request { .. }, S::RequestPending) => {
            true
        }
        _ => false,
    };
    assert!(fits, "{:?} in {:?}", life.part, life.state());
    if matches!(life.state(), S::Connecting | S::Accepting) {
        assert!(life.poll_timeout().is_some(), "it waits for ever");
    }
    if life.state() == S::Destroyed {
        assert_eq!(life.poll_timeout(), None);
    }
}

fn step(shell: &mut Shell, random: &mut Random) {
    let any = Space::new(random.below(3) as u32).name();
    let conn = shell.open.iter().chain(&shell.given).next_back().copied().filter(|_| !random.one_in(8));
    let conn = conn.unwrap_or(any);
    shell.unpolled = random.one_in(2);
    shell.takes =
        [Takes::All, Takes::All, Takes::All, Takes::Part, Takes::Fails(Refusal::Gone)][random.below(5)];
    shell.opens = [Ok(99), Ok(99), Err(Refusal::Refused), Err(Refusal::Local(Errno::MFILE))][random.below(4)];
    shell.attaches = if random.one_in(4) { Err(REFUSED) } else { Ok(()) };
    let number = if random.one_in(2) { ours(b"x") } else { by_number() };
    // Refused calls are part of it.
    let _ = match random.below(16) {
        0 => shell.call(|life, _| life.bind(here(5))),
        1 => shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))),
        2 => shell.call(|life, _| life.resolve_route()),
        3 => shell.call(|life, now| life.connect(now, number, ConnParam::DEFAULT)),
        4 => shell.call(|life, now| life.accept(now, number, None)),
        5 if random.one_in(4) => shell.call(|life, now| life.reject(now, b"no")),
        6 => shell.call(|life, _| life.adopt()),
        7 => shell.call(|life, _| life.establish()),
        8 if random.one_in(3) => shell.call(|life, now| life.disconnect(now).map(drop)),
        9 if random.one_in(6) => shell.call(|life, now| Ok(life.queue_pair_destroyed(now))),
        10 if shell.life.state() == State::Connecting && shell.wire.values().any(|sent| !sent.is_empty()) => {
            let whole =
                shell.open.last().is_some_and(|conn| shell.wire.get(conn).is_some_and(|w| w.len() > 20));
            if whole && matches!(shell.life.part, Part::Active(_)) {
                let refuse = random.one_in(4);
                shell.answer(|peer, now| {
                    if refuse {
                        peer.reject(now, b"no").unwrap();
                    } else {
                        peer.accept(now, testing::terms(), b"yes").unwrap();
                    }
                });
            }
            Ok(())
        }
        11 if random.one_in(3) && shell.open.contains(&conn) => Ok(shell.input(Input::End { conn })),
        12 if random.one_in(3) && shell.open.contains(&conn) => {
            Ok(shell.input(Input::Failed { conn, why: Refusal::Gone }))
        }
        13 => Ok(shell.input(Input::Stream { conn, event: StreamEvent::Established })),
        14 if random.one_in(2) => {
            Ok(shell.input(Input::Stream { conn, event: StreamEvent::Ended(Disconnect::PeerClosed) }))
        }
        _ => Ok(shell.pass(Duration::from_millis([1, 5, 50, 3000][random.below(4)]))),
    };
}

#[test]
fn random_lives() {
    let mut reached = BTreeSet::new();
    for seed in 0..3000 {
        let _seed = Seed(seed);
        let mut random = Random::new(seed);
        let mut shell = match random.below(4) {
            0 => Shell::requested(true),
            1 => Shell::new(random.one_in(2)),
            _ => Shell::resolved(true),
        };
        for _ in 0..random.below(60) {
            step(&mut shell, &mut random);
            check(&shell);
            reached.insert(format!("{:?}", shell.life.state()));
            // At most one answer for each call, and events in their order.
            let log = std::mem::take(&mut shell.log);
            let answers = log.iter().filter(|word| *word == "ok" || word.starts_with("error")).count();
            assert!(answers <= 1, "{log:?}");
            shell.history.extend(log);
        }
        let at = |word: &str| shell.history.iter().position(|one| one.starts_with(word));
        for once in
            ["Established", "ConnectResponse", "Disconnected", "TimewaitExit", "ConnectError", "settled"]
        {
            let times = shell.history.iter().filter(|word| word.starts_with(once)).count();
            assert!(times <= 1, "{once} {times} times");
        }
        if let Some(end) = at("Disconnected") {
            assert!(at("Established").or(at("ConnectResponse")).is_some_and(|begin| begin < end));
        }
        if let Some(exit) = at("TimewaitExit") {
            assert!(at("Disconnected").is_some_and(|end| end < exit));
        }
        shell.destroyed();
    }
    assert_eq!(reached.len(), 10, "{reached:?}: all but Listening and Destroyed");
}
