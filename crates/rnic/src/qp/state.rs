//! Queue pair states and their transitions.

/// State of a queue pair; the numbers are the verbs' own.
///
/// ```text
///   from \ to   RESET  INIT  RTR  RTS  SQD  ERR
///   RESET         x     x                    x
///   INIT          x     x     x              x
///   RTR           x                x         x
///   RTS           x                x    x    x
///   SQD           x                x    x    x
///   SQE           x                x         x
///   ERR           x                          x
/// ```
///
/// Only datagram queue pairs are ever in SQE: an RC queue pair whose work request fails is in ERR. On RC, the
/// transition from INIT to RTR needs a connection: rdma_cm makes it and moves the queue pair through RTR to
/// RTS in one step.
#[repr(u32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum QpState {
    Reset = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Sqd = 4,
    Sqe = 5,
    Err = 6,
}

impl QpState {
    /// Whether a program may request this transition.
    pub fn may_become(self, to: Self) -> bool {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        matches!(
            (self, to),
            (_, Reset | Err)
                | (Reset | Init, Init)
                | (Init, Rtr)
                | (Rtr | Rts | Sqd | Sqe, Rts)
                | (Rts | Sqd, Sqd)
        )
    }

    /// Whether receives may be posted.
    pub fn may_post_recv(self) -> bool {
        self != Self::Reset
    }

    /// Whether sends may be posted. (In ERR they are flushed.)
    pub fn may_post_send(self) -> bool {
        matches!(self, Self::Rts | Self::Sqd | Self::Sqe | Self::Err)
    }
}

#[cfg(test)]
mod tests {
    use super::QpState;

    #[test]
    fn transition_table() {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        let all = [Reset, Init, Rtr, Rts, Sqd, Sqe, Err];
        let rows: Vec<String> = all
            .iter()
            .map(|f| all.iter().map(|t| if f.may_become(*t) { 'x' } else { '.' }).collect())
            .collect();
        assert_eq!(rows, ["xx....x", "xxx...x", "x..x..x", "x..xx.x", "x..xx.x", "x..x..x", "x.....x"]);
    }
}
