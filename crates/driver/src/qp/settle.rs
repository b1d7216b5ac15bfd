//! A stream whose link changes before its first byte. A responder attaches the link of the set-up with its
//! reply, because the peer's first frame may come at once, and learns a moment later that the initiator uses
//! another one. Which of the two it is, the initiator alone decides, so that no byte is ever on both.

use std::sync::atomic::Ordering;

use uwarp_llp::{Link, LowerLayer as _};
use uwarp_proto::framing::Framing;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::Now;

use super::{Conn, Inner, Qp, StreamNumber, Timer, link_caps, mark};
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
        self.shell.fed_by(Some(token));
        mark(&link, class);
        // What was reported, and what the pump knows, is about the other link.
        self.hung_up.store(false, Ordering::Release);
        let (pump, timer) = (Pump::default(), Timer { token, at: None });
        let observer = conn.observer.clone();
        let before = std::mem::replace(conn, Conn { link, pump, timer, observer, parked: None });
        self.pump(inner, now);
        Ok(before.link)
    }
}
