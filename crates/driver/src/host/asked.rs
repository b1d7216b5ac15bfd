//! This process is asked for memory: the responder's part.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use uwarp_llp::carrier::Watch;
use uwarp_llp::memory::board::PeerBoard;
use uwarp_llp::memory::lane::End;
use uwarp_llp::memory::pair::{Bell, Pair};
use uwarp_llp::memory::slab::{Carries, Slab};
use uwarp_process::{Descriptor, Mutex, OnceValue};
use uwarp_proto::setup::HostKey;

use super::fading::Fading;
use super::word::Words;
use super::words::{Answer, Join};
use super::{ANSWER, Unsettled, Why, end_datagrams, is_same_user, name, receive, send};
use crate::engine::Engine;
use crate::lanes::Lanes;
use crate::nic::Nic;
use crate::source::{Interest, Readiness, Source, Token};

/// Processes that may ask at the same time. Each has one socket.
const MOST_ASKERS: usize = 4096;
/// Slabs of one of them: as many lanes as it may have queue pairs.
const MOST_SLABS: usize = 1024;
/// A nonce counts for so long, and longer where nobody needs its place: an initiator asks as soon as it has
/// it, but on a busy host this process reads that when it gets a processor.
const EXPECTED: Duration = Duration::from_secs(4);
/// A question that comes before its connection is attached here waits for so long behind it, and behind the
/// last answer: this process has replied to many connections at once, and attaches one after the other. Then
/// it never will be, as its queue pair has left, and who asks must hear that before it takes this process for
/// one that does not answer.
const EARLY: Duration = ANSWER.saturating_sub(Duration::from_millis(500));
/// Such questions at the same time.
const MOST_EARLY: usize = 16_384;
/// Those of one process, so that it leaves room for others.
const MOST_EARLY_OF_ONE: usize = 4096;
/// How often a lane that was granted looks whether its stream has begun over the connection.
const GRANTED: Duration = Duration::from_secs(2);
/// Processes that are let in, and questions of one that are taken, before others are served. Who connects or
/// asks again and again keeps nobody waiting.
const TURN: usize = 64;
/// When it is tried again to let in who waits, after the system has refused it.
const AGAIN: Duration = Duration::from_millis(50);
/// When answers for which there was no room are sent, and how many.
const ROOM: Duration = Duration::from_millis(1);
const MOST_UNSENT: usize = 4096;
/// A process that has connected and asks nothing is not waited for: it holds a descriptor.
const SILENT: Duration = Duration::from_secs(2);

/// Answers questions.
pub(super) struct Asked {
    engine: Arc<Engine>,
    lanes: Arc<Lanes>,
    nic: Weak<Nic>,
    /// Those that were sent by UDP.
    words: Words,
    socket: Descriptor,
    token: OnceValue<Token>,
    me: Weak<Self>,
    state: Mutex<State, 26>,
}

#[derive(Default)]
struct State {
    /// Connections of which an initiator may ask, by nonce.
    expected: HashMap<[u8; 16], Expected>,
    /// Questions about connections that are not attached here yet, and when they came.
    early: Vec<(Arc<Asker>, Join, Instant)>,
    askers: usize,
}

struct Expected {
    ends: [SocketAddr; 2],
    unsettled: Unsettled,
    until: Instant,
    /// What is answered.
    answer: Result<(), Why>,
}

impl Asked {
    pub fn listen(
        engine: &Arc<Engine>,
        lanes: &Arc<Lanes>,
        key: HostKey,
        nic: Weak<Nic>,
    ) -> Result<Arc<Self>, Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = Descriptor::made(|| {
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        })?;
        rustix::net::bind(&socket, &name(&key.incarnation)?)?;
        rustix::net::listen(&socket, 1024)?;
        let fd = socket.as_fd().as_raw_fd();
        let asked = Arc::new_cyclic(|me| Self {
            engine: engine.clone(),
            lanes: lanes.clone(),
            nic,
            words: Words::new(&key.key),
            socket,
            token: OnceValue::new(),
            me: me.clone(),
            state: Mutex::default(),
        });
        let listening = engine.register_for(fd, asked.clone(), Interest::Input);
        let token =
            listening.map_err(|error| error.raw_os_error().map_or(Errno::IO, Errno::from_raw_os_error))?;
        asked.token.get_or_make(|| token);
        // What has come before the token was known.
        engine.raise(token, Readiness::ANY);
        Ok(asked)
    }

    /// What the owner of the second of these ends, a UDP port, is told.
    pub fn word_for(&self, ends: [SocketAddr; 2]) -> [u8; 16] {
        self.words.make(ends)
    }

    /// An initiator may ask about this connection; `ends`: its own, the initiator's.
    pub fn expect(&self, nonce: [u8; 16], ends: [SocketAddr; 2], unsettled: Unsettled) {
        self.expect_and(
            nonce,
            Expected { ends, unsettled, until: Instant::now() + EXPECTED, answer: Ok(()) },
        );
    }

    /// As [`Self::expect`], but it gets no memory, and need not wait to hear why.
    pub fn decline(&self, nonce: [u8; 16], ends: [SocketAddr; 2], unsettled: Unsettled, why: Why) {
        let (until, answer) = (Instant::now() + EXPECTED, Err(why));
        self.expect_and(nonce, Expected { ends, unsettled, until, answer });
    }

    fn expect_and(&self, nonce: [u8; 16], expected: Expected) {
        let now = Instant::now();
        let mut state = self.state.lock();
        if state.expected.len() >= 64 && state.expected.len().is_power_of_two() {
            state.expected.retain(|_, expected| now < expected.until);
        }
        state.expected.insert(nonce, expected);
        let early = state.early.iter().position(|(_, join, _)| join.nonce == nonce);
        let early = early.map(|at| state.early.swap_remove(at));
        drop(state);
        if let Some((asker, join, _)) = early {
            asker.answer(self, &join);
        }
    }

    fn accept(&self) -> Result<(), Errno> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = Descriptor::made(|| rustix::net::accept_with(&self.socket, flags))?;
        // Closed at once: it learns nothing, and costs nothing.
        if !is_same_user(&socket) {
            return Ok(());
        }
        {
            let mut state = self.state.lock();
            if state.askers >= MOST_ASKERS {
                return Ok(());
            }
            state.askers += 1;
        }
        let fd = socket.as_fd().as_raw_fd();
        let asker = Arc::new_cyclic(|me: &Weak<Asker>| Asker {
            me: me.clone(),
            asked: self.me.clone(),
            socket,
            token: OnceValue::new(),
            shared: Mutex::default(),
        });
        match self.engine.register_for(fd, asker.clone(), Interest::Input) {
            Ok(token) => {
                asker.token.get_or_make(|| token);
                self.engine.set_timer(token, Some(Instant::now() + SILENT));
            }
            Err(error) => {
                tracing::debug!("cannot watch a process that asks for memory: {error}");
                asker.end();
                return Ok(());
            }
        }
        // What has come before the token was known.
        asker.ready(Readiness::ANY);
        Ok(())
    }
}

impl Source for Asked {
    fn ready(&self, _: Readiness) {
        for _ in 0..TURN {
            match self.accept() {
                Ok(()) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return,
                // No descriptor is left, most likely.
                Err(_) => {
                    if let Some(token) = self.token.get() {
                        self.engine.set_timer(*token, Some(Instant::now() + AGAIN));
                    }
                    return;
                }
            }
        }
        if let Some(token) = self.token.get() {
            self.engine.raise(*token, Readiness::ANY);
        }
    }

    fn timeout(&self) {
        self.ready(Readiness::ANY);
    }
}

/// A process that asks.
struct Asker {
    me: Weak<Self>,
    asked: Weak<Asked>,
    socket: Descriptor,
    token: OnceValue<Token>,
    shared: Mutex<Shared, 25>,
}

/// What it has passed.
#[derive(Default)]
struct Shared {
    pair: Option<Arc<Pair>>,
    /// To be passed with the first answer.
    bell: Option<OwnedFd>,
    watched: Option<Token>,
    slabs: Vec<Arc<Slab>>,
    /// Answers for which its socket had no room: it is busy with others.
    unsent: VecDeque<Answer>,
    /// When the last answer was given.
    said_at: Option<Instant>,
    over: bool,
}

impl Shared {
    /// Takes the descriptors that come with a question.
    fn learn(&mut self, asked: &Asked, join: &Join, fds: Vec<OwnedFd>) -> Option<()> {
        let mut fds = fds.into_iter();
        if self.over {
            return None;
        }
        if join.first {
            if self.pair.is_some() {
                return None;
            }
            let board = PeerBoard::open(fds.next()?).ok()?;
            let pair = Arc::new(Pair::new(board, Bell::from_peer(fds.next()?).ok()?));
            let bell = Bell::create().ok()?;
            self.bell = Some(bell.fd().try_clone_to_owned().ok()?);
            self.watched = Some(asked.lanes.watch_bell(&asked.engine, bell).ok()?);
            self.pair = Some(pair);
        }
        if join.new_slab {
            if self.slabs.len() >= MOST_SLABS {
                return None;
            }
            let carries = if join.datagrams { Carries::Datagrams } else { Carries::Streams };
            let slab = Slab::open_for(carries, fds.next()?, self.pair.clone()?).ok()?;
            asked.lanes.add(slab.clone());
            self.slabs.push(slab);
        }
        fds.next().is_none().then_some(())
    }
}

impl Asker {
    /// Takes one question. `None`: there is none now; an error: this process is not heard any more.
    fn take(self: &Arc<Self>, asked: &Arc<Asked>) -> Option<Result<(), ()>> {
        let (mut buffer, mut fds) = ([0; Join::LEN + 1], Vec::new());
        // Locked until its descriptors are known: another thread takes the next question, which may be about
        // this one's slab.
        let mut shared = self.shared.lock();
        let bytes = match receive(&self.socket, &mut buffer, &mut fds) {
            Ok(0) => return Some(Err(())),
            Ok(bytes) => bytes,
            Err(Errno::INTR) => return Some(Ok(())),
            Err(Errno::AGAIN) => return None,
            Err(_) => return Some(Err(())),
        };
        let Some(join) = buffer.get(..bytes).and_then(Join::parse) else { return Some(Err(())) };
        // It may have changed since the stream began, and since the slab that this names was taken.
        if !super::may_be_looked_into() {
            drop(shared);
            asked.state.lock().expected.remove(&join.nonce);
            self.refuse(&join, Why::TheirSandbox);
            return Some(Err(()));
        }
        let learned = shared.learn(asked, &join, fds);
        drop(shared);
        if learned.is_none() {
            self.refuse(&join, Why::NoResources);
            return Some(Err(()));
        }
        if join.datagrams {
            match self.grant_datagrams(asked, &join) {
                Ok(()) => self.say(Answer { nonce: join.nonce, refused: None }),
                Err(why) => self.refuse(&join, why),
            }
            return Some(Ok(()));
        }
        let now = Instant::now();
        let mut state = asked.state.lock();
        if !state.expected.contains_key(&join.nonce) {
            let its_own = state.early.iter().filter(|(asker, ..)| Arc::ptr_eq(asker, self)).count();
            if state.early.len() < MOST_EARLY && its_own < MOST_EARLY_OF_ONE {
                state.early.push((self.clone(), join, now));
                drop(state);
                if its_own == 0 {
                    self.refuse_late(asked);
                }
                // Another thread may have ended it meanwhile, and looked there before.
                if self.shared.lock().over {
                    asked.state.lock().early.retain(|(asker, ..)| !Arc::ptr_eq(asker, self));
                }
                return Some(Ok(()));
            }
        }
        drop(state);
        self.answer(asked, &join);
        Some(Ok(()))
    }

    /// Refuses what will not be attached here any more, and looks again when the next question may be late.
    fn refuse_late(&self, asked: &Asked) {
        let said_at = self.shared.lock().said_at;
        let due = |came: &Instant| said_at.map_or(*came, |said| said.max(*came)) + EARLY;
        let (mut late, now) = (Vec::new(), Instant::now());
        let mut next: Option<Instant> = None;
        asked.state.lock().early.retain(|(asker, join, came)| {
            let is_own = std::ptr::eq(asker.as_ref(), self);
            let is_late = is_own && due(came) <= now;
            if is_late {
                late.push(*join);
            } else if is_own {
                next = Some(next.map_or(due(came), |other| other.min(due(came))));
            }
            !is_late
        });
        late.iter().for_each(|join| self.refuse(join, Why::NotOurs));
        // Answers for which there was no room have a timer that is due sooner.
        if let (Some(next), Some(token), true) =
            (next, self.token.get(), self.shared.lock().unsent.is_empty())
        {
            asked.engine.set_timer(*token, Some(next));
        }
    }

    /// Answers: the connection is attached here, or never will be.
    fn answer(&self, asked: &Asked, join: &Join) {
        let expected = asked.state.lock().expected.remove(&join.nonce);
        let granted = expected.ok_or(Why::NotOurs).and_then(|expected| self.grant(asked, join, expected));
        match granted {
            Ok(()) => self.say(Answer { nonce: join.nonce, refused: None }),
            Err(why) => self.refuse(join, why),
        }
    }

    fn grant(&self, asked: &Asked, join: &Join, expected: Expected) -> Result<(), Why> {
        let Expected { ends: [own, peer], unsettled, answer, .. } = expected;
        let canonical = |end: SocketAddr| SocketAddr::new(end.ip().to_canonical(), end.port());
        if join.ends != [canonical(peer), canonical(own)] {
            return Err(Why::NotOurs);
        }
        answer?;
        let end = self.lane(join, Carries::Streams)?;
        let granted = Granted::wait(&asked.engine, end, unsettled.clone()).ok_or(Why::NoResources)?;
        unsettled.grant(granted);
        Ok(())
    }

    /// This process's end of the lane that is asked for.
    fn lane(&self, join: &Join, carries: Carries) -> Result<End, Why> {
        // Until the lane is claimed: another thread may find that this process is not heard any more.
        let shared = self.shared.lock();
        // It has, and has given back what it has passed.
        if shared.over {
            return Err(Why::NoResources);
        }
        let slab = usize::try_from(join.slab).ok().and_then(|at| shared.slabs.get(at).cloned());
        let slab = slab.filter(|slab| slab.carries() == carries);
        let (Some(slab), Ok(lane)) = (slab, usize::try_from(join.lane)) else { return Err(Why::NotOurs) };
        if !slab.claim_lane(lane) {
            return Err(Why::NotOurs);
        }
        let mut end = End::new(slab, lane);
        drop(shared);
        end.agreed();
        Ok(end)
    }

    /// For datagrams between two ports. Who asks has received at his what was sent to it alone.
    fn grant_datagrams(&self, asked: &Asked, join: &Join) -> Result<(), Why> {
        let [peer, own] = join.ends;
        asked.words.take([own, peer], join.nonce)?;
        let nic = asked.nic.upgrade().ok_or(Why::NotOurs)?;
        let port = nic.served_datagram_port(own.port()).ok_or(Why::NotOurs)?;
        let end = self.lane(join, Carries::Datagrams)?;
        port.rings().accept([own, peer], join.nonce, end)
    }

    fn refuse(&self, join: &Join, why: Why) {
        self.say(Answer { nonce: join.nonce, refused: Some(why) });
    }

    fn say(&self, answer: Answer) {
        let Some(asked) = self.asked.upgrade() else { return };
        let mut shared = self.shared.lock();
        shared.said_at = Some(Instant::now());
        // Nothing of this process's for who is refused because of that.
        let bell = shared.bell.take().filter(|_| answer.refused != Some(Why::TheirSandbox));
        let fds: Vec<BorrowedFd<'_>> =
            bell.iter().flat_map(|bell| [asked.lanes.board(), bell.as_fd()]).collect();
        if shared.unsent.is_empty() && send(&self.socket, &answer.to_bytes(), &fds) != Err(Errno::AGAIN) {
            return;
        }
        if shared.unsent.len() < MOST_UNSENT {
            shared.unsent.push_back(answer);
        }
        self.send_soon(&asked);
    }

    fn send_soon(&self, asked: &Asked) {
        if let Some(token) = self.token.get() {
            asked.engine.set_timer(*token, Some(Instant::now() + ROOM));
        }
    }

    /// Says what there was no room for. What fails is noticed when the socket is read.
    fn say_more(&self) {
        let Some(asked) = self.asked.upgrade() else { return };
        let mut shared = self.shared.lock();
        while let Some(answer) = shared.unsent.front() {
            if send(&self.socket, &answer.to_bytes(), &[]) == Err(Errno::AGAIN) {
                return self.send_soon(&asked);
            }
            shared.unsent.pop_front();
        }
    }

    /// This process is not heard any more. Streams that use its lanes go on.
    fn end(&self) {
        let passed = {
            let mut shared = self.shared.lock();
            if shared.over {
                return;
            }
            std::mem::replace(&mut *shared, Shared { over: true, ..Shared::default() })
        };
        let Some(asked) = self.asked.upgrade() else { return };
        {
            let mut state = asked.state.lock();
            state.askers -= 1;
            state.early.retain(|(asker, ..)| !std::ptr::eq(asker.as_ref(), self));
        }
        passed.pair.iter().for_each(|pair| pair.end());
        end_datagrams(&asked.engine, &passed.slabs);
        Fading::begin(&asked.engine, &asked.lanes, passed.slabs, passed.watched);
        if let Some(token) = self.token.get() {
            asked.engine.deregister(*token);
        }
    }
}

impl Source for Asker {
    fn ready(&self, _: Readiness) {
        let (Some(asked), Some(me)) = (self.asked.upgrade(), self.me.upgrade()) else { return };
        for _ in 0..TURN {
            match me.take(&asked) {
                Some(Ok(())) => {}
                Some(Err(())) => return self.end(),
                None => return,
            }
        }
        if let Some(token) = self.token.get() {
            asked.engine.raise(*token, Readiness::ANY);
        }
    }

    fn timeout(&self) {
        // This process may be the one that is late.
        self.ready(Readiness::ANY);
        let is_silent = self.shared.lock().pair.is_none();
        if is_silent {
            return self.end();
        }
        self.say_more();
        if let Some(asked) = self.asked.upgrade() {
            self.refuse_late(&asked);
        }
    }
}

/// A lane that was granted, beside the connection that the stream was attached with. The initiator's first
/// byte comes over one of the two.
pub struct Granted {
    engine: Arc<Engine>,
    token: OnceValue<Token>,
    waiting: Mutex<Option<(End, Unsettled)>, 26>,
}

impl Granted {
    fn wait(engine: &Arc<Engine>, end: End, unsettled: Unsettled) -> Option<Arc<Self>> {
        let granted =
            Arc::new(Self { engine: engine.clone(), token: OnceValue::new(), waiting: Mutex::new(None) });
        let token = engine.register_watch(Watch::Itself, granted.clone()).ok()?;
        granted.token.get_or_make(|| token);
        end.set_name(token.0);
        *granted.waiting.lock() = Some((end, unsettled));
        engine.set_timer(token, Some(Instant::now() + GRANTED));
        Some(granted)
    }

    /// The lane, if the initiator has used it. The caller settles the stream.
    pub(crate) fn take_used(&self) -> Option<End> {
        if self.is_used() { self.take().map(|(end, _)| end) } else { None }
    }

    fn is_used(&self) -> bool {
        self.waiting.lock().as_ref().is_some_and(|(end, _)| end.is_used_by_peer())
    }

    fn take(&self) -> Option<(End, Unsettled)> {
        let waiting = self.waiting.lock().take()?;
        if let Some(token) = self.token.get() {
            self.engine.deregister(*token);
        }
        Some(waiting)
    }
}

impl Source for Granted {
    fn ready(&self, _: Readiness) {
        // It may be a report of the lane's earlier use.
        let used = self.is_used().then(|| self.take()).flatten();
        if let Some((end, unsettled)) = used {
            return unsettled.settle(end);
        }
        // The initiator has not heard the answer in time: the connection has what it sends.
        if self.waiting.lock().as_ref().is_some_and(|(end, _)| end.is_declined_by_peer()) {
            drop(self.take());
        }
    }

    fn timeout(&self) {
        let unsettled = self.waiting.lock().as_ref().map(|(_, unsettled)| unsettled.clone());
        let (Some(unsettled), Some(token)) = (unsettled, self.token.get()) else { return };
        if unsettled.is_open() {
            return self.engine.set_timer(*token, Some(Instant::now() + GRANTED));
        }
        // The initiator has decided for its connection, or has ended it.
        drop(self.take());
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use uwarp_llp::memory::board::Board;

    use super::*;
    use crate::qp::StreamNumber;

    /// One question brings a slab, and the next one is about it: who takes that meanwhile must wait.
    #[test]
    fn two_threads_take_the_questions_of_one_process() {
        let engine = Arc::new(Engine::new().unwrap());
        let lanes = Lanes::start(&engine).unwrap();
        let key = HostKey { incarnation: random(), key: random() };
        let asked = Asked::listen(&engine, &lanes, key, Weak::new()).unwrap();
        let (initiator, pair) = (connect(&key), Arc::<Pair>::default());
        let (board, bell) = (Board::create().unwrap(), Bell::create().unwrap());
        let ends = [1, 2].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));

        let over = AtomicBool::new(false);
        let answers = std::thread::scope(|threads| {
            for _ in 0..2 {
                threads.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        engine.poll_once();
                    }
                });
            }
            let answers: Vec<_> = (0..500_u32)
                .flat_map(|slab| {
                    let (_, passed) = Slab::create(pair.clone()).unwrap();
                    for lane in 0..4_u32 {
                        let nonce = u128::from(slab * 4 + lane).to_ne_bytes();
                        let unsettled = Unsettled { qp: Weak::new(), number: StreamNumber::default() };
                        asked.expect(nonce, [ends[1], ends[0]], unsettled);
                        let (new_slab, first) = (lane == 0, lane == 0 && slab == 0);
                        let join = Join { nonce, ends, slab, lane, first, new_slab, datagrams: false };
                        let fds = [board.fd(), bell.fd(), passed.as_fd()];
                        let from = if first {
                            0
                        } else if new_slab {
                            2
                        } else {
                            3
                        };
                        send(&initiator, &join.to_bytes(), &fds[from..]).unwrap();
                    }
                    answers(&initiator, 4)
                })
                .collect();
            over.store(true, Ordering::Relaxed);
            answers
        });
        let granted = answers.iter().filter(|answer| answer.is_none()).count();
        assert_eq!(granted, 2000, "{:?}", answers.iter().flatten().next());
    }

    fn answers(initiator: &OwnedFd, all: usize) -> Vec<Option<Why>> {
        let (mut answers, until) = (Vec::new(), Instant::now() + Duration::from_secs(20));
        while answers.len() < all && Instant::now() < until {
            let (mut buffer, mut fds) = ([0; Answer::LEN], Vec::new());
            match receive(initiator, &mut buffer, &mut fds) {
                Ok(_) => answers.extend(Answer::parse(&buffer).map(|answer| answer.refused)),
                Err(_) => std::thread::yield_now(),
            }
        }
        answers
    }

    fn random() -> [u8; 16] {
        std::array::from_fn(|_| uwarp_rnic::mr::random_u32().unwrap().to_ne_bytes()[0])
    }

    fn connect(key: &HostKey) -> OwnedFd {
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &name(&key.incarnation).unwrap()).unwrap();
        socket
    }
}
