//! The shell of a machine: its connections, its alarm and one lock for all of them. Everything that is real
//! is here: the clock, the engine, and the calls of queue pairs.
//!
//! ```text
//!   engine, queue pair ─▶ Hook, Alarm ─▶ post: inbox ─┐
//!   program ─▶ call ─▶ lock ─▶ machine::run ◀─────────┘ drained by the lock's holder
//!                        └─ unlocked: attach, disconnect, reports ─▶ answers
//! ```
//!
//! The lock is held for computing and for system calls that do not wait, on the machine's own sockets. Queue
//! pairs and observers are called without it, by one thread at a time, in the machine's order. Nobody waits
//! for the lock but a call of the program, so runners have no order among each other.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rustix::io::Errno;
use uwarp_driver::{
    Alarm, Attended, Disconnect, Engine, Qp, Readiness, Source, StreamNumber, StreamObserver, Token,
};
use uwarp_llp::carrier::{Bound, Options, SetUp, Watch};
use uwarp_llp::udp::Route;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Now, StreamParams};

use crate::carriers::{self, carrier};
use crate::event::ConnParam;
use crate::machine::run::{Conns, Deferred, Surroundings, run};
use crate::machine::{ConnKey, Input, Machine, Recipient, StreamEvent};
use crate::sync::{Mutex, MutexGuard};

/// Datagrams that wait while another thread runs the machine: a flood must not take memory, and what is lost
/// is asked for again.
const MOST_DATAGRAMS: usize = 1024;

/// What a machine's owner does for it. Called without a lock, but for the last two.
pub(crate) trait Environment<M: Machine>: Sized + Send + Sync + 'static {
    /// Who gets a connection.
    fn queue_pair(&self, to: Recipient) -> Option<Arc<Qp>>;
    /// The stream's parameters.
    fn stream_params(&self, qp: &Qp, said: &Negotiated, param: ConnParam) -> StreamParams;
    /// The machine reports. Must not block.
    fn report(&self, report: M::Report);
    /// Whether the queue pair's stream, which has ended, was used by a program. By number alone.
    fn was_used(&self, _to: Recipient) -> bool {
        false
    }
    /// The machine's deadline has come; it learns of it next.
    fn before_timeout(&self, _runner: &Runner<M, Self>) {}
    /// Tells the machine what has changed around it. Called with the runner's lock.
    fn prepare(&self, _machine: &mut M) {}
    /// Sends a datagram. Called with the runner's lock.
    fn send(&self, _route: Route, _bytes: &[u8]) {}
}

/// See the head of this file.
pub(crate) struct Runner<M: Machine + 'static, E: Environment<M>> {
    me: Weak<Self>,
    engine: Arc<Engine>,
    env: E,
    lock: Attended<State<M>>,
    inbox: Mutex<Vec<Note>>,
}

struct State<M: Machine> {
    machine: M,
    conns: Conns<Watched>,
    alarm: Alarm,
    /// What the alarm is set to.
    at: Option<Instant>,
    deferred: VecDeque<Deferred<M::Report>>,
    /// The last stream of the owner's own queue pair, for [`Deferred::Disconnect`].
    stream: Option<(ConnKey, StreamNumber)>,
    /// A thread carries out what is deferred, and continues with what is added meanwhile.
    deferring: bool,
}

/// What has happened, for the lock's holder.
enum Note {
    Ready(Option<ConnKey>, Readiness),
    Timeout,
    Stream(ConnKey, StreamEvent),
    Datagram { from: SocketAddr, to: IpAddr, bytes: Box<[u8]> },
}

/// A watch of the engine.
struct Watched {
    engine: Arc<Engine>,
    token: Token,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.engine.deregister(self.token);
    }
}

impl<M: Machine + 'static, E: Environment<M>> Runner<M, E> {
    /// Runs a machine, with the connections that it has from the beginning. What it does at once is done
    /// when this returns, and may be reported before.
    pub fn start(
        engine: &Arc<Engine>,
        env: E,
        machine: M,
        conns: impl IntoIterator<Item = (ConnKey, Box<dyn SetUp>)>,
    ) -> Arc<Self> {
        let mut open = Conns::new(carrier(), Options::default());
        for (conn, set_up) in conns {
            open.insert(conn, set_up);
        }
        let runner = Arc::new_cyclic(|me: &Weak<Self>| Self {
            me: Weak::clone(me),
            engine: Arc::clone(engine),
            env,
            lock: Attended::new(State {
                machine,
                conns: open,
                alarm: Alarm::new(engine, Weak::clone(me) as Weak<dyn Source>),
                at: None,
                deferred: VecDeque::new(),
                stream: None,
                deferring: false,
            }),
            inbox: Mutex::default(),
        });
        runner.call(|_, _| ());
        runner
    }

    /// What the machine has around it.
    pub fn env(&self) -> &E {
        &self.env
    }

    /// What is bound for the machine's [`Action::Listen`](crate::machine::Action::Listen).
    pub fn set_bound(&self, bound: Box<dyn Bound>) {
        let mut state = self.lock.lock();
        state.conns.set_bound(bound);
        self.release(state);
    }

    /// A datagram has come. It may be dropped.
    pub fn datagram(&self, from: SocketAddr, to: IpAddr, bytes: &[u8]) {
        if self.inbox.lock().len() < MOST_DATAGRAMS {
            self.post(Note::Datagram { from, to, bytes: bytes.into() });
        }
    }

    /// A call of the program.
    pub fn call<T>(&self, f: impl FnOnce(&mut M, &Now) -> T) -> T {
        let mut state = self.lock.lock();
        let now = Now::unread();
        self.env.prepare(&mut state.machine);
        let result = f(&mut state.machine, &now);
        self.run(&mut state, &now);
        self.release(state);
        result
    }

    /// The program's last call: nothing is reported any more.
    pub fn cancel(&self, f: impl FnOnce(&mut M)) {
        let mut state = self.lock.lock();
        state.deferred.retain(|deferred| !matches!(deferred, Deferred::Report(_)));
        f(&mut state.machine);
        self.run(&mut state, &Now::unread());
        self.release(state);
    }

    fn post(&self, note: Note) {
        self.inbox.lock().push(note);
        if let Some(mut state) = self.lock.look() {
            self.drain(&mut state);
            self.release(state);
        }
    }

    fn drain(&self, state: &mut State<M>) {
        let now = Now::unread();
        self.env.prepare(&mut state.machine);
        for note in std::mem::take(&mut *self.inbox.lock()) {
            self.feed(state, note, &now);
        }
        self.run(state, &now);
    }

    fn feed(&self, state: &mut State<M>, note: Note, now: &Now) {
        let State { machine, conns, at, .. } = state;
        match note {
            Note::Ready(None, _) => machine.handle_input(now, Input::Waiting),
            Note::Ready(Some(conn), ready) => {
                if conns.note(conn, ready.readable, ready.writable) {
                    machine.handle_input(now, Input::Room { conn });
                }
            }
            Note::Timeout => {
                *at = None;
                machine.handle_timeout(now);
            }
            Note::Stream(conn, event) => machine.handle_input(now, Input::Stream { conn, event }),
            Note::Datagram { from, to, bytes } => {
                machine.handle_input(now, Input::Datagram { from, to, bytes: &bytes });
            }
        }
    }

    fn run(&self, state: &mut State<M>, now: &Now) {
        let State { machine, conns, deferred, alarm, at, .. } = state;
        run(machine, conns, &mut Real(self), deferred, now);
        let next = machine.poll_timeout();
        if next != *at {
            *at = next;
            match next {
                Some(next) => alarm.set(next),
                None => alarm.clear(),
            }
        }
    }

    fn release<'a>(&'a self, state: MutexGuard<'a, State<M>>) {
        let finish = |state: &mut MutexGuard<'a, State<M>>| {
            if std::mem::replace(&mut state.deferring, true) {
                return;
            }
            while let Some(deferred) = state.deferred.pop_front() {
                if let Some(note) = self.carry_out(state, deferred) {
                    let now = Now::unread();
                    self.feed(state, note, &now);
                    self.run(state, &now);
                }
            }
            state.deferring = false;
        };
        self.lock.release(state, finish, |state| self.drain(state));
    }

    /// Does what must be done without the lock; returns the answer.
    fn carry_out(&self, state: &mut MutexGuard<'_, State<M>>, deferred: Deferred<M::Report>) -> Option<Note> {
        match deferred {
            Deferred::Attach { conn, to, said, param } => {
                // Its watch ends before the queue pair watches the same descriptor.
                let set_up = state.conns.take(conn)?;
                let attached = MutexGuard::unlocked(state, || self.attach(conn, to, &said, param, set_up));
                Some(Note::Stream(
                    conn,
                    match attached {
                        Ok(number) => {
                            if to == Recipient::Own {
                                state.stream = Some((conn, number));
                            }
                            StreamEvent::Attached
                        }
                        Err((error, set_up)) => {
                            state.conns.insert(conn, set_up);
                            StreamEvent::Refused(error)
                        }
                    },
                ))
            }
            Deferred::Disconnect(conn) => {
                // Another stream of the queue pair, which may have begun since, goes on.
                if let Some((_, number)) = state.stream.filter(|(of, _)| *of == conn) {
                    MutexGuard::unlocked(state, || {
                        if let Some(qp) = self.env.queue_pair(Recipient::Own) {
                            qp.disconnect_stream(number);
                        }
                    });
                }
                None
            }
            // No machine that has a runner does this yet.
            Deferred::Fail => None,
            Deferred::Report(report) => {
                MutexGuard::unlocked(state, || self.env.report(report));
                None
            }
        }
    }

    fn attach(
        &self,
        conn: ConnKey,
        to: Recipient,
        said: &Negotiated,
        param: ConnParam,
        set_up: Box<dyn SetUp>,
    ) -> Result<StreamNumber, (VerbsError, Box<dyn SetUp>)> {
        let Some(qp) = self.env.queue_pair(to) else {
            return Err((VerbsError::Invalid("the queue pair is destroyed"), set_up));
        };
        let params = self.env.stream_params(&qp, said, param);
        tracing::debug!(qpn = qp.qpn(), ?params, "attach");
        let observer = Arc::new(StreamHook { runner: Weak::clone(&self.me), conn, to });
        let attached = match to {
            Recipient::Own => qp.attach(set_up.into_link(), params, observer),
            Recipient::Number { moves, .. } => qp.attach_awaited(set_up.into_link(), params, observer, moves),
        };
        attached.map_err(|(error, link)| (error, link.into_set_up()))
    }
}

/// The alarm.
impl<M: Machine + 'static, E: Environment<M>> Source for Runner<M, E> {
    fn ready(&self, _: Readiness) {}

    fn timeout(&self) {
        self.env.before_timeout(self);
        self.post(Note::Timeout);
    }
}

/// What the engine has of a runner: it must end when its owner drops it.
struct Hook<M: Machine + 'static, E: Environment<M>> {
    runner: Weak<Runner<M, E>>,
    conn: Option<ConnKey>,
}

impl<M: Machine + 'static, E: Environment<M>> Source for Hook<M, E> {
    fn ready(&self, readiness: Readiness) {
        if let Some(runner) = self.runner.upgrade() {
            runner.post(Note::Ready(self.conn, readiness));
        }
    }

    fn timeout(&self) {}
}

/// What a queue pair has of a runner.
struct StreamHook<M: Machine + 'static, E: Environment<M>> {
    runner: Weak<Runner<M, E>>,
    conn: ConnKey,
    to: Recipient,
}

impl<M: Machine + 'static, E: Environment<M>> StreamObserver for StreamHook<M, E> {
    fn established(&self) {
        if let Some(runner) = self.runner.upgrade() {
            runner.post(Note::Stream(self.conn, StreamEvent::Established));
        }
    }

    fn disconnected(&self, why: Disconnect) {
        let Some(runner) = self.runner.upgrade() else { return };
        if runner.env.was_used(self.to) {
            runner.post(Note::Stream(self.conn, StreamEvent::Used));
        }
        runner.post(Note::Stream(self.conn, StreamEvent::Ended(why)));
    }
}

/// The loop's surroundings.
struct Real<'a, M: Machine + 'static, E: Environment<M>>(&'a Runner<M, E>);

impl<M: Machine + 'static, E: Environment<M>> Surroundings for Real<'_, M, E> {
    type Watched = Watched;

    fn watch(&mut self, conn: Option<ConnKey>, watch: Watch<'_>) -> Result<Watched, Errno> {
        let hook = Arc::new(Hook { runner: Weak::clone(&self.0.me), conn });
        let token = carriers::watch(&self.0.engine, watch, hook)?;
        Ok(Watched { engine: Arc::clone(&self.0.engine), token })
    }

    fn again(&mut self, watched: &Watched) {
        self.0.engine.rearm(watched.token);
    }

    fn send(&mut self, route: Route, bytes: &[u8]) {
        self.0.env.send(route, bytes);
    }

    // No machine that has a runner waits for polls yet.
    fn is_unpolled(&mut self) -> bool {
        false
    }
}
