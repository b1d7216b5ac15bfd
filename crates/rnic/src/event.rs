//! What the RNIC reports to its owner: completion events and asynchronous events.

/// Asynchronous event kinds; the numbers are the verbs' own.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum EventKind {
    CqErr = 0,
    QpFatal = 1,
    QpReqErr = 2,
    QpAccessErr = 3,
    CommEst = 4,
    SqDrained = 5,
    PathMig = 6,
    PathMigErr = 7,
    DeviceFatal = 8,
    PortActive = 9,
    PortErr = 10,
    LidChange = 11,
    SrqErr = 14,
    SrqLimitReached = 15,
    QpLastWqeReached = 16,
    GidChange = 18,
    /// uwarp's own: a peer has dropped a datagram and said so, and the program asked to hear of it.
    PeerError = 0x80,
}

/// An asynchronous event and the object it concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AsyncEvent {
    /// What happened.
    pub kind: EventKind,
    /// The cookie that the owner gave to that object.
    pub cookie: u64,
}

/// Receives asynchronous events. Called with the lock of a queue pair or completion queue held: must not
/// block and must not call back into the object.
pub trait AsyncSink: Send + Sync {
    /// An event happened.
    fn async_event(&self, event: AsyncEvent);
}

/// Receives completion events, at most one each time a completion queue is armed. Called without the
/// completion queue's lock, but possibly with a queue pair's: must not block and must not call back into a
/// queue pair.
pub trait CompletionSink: Send + Sync {
    /// The completion queue with this cookie has a new completion of the kind it was armed for.
    fn completion_event(&self, cookie: u64);
    /// A completion queue of this sink was armed. Called without any lock. Returns whether input wakes a loop
    /// of the program, which then serves it.
    fn armed(&self) -> bool {
        false
    }
    /// What the source with this name receives may complete in a completion queue of this sink; `None`: one
    /// that many queue pairs share. Possibly called with a queue pair's lock.
    fn fed_by(&self, _source: Option<u64>) {}
}
