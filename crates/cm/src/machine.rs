//! What every machine of the connection manager has: the same five verbs and `want`, and the words that they
//! exchange with the shell.
//!
//! A machine has no socket, no clock, no lock, no randomness and no configuration: the shell tells it what
//! has happened ([`Input`]), and the machine answers with bytes to send ([`Transmit`]), with things to do
//! ([`Action`]) and with the time of its next deadline. The program's calls are methods of each machine,
//! whose effects come out of the same polls. So the simulator drives these machines through every order of
//! events, with the loop that the runner uses.
//!
//! ```text
//!   call, input, deadline ─▶ machine ─▶ poll_transmit until None, poll_action until None,
//!                                       want for each connection, poll_timeout
//! ```
//!
//! A machine that contains others (an id contains the attempt to connect; the pairings of a port contain
//! their listener) gives each of them a [`Space`] of its own for the names of connections, and finds the one
//! that an input is for by its space.
//!
//! Before there were machines, some twenty places held a lock across a call of the kernel or an upcall, and
//! no test could put one event before another. (The rules that the machines rely on: `runner.rs`.)

pub mod active;
pub mod adopt;
pub mod budget;
pub mod handshake;
pub mod life;
pub mod listener;
pub mod lookup;
pub mod pairings;
pub mod run;
mod silence;
mod sorted;
#[cfg(test)]
mod testing;

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use rustix::io::Errno;
use uwarp_driver::Disconnect;
pub use uwarp_llp::carrier::Ends;
use uwarp_llp::carrier::{Close, Refusal};
use uwarp_llp::udp::Route;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::Now;

use crate::event::ConnParam;

/// A machine of the connection manager.
pub trait Machine: Send {
    /// What it reports to its owner.
    type Report: Send;

    /// Something has happened. An input for a connection that the machine has closed, or never had, changes
    /// nothing.
    fn handle_input(&mut self, now: &Now, input: Input<'_>);
    /// The time of [`Self::poll_timeout`] may have come. Early or repeated, it changes nothing. Afterwards no
    /// deadline is at or before `now`.
    fn handle_timeout(&mut self, now: &Now);
    /// What to send next; the answer is [`Input::Sent`] or [`Input::Failed`]. To be called until `None`.
    fn poll_transmit(&mut self) -> Option<Transmit<'_>>;
    /// The next deadline. May have changed after any other call.
    fn poll_timeout(&self) -> Option<Instant>;
    /// What to do next. To be called until `None`.
    fn poll_action(&mut self) -> Option<Action<Self::Report>>;
    /// What the machine wants to know of a connection. May have changed after any other call, but from
    /// [`Want::Nothing`] only together with [`Action::Look`].
    fn want(&self, conn: ConnKey) -> Want;
}

/// Names a connection. The machine that begins a connection names it, and never uses a name again: an input
/// for a connection that is over finds nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnKey {
    space: u32,
    number: u32,
}

impl ConnKey {
    /// The space that it was named in.
    pub const fn space(self) -> u32 {
        self.space
    }
}

/// Names for the connections of one machine.
#[derive(Debug)]
pub struct Space {
    space: u32,
    next: u32,
}

impl Space {
    /// The space with this number. A machine that contains others gives each a number of its own, and never
    /// the same one again.
    pub const fn new(number: u32) -> Self {
        Self { space: number, next: 0 }
    }

    /// The name that it gives first.
    pub const fn first(&self) -> ConnKey {
        ConnKey { space: self.space, number: 0 }
    }

    /// A name that was not used before.
    pub fn name(&mut self) -> ConnKey {
        let number = self.next;
        // Four thousand million connections of one machine: the first one is over.
        self.next = self.next.wrapping_add(1);
        ConnKey { space: self.space, number }
    }
}

/// What a machine wants to know of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// So many bytes at most: the next one belongs to the stream's first FPDU.
    Bytes(usize),
    /// Only its end, from now on: the machine never wants bytes of it again. What the peer sends stays in the
    /// lower layer.
    End,
    /// Nothing; it need not be watched. Before it wants to know something again, it says [`Action::Look`].
    Nothing,
}

/// Something to send.
#[derive(Debug, PartialEq, Eq)]
pub enum Transmit<'a> {
    /// On a connection. The machine gives the rest again after [`Input::Sent`] with less than all of it; with
    /// 0 it gives nothing for this connection until [`Input::Room`].
    Bytes {
        /// The connection; it may still be connecting.
        conn: ConnKey,
        /// Set-up bytes.
        bytes: &'a [u8],
    },
    /// A datagram. If it is lost, the machine sends it again.
    Datagram {
        /// Where to, and from which address of this host.
        route: Route,
        /// All of it.
        bytes: &'a [u8],
    },
}

/// What has happened.
#[derive(Debug)]
pub enum Input<'a> {
    /// [`Action::Connect`] has begun; the system has chosen the local address.
    Opened {
        /// The connection.
        conn: ConnKey,
        /// Its local address.
        local: SocketAddr,
    },
    /// The lower layer has taken the first so many bytes of the last [`Transmit::Bytes`].
    Sent {
        /// The connection.
        conn: ConnKey,
        /// 0: it takes nothing for now.
        bytes: usize,
    },
    /// There may be room to send again.
    Room {
        /// The connection.
        conn: ConnKey,
    },
    /// Connecting, sending or receiving has failed. The shell has dropped the connection.
    Failed {
        /// The connection.
        conn: ConnKey,
        /// Why.
        why: Refusal,
    },
    /// [`Action::Listen`] was refused. The bound socket is kept.
    NotListening(Errno),
    /// Connections may wait to be accepted.
    Waiting,
    /// [`Action::Accept`] has brought a connection.
    Accepted {
        /// The name that the machine gave it.
        conn: ConnKey,
        /// Its addresses.
        ends: Ends,
    },
    /// [`Action::Accept`] has brought none.
    NotAccepted {
        /// The name that the machine gave it; not used.
        conn: ConnKey,
        /// `None`: none waits; [`Input::Waiting`] follows when one does.
        why: Option<Errno>,
    },
    /// Bytes of a connection, at most as many as [`Machine::want`] said.
    Bytes {
        /// The connection.
        conn: ConnKey,
        /// What has arrived.
        bytes: &'a [u8],
    },
    /// The peer has closed its side of a connection, or the connection broke.
    End {
        /// The connection.
        conn: ConnKey,
    },
    /// A datagram.
    Datagram {
        /// The sender's address.
        from: SocketAddr,
        /// The address of this host that it was sent to.
        to: IpAddr,
        /// All of it.
        bytes: &'a [u8],
    },
    /// The peer's host says that no program receives the datagrams.
    NoListener,
    /// What a queue pair's stream does that began on a connection.
    Stream {
        /// The connection.
        conn: ConnKey,
        /// What.
        event: StreamEvent,
    },
    /// The answer to [`Action::CheckPolled`]: whether completions wait that the program has not polled.
    Unpolled(bool),
    /// The program has taken a request that was reported.
    Delivered,
    /// A request's connection is established, or never will be.
    Settled(ConnKey),
    /// [`Action::Fail`] is carried out: the program finds the completions of what was posted.
    Flushed,
}

impl Input<'_> {
    /// The connection that it is about, if it is about one.
    pub fn conn(&self) -> Option<ConnKey> {
        match *self {
            Self::Opened { conn, .. }
            | Self::Sent { conn, .. }
            | Self::Room { conn }
            | Self::Failed { conn, .. }
            | Self::Accepted { conn, .. }
            | Self::NotAccepted { conn, .. }
            | Self::Bytes { conn, .. }
            | Self::End { conn }
            | Self::Stream { conn, .. }
            | Self::Settled(conn) => Some(conn),
            Self::NotListening(_)
            | Self::Waiting
            | Self::Datagram { .. }
            | Self::NoListener
            | Self::Unpolled(_)
            | Self::Delivered
            | Self::Flushed => None,
        }
    }
}

/// What a stream does that began on a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamEvent {
    /// The queue pair has it.
    Attached,
    /// The queue pair does not take it, or is gone. The connection is the machine's again, until it closes
    /// it.
    Refused(VerbsError),
    /// The peer's ready-to-receive indication has come, or the first FPDU by number.
    Established,
    /// By number: a program's message has gone in either direction.
    Used,
    /// It has ended.
    Ended(Disconnect),
}

/// Who gets a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recipient {
    /// The queue pair of the machine's owner.
    Own,
    /// The queue pair with this number, if it still waits for the stream of this move to RTR.
    Number {
        /// Its number.
        qpn: u32,
        /// Which of its moves.
        moves: u32,
    },
}

/// Something that the shell must do.
#[derive(Debug)]
pub enum Action<R> {
    /// Begin to connect. Answered by [`Input::Opened`], or by [`Input::Failed`].
    Connect {
        /// Its name.
        conn: ConnKey,
        /// The local address; the socket that the program has bound is used if it has this one. `None`: that
        /// socket, or the system chooses.
        from: Option<SocketAddr>,
        /// The peer's. The same as `from`, without a port: the connection is connected to itself.
        to: SocketAddr,
    },
    /// Listen on the socket that is bound. Answered by [`Input::NotListening`] if the system refuses.
    Listen,
    /// Accept one connection. Answered by [`Input::Accepted`] or [`Input::NotAccepted`].
    Accept {
        /// Its name.
        conn: ConnKey,
    },
    /// Close a connection. Nothing further is heard of it.
    Close {
        /// The connection.
        conn: ConnKey,
        /// How.
        how: Close,
    },
    /// The machine wanted nothing of a connection, and wants to know of it now.
    Look {
        /// The connection.
        conn: ConnKey,
    },
    /// Give a connection to a queue pair. Answered by [`Input::Stream`].
    Attach {
        /// The connection.
        conn: ConnKey,
        /// Which queue pair.
        to: Recipient,
        /// What the ends have agreed on.
        said: Box<Negotiated>,
        /// The parameters of the connection.
        param: ConnParam,
    },
    /// End the stream that began on this connection, and no later one.
    Disconnect {
        /// The connection.
        conn: ConnKey,
        /// [`Input::Stream`] comes when the peer's program has disconnected, too, or after a time.
        answered: bool,
    },
    /// Ask whether completions wait that the program has not polled. Answered at once by
    /// [`Input::Unpolled`].
    CheckPolled,
    /// The queue pair of the machine's owner goes to ERR. Answered by [`Input::Flushed`].
    Fail,
    /// What the program's call returns.
    Answer(Result<(), Errno>),
    /// For the machine's owner.
    Report(R),
}

impl<R> Action<R> {
    /// The action of a machine inside another one: a report is for the outer machine, `Err`; everything else
    /// is the outer machine's own action.
    pub fn pass<S>(self) -> Result<Action<S>, R> {
        Ok(match self {
            Self::Connect { conn, from, to } => Action::Connect { conn, from, to },
            Self::Listen => Action::Listen,
            Self::Accept { conn } => Action::Accept { conn },
            Self::Close { conn, how } => Action::Close { conn, how },
            Self::Look { conn } => Action::Look { conn },
            Self::Attach { conn, to, said, param } => Action::Attach { conn, to, said, param },
            Self::Disconnect { conn, answered } => Action::Disconnect { conn, answered },
            Self::CheckPolled => Action::CheckPolled,
            Self::Fail => Action::Fail,
            Self::Answer(result) => Action::Answer(result),
            Self::Report(report) => return Err(report),
        })
    }
}

/// The earlier of two deadlines.
pub fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}

/// Whether a deadline is over.
pub fn is_over(deadline: Option<Instant>, now: &Now) -> bool {
    deadline.is_some_and(|deadline| deadline <= now.get())
}
