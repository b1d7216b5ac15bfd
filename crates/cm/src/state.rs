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
//! `Responded` is for programs that move their queue pair themselves: the peer has accepted, and the queue
//! pair gets the stream when the program moves it to RTR.
//!
//! Two steps go back: the system refuses to listen (to `Bound`) or to connect (to `RouteResolved`). The id
//! keeps its port.
//!
//! Resolution has no states of its own because it takes no time: the routing table answers at once, and the
//! event is queued before the call returns.

use crate::error::CmError;

/// The state of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum State {
    /// New.
    Idle,
    /// Has a local address.
    Bound,
    /// Has a local and a remote address.
    AddressResolved,
    /// Can connect.
    RouteResolved,
    /// Takes connection requests.
    Listening,
    /// A request was sent, or is about to be.
    Connecting,
    /// The peer has accepted. The program must move its queue pair to RTS and call rdma_establish.
    Responded,
    /// A request came in and waits for the program's answer.
    RequestPending,
    /// The request was accepted; the peer's ready-to-receive indication has not arrived yet.
    Accepting,
    /// The stream runs.
    Established,
    /// The stream has ended, or never began.
    Closed,
    /// The program has destroyed the id.
    Destroyed,
}

/// What changes the state of an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Step {
    /// The program binds it.
    Bind,
    /// The program listens.
    Listen,
    /// The system refuses to listen.
    ListenRefused,
    /// An address was resolved. The id is bound now, if it was not before.
    ResolveAddress,
    /// The address could not be resolved.
    AddressError,
    /// A route was resolved.
    ResolveRoute,
    /// The program connects.
    Connect,
    /// This host refuses, before anything is sent.
    ConnectRefused,
    /// The program accepts.
    Accept,
    /// The program rejects.
    Reject,
    /// The peer has accepted a connection for a queue pair that the program moves itself.
    Response,
    /// The program reports that it has moved its queue pair to RTS.
    Establish,
    /// The stream runs.
    Established,
    /// Connecting or accepting failed.
    Failed,
    /// The stream ended.
    Disconnected,
    /// The program destroys it.
    Destroy,
}

impl State {
    /// The transition table; `None`: the step is not allowed, or comes too late.
    pub const fn next(self, step: Step) -> Option<State> {
        use State as S;
        Some(match (step, self) {
            (Step::Bind, S::Idle) => S::Bound,
            (Step::Listen, S::Idle | S::Bound) => S::Listening,
            (Step::ListenRefused, S::Listening) => S::Bound,
            (Step::ResolveAddress, S::Idle | S::Bound) => S::AddressResolved,
            (Step::AddressError, S::Idle | S::Bound) => S::Bound,
            (Step::ResolveRoute, S::AddressResolved) => S::RouteResolved,
            (Step::Connect, S::RouteResolved) => S::Connecting,
            (Step::ConnectRefused, S::Connecting) => S::RouteResolved,
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

/// An id's state. It changes by [`State::next`] alone.
#[derive(Debug)]
pub(crate) struct Lifecycle(State);

impl Lifecycle {
    /// Where an id begins.
    pub fn at(state: State) -> Self {
        Self(state)
    }

    pub fn state(&self) -> State {
        self.0
    }

    /// Whether the step is allowed now.
    pub fn check(&self, step: Step) -> Result<(), CmError> {
        self.after(step).map(drop)
    }

    /// Takes the step. If it is not allowed, the state stays as it is.
    pub fn take(&mut self, step: Step) -> Result<(), CmError> {
        self.0 = self.after(step)?;
        Ok(())
    }

    fn after(&self, step: Step) -> Result<State, CmError> {
        self.0.next(step).ok_or(CmError::Invalid("not allowed in the id's state"))
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
        assert_eq!(from(Step::ListenRefused), [(Listening, Bound)]);
        assert_eq!(from(Step::ResolveAddress), [(Idle, AddressResolved), (Bound, AddressResolved)]);
        assert_eq!(from(Step::AddressError), [(Idle, Bound), (Bound, Bound)]);
        assert_eq!(from(Step::ResolveRoute), [(AddressResolved, RouteResolved)]);
        assert_eq!(from(Step::Connect), [(RouteResolved, Connecting)]);
        assert_eq!(from(Step::ConnectRefused), [(Connecting, RouteResolved)]);
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

    #[test]
    fn a_step_that_is_not_allowed_leaves_the_state_as_it_is() {
        let mut life = Lifecycle::at(State::Bound);
        assert!(life.check(Step::Connect).is_err() && life.take(Step::Connect).is_err());
        assert_eq!(life.state(), State::Bound);
        assert!(life.check(Step::Listen).is_ok() && life.take(Step::Listen).is_ok());
        assert_eq!(life.state(), State::Listening);
    }
}
