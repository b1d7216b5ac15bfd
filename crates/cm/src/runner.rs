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
//! for the lock but a call of the program, so runners have no order among each other. (A request's runner is
//! made under the lock of its listener's, when no other thread knows it.)
//!
//! The machines rely on this:
//!
//! * A listener gets `Settled` exactly once for each request that it reported, also if that was rejected or
//!   dropped. `Life::answered` reaches it before the reply is sent.
//! * While last bytes wait (a rejection, a Terminate), `poll_action` returns nothing: bytes are sent first.
//! * A `Connect` uses the bound socket that the shell has, before it binds another one.
//! * The time of a move to RTR is read within the program's call, never earlier.
//! * If the queue pair is gone at `Attach`, the answer is `Refused`, and the connection is the machine's
//!   again.
//! * The answer to `Fail` is `Flushed`. Before `Ended`, the shell reports `Used` if the queue pair no longer
//!   waits for a stream.
//! * A connection is watched before `Opened` is said. One that cannot be watched was not begun, and keeps its
//!   port.
//! * Events are pushed under the lock; everything else is reported without it. So nothing is reported of an
//!   id whose `destroy` has returned, and `destroy` waits for acknowledgements alone.
//! * A call that the machine answers returns with that answer, whichever thread carries out what is deferred.
//! * After each run, and before the events are pushed, what the id needs around it is brought up to date: the
//!   table of connections that wait for a queue pair, the sockets of datagrams, the port.
//! * A late `Disconnect` must not end the next stream, so it names the stream by its number.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Instant;

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_driver::host;
use uwarp_driver::{
    Alarm, Attended, Disconnect, Engine, Qp, Readiness, Source, StreamNumber, StreamObserver, Token,
};
use uwarp_llp::carrier::{Ends, Options, SetUp, Watch};
use uwarp_llp::udp::Route;
use uwarp_proto::setup::Negotiated;
use uwarp_rnic::VerbsError;
use uwarp_rnic::qp::{Now, QpModify, QpState, StreamParams};

use crate::carriers::{self, carrier};
use crate::event::ConnParam;
use crate::machine::run::{Conns, Deferred, Surroundings, run};
use crate::machine::{ConnKey, Input, Machine, Recipient, StreamEvent};
use crate::sync::{Mutex, MutexGuard, Thread, current, park};

/// Datagrams that wait while another thread runs the machine: a flood must not take memory, and what is lost
/// is asked for again.
const MOST_DATAGRAMS: usize = 1024;

/// What a machine's owner does for it. The first ones are called without a lock, the others with the
/// runner's.
pub(crate) trait Environment<M: Machine>: Sized + Send + Sync + 'static {
    /// Who gets a connection.
    fn queue_pair(&self, to: Recipient) -> Option<Arc<Qp>>;
    /// The stream's parameters.
    fn stream_params(&self, qp: &Qp, said: &Negotiated, param: ConnParam) -> StreamParams;
    /// What the process at the other end is known by, whatever connection it has made.
    fn process_of(&self, _said: &Negotiated, ends: Ends) -> SocketAddr {
        ends.peer
    }
    /// The machine reports. Must not block.
    fn report(&self, report: M::Report);
    /// Whether the queue pair's stream, which has ended, was used by a program. By number alone.
    fn was_used(&self, _to: Recipient) -> bool {
        false
    }
    /// The machine's deadline has come; it learns of it next.
    fn before_timeout(&self, _runner: &Runner<M, Self>) {}

    /// Tells the machine what has changed around it.
    fn prepare(&self, _machine: &mut M, _now: &Now) {}
    /// The machine has run; its reports follow. What is around it becomes what the machine needs now. Returns
    /// a queue pair that it needs no longer: its last owner must not have the lock.
    fn follow(&self, _machine: &M, _conns: &mut Conns<Watched>) -> Option<Arc<Qp>> {
        None
    }
    /// A report that other threads must see at once, before the lock is released: `None`. Others come back.
    fn report_at_once(&self, _conns: &mut Conns<Watched>, report: M::Report) -> Option<M::Report> {
        Some(report)
    }
    /// Sends a datagram.
    fn send(&self, _route: Route, _bytes: &[u8]) {}
    /// Gives the machine datagrams that have come.
    fn receive(&self, _each: &mut dyn FnMut(Input<'_>)) {}
    /// See [`Surroundings::serve`].
    fn serve(&self, _runner: &Runner<M, Self>) -> Option<Result<(), Errno>> {
        None
    }
    /// Whether completions wait that the program has not polled.
    fn is_unpolled(&self) -> bool {
        false
    }
}

/// The present time. Everything of this crate that reads the clock gets it here.
pub(crate) fn now() -> Now {
    Now::unread()
}

/// See the head of this file.
pub(crate) struct Runner<M: Machine + 'static, E: Environment<M>> {
    me: Weak<Self>,
    engine: Arc<Engine>,
    env: E,
    lock: Attended<State<M>, 10>,
    inbox: Mutex<Vec<Note<M>>, 29>,
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
    /// Queue pairs that are needed no longer.
    spent: SmallVec<[Arc<Qp>; 1]>,
    /// A thread carries out what is deferred, and continues with what is added meanwhile.
    deferring: bool,
    /// What the program's call returns, and the thread that waits for it. The machine answers one at a time.
    answer: Option<Result<(), Errno>>,
    waits: Option<Thread>,
}

/// What is done with the machine under its lock.
type Call<M> = Box<dyn FnOnce(&mut M, &Now) + Send>;

/// What has happened, for the lock's holder.
enum Note<M> {
    Ready(Place, Readiness),
    Timeout,
    Stream(ConnKey, StreamEvent),
    Datagram { from: SocketAddr, to: IpAddr, bytes: Box<[u8]> },
    Flushed,
    Call(Call<M>),
}

/// What the engine watches.
#[derive(Clone, Copy)]
enum Place {
    Conn(ConnKey),
    Listening,
    Datagrams,
}

/// A watch of the engine.
pub(crate) struct Watched {
    engine: Arc<Engine>,
    token: Token,
}

impl Watched {
    /// Reports again what is there.
    pub fn again(&self) {
        self.engine.rearm(self.token);
    }
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
                spent: SmallVec::new(),
                deferring: false,
                answer: None,
                waits: None,
            }),
            inbox: Mutex::default(),
        });
        // No other thread knows it, so the lock is free. It is only tried: that of a request's runner comes
        // under the lock of its listener's.
        if let Some(mut state) = runner.lock.look() {
            runner.drain(&mut state);
            runner.release(state);
        }
        runner
    }

    /// What the machine has around it.
    pub fn env(&self) -> &E {
        &self.env
    }

    /// A datagram has come. It may be dropped.
    pub fn datagram(&self, from: SocketAddr, to: IpAddr, bytes: &[u8]) {
        if self.inbox.lock().len() < MOST_DATAGRAMS {
            self.post(Note::Datagram { from, to, bytes: bytes.into() });
        }
    }

    /// Looks at the machine.
    pub fn read<T>(&self, f: impl FnOnce(&M) -> T) -> T {
        let state = self.lock.lock();
        let result = f(&state.machine);
        self.release(state);
        result
    }

    /// A call of the program.
    pub fn call<T>(&self, f: impl FnOnce(&mut M, &Now) -> T) -> T {
        self.call_with(|machine, _, now| f(machine, now))
    }

    /// The same, for a call that binds or sets options, too.
    pub fn call_with<T>(&self, f: impl FnOnce(&mut M, &mut Conns<Watched>, &Now) -> T) -> T {
        let mut state = self.lock.lock();
        let result = self.run_call(&mut state, f);
        self.release(state);
        result
    }

    fn run_call<T>(&self, state: &mut State<M>, f: impl FnOnce(&mut M, &mut Conns<Watched>, &Now) -> T) -> T {
        let now = self::now();
        self.env.prepare(&mut state.machine, &now);
        let result = f(&mut state.machine, &mut state.conns, &now);
        self.run(state, &now);
        result
    }

    /// A call of the program that the machine answers by [`Action::Answer`](crate::machine::Action::Answer)
    /// if `f` succeeds. It returns when what is deferred up to the answer is carried out, by this thread or
    /// another one; not to be called by what is deferred.
    pub fn ask<F: From<Errno>>(
        &self,
        f: impl FnOnce(&mut M, &mut Conns<Watched>, &Now) -> Result<(), F>,
    ) -> Result<(), F> {
        let mut state = self.lock.lock();
        // Another call's, which its thread has not taken yet.
        let earlier = state.answer.take();
        let begun = self.run_call(&mut state, f);
        let mut answer = std::mem::replace(&mut state.answer, earlier);
        if begun.is_ok() && answer.is_none() {
            state.waits = Some(current());
        }
        self.release(state);
        begun?;
        loop {
            if let Some(answer) = answer {
                return answer.map_err(F::from);
            }
            let mut state = self.lock.lock();
            answer = state.answer.take();
            if answer.is_some() {
                state.waits = None;
            }
            self.release(state);
            if answer.is_none() {
                park();
            }
        }
    }

    /// A call that another runner's owner makes.
    pub fn post_call(&self, f: impl FnOnce(&mut M, &Now) + Send + 'static) {
        self.post(Note::Call(Box::new(f)));
    }

    /// Watches a socket of datagrams: [`Environment::receive`].
    pub fn watch_datagrams(&self, watch: Watch<'_>) -> Result<Watched, Errno> {
        self.watch(Place::Datagrams, watch)
    }

    fn watch(&self, place: Place, watch: Watch<'_>) -> Result<Watched, Errno> {
        let hook = Arc::new(Hook { runner: Weak::clone(&self.me), place });
        let token = carriers::watch(&self.engine, watch, hook)?;
        Ok(Watched { engine: Arc::clone(&self.engine), token })
    }

    /// The program's last call: nothing is reported any more.
    pub fn cancel(&self, f: impl FnOnce(&mut M)) {
        let mut state = self.lock.lock();
        state.deferred.retain(|deferred| !matches!(deferred, Deferred::Report(_)));
        f(&mut state.machine);
        self.run(&mut state, &now());
        self.release(state);
    }

    /// The program's last call of a machine that goes on for a while: no queue pair is failed for it any
    /// more, since the program may use the queue pair for something else. (One that another thread has begun
    /// to fail is failed.)
    pub fn end<T>(&self, f: impl FnOnce(&mut M, &Now) -> T) -> T {
        let mut state = self.lock.lock();
        state.deferred.retain(|deferred| !matches!(deferred, Deferred::Fail));
        let result = self.run_call(&mut state, |machine, _, now| f(machine, now));
        self.release(state);
        result
    }

    fn post(&self, note: Note<M>) {
        if let Some(mut state) = self.lock.try_lock() {
            self.drain_with(&mut state, Some(note));
            return self.release(state);
        }
        self.inbox.lock().push(note);
        if let Some(mut state) = self.lock.look() {
            self.drain(&mut state);
            self.release(state);
        }
    }

    fn drain(&self, state: &mut State<M>) {
        self.drain_with(state, None);
    }

    /// `last`: behind what others have left.
    fn drain_with(&self, state: &mut State<M>, last: Option<Note<M>>) {
        let now = self::now();
        self.env.prepare(&mut state.machine, &now);
        let left = std::mem::take(&mut *self.inbox.lock());
        for note in left.into_iter().chain(last) {
            self.feed(state, note, &now);
        }
        self.run(state, &now);
    }

    fn feed(&self, state: &mut State<M>, note: Note<M>, now: &Now) {
        let State { machine, conns, at, .. } = state;
        match note {
            Note::Ready(Place::Listening, _) => machine.handle_input(now, Input::Waiting),
            Note::Ready(Place::Datagrams, _) => {
                self.env.receive(&mut |input| machine.handle_input(now, input));
            }
            Note::Ready(Place::Conn(conn), ready) => {
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
            Note::Flushed => machine.handle_input(now, Input::Flushed),
            Note::Call(f) => f(machine, now),
        }
    }

    fn run(&self, state: &mut State<M>, now: &Now) {
        let State { machine, conns, deferred, alarm, at, .. } = state;
        let mut results = SmallVec::<[_; 3]>::new();
        run(machine, conns, &mut Real(self), &mut |result| results.push(result), now);
        state.spent.extend(self.env.follow(machine, conns));
        for result in results {
            match result {
                Deferred::Report(report) => {
                    deferred.extend(self.env.report_at_once(conns, report).map(Deferred::Report));
                }
                Deferred::Answer(answer) => {
                    state.answer = Some(answer);
                    // It may be another call's, which has it at once: who waits goes on waiting.
                    let other = state.waits.as_ref().filter(|thread| thread.id() != current().id());
                    other.inspect(|thread| thread.unpark());
                }
                result => deferred.push_back(result),
            }
        }
        let next = machine.poll_timeout();
        if next != *at {
            *at = next;
            match next {
                Some(next) => alarm.set(next),
                None => alarm.clear(),
            }
        }
    }

    fn release<'a>(&'a self, state: MutexGuard<'a, State<M>, 10>) {
        let finish = |state: &mut MutexGuard<'a, State<M>, 10>| {
            if std::mem::replace(&mut state.deferring, true) {
                return;
            }
            loop {
                if let Some(deferred) = state.deferred.pop_front() {
                    if let Some(note) = self.carry_out(state, deferred) {
                        let now = self::now();
                        self.feed(state, note, &now);
                        // Many connections may become streams at once: one run for all of them.
                        if !matches!(state.deferred.front(), Some(Deferred::Attach { .. })) {
                            self.run(state, &now);
                        }
                    }
                } else if let Some(qp) = state.spent.pop() {
                    MutexGuard::unlocked(state, || drop(qp));
                } else {
                    break;
                }
            }
            state.deferring = false;
            // A server has thousands of ids, and nothing happens to most of them for long.
            state.deferred = VecDeque::new();
        };
        self.lock.release(state, finish, |state| self.drain(state));
    }

    /// Does what must be done without the lock; returns the answer.
    fn carry_out(
        &self,
        state: &mut MutexGuard<'_, State<M>, 10>,
        deferred: Deferred<M::Report>,
    ) -> Option<Note<M>> {
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
            Deferred::Disconnect(conn, answered) => {
                // Another stream of the queue pair, which may have begun since, goes on.
                if let Some((_, number)) = state.stream.filter(|(of, _)| *of == conn) {
                    MutexGuard::unlocked(state, || {
                        if let Some(qp) = self.env.queue_pair(Recipient::Own) {
                            qp.disconnect_stream(number, answered);
                        }
                    });
                }
                None
            }
            Deferred::Fail => {
                MutexGuard::unlocked(state, || {
                    if let Some(qp) = self.env.queue_pair(Recipient::Own) {
                        let change = QpModify { state: Some(QpState::Err), ..QpModify::default() };
                        // Refused only in a forked child, which has no connections.
                        let _ = qp.modify(&change);
                    }
                });
                Some(Note::Flushed)
            }
            // Taken when it was made.
            Deferred::Answer(_) => None,
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
        let both = set_up.ends();
        let ends = [both.local, both.peer];
        let process = self.env.process_of(said, both);
        let (choice, place) = host::choice(said, set_up.kind(), ends, process);
        let (link, settling) = (set_up.into_link(), host::Settling::begin(choice, said, ends));
        let attached = match to {
            Recipient::Own => qp.attach_unsettled(link, params, observer, settling),
            Recipient::Number { moves, .. } => qp.attach_awaited(link, params, observer, moves, settling),
        };
        if let Ok(number) = attached {
            if let Some(place) = place {
                qp.keep_place(number, place);
            }
            host::begin(&qp, number, choice, said, ends);
        }
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
    place: Place,
}

impl<M: Machine + 'static, E: Environment<M>> Source for Hook<M, E> {
    fn ready(&self, readiness: Readiness) {
        if let Some(runner) = self.runner.upgrade() {
            runner.post(Note::Ready(self.place, readiness));
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
        self.0.watch(conn.map_or(Place::Listening, Place::Conn), watch)
    }

    fn name(&self, watched: &Watched) -> u64 {
        watched.token.name()
    }

    fn again(&mut self, watched: &Watched) {
        watched.again();
    }

    fn send(&mut self, route: Route, bytes: &[u8]) {
        self.0.env.send(route, bytes);
    }

    fn is_unpolled(&mut self) -> bool {
        self.0.env.is_unpolled()
    }

    fn serve(&mut self) -> Option<Result<(), Errno>> {
        self.0.env.serve(self.0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use uwarp_driver::Nic;

    use super::*;
    use crate::machine::{Action, Transmit, Want};

    struct Script(VecDeque<Action<()>>);

    impl Machine for Script {
        type Report = ();
        fn handle_input(&mut self, _: &Now, _: Input<'_>) {}
        fn handle_timeout(&mut self, _: &Now) {}
        fn poll_transmit(&mut self) -> Option<Transmit<'_>> {
            None
        }
        fn poll_timeout(&self) -> Option<Instant> {
            None
        }
        fn poll_action(&mut self) -> Option<Action<()>> {
            self.0.pop_front()
        }
        fn want(&self, _: ConnKey) -> Want {
            Want::Nothing
        }
    }

    struct Slow {
        reporting: Barrier,
        reported: Barrier,
        queue_pairs: AtomicUsize,
    }

    impl Environment<Script> for Slow {
        fn queue_pair(&self, _: Recipient) -> Option<Arc<Qp>> {
            self.queue_pairs.fetch_add(1, Ordering::Relaxed);
            None
        }
        fn stream_params(&self, _: &Qp, _: &Negotiated, _: ConnParam) -> StreamParams {
            unreachable!("there is no queue pair")
        }
        fn report(&self, (): ()) {
            self.reporting.wait();
            self.reported.wait();
        }
    }

    /// It was queued behind what another thread did, and reached the queue pair after the program had given
    /// that to another id.
    #[test]
    fn a_queue_pair_is_not_failed_for_an_id_that_has_ended() {
        let env =
            Slow { reporting: Barrier::new(2), reported: Barrier::new(2), queue_pairs: AtomicUsize::new(0) };
        let runner = Runner::start(Nic::open().unwrap().engine(), env, Script(VecDeque::new()), []);
        std::thread::scope(|scope| {
            scope.spawn(|| runner.call(|script, _| script.0.extend([Action::Report(()), Action::Fail])));
            runner.env().reporting.wait();
            runner.end(|_, _| ());
            runner.env().reported.wait();
        });
        assert_eq!(runner.env().queue_pairs.load(Ordering::Relaxed), 0);
    }
}
