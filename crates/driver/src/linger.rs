//! Streams that have ended.
//!
//! Closing without loss (docs/contracts.md, "Wire rules"): send what the kernel has not taken yet, shut our
//! side down once the kernel has sent it, drain input for a bounded time, then close the link. The queue pair
//! is no longer involved: it may be destroyed, or get another stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::{Duration, Instant};

use uwarp_llp::{Ended, Link, LowerLayer as _, Stop};
use uwarp_process::Mutex;
use uwarp_rnic::qp::{Disconnect, End};

use crate::engine::Engine;
use crate::fork;
use crate::observer::StreamObserver;
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
/// The first pause before the next look at whether the kernel has sent everything; each is twice as long as
/// the one before. The kernel sends when the peer acknowledges or its own pacing allows, and reports neither.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
/// The longest pause.
const LAST_PAUSE: Duration = Duration::from_millis(64);
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
    state: Mutex<Option<State>, 25>,
}

/// What a stream that has ended waits for, beside the network (`uwarp_rnic::qp::DisconnectReply`).
#[derive(Default)]
pub(crate) struct Waiting {
    /// The program has not disconnected yet, and the peer's program waits for that.
    pub held: bool,
    /// To be told of the end when the peer has answered.
    pub at_answer: Option<(Arc<dyn StreamObserver>, Disconnect)>,
}

struct State {
    link: Link,
    token: Token,
    rest: Vec<u8>,
    sent: usize,
    /// How the peer understands the end.
    end: End,
    waiting: Waiting,
    shut_down: bool,
    /// The peer has closed too.
    eof: bool,
    /// The connection is broken: nothing can be sent or received any more.
    broken: bool,
    deadline: Instant,
    /// When the timer ends.
    timer: Instant,
    /// How long the next pause is.
    pause: Duration,
    /// The bytes that the peer's TCP had not acknowledged at the first check.
    unacknowledged: Option<usize>,
}

impl Linger {
    /// Takes the link, registered under `token`, from its queue pair. `rest` is what is still to be sent. The
    /// caller calls [`Self::step`] as soon as it holds no lock.
    pub(crate) fn take_over(
        engine: &Arc<Engine>,
        link: Link,
        token: Token,
        last: (Vec<u8>, End),
        waiting: Waiting,
    ) -> Arc<Self> {
        Self::until(Instant::now() + LIMIT, engine, link, token, last, waiting)
    }

    fn until(
        deadline: Instant,
        engine: &Arc<Engine>,
        link: Link,
        token: Token,
        (rest, end): (Vec<u8>, End),
        waiting: Waiting,
    ) -> Arc<Self> {
        let timer = deadline - BEFORE_EXIT - STALLED;
        let state = State {
            link,
            token,
            rest,
            sent: 0,
            end,
            waiting,
            shut_down: false,
            eof: false,
            // The close is the reset.
            broken: end == End::Reset,
            deadline,
            timer,
            pause: FIRST_PAUSE,
            unacknowledged: None,
        };
        // From now on, input is dropped.
        if end == End::Reset || end == End::Told && !state.rest.is_empty() {
            state.link.reset_on_close(true);
        }
        let linger = Arc::new(Self { engine: engine.clone(), state: Mutex::new(Some(state)) });
        engine.replace(token, linger.clone());
        engine.set_timer(token, Some(timer));
        linger
    }

    /// Continues as far as possible without waiting.
    pub(crate) fn step(&self) {
        let mut guard = self.state.lock();
        let Some(state) = guard.as_mut() else { return };
        // Before a reset, no end of the stream may be seen: the peer would count on what is dropped here.
        if !state.broken {
            state.send();
        }
        if state.drain() {
            self.engine.rearm(state.token);
        }
        let finished = state.broken || state.shut_down && state.eof;
        if !finished && !state.gives_up(&self.engine) {
            return;
        }
        let Some(state) = guard.take() else { return };
        drop(guard);
        self.engine.deregister(state.token);
        fork::close(state.link.into_fd());
        OPEN.fetch_sub(1, Ordering::SeqCst);
        if let Some((observer, why)) = state.waiting.at_answer {
            // An observer closes descriptors, and a thread that polls must not be cancelled there.
            let _uncancelled = fork::Uncancelled::begin();
            observer.disconnected(why);
        }
    }

    /// The program has disconnected. Returns whether the peer waits for that; [`Self::step`] follows.
    pub(crate) fn answer(&self) -> bool {
        self.state.lock().as_mut().is_some_and(|state| std::mem::take(&mut state.waiting.held))
    }

    /// The queue pair is destroyed: nothing is reported.
    pub(crate) fn forget_report(&self) {
        if let Some(state) = self.state.lock().as_mut() {
            state.waiting.at_answer = None;
        }
    }
}

impl State {
    /// Whether the time is over; otherwise sets the timer.
    fn gives_up(&mut self, engine: &Engine) -> bool {
        let now = Instant::now();
        let look = self.deadline - BEFORE_EXIT;
        let mut timer = match self.unacknowledged {
            _ if now >= self.deadline => return true,
            None if now < look - STALLED => look - STALLED,
            None => {
                self.unacknowledged = Some(self.link.unacknowledged());
                look
            }
            Some(_) if now < look => look,
            Some(before) => {
                if self.link.unacknowledged() == before && reads_nothing(&self.link) {
                    self.link.reset_on_close(true);
                    return true;
                }
                self.deadline
            }
        };
        if !self.shut_down && self.rest.is_empty() && !self.waiting.held {
            timer = timer.min(now + self.pause);
            self.pause = LAST_PAUSE.min(self.pause * 2);
        }
        if timer != self.timer {
            self.timer = timer;
            engine.set_timer(self.token, Some(timer));
        }
        false
    }

    fn send(&mut self) {
        while let Some(rest) = self.rest.get(self.sent..).filter(|rest| !rest.is_empty()) {
            match self.link.send_bytes(rest) {
                Ok(n) => self.sent += n,
                Err(Stop::Later) => return,
                // No peer takes it.
                Err(_) => {
                    self.broken = true;
                    return;
                }
            }
        }
        if !self.rest.is_empty() && self.end == End::Told {
            self.link.reset_on_close(false);
        }
        self.rest = Vec::new();
        self.sent = 0;
        // The end of the stream travels in a segment of its own. In one segment with the last data, siw may
        // see the end first and then drop the data (trap 13 of conformance/siw/README.md).
        let late = Instant::now() >= self.deadline - BEFORE_EXIT - STALLED;
        if !self.shut_down && (late || self.link.unsent() == 0 && !self.waiting.held) {
            self.shut_down = true;
            self.link.finish();
        }
    }

    /// Reads and drops input: unread bytes would turn the close into a reset, which costs the peer what it
    /// has not read. Returns whether there may be more.
    fn drain(&mut self) -> bool {
        // Mostly there is nothing, or an acknowledgement. The rest is not on the stack: a thread that
        // destroys a queue pair may have no more than 16 KiB in all.
        let (mut first, mut rest) = ([0; 64], Vec::new());
        let mut drained = 0;
        while !self.eof && !self.broken && drained < TURN {
            let buffer = if drained == 0 {
                &mut first[..]
            } else {
                rest.resize(16 * 1024, 0);
                &mut rest[..]
            };
            match self.link.receive(buffer) {
                Ok(received) => drained += received.bytes,
                Err(Stop::Later) => return false,
                Err(Stop::Ended(Ended::Closed)) => self.eof = true,
                Err(_) => self.broken = true,
            }
        }
        !self.eof && !self.broken
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

    fn exit(&self) {
        self.answer();
        self.step();
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsRawFd as _;

    use super::*;

    /// A source of its own, until the end of the stream takes its place.
    struct Before;

    impl Source for Before {
        fn ready(&self, _: Readiness) {}

        fn timeout(&self) {}
    }

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("listen");
        let ours = TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
        (ours, listener.accept().expect("accept").0)
    }

    /// Sends until the kernel takes no more: the peer reads nothing.
    fn fill(mut ours: &TcpStream) -> usize {
        ours.set_nonblocking(true).expect("non-blocking");
        let mut filled = 0;
        loop {
            match ours.write(&[7; 64 * 1024]) {
                Ok(n) => filled += n,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return filled,
                Err(e) => panic!("{e}"),
            }
        }
    }

    #[test]
    fn the_end_is_not_in_one_segment_with_data() {
        let engine = Arc::new(Engine::new().expect("engine"));
        let (ours, mut peer) = pair();
        let filled = fill(&ours);
        let token = engine.register(ours.as_raw_fd(), Arc::new(Before)).expect("register");
        stream_begins();
        // It must not give up the peer here, however slow the machine is.
        let limit = Instant::now() + Duration::from_secs(60);
        let rest = b"the rest".to_vec();
        let linger =
            Linger::until(limit, &engine, Link::from(ours), token, (rest, End::Plain), Waiting::default());

        // The kernel holds data that it has not sent, so it would put the end of the stream behind it.
        let reader = std::thread::spawn(move || {
            let mut got = Vec::new();
            peer.read_to_end(&mut got).expect("the stream, and its end");
            got
        });
        let mut shut_down_with_data = false;
        while !reader.is_finished() {
            linger.step();
            let unsent = match linger.state.lock().as_ref() {
                Some(state) if state.shut_down => state.link.unsent(),
                Some(_) => 0,
                None => break,
            };
            // The end itself counts as one byte.
            shut_down_with_data |= unsent > 1;
            assert!(Instant::now() < limit, "the stream does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!shut_down_with_data);
        let got = reader.join().expect("the reader");
        assert_eq!(got.len(), filled + b"the rest".len());
        assert!(got.ends_with(b"the rest"));
    }

    /// The peer would take an end in good order for an acknowledgement of what is dropped here.
    #[test]
    fn no_end_is_seen_before_a_reset() {
        let engine = Arc::new(Engine::new().expect("engine"));
        let (ours, mut peer) = pair();
        let token = engine.register(ours.as_raw_fd(), Arc::new(Before)).expect("register");
        stream_begins();
        let limit = Instant::now() + Duration::from_secs(60);
        Linger::until(limit, &engine, Link::from(ours), token, (Vec::new(), End::Reset), Waiting::default())
            .step();
        let seen = peer.read(&mut [0; 8]).map_err(|error| error.kind());
        assert_eq!(seen, Err(ErrorKind::ConnectionReset));
    }
}
