//! Every step of the table of states in every state: the machine takes exactly those that the table allows.

use super::*;

const STATES: [State; 12] = [
    State::Idle,
    State::Bound,
    State::AddressResolved,
    State::RouteResolved,
    State::Listening,
    State::Connecting,
    State::Responded,
    State::RequestPending,
    State::Accepting,
    State::Established,
    State::Closed,
    State::Destroyed,
];

const STEPS: [Step; 16] = [
    Step::Bind,
    Step::Listen,
    Step::ListenRefused,
    Step::ResolveAddress,
    Step::AddressError,
    Step::ResolveRoute,
    Step::Connect,
    Step::ConnectRefused,
    Step::Accept,
    Step::Reject,
    Step::Response,
    Step::Establish,
    Step::Established,
    Step::Failed,
    Step::Disconnected,
    Step::Destroy,
];

/// An id in this state, in the part of it that the step can happen in.
fn at(state: State, step: Step) -> Shell {
    let mut shell = match state {
        State::Idle => Shell::new(true),
        State::Bound | State::Listening => {
            let mut shell = Shell::new(true);
            shell.call(|life, _| life.bind(here(5))).unwrap();
            if state == State::Listening {
                shell.call(|life, _| life.listen(4, Budget::new(64))).unwrap();
            }
            shell
        }
        State::AddressResolved => {
            let mut shell = Shell::new(true);
            shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))).unwrap();
            shell
        }
        State::RouteResolved => Shell::resolved(true),
        State::Connecting => match step {
            Step::ConnectRefused => {
                let mut shell = Shell::resolved(true);
                let now = shell.clock.now();
                shell.life.connect(&now, ours(b""), ConnParam::DEFAULT).unwrap();
                assert!(matches!(shell.life.poll_action(), Some(Action::Connect { .. })));
                shell
            }
            Step::Response => Shell::connecting(true, by_number()),
            _ => {
                let mut shell = Shell::connecting(true, ours(b""));
                shell.accepted();
                shell
            }
        },
        State::Responded => {
            let mut shell = Shell::responded(by_number());
            shell.call(|life, _| life.adopt()).unwrap();
            shell
        }
        State::RequestPending => Shell::requested(true),
        State::Accepting => Shell::accepting(true),
        State::Established => Shell::established(true),
        State::Closed => {
            let mut shell = Shell::established(true);
            shell.stream(StreamEvent::Ended(Disconnect::LocalClosed));
            shell
        }
        State::Destroyed => {
            let mut shell = Shell::established(true);
            shell.life.destroy(&shell.clock.now());
            shell.run();
            shell
        }
    };
    assert_eq!(shell.life.state(), state);
    shell.did();
    shell
}

/// What makes the step, in the program or in the world. Returns whether the call succeeds.
fn make(shell: &mut Shell, step: Step) -> Result<(), CmError> {
    let conn = Space::new(1).name();
    match step {
        Step::Bind => shell.call(|life, _| life.bind(here(5))),
        Step::Listen => shell.call(|life, _| {
            // As the shell does it.
            if life.state() == State::Idle {
                life.bind(here(5))?;
            }
            life.listen(4, Budget::new(64))
        }),
        Step::ListenRefused => Ok(shell.input(Input::NotListening(Errno::ADDRINUSE))),
        Step::ResolveAddress => shell.call(|life, _| life.resolve_address(THERE, Ok(here(0).ip()))),
        Step::AddressError => shell.call(|life, _| life.resolve_address(THERE, Err(Errno::NETUNREACH))),
        Step::ResolveRoute => shell.call(|life, _| life.resolve_route()),
        Step::Connect => shell.call(|life, now| life.connect(now, ours(b""), ConnParam::DEFAULT)),
        Step::ConnectRefused => Ok(shell.input(Input::Failed { conn, why: Refusal::Local(Errno::MFILE) })),
        Step::Accept => shell.call(|life, now| life.accept(now, ours(b""), None)),
        Step::Reject => shell.call(|life, now| life.reject(now, b"")),
        Step::Response => {
            if shell.life.state() == State::Connecting {
                shell.accepted();
            }
            Ok(())
        }
        Step::Establish => shell.call(|life, _| life.establish()),
        Step::Established => Ok(shell.input(Input::Stream { conn, event: StreamEvent::Established })),
        // The id's connection cannot come up, whatever there is of it.
        Step::Failed => {
            match shell.life.state() {
                State::Established | State::Responded => {}
                _ => shell.life.queue_pair_destroyed(&shell.clock.now()),
            }
            Ok(shell.run())
        }
        Step::Disconnected => {
            // Ends of the others are failures.
            if !matches!(shell.life.state(), State::Connecting | State::Accepting) {
                let event = StreamEvent::Ended(Disconnect::LocalClosed);
                shell.input(Input::Stream { conn, event });
            }
            Ok(())
        }
        Step::Destroy => shell.call(|life, now| Ok(life.destroy(now))),
    }
}

#[test]
fn every_step_in_every_state() {
    let mut table = String::new();
    for state in STATES {
        table += &format!("{state:?}\n");
        for step in STEPS {
            let mut shell = at(state, step);
            let result = make(&mut shell, step);
            let to = shell.life.state();
            assert_eq!(to, state.next(step).unwrap_or(state), "{state:?} {step:?} {result:?}");
            let did = shell.did();
            // What is not allowed changes nothing. (A second destroy is no error.)
            assert!(state.next(step).is_some() || did.is_empty(), "{state:?} {step:?}: {did}");
            if state.next(step).is_some() {
                result.unwrap();
                table += &format!("  {step:?} → {to:?}: {did}\n").replace(": \n", "\n");
            }
            shell.destroyed();
        }
    }
    assert_eq!(table.trim_end(), include_str!("steps.txt").trim_end(), "the table is now\n{table}");
}
