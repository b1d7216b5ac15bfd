//! Streams that have ended.
//!
//! Closing without loss (docs/contracts.md, "Wire rules"): send what the kernel has not taken yet, shut our
//! side down, drain input for a bounded time, then close the link. The queue pair is no longer involved: it
//! may be destroyed, or get another stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::io::Errno;
use uwarp_llp::link::Received;
use uwarp_llp::{Link, LowerLayer as _};

use crate::engine::Engine;
use crate::fork;
use crate::source::{Readiness, Source, Token};

/// The limit for the whole end of a stream.
const LIMIT: Duration = Duration::from_secs(2);
/// If a peer answers but takes nothing for this long at the end of the limit, uwarp stops waiting and resets
/// the connection. Such a peer does not read, because a message waits for a receive that its program may
/// never post. The end of the stream lies behind what it does not read. So its program would not learn of the
/// end while this system offers the bytes again and again, for minutes. A peer that does not answer is
/// another matter: the network may be interrupted for a moment, and this system continues to send after the
/// close.
const STALLED: Duration = Duration::from_millis(500);
/// Subtracted from the limit, because a process that exits waits no longer than that.
const BEFORE_EXIT: Duration = Duration::from_millis(250);
/// Bytes drained before another source is served.
const TURN: usize = 512 * 1024;

/// Streams that are not closed yet, in the whole process.
static OPEN: AtomicIsize = AtomicIsize::new(0);

/// The number of streams of the process, including those that are only waiting to be closed.
pub(crate) fn open_streams() -> usize {
    // A stream that was given up may still end later, so the counter can be negative.
    usize::try_from(OPEN.load(Ordering::SeqCst)).unwrap_or(0)
}

/// This process is a child, and its parent's streams do not count here.
pub(crate) fn none_is_ours() {
    OPEN.store(0, Ordering::SeqCst);
}

/// A queue pair has got a stream; it ends as a [`Linger`].
pub(crate) fn stream_begins() {
    OPEN.fetch_add(1, Ordering::SeqCst);
}

/// The process exits, and this stream cannot be closed.
pub(crate) fn stream_given_up() {
    OPEN.fetch_sub(1, Ordering::SeqCst);
}

/// A stream that has ended.
pub(crate) struct Linger {
    engine: Arc<Engine>,
    state: Mutex<Option<State>>,
}

struct State {
    link: Link,
    token: Token,
    rest: Vec<u8>,
    sent: usize,
    shut_down: bool,
    /// The peer has closed too, or the connection is broken.
    eof: bool,
    deadline: Instant,
    /// The bytes that the peer's TCP had not acknowledged at the first check.
    unacknowledged: Option<usize>,
}

impl Linger {
    /// Takes the link, registered under `token`, from its queue pair. `rest` is what is still to be sent. The
    /// caller calls [`Self::step`] as soon as it holds no lock.
    pub(crate) fn take_over(engine: &Arc<Engine>, link: Link, token: Token, rest: Vec<u8>) -> Arc<Self> {
        let deadline = Instant::now() + LIMIT;
        let state = State {
            link,
            token,
            rest,
            sent: 0,
            shut_down: false,
            eof: false,
            deadline,
            unacknowledged: None,
        };
        let linger = Arc::new(Self { engine: engine.clone(), state: Mutex::new(Some(state)) });
        engine.replace(token, linger.clone());
        engine.set_timer(token, Some(deadline - BEFORE_EXIT - STALLED));
        linger
    }

    /// Continues as far as possible without waiting.
    pub(crate) fn step(&self) {
        let mut guard = self.state.lock();
        let Some(state) = guard.as_mut() else { return };
        state.send();
        if state.drain() {
            self.engine.rearm(state.token);
        }
        let finished = state.shut_down && state.eof;
        if !finished && !state.gives_up(&self.engine) {
            return;
        }
        let Some(state) = guard.take() else { return };
        drop(guard);
        self.engine.deregister(state.token);
        fork::close(state.link.into_fd());
        OPEN.fetch_sub(1, Ordering::SeqCst);
    }
}

impl State {
    /// Whether the time is over; otherwise sets the timer.
    fn gives_up(&mut self, engine: &Engine) -> bool {
        let now = Instant::now();
        let look = self.deadline - BEFORE_EXIT;
        let timer = match self.unacknowledged {
            _ if now >= self.deadline => return true,
            None if now < look - STALLED => return false,
            None => {
                self.unacknowledged = Some(self.link.unacknowledged());
                look
            }
            Some(_) if now < look => return false,
            Some(before) => {
                if self.link.unacknowledged() == before && reads_nothing(&self.link) {
                    self.link.reset_on_close();
                    return true;
                }
                self.deadline
            }
        };
        engine.set_timer(self.token, Some(timer));
        false
    }

    fn send(&mut self) {
        while let Some(rest) = self.rest.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match self.link.send_bytes(rest) {
                Ok(n) => self.sent += n,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // No peer takes it.
                Err(_) => break,
            }
        }
        if !self.shut_down {
            self.shut_down = true;
            self.rest = Vec::new();
            self.sent = 0;
            self.link.finish();
        }
    }

    /// Reads and drops input: unread bytes would turn the close into a reset, which costs the peer what it
    /// has not read. Returns whether there may be more.
    fn drain(&mut self) -> bool {
        let mut buffer = [0; 16 * 1024];
        let mut drained = 0;
        while !self.eof && drained < TURN {
            match self.link.receive(&mut buffer) {
                Ok(Received { bytes: 0, .. }) => self.eof = true,
                Ok(received) => drained += received.bytes,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => self.eof = true,
            }
        }
        !self.eof
    }
}

/// Whether the peer answers but takes no more data.
fn reads_nothing(link: &Link) -> bool {
    link.answers().is_some_and(|answers| answers.held && !answers.doubtful)
}

impl Source for Linger {
    fn ready(&self, _: Readiness) {
        self.step();
    }

    fn timeout(&self) {
        self.step();
    }
}
