//! A connected TCP socket becomes the stream of a queue pair.
//!
//! Both ends have agreed on it beforehand, by means of their own, and on their roles: one initiates and one
//! responds (RFC 5044 section 7.1). From then on the socket's bytes are MPA's, in both directions. The
//! program's descriptor stays the kernel's TCP socket; the queue pair gets a second one for it.
//!
//! ```text
//!   socket ─▶ Adoption ─ request, reply ─▶ driver::Qp::attach ─ first FPDU ─▶ AdoptObserver::adopted
//!                  └──── not MPA, closed, too late ─────────────────────────▶ AdoptObserver::failed
//! ```
//!
//! Unlike a handshake of rdma_cm, this one cannot begin again on another connection, so a peer gets one
//! request only. If it fails, the connection carries nothing any more: nobody knows which of its bytes were
//! meant for whom.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::io::Errno;
use uwarp_driver::config::Config;
use uwarp_driver::{Alarm, Disconnect, Qp, Readiness, Source, StreamObserver, Token};
use uwarp_llp::carrier::{Close, Got, Refusal, SetUp};
use uwarp_proto::setup::{
    AcceptParams, Depths, Initiator, InitiatorConfig, Negotiated, Outcome, PeerData, Responder, SetupError,
};
use uwarp_wire::mpa;
use uwarp_wire::terminate::{self, TerminateError};

use crate::carriers;
use crate::cm::Cm;
use crate::event::ConnParam;
use crate::handshake::report_local_error;
use crate::params::{peer_data, revision, stream_params};
use crate::timeouts::ACK_TIMEOUT;

/// Most bytes of private data: an enhanced frame also has the introduction of a uwarp end.
pub const MAX_PRIVATE_DATA: usize = uwarp_proto::setup::private_data_limit(true, true);

/// Which end sends the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// This one.
    Initiator,
    /// The peer.
    Responder,
}

/// Learns what becomes of an adopted socket. Called without a lock; must not block.
pub trait AdoptObserver: Send + Sync {
    /// Whether the peer's private data is what this end expects. A request that is not gets a rejection.
    fn accepts(&self, private_data: &[u8]) -> bool;
    /// The stream runs, in both directions. Called once at most, as is the next one.
    fn adopted(&self, private_data: Vec<u8>);
    /// There is no stream, and the connection is of no use any more.
    ///
    /// | errno | why |
    /// |---|---|
    /// | `PROTO` | what the peer sent is not MPA's, or it did not offer what both ends need |
    /// | `CONNREFUSED` | the peer's end does not accept this one's private data, or the other way round |
    /// | `CONNRESET` | the peer closed, or the connection broke |
    /// | `TIMEDOUT` | the peer did not do its part in time |
    fn failed(&self, errno: Errno);
    /// The stream has ended, in an orderly way or with an error. `CONNRESET`: it broke, or the peer closed in
    /// the middle of a frame; `TIMEDOUT`: the peer does not answer; `PROTO`: one end has broken the protocol.
    fn ended(&self, error: Option<Errno>);
}

/// A socket that is being adopted, or was.
pub struct Adoption {
    me: Weak<Self>,
    cm: Arc<Cm>,
    /// The queue pair's stream has the adoption for an observer.
    qp: Weak<Qp>,
    observer: Weak<dyn AdoptObserver>,
    /// What a uwarp peer learns of the queue pair.
    introduction: PeerData,
    state: Mutex<State>,
}

struct State {
    phase: Phase,
    /// Until the stream runs.
    timer: Option<Alarm>,
}

enum Phase {
    Handshake(Box<Handshake>),
    /// The queue pair has the socket; the stream does not run yet.
    Attached {
        private_data: Vec<u8>,
    },
    Established,
    Over,
}

enum Machine {
    Initiator(Initiator),
    Responder(Responder),
}

struct Handshake {
    connection: Box<dyn SetUp>,
    token: Token,
    machine: Machine,
    private_data: Vec<u8>,
    /// Set-up bytes to send, and how many of them are sent. The program may have left the socket's buffer
    /// full.
    unsent: Vec<u8>,
    sent: usize,
    /// The stream begins when all is sent.
    negotiated: Option<Negotiated>,
}

impl Adoption {
    /// `NOTSOCK`, `OPNOTSUPP`: not a TCP socket.
    pub fn check_type(socket: BorrowedFd<'_>) -> Result<(), Errno> {
        carriers::check_type(socket)
    }

    /// Begins on a connected socket of the program, of which `socket` is a second descriptor. `qp`: in INIT.
    /// `private_data`: for the peer. `limit`: for all of set-up. Does not block; what becomes of it is
    /// reported to the observer, possibly before this returns. An error that is returned is not reported;
    /// nothing was sent or received then, but `TCP_NODELAY` and `SO_RCVLOWAT` may have been set.
    pub fn start(
        cm: &Arc<Cm>,
        socket: OwnedFd,
        role: Role,
        qp: &Arc<Qp>,
        private_data: &[u8],
        limit: Duration,
        observer: Weak<dyn AdoptObserver>,
    ) -> Result<Arc<Self>, Errno> {
        let connection = carriers::adopt(socket)?;
        let config = Config::get();
        let introduction = peer_data(qp.qpn(), qp.query().min_rnr_timer, ConnParam::DEFAULT);
        let mut unsent = Vec::new();
        let machine = match role {
            Role::Initiator => {
                let request = InitiatorConfig {
                    revision: revision(config),
                    crc: config.crc,
                    markers: config.markers,
                    depths: depths(cm),
                    max_ird: cm.max_depth(),
                    peer: config.find_uwarp_peers.then_some(introduction),
                    peer_in_request: false,
                };
                let mut machine = Initiator::new(request, private_data).map_err(|_| Errno::INVAL)?;
                unsent = machine.poll_transmit().unwrap_or_default();
                Machine::Initiator(machine)
            }
            Role::Responder => Machine::Responder(Responder::new(cm.responder_policy())),
        };
        let adoption = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            cm: Arc::clone(cm),
            qp: Arc::downgrade(qp),
            observer,
            introduction,
            state: Mutex::new(State { phase: Phase::Over, timer: None }),
        });
        // Locked until all is in place: readiness may be reported at once.
        let mut state = adoption.state.lock();
        let engine = cm.engine();
        let source = Arc::clone(&adoption) as Arc<dyn Source>;
        let token = carriers::watch(engine, connection.watch(), source)?;
        let me: Weak<Self> = Weak::clone(&adoption.me);
        state.timer = Instant::now().checked_add(limit).map(|at| Alarm::at(engine, me, at));
        let private_data = private_data.to_vec();
        state.phase = Phase::Handshake(Box::new(Handshake {
            connection,
            token,
            machine,
            private_data,
            unsent,
            sent: 0,
            negotiated: None,
        }));
        drop(state);
        adoption.advance();
        Ok(adoption)
    }

    /// Gives up: nothing is reported any more. A stream that runs already goes on.
    pub fn cancel(&self) {
        let old = {
            let mut state = self.state.lock();
            if matches!(state.phase, Phase::Established) {
                return;
            }
            state.timer = None;
            std::mem::replace(&mut state.phase, Phase::Over)
        };
        self.discard(old);
    }

    fn discard(&self, phase: Phase) {
        if let Phase::Handshake(handshake) = phase {
            self.cm.engine().deregister(handshake.token);
            // The program's descriptor holds the connection open, and its peer must not wait for it.
            handshake.connection.close(Close::Finish);
        }
    }

    /// Goes on as far as possible without waiting.
    fn advance(&self) {
        // Before the lock, so dropped after it is released: an observer that others have dropped meanwhile
        // gives the adoption up when it is dropped here.
        let observer = self.observer.upgrade();
        let mut state = self.state.lock();
        let Phase::Handshake(handshake) = &mut state.phase else { return };
        let terms = AcceptParams { depths: depths(&self.cm), peer: self.introduction };
        let result = match &observer {
            Some(observer) => handshake.advance(terms, observer.as_ref()),
            None => Err(Errno::CANCELED),
        };
        match result {
            Ok(None) => {}
            Ok(Some(negotiated)) => {
                let private_data = negotiated.1;
                let attached = Phase::Attached { private_data };
                let old = std::mem::replace(&mut state.phase, attached);
                drop(state);
                let Phase::Handshake(handshake) = old else { return };
                self.attach(handshake, &negotiated.0);
            }
            // Under the same lock: another thread would go on with a machine that has failed.
            Err(errno) => self.fail_locked(state, errno),
        }
    }

    fn attach(&self, handshake: Box<Handshake>, negotiated: &Negotiated) {
        // Before the queue pair registers the same descriptor.
        self.cm.engine().deregister(handshake.token);
        let (Some(me), Some(qp)) = (self.me.upgrade(), self.qp.upgrade()) else { return };
        let params = stream_params(negotiated, ConnParam::DEFAULT, ACK_TIMEOUT, qp.query().min_rnr_timer);
        tracing::debug!(qpn = qp.qpn(), ?params, "attach an adopted socket");
        if let Err((error, link)) = qp.attach(handshake.connection.into_link(), params, me) {
            let connection = link.into_set_up();
            // An end that is closed during set-up closes, as at any other time. The peer would report a
            // Terminate as an error. As in `discard`, the program's descriptor holds the connection open.
            if matches!(self.state.lock().phase, Phase::Over) {
                connection.close(Close::Finish);
            } else {
                tracing::warn!("cannot give the connection to the queue pair: {error}");
                report_local_error(connection, negotiated);
            }
            self.fail(Errno::from_raw_os_error(error.errno()));
        }
    }

    fn fail(&self, errno: Errno) {
        self.fail_locked(self.state.lock(), errno);
    }

    fn fail_locked(&self, mut state: MutexGuard<'_, State>, errno: Errno) {
        if matches!(state.phase, Phase::Established | Phase::Over) {
            return;
        }
        let old = std::mem::replace(&mut state.phase, Phase::Over);
        state.timer = None;
        drop(state);
        let attached = matches!(old, Phase::Attached { .. });
        self.discard(old);
        if attached && let Some(qp) = self.qp.upgrade() {
            qp.disconnect();
        }
        if let Some(observer) = self.observer.upgrade() {
            observer.failed(errno);
        }
    }
}

fn depths(cm: &Cm) -> Depths {
    Depths::negotiated(cm.max_depth(), cm.max_depth())
}

impl Handshake {
    /// `None`: wait for input or room. Else what is agreed, and the peer's private data.
    fn advance(
        &mut self,
        terms: AcceptParams,
        observer: &dyn AdoptObserver,
    ) -> Result<Option<(Negotiated, Vec<u8>)>, Errno> {
        loop {
            if !self.flush().map_err(Refusal::errno)? {
                return Ok(None);
            }
            if let Some(mut negotiated) = self.negotiated.take() {
                let private_data = std::mem::take(&mut negotiated.private_data);
                return Ok(Some((negotiated, private_data)));
            }
            let mut buffer = [0; mpa::MAX_PRIVATE_DATA];
            // No more than the frame: what follows is the stream's.
            let want = match &self.machine {
                Machine::Initiator(machine) => machine.want(),
                Machine::Responder(machine) => machine.want(),
            };
            let room = buffer.get_mut(..want.min(mpa::MAX_PRIVATE_DATA)).unwrap_or_default();
            let received = match self.connection.receive(room) {
                Ok(Got::Bytes(received)) => received,
                Ok(Got::Nothing) => return Ok(None),
                Ok(Got::End) => return Err(Errno::CONNRESET),
                Err(why) => return Err(why.errno()),
            };
            let input = buffer.get(..received).unwrap_or_default();
            if let Err(error) = self.take(input, terms, observer) {
                // A Terminate or a rejection, if there is one to send. The connection ends either way.
                let _ = self.flush();
                return Err(error);
            }
        }
    }

    fn take(&mut self, input: &[u8], terms: AcceptParams, observer: &dyn AdoptObserver) -> Result<(), Errno> {
        match &mut self.machine {
            Machine::Initiator(machine) => {
                let outcome = machine.handle_input(input);
                self.unsent = machine.poll_transmit().unwrap_or_default();
                self.sent = 0;
                match outcome.map_err(protocol_error)? {
                    None => {}
                    Some(Outcome::Rejected(_)) => return Err(Errno::CONNREFUSED),
                    Some(Outcome::Accepted(negotiated)) if observer.accepts(&negotiated.private_data) => {
                        self.negotiated = Some(negotiated);
                    }
                    Some(Outcome::Accepted(negotiated)) => {
                        self.unsent = negotiated.local_error().unwrap_or_default();
                        self.sent = 0;
                        return Err(Errno::CONNREFUSED);
                    }
                }
            }
            Machine::Responder(machine) => {
                let Some(request) = machine.handle_input(input).map_err(protocol_error)? else {
                    return Ok(());
                };
                let accepts = observer.accepts(&request.private_data);
                if accepts {
                    let mut negotiated = machine.accept(terms, &self.private_data).map_err(protocol_error)?;
                    negotiated.private_data = request.private_data;
                    self.negotiated = Some(negotiated);
                } else {
                    machine.reject(&[]).map_err(protocol_error)?;
                }
                self.unsent = machine.poll_transmit().unwrap_or_default();
                self.sent = 0;
                if !accepts {
                    return Err(Errno::CONNREFUSED);
                }
            }
        }
        Ok(())
    }

    /// Sends what there is to send; false: not all of it yet.
    fn flush(&mut self) -> Result<bool, Refusal> {
        while let Some(rest) = self.unsent.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match self.connection.send_some(rest) {
                Ok(0) => return Ok(false),
                Ok(sent) => self.sent += sent,
                Err(why) => return Err(why),
            }
        }
        Ok(true)
    }
}

fn protocol_error(error: SetupError) -> Errno {
    tracing::warn!("{error}; both ends must agree on IWARP_MODE, and on who initiates, before they set it");
    Errno::PROTO
}

impl Source for Adoption {
    fn ready(&self, _: Readiness) {
        self.advance();
    }

    fn timeout(&self) {
        self.fail(Errno::TIMEDOUT);
    }
}

impl StreamObserver for Adoption {
    fn established(&self) {
        let private_data = {
            let mut state = self.state.lock();
            let Phase::Attached { private_data } = &mut state.phase else { return };
            let private_data = std::mem::take(private_data);
            state.phase = Phase::Established;
            state.timer = None;
            private_data
        };
        if let Some(observer) = self.observer.upgrade() {
            observer.adopted(private_data);
        }
    }

    fn disconnected(&self, why: Disconnect) {
        let established = matches!(self.state.lock().phase, Phase::Established);
        if !established {
            return self.fail(Errno::CONNRESET);
        }
        if let Some(observer) = self.observer.upgrade() {
            observer.ended(error_of(why));
        }
    }
}

fn error_of(why: Disconnect) -> Option<Errno> {
    match why {
        Disconnect::PeerClosed | Disconnect::LocalClosed => None,
        Disconnect::Timeout => Some(Errno::TIMEDOUT),
        // A process that is killed leaves half a frame behind.
        Disconnect::Reset | Disconnect::Sent(TerminateError::Mpa(terminate::Mpa::ConnectionLost)) => {
            Some(Errno::CONNRESET)
        }
        Disconnect::Terminated(_) | Disconnect::Sent(_) => Some(Errno::PROTO),
    }
}
