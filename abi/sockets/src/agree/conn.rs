//! One TCP connection that may become a stream, until it is one.
//!
//! | stage | the program's descriptor | what it receives | what it sends |
//! |---|---|---|---|
//! | `Direct` | the kernel's socket | the kernel's | the kernel's |
//! | `Tcp` | the kernel's socket, for good | not looked at | not looked at |
//! | `Behind` | a stand-in | plain bytes, of which markers are taken out | plain bytes |
//! | `Held` | a stand-in | plain bytes up to the peer's marker | is kept ([`super::kept`]), then waits |
//! | `Stream` | a stand-in | what is left of that, then the stream | the stream |
//!
//! Every plain byte is sent, and received, under a lock beneath which the stage is looked at. So none follows
//! a marker. Those calls do not wait; a call that has to wait waits for the kernel's socket and for the next
//! stage, without a lock.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use libc::{nfds_t, pollfd};
use uwarp_preload::{errno, real, set_errno};
use uwarp_process::{Mutex, MutexGuard};

use super::inbound::{End, Inbound};
use super::kept::Kept;
use super::machine::Agreement;
use super::said::Why;
use super::service;
use super::side::Side;
use super::spans::Spans;
use super::table::{self, Claim, Shared};
use super::wire::{Datagram, MARKER_LEN, Nonce, Pattern};
use crate::sock::Sock;
use crate::{fds, process, sys};

/// Most bytes that are received ahead of the program. What two kernels hold is less as a rule.
const AHEAD: usize = 16 << 20;

/// How many bytes are received without a buffer from the heap.
const FIRST: usize = 2048;

/// How often a thread looks, in milliseconds, if there is no descriptor to wake it.
const WITHOUT_BELL: c_int = 10;

/// How long an end that accepted lets its program answer before it sends its marker. A later answer is kept.
const FOR_AN_ANSWER: Duration = Duration::from_millis(50);

/// Where a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Stage {
    Direct,
    Tcp,
    Behind,
    Held,
    Stream,
}

/// A descriptor of this library.
pub struct Own(pub c_int);

impl Own {
    /// Out of the way of the program's.
    pub fn new(fd: c_int) -> Self {
        let moved = sys::second(fd).inspect(|_| sys::close(fd)).unwrap_or(fd);
        fds::enter_own(moved);
        Self(moved)
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        fds::forget(self.0);
        sys::close(self.0);
    }
}

/// What tells of an event.
pub enum Bell {
    /// It has happened.
    Rung,
    /// This becomes readable.
    At(Arc<Own>),
    /// There is no descriptor left for it.
    Missing,
}

/// Something that happens once, for which threads wait.
#[derive(Default)]
pub struct Event {
    happened: AtomicBool,
    /// Made by the first that waits.
    bell: Mutex<Option<Arc<Own>>, 29>,
}

impl Event {
    /// What becomes readable when it has happened.
    pub fn bell(&self) -> Bell {
        let mut bell = self.bell.lock();
        if self.happened.load(Ordering::Acquire) {
            return Bell::Rung;
        }
        if bell.is_none() {
            *bell = sys::quietly(sys::eventfd).ok().map(|fd| Arc::new(Own::new(fd)));
        }
        bell.clone().map_or(Bell::Missing, Bell::At)
    }

    fn happen(&self) {
        let bell = self.bell.lock();
        self.happened.store(true, Ordering::Release);
        if let Some(bell) = &*bell {
            sys::ring(bell.0);
        }
    }
}

/// What this end sends before the stream.
#[derive(Default)]
pub struct Outbound {
    /// Of a marker.
    pub unsent: Vec<u8>,
    /// Behind a marker of this end.
    pub kept: Kept,
    /// The program has ended this direction.
    pub shut: bool,
    /// Which directions it has ended while nothing could be sent.
    pub shut_later: Option<c_int>,
    /// It has ended this direction while a marker was not sent yet. The peer must not see half of one.
    pub ends_behind: bool,
}

/// A connection.
pub struct Conn {
    me: Weak<Self>,
    /// For the service.
    pub key: usize,
    stage: AtomicU8,
    next_stage: Mutex<Arc<Event>, 29>,
    /// The program has used it.
    used: AtomicBool,
    /// Its last call that moved bytes received, or there was none yet.
    answers_next: AtomicBool,
    /// Bytes have come from the other end.
    heard: AtomicBool,
    /// The other end is on this host.
    pub is_near: bool,
    /// For datagrams to an end on this host.
    pub side: Mutex<Side, 29>,
    /// Since when the peer's WELCOME waits for that answer.
    awaits_answer: OnceLock<Instant>,
    /// That one, of an end on this host, which does not repeat it.
    postponed: Mutex<Option<Datagram>, 29>,
    /// There is one.
    postpones: AtomicBool,
    pub agreement: Mutex<Agreement, 29>,
    /// For datagrams, at the end that connected to another host.
    pub udp: Mutex<Option<Own>, 29>,
    /// The same at the end that accepted, once the program has used it; -1: none. The service's.
    pub speaker: AtomicI32,
    pub inbound: Mutex<Inbound, 4>,
    pub outbound: Mutex<Outbound, 8>,
    /// [`Outbound::kept`] is not empty.
    pub keeps: AtomicBool,
    /// The program has closed it while it was not.
    pub ending: Mutex<Option<Arc<Sock>>, 29>,
    /// Nothing is left in front of the stream.
    only_stream: AtomicBool,
    read_shut: AtomicBool,
    /// The stream is being set up.
    pub joining: AtomicBool,
    /// The program has closed it.
    pub closed: AtomicBool,
    /// A user was told what has become of it.
    pub said: AtomicBool,
    /// The kernel's socket, once the program has a stand-in.
    tcp: AtomicI32,
    pub sock: Mutex<Weak<Sock>, 29>,
    /// What relatives of this process do with it.
    pub shared: Mutex<Option<Shared>, 28>,
}

/// How long a call may wait.
#[derive(Clone, Copy)]
pub enum Wait {
    /// Not at all.
    Not,
    /// Milliseconds; negative: without limit.
    Most(c_int),
}

/// What has become of a call.
pub enum Outcome {
    /// It is done; errno is set if this is negative.
    Done(isize),
    /// Another stage has begun, in which it has to be made again.
    Elsewhere,
}

fn failed(errno: c_int) -> Outcome {
    set_errno(errno);
    Outcome::Done(-1)
}

/// Whether each handler of a signal has `SA_RESTART`: then a call that waits goes on after a signal, as one
/// of the kernel's.
fn signals_restart() -> bool {
    (1..=libc::SIGRTMAX()).all(|signal| {
        // SAFETY: only queries; zeros are a value, which the call overwrites.
        unsafe {
            let mut action = std::mem::zeroed::<libc::sigaction>();
            if libc::sigaction(signal, std::ptr::null(), &raw mut action) != 0 {
                return true;
            }
            let handled = action.sa_sigaction != libc::SIG_DFL && action.sa_sigaction != libc::SIG_IGN;
            !handled || action.sa_flags & libc::SA_RESTART != 0
        }
    })
}

/// A limit of a call that waits, by `SO_RCVTIMEO` or `SO_SNDTIMEO` of a socket of the kernel.
pub fn limit_of(fd: c_int, name: c_int) -> c_int {
    let limit: Option<libc::timeval> = sys::option_of(fd, libc::SOL_SOCKET, name);
    let micros =
        limit.map_or(0, |limit| limit.tv_sec.saturating_mul(1_000_000).saturating_add(limit.tv_usec));
    if micros <= 0 { -1 } else { c_int::try_from((micros + 999) / 1000).unwrap_or(c_int::MAX) }
}

impl Conn {
    /// Of a connected socket, which the program has.
    pub fn new(key: usize, agreement: Agreement, udp: Option<Own>, side: Option<Side>) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            key,
            stage: AtomicU8::new(Stage::Direct as u8),
            next_stage: Mutex::default(),
            used: AtomicBool::new(false),
            answers_next: AtomicBool::new(true),
            heard: AtomicBool::new(false),
            is_near: side.is_some(),
            side: Mutex::new(side.unwrap_or_default()),
            awaits_answer: OnceLock::new(),
            postponed: Mutex::new(None),
            postpones: AtomicBool::new(false),
            agreement: Mutex::new(agreement),
            udp: Mutex::new(udp),
            speaker: AtomicI32::new(-1),
            inbound: Mutex::default(),
            outbound: Mutex::default(),
            keeps: AtomicBool::new(false),
            ending: Mutex::new(None),
            only_stream: AtomicBool::new(false),
            read_shut: AtomicBool::new(false),
            joining: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            said: AtomicBool::new(false),
            tcp: AtomicI32::new(-1),
            sock: Mutex::new(Weak::new()),
            shared: Mutex::new(None),
        })
    }

    /// Where it is.
    pub fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Direct,
            1 => Stage::Tcp,
            2 => Stage::Behind,
            3 => Stage::Held,
            _ => Stage::Stream,
        }
    }

    /// The next stage begins. The caller holds the lock of each direction that changes.
    pub fn enter(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Release);
        self.nudge();
    }

    /// Threads that wait look again.
    pub fn nudge(&self) {
        let before = std::mem::take(&mut *self.next_stage.lock());
        before.happen();
    }

    /// The end of the present stage. To be taken before the stage is looked at.
    pub fn next_stage(&self) -> Arc<Event> {
        Arc::clone(&self.next_stage.lock())
    }

    /// The kernel's socket.
    pub fn tcp(&self) -> c_int {
        self.tcp.load(Ordering::Acquire)
    }

    /// The library has it.
    pub fn set_tcp(&self, fd: c_int) {
        self.tcp.store(fd, Ordering::Release);
    }

    /// In a child: closes its copies of the kernel's socket and of links.
    pub fn close_copy(&self) {
        if let Some(mut side) = self.side.try_lock() {
            *side = Side::default();
        }
        let tcp = self.tcp.swap(-1, Ordering::AcqRel);
        if tcp >= 0 {
            fds::forget(tcp);
            sys::close(tcp);
        }
    }

    /// The program makes a call that concerns its bytes. False: a relative of this process has it.
    pub fn used(&self) -> bool {
        if self.stage() != Stage::Direct {
            return true;
        }
        let claim = self.shared.lock().as_ref().map(Shared::claim);
        match claim {
            None | Some(Claim::Ours) if !process::is_forked() => {}
            Some(Claim::Others) => return false,
            _ => {
                table::stay_tcp(self, Why::NoRoom);
                return true;
            }
        }
        if !self.used.swap(true, Ordering::AcqRel)
            && let Some(me) = self.me.upgrade()
        {
            service::begin(&me);
        }
        true
    }

    /// Whether the program is likely to send next, as servers do after a request. Behind its marker an end
    /// can send nothing for two round trips, and the peer hears the answer sooner before it. Not for ever:
    /// many only receive.
    pub fn is_to_answer(&self) -> bool {
        self.answers_next.load(Ordering::SeqCst)
            && self.awaits_answer.get_or_init(Instant::now).elapsed() < FOR_AN_ANSWER
    }

    /// Keeps a WELCOME back until the program has answered, or takes too long.
    pub fn postpone(&self, welcome: Datagram) {
        *self.postponed.lock() = Some(welcome);
        self.postpones.store(true, Ordering::SeqCst);
        // The program may have answered meanwhile.
        if !self.is_to_answer() {
            service::look_at(self.key);
        }
    }

    /// That one, once it need not wait any more.
    pub fn take_postponed(&self) -> Option<Datagram> {
        if !self.postpones.load(Ordering::SeqCst) || self.is_to_answer() {
            return None;
        }
        self.postpones.store(false, Ordering::SeqCst);
        self.postponed.lock().take()
    }

    /// Whether bytes have come from the other end's program, which cannot send any before its library is
    /// ready.
    pub fn has_heard(&self) -> bool {
        self.heard.load(Ordering::Relaxed)
    }

    /// Whether the program has used it.
    pub fn is_used(&self) -> bool {
        self.used.load(Ordering::Acquire)
    }

    /// For a child that has inherited it: nothing of this one may be used there, as another thread of the
    /// parent may have had its locks. `None`: it stays TCP.
    pub fn for_child(&self, nonce: Nonce) -> Option<Arc<Self>> {
        let agreement = self.agreement.try_lock()?.anew(nonce);
        let shared = self.shared.try_lock()?.take()?;
        // The datagrams for what the parent has used are the parent's.
        let udp = self.udp.try_lock()?.take().filter(|_| !self.is_used());
        let side = std::mem::take(&mut *self.side.try_lock()?);
        let side = if self.is_used() { Side::default() } else { side };
        let new = Self::new(self.key, agreement, udp, self.is_near.then_some(side));
        *new.shared.lock() = Some(shared);
        Some(new)
    }

    /// Waits for the kernel's socket and for the next stage.
    fn wait(&self, stage: &Event, fd: c_int, events: i16, until: Option<Instant>) -> Result<(), c_int> {
        let bell = match stage.bell() {
            Bell::Rung => return Ok(()),
            Bell::At(bell) => Some(bell),
            Bell::Missing if self.stage() == Stage::Direct => {
                table::stay_tcp(self, Why::NoRoom);
                return Ok(());
            }
            Bell::Missing => None,
        };
        let bell_fd = bell.as_ref().map_or(-1, |bell| bell.0);
        let fd = if events == 0 { -1 } else { fd };
        loop {
            let mut entries =
                [pollfd { fd, events, revents: 0 }, pollfd { fd: bell_fd, events: libc::POLLIN, revents: 0 }];
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let left = left
                .map_or(-1, |left| c_int::try_from(left.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX));
            let whole = bell.is_some() || (0..=WITHOUT_BELL).contains(&left);
            let left = if whole { left } else { WITHOUT_BELL };
            let (at, count) = (entries.as_mut_ptr(), 2);
            match real!(poll(at: *mut pollfd, count: nfds_t, left: c_int) -> c_int) {
                0 if whole => return Err(libc::EAGAIN),
                0 => return Ok(()),
                ready if ready > 0 => return Ok(()),
                _ if errno() == libc::EINTR && until.is_none() && signals_restart() => {}
                _ => return Err(errno()),
            }
        }
    }

    fn until(wait: Wait) -> Option<Instant> {
        match wait {
            Wait::Most(ms) => {
                u64::try_from(ms).ok().and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms)))
            }
            Wait::Not => None,
        }
    }

    /// Makes a call of the kernel's on the program's descriptor, while it has one. `call` does not wait.
    pub fn direct(
        &self,
        fd: c_int,
        sends: bool,
        wait: impl FnOnce() -> Wait,
        call: impl Fn() -> isize,
    ) -> Outcome {
        let mut limit: Option<Option<Instant>> = None;
        let mut wait = Some(wait);
        loop {
            let stage = self.next_stage();
            let result = {
                // One lock of the two.
                let locks = if sends {
                    (Some(self.outbound.lock()), None)
                } else {
                    (None, Some(self.inbound.lock()))
                };
                if self.stage() != Stage::Direct {
                    return Outcome::Elsewhere;
                }
                let result = call();
                drop(locks);
                result
            };
            if result > 0 {
                self.answers_next.store(!sends, Ordering::SeqCst);
                if sends && self.postpones.load(Ordering::SeqCst) {
                    service::look_at(self.key);
                }
                self.heard.fetch_or(!sends, Ordering::Relaxed);
            }
            if result >= 0 || errno() != libc::EAGAIN {
                return Outcome::Done(result);
            }
            let until = match (limit, wait.take()) {
                (Some(until), _) => until,
                (None, Some(wait)) => match wait() {
                    Wait::Not => return failed(libc::EAGAIN),
                    wait => *limit.insert(Self::until(wait)),
                },
                (None, None) => None,
            };
            let events = if sends { libc::POLLOUT } else { libc::POLLIN };
            if let Err(errno) = self.wait(&stage, fd, events, until) {
                return failed(errno);
            }
        }
    }

    /// Whether the stream has nothing in front of it.
    #[inline]
    pub fn is_only_stream(&self) -> bool {
        self.only_stream.load(Ordering::Acquire)
    }

    /// Receives from the kernel's socket ahead of the program. True: there is more.
    pub fn pull(&self, inbound: &mut Inbound) -> bool {
        if !matches!(self.stage(), Stage::Behind | Stage::Held)
            || self.joining.load(Ordering::Acquire)
            || inbound.end().is_some()
            || inbound.len() >= AHEAD
        {
            return false;
        }
        // Mostly there is nothing, or little.
        let mut first = [0; FIRST];
        let got = sys::receive_now(self.tcp(), &mut first);
        match got {
            Ok(0) => inbound.finish(End::Done),
            Ok(len) => {
                inbound.push(first.get(..len).unwrap_or_default());
                if len == FIRST && inbound.found().is_none() {
                    let mut block = crate::sock::block();
                    match sys::receive_now(self.tcp(), &mut block) {
                        // (0: an end, which is there the next time, too.)
                        Ok(more) => inbound.push(block.get(..more).unwrap_or_default()),
                        Err(libc::EAGAIN | libc::EINTR) => {}
                        // The system reports a failure once.
                        Err(errno) => inbound.finish(End::Failed(errno)),
                    }
                }
            }
            Err(libc::EAGAIN | libc::EINTR) => return false,
            Err(errno) => inbound.finish(End::Failed(errno)),
        }
        // Another thread may wait for the kernel's socket, in which these bytes are no more.
        self.nudge();
        true
    }

    /// Receives what is there in front of a stream.
    pub fn receive(&self, spans: &Spans, flags: c_int, wait: Wait) -> Outcome {
        let until = Self::until(wait);
        loop {
            let stage = self.next_stage();
            let mut inbound = self.inbound.lock();
            // A program that peeks may wait for more than there is.
            let peeks = flags & libc::MSG_PEEK != 0 && inbound.ready().len() < spans.len();
            if (peeks || inbound.ready().is_empty()) && inbound.found().is_none() && self.pull(&mut inbound) {
                self.look_at(&inbound);
            }
            if !inbound.ready().is_empty() {
                let ready = inbound.ready();
                let copied = match flags & libc::MSG_TRUNC != 0 {
                    true => ready.len().min(spans.len()),
                    false => spans.fill(ready),
                };
                if flags & libc::MSG_PEEK == 0 {
                    inbound.take(copied);
                }
                return Outcome::Done(copied.cast_signed());
            }
            if spans.len() == 0 {
                return Outcome::Done(0);
            }
            if self.stage() == Stage::Stream {
                self.only_stream.store(true, Ordering::Release);
                return Outcome::Elsewhere;
            }
            if let Some(errno) = inbound.take_error() {
                return failed(errno);
            }
            if inbound.end().is_some() || self.read_shut.load(Ordering::Acquire) {
                return Outcome::Done(0);
            }
            // Behind a marker nothing comes until the service has answered it.
            let quiet = inbound.found().is_some() || self.joining.load(Ordering::Acquire);
            let events = if quiet { 0 } else { libc::POLLIN };
            drop(inbound);
            if flags & libc::MSG_DONTWAIT != 0 || matches!(wait, Wait::Not) {
                return failed(libc::EAGAIN);
            }
            if let Err(errno) = self.wait(&stage, self.tcp(), events, until) {
                return failed(errno);
            }
        }
    }

    /// Sends plain bytes; at least one, if it may wait.
    pub fn send(&self, spans: &Spans, flags: c_int, wait: Wait) -> Outcome {
        let until = Self::until(wait);
        let dont_wait = flags & libc::MSG_DONTWAIT != 0 || matches!(wait, Wait::Not);
        loop {
            let stage = self.next_stage();
            let mut outbound = self.outbound.lock();
            if outbound.shut_later.is_some_and(|how| how != libc::SHUT_RD) {
                if flags & libc::MSG_NOSIGNAL == 0 {
                    sys::raise(libc::SIGPIPE);
                }
                return failed(libc::EPIPE);
            }
            let events = match self.stage() {
                Stage::Stream if outbound.kept.is_empty() => return Outcome::Elsewhere,
                Stage::Held if outbound.kept.has_room() && flags & libc::MSG_OOB == 0 => {
                    let kept = outbound.kept.add(spans);
                    self.keeps.store(!outbound.kept.is_empty(), Ordering::Release);
                    return kept.map_or_else(failed, |kept| Outcome::Done(kept.cast_signed()));
                }
                Stage::Behind => {
                    if self.flush(&mut outbound) {
                        let sent = spans.send(self.tcp(), flags | libc::MSG_DONTWAIT);
                        if sent >= 0 || errno() != libc::EAGAIN {
                            return Outcome::Done(sent);
                        }
                    }
                    libc::POLLOUT
                }
                _ => 0,
            };
            drop(outbound);
            if dont_wait {
                return failed(libc::EAGAIN);
            }
            if let Err(errno) = self.wait(&stage, self.tcp(), events, until) {
                return failed(errno);
            }
        }
    }

    /// Sends what is left of a marker; false: not all of it yet.
    pub fn flush(&self, outbound: &mut Outbound) -> bool {
        while !outbound.unsent.is_empty() {
            match sys::send_now(self.tcp(), &outbound.unsent) {
                Ok(sent) => {
                    outbound.unsent.drain(..sent.min(outbound.unsent.len()));
                }
                Err(libc::EAGAIN) => return false,
                Err(libc::EINTR) => {}
                // The connection has failed, which receiving will say.
                Err(_) => outbound.unsent.clear(),
            }
        }
        if std::mem::take(&mut outbound.ends_behind) {
            let _ = sys::shutdown(self.tcp(), libc::SHUT_WR);
        }
        true
    }

    /// Ends this direction, behind a marker that is on its way.
    pub fn end_sending(&self, outbound: &mut Outbound) -> Result<(), c_int> {
        outbound.shut = true;
        if self.flush(outbound) {
            return sys::shutdown(self.tcp(), libc::SHUT_WR);
        }
        outbound.ends_behind = true;
        Ok(())
    }

    /// The stream is about to be set up. False: this direction has ended.
    pub fn begin_to_join(&self) -> bool {
        let outbound = self.outbound.lock();
        // From here on an end of this direction waits.
        self.joining.store(!outbound.shut, Ordering::Release);
        !outbound.shut
    }

    /// Sends a marker as the last plain bytes before `stage`. False: this direction has ended.
    pub fn mark(&self, marker: [u8; MARKER_LEN], stage: Stage) -> bool {
        let mut outbound = self.outbound.lock();
        if outbound.shut {
            return false;
        }
        outbound.unsent.extend_from_slice(&marker);
        // Nothing must keep it back.
        sys::set_option(self.tcp(), libc::IPPROTO_TCP, libc::TCP_CORK, 0);
        sys::set_option(self.tcp(), libc::IPPROTO_TCP, libc::TCP_NODELAY, 1);
        self.flush(&mut outbound);
        if stage != self.stage() {
            self.enter(stage);
        }
        true
    }

    /// Something may have been found: the service looks.
    fn look_at(&self, inbound: &MutexGuard<'_, Inbound, 4>) {
        if inbound.found().is_some() || inbound.end().is_some() {
            service::look_at(self.key);
        }
    }

    /// From here on a marker is looked for. The caller has put a stand-in in the place of the socket.
    pub fn begin_to_look(&self, pattern: Pattern, stage: Stage) {
        let mut inbound = self.inbound.lock();
        let _outbound = self.outbound.lock();
        inbound.look_for(pattern);
        self.enter(stage);
    }

    /// What the kernel's poll would say of it if it were a TCP socket, in front of the stream.
    pub fn look(&self) -> i16 {
        let mut inbound = self.inbound.lock();
        while inbound.ready().is_empty() && inbound.found().is_none() && self.pull(&mut inbound) {
            self.look_at(&inbound);
        }
        let stage = self.stage();
        let kernel = sys::ready_for(self.tcp(), libc::POLLOUT | libc::POLLRDHUP);
        let mut bits = match stage {
            // What the library does with the connection is not the program's.
            _ if self.joining.load(Ordering::Acquire) => 0,
            // Bytes behind a marker cannot be read yet, nor those behind one that may still come in front of
            // the end. A stand-in shows an end once and for ever, so a program with EPOLLET that found
            // nothing to read would not hear of them.
            _ if inbound.found().is_some() || inbound.is_looking() => kernel & libc::POLLERR,
            _ => kernel & (libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR),
        };
        let outbound = self.outbound.lock();
        let ended = outbound.shut || outbound.shut_later.is_some();
        let has_room = match stage {
            Stage::Behind => outbound.unsent.is_empty() && kernel & libc::POLLOUT != 0,
            Stage::Held => outbound.kept.has_room(),
            _ => false,
        };
        if ended || has_room {
            bits |= libc::POLLOUT;
        }
        match inbound.end() {
            Some(End::Failed(_)) => bits |= libc::POLLIN | libc::POLLRDHUP | libc::POLLERR | libc::POLLHUP,
            Some(End::Done) => bits |= libc::POLLIN | libc::POLLRDHUP,
            None => {}
        }
        if self.read_shut.load(Ordering::Acquire) {
            bits |= libc::POLLIN | libc::POLLRDHUP | if ended { libc::POLLHUP } else { 0 };
        }
        if !inbound.ready().is_empty() {
            bits |= libc::POLLIN;
        }
        bits
    }

    /// Bytes in front of the stream that can be read.
    pub fn unread(&self) -> usize {
        let mut inbound = self.inbound.lock();
        while inbound.found().is_none() && self.pull(&mut inbound) {
            self.look_at(&inbound);
        }
        inbound.ready().len()
    }

    /// shutdown(2), before the stream. `None`: it is the stream's.
    pub fn shutdown(&self, how: c_int) -> Option<c_int> {
        // An end that has sent everything could not answer a marker.
        let free = how == libc::SHUT_RD || self.agreement.lock().veto();
        let mut outbound = self.outbound.lock();
        let streams = self.stage() == Stage::Stream;
        if streams && outbound.kept.is_empty() {
            return None;
        }
        if how != libc::SHUT_WR {
            self.read_shut.store(true, Ordering::Release);
        }
        if streams || self.stage() == Stage::Held || (!free && self.joining.load(Ordering::Acquire)) {
            let both = outbound.shut_later.is_some_and(|before| before != how);
            outbound.shut_later = Some(if both { libc::SHUT_RDWR } else { how });
            return Some(0);
        }
        if how == libc::SHUT_RD {
            return Some(0);
        }
        Some(self.end_sending(&mut outbound).map_or_else(
            |errno| {
                set_errno(errno);
                -1
            },
            |()| 0,
        ))
    }

    /// The stream runs, or cannot be made. Only the peer's end or its reset is behind an error of set-up, and
    /// before that it has sent all that its program had: so a reset is the end.
    ///
    /// What is kept goes first, by `send`, before another call can send. False: another thread has done it.
    pub fn joined(&self, result: Result<(), c_int>, send: impl FnOnce(&mut Outbound)) -> bool {
        let (mut inbound, mut outbound) = (self.inbound.lock(), self.outbound.lock());
        if !self.joining.swap(false, Ordering::AcqRel) {
            return false;
        }
        match result {
            Ok(()) => {
                send(&mut outbound);
                self.enter(Stage::Stream);
            }
            Err(errno) => {
                self.forget_kept(&mut outbound);
                outbound.shut_later = None;
                inbound.finish(if errno == libc::ECONNRESET { End::Done } else { End::Failed(errno) });
                self.enter(Stage::Behind);
            }
        }
        true
    }

    /// Takes the error of the connection, if the stream has none yet.
    pub fn take_error(&self) -> c_int {
        let mut inbound = self.inbound.lock();
        if let Some(errno) = inbound.take_error() {
            return errno;
        }
        if self.stage() == Stage::Stream || self.joining.load(Ordering::Acquire) {
            // The kernel has it for the stream.
            return 0;
        }
        sys::option(self.tcp(), libc::SOL_SOCKET, libc::SO_ERROR).unwrap_or(0)
    }
}

impl Drop for Conn {
    fn drop(&mut self) {
        self.close_copy();
    }
}

#[cfg(test)]
mod tests;
