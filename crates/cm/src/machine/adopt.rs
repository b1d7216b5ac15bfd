//! A connected socket of the program becomes the stream of a queue pair.
//!
//! Both ends have agreed on it beforehand, by means of their own, and on their roles: one initiates and one
//! responds (RFC 5044 section 7.1). From then on the socket's bytes are MPA's, in both directions.
//!
//! ```text
//!   socket ─▶ Adopt ─ request, reply ─▶ Attach ─ first FPDU ─▶ Report Adopted ─▶ Report Ended
//!               └──── not MPA, closed, too late ─────────────▶ Report Failed
//! ```
//!
//! Unlike a handshake of rdma_cm, this one cannot begin again on another connection, so a peer gets one
//! request only. If it fails, the connection carries nothing any more: nobody knows which of its bytes were
//! meant for whom.
//!
//! The program's own descriptor keeps the connection open. So every way out but a running stream closes with
//! [`Close::Finish`], and the shell must do the same where it drops the connection itself
//! ([`Input::Failed`]): otherwise the peer waits for its limit.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_driver::Disconnect;
use uwarp_llp::carrier::Close;
use uwarp_proto::setup::{AcceptParams, InitiatorConfig, Negotiated, ResponderPolicy, SetupError};
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::Now;
use uwarp_wire::terminate::{self, TerminateError};

use super::handshake::{Event, Failure, Handshake};
use super::{Action, ConnKey, Input, Machine, Recipient, Space, StreamEvent, Transmit, Want, is_over};
use crate::event::ConnParam;

/// Most bytes of private data: an enhanced frame also has the introduction of a uwarp end.
pub const MAX_PRIVATE_DATA: usize = uwarp_proto::setup::private_data_limit(true, true);

/// Which end sends the request, with what each needs for its part.
#[derive(Debug, Clone, Copy)]
pub enum Role {
    /// This one.
    Initiator(InitiatorConfig),
    /// The peer.
    Responder(ResponderPolicy, AcceptParams),
}

/// What becomes of an adopted socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Report {
    /// The stream runs, in both directions. With the peer's private data.
    Adopted(Vec<u8>),
    /// There is no stream, and the connection is of no use any more.
    ///
    /// | errno | why |
    /// |---|---|
    /// | `PROTO` | what the peer sent is not MPA's, or it did not offer what both ends need |
    /// | `CONNREFUSED` | this end does not expect the peer's private data, or the peer rejected the request |
    /// | `CONNRESET` | the peer closed or does not expect the reply's private data, or the connection broke |
    /// | `TIMEDOUT` | the peer did not do its part in time |
    /// | others | the lower layer's, or the queue pair's |
    Failed(Errno),
    /// The stream has ended, in an orderly way or with an error. `CONNRESET`: it broke, or the peer closed in
    /// the middle of a frame; `TIMEDOUT`: the peer does not answer; `PROTO`: one end has broken the protocol.
    Ended(Option<Errno>),
}

/// A socket that is being adopted, or was.
#[derive(Debug)]
pub struct Adopt {
    conn: ConnKey,
    /// Of a responder.
    terms: Option<AcceptParams>,
    private_data: Vec<u8>,
    /// Whether the peer's private data is what this end expects. Pure.
    expects: fn(&[u8]) -> bool,
    state: State,
    /// For all of set-up, until the stream runs.
    limit: Option<Instant>,
    actions: VecDeque<Action<Report>>,
}

/// | state | event | → | actions |
/// |-|-|-|-|
/// | – | new | Handshaking | the request, of an initiator |
/// | Handshaking | Accepted, Replied; its data is expected | Attaching | Attach |
/// | Handshaking | Requested; its data is expected | Handshaking | the reply |
/// | Handshaking | Accepted, Requested; its data is not | Leaving | a Terminate; a rejection |
/// | Handshaking | Rejected, bad frame, end | Leaving | a Terminate if the framing is known |
/// | Handshaking, Leaving | Failed | Over | Report Failed |
/// | Leaving | sent, or no room | Over | Close; Report Failed |
/// | Attaching | Attached | Attached | – |
/// | Attaching | Refused: the queue pair takes no stream, or is gone | Leaving | a Terminate |
/// | Attaching, Attached | Established | Established | Report Adopted |
/// | Attaching, Attached | Ended | Over | Disconnect; Report Failed |
/// | Established | Ended | Over | Report Ended |
/// | Handshaking | limit, cancel | Over | Close; Report Failed unless cancelled |
/// | Leaving | cancel | Over | Close |
/// | Attaching, Attached | limit, cancel | Over | Disconnect; Report Failed unless cancelled |
/// | Established | cancel | Over | – (the private data is returned) |
/// | Over, while attaching | Refused | Over | Close |
///
/// Leaving waits only for the shell's answer to what it sends, which comes at once.
#[derive(Debug)]
enum State {
    Handshaking(Box<Shaking>),
    /// What tells the peer why is on its way into the connection, which is then closed.
    Leaving(Box<Handshake>, Errno),
    Attaching(Box<Shaken>),
    /// With the peer's private data.
    Attached(Vec<u8>),
    /// With the same, for a cancel before it was reported.
    Established(Vec<u8>),
    /// `attaching`: the shell has the connection, and may bring it back.
    Over {
        attaching: bool,
    },
}

#[derive(Debug)]
struct Shaking {
    handshake: Handshake,
    /// Of a responder that has accepted; the stream begins when the reply is sent.
    said: Option<Box<Negotiated>>,
}

/// Kept for a refusal.
#[derive(Debug)]
struct Shaken {
    handshake: Handshake,
    said: Box<Negotiated>,
    private_data: Vec<u8>,
}

impl Adopt {
    /// Begins on a connected socket. `private_data`: for the peer, see [`MAX_PRIVATE_DATA`]. `limit`: for all
    /// of set-up. `INVAL`: too much private data.
    pub fn new(
        now: &Now,
        role: Role,
        private_data: &[u8],
        expects: fn(&[u8]) -> bool,
        limit: Duration,
    ) -> Result<Self, Errno> {
        let (handshake, terms) = match role {
            Role::Initiator(config) => {
                (Handshake::ask(now, None, config, private_data).map_err(|_| Errno::INVAL)?, None)
            }
            Role::Responder(policy, terms) => {
                (Handshake::await_request(now, None, policy, None), Some(terms))
            }
        };
        Ok(Self {
            conn: Space::new(0).name(),
            terms,
            private_data: private_data.to_vec(),
            expects,
            state: State::Handshaking(Box::new(Shaking { handshake, said: None })),
            // A limit that no clock can hold is none.
            limit: now.get().checked_add(limit),
            actions: VecDeque::new(),
        })
    }

    /// The socket's name: the only connection that is not begun by an action.
    pub fn conn(&self) -> ConnKey {
        self.conn
    }

    /// Gives up: nothing is reported any more. A stream that runs already goes on, and its peer's private
    /// data is returned: the report may have been on its way.
    pub fn cancel(&mut self) -> Option<Vec<u8>> {
        self.actions.retain(|action| !matches!(action, Action::Report(_)));
        let adopted = match &mut self.state {
            State::Established(private_data) => Some(std::mem::take(private_data)),
            _ => None,
        };
        self.abandon();
        adopted
    }

    /// Ends what there is before the stream runs.
    fn abandon(&mut self) {
        let waiting = self.actions.len();
        self.actions.retain(|action| !matches!(action, Action::Attach { .. }));
        let unattached = self.actions.len() < waiting;
        self.limit = None;
        match std::mem::replace(&mut self.state, State::Over { attaching: false }) {
            State::Attaching(_) if !unattached => {
                self.state = State::Over { attaching: true };
                self.actions.push_back(Action::Disconnect { conn: self.conn, answered: false });
            }
            State::Attached(_) => {
                self.actions.push_back(Action::Disconnect { conn: self.conn, answered: false })
            }
            State::Handshaking(_) | State::Leaving(..) | State::Attaching(_) => self.close(),
            // The stream goes on; its end is not reported.
            State::Established(_) => {}
            over @ State::Over { .. } => self.state = over,
        }
    }

    fn close(&mut self) {
        self.actions.push_back(Action::Close { conn: self.conn, how: Close::Finish });
    }

    fn report(&mut self, report: Report) {
        self.actions.push_back(Action::Report(report));
    }

    /// Closes the connection behind what the handshake still sends.
    fn leave(&mut self, handshake: Handshake, errno: Errno) {
        self.limit = None;
        if handshake.is_drained() {
            self.state = State::Over { attaching: false };
            self.close();
            self.report(Report::Failed(errno));
        } else {
            self.state = State::Leaving(Box::new(handshake), errno);
        }
    }

    fn shake(&mut self, now: &Now, shaking: Shaking, input: Input<'_>) {
        let is_dropped = matches!(input, Input::Failed { .. });
        let Shaking { mut handshake, said } = shaking;
        match (handshake.handle_input(input), said) {
            (None, said) => self.state = State::Handshaking(Box::new(Shaking { handshake, said })),
            (Some(Event::Requested(request)), _) => self.decide(now, handshake, request.private_data),
            (Some(Event::Accepted(said)), _) if !(self.expects)(&said.private_data) => {
                handshake.refuse(&said);
                self.leave(handshake, Errno::CONNREFUSED);
            }
            (Some(Event::Accepted(said)), _) | (Some(Event::Replied), Some(said)) => {
                self.attach(handshake, said);
            }
            // Replied: not reached, a rejection is sent while leaving.
            (Some(Event::Rejected(_) | Event::Replied), _) => self.leave(handshake, Errno::CONNREFUSED),
            (Some(Event::Failed(failure)), _) if is_dropped => {
                self.limit = None;
                self.report(Report::Failed(errno_of(failure)));
            }
            (Some(Event::Failed(failure)), _) => self.leave(handshake, errno_of(failure)),
        }
    }

    /// Answers a request.
    fn decide(&mut self, now: &Now, mut handshake: Handshake, peers: Vec<u8>) {
        let Some(terms) = self.terms.filter(|_| (self.expects)(&peers)) else {
            return match handshake.reject(now, &[]) {
                Ok(()) => self.leave(handshake, Errno::CONNREFUSED),
                Err(error) => self.leave(handshake, protocol_error(error)),
            };
        };
        match handshake.accept(now, terms, &self.private_data) {
            Ok(mut said) => {
                said.private_data = peers;
                self.state = State::Handshaking(Box::new(Shaking { handshake, said: Some(Box::new(said)) }));
            }
            Err(error) => self.leave(handshake, protocol_error(error)),
        }
    }

    fn attach(&mut self, handshake: Handshake, mut said: Box<Negotiated>) {
        let private_data = std::mem::take(&mut said.private_data);
        let (conn, param) = (self.conn, ConnParam::DEFAULT);
        self.actions.push_back(Action::Attach { conn, to: Recipient::Own, said: said.clone(), param });
        self.state = State::Attaching(Box::new(Shaken { handshake, said, private_data }));
    }

    fn handle_stream(&mut self, event: StreamEvent) {
        let over = State::Over { attaching: false };
        self.state = match (std::mem::replace(&mut self.state, over), event) {
            (State::Attaching(shaken), StreamEvent::Attached) => State::Attached(shaken.private_data),
            (State::Attaching(shaken), StreamEvent::Refused(error)) => return self.refused(*shaken, error),
            // It may come before the shell knows that the queue pair has the connection.
            (State::Attaching(shaken), StreamEvent::Established) => self.established(shaken.private_data),
            (State::Attached(private_data), StreamEvent::Established) => self.established(private_data),
            (State::Attaching(_) | State::Attached(_), StreamEvent::Ended(_)) => {
                self.limit = None;
                self.actions.push_back(Action::Disconnect { conn: self.conn, answered: false });
                self.report(Report::Failed(Errno::CONNRESET));
                State::Over { attaching: false }
            }
            (State::Established(_), StreamEvent::Ended(why)) => {
                self.report(Report::Ended(error_of(why)));
                State::Over { attaching: false }
            }
            // An end that is closed during set-up closes, as at any other time: the peer would report a
            // Terminate as an error.
            (State::Over { attaching: true }, StreamEvent::Refused(_)) => {
                self.close();
                State::Over { attaching: false }
            }
            (state, _) => state,
        };
    }

    fn established(&mut self, private_data: Vec<u8>) -> State {
        self.limit = None;
        self.report(Report::Adopted(private_data.clone()));
        State::Established(private_data)
    }

    /// The peer believes that the stream has begun.
    fn refused(&mut self, shaken: Shaken, error: VerbsError) {
        tracing::warn!("cannot give the connection to the queue pair: {error}");
        let Shaken { mut handshake, said, .. } = shaken;
        handshake.refuse(&said);
        self.leave(handshake, Errno::from_raw_os_error(error.errno()));
    }
}

impl Machine for Adopt {
    type Report = Report;

    fn handle_input(&mut self, now: &Now, input: Input<'_>) {
        if input.conn() != Some(self.conn) {
            return;
        }
        if let Input::Stream { event, .. } = input {
            return self.handle_stream(event);
        }
        match std::mem::replace(&mut self.state, State::Over { attaching: false }) {
            State::Handshaking(shaking) => self.shake(now, *shaking, input),
            State::Leaving(_, errno) if matches!(input, Input::Failed { .. }) => {
                self.report(Report::Failed(errno));
            }
            State::Leaving(mut handshake, errno) => {
                handshake.handle_input(input);
                self.leave(*handshake, errno);
            }
            state => self.state = state,
        }
    }

    fn handle_timeout(&mut self, now: &Now) {
        if is_over(self.limit, now) {
            self.abandon();
            self.report(Report::Failed(Errno::TIMEDOUT));
        }
    }

    fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
        let bytes = match &self.state {
            State::Handshaking(shaking) => shaking.handshake.poll_transmit()?,
            State::Leaving(handshake, _) => handshake.poll_transmit()?,
            _ => return None,
        };
        Some(Transmit::Bytes { conn: self.conn, bytes })
    }

    fn poll_timeout(&self) -> Option<Instant> {
        self.limit
    }

    fn poll_action(&mut self) -> Option<Action<Report>> {
        self.actions.pop_front()
    }

    fn want(&self, conn: ConnKey) -> Want {
        match &self.state {
            State::Handshaking(shaking) if conn == self.conn => shaking.handshake.want(),
            _ => Want::Nothing,
        }
    }
}

fn errno_of(failure: Failure) -> Errno {
    match failure {
        Failure::TimedOut => Errno::TIMEDOUT,
        Failure::Lower(why) => why.errno(),
        Failure::Setup(SetupError::Closed { .. }) => Errno::CONNRESET,
        Failure::Setup(error) => protocol_error(error),
    }
}

fn protocol_error(error: SetupError) -> Errno {
    tracing::warn!("{error}; both ends must agree on IWARP_MODE, and on who initiates, before they set it");
    Errno::PROTO
}

fn error_of(why: Disconnect) -> Option<Errno> {
    match why {
        Disconnect::PeerClosed | Disconnect::LocalClosed => None,
        Disconnect::Timeout => Some(Errno::TIMEDOUT),
        Disconnect::NoLink => Some(Errno::OPNOTSUPP),
        // A process that is killed leaves half a frame behind.
        Disconnect::Reset | Disconnect::Sent(TerminateError::Mpa(terminate::Mpa::ConnectionLost)) => {
            Some(Errno::CONNRESET)
        }
        Disconnect::Terminated(_) | Disconnect::Sent(_) => Some(Errno::PROTO),
    }
}

#[cfg(test)]
#[path = "tests/adopt.rs"]
mod tests;
