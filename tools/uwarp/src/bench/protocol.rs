//! The protocol between the command and the two ends of a measurement: one line of JSON for each order, one
//! for each answer.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::ways::Way;

/// Why something could not be measured, as a sentence for the user.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Failure(pub String);

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(sentence: impl Into<String>) -> Failure {
        Failure(sentence.into())
    }

    /// For `map_err`: what was being done, then the system's message.
    pub fn of<E: fmt::Display>(doing: &'static str) -> impl FnOnce(E) -> Failure {
        move |error| Failure(format!("{doing}: {error}"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Order {
    /// Nothing; the answer shows that the end has started.
    Start,
    /// Make a pair of connected Ethernet devices, ours and one in the network namespace of `peer`.
    Pair {
        peer: u32,
    },
    /// Give our device of the pair an address and bring it up.
    Address {
        address: IpAddr,
        mtu: u32,
    },
    /// Listen for the connections over raw TCP and the one over uwarp.
    Listen {
        address: IpAddr,
    },
    /// Take them; answered when they are established.
    Accept,
    /// Make them.
    Connect {
        raw: SocketAddr,
        rdma: SocketAddr,
    },
    /// Keep the measuring thread on this one of the cores that it may use, counted from 0; without a number,
    /// let the system choose again.
    Pin {
        core: Option<usize>,
    },
    /// Let the connections over raw TCP use this congestion control.
    Congestion {
        control: String,
    },
    Run {
        job: Job,
        role: Role,
    },
    /// Get ready for up to `most` connections at a time, over raw TCP and over uwarp; the passive end
    /// listens.
    Gather {
        listen: Option<IpAddr>,
        most: u32,
        /// Receives are those of a shared receive queue.
        shared_receives: bool,
    },
    Many(Many),
    /// Exchange datagrams with `count` peers over one datagram queue pair, or be these peers; `most` is the
    /// final number. The active end reports what it uses then.
    Peers {
        count: u32,
        role: Role,
        most: u32,
        /// By reliable datagrams.
        reliable: bool,
    },
    Sockets(Sockets),
    /// Under callgrind: carry out this many and count them.
    Count {
        what: Counted,
        role: Role,
        messages: u32,
    },
    /// Under callgrind: count everything that happens from now on, or write it down.
    CountAll {
        begin: bool,
    },
}

/// What is counted step by step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Counted {
    /// Polls of a completion queue that find nothing.
    EmptyPolls,
    /// A Send and a Send that answers it.
    Message { size: u32 },
    /// A datagram of 64 bytes and one that answers it.
    Datagram,
    /// The same with reliable datagrams.
    Reliable,
    /// A list of Writes of 64 bytes.
    Writes,
    /// A Send of 64 bytes and its answer on one of many connections, each in turn.
    Crowd,
}

/// For `uwarp bench sockets`: one connection for each process.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Sockets {
    Listen {
        carrier: Carrier,
        address: IpAddr,
    },
    Accept,
    Connect {
        carrier: Carrier,
        to: SocketAddr,
    },
    /// Messages there and back, or one way. `spin`: a receive call looks for a while before it blocks.
    Traffic {
        pattern: Pattern,
        size: u32,
        spin: bool,
        role: Role,
        milliseconds: u64,
    },
}

/// Whose calls a program of sockets makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Carrier {
    /// libc's, whatever library stands before it.
    Libc,
    /// Those of `<rdma/rsocket.h>`.
    Rsockets,
    /// `uwarp_send` and `uwarp_recv` on a socket in `IWARP_MODE`.
    IwarpMode,
    /// `uwarp_post` and `uwarp_get_completions` on a socket in `IWARP_MODE`, with registered memory.
    Descriptors,
}

/// What goes over a connection of sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pattern {
    /// The figure is half a round trip.
    PingPong,
    /// The figure is bytes a second.
    Stream,
}

/// What to do with many connections. If both ends have a part, the order for the passive end comes first.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Many {
    Accept {
        over: Over,
        count: u32,
    },
    Connect {
        over: Over,
        to: SocketAddr,
        count: u32,
        at_once: u32,
    },
    /// Makes queue pairs, joins them with the peer's by number, and destroys them; at both ends. The figure
    /// is the active one's.
    BringUp {
        count: u32,
        role: Role,
    },
    /// Waits until the peer has ended all connections, and drops them.
    Leave {
        over: Over,
    },
    Disconnect {
        over: Over,
    },
    /// Fills all queues once; at both ends.
    Traffic,
    /// Reports what the process uses.
    Usage,
    /// Answers each small message on its connection.
    Answer,
    /// A ping-pong on one connection.
    Ping {
        one: u32,
        milliseconds: u64,
    },
    /// Writes on one connection.
    Stream {
        one: u32,
        milliseconds: u64,
    },
    /// Ping-pongs on the first `count` connections at the same time.
    Serve {
        count: u32,
        milliseconds: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Done,
    Listening { raw: u16, rdma: u16 },
    Figure(Figure),
    Calls(Calls),
    Usage(Usage),
    Spread(Spread),
    Failed(Failure),
}

/// What a process uses.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Usage {
    pub connections: u64,
    /// Bytes that malloc has given out and not got back.
    pub heap: u64,
    /// Bytes of private memory that are in use, of whatever kind.
    pub resident: u64,
    /// Processor time of all threads, in microseconds: before and after this account was made.
    pub cpu_us: [u64; 2],
    /// Of the whole machine: what the kernel's allocator holds, and the buffers of TCP. They cannot be
    /// attributed to a process.
    pub kernel: u64,
}

/// How differently the connections were served: round trips a second of the first, the middle and the last.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Spread {
    pub least: f64,
    pub median: f64,
    pub most: f64,
}

/// The active end begins, measures the time and ends it; the passive end answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    Active,
    Passive,
}

/// What carries the traffic.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Over {
    Raw(Way),
    Uwarp,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Job {
    pub over: Over,
    pub work: Work,
    /// For about how long.
    pub milliseconds: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Work {
    /// One message there, one back. The figure is half a round trip.
    PingPong { wait: Wait, size: u32 },
    /// Messages one way. The figure is bytes a second, until the target has reported that it has them all.
    Stream { flow: Flow, target: Target },
    /// One datagram there, one back. The figure is half a round trip.
    Datagram { size: u32 },
    /// The same with reliable datagrams.
    Reliable { size: u32 },
    /// Reliable messages one way, each posted alone, up to `window` in flight. The figure is bytes a second,
    /// until the peer has them all.
    ReliableStream { size: u32, window: u32, wait: Wait },
    /// Datagrams one way, posted in lists of `list`, the last of each signalled, up to `depth` in flight. The
    /// figure is datagrams a second that arrive.
    Datagrams { size: u32, list: u32, depth: u32 },
    /// Small messages one way, posted in lists of `list`, the last of each signalled, up to `depth` in
    /// flight. The figure is messages a second, likewise.
    Rate { size: u32, list: u32, depth: u32, target: Target },
    /// A Send with a small request, then an RDMA Write or Read of `size` bytes by the end that was asked,
    /// then its Send of the response. The figure is the time from the request to the response.
    Transaction { verb: Verb, size: u32 },
    /// A message of this size is copied in pieces and its CRC taken on the way; at the active end alone.
    /// Bytes a second.
    CopyCrc { size: u32 },
    /// System calls of the active end's thread on one path of the library.
    Path(Path),
}

/// Messages of one kind, all from one place and to one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flow {
    pub verb: Verb,
    pub size: u32,
    /// Outstanding work requests at most.
    pub window: u32,
    /// One work request in this number is signalled.
    pub signal: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verb {
    Write,
    Read,
    Send,
}

impl Work {
    /// Whether a thread at each end needs a core of its own all the time.
    pub fn spins(self) -> bool {
        match self {
            Work::PingPong { wait, .. } => matches!(wait, Wait::Spin | Wait::Memory | Wait::Answer),
            Work::Stream { target, .. } | Work::Rate { target, .. } => target == Target::Polls,
            Work::Transaction { .. }
            | Work::Datagram { .. }
            | Work::Reliable { .. }
            | Work::Datagrams { .. } => true,
            Work::ReliableStream { wait, .. } => wait == Wait::Spin,
            Work::CopyCrc { .. } => false,
            Work::Path(path) => path != Path::Event,
        }
    }

    /// It needs no connection.
    pub fn is_of_datagrams(self) -> bool {
        matches!(
            self,
            Work::Datagram { .. }
                | Work::Reliable { .. }
                | Work::ReliableStream { .. }
                | Work::Datagrams { .. }
        )
    }

    /// The figure is a time, and less is better.
    pub fn is_time(self) -> bool {
        matches!(
            self,
            Work::PingPong { .. } | Work::Transaction { .. } | Work::Datagram { .. } | Work::Reliable { .. }
        )
    }

    /// The part of the work that is the same for raw TCP, which has no verbs, no queues and, one way, no
    /// messages.
    pub fn without_verbs(self) -> Work {
        let target = Target::Polls;
        match self {
            Work::PingPong { size, .. } => Work::PingPong { wait: Wait::Spin, size },
            Work::Stream { .. } => {
                let flow = Flow { verb: Verb::Write, size: LARGEST, window: 1, signal: 1 };
                Work::Stream { flow, target }
            }
            Work::Rate { size, list, depth, .. } => Work::Rate { size, list, depth, target },
            other => other,
        }
    }
}

/// How an end waits for the next message of a ping-pong over uwarp; raw TCP has [`Way`]s of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wait {
    /// `ibv_poll_cq` in a loop; a receive call in a loop.
    Spin,
    /// `ibv_get_cq_event`; a receive call that blocks.
    Block,
    /// The same, and each end answers later than it could (`eventfds::LATE`): the other one sleeps.
    Late,
    /// poll(2) on the channel's descriptor, then `ibv_get_cq_event`.
    Descriptor,
    /// RDMA Writes, seen by looking at memory, as `ib_write_lat` does it.
    Memory,
    /// For the answer to an atomic fetch-and-add; the peer, which polls, has nothing to send.
    Answer,
}

/// What the target of one-way traffic does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Target {
    /// Polls its completion queue.
    Polls,
    /// Blocks in `ibv_get_cq_event`.
    Blocks,
    /// Sleeps outside the library, as the target of `ib_write_bw` does.
    Sleeps,
}

/// A path whose system calls are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Path {
    /// `ibv_post_send` of one small Send on an idle connection.
    PostIdle,
    /// `ibv_post_send` of a list of 64 small Writes.
    PostList,
    /// `ibv_post_send` of one Write of 1 MiB.
    PostLarge,
    /// `ibv_poll_cq` with a message waiting in the socket.
    PollWaiting,
    /// `ibv_poll_cq` with nothing waiting, in a loop.
    PollEmpty,
    /// `ibv_get_cq_event`, with `ibv_req_notify_cq` and `ibv_poll_cq`, for one message that has not arrived
    /// yet.
    Event,
}

/// The result of one round.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Microseconds (median of the round), bytes a second, or messages a second.
    pub value: f64,
    /// Of times: 99 of 100 were not longer, in microseconds.
    pub p99: Option<f64>,
    pub operations: u64,
}

/// System calls that the calling thread made on one path.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Calls {
    /// How often the path was walked.
    pub operations: u64,
    /// How many of them made no call because another thread had done the work.
    pub spared: u64,
    pub calls: Vec<Call>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub name: String,
    /// It returned EAGAIN.
    pub empty: bool,
    pub count: u64,
}

/// Bytes that a job's buffers must hold at most.
pub const LARGEST: u32 = 4 * 1024 * 1024;
