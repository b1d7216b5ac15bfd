//! A stream: the protocol's machine with its queue pair and its memory.

mod cursor;
pub mod descriptors;
mod maps;
mod memory;
mod transfer;
pub mod verbs;
mod work;
mod wr_id;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use rustix::io::Errno;
use smallvec::SmallVec;
use uwarp_cm::Cm;
use uwarp_driver::Qp;
use uwarp_process::{Mutex, MutexGuard};
use uwarp_rnic::{Pd, SendFlags, SendOp, SendWr, Wc};

use crate::machine::{End, Machine, Posted, Sizes};
use crate::posted::ENTRIES;
use crate::waiting::{Waiters, Waiting};
use crate::wire::ConnData;
use descriptors::{Descriptors, OwnWork};
use maps::Maps;
use memory::Memory;
use verbs::{Needs, Own, Verbs};

/// Completions taken at once.
const BATCH: usize = 32;
/// Bytes that go out inline at most.
const INLINE: u32 = 64;

/// What has become of the connection, as the connection manager reports it. It is reported while other locks
/// are held, so it is only stored, and acted on by the next call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Link {
    /// Not established yet.
    Pending,
    /// Established with this private data of the peer.
    Up(ConnData),
    /// There is no connection.
    Failed(Errno),
    /// The connection has ended.
    Gone,
}

/// A connection may have begun and ended before the program's first call on it. What the peer sent meanwhile
/// is there, so its private data is kept.
struct Linked {
    link: Link,
    peer: Option<ConnData>,
    /// Why it has ended, if a call must say so.
    error: Option<Errno>,
}

/// What the calls of the program change.
struct State<V: Verbs> {
    /// Once the connection is established.
    machine: Option<Machine>,
    /// The error that the next call reports.
    error: Option<Errno>,
    /// What had come at the last look for news.
    looked: u64,
    maps: Maps<V>,
    descriptors: Descriptors<V>,
    /// Receives that were used and are not posted again.
    free: SmallVec<[u32; BATCH]>,
}

/// A stream of one socket, from the attempt to connect to the end.
pub struct Stream<V: Verbs = Own> {
    sizes: Sizes,
    own_work: Arc<OwnWork>,
    /// When it ends, [`Stream::set_gone`] is told why. Work requests that fail before that say nothing.
    explained: bool,
    link: Mutex<Linked, 24>,
    /// The link is [`Link::Gone`].
    gone: AtomicBool,
    state: Mutex<State<V>, 7>,
    /// Held by the one call that sends, and the one that receives: a call's bytes stay together.
    sending: Mutex<(), 3>,
    receiving: Mutex<(), 3>,
    memory: Memory<V>,
    /// Behind what is registered with it.
    verbs: V,
}

impl Stream {
    /// A stream without a connection; its receives are posted.
    pub fn new(cm: &Cm, sizes: Sizes, waiters: &Arc<Waiters>) -> Result<Arc<Self>, Errno> {
        Self::with(cm, sizes, waiters, false)
    }

    /// The same; `explained`: [`Self::set_gone`] will be called when it ends, and says why.
    pub fn with(cm: &Cm, sizes: Sizes, waiters: &Arc<Waiters>, explained: bool) -> Result<Arc<Self>, Errno> {
        Self::over(Own::new(cm, Needs::of(&sizes, explained), waiters)?, sizes, explained)
    }

    /// Its queue pair, to connect.
    pub fn qp(&self) -> &Arc<Qp> {
        &self.verbs.qp
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Arc<Pd> {
        &self.verbs.pd
    }

    /// Who waits for it.
    pub fn waiters(&self) -> &Arc<Waiters> {
        &self.verbs.waiters
    }

    /// Prepares to wait for a change.
    pub fn arm(&self, waiting: &Waiting) {
        self.verbs.cq.arm(false);
        waiting.channel().armed(&Arc::downgrade(&self.verbs.cq));
    }

    /// The next completion wakes those who wait. Says whether there are completions already.
    pub fn report_next(&self) -> bool {
        self.verbs.cq.arm(false);
        !self.verbs.cq.is_empty()
    }
}

impl<V: Verbs> Stream<V> {
    /// A stream over a queue pair in the state INIT, made as [`Needs`] says. Posts the receives. `explained`:
    /// an upgraded socket, which has descriptors; and [`Self::set_gone`] will be called when it ends.
    pub fn over(verbs: V, sizes: Sizes, explained: bool) -> Result<Arc<Self>, Errno> {
        let memory = Memory::new(&verbs, &sizes, if explained { ENTRIES } else { 0 })?;
        let stream = Self {
            sizes,
            own_work: Arc::default(),
            explained,
            gone: AtomicBool::new(false),
            link: Mutex::new(Linked { link: Link::Pending, peer: None, error: None }),
            state: Mutex::new(State {
                machine: None,
                error: None,
                looked: 0,
                maps: Maps::default(),
                descriptors: Descriptors::default(),
                free: SmallVec::new(),
            }),
            sending: Mutex::default(),
            receiving: Mutex::default(),
            memory,
            verbs,
        };
        stream.post_receives(0..Needs::of(&sizes, explained).receives).map_err(|_| Errno::NOMEM)?;
        Ok(Arc::new(stream))
    }

    /// What it runs over.
    pub fn verbs(&self) -> &V {
        &self.verbs
    }

    /// The program's own work requests on the queue pair.
    pub fn own_work(&self) -> &Arc<OwnWork> {
        &self.own_work
    }

    /// The private data for the peer.
    pub fn conn_data(&self) -> [u8; ConnData::LEN] {
        Machine::conn_data(self.sizes, self.memory.own()).to_bytes()
    }

    /// What has become of its connection.
    pub fn link(&self) -> Link {
        self.link.lock().link.clone()
    }

    /// Whether the connection has ended.
    #[inline]
    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// The connection manager reports. A connection that is gone stays so.
    pub fn set_link(&self, to: Link) {
        let mut linked = self.link.lock();
        if !matches!(linked.link, Link::Failed(_) | Link::Gone) {
            if let Link::Up(peer) = to {
                linked.peer = Some(peer);
            }
            self.gone.store(to == Link::Gone, Ordering::Release);
            linked.link = to;
        }
        drop(linked);
        self.verbs.wake();
    }

    /// The connection has ended, with an error that the next call reports once what has arrived is read.
    pub fn set_gone(&self, error: Option<Errno>) {
        self.link.lock().error = error;
        self.set_link(Link::Gone);
    }

    /// Takes the error that the next call would report. Looks first: programs ask for it without a call that
    /// waits before.
    pub fn take_error(&self) -> Option<Errno> {
        let mut state = self.enter();
        self.process(&mut state);
        state.error.take()
    }

    /// Locks the stream, for a call.
    fn enter(&self) -> MutexGuard<'_, State<V>, 7> {
        let mut state = self.state.lock();
        self.begin(&mut state);
        state
    }

    /// Makes the machine when the connection is there.
    fn begin(&self, state: &mut State<V>) {
        if state.machine.is_some() {
            return;
        }
        // Not locked meanwhile: the end of the connection may be reported while messages are posted.
        let peer = self.link.lock().peer;
        if let Some(peer) = peer {
            let carrier = self.verbs.carrier();
            state.machine = Some(Machine::new(carrier, self.sizes, self.memory.own(), &peer));
            self.controls(state);
        }
    }

    /// What the stream is ready for. Makes progress.
    pub fn readiness(&self) -> Ready {
        self.readiness_by(true, false)
    }

    /// What the stream is ready for, by what other threads have received: nothing is asked of the system.
    /// `news`: whether bytes have come since the last look for them is asked, too.
    pub fn known_readiness(&self, news: bool) -> Ready {
        self.readiness_by(false, news)
    }

    fn readiness_by(&self, progress: bool, news: bool) -> Ready {
        let mut state = self.enter();
        if state.machine.is_none() {
            let failed = matches!(self.link(), Link::Failed(_) | Link::Gone);
            return Ready { readable: failed, writable: failed, error: failed, ..Ready::default() };
        }
        self.process_by(&mut state, progress);
        self.look_at_targets(&mut state);
        let State { machine: Some(machine), looked, .. } = &mut *state else { return Ready::default() };
        let news = news.then(|| std::mem::replace(looked, machine.arrived()) != machine.arrived());
        let ended = machine.ended();
        Ready {
            readable: machine.unread() > 0 || !machine.readable(),
            writable: machine.room() > 0 || !machine.writable(),
            peer_done: !machine.readable(),
            // Programs give up on a hang-up, so what is there comes first: librdmacm says "disconnected" for
            // what the kernel's sockets call the end of the stream.
            hangup: machine.unread() == 0 && (ended.is_some() || !(machine.readable() || machine.writable())),
            error: ended == Some(End::Failed) && state.error.is_some(),
            completion: state.descriptors.has_completion(),
            news,
        }
    }

    /// Whether it is connected: established, and not ended. Begins the stream if it is established now.
    pub fn is_connected(&self) -> bool {
        self.enter().machine.as_ref().is_some_and(|machine| machine.ended().is_none())
    }

    /// Unread bytes.
    pub fn unread(&self) -> usize {
        let mut state = self.enter();
        self.process(&mut state);
        state.machine.as_ref().map_or(0, |machine| machine.unread() as usize)
    }

    /// See [`Machine::is_over`].
    pub fn is_over(&self) -> bool {
        let mut state = self.enter();
        self.process(&mut state);
        state.machine.as_ref().is_some_and(Machine::is_over)
    }

    /// Shuts down one direction or both, and tells the peer.
    pub fn shut(&self, reading: bool, writing: bool) -> Result<(), Errno> {
        let mut state = self.enter();
        // What the peer has said so far comes first: it decides what it must hear.
        self.process(&mut state);
        let Some(machine) = &mut state.machine else { return Err(Errno::NOTCONN) };
        match (reading, writing) {
            (true, true) => machine.shut(),
            (true, false) => machine.shut_reading(),
            (false, true) => machine.shut_writing(),
            (false, false) => {}
        }
        self.process(&mut state);
        drop(state);
        // Other threads that wait for it will find it shut.
        self.verbs.wake();
        Ok(())
    }

    /// Whether all that was sent has reached the peer, as far as that can be known, or never will.
    pub fn is_drained(&self) -> bool {
        let mut state = self.enter();
        self.process(&mut state);
        state.machine.as_ref().is_none_or(|machine| machine.all_sent() || machine.gone())
    }

    /// The same, for the engine. False while another thread uses the stream, and goes on itself.
    pub fn is_drained_meanwhile(&self) -> bool {
        let Some(mut state) = self.state.try_lock() else { return false };
        self.begin(&mut state);
        self.process(&mut state);
        let drained = state.machine.as_ref().is_none_or(|machine| machine.all_sent() || machine.gone());
        drop(state);
        // It may have taken a completion for which another thread sleeps.
        self.verbs.wake();
        drained
    }

    /// A sign of life: an empty Write, without a message. Does nothing while another thread uses the stream.
    pub fn keepalive(&self) {
        let Some(mut state) = self.state.try_lock() else { return };
        // What has completed already, without progress: this is called by the engine.
        let mut batch = SmallVec::<[Wc; BATCH]>::new();
        self.verbs.poll(BATCH, false, |wc| batch.push(wc));
        self.begin(&mut state);
        self.take_completions(&mut state, &batch);
        let to = state.machine.as_mut().and_then(|machine| machine.keepalive().then(|| machine.anywhere()));
        if let Some((to, stag)) = to {
            let op = SendOp::Write { stag, to };
            let flags = SendFlags::empty();
            let wr = SendWr { wr_id: wr_id::of(Posted::Control), op, flags, sges: &[] };
            if self.post(&[wr]).is_err() {
                self.ended(&mut state, End::Disconnected);
            }
        }
    }

    /// For a table that must not keep it.
    pub fn downgrade(self: &Arc<Self>) -> Weak<Self> {
        Arc::downgrade(self)
    }
}

impl<V: Verbs> Drop for Stream<V> {
    fn drop(&mut self) {
        self.verbs.end();
    }
}

/// What a socket is ready for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Ready {
    /// A call that receives would not wait.
    pub readable: bool,
    /// A call that sends would not wait.
    pub writable: bool,
    /// The peer sends no more.
    pub peer_done: bool,
    /// Both directions are done.
    pub hangup: bool,
    /// There is an error to take.
    pub error: bool,
    /// A descriptor is done.
    pub completion: bool,
    /// Whether bytes have come since the last look for them, if that was asked and is known.
    pub news: Option<bool>,
}
