//! A stream whose link changes before its first byte. A responder attaches the link of the set-up with its
//! reply, because the peer's first frame may come at once, and learns a moment later that the initiator uses
//! another one. Which of the two it is, the initiator alone decides, so that no byte is ever on both.

use std::sync::atomic::Ordering;

use uwarp_llp::link::{Caps, Kind};
use uwarp_llp::memory::lane::{End, Lane};
use uwarp_llp::{Link, LowerLayer as _};
use uwarp_proto::framing::Framing;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Now, QpModify, QpState};

use super::{Conn, Inner, Qp, StreamNumber, Timer, link_caps, mark};
use crate::host::Why;
use crate::pump::Pump;

impl Qp {
    /// The stream with this number goes over `link`, in frames of `framing`, instead of the link that it was
    /// attached with, which comes back. Refused if anything of the stream has moved; then `link` comes back.
    pub fn settle(
        &self,
        number: StreamNumber,
        link: Link,
        framing: Framing,
    ) -> Result<Link, (VerbsError, Link)> {
        let mut inner = self.inner.lock();
        let result = self.settle_locked(&mut inner, number, link, framing);
        self.release(inner);
        result
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

    /// The stream with this number goes over a lane; its TCP connection stays beside it.
    pub(crate) fn settle_in_memory(&self, number: StreamNumber, end: End) -> Result<(), VerbsError> {
        let mut inner = self.inner.lock();
        let result = self.settle_in_memory_locked(&mut inner, number, end);
        self.release(inner);
        result
    }

    fn settle_in_memory_locked(
        &self,
        inner: &mut Inner,
        number: StreamNumber,
        end: End,
    ) -> Result<(), VerbsError> {
        let Some(conn) = inner.conn.as_mut().filter(|_| inner.streams == number) else {
            return Err(VerbsError::Invalid("the stream has ended"));
        };
        if !conn.pump.is_untouched() || conn.link.kind() != Kind::Tcp {
            return Err(VerbsError::Invalid("this stream is in use"));
        }
        inner.core.reframe(&Now::unread(), Framing::PLAIN, link_caps(Caps::MEMORY))?;
        let me = self.me.upgrade().ok_or(VerbsError::Invalid("the queue pair is being destroyed"))?;
        let engine = self.shell.nic().engine();
        if conn.parked.take().is_some() {
            engine.unpark();
        }
        engine.deregister(conn.timer.token);
        let Some(conn) = inner.conn.take() else { return Ok(()) };
        let link = Link::from(Lane::new(end, conn.link.into_descriptor()));
        self.shell.set_needs_system(false);
        // What was reported, and what the pump knows, is about the other link.
        self.hung_up.store(false, Ordering::Release);
        let registered = engine.register_watch(link.watch(), me);
        let token = *registered.as_ref().unwrap_or(&conn.timer.token);
        link.set_name(token.0);
        self.shell.fed_by(Some(token));
        let (pump, timer) = (Pump::default(), Timer { token, at: None });
        inner.conn = Some(Conn { link, pump, timer, held: false, ..conn });
        if let Err(error) = registered {
            // It was watched before, so another use has reached a limit of the system meanwhile.
            tracing::error!(qpn = self.qpn(), "cannot watch the connection: {error}");
            // Cannot be refused: any state may become the error state.
            let _ = inner.core.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() });
        }
        self.pump(inner, &Now::unread());
        Ok(())
    }

    /// This stream, whose link was held, stays with it.
    pub(crate) fn stay_with_tcp(&self, number: StreamNumber, why: Why) {
        let mut inner = self.inner.lock();
        if inner.streams == number
            && let Some(conn) = inner.conn.as_mut()
        {
            conn.why_tcp = Some(why);
            conn.held = false;
            self.pump(&mut inner, &Now::unread());
        }
        self.release(inner);
    }

    /// This stream cannot go on as the program wants it.
    pub(crate) fn end_stream(&self, number: StreamNumber) {
        let mut inner = self.inner.lock();
        if inner.streams == number {
            // Cannot be refused: any state may become the error state.
            let _ = inner.core.modify(&QpModify { state: Some(QpState::Err), ..QpModify::default() });
        }
        self.release(inner);
    }

    fn settle_locked(
        &self,
        inner: &mut Inner,
        number: StreamNumber,
        link: Link,
        framing: Framing,
    ) -> Result<Link, (VerbsError, Link)> {
        let now = &Now::unread();
        let caps = link.caps();
        let (engine, class) = (self.shell.nic().engine(), inner.traffic_class);
        let Inner { core, conn: Some(conn), streams, .. } = inner else {
            return Err((VerbsError::Invalid("the stream has ended"), link));
        };
        if *streams != number || !conn.pump.is_untouched() {
            return Err((VerbsError::Invalid("another stream has begun, or this one is in use"), link));
        }
        let Some(me) = self.me.upgrade() else {
            return Err((VerbsError::Invalid("the queue pair is being destroyed"), link));
        };
        let token = match engine.register_watch(link.watch(), me) {
            Ok(token) => token,
            Err(e) => {
                tracing::error!(qpn = self.qpn(), "cannot watch the connection: {e}");
                return Err((VerbsError::NoResources("descriptors"), link));
            }
        };
        if let Err(error) = core.reframe(now, framing, link_caps(caps)) {
            engine.deregister(token);
            return Err((error, link));
        }
        if conn.parked.take().is_some() {
            engine.unpark();
        }
        engine.deregister(conn.timer.token);
        if conn.link.caps().needs_system != caps.needs_system {
            self.shell.set_needs_system(caps.needs_system);
        }
        link.set_name(token.0);
        self.shell.fed_by(Some(token));
        mark(&link, class);
        // What was reported, and what the pump knows, is about the other link.
        self.hung_up.store(false, Ordering::Release);
        let (pump, timer) = (Pump::default(), Timer { token, at: None });
        let observer = conn.observer.clone();
        let after = Conn { link, pump, timer, observer, parked: None, held: false, why_tcp: None };
        let before = std::mem::replace(conn, after);
        self.pump(inner, now);
        Ok(before.link)
    }
}
