//! What waits for room in the socket of a port.

use std::sync::Weak;

use super::{DatagramPort, UdQp};

/// Something whose datagrams wait for room in a socket.
pub(crate) trait AwaitsRoom: Send + Sync {
    /// There may be some.
    fn has_room(&self);
}

impl DatagramPort {
    /// Datagrams wait for room: the system says when there is some, if it watches the socket.
    pub(crate) fn block(&self, whose: Weak<dyn AwaitsRoom>) {
        self.blocked.lock().push(whose);
        self.watch_room();
    }

    /// The system reports room from now on, and at once if there is some.
    pub(super) fn watch_room(&self) {
        self.engine.unpark();
        if let Some(token) = self.token.get() {
            self.engine.rearm(*token);
        }
    }

    /// There is room to send.
    pub(super) fn use_room(&self) {
        if self.blocked.lock().is_empty() {
            // Every datagram that leaves the socket's queue would be reported. A queue pair that blocked
            // since the look above may have been registered for room before this.
            if let Some(token) = self.token.get() {
                self.engine.ignore_room(*token);
            }
            if !self.blocked.lock().is_empty() {
                self.watch_room();
            }
        } else {
            self.unblock();
        }
    }

    fn unblock(&self) {
        let blocked = std::mem::take(&mut *self.blocked.lock());
        for whose in blocked.iter().filter_map(Weak::upgrade) {
            whose.has_room();
        }
    }
}

impl AwaitsRoom for UdQp {
    fn has_room(&self) {
        self.use_room();
    }
}
