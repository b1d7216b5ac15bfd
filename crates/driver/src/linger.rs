//! Streams that have ended: the shell of `uwarp_llp::closing`, with the engine and its timers. The queue
//! pair is no longer involved: it may be destroyed, or get another stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::time::Instant;

use uwarp_llp::Link;
use uwarp_llp::closing::{Closed, Closing, Manner, Step};
use uwarp_process::Mutex;
use uwarp_rnic::qp::{Disconnect, End};

use crate::engine::Engine;
use crate::fork;
use crate::observer::StreamObserver;
use crate::source::{Readiness, Source, Token};

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
    closing: Closing,
    /// To be told of the end when the peer has answered.
    at_answer: Option<(Arc<dyn StreamObserver>, Disconnect)>,
    /// When the timer ends.
    timer: Instant,
}

impl Linger {
    /// Takes the link, registered under `token`, from its queue pair. `rest` is what is still to be sent, and
    /// `end` how the peer understands the end. The caller calls [`Self::step`] as soon as it holds no lock.
    pub(crate) fn take_over(
        engine: &Arc<Engine>,
        link: Link,
        token: Token,
        (rest, end): (Vec<u8>, End),
        waiting: Waiting,
    ) -> Arc<Self> {
        Self::since(Instant::now(), engine, link, token, (rest, end), waiting)
    }

    /// The end begins at `began`.
    fn since(
        began: Instant,
        engine: &Arc<Engine>,
        link: Link,
        token: Token,
        (rest, end): (Vec<u8>, End),
        waiting: Waiting,
    ) -> Arc<Self> {
        let manner = match end {
            End::Plain => Manner::Plain,
            End::Told => Manner::WholeOrReset,
            End::Reset => Manner::Reset,
        };
        let mut link = link;
        link.set_late();
        let closing = Closing::new(rest, manner, waiting.held, began, &link);
        let timer = closing.poll_timeout();
        let state = State { link, token, closing, at_answer: waiting.at_answer, timer };
        let linger = Arc::new(Self { engine: engine.clone(), state: Mutex::new(Some(state)) });
        engine.replace(token, linger.clone());
        engine.set_timer(token, Some(timer));
        linger
    }

    /// Continues as far as possible without waiting.
    pub(crate) fn step(&self) {
        let mut guard = self.state.lock();
        let Some(state) = guard.as_mut() else { return };
        // Its queue pair may have had the report.
        state.link.look_at_end();
        let step = state.closing.step(Instant::now(), &mut state.link);
        let Step::Over(how) = step else {
            if step == Step::Again {
                self.engine.rearm(state.token);
            }
            return state.set_timer(&self.engine);
        };
        let Some(state) = guard.take() else { return };
        drop(guard);
        if let Closed::GaveUp { unsent } = how {
            tracing::debug!("a stream is closed although its peer has not confirmed {unsent} bytes");
        }
        self.engine.deregister(state.token);
        // A stream that shares a socket is left to what carries it.
        if let Ok(fd) = state.link.into_descriptor() {
            fork::close(fd.take());
        }
        OPEN.fetch_sub(1, Ordering::SeqCst);
        if let Some((observer, why)) = state.at_answer {
            // An observer closes descriptors, and a thread that polls must not be cancelled there.
            let _uncancelled = fork::Uncancelled::begin();
            observer.disconnected(why);
        }
    }

    /// The program has disconnected. Returns whether the peer waits for that; [`Self::step`] follows.
    pub(crate) fn answer(&self) -> bool {
        self.state.lock().as_mut().is_some_and(|state| state.closing.release())
    }

    /// The queue pair is destroyed: nothing is reported.
    pub(crate) fn forget_report(&self) {
        if let Some(state) = self.state.lock().as_mut() {
            state.at_answer = None;
        }
    }
}

impl State {
    fn set_timer(&mut self, engine: &Engine) {
        let timer = self.closing.poll_timeout();
        if timer != self.timer {
            self.timer = timer;
            engine.set_timer(self.token, Some(timer));
        }
    }
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
    use std::time::Duration;

    use uwarp_llp::LowerLayer as _;

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
        let (later, limit) = (Instant::now() + Duration::from_secs(58), Duration::from_secs(60));
        let (start, rest) = (Instant::now(), b"the rest".to_vec());
        let linger =
            Linger::since(later, &engine, Link::from(ours), token, (rest, End::Plain), Waiting::default());

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
                Some(state) if state.closing.is_shut_down() => state.link.unsent(),
                Some(_) => 0,
                None => break,
            };
            // The end itself counts as one byte.
            shut_down_with_data |= unsent > 1;
            assert!(start.elapsed() < limit, "the stream does not end");
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
        let nothing = (Vec::new(), End::Reset);
        Linger::take_over(&engine, Link::from(ours), token, nothing, Waiting::default()).step();
        let seen = peer.read(&mut [0; 8]).map_err(|error| error.kind());
        assert_eq!(seen, Err(ErrorKind::ConnectionReset));
    }
}
