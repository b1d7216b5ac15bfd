//! A process that this one asks for memory: the initiator's part.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use uwarp_llp::memory::board::PeerBoard;
use uwarp_llp::memory::lane::End;
use uwarp_llp::memory::pair::{Bell, Pair};
use uwarp_llp::memory::slab::{Carries, Slab};
use uwarp_mem::shared::Refused;
use uwarp_process::{Descriptor, Mutex, OnceValue};

use super::fading::{Fading, has_no_streams};
use super::words::{Answer, Join};
use super::{AFTER_FAILURE, ANSWER, Wants, Why, end_datagrams, is_same_user, name, receive, send};
use crate::engine::Engine;
use crate::lanes::Lanes;
use crate::source::{Interest, Readiness, Source, Token};

/// A process that is asked nothing, and with which no stream goes on, is left after this time.
const IDLE: Duration = Duration::from_secs(2);

pub(super) struct Asking {
    engine: Arc<Engine>,
    lanes: Arc<Lanes>,
    token: OnceValue<Token>,
    over: AtomicBool,
    /// It was left because nobody needed it.
    idle: AtomicBool,
    state: Mutex<State, 26>,
}

#[derive(Default)]
struct State {
    /// `None`: this is over.
    socket: Option<Descriptor>,
    pair: Arc<Pair>,
    /// Wakes this process; passed with the first question.
    bell: Option<(Bell, OwnedFd)>,
    watched: Option<Token>,
    slabs: Vec<Arc<Slab>>,
    waiting: Vec<Waiting>,
    /// Questions for which the socket had no room, with the slab that is passed: they go out when the process
    /// has answered one. Those before them are in its socket.
    unsent: VecDeque<(Join, Option<OwnedFd>)>,
    /// It has not answered: until then, or until it does, nothing more is asked.
    silent: Option<Instant>,
}

struct Waiting {
    nonce: [u8; 16],
    end: End,
    wants: Wants,
    until: Instant,
}

impl Waiting {
    fn stay(self, why: Why) {
        let Self { end, wants, .. } = self;
        wants.stay(why);
        // The responder may have granted it.
        drop(end);
    }
}

impl Asking {
    pub fn begin(engine: &Arc<Engine>, lanes: &Arc<Lanes>, incarnation: &[u8; 16]) -> Result<Arc<Self>, Why> {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = Descriptor::made(|| {
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
        })
        .map_err(|_| Why::NoResources)?;
        let name = name(incarnation).map_err(|_| Why::NotHere)?;
        match rustix::net::connect(&socket, &name) {
            Ok(()) => {}
            Err(Errno::CONNREFUSED) => return Err(Why::NotHere),
            Err(Errno::AGAIN) => return Err(Why::Silent),
            Err(_) => return Err(Why::NoResources),
        }
        if !is_same_user(&socket) {
            return Err(Why::AnotherUser);
        }
        let bell = Bell::create().map_err(|_| Why::NoResources)?;
        let copy = bell.fd().try_clone_to_owned().map_err(|_| Why::NoResources)?;
        let fd = socket.as_fd().as_raw_fd();
        let state = State {
            socket: Some(socket),
            pair: Arc::new(Pair::default()),
            bell: Some((bell, copy)),
            watched: None,
            slabs: Vec::new(),
            waiting: Vec::new(),
            unsent: VecDeque::new(),
            silent: None,
        };
        let asking = Arc::new(Self {
            engine: engine.clone(),
            lanes: lanes.clone(),
            token: OnceValue::new(),
            over: AtomicBool::new(false),
            idle: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        let token = engine.register_for(fd, asking.clone(), Interest::Input).map_err(|_| Why::NoResources)?;
        asking.token.get_or_make(|| token);
        Ok(asking)
    }

    /// Whether this socket is of no use any more.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether it was left because nobody needed it: who needs it now begins anew.
    pub fn was_idle(&self) -> bool {
        self.idle.load(Ordering::Acquire)
    }

    /// Asks for a lane instead of this connection, or beside these ports.
    pub fn ask(&self, nonce: [u8; 16], ends: [SocketAddr; 2], wants: Wants) -> Result<(), (Why, Wants)> {
        let mut state = self.state.lock();
        if self.is_over() {
            return Err((Why::Closed, wants));
        }
        if state.silent.is_some_and(|until| Instant::now() < until) {
            return Err((Why::Silent, wants));
        }
        let carries = wants.carries();
        let mut free = state.slabs.iter().enumerate().filter(|(_, slab)| slab.carries() == carries);
        let free = free.find_map(|(i, slab)| Some((i, slab.take_lane()?)));
        let mut new = None;
        let (slab, lane) = match free {
            Some(free) => free,
            None => {
                let Ok((slab, fd)) = Slab::create_for(carries, state.pair.clone()) else {
                    return Err((Why::NoResources, wants));
                };
                let Some(lane) = slab.take_lane() else { return Err((Why::NoResources, wants)) };
                self.lanes.add(slab.clone());
                state.slabs.push(slab);
                new = Some(fd);
                (state.slabs.len() - 1, lane)
            }
        };
        let (Ok(number), Ok(which)) = (u32::try_from(slab), u32::try_from(lane)) else {
            return Err((Why::NoResources, wants));
        };
        let Some(at) = state.slabs.get(slab).cloned() else { return Err((Why::NoResources, wants)) };
        let end = End::new(at, lane);
        let first = state.bell.take();
        let join = Join {
            nonce,
            ends,
            slab: number,
            lane: which,
            first: first.is_some(),
            new_slab: new.is_some(),
            datagrams: carries == Carries::Datagrams,
        };
        let board = self.lanes.board();
        let bell = first.as_ref().map(|(_, bell)| [board, bell.as_fd()]);
        let sent = match state.unsent.is_empty() {
            true => state.send(&join, bell, new.as_ref()),
            false => Err(Errno::AGAIN),
        };
        let sent = match sent {
            Err(Errno::AGAIN) if first.is_none() => {
                state.unsent.push_back((join, new));
                Ok(())
            }
            sent => sent,
        };
        let failed = match first.map(|(bell, _)| self.lanes.watch_bell(&self.engine, bell)) {
            Some(Err(_)) => Some(Why::NoResources),
            Some(Ok(token)) => {
                state.watched = Some(token);
                sent.err().map(not_sent)
            }
            None => sent.err().map(not_sent),
        };
        if let Some(why) = failed {
            drop((state, end));
            self.end(why);
            return Err((why, wants));
        }
        let until = Instant::now() + ANSWER;
        state.waiting.push(Waiting { nonce, end, wants, until });
        self.set_timer(&state);
        Ok(())
    }

    fn set_timer(&self, state: &State) {
        let first = state.waiting.iter().map(|waiting| waiting.until).min();
        if let Some(token) = self.token.get() {
            self.engine.set_timer(*token, first.or_else(|| Some(Instant::now() + IDLE)));
        }
    }

    /// Takes one answer. `None`: there is none now.
    fn take_answer(&self) -> Option<Result<(), Why>> {
        let (mut buffer, mut fds) = ([0; Answer::LEN + 1], Vec::new());
        let mut state = self.state.lock();
        let bytes = match receive(state.socket.as_ref()?, &mut buffer, &mut fds) {
            Ok(0) => return Some(Err(Why::Closed)),
            Ok(bytes) => bytes,
            Err(Errno::INTR) => return Some(Ok(())),
            Err(Errno::AGAIN) => return None,
            Err(Errno::MFILE | Errno::NOMEM | Errno::NOBUFS) => return Some(Err(Why::NoResources)),
            Err(_) => return Some(Err(Why::Closed)),
        };
        let Some(answer) = buffer.get(..bytes).and_then(Answer::parse) else {
            return Some(Err(Why::Version));
        };
        if let Ok([board, bell]) = <[OwnedFd; 2]>::try_from(fds) {
            match (PeerBoard::open(board), Bell::from_peer(bell)) {
                (Ok(board), Ok(bell)) => state.pair.learn(board, bell),
                (Err(Refused::System(_)), _) => return Some(Err(Why::NoResources)),
                _ => return Some(Err(Why::Version)),
            }
        }
        let at = state.waiting.iter().position(|waiting| waiting.nonce == answer.nonce);
        // It comes too late, or nobody has asked.
        let Some(waiting) = at.map(|at| state.waiting.swap_remove(at)) else { return Some(Ok(())) };
        let known = state.pair.is_known();
        state.silent = None;
        // It answers one after the other, so the others wait anew.
        let now = Instant::now();
        for waiting in &mut state.waiting {
            waiting.until = now + ANSWER;
        }
        self.set_timer(&state);
        state.send_more();
        drop(state);
        let Waiting { mut end, wants, .. } = waiting;
        match answer.refused {
            // It may have changed since this process has asked.
            None if known && !super::may_be_looked_into() => wants.stay(Why::Sandbox),
            None if known => {
                end.agreed();
                wants.settle(end);
            }
            None => wants.stay(Why::Version),
            Some(why) => wants.stay(why),
        }
        Some(Ok(()))
    }

    /// Nothing more comes of this socket. Streams that use lanes go on.
    fn end(&self, why: Why) {
        let mut state = self.state.lock();
        let ended = self.close(&mut state);
        drop(state);
        if let Some(ended) = ended {
            self.leave(ended, why);
        }
    }

    /// From now on nobody asks here. Returns what is to be left, unless that was done before.
    fn close(&self, state: &mut State) -> Option<State> {
        let was_over = self.over.swap(true, Ordering::AcqRel);
        (!was_over).then(|| std::mem::take(state))
    }

    fn leave(&self, ended: State, why: Why) {
        let State { socket, waiting, slabs, watched, pair, .. } = ended;
        if let Some(token) = self.token.get() {
            self.engine.deregister(*token);
        }
        drop(socket);
        for waiting in waiting {
            waiting.stay(why);
        }
        pair.end();
        end_datagrams(&self.engine, &slabs);
        Fading::begin(&self.engine, &self.lanes, slabs, watched);
    }
}

impl State {
    /// `bell`: the board, and what rings for this process.
    fn send(
        &self,
        join: &Join,
        bell: Option<[BorrowedFd<'_>; 2]>,
        new: Option<&OwnedFd>,
    ) -> Result<(), Errno> {
        let mut fds: Vec<_> = bell.into_iter().flatten().collect();
        fds.extend(new.map(|slab| slab.as_fd()));
        self.socket.as_ref().map_or(Err(Errno::PIPE), |to| send(to, &join.to_bytes(), &fds))
    }

    /// What fails is noticed when the socket is read.
    fn send_more(&mut self) {
        while let Some((join, new)) = self.unsent.front() {
            if self.send(join, None, new.as_ref()).is_err() {
                return;
            }
            self.unsent.pop_front();
        }
    }
}

/// A question was not sent.
fn not_sent(error: Errno) -> Why {
    match error {
        Errno::AGAIN => Why::Silent,
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Why::Closed,
        _ => Why::NoResources,
    }
}

impl Source for Asking {
    fn ready(&self, _: Readiness) {
        while let Some(taken) = self.take_answer() {
            if let Err(why) = taken {
                return self.end(why);
            }
        }
    }

    fn timeout(&self) {
        // This process may be the one that is late.
        self.ready(Readiness::ANY);
        if self.is_over() {
            return;
        }
        let now = Instant::now();
        let mut state = self.state.lock();
        let (late, waiting): (Vec<_>, _) =
            std::mem::take(&mut state.waiting).into_iter().partition(|w| w.until <= now);
        state.waiting = waiting;
        if !late.is_empty() {
            state.silent = Some(now + AFTER_FAILURE);
        }
        let is_idle = late.is_empty() && state.waiting.is_empty() && state.slabs.iter().all(has_no_streams);
        // Who has answered before goes on with what it has.
        let is_over = is_idle || !late.is_empty() && !state.pair.is_known();
        // Closed before it is unlocked: another thread may be about to ask.
        self.idle.store(is_idle, Ordering::Release);
        let ended = if is_over { self.close(&mut state) } else { None };
        if ended.is_none() {
            self.set_timer(&state);
        }
        drop(state);
        late.into_iter().for_each(|waiting| waiting.stay(Why::Silent));
        if let Some(ended) = ended {
            self.leave(ended, Why::Silent);
        }
    }
}
