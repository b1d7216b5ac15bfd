//! How a socket ends.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::Sock;
use crate::agree::conn::{Conn, Stage};
use crate::agree::said::{self, Why};
use crate::agree::service;
use crate::{fds, sys, watch};

impl Sock {
    /// Nobody has the program's end any more; `torn`: and not all that was written there could be sent.
    pub fn end_carried(self: &Arc<Self>, torn: bool) {
        self.torn.fetch_or(torn, Ordering::Relaxed);
        self.end();
    }

    /// Ends the connection as the process ends.
    pub fn end_now(self: &Arc<Self>) {
        if self.conn.is_some() && self.stand_in.is_foreign() {
            self.torn.store(true, Ordering::Relaxed);
        }
        // A stream that was TCP's goes on in the background, for which the library's own handler waits.
        self.end();
    }

    /// Whether its end is a reset, as the kernel's: of what the program has not read, too.
    fn aborts(&self, conn: &Conn) -> bool {
        let linger: Option<libc::linger> = sys::option_of(conn.tcp(), libc::SOL_SOCKET, libc::SO_LINGER);
        let unread = || {
            let plain = conn.stage() != Stage::Stream && !conn.joining.load(Ordering::Acquire);
            plain && !conn.inbound.lock().ready().is_empty()
        };
        let at_once = linger.is_some_and(|linger| linger.l_onoff != 0 && linger.l_linger == 0);
        self.torn.load(Ordering::Relaxed) || at_once || unread()
    }

    /// Ends a connection that was TCP's, or still is, before the rsocket ends. True: it is to be looked after
    /// when that has ended, and nobody else reads it any more.
    fn end_conn(&self, conn: &Arc<Conn>) -> bool {
        let tcp = conn.tcp();
        conn.closed.store(true, Ordering::Release);
        if self.torn.load(Ordering::Relaxed) {
            // The peer must not take what it has for all.
            sys::complain(
                "another process has written to a connection that is this process's stream: the bytes are \
                 lost, and the connection is reset",
            );
        }
        if self.aborts(conn) {
            sys::reset(tcp);
        } else if conn.stage() != Stage::Stream && !conn.joining.load(Ordering::Acquire) {
            let undecided = conn.agreement.lock().veto() || conn.stage() == Stage::Held;
            let mut outbound = conn.outbound.lock();
            if undecided || !outbound.unsent.is_empty() {
                let _ = conn.end_sending(&mut outbound);
                drop(outbound);
                service::let_die(conn);
                return false;
            }
        } else if conn.stage() != Stage::Stream {
            let joined = self.calls().and_then(|calls| {
                calls.give_up(self.number);
                calls.joined(self.number)
            });
            if !matches!(joined, Some(Ok(()))) {
                return true;
            }
            // It runs, and goes on until the peer has all. What comes is the stream's.
            if conn.joined(Ok(()), |_| ()) {
                said::decided(conn, None);
            }
        }
        service::forget(conn.key);
        false
    }

    /// Ends the connection: what was sent reaches the peer first.
    pub fn end(self: &Arc<Self>) {
        if let Some(conn) = self.conn.as_ref().filter(|conn| !self.aborts(conn) && conn.ends_later(self)) {
            conn.closed.store(true, Ordering::Release);
            return service::let_linger(conn);
        }
        // Before the key is read: who follows it at this moment looks for this behind it (`watch::begin`).
        self.ended.store(true, Ordering::SeqCst);
        watch::end(self.key.load(Ordering::SeqCst), self);
        let dying = self.conn.as_ref().filter(|conn| self.end_conn(conn));
        if let Some(calls) = self.calls() {
            // SAFETY: no pointer.
            sys::quietly(|| unsafe { (calls.rclose)(self.number) });
        }
        if let Some(conn) = self.conn.as_ref().filter(|conn| conn.stage() != Stage::Stream) {
            // Unless it was decided before.
            said::decided(conn, Some(Why::Ended));
        }
        if let Some(conn) = dying {
            // What the peer sends to set the stream up must not reset what was sent before.
            service::let_die(conn);
        }
        let options = self.options.lock().take();
        if let Some(options) = options {
            fds::forget(options);
            sys::close(options);
        }
    }
}
