//! The order of an id's events, as programs rely on it (rdma_get_cm_event(3), the kernel's `iwcm` and `cma`).
//!
//! ```text
//!   connects  ADDR_RESOLVED ROUTE_RESOLVED ┬ ESTABLISHED [DISCONNECTED [TIMEWAIT_EXIT]]
//!                                          ├ CONNECT_RESPONSE [DISCONNECTED [TIMEWAIT_EXIT]]     (by number)
//!                                          └ REJECTED | UNREACHABLE | CONNECT_ERROR
//!   accepts   (CONNECT_REQUEST of the listener) ┬ ESTABLISHED [DISCONNECTED [TIMEWAIT_EXIT]]
//!                                               └ UNREACHABLE | CONNECT_ERROR
//!   listens   CONNECT_REQUEST*
//! ```
//! Nothing follows the id's end. TIMEWAIT_EXIT comes in the views that pass for InfiniBand alone.

use uwarp_cm::EventKind::{self, *};

use crate::Time;

/// What an id is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// It connects its own queue pair.
    Connects,
    /// It connects a queue pair that the program moves.
    ConnectsByNumber,
    /// It came as a request.
    Accepts,
    /// It listens.
    Listens,
}

/// What an id has reported so far.
#[derive(Debug)]
pub struct Order {
    /// What it is for.
    pub role: Role,
    /// It has ended.
    pub destroyed: bool,
    /// When `connect` was called.
    pub begun: Time,
    /// When `accept` was called.
    pub accepted: Option<Time>,
    /// When it was reported.
    pub established: Option<Time>,
    disconnected: Option<Time>,
    reported: Vec<EventKind>,
}

/// What an id of the InfiniBand views waits for before TIMEWAIT_EXIT, if the program sets no time.
const TIMEWAIT: Time = 2_048_000_000;

impl Order {
    /// Nothing yet.
    pub fn new(role: Role) -> Self {
        Self {
            role,
            destroyed: false,
            begun: 0,
            accepted: None,
            established: None,
            disconnected: None,
            reported: Vec::new(),
        }
    }

    /// What it has reported.
    pub fn reported(&self) -> &[EventKind] {
        &self.reported
    }

    /// How connecting or accepting has ended.
    pub fn outcome(&self) -> Option<EventKind> {
        let ends = |kind: &&EventKind| {
            matches!(kind, Established | ConnectResponse | Rejected | Unreachable | ConnectError)
        };
        self.reported.iter().find(ends).copied()
    }

    /// It reports this.
    ///
    /// # Panics
    /// If it may not.
    pub fn report(&mut self, kind: EventKind, now: Time, infiniband: bool) {
        assert!(!self.destroyed, "{kind:?} of an id that has ended, after {:?}", self.reported);
        let last = self.reported.last().copied();
        let fits = match (self.role, last, kind) {
            (Role::Listens, _, ConnectRequest) => true,
            (Role::Connects | Role::ConnectsByNumber, None, AddressResolved | AddressError) => true,
            (Role::Connects | Role::ConnectsByNumber, Some(AddressResolved), RouteResolved) => true,
            (Role::Connects, Some(RouteResolved), Established)
            | (Role::ConnectsByNumber, Some(RouteResolved), ConnectResponse) => self.begun > 0,
            (
                Role::Connects | Role::ConnectsByNumber,
                Some(RouteResolved),
                Rejected | Unreachable | ConnectError,
            ) => self.begun > 0,
            (Role::Accepts, None, Established | Unreachable | ConnectError) => self.accepted.is_some(),
            // The program has destroyed its queue pair before it answered.
            (_, Some(Established | ConnectResponse), Disconnected) => true,
            (_, Some(Disconnected), TimewaitExit) => {
                infiniband && self.disconnected.is_some_and(|at| now >= at + TIMEWAIT)
            }
            _ => false,
        };
        assert!(fits, "{kind:?} of an id that {:?}, after {:?}", self.role, self.reported);
        match kind {
            Established => self.established = Some(now),
            Disconnected => self.disconnected = Some(now),
            _ => {}
        }
        self.reported.push(kind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reports(role: Role, kinds: &[EventKind]) {
        let mut order = Order::new(role);
        (order.begun, order.accepted) = (1, Some(1));
        for (n, kind) in kinds.iter().enumerate() {
            order.report(*kind, 10_000_000_000 * n as Time, true);
        }
    }

    #[test]
    fn what_programs_know() {
        reports(Role::Connects, &[AddressResolved, RouteResolved, Established, Disconnected, TimewaitExit]);
        reports(Role::ConnectsByNumber, &[AddressResolved, RouteResolved, ConnectResponse, Disconnected]);
        reports(Role::Accepts, &[Established, Disconnected, TimewaitExit]);
        reports(Role::Accepts, &[Unreachable]);
        reports(Role::Listens, &[ConnectRequest, ConnectRequest]);
    }

    #[test]
    fn what_is_out_of_order() {
        for (role, kinds) in [
            (Role::Connects, &[AddressResolved, Established][..]),
            (Role::Connects, &[AddressResolved, RouteResolved, Disconnected]),
            (Role::Connects, &[AddressResolved, RouteResolved, Established, Established]),
            (Role::Connects, &[AddressResolved, RouteResolved, Rejected, Disconnected]),
            (Role::Connects, &[AddressResolved, RouteResolved, Established, TimewaitExit]),
            (Role::Accepts, &[Disconnected]),
            (Role::Accepts, &[Established, Disconnected, Disconnected]),
            (Role::Accepts, &[Rejected]),
        ] {
            let order = std::panic::catch_unwind(|| reports(role, kinds));
            assert!(order.is_err(), "{role:?} {kinds:?}");
        }
    }
}
