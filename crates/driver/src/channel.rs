//! Event queues with a descriptor: completion channels and the like.

use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uwarp_rnic::Cq;
use uwarp_rnic::cq::{Coverage, Direct};

use crate::engine::Engine;
use crate::fork::{self, SignalsAsleep};
use crate::own_loops::Beside;
use crate::progress::{DIRECT, Lead, Spinning, in_background};
use crate::source::Token;
use crate::sync::{AtomicBool, Mutex, MutexGuard, Ordering, spin_loop, thread_local};
use crate::sys::{self, Bell, Watch};

/// Why no event was returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChannelError {
    /// The descriptor is non-blocking and there is no event (`EAGAIN`).
    WouldBlock,
    /// A signal handler that does not restart calls has run (`EINTR`).
    Interrupted,
    /// The caller's limit is over.
    NothingYet,
}

struct Queue {
    events: VecDeque<u64>,
    /// The descriptor is readable.
    raised: bool,
    /// `None`: the channel is closed.
    bell: Option<Bell>,
    /// What the program sees: the bell in an epoll instance, which says nothing of room to write, as the
    /// system's channels do not. `None`: the program never sees it, or the channel is closed.
    watch: Option<Arc<Watch>>,
}

/// The sources whose input may become events here.
#[derive(Default)]
struct Feeds {
    /// With the completion queue of each. Some of them may be gone.
    all: Vec<(Token, Weak<Cq>)>,
    /// The system does not report one of them; or the program has changed from a non-blocking descriptor to
    /// a blocking one, for which readable means that an event is there.
    never: bool,
}

/// Which signals end a call that waits.
#[derive(Clone, Copy)]
enum Signals {
    /// Those whose handler does not restart calls.
    AsRead,
    /// All that have a handler.
    AsPoll,
}

impl Signals {
    /// A signal has ended the sleep: whether it ends the call.
    fn interrupt(self) -> bool {
        match self {
            Signals::AsPoll => fork::interruptions_are_heeded(),
            Signals::AsRead => !fork::interruptions_restart(),
        }
    }

    /// For the length of the call.
    fn in_call(self) -> SignalsAsleep {
        let call = SignalsAsleep::in_call();
        if matches!(self, Self::AsPoll) {
            SignalsAsleep::begin();
        }
        call
    }
}

/// A queue of events, each a cookie of the object it is about. Its descriptor is readable while events wait.
pub struct Channel {
    engine: Arc<Engine>,
    queue: Mutex<Queue, 24>,
    fd: RawFd,
    /// The program knows the descriptor, and may make it non-blocking.
    shown: bool,
    /// The sockets themselves make the descriptor readable, and the program's calls serve them: it is
    /// non-blocking, so it may be readable without an event. Written under the lock of `feeds`.
    own: AtomicBool,
    /// Some of what feeds it has no descriptor: bells call the program.
    called: AtomicBool,
    /// As `own`, since the last call that blocked.
    was_own: AtomicBool,
    feeds: Mutex<Feeds, 23>,
    /// A thread that blocks on this channel sleeps on the sockets.
    leading: AtomicBool,
    /// The completion queue that was armed last; a short look receives directly from its sockets.
    armed: Mutex<Weak<Cq>, 24>,
    /// A thread is in a call that waits for an event. A hint: it may have left the call by a jump.
    attended: AtomicBool,
    /// The background thread queued an event while no thread was in such a call, and no call has found the
    /// queue empty since: the program waits on the descriptor, or computes.
    waits_elsewhere: AtomicBool,
    spinning: Spinning,
}

/// The channel, by address, that a thread blocks on. Events that this thread queues itself need no
/// descriptor.
#[derive(Clone, Copy)]
enum BlockedOn {
    Nothing,
    /// It looks for an event for a short time.
    Looking(usize),
    /// It leads. If its lead is over, it has left the call by a jump.
    Leading(usize, Lead),
}

thread_local! {
    static BLOCKED_ON: Cell<BlockedOn> = const { Cell::new(BlockedOn::Nothing) };
}

/// The calling thread is no longer in the call in which it blocked on a channel. It may have left it by a
/// jump out of a signal's handler while it looked for an event. An event that it queues now makes the
/// descriptor readable.
///
/// Returns the lead that it left in this way, if it had one.
pub(crate) fn waits_no_more() -> Option<Lead> {
    // A thread that is ending waits for nothing.
    match BLOCKED_ON.try_with(|on| on.replace(BlockedOn::Nothing)) {
        Ok(BlockedOn::Leading(_, lead)) => Some(lead),
        _ => None,
    }
}

impl Channel {
    /// A new channel on the process's engine. (Two descriptors: an eventfd alone has always room to write,
    /// which programs that wait for both ask for.)
    pub fn new(engine: &Arc<Engine>) -> Result<Arc<Self>, Errno> {
        Self::with(engine, true)
    }

    /// The same; the program never learns of its descriptor, so calls that wait need not ask whether it is
    /// non-blocking.
    pub fn hidden(engine: &Arc<Engine>) -> Result<Arc<Self>, Errno> {
        Self::with(engine, false)
    }

    fn with(engine: &Arc<Engine>, shown: bool) -> Result<Arc<Self>, Errno> {
        let bell = Bell::new(false)?;
        let watch = if shown { Some(Arc::new(Watch::new()?)) } else { None };
        if let Some(watch) = &watch {
            watch.add_bell(&bell, Token::WAKE.0)?;
            fork::track(watch.fd());
        }
        fork::track(bell.fd());
        let fd = watch.as_ref().map_or(bell.fd(), |watch| watch.fd());
        Ok(Arc::new(Self {
            engine: engine.clone(),
            queue: Mutex::new(Queue { events: VecDeque::new(), raised: false, bell: Some(bell), watch }),
            fd,
            shown,
            own: AtomicBool::new(false),
            was_own: AtomicBool::new(false),
            called: AtomicBool::new(false),
            feeds: Mutex::default(),
            leading: AtomicBool::new(false),
            armed: Mutex::default(),
            attended: AtomicBool::new(false),
            waits_elsewhere: AtomicBool::new(true),
            spinning: Spinning::new(),
        }))
    }

    /// The descriptor, for `poll` and the like. The program may set `O_NONBLOCK` on it, which [`Self::get`]
    /// honours.
    pub fn fd(&self) -> RawFd {
        self.fd
    }

    /// Closes the descriptor, although objects still report here, and take back what they have reported. Not
    /// while a thread waits.
    pub fn close(&self) {
        let mut queue = self.queue.lock();
        let (bell, watch) = (queue.bell.take(), queue.watch.take());
        drop(queue);
        watch.iter().for_each(|watch| self.call_no_more(watch));
        bell.iter().for_each(|bell| fork::untrack(bell.fd()));
        watch.iter().for_each(|watch| fork::untrack(watch.fd()));
    }

    /// Queues an event.
    pub fn push(&self, cookie: u64) {
        self.push_to(self.queue.lock(), cookie);
    }

    /// Queues an event unless the same one waits already; says whether it did. For events that a peer can
    /// cause without limit: the queue grows by one at most.
    pub fn push_once(&self, cookie: u64) -> bool {
        let queue = self.queue.lock();
        let is_new = !queue.events.contains(&cookie);
        if is_new {
            self.push_to(queue, cookie);
        }
        is_new
    }

    fn push_to(&self, mut queue: MutexGuard<'_, Queue, 24>, cookie: u64) {
        queue.events.push_back(cookie);
        let taken_here = match BLOCKED_ON.with(Cell::get) {
            BlockedOn::Nothing => false,
            BlockedOn::Looking(channel) => channel == self.address(),
            BlockedOn::Leading(channel, lead) => {
                channel == self.address() && self.engine.lead.get() == Some(lead)
            }
        };
        if taken_here {
            return;
        }
        if in_background() && !self.attended.load(Ordering::Relaxed) {
            self.waits_elsewhere.store(true, Ordering::Relaxed);
        }
        self.raise(&mut queue);
        drop(queue);
        self.wake_leader();
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    fn wake_leader(&self) {
        if self.leading.load(Ordering::SeqCst) {
            self.engine.wake();
        }
    }

    fn raise(&self, queue: &mut Queue) {
        if let Some(bell) = queue.bell.as_ref().filter(|_| !queue.raised) {
            bell.ring();
            queue.raised = true;
        }
    }

    fn pop(&self) -> Option<u64> {
        let mut queue = self.queue.lock();
        let event = queue.events.pop_front();
        if queue.events.is_empty() {
            self.silence_if_empty(&mut queue);
        } else if event.is_some() {
            // Other threads wait for the remaining events: at the descriptor, or on the sockets.
            self.raise(&mut queue);
            drop(queue);
            self.wake_leader();
        }
        event
    }

    /// The oldest event. Blocks until there is one, unless the descriptor is non-blocking; meanwhile the
    /// calling thread serves the sockets.
    pub fn get(&self) -> Result<u64, ChannelError> {
        self.get_within(None)
    }

    /// As [`Self::get`], but waits only for `limit` or slightly longer.
    pub fn get_within(&self, limit: Option<Duration>) -> Result<u64, ChannelError> {
        self.wait_for(limit, |first| if first { self.take_first() } else { self.take() })
    }

    /// As [`Self::get_within`], for a caller that takes events together with the objects they concern: `take`
    /// does this with [`Self::take_first`] if it is called with `true`, and with [`Self::take`] otherwise.
    pub fn wait_for<T>(
        &self,
        limit: Option<Duration>,
        take: impl FnMut(bool) -> Option<T>,
    ) -> Result<T, ChannelError> {
        self.wait_until(limit, Signals::AsRead, take)
    }

    /// As [`Self::wait_for`], for calls that any signal ends.
    pub fn wait_as_poll<T>(
        &self,
        limit: Option<Duration>,
        take: impl FnMut(bool) -> Option<T>,
    ) -> Result<T, ChannelError> {
        self.wait_until(limit, Signals::AsPoll, take)
    }

    fn wait_until<T>(
        &self,
        limit: Option<Duration>,
        signals: Signals,
        mut take: impl FnMut(bool) -> Option<T>,
    ) -> Result<T, ChannelError> {
        let _asleep = signals.in_call();
        let until = limit.map(|limit| sys::now() + limit);
        let left = || until.map(|until| until.saturating_duration_since(sys::now()));
        if let Some(event) = take(true) {
            return Ok(event);
        }
        let mut sleeps = false;
        loop {
            let there = self.attend_until(left(), signals, sleeps)?;
            if let Some(event) = take(false) {
                return Ok(event);
            }
            if left().is_some_and(|left| left.is_zero()) {
                return Err(ChannelError::NothingYet);
            }
            if !there {
                sleeps = true;
                let waited = Bell::wait(self.fd, left());
                if let Some(event) = take(false) {
                    return Ok(event);
                }
                if waited == Err(Errno::INTR) && signals.interrupt() {
                    return Err(ChannelError::Interrupted);
                }
            }
        }
    }

    /// The oldest event, at the beginning of a call that takes one. If there is none, the program waits in
    /// this call.
    ///
    /// An event that is found does not show where the program waits: it may have come together with the last
    /// one, or because of what the program posted.
    pub fn take_first(&self) -> Option<u64> {
        self.attended.store(false, Ordering::Relaxed);
        let event = self.pop();
        if event.is_none() {
            self.waits_elsewhere.store(false, Ordering::Relaxed);
        }
        event
    }

    /// The oldest event.
    pub fn take(&self) -> Option<u64> {
        let event = self.pop();
        if event.is_some() {
            self.attended.store(false, Ordering::Relaxed);
        }
        event
    }

    /// Serves the sockets until there is an event, until the background thread takes them over (when nothing
    /// has come for some milliseconds), or for `limit`. Returns whether there is an event, for
    /// [`Self::take`]. If not, the caller sleeps in any way until the descriptor is readable, and takes what
    /// is there; the background thread serves the sockets meanwhile.
    ///
    /// If this returns `true`, the descriptor may not be readable until the caller has taken the event. A
    /// caller that does not take it calls [`Self::abandon`]. If it returns `false`, the thread's signals are
    /// blocked: the caller sleeps with [`mask_asleep`](fork::mask_asleep), and then calls
    /// [`signals_awake`](fork::signals_awake).
    pub fn attend(&self, limit: Option<Duration>) -> Result<bool, ChannelError> {
        // (Where jumps are expected, signals are blocked for the whole of the caller's wait.)
        let asleep = (!fork::jumps_are_expected()).then(SignalsAsleep::in_call);
        let there = self.attend_until(limit, Signals::AsRead, false)?;
        if !there {
            std::mem::forget(asleep);
        }
        Ok(there)
    }

    /// `sleeps`: the caller has slept in this call, so it goes on even if the descriptor has become
    /// non-blocking meanwhile.
    fn attend_until(
        &self,
        limit: Option<Duration>,
        signals: Signals,
        sleeps: bool,
    ) -> Result<bool, ChannelError> {
        if let Some(lead) = waits_no_more() {
            self.engine.lost_leads.remove(lead);
        }
        if self.shown && !sleeps {
            // (The system is asked only if it matters.)
            let own = self.own.load(Ordering::Relaxed);
            if own || fork::nonblocking(self.fd()) {
                self.engine.held.will_wait();
                self.serve_here();
                if !self.is_empty() {
                    return Ok(true);
                }
                if !own || fork::nonblocking(self.fd()) {
                    return Err(ChannelError::WouldBlock);
                }
            }
        }
        self.leave_to_others();
        if self.was_own.load(Ordering::Relaxed) && self.was_own.swap(false, Ordering::Relaxed) {
            // `poll` may have told the program that it need not wait.
            self.announce();
        }
        self.engine.held.will_wait();
        self.attended.store(true, Ordering::Relaxed);
        if self.spin() {
            return Ok(true);
        }
        // The last look comes after this.
        SignalsAsleep::begin();
        // This thread no longer polls what it polled in earnest.
        self.engine.unpark();
        let Some(leader) = self.engine.lead() else { return Ok(!self.is_empty()) };
        let until = limit.map(|limit| sys::now() + limit);
        let blocked = Blocked::on(self, leader.lead());
        // Checks before sleeping: an event that was queued before `leading` was set woke no thread. Keeps the
        // lead until there is an event: ending it and beginning it again would wake the background thread
        // each time.
        while self.is_empty() {
            let left = until.map(|until| until.saturating_duration_since(sys::now()));
            if leader.is_over() || left.is_some_and(|left| left.is_zero()) {
                drop(blocked);
                leader.retire();
                return Ok(!self.is_empty());
            }
            if leader.wait(left) == Err(Errno::INTR) && self.is_empty() && signals.interrupt() {
                return Err(ChannelError::Interrupted);
            }
        }
        Ok(true)
    }

    /// A thread that was about to take an event has ended, or does something else.
    pub fn abandon(&self) {
        let mut queue = self.queue.lock();
        if !queue.events.is_empty() {
            self.raise(&mut queue);
            drop(queue);
            self.wake_leader();
        }
    }

    /// Whether a signal handler that has run interrupts a waiting call, as it would interrupt a blocking
    /// `read`.
    pub fn interruptible() -> bool {
        !fork::interruptions_restart()
    }

    /// The program has armed a completion queue that reports here, and will wait. If it waits on the
    /// descriptor, the background thread must produce the event; a thread that blocks in [`Self::get`] does
    /// so itself. Returns whether input wakes the program, which serves it in a call on a non-blocking
    /// descriptor.
    pub fn armed(&self, cq: &Weak<Cq>) -> bool {
        let mut armed = self.armed.lock();
        if !armed.ptr_eq(cq) {
            armed.clone_from(cq);
        }
        drop(armed);
        self.engine.held.will_wait();
        if !self.waits_elsewhere.load(Ordering::Relaxed) && !self.own.load(Ordering::Relaxed) {
            return false;
        }
        let looped = self.shown && self.may_be_own() && fork::nonblocking(self.fd()) && self.becomes_own();
        if looped {
            self.engine.note_own_loop(self.engine.now());
            if self.called.load(Ordering::Relaxed) {
                self.engine.own_loop_sleeps();
            }
        } else {
            self.leave_to_others();
            self.engine.hand_over_from_loops();
        }
        looped
    }

    /// Input of this source, by name, may become events here. `None`: of one that many queue pairs share, so
    /// that its input would wake the loops of all of them.
    pub fn fed_by(&self, source: Option<u64>, cq: &Weak<Cq>) {
        if !self.shown {
            return;
        }
        let mut feeds = self.feeds.lock();
        let Some(token) = source.map(Token) else { return self.disown(&mut feeds) };
        if feeds.all.len() == feeds.all.capacity() {
            feeds.all.retain(|(token, _)| self.engine.knows(*token));
        }
        feeds.all.push((token, cq.clone()));
        if self.own.load(Ordering::Relaxed) && !(self.watches(token) && self.is_called()) {
            self.disown(&mut feeds);
        }
    }

    /// Whether bells call the program, if that is needed.
    fn is_called(&self) -> bool {
        if !self.called.load(Ordering::Relaxed) {
            return true;
        }
        let watch = self.queue.lock().watch.clone();
        watch.is_some_and(|watch| self.engine.call_to(&watch))
    }

    /// The same, for the program's thread.
    fn is_called_here(&self) -> bool {
        let here = || BLOCKED_ON.with(|on| std::ptr::from_ref(on).addr());
        !self.called.load(Ordering::Relaxed) || self.engine.own.may_serve(here()) && self.is_called()
    }

    /// Whether the program's loop may be left to serve what it waits for.
    fn may_be_own(&self) -> bool {
        self.own.load(Ordering::Relaxed) || !self.feeds.lock().never
    }

    fn watches(&self, token: Token) -> bool {
        let Some(watch) = self.queue.lock().watch.clone() else { return false };
        let beside = self.engine.watch_beside(token, &watch);
        if beside == Beside::Raised {
            self.called.store(true, Ordering::Relaxed);
        }
        beside != Beside::Cannot
    }

    /// The descriptor is non-blocking: from now on the sockets make it readable. Returns whether that can be.
    fn becomes_own(&self) -> bool {
        if self.own.load(Ordering::Relaxed) && self.is_called_here() {
            return true;
        }
        let mut feeds = self.feeds.lock();
        if !feeds.all.iter().all(|(token, _)| self.watches(*token)) || !self.is_called_here() {
            self.disown(&mut feeds);
        }
        self.own.store(!feeds.never, Ordering::Relaxed);
        if !feeds.never {
            self.was_own.store(true, Ordering::Relaxed);
        }
        !feeds.never
    }

    /// The background thread serves the sockets, as for a program that may block.
    fn leave_to_others(&self) {
        if self.own.load(Ordering::Relaxed) {
            self.disown(&mut self.feeds.lock());
            self.engine.hand_over();
        }
    }

    /// Makes an event, if there is none and the program has a completion queue.
    fn announce(&self) {
        if !self.is_empty() {
            return;
        }
        let last = self.armed.lock().upgrade();
        let other = || self.feeds.lock().all.iter().find_map(|(_, cq)| cq.upgrade());
        let cq = last.or_else(other);
        cq.iter().for_each(|cq| cq.announce());
    }

    fn disown(&self, feeds: &mut Feeds) {
        feeds.never = true;
        self.own.store(false, Ordering::Relaxed);
        let watch = self.queue.lock().watch.clone();
        if let Some(watch) = watch {
            feeds.all.iter().for_each(|(token, _)| self.engine.watch_alone(*token, &watch));
            self.call_no_more(&watch);
        }
    }

    fn call_no_more(&self, watch: &Arc<Watch>) {
        if self.called.load(Ordering::Relaxed) {
            self.engine.call_no_more(watch);
            self.engine.own_loop_wakes();
        }
    }

    /// Makes progress in a call on a non-blocking descriptor.
    fn serve_here(&self) {
        let watch = self.own.load(Ordering::Relaxed).then(|| self.queue.lock().watch.clone()).flatten();
        let Some(watch) = watch else {
            self.engine.poll_once();
            if self.may_be_own() {
                self.waits_elsewhere.store(true, Ordering::Relaxed);
            }
            return;
        };
        BLOCKED_ON.with(|on| on.set(BlockedOn::Looking(self.address())));
        self.engine.serve_beside(&watch, || self.look_directly());
        BLOCKED_ON.with(|on| on.set(BlockedOn::Nothing));
        // If the program sleeps now, it polls no more what it polled in earnest.
        if self.is_empty() {
            self.engine.unpark();
            if self.called.load(Ordering::Relaxed) {
                self.engine.own_loop_sleeps();
            }
        }
    }

    /// Receives from the sockets of the completion queue that was armed last, if they are few, without asking
    /// the system which of them are ready. Returns whether there is an event.
    fn look_directly(&self) -> bool {
        const FEW: Direct = Direct { favourite: u32::MAX, ..DIRECT };
        if self.called.load(Ordering::Relaxed) {
            return false;
        }
        let cq = self.armed.lock().upgrade();
        cq.is_some_and(|cq| cq.make_progress(&FEW, false) == Coverage::Complete && !self.is_empty())
    }

    /// Looks for an event for a short time before sleeping, as long as that has been useful lately: falling
    /// asleep and being woken costs more than most replies take. Returns whether there is an event.
    fn spin(&self) -> bool {
        let Some(score) = self.spinning.begin() else { return false };
        let cq = self.armed.lock().upgrade();
        let spans = self.engine.pace.spans();
        let start = sys::now();
        let (mut now, mut begins) = (start, true);
        // A look is an empty poll, and a program that blocks may make no others.
        self.answer(0, now);
        for looks in 1u32.. {
            BLOCKED_ON.with(|on| on.set(BlockedOn::Looking(self.address())));
            let covered = cq.as_ref().map_or(Coverage::Partial, |cq| cq.make_progress(&DIRECT, true));
            let stamp = self.engine.nanos(now);
            let around = self.engine.around.is_due(stamp);
            if around || covered == Coverage::Partial {
                let ask = around || cq.as_ref().is_none_or(|cq| cq.needs_system());
                let served = if ask { self.engine.poll_once() } else { self.engine.look_once() };
                if around {
                    self.engine.around.looked(served > 0, spans);
                }
            }
            BLOCKED_ON.with(|on| on.set(BlockedOn::Nothing));
            let found = !self.is_empty();
            if begins || around {
                self.engine.note_earnest_at(stamp, begins && !found);
                begins = false;
            }
            if around {
                self.engine.look_after();
            }
            if found {
                self.spinning.end(score, true);
                return true;
            }
            now = sys::now();
            self.answer(looks, now);
            let looked = now.saturating_duration_since(start);
            if looked > spans.spin() {
                self.spinning.end(score, false);
                return false;
            }
            spin_loop();
        }
        false
    }

    /// It is `now`, and so many looks in a row were in vain.
    fn answer(&self, looks: u32, now: Instant) {
        if self.engine.pace.is_asked() {
            self.engine.pace.answer(looks, self.engine.nanos(now));
        }
    }

    /// Drops the queued events with this cookie (its object is going away); returns how many there were.
    pub fn remove(&self, cookie: u64) -> usize {
        self.remove_if(|event| event == cookie)
    }

    /// Drops the queued events that `gone` selects; returns how many there were.
    pub fn remove_if(&self, gone: impl Fn(u64) -> bool) -> usize {
        let mut queue = self.queue.lock();
        let before = queue.events.len();
        queue.events.retain(|event| !gone(*event));
        let removed = before - queue.events.len();
        self.silence_if_empty(&mut queue);
        removed
    }

    /// Drops one queued event, in a channel where each cookie is larger than the ones before it.
    pub fn remove_ascending(&self, cookie: u64) {
        let mut queue = self.queue.lock();
        if let Ok(at) = queue.events.binary_search(&cookie) {
            queue.events.remove(at);
            self.silence_if_empty(&mut queue);
        }
    }

    fn silence_if_empty(&self, queue: &mut Queue) {
        if let Some(bell) = queue.bell.as_ref().filter(|_| queue.raised && queue.events.is_empty()) {
            bell.silence();
            queue.raised = false;
        }
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.queue.lock().events.is_empty()
    }
}

/// A thread sleeps on the sockets for this channel.
struct Blocked<'a>(&'a Channel);

impl<'a> Blocked<'a> {
    fn on(channel: &'a Channel, lead: Lead) -> Self {
        channel.leading.store(true, Ordering::SeqCst);
        BLOCKED_ON.with(|on| on.set(BlockedOn::Leading(channel.address(), lead)));
        Self(channel)
    }
}

impl Drop for Blocked<'_> {
    fn drop(&mut self) {
        BLOCKED_ON.with(|on| on.set(BlockedOn::Nothing));
        self.0.leading.store(false, Ordering::SeqCst);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Weak};

    use super::Channel;
    use crate::engine::Engine;
    use crate::fork;

    /// A channel that was armed before its queue pair was connected had the background thread nap beside a
    /// loop that could not serve what many queue pairs share: 1 to 2 ms for each message.
    #[test]
    fn a_loop_that_cannot_serve_its_sources_is_none() {
        // Without a background thread.
        let engine = Arc::new(Engine::new().unwrap());
        let channel = Channel::new(&engine).unwrap();
        let flags = rustix::fs::OFlags::NONBLOCK;
        rustix::fs::fcntl_setfl(fork::borrow(channel.fd()), flags).unwrap();
        assert!(fork::nonblocking(channel.fd()));
        assert!(channel.armed(&Weak::new()) && engine.is_looped());
        channel.fed_by(None, &Weak::new());
        assert!(!channel.armed(&Weak::new()) && !engine.is_looped());
    }
}
