//! The MPA frames of one connection before its stream begins, in either role: what was received, what is
//! still to be sent, and until when. It is a value inside [`super::active`], [`super::listener`] and the
//! machine of adopted sockets; they decide what becomes of the connection.
//!
//! Events come back from the calls that cause them, so there is nothing to poll but bytes and the deadline.

use std::time::{Duration, Instant};

use uwarp_llp::carrier::Refusal;
use uwarp_proto::setup::{
    AcceptParams, Host, Initiator, InitiatorConfig, Negotiated, Outcome, Rejection, Request, Responder,
    ResponderPolicy, SetupError,
};
use uwarp_rnic::qp::Now;
use uwarp_wire::mpa::FrameKind;

use super::{Input, Want, is_over};

/// One connection's handshake.
#[derive(Debug)]
pub struct Handshake {
    role: Role,
    state: State,
    /// A frame to send, and how much of it the lower layer has taken.
    unsent: Vec<u8>,
    sent: usize,
    /// The lower layer takes nothing until [`Input::Room`].
    full: bool,
    /// For each part that waits for the peer. `None`: the owner has its own limit.
    limit: Option<Duration>,
    deadline: Option<Instant>,
}

#[derive(Debug)]
enum Role {
    Initiator(Initiator),
    Responder(Responder),
}

/// | state | event | → | returned |
/// |-|-|-|-|
/// | AwaitReply | whole reply | Done | Accepted, Rejected |
/// | AwaitReply | bad frame | Failed | Failed; a Terminate to send if the framing is known |
/// | AwaitRequest | whole request | AwaitDecision | Requested |
/// | AwaitRequest | bad frame | Failed | Failed; nothing to send (RFC 5044 section 7.1.2 rule 2) |
/// | AwaitDecision | accept, reject | Replying | – |
/// | AwaitDecision | end, failure | Failed | Failed |
/// | Replying | all sent | Done | Replied |
/// | AwaitReply, AwaitRequest, Replying | end, failure, limit | Failed | Failed |
///
/// AwaitDecision has no limit: it waits for the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    AwaitReply,
    AwaitRequest,
    AwaitDecision,
    Replying,
    Done,
    Failed,
}

/// What has become of a handshake, or of a part of it.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The peer accepts: the stream begins with the next byte in each direction.
    Accepted(Box<Negotiated>),
    /// The peer's program rejects.
    Rejected(Rejection),
    /// A request is complete: call [`Handshake::accept`] or [`Handshake::reject`].
    Requested(Request),
    /// The reply is sent. After an acceptance the stream begins with the next byte in each direction.
    Replied,
    /// It has failed. The owner sends what [`Handshake::poll_transmit`] still has and closes the connection.
    Failed(Failure),
}

/// Why a handshake failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// The peer did not do its part in time.
    TimedOut,
    /// The lower layer: the shell has dropped the connection. A connection that the peer has ended is
    /// [`SetupError::Closed`] instead.
    Lower(Refusal),
    /// What the peer sent, or that it closed.
    Setup(SetupError),
}

impl Handshake {
    /// Sends a request, which waits in [`Self::poll_transmit`], and waits for the reply. `limit` begins now.
    pub fn ask(
        now: &Now,
        limit: Option<Duration>,
        config: InitiatorConfig,
        private_data: &[u8],
    ) -> Result<Self, SetupError> {
        let initiator = Initiator::new(config, private_data)?;
        let mut handshake = Self::new(Role::Initiator(initiator), State::AwaitReply);
        handshake.take_frame();
        handshake.set_limit(now, limit);
        Ok(handshake)
    }

    /// Waits for a request. `limit` begins now; it counts again for sending the reply. `offer`: what the
    /// reply says of this process.
    pub fn await_request(
        now: &Now,
        limit: Option<Duration>,
        policy: ResponderPolicy,
        offer: Option<Host>,
    ) -> Self {
        let mut responder = Responder::new(policy);
        offer.into_iter().for_each(|host| responder.offer(host));
        let mut handshake = Self::new(Role::Responder(responder), State::AwaitRequest);
        handshake.set_limit(now, limit);
        handshake
    }

    fn new(role: Role, state: State) -> Self {
        Self { role, state, unsent: Vec::new(), sent: 0, full: false, limit: None, deadline: None }
    }

    /// Begins a new limit for the part that runs.
    pub fn set_limit(&mut self, now: &Now, limit: Option<Duration>) {
        self.limit = limit;
        self.restart_limit(now);
    }

    fn restart_limit(&mut self, now: &Now) {
        // A limit that no clock can hold is none.
        self.deadline = self.limit.and_then(|limit| now.get().checked_add(limit));
    }

    /// Accepts the request. The reply waits in [`Self::poll_transmit`]; [`Event::Replied`] follows. After
    /// [`SetupError::PrivateDataLimit`] the request still waits for a decision; [`SetupError::Misuse`]: no
    /// request waits for one.
    pub fn accept(
        &mut self,
        now: &Now,
        params: AcceptParams,
        private_data: &[u8],
    ) -> Result<Negotiated, SetupError> {
        let negotiated = self.decide()?.accept(params, private_data)?;
        self.reply(now);
        Ok(negotiated)
    }

    /// Rejects the request. As [`Self::accept`]; after [`Event::Replied`] the owner closes the connection.
    pub fn reject(&mut self, now: &Now, private_data: &[u8]) -> Result<(), SetupError> {
        self.decide()?.reject(private_data)?;
        self.reply(now);
        Ok(())
    }

    /// After an acceptance, the stream cannot begin for a reason at this end: makes the Terminate that
    /// reports it (RFC 6581 section 9.3), if this peer knows it. The owner closes the connection behind it.
    pub fn refuse(&mut self, negotiated: &Negotiated) {
        self.forget_frame();
        self.end(State::Failed);
        self.unsent = negotiated.local_error().unwrap_or_default();
    }

    /// Whether nothing is left that can be sent now: then an owner that closes does so.
    pub fn is_drained(&self) -> bool {
        self.poll_transmit().is_none()
    }

    /// The most private data that a reply to the request holds.
    pub fn private_data_limit(&self) -> usize {
        match &self.role {
            Role::Responder(responder) => responder.private_data_limit(),
            Role::Initiator(_) => 0,
        }
    }

    fn decide(&mut self) -> Result<&mut Responder, SetupError> {
        match &mut self.role {
            Role::Responder(responder) if self.state == State::AwaitDecision => Ok(responder),
            _ => Err(SetupError::Misuse),
        }
    }

    fn reply(&mut self, now: &Now) {
        self.state = State::Replying;
        self.take_frame();
        self.restart_limit(now);
    }

    /// Takes what has happened to this connection; the owner has compared the names. Inputs of other kinds
    /// change nothing.
    pub fn handle_input(&mut self, input: Input<'_>) -> Option<Event> {
        match input {
            Input::Sent { bytes, .. } => self.handle_sent(bytes),
            Input::Room { .. } => {
                self.full = false;
                None
            }
            Input::Bytes { bytes, .. } => self.handle_bytes(bytes),
            Input::End { .. } | Input::Failed { why: Refusal::Gone, .. } => self.handle_end(),
            Input::Failed { why, .. } => self.fail(Failure::Lower(why)),
            _ => None,
        }
    }

    /// The time of [`Self::poll_timeout`] may have come.
    pub fn handle_timeout(&mut self, now: &Now) -> Option<Event> {
        if is_over(self.deadline, now) { self.fail(Failure::TimedOut) } else { None }
    }

    /// The rest of the frame to send; after a failure, what reports it to the peer.
    pub fn poll_transmit(&self) -> Option<&[u8]> {
        if self.full {
            return None;
        }
        self.rest()
    }

    /// The deadline of the part that runs.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.deadline
    }

    /// What to know of the connection.
    pub fn want(&self) -> Want {
        match (&self.role, self.state) {
            // Also while the request is not sent: reading tells best why a connection cannot be made.
            (Role::Initiator(initiator), State::AwaitReply) => Want::Bytes(initiator.want()),
            (Role::Responder(responder), State::AwaitRequest) => Want::Bytes(responder.want()),
            (_, State::Replying) => Want::End,
            // An owner that needs to know that the peer of a waiting request is gone asks for it itself.
            _ => Want::Nothing,
        }
    }

    /// Whether no byte of a frame has arrived.
    pub fn is_silent(&self) -> bool {
        match &self.role {
            Role::Responder(responder) => responder.is_silent(),
            Role::Initiator(_) => false,
        }
    }

    /// After a failure: what to request on a new connection, if the peer may not have understood this one.
    pub fn plainer(&self) -> Option<InitiatorConfig> {
        match &self.role {
            Role::Initiator(initiator) => initiator.fallback(),
            Role::Responder(_) => None,
        }
    }

    fn handle_sent(&mut self, bytes: usize) -> Option<Event> {
        if bytes == 0 {
            self.full = self.rest().is_some();
            return None;
        }
        self.sent = self.sent.saturating_add(bytes);
        if self.rest().is_some() {
            return None;
        }
        self.forget_frame();
        if self.state != State::Replying {
            return None;
        }
        self.end(State::Done);
        Some(Event::Replied)
    }

    fn handle_bytes(&mut self, bytes: &[u8]) -> Option<Event> {
        match (&mut self.role, self.state) {
            (Role::Initiator(initiator), State::AwaitReply) => {
                let outcome = match initiator.handle_input(bytes) {
                    Ok(None) => return None,
                    Ok(Some(outcome)) => outcome,
                    Err(error) => return self.fail_with_terminate(error),
                };
                match outcome {
                    // The stream would begin in the middle of our request.
                    Outcome::Accepted(_) if self.rest().is_some() => {
                        self.fail(Failure::Setup(SetupError::WrongKind(FrameKind::Reply)))
                    }
                    Outcome::Accepted(negotiated) => {
                        self.end(State::Done);
                        Some(Event::Accepted(Box::new(negotiated)))
                    }
                    Outcome::Rejected(rejection) => {
                        self.forget_frame();
                        self.end(State::Done);
                        Some(Event::Rejected(rejection))
                    }
                }
            }
            (Role::Responder(responder), State::AwaitRequest) => match responder.handle_input(bytes) {
                Ok(None) => None,
                Ok(Some(request)) => {
                    self.end(State::AwaitDecision);
                    Some(Event::Requested(request))
                }
                Err(error) => self.fail(Failure::Setup(error)),
            },
            _ => None,
        }
    }

    fn handle_end(&mut self) -> Option<Event> {
        let error = match &mut self.role {
            Role::Initiator(initiator) => initiator.handle_close(),
            Role::Responder(responder) => SetupError::Closed { silent: responder.is_silent() },
        };
        self.fail(Failure::Setup(error))
    }

    fn fail_with_terminate(&mut self, error: SetupError) -> Option<Event> {
        let whole = self.rest().is_none();
        let failed = self.fail(Failure::Setup(error));
        // Behind half a request the peer would read it as the rest of that.
        if whole {
            self.take_frame();
        }
        failed
    }

    fn fail(&mut self, failure: Failure) -> Option<Event> {
        if matches!(self.state, State::Done | State::Failed) {
            return None;
        }
        self.forget_frame();
        self.end(State::Failed);
        Some(Event::Failed(failure))
    }

    fn end(&mut self, state: State) {
        self.state = state;
        self.deadline = None;
    }

    fn rest(&self) -> Option<&[u8]> {
        self.unsent.get(self.sent..).filter(|rest| !rest.is_empty())
    }

    fn forget_frame(&mut self) {
        (self.unsent, self.sent, self.full) = (Vec::new(), 0, false);
    }

    /// Takes the frame that the role's machine has ready.
    fn take_frame(&mut self) {
        self.forget_frame();
        self.unsent = match &mut self.role {
            Role::Initiator(initiator) => initiator.poll_transmit(),
            Role::Responder(responder) => responder.poll_transmit(),
        }
        .unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::super::testing::{self, Clock, Random, Seed};
    use super::super::{ConnKey, Space};
    use super::*;

    const LIMIT: Duration = Duration::from_secs(5);

    fn conn() -> ConnKey {
        Space::new(0).name()
    }

    fn sent(bytes: usize) -> Input<'static> {
        Input::Sent { conn: conn(), bytes }
    }

    fn bytes(bytes: &[u8]) -> Input<'_> {
        Input::Bytes { conn: conn(), bytes }
    }

    fn failed(why: Refusal) -> Input<'static> {
        Input::Failed { conn: conn(), why }
    }

    const END: fn() -> Input<'static> = || Input::End { conn: conn() };

    fn closed(silent: bool) -> Option<Event> {
        Some(Event::Failed(Failure::Setup(SetupError::Closed { silent })))
    }

    fn ask(clock: &Clock) -> Handshake {
        Handshake::ask(&clock.now(), Some(LIMIT), testing::initiator(), b"hello").unwrap()
    }

    fn await_request(clock: &Clock) -> Handshake {
        Handshake::await_request(&clock.now(), Some(LIMIT), testing::responder(), None)
    }

    /// Takes all that it sends.
    fn drain(handshake: &mut Handshake) -> (Vec<u8>, Option<Event>) {
        let frame = handshake.poll_transmit().unwrap_or_default().to_vec();
        let event = if frame.is_empty() { None } else { handshake.handle_input(sent(frame.len())) };
        (frame, event)
    }

    /// Gives it these bytes, never more at once than it wants; returns what became of it, and the rest.
    fn feed<'a>(handshake: &mut Handshake, mut input: &'a [u8]) -> (Option<Event>, &'a [u8]) {
        while let Want::Bytes(want) = handshake.want()
            && !input.is_empty()
        {
            assert!(want > 0);
            let (now, rest) = input.split_at(want.min(input.len()));
            input = rest;
            if let Some(event) = handshake.handle_input(bytes(now)) {
                return (Some(event), input);
            }
        }
        (None, input)
    }

    /// A responder that has this request, as bytes of an initiator.
    fn requested(clock: &Clock) -> Handshake {
        let (request, _) = drain(&mut ask(clock));
        let mut handshake = await_request(clock);
        let (event, rest) = feed(&mut handshake, &request);
        assert!(matches!(event, Some(Event::Requested(request)) if request.private_data == b"hello"));
        assert!(rest.is_empty());
        handshake
    }

    #[test]
    fn both_ends_agree_and_leave_the_stream_alone() {
        let clock = Clock::new();
        let mut initiator = ask(&clock);
        let (request, event) = drain(&mut initiator);
        assert_eq!(event, None);
        let mut responder = await_request(&clock);
        let (event, _) = feed(&mut responder, &request);
        assert!(matches!(event, Some(Event::Requested(_))));
        assert_eq!((responder.want(), responder.poll_timeout()), (Want::Nothing, None), "the program's time");
        let negotiated = responder.accept(&clock.now(), testing::terms(), b"welcome").unwrap();
        assert!(negotiated.peer_is_uwarp);
        let (mut reply, event) = drain(&mut responder);
        assert_eq!(event, Some(Event::Replied));
        reply.extend_from_slice(b"first FPDU");
        let (event, rest) = feed(&mut initiator, &reply);
        assert!(matches!(event, Some(Event::Accepted(said)) if said.private_data == b"welcome"));
        assert_eq!(rest, b"first FPDU");
        for end in [initiator, responder] {
            assert_eq!((end.want(), end.poll_timeout(), end.poll_transmit()), (Want::Nothing, None, None));
        }
    }

    #[test]
    fn a_rejection_reaches_the_initiator() {
        let clock = Clock::new();
        let (mut initiator, mut responder) = (ask(&clock), requested(&clock));
        drain(&mut initiator);
        responder.reject(&clock.now(), b"no").unwrap();
        let (reply, event) = drain(&mut responder);
        assert_eq!(event, Some(Event::Replied));
        let (event, _) = feed(&mut initiator, &reply);
        assert!(matches!(event, Some(Event::Rejected(rejection)) if rejection.private_data == b"no"));
        assert_eq!(initiator.poll_timeout(), None);
    }

    #[test]
    fn a_frame_that_is_taken_in_parts_is_sent_whole() {
        let clock = Clock::new();
        let (whole, _) = drain(&mut ask(&clock));
        let mut handshake = ask(&clock);
        let mut taken = Vec::new();
        while let Some(&first) = handshake.poll_transmit().and_then(<[u8]>::first) {
            taken.push(first);
            assert_eq!(handshake.handle_input(sent(1)), None);
            handshake.handle_input(sent(0));
            assert_eq!(handshake.poll_transmit(), None, "no room");
            handshake.handle_input(Input::Room { conn: conn() });
        }
        assert_eq!(taken, whole);
    }

    /// The stream would begin in the middle of our request, and a Terminate would be read as its rest.
    #[test]
    fn a_reply_before_the_whole_request_is_none() {
        let clock = Clock::new();
        let mut responder = requested(&clock);
        responder.accept(&clock.now(), testing::terms(), b"").unwrap();
        let (reply, _) = drain(&mut responder);
        let mut initiator = ask(&clock);
        initiator.handle_input(sent(1));
        let (event, _) = feed(&mut initiator, &reply);
        assert!(matches!(event, Some(Event::Failed(Failure::Setup(SetupError::WrongKind(_))))));
        assert_eq!(initiator.poll_transmit(), None);
    }

    #[test]
    fn a_bad_reply_is_reported_with_a_terminate_if_the_framing_is_known() {
        let clock = Clock::new();
        let mut initiator = ask(&clock);
        drain(&mut initiator);
        let mut reply = b"MPA ID Rep Frame".to_vec();
        // Its ORD is above every limit of ours.
        reply.extend_from_slice(&[0x50, 2, 0, 4, 0x80, 0x10, 0x80, 0x81]);
        let (event, _) = feed(&mut initiator, &reply);
        let error = SetupError::InsufficientIrd { wanted: 129, limit: 128 };
        assert_eq!(event, Some(Event::Failed(Failure::Setup(error))));
        assert!(!initiator.is_drained());
        assert!(!drain(&mut initiator).0.is_empty());
        assert!(initiator.is_drained());

        let mut initiator = ask(&clock);
        drain(&mut initiator);
        let (event, _) = feed(&mut initiator, &[b'?'; 20]);
        assert_eq!(event, Some(Event::Failed(Failure::Setup(SetupError::BadKey))));
        assert!(initiator.is_drained());
    }

    #[test]
    fn a_terminate_without_room_is_not_waited_for() {
        let clock = Clock::new();
        let mut responder = requested(&clock);
        let negotiated = responder.accept(&clock.now(), testing::terms(), b"").unwrap();
        drain(&mut responder);
        responder.refuse(&negotiated);
        assert!(!responder.is_drained());
        assert_eq!(responder.handle_input(sent(0)), None);
        assert!(responder.is_drained());
        assert_eq!(responder.poll_timeout(), None);
    }

    #[test]
    fn a_bad_request_is_not_answered() {
        let clock = Clock::new();
        let mut responder = await_request(&clock);
        let (event, _) = feed(&mut responder, b"GET / HTTP/1.1\r\n\r\n\r\n");
        assert_eq!(event, Some(Event::Failed(Failure::Setup(SetupError::BadKey))));
        assert_eq!(
            (responder.poll_transmit(), responder.want(), responder.poll_timeout()),
            (None, Want::Nothing, None)
        );
    }

    #[test]
    fn each_part_that_waits_for_the_peer_has_a_limit() {
        let mut clock = Clock::new();
        let mut replying = requested(&clock);
        clock.pass_ms(60_000);
        assert_eq!(replying.handle_timeout(&clock.now()), None, "the program's time");
        replying.accept(&clock.now(), testing::terms(), b"").unwrap();
        for mut handshake in [ask(&clock), await_request(&clock), replying] {
            let deadline = handshake.poll_timeout().unwrap();
            assert_eq!(deadline, clock.get() + LIMIT);
            assert_eq!(handshake.handle_timeout(&Now::at(deadline - Duration::from_nanos(1))), None, "early");
            assert_eq!(handshake.handle_timeout(&Now::at(deadline)), Some(Event::Failed(Failure::TimedOut)));
            assert_eq!((handshake.poll_timeout(), handshake.poll_transmit()), (None, None));
            assert_eq!(handshake.handle_timeout(&Now::at(deadline)), None, "repeated");
        }
    }

    #[test]
    fn a_new_limit_replaces_the_old_one() {
        let mut clock = Clock::new();
        let mut handshake = ask(&clock);
        clock.pass_ms(4000);
        handshake.set_limit(&clock.now(), Some(Duration::from_secs(60)));
        assert_eq!(handshake.poll_timeout(), Some(clock.get() + Duration::from_secs(60)));
        handshake.set_limit(&clock.now(), Some(Duration::MAX));
        assert_eq!(handshake.poll_timeout(), None);
        handshake.set_limit(&clock.now(), None);
        assert_eq!(handshake.poll_timeout(), None);
    }

    #[test]
    fn ends_and_failures() {
        let clock = Clock::new();
        let asked = || {
            let mut handshake = ask(&clock);
            drain(&mut handshake);
            handshake
        };
        assert_eq!(asked().handle_input(END()), closed(true));
        assert_eq!(asked().handle_input(failed(Refusal::Gone)), closed(true));
        let begun = || {
            let mut handshake = asked();
            handshake.handle_input(bytes(b"MPA"));
            handshake
        };
        assert_eq!(begun().handle_input(END()), closed(false));
        let refused = Some(Event::Failed(Failure::Lower(Refusal::Refused)));
        assert_eq!(ask(&clock).handle_input(failed(Refusal::Refused)), refused);
        let local = Refusal::Local(Errno::NOBUFS);
        assert_eq!(asked().handle_input(failed(local)), Some(Event::Failed(Failure::Lower(local))));
        assert_eq!(await_request(&clock).handle_input(END()), closed(true));
        assert_eq!(requested(&clock).handle_input(END()), closed(false));
        let mut replying = requested(&clock);
        replying.reject(&clock.now(), b"").unwrap();
        assert_eq!(replying.handle_input(END()), closed(false));
        assert_eq!(replying.handle_input(END()), None, "once");
        assert_eq!((replying.poll_transmit(), replying.poll_timeout()), (None, None));
    }

    #[test]
    fn a_silent_end_allows_a_plainer_request() {
        let clock = Clock::new();
        let mut handshake = ask(&clock);
        assert_eq!(handshake.plainer(), None);
        handshake.handle_input(END());
        assert_eq!(handshake.plainer().map(|config| config.peer), Some(None));
        assert_eq!(await_request(&clock).plainer(), None);
    }

    #[test]
    fn decisions_out_of_order_change_nothing() {
        let clock = Clock::new();
        let now = clock.now();
        for mut handshake in [ask(&clock), await_request(&clock)] {
            let before = format!("{handshake:?}");
            assert_eq!(handshake.accept(&now, testing::terms(), b"").err(), Some(SetupError::Misuse));
            assert_eq!(handshake.reject(&now, b""), Err(SetupError::Misuse));
            assert_eq!(format!("{handshake:?}"), before);
        }
        let mut handshake = requested(&clock);
        let too_long = [0; 600];
        let error = handshake.accept(&now, testing::terms(), &too_long).unwrap_err();
        assert!(matches!(error, SetupError::PrivateDataLimit { .. }));
        assert_eq!(handshake.poll_timeout(), None, "it still waits for the program");
        assert!(handshake.accept(&now, testing::terms(), b"").is_ok());
        assert_eq!(handshake.reject(&now, b""), Err(SetupError::Misuse));
    }

    #[test]
    fn a_request_that_does_not_fit_is_none() {
        let clock = Clock::new();
        let error = Handshake::ask(&clock.now(), None, testing::initiator(), &[0; 600]).unwrap_err();
        assert!(matches!(error, SetupError::PrivateDataLimit { .. }));
    }

    /// Two ends, with frames in any parts, bytes turned over, ends, failures and limits at any moment.
    #[test]
    fn any_order_of_inputs() {
        let mut outcomes = [0_u32; 4];
        for seed in 0..4000 {
            let seed = Seed(seed);
            let mut random = Random::new(seed.0);
            let mut clock = Clock::new();
            let mut ends = [ask(&clock), await_request(&clock)];
            let mut on_the_way = [Vec::new(), Vec::new()];
            let mut over = [false, false];
            for _ in 0..200 {
                let at = random.below(2);
                let [own, other] = if at == 0 { [0, 1] } else { [1, 0] };
                let end = &mut ends[own];
                let event = match random.below(40) {
                    0..14 => match end.poll_transmit().map(<[u8]>::to_vec) {
                        None => None,
                        Some(frame) => {
                            let taken = random.below(frame.len() + 1);
                            on_the_way[other].extend_from_slice(&frame[..taken]);
                            if random.one_in(100) && taken > 0 {
                                let last = on_the_way[other].len() - 1;
                                on_the_way[other][last] ^= 1 << random.below(8);
                            }
                            end.handle_input(sent(taken))
                        }
                    },
                    14..28 => match end.want() {
                        Want::Bytes(want) => {
                            assert!((1..=512).contains(&want));
                            let most = on_the_way[own].len().min(want);
                            let some: Vec<u8> = on_the_way[own].drain(..random.below(most + 1)).collect();
                            if some.is_empty() { None } else { end.handle_input(bytes(&some)) }
                        }
                        _ => None,
                    },
                    28..32 => end.handle_input(Input::Room { conn: conn() }),
                    32..36 if random.one_in(2) => {
                        let accepted = end.accept(&clock.now(), testing::terms(), b"").is_ok();
                        assert!(!(accepted && over[own]));
                        None
                    }
                    32..36 => {
                        let _ = end.reject(&clock.now(), b"");
                        None
                    }
                    36 if random.one_in(40) => end.handle_input(END()),
                    37 if random.one_in(40) => end.handle_input(failed(Refusal::Gone)),
                    38 if random.one_in(40) => {
                        if let Some(deadline) = end.poll_timeout() {
                            clock.reach(deadline);
                        }
                        let event = end.handle_timeout(&clock.now());
                        assert!(end.poll_timeout().is_none_or(|deadline| deadline > clock.get()));
                        event
                    }
                    _ => end.handle_timeout(&clock.now()),
                };
                match event {
                    None => {}
                    Some(Event::Requested(_)) => assert!(!over[own]),
                    Some(event) => {
                        assert!(!over[own], "{event:?} after the end");
                        over[own] = true;
                        outcomes[match event {
                            Event::Accepted(_) => 0,
                            Event::Rejected(_) => 1,
                            Event::Replied => 2,
                            _ => 3,
                        }] += 1;
                    }
                }
                let end = &ends[own];
                if over[own] {
                    assert_eq!((end.want(), end.poll_timeout()), (Want::Nothing, None));
                } else {
                    let for_the_program = end.state == State::AwaitDecision;
                    assert_eq!(end.poll_timeout().is_none(), for_the_program, "{:?}", end.state);
                }
            }
        }
        assert!(outcomes.iter().all(|&times| times > 100), "what is not tried is not tested: {outcomes:?}");
    }
}
