//! A process that this one asks for memory: the initiator's part.

use std::net::SocketAddr;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
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
use super::{ANSWER, Wants, Why, end_datagrams, is_same_user, name, receive, send};
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
}

struct Waiting {
    nonce: [u8; 16],
    end: End,
    wants: Wants,
    until: Instant,
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
        };
        let asking = Arc::new(Self {
            engine: engine.clone(),
            lanes: lanes.clone(),
            token: OnceValue::new(),
            over: AtomicBool::new(false),
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

    /// Asks for a lane instead of this connection, or beside these ports.
    pub fn ask(&self, nonce: [u8; 16], ends: [SocketAddr; 2], wants: Wants) -> Result<(), (Why, Wants)> {
        let mut state = self.state.lock();
        if self.is_over() {
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
        let mut fds = Vec::new();
        if let Some((_, bell)) = &first {
            fds.extend([board, bell.as_fd()]);
        }
        fds.extend(new.as_ref().map(|slab| slab.as_fd()));
        let sent = state.socket.as_ref().map_or(Err(Errno::PIPE), |to| send(to, &join.to_bytes(), &fds));
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
            Ok(0) => return Some(Err(Why::NotHere)),
            Ok(bytes) => bytes,
            Err(Errno::INTR) => return Some(Ok(())),
            Err(Errno::AGAIN) => return None,
            Err(_) => return Some(Err(Why::NotHere)),
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
        self.set_timer(&state);
        drop(state);
        let Waiting { mut end, wants, .. } = waiting;
        match answer.refused {
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
        let State { socket, waiting, slabs, watched, pair, .. } = {
            let mut state = self.state.lock();
            if self.over.swap(true, Ordering::AcqRel) {
                return;
            }
            std::mem::take(&mut *state)
        };
        if let Some(token) = self.token.get() {
            self.engine.deregister(*token);
        }
        drop(socket);
        for Waiting { end, wants, .. } in waiting {
            drop(end);
            wants.stay(why);
        }
        pair.end();
        end_datagrams(&self.engine, &slabs);
        Fading::begin(&self.engine, &self.lanes, slabs, watched);
    }
}

/// A question was not sent.
fn not_sent(error: Errno) -> Why {
    match error {
        Errno::AGAIN => Why::Silent,
        Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN => Why::NotHere,
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
        let now = Instant::now();
        let mut state = self.state.lock();
        let (late, waiting): (Vec<_>, _) =
            std::mem::take(&mut state.waiting).into_iter().partition(|w| w.until <= now);
        state.waiting = waiting;
        let is_idle = late.is_empty() && state.waiting.is_empty() && state.slabs.iter().all(has_no_streams);
        self.set_timer(&state);
        drop(state);
        if !late.is_empty() || is_idle {
            late.into_iter().for_each(|waiting| waiting.wants.stay(Why::Silent));
            self.end(Why::Silent);
        }
    }
}
