//! A stream whose link changes before its first byte. A responder attaches the link of the set-up with its
//! reply, because the peer's first frame may come at once, and learns a moment later that the initiator uses
//! another one. Which of the two it is, the initiator alone decides, so that no byte is ever on both.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use uwarp_llp::link::{Caps, Kind};
use uwarp_llp::memory::lane::{End, Lane};
use uwarp_llp::{Link, LowerLayer as _};
use uwarp_proto::framing::Framing;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Now, QpModify, QpState};

use super::{Conn, Inner, Notice, Qp, StreamNumber, Timer, link_caps, mark};
use crate::config::LinkChoice;
use crate::host::{self, Granted, Why};
use crate::places::Place;
use crate::pump::Pump;

/// Whether the link of a stream may change before its first byte.
pub enum Settling {
    /// It stays as it is.
    Over,
    /// The initiator asks for memory. Nothing moves until it has an answer.
    Asking {
        /// Without memory the stream ends, and until it is had the program does not hear that it has begun.
        required: bool,
        /// The program is to hear that.
        established: bool,
    },
    /// The responder waits for the initiator's first byte.
    Open {
        /// If it comes over the connection, the stream ends.
        required: bool,
        /// The lane that it may come over.
        granted: Option<Arc<Granted>>,
    },
    /// Memory is required, and cannot be had: the stream ends.
    Failed,
}

impl Settling {
    /// Whether a stream with these ends leads from a queue pair to itself, and does so in memory: then no
    /// set-up has offered it.
    pub(crate) fn is_alone(choice: LinkChoice, [own, peer]: [SocketAddr; 2]) -> bool {
        own == peer && matches!(choice, LinkChoice::Auto | LinkChoice::Memory)
    }

    /// The beginning of a stream after set-up, between these ends.
    pub fn begin(choice: LinkChoice, negotiated: &Negotiated, ends: [SocketAddr; 2]) -> Self {
        let required = choice == LinkChoice::Memory;
        if Self::is_alone(choice, ends) {
            return Self::Asking { required, established: false };
        }
        match (choice, negotiated.host.is_some(), negotiated.initiator) {
            (LinkChoice::Tcp, ..) | (LinkChoice::Auto, false, _) => Self::Over,
            // They are chosen when a connection is made, and this one is TCP's. (That is said next.)
            (LinkChoice::Rd, ..) => Self::Asking { required: true, established: false },
            // (It is one of the others by now: [`crate::host::choice`].)
            (LinkChoice::Hybrid(_), ..) => Self::Over,
            (_, _, true) => Self::Asking { required, established: false },
            (_, _, false) => Self::Open { required, granted: None },
        }
    }

    #[inline]
    pub(super) fn is_over(&self) -> bool {
        matches!(self, Self::Over)
    }

    /// Nothing goes over the connection: not yet, or never.
    #[inline]
    pub(super) fn is_mute(&self) -> bool {
        matches!(self, Self::Asking { .. } | Self::Failed)
    }

    /// The initiator has asked for a lane, and may use it.
    pub(super) fn is_granted(&self) -> bool {
        matches!(self, Self::Open { granted: Some(_), .. })
    }

    pub(super) fn has_failed(&self) -> bool {
        matches!(self, Self::Failed)
    }

    /// The stream has begun. Whether the program hears that later.
    pub(super) fn withholds_established(&mut self) -> bool {
        match self {
            Self::Asking { required: true, established } => {
                *established = true;
                true
            }
            _ => false,
        }
    }
}

impl Qp {
    /// The stream with this number goes over another link, in frames of `framing`: `change` makes it, of the
    /// one that the stream was attached with, and it can do `caps`. Refused if anything of the stream has
    /// moved.
    pub fn settle(
        &self,
        number: StreamNumber,
        framing: Framing,
        caps: Caps,
        change: impl FnOnce(Link) -> Link,
    ) -> Result<(), VerbsError> {
        let mut inner = self.inner.lock();
        let result = self.settle_locked(&mut inner, number, framing, caps, change);
        if result.is_ok() {
            self.pump(&mut inner, &Now::unread());
        }
        self.release(inner);
        result
    }

    /// The stream with this number goes over a lane; its TCP connection stays beside it.
    pub(crate) fn settle_in_memory(&self, number: StreamNumber, end: End) -> Result<(), VerbsError> {
        self.settle(number, Framing::PLAIN, Caps::MEMORY, |tcp| in_memory(end, tcp))
    }

    /// Whether this stream has not begun yet, in either direction.
    pub(crate) fn may_settle(&self, number: StreamNumber) -> bool {
        let inner = self.inner.lock();
        let may = inner.streams == number
            && inner.conn.as_ref().is_some_and(|conn| conn.pump.is_untouched())
            && !inner.core.has_heard();
        self.let_go(inner);
        may
    }

    /// The initiator of this stream may use this lane instead of the connection.
    pub(crate) fn grant(&self, number: StreamNumber, lane: Arc<Granted>) {
        let mut inner = self.inner.lock();
        if inner.streams == number
            && let Some(Conn { settling: Settling::Open { granted, .. }, .. }) = &mut inner.conn
        {
            *granted = Some(lane);
        }
        self.let_go(inner);
    }

    /// The peer of this stream has this place until the stream ends.
    pub fn keep_place(&self, number: StreamNumber, place: Place) {
        let mut inner = self.inner.lock();
        if inner.streams == number
            && let Some(conn) = &mut inner.conn
        {
            conn.place = Some(place);
        }
        self.let_go(inner);
    }

    /// This stream, whose link was not settled, stays with its connection, or ends if that is not allowed.
    pub(crate) fn stay_with_tcp(&self, number: StreamNumber, why: Why) {
        let mut inner = self.inner.lock();
        if inner.streams == number
            && let Some(conn) = inner.conn.as_mut().filter(|conn| conn.link.kind() != Kind::Rd)
        {
            conn.why_tcp = Some(why);
            match conn.settling {
                Settling::Asking { required: true, .. } | Settling::Open { required: true, .. } => {
                    self.fail_to_settle(&mut inner, why);
                }
                Settling::Asking { .. } => {
                    say_tcp(self.qpn(), why);
                    conn.settling = Settling::Over;
                    self.pump(&mut inner, &Now::unread());
                }
                // The initiator decides.
                Settling::Open { .. } | Settling::Over | Settling::Failed => {}
            }
        }
        self.release(inner);
    }

    /// The stream cannot go on as the program's user wants it.
    fn fail_to_settle(&self, inner: &mut Inner, why: Why) {
        if why == Why::Datagrams {
            tracing::error!(
                qpn = self.qpn(),
                "UWARP_LINK requires reliable datagrams, but {why}: the connection ends"
            );
        } else {
            tracing::error!(qpn = self.qpn(), "UWARP_LINK requires memory, but {why}: the connection ends");
        }
        if let Some(conn) = &mut inner.conn {
            conn.settling = Settling::Failed;
        }
        // Cannot be refused: any state may become the error state.
        let _ = inner.core.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() });
    }

    /// The link of this stream is not settled: looks where the initiator's first byte comes. Returns whether
    /// the stream receives from the link that it has then.
    #[cold]
    pub(super) fn decide(&self, inner: &mut Inner) -> bool {
        let Inner { core, conn: Some(conn), streams, .. } = inner else { return false };
        let (required, granted) = match &conn.settling {
            Settling::Over => return true,
            Settling::Asking { .. } | Settling::Failed => return false,
            Settling::Open { required, granted } => (*required, granted.clone()),
        };
        if core.has_heard() || conn.link.kind() != Kind::Tcp {
            // The initiator's first byte has come, and this is the link that it has come over.
            conn.settling = Settling::Over;
            if conn.link.kind() == Kind::Tcp {
                say_tcp(self.qpn(), *conn.why_tcp.get_or_insert(Why::Initiator));
            }
            return true;
        }
        if !required && granted.is_none() {
            return true;
        }
        // Nothing is received that was not seen here: it could come in between.
        let seen = conn.link.peek_tcp();
        if seen == Some(true) {
            if required {
                // It may be too early for this process to have said why it gives none.
                let why = if host::shares_nothing() { Why::Sandbox } else { Why::Initiator };
                self.fail_to_settle(inner, why);
                return false;
            }
            conn.settling = Settling::Over;
            conn.why_tcp = Some(Why::Initiator);
            say_tcp(self.qpn(), Why::Initiator);
            return true;
        }
        // Behind the look at the connection's end: what was written before it is received.
        if let Some(end) = granted.and_then(|granted| granted.take_used()) {
            let change = |tcp| in_memory(end, tcp);
            let number = *streams;
            let settled = self.settle_locked(inner, number, Framing::PLAIN, Caps::MEMORY, change);
            if let Err(error) = settled {
                tracing::debug!(qpn = self.qpn(), "the link is not settled: {error}");
            }
            return true;
        }
        seen.is_some()
    }

    /// The caller pumps: it does not see what was received here, and leaves it without being acted on.
    fn settle_locked(
        &self,
        inner: &mut Inner,
        number: StreamNumber,
        framing: Framing,
        caps: Caps,
        change: impl FnOnce(Link) -> Link,
    ) -> Result<(), VerbsError> {
        let Some(conn) = inner.conn.as_mut().filter(|_| inner.streams == number) else {
            return Err(VerbsError::Invalid("the stream has ended, or another one has begun"));
        };
        if conn.link.kind() == Kind::Rd {
            return Err(VerbsError::Invalid("a stream of reliable datagrams keeps its link"));
        }
        if !conn.pump.is_untouched() || conn.settling.has_failed() {
            return Err(VerbsError::Invalid("this stream is in use"));
        }
        let me = self.me.upgrade().ok_or(VerbsError::Invalid("the queue pair is being destroyed"))?;
        inner.core.reframe(&Now::unread(), framing, link_caps(caps))?;
        let engine = self.shell.nic().engine();
        if conn.parked.take().is_some() {
            engine.unpark();
        }
        engine.deregister(conn.timer.token);
        let Some(conn) = inner.conn.take() else { return Ok(()) };
        let needed_system = conn.link.caps().needs_system;
        let link = change(conn.link);
        if needed_system != caps.needs_system {
            self.shell.set_needs_system(caps.needs_system);
        }
        // What was reported, and what the pump knows, is about the other link.
        self.hung_up.store(false, Ordering::Release);
        let registered = engine.register_watch(link.watch(), me);
        let token = *registered.as_ref().unwrap_or(&conn.timer.token);
        link.set_name(token.0);
        mark(&link, inner.traffic_class);
        say_link(self.qpn(), &link);
        self.shell.fed_by(Some(token));
        let (pump, timer) = (Pump::default(), Timer { token, at: None });
        if matches!(conn.settling, Settling::Asking { established: true, .. }) && !inner.destroyed {
            inner.notices.push_back(Notice::Established(conn.observer.clone()));
        }
        inner.conn = Some(Conn { link, pump, timer, settling: Settling::Over, why_tcp: None, ..conn });
        if let Err(error) = registered {
            // It was watched before, so another use has reached a limit of the system meanwhile.
            tracing::error!(qpn = self.qpn(), "cannot watch the connection: {error}");
            // Cannot be refused: any state may become the error state.
            let _ = inner.core.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() });
        }
        // A look at the lane must not come before its name: what it misses is reported by that name.
        fence(Ordering::SeqCst);
        Ok(())
    }
}

/// Each stream says once which link it has, so that who reads the log knows which ones fell back.
pub(super) fn say_link(qpn: u32, link: &Link) {
    let to_itself = || {
        let [own, peer] = link.addresses();
        own.is_some() && own == peer
    };
    match link.kind() {
        // (The system is asked only if somebody reads it.)
        Kind::Tcp if tracing::enabled!(tracing::Level::INFO) && to_itself() => {
            tracing::info!(qpn, "the stream uses TCP: it leads from the queue pair to itself");
        }
        Kind::Tcp => tracing::info!(qpn, "the stream uses TCP"),
        Kind::Memory => tracing::info!(qpn, "the stream uses memory"),
        Kind::Rd => tracing::info!(qpn, "the stream uses reliable datagrams"),
    }
}

/// The same of a stream that could have had memory.
fn say_tcp(qpn: u32, why: Why) {
    tracing::info!(qpn, "the stream uses TCP: {why}");
}

/// Only what has a connection of its own can be settled so.
fn in_memory(end: End, tcp: Link) -> Link {
    match tcp.into_descriptor() {
        Ok(tcp) => Link::from(Lane::new(end, tcp)),
        Err(link) => link,
    }
}
