//! The state diagram of an id.
//!
//! ```text
//!                    bind                listen
//!        Idle ──────────────▶ Bound ──────────────▶ Listening
//!          │                   │ ▲
//!          └── resolve_addr ───┤ └── address error
//!                              ▼
//!                       AddressResolved ──▶ RouteResolved      RequestPending   (born by a listener)
//!                                                 │ connect       │ accept  │ reject
//!                                                 ▼               ▼         │
//!                             ┌───────────── Connecting       Accepting     │
//!                             ▼ response          │  established  │         │
//!                        Responded ───────────────┴──▶ Established ◀┘       │
//!                                    establish
//!                                        failure │        │ disconnected    │
//!                                                ▼        ▼                 ▼
//!                                                       Closed
//! ```
//!
//! `Responded` is for programs that see to their queue pair themselves: the peer has accepted, and the queue pair gets the
//! stream when the program moves it on.
//!
//! Resolution has no states of its own for the time it takes, because it takes none: the routing table answers at once,
//! and the event is queued before the call returns.

/// Where an id stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// Fresh.
    Idle,
    /// Has a local address.
    Bound,
    /// Has a local and a remote address.
    AddressResolved,
    /// May connect.
    RouteResolved,
    /// Takes connection requests.
    Listening,
    /// A request was sent, or is about to be.
    Connecting,
    /// The peer has accepted, and the program is to move its own queue pair on and to say so.
    Responded,
    /// A request came in and waits for the program's answer.
    RequestPending,
    /// The request was accepted; the peer has not shown itself yet.
    Accepting,
    /// The stream runs.
    Established,
    /// It runs no more, or never came to run.
    Closed,
    /// The program has given the id up.
    Destroyed,
}

/// What moves an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The program binds it.
    Bind,
    /// The program listens.
    Listen,
    /// An address was resolved; binds it where it was not bound.
    ResolveAddress,
    /// The address could not be resolved.
    AddressError,
    /// A route was resolved.
    ResolveRoute,
    /// The program connects.
    Connect,
    /// The program accepts.
    Accept,
    /// The program rejects.
    Reject,
    /// The peer has accepted a connection for a queue pair that the program sees to.
    Response,
    /// The program says that it has done so.
    Establish,
    /// The stream runs.
    Established,
    /// Connecting or accepting came to nothing.
    Failed,
    /// The stream ended.
    Disconnected,
    /// The program gives it up.
    Destroy,
}

impl State {
    /// The transition table; `None` where a step is not allowed or comes too late.
    pub const fn next(self, step: Step) -> Option<State> {
        use State as S;
        Some(match (step, self) {
            (Step::Bind, S::Idle) => S::Bound,
            (Step::Listen, S::Idle | S::Bound) => S::Listening,
            (Step::ResolveAddress, S::Idle | S::Bound) => S::AddressResolved,
            (Step::AddressError, S::Idle | S::Bound) => S::Bound,
            (Step::ResolveRoute, S::AddressResolved) => S::RouteResolved,
            (Step::Connect, S::RouteResolved) => S::Connecting,
            (Step::Accept, S::RequestPending) => S::Accepting,
            (Step::Reject, S::RequestPending) => S::Closed,
            (Step::Response, S::Connecting) => S::Responded,
            (Step::Establish, S::Responded) => S::Established,
            (Step::Established, S::Connecting | S::Accepting) => S::Established,
            (Step::Failed, S::Connecting | S::Accepting | S::RequestPending) => S::Closed,
            (Step::Disconnected, S::Established | S::Responded) => S::Closed,
            (Step::Destroy, S::Destroyed) => return None,
            (Step::Destroy, _) => S::Destroyed,
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The table, in full: a change here is a change of what programs may do.
    #[test]
    fn transitions() {
        use State::*;
        const STATES: [State; 12] = [
            Idle,
            Bound,
            AddressResolved,
            RouteResolved,
            Listening,
            Connecting,
            Responded,
            RequestPending,
            Accepting,
            Established,
            Closed,
            Destroyed,
        ];
        let from = |step| -> Vec<(State, State)> {
            STATES.iter().filter_map(|&s| s.next(step).map(|to| (s, to))).collect()
        };
        assert_eq!(from(Step::Bind), [(Idle, Bound)]);
        assert_eq!(from(Step::Listen), [(Idle, Listening), (Bound, Listening)]);
        assert_eq!(from(Step::ResolveAddress), [(Idle, AddressResolved), (Bound, AddressResolved)]);
        assert_eq!(from(Step::AddressError), [(Idle, Bound), (Bound, Bound)]);
        assert_eq!(from(Step::ResolveRoute), [(AddressResolved, RouteResolved)]);
        assert_eq!(from(Step::Connect), [(RouteResolved, Connecting)]);
        assert_eq!(from(Step::Accept), [(RequestPending, Accepting)]);
        assert_eq!(from(Step::Reject), [(RequestPending, Closed)]);
        assert_eq!(from(Step::Response), [(Connecting, Responded)]);
        assert_eq!(from(Step::Establish), [(Responded, Established)]);
        assert_eq!(from(Step::Established), [(Connecting, Established), (Accepting, Established)]);
        assert_eq!(from(Step::Failed), [(Connecting, Closed), (RequestPending, Closed), (Accepting, Closed)]);
        assert_eq!(from(Step::Disconnected), [(Responded, Closed), (Established, Closed)]);
        assert_eq!(from(Step::Destroy).len(), 11);
        assert!(from(Step::Destroy).iter().all(|(_, to)| *to == Destroyed));
    }
}
