//! An id of streams between its request and the end of its stream: what the program, the peer, the queue pair
//! and the clock do to it.

use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use uwarp_driver::Disconnect;
use uwarp_llp::carrier::Refusal;
use uwarp_proto::setup::{AcceptParams, InitiatorConfig, Negotiated, PeerData, Rejection, Rtr, SetupError};
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::Now;

use super::{
    Action, ConnKey, Due, Held, IdEvent, Input, Life, MAX_PRIVATE_DATA, Machine as _, NOT_CONNECTED, NewId,
    Part, Recipient, Report, Rules, TOO_MUCH_DATA, active, is_over, listener,
};
use crate::error::CmError;
use crate::event::{ConnParam, EventKind, reason};
use crate::machine::StreamEvent;
use crate::machine::active::Active;
use crate::params::{agreed, cut, depths_of, of_request};
use crate::state::{State, Step};
use crate::timeouts::{RETRIES, UNPOLLED_LOOK};

/// The queue pair of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pair {
    /// The id's, with its number.
    Own(u32),
    /// The program gives its number and moves it itself. A connecting id gives it the connection when the
    /// program moves it to RTR ([`Life::adopt`]).
    Number(u32),
    /// One of uwarp's own, in place of one that takes no connection. The peer sees the number that the
    /// program gives. The shell makes it before the call and keeps it until the id is destroyed.
    StandIn,
}

/// What a program gives to `connect` and `accept`, beside the parameters.
#[derive(Debug, Clone, Copy)]
pub struct Ours<'a> {
    /// The queue pair.
    pub pair: Pair,
    /// Its minimum RNR timer.
    pub min_rnr_timer: u8,
    /// For the peer's program.
    pub private_data: &'a [u8],
}

impl Ours<'_> {
    fn check(&self) -> Result<(), CmError> {
        if self.private_data.len() > MAX_PRIVATE_DATA { Err(TOO_MUCH_DATA) } else { Ok(()) }
    }

    /// What a uwarp peer learns.
    fn introduction(&self, rules: &Rules, param: ConnParam) -> PeerData {
        PeerData {
            placement_acks: rules.infiniband,
            rnr_retry: param.rnr_retry_count.min(7),
            min_rnr_timer: self.min_rnr_timer,
            qpn: match self.pair {
                Pair::Own(qpn) | Pair::Number(qpn) => qpn,
                Pair::StandIn => param.qp_num,
            },
            ..PeerData::new()
        }
    }
}

/// The end of a stream whose report waits.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnreportedEnd {
    /// Reported at this time at the latest.
    limit: Instant,
    /// The next look; `None`: one is being made.
    look: Option<Instant>,
}

impl UnreportedEnd {
    pub fn deadline(&self) -> Instant {
        self.look.map_or(self.limit, |look| look.min(self.limit))
    }
}

/// Calls of the program.
impl Life {
    /// The program connects. Answered by [`EventKind::Established`], [`EventKind::Rejected`],
    /// [`EventKind::Unreachable`] or [`EventKind::ConnectError`]; by number by [`EventKind::ConnectResponse`]
    /// instead of the first. If this host refuses to begin, the program's call fails, and the id is as it
    /// was.
    pub fn connect(&mut self, now: &Now, ours: Ours<'_>, param: ConnParam) -> Result<(), CmError> {
        ours.check()?;
        let depths = self.depths(param, None)?;
        self.check(Step::Connect)?;
        let peer = self.peer.filter(|_| !self.is_datagram()).ok_or(CmError::Invalid("no remote address"))?;
        let policy = self.rules.policy;
        let config = InitiatorConfig {
            revision: policy.max_revision,
            crc: policy.crc,
            markers: policy.markers,
            depths,
            max_ird: policy.max_ird,
            peer: policy.know_peers.then(|| ours.introduction(&self.rules, param)),
            // InfiniBand's connection manager always names the queue pair in the request (docs/adr/002).
            peer_in_request: !matches!(ours.pair, Pair::Own(_)) || self.rules.infiniband,
        };
        // A second attempt binds again to the address that the program has bound.
        let local = self.local.filter(|_| self.bound);
        let private_data = ours.private_data.to_vec();
        let target = active::Target { local, peer, config, private_data, fall_back: true };
        let names = self.space();
        let active = Active::start(now, names, self.rules.timeouts, target).map_err(|_| TOO_MUCH_DATA)?;
        self.life.take(Step::Connect)?;
        self.part = Part::Active(Box::new(active));
        self.pair = Some(ours.pair);
        self.conn_param = param;
        self.has_connected = true;
        self.answer = Some(Due::Connect);
        self.drain();
        Ok(())
    }

    /// The program accepts the request. Answered by [`EventKind::Established`], or by
    /// [`EventKind::ConnectError`] or [`EventKind::Unreachable`] if the peer does not show itself. If the
    /// reply cannot be sent or the queue pair does not take the connection, the program's call fails, without
    /// an event, and the id is closed.
    ///
    /// `param`: `None` takes the depths that the request asks for.
    pub fn accept(&mut self, now: &Now, ours: Ours<'_>, param: Option<ConnParam>) -> Result<(), CmError> {
        const NO_REQUEST: CmError = CmError::Invalid("there is no connection request");
        ours.check()?;
        self.check(Step::Accept)?;
        let param = param.unwrap_or(ConnParam { rnr_retry_count: 7, ..self.requested });
        // "This value is ignored" (rdma_accept(3)); the peer's program does not learn ours.
        let param = ConnParam { retry_count: RETRIES, ..param };
        let depths = self.depths(param, Some(self.requested))?;
        let peer = ours.introduction(&self.rules, param);
        let Part::Request { conn, handshake, gone } = &mut self.part else { return Err(NO_REQUEST) };
        let (conn, gone) = (*conn, *gone);
        let negotiated =
            handshake.accept(now, AcceptParams { depths, peer }, ours.private_data).map_err(|error| {
                match error {
                    SetupError::PrivateDataLimit { .. } => TOO_MUCH_DATA,
                    _ => NO_REQUEST,
                }
            })?;
        let reply = handshake.poll_transmit().unwrap_or_default().to_vec();
        self.life.take(Step::Accept)?;
        self.pair = Some(ours.pair);
        self.conn_param = param;
        self.outcome = (agreed(&negotiated, self.requested), Vec::new());
        self.answer = Some(Due::Attach(conn));
        self.part = Part::Replying { conn, reply, negotiated: Box::new(negotiated) };
        if let Some(errno) = gone {
            self.reply_failed(None, errno);
        }
        self.settle();
        Ok(())
    }

    /// The program rejects the request.
    pub fn reject(&mut self, now: &Now, private_data: &[u8]) -> Result<(), CmError> {
        if private_data.len() > MAX_PRIVATE_DATA {
            return Err(TOO_MUCH_DATA);
        }
        self.check(Step::Reject)?;
        if self.is_datagram() {
            return self.refuse(private_data);
        }
        self.life.take(Step::Reject)?;
        if let Part::Request { conn, mut handshake, gone: None } = self.take_part() {
            self.reject_with(now, conn, &mut handshake, private_data);
        }
        self.settle();
        Ok(())
    }

    /// The program has moved its queue pair to RTS, or will do so: the connection is established.
    /// rdma_establish(3).
    pub fn establish(&mut self) -> Result<(), CmError> {
        self.life.take(Step::Establish)?;
        match self.take_part() {
            Part::Parked { conn, negotiated } if self.pair == Some(Pair::StandIn) => {
                self.answer = Some(Due::Attach(conn));
                self.attach(conn, negotiated);
            }
            part => {
                self.part = part;
                self.actions.push_back(Action::Answer(Ok(())));
            }
        }
        Ok(())
    }

    /// The program moves the queue pair to RTR that the connection waits for: it is this one's from now on.
    pub fn adopt(&mut self) -> Result<(), CmError> {
        match self.take_part() {
            Part::Parked { conn, negotiated } => {
                self.answer = Some(Due::Attach(conn));
                self.attach(conn, negotiated);
                Ok(())
            }
            part => {
                self.part = part;
                Err(CmError::Invalid("no connection waits for the queue pair"))
            }
        }
    }

    /// The program ends the connection. Answered by [`EventKind::Disconnected`] at both ends. If the peer has
    /// disconnected already, nothing more happens.
    ///
    /// The queue pair answers [`Action::Disconnect`] by [`StreamEvent::Ended`] in bounded time; posted work
    /// is sent as far as possible until then. If the program has destroyed the queue pair, the shell says so
    /// by [`Self::queue_pair_destroyed`] instead.
    ///
    /// Returns whether the program leaves a peer that has ended the stream: before the call returns, the
    /// shell flushes the work requests, unless the queue pair has another stream by now. (Not a report, which
    /// another thread may carry out: a program looks at the queue pair as soon as this call returns.)
    pub fn disconnect(&mut self, now: &Now) -> Result<bool, CmError> {
        if self.unreported_end.is_some() {
            self.stream_ended(now, Errno::CONNRESET);
        }
        let mut leaves = false;
        match (self.state(), &self.part) {
            (_, Part::Parked { .. }) => self.parked_ended(now, true),
            (
                State::Established | State::Responded | State::Accepting,
                Part::Stream { conn } | Part::Attaching { conn, .. },
            ) => self.actions.push_back(Action::Disconnect { conn: *conn, answered: self.rules.infiniband }),
            (State::Established | State::Responded | State::Accepting | State::RequestPending, _) => {}
            (State::Connecting, _) => {
                // An attempt that the program cancels ends like one that fails.
                let part = self.take_part();
                if self.conclude(Step::Failed) {
                    self.event(IdEvent::errno(EventKind::ConnectError, Errno::CONNABORTED));
                }
                self.discard(now, part);
            }
            (State::Closed, _) if self.has_connected => leaves = std::mem::take(&mut self.left),
            _ => return Err(NOT_CONNECTED),
        }
        self.settle();
        Ok(leaves)
    }

    /// The program has destroyed the id's queue pair, which ends the connection without a word of it.
    /// Reported as [`EventKind::Disconnected`], as by a device in the kernel.
    pub fn queue_pair_destroyed(&mut self, now: &Now) {
        if self.is_datagram()
            || !matches!(
                self.state(),
                State::Connecting
                    | State::RequestPending
                    | State::Accepting
                    | State::Responded
                    | State::Established
            )
        {
            return;
        }
        match self.take_part() {
            // Its stream is closed with it.
            Part::Stream { conn } => self.part = Part::Stream { conn },
            part => self.discard(now, part),
        }
        self.stream_ended(now, Errno::CONNRESET);
        self.settle();
    }

    /// The queue pair that a connecting id knows by number exists no longer: nothing would take the
    /// connection. The shell looks before it hands on what the peer has sent.
    pub fn pair_is_gone(&mut self, now: &Now) {
        if !matches!((self.state(), self.pair), (State::Connecting, Some(Pair::Number(_)))) {
            return;
        }
        tracing::warn!("the queue pair of a connection by number is destroyed");
        let part = self.take_part();
        self.discard(now, part);
        self.fail_attempt(IdEvent::errno(EventKind::ConnectError, Errno::INVAL), false);
    }
}

/// What happens to it.
impl Life {
    pub(super) fn take_part(&mut self) -> Part {
        std::mem::replace(&mut self.part, Part::Nothing)
    }

    /// Takes a step to [`State::Closed`] if the table allows it; from then on only the program uses the queue
    /// pair.
    fn conclude(&mut self, step: Step) -> bool {
        let ended = self.life.take(step).is_ok();
        if ended {
            (self.ready, self.unreported_end) = (None, None);
        }
        ended
    }

    /// For the machine inside.
    pub(super) fn handle_inside(&mut self, now: &Now, input: Input<'_>) {
        match &mut self.part {
            Part::Active(active) => {
                // Of an earlier attempt, which this host has refused.
                if input.conn().is_none_or(|conn| conn.space() != self.spaces) {
                    return;
                }
                let begun = match input {
                    Input::Opened { .. } => true,
                    Input::Failed { why: Refusal::Local(errno), .. } if self.answer == Some(Due::Connect) => {
                        return self.connect_refused(errno);
                    }
                    Input::Failed { .. } => true,
                    _ => false,
                };
                active.handle_input(now, input);
                if begun && self.answer == Some(Due::Connect) {
                    self.answer = None;
                    self.actions.push_back(Action::Answer(Ok(())));
                }
            }
            Part::Listener(listener) => listener.handle_input(now, input),
            Part::Client(client) => client.handle_input(now, input),
            Part::Server(server) => server.handle_input(now, input),
            _ => {
                // Begun in the moment when the id ended.
                if let Input::Opened { conn, .. } | Input::Accepted { conn, .. } = input {
                    self.close(conn);
                }
                return;
            }
        }
        self.drain();
    }

    /// This host refuses to begin. Nothing was sent, and what the program has bound is still bound.
    fn connect_refused(&mut self, errno: Errno) {
        if self.life.take(Step::ConnectRefused).is_ok() {
            self.part = Part::Nothing;
            self.pair = None;
            self.answer = None;
            self.actions.push_back(Action::Answer(Err(errno)));
        }
    }

    /// How connecting goes on, or has ended.
    pub(super) fn attempt_reports(&mut self, report: active::Report) {
        if let active::Report::ConnectingFrom(local) = report {
            self.local = Some(local);
            return;
        }
        self.part = Part::Nothing;
        match report {
            active::Report::ConnectingFrom(_) => {}
            active::Report::Accepted { conn, said } => self.connect_accepted(conn, said),
            active::Report::Rejected(reply) => self.connect_rejected(reply),
            active::Report::Failed { kind, errno, .. } => self.connect_failed(kind, errno),
        }
    }

    fn connect_accepted(&mut self, conn: ConnKey, mut negotiated: Box<Negotiated>) {
        let private_data = cut(std::mem::take(&mut negotiated.private_data));
        let param = agreed(&negotiated, self.unknown_depths());
        self.peer_param = param;
        if matches!(self.pair, Some(Pair::Own(_))) {
            self.outcome = (param, private_data);
            self.attach(conn, negotiated);
        } else if self.life.take(Step::Response).is_ok() {
            self.part = Part::Parked { conn, negotiated };
            self.event(IdEvent { param, private_data, ..IdEvent::plain(EventKind::ConnectResponse, 0) });
        }
    }

    fn connect_rejected(&mut self, reply: Rejection) {
        let status = self.rejection(reason::CONSUMER_DEFINED, Errno::CONNREFUSED);
        let event = IdEvent {
            param: depths_of(reply.enhanced, ConnParam::NONE),
            private_data: cut(reply.private_data),
            ..IdEvent::plain(EventKind::Rejected, status)
        };
        self.fail_attempt(event, true);
    }

    fn connect_failed(&mut self, kind: EventKind, errno: Errno) {
        let refused = kind == EventKind::Rejected;
        let status = match errno {
            Errno::CONNREFUSED if refused => self.rejection(reason::INVALID_SERVICE_ID, errno),
            errno if refused => self.rejection(reason::CONSUMER_DEFINED, errno),
            errno => -errno.raw_os_error(),
        };
        self.fail_attempt(IdEvent::plain(kind, status), refused);
    }

    /// The status of a rejection: InfiniBand's reason if the device passes for InfiniBand or RoCE, an errno
    /// if it is an RNIC.
    fn rejection(&self, reason: i32, errno: Errno) -> i32 {
        if self.rules.infiniband { reason } else { -errno.raw_os_error() }
    }

    /// The attempt has failed. `flush`: what was posted for the connection is flushed, as by librdmacm,
    /// before the event is reported, so that the program finds the completions.
    fn fail_attempt(&mut self, event: IdEvent, flush: bool) {
        if !self.conclude(Step::Failed) {
            return;
        }
        if flush && matches!(self.pair, Some(Pair::Own(_))) {
            self.actions.push_back(Action::Fail);
            self.held = Some(Held::Event(Box::new(event)));
        } else {
            self.event(event);
        }
    }

    pub(super) fn handle_flushed(&mut self) {
        match self.held.take() {
            Some(Held::Event(event)) => self.event(*event),
            Some(Held::Answer(errno)) => {
                self.answer = None;
                self.actions.push_back(Action::Answer(Err(errno)));
            }
            None => {}
        }
    }

    /// A request of the listener inside: it becomes an id of its own.
    pub(super) fn requested(&mut self, report: listener::Report) {
        // The backlog bounds it from here on, so its place in the budget is given back.
        let listener::Report::Requested { conn, ends, handshake, request, place: _ } = report;
        let param = of_request(&request, self.unknown_depths());
        let mut life = Self::at(Arc::clone(&self.rules), State::RequestPending, None);
        life.ack_timeout = self.ack_timeout;
        (life.local, life.peer) = (Some(ends.local), Some(ends.peer));
        (life.requested, life.peer_param) = (param, param);
        life.request = Some(conn);
        life.part = Part::Request { conn, handshake, gone: None };
        let event = IdEvent {
            param,
            private_data: cut(request.private_data),
            ..IdEvent::plain(EventKind::ConnectRequest, 0)
        };
        self.report(Report::Request(Box::new(NewId { life, conn: Some(conn), event })));
    }

    /// The lower layer has taken so much of the reply.
    pub(super) fn reply_sent(&mut self, bytes: usize) {
        match self.take_part() {
            Part::Replying { conn, reply, negotiated } if bytes >= reply.len() => {
                self.has_connected = true;
                self.attach(conn, negotiated);
            }
            // A reply is far smaller than any socket's buffer: this connection is unusable.
            Part::Replying { conn, .. } => self.reply_failed(Some(conn), Errno::NOBUFS),
            part => self.part = part,
        }
    }

    /// The request is gone, usually because the peer gave up before the answer. As librdmacm: the receives
    /// that were posted for the connection are flushed. `open`: the connection, if it is still there.
    pub(super) fn reply_failed(&mut self, open: Option<ConnKey>, errno: Errno) {
        self.part = Part::Nothing;
        if let Some(conn) = open {
            self.close(conn);
        }
        if self.conclude(Step::Failed) {
            self.actions.push_back(Action::Fail);
            self.answer = Some(Due::Flush);
            self.held = Some(Held::Answer(if errno == Errno::PIPE { Errno::CONNRESET } else { errno }));
        }
    }

    fn attach(&mut self, conn: ConnKey, negotiated: Box<Negotiated>) {
        let said = negotiated.clone();
        self.actions.push_back(Action::Attach { conn, to: Recipient::Own, said, param: self.conn_param });
        self.part = Part::Attaching { conn, negotiated };
    }

    /// What the queue pair says of the stream that began on this connection.
    pub(super) fn handle_stream(&mut self, now: &Now, conn: ConnKey, event: StreamEvent) {
        let ours = match &self.part {
            Part::Stream { conn: ours } | Part::Attaching { conn: ours, .. } => *ours == conn,
            _ => false,
        };
        match event {
            StreamEvent::Attached => self.attached(now, conn),
            StreamEvent::Refused(error) => self.refused(now, conn, error),
            StreamEvent::Established if ours => self.established(),
            StreamEvent::Ended(why) if ours => self.ended(now, why),
            StreamEvent::Established | StreamEvent::Ended(_) | StreamEvent::Used => {}
        }
    }

    fn attached(&mut self, now: &Now, conn: ConnKey) {
        match self.take_part() {
            Part::Attaching { conn: ours, negotiated } if ours == conn => {
                self.part = Part::Stream { conn };
                match self.state() {
                    // Without an indication to wait for, the program may continue; the stream itself holds
                    // back until the peer's first FPDU (RFC 5044 section 7.1.2 rule 4).
                    State::Accepting if negotiated.rtr == Rtr::None => self.established(),
                    // The peer's ready-to-receive indication must arrive in bounded time.
                    State::Connecting | State::Accepting => {
                        // A limit that no clock can hold is none.
                        self.ready = now.get().checked_add(self.rules.timeouts.ready);
                    }
                    _ => {}
                }
            }
            part => self.part = part,
        }
        // The id has ended meanwhile. Its Disconnect comes behind the Attach.
        self.leaving.take_if(|leaving| *leaving == conn);
        self.answer_attach(conn, Ok(()));
    }

    /// The queue pair does not take the connection, which is this machine's again.
    fn refused(&mut self, now: &Now, conn: ConnKey, error: VerbsError) {
        if self.leaving.take_if(|leaving| *leaving == conn).is_some() {
            self.close(conn);
        }
        let errno = Errno::from_raw_os_error(error.errno());
        match self.take_part() {
            Part::Attaching { conn: ours, negotiated } if ours == conn => {
                tracing::warn!("cannot give the connection to the queue pair: {error}");
                self.close_with(conn, negotiated.local_error().unwrap_or_default());
                let was = self.state();
                if self.conclude(Step::Disconnected) {
                    self.event(IdEvent::plain(EventKind::Disconnected, 0));
                    self.start_timewait(now);
                } else if self.conclude(Step::Failed) && was == State::Connecting {
                    self.event(IdEvent::errno(EventKind::ConnectError, errno));
                }
            }
            part => self.part = part,
        }
        self.answer_attach(conn, Err(errno));
    }

    fn answer_attach(&mut self, conn: ConnKey, result: Result<(), Errno>) {
        if self.answer.take_if(|due| *due == Due::Attach(conn)).is_some() {
            self.actions.push_back(Action::Answer(result));
        }
    }

    /// The peer's indication has come, or there is none to wait for. The program's own connections by number
    /// are established when it says so.
    fn established(&mut self) {
        if self.life.take(Step::Established).is_err() {
            return;
        }
        self.ready = None;
        let (param, private_data) = std::mem::replace(&mut self.outcome, (ConnParam::NONE, Vec::new()));
        self.event(IdEvent { param, private_data, ..IdEvent::plain(EventKind::Established, 0) });
    }

    /// The peer's indication has not come in time.
    pub(super) fn not_ready(&mut self) {
        self.ready = None;
        if let Part::Stream { conn } = self.take_part() {
            self.actions.push_back(Action::Disconnect { conn, answered: false });
        }
        // A program that is told finds its queue pair in the error state, and its work requests flushed.
        self.fail_attempt(IdEvent::errno(EventKind::Unreachable, Errno::TIMEDOUT), true);
    }

    /// The stream has ended. If completions that came before it are not polled yet, the report waits.
    fn ended(&mut self, now: &Now, why: Disconnect) {
        tracing::debug!(?why, "stream ended");
        // A stream that broke has few completions that are worth the wait, and bad peers break many streams.
        let longest = match why {
            Disconnect::LocalClosed => None,
            Disconnect::PeerClosed => Some(self.rules.timeouts.unpolled),
            _ => self.rules.infiniband.then_some(UNPOLLED_LOOK),
        };
        // A program that moves its queue pair itself may have received before it says that it is established.
        match longest.filter(|_| matches!(self.state(), State::Established | State::Responded)) {
            Some(longest) if self.unreported_end.is_none() => {
                self.unreported_end = Some(UnreportedEnd { limit: now.get() + longest, look: None });
                self.actions.push_back(Action::CheckPolled);
            }
            Some(_) => {}
            None => self.stream_ended(
                now,
                if why == Disconnect::NoLink { Errno::OPNOTSUPP } else { Errno::CONNRESET },
            ),
        }
    }

    pub(super) fn handle_unpolled(&mut self, now: &Now, unpolled: bool) {
        let Some(end) = &mut self.unreported_end else { return };
        if end.look.is_some() {
            return;
        }
        if unpolled && now.get() < end.limit {
            end.look = Some(now.get() + UNPOLLED_LOOK);
        } else {
            self.stream_ended(now, Errno::CONNRESET);
        }
    }

    pub(super) fn check_unreported_end(&mut self, now: &Now) {
        let Some(end) = &mut self.unreported_end else { return };
        if end.limit <= now.get() {
            self.stream_ended(now, Errno::CONNRESET);
        } else if is_over(end.look, now) {
            end.look = None;
            self.actions.push_back(Action::CheckPolled);
        }
    }

    /// `errno`: why, if it has not begun.
    fn stream_ended(&mut self, now: &Now, errno: Errno) {
        if let Part::Stream { .. } | Part::Attaching { .. } = self.take_part() {
            self.left = true;
        }
        if self.conclude(Step::Disconnected) {
            self.event(IdEvent::plain(EventKind::Disconnected, 0));
            self.start_timewait(now);
        } else if self.conclude(Step::Failed) {
            self.event(IdEvent::errno(EventKind::ConnectError, errno));
        }
    }

    /// The peer has hung up before the queue pair got the connection, or the program has disconnected it.
    /// `open`: it is still there.
    pub(super) fn parked_ended(&mut self, now: &Now, open: bool) {
        let Part::Parked { conn, .. } = self.take_part() else { return };
        if open {
            self.close(conn);
        }
        if self.conclude(Step::Disconnected) {
            self.event(IdEvent::plain(EventKind::Disconnected, 0));
            self.start_timewait(now);
        }
    }
}
