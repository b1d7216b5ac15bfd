//! The descriptor that the program has for a socket that a rule chose: one end of a pair of Unix sockets.
//!
//! Nothing is sent through the pair. It is kept in the state in which poll(2) and its like say of the
//! program's end what they would say of a TCP socket, by what lies in its two buffers and by the state of the
//! other end:
//!
//! | the socket | the pair |
//! |---|---|
//! | can be read | a byte is on its way to the program's end |
//! | cannot be written | the buffer from the program's end to the other one is full |
//! | the peer has ended its direction (`POLLRDHUP`) | the other end does not send any more |
//! | is closed in both directions (`POLLHUP`) | the other end is shut in both |
//! | has failed (`POLLERR`) | the other end is closed with a byte unread |
//!
//! Only what the library itself puts there fills the buffer to the other end. Anything more was written by a
//! process that has inherited the program's end.
//!
//! So the kernel answers poll, select and epoll, with sets of any kind, edges, one-shot and exclusive
//! members, and sets within sets; and it has all of that also in the sets of programs that do not call libc.

use std::ffi::c_int;
use std::sync::atomic::{AtomicI32, Ordering};

use uwarp_abi_types::preload::{NOTHING_NEW, SOMETHING_NEW};
use uwarp_process::Mutex;

use crate::{fds, sys};

struct Pair {
    /// A second descriptor of the program's end.
    near: c_int,
    far: c_int,
    /// Bytes of this library that lie before the other end.
    filled: usize,
    /// There were bytes of another process among them.
    foreign: bool,
    readable: bool,
    writable: bool,
    done: bool,
    hung_up: bool,
    failed: bool,
}

/// A stand-in; nothing once it is closed.
pub struct StandIn {
    pair: Mutex<Option<Pair>, 3>,
    /// `Pair::near` and `Pair::far`, for a child, in which nobody unlocks what another thread had locked.
    near: AtomicI32,
    far: AtomicI32,
}

/// The other end of a stand-in that is like any pair from now on.
pub struct Far {
    /// Its descriptor.
    pub fd: c_int,
    /// Another process has written before.
    pub foreign: bool,
}

impl Far {
    /// Whether nobody has the program's end any more.
    pub fn is_alone(&self) -> bool {
        sys::ready_for(self.fd, libc::POLLIN) & libc::POLLHUP != 0
    }
}

impl Drop for Far {
    fn drop(&mut self) {
        discard(self.fd);
    }
}

/// Why a change is shown.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Because {
    /// The program has called something.
    Call,
    /// The program has received. With edges, what is left or has come meanwhile is a new edge: programs take
    /// a short read for the end of what there was.
    Receive,
    /// The program could not send all that it wanted. With edges, room that has come meanwhile is a new edge.
    Blocked,
    /// Something has come from the network.
    Network,
}

fn out_of_the_way(fd: c_int) -> Result<c_int, c_int> {
    let moved = sys::second(fd);
    if let Ok(moved) = moved {
        fds::enter_own(moved);
    }
    moved
}

fn discard(fd: c_int) {
    if fd >= 0 {
        fds::forget(fd);
        sys::close(fd);
    }
}

impl StandIn {
    /// A stand-in, and the program's end of it.
    pub fn new() -> Result<(Self, c_int), c_int> {
        let [program, other] = sys::pair()?;
        let near = out_of_the_way(program);
        let far = out_of_the_way(other);
        sys::close(other);
        match (near, far) {
            (Ok(near), Ok(far)) => {
                let pair = Pair {
                    near,
                    far,
                    filled: 0,
                    foreign: false,
                    readable: false,
                    writable: true,
                    done: false,
                    hung_up: false,
                    failed: false,
                };
                let (near, far) = (AtomicI32::new(near), AtomicI32::new(far));
                Ok((Self { pair: Mutex::new(Some(pair)), near, far }, program))
            }
            (near, far) => {
                let errno = near.err().or(far.err());
                [near, far].into_iter().flatten().for_each(discard);
                sys::close(program);
                Err(errno.unwrap_or(libc::EMFILE))
            }
        }
    }

    /// Shows what `look` says, in poll(2)'s bits. Only one thread looks and shows at a time, so what is shown
    /// last was seen last.
    pub fn show(&self, because: Because, edges: bool, look: impl FnOnce() -> Option<i16>) {
        let mut pair = self.pair.lock();
        if let (Some(pair), Some(bits)) = (&mut *pair, look()) {
            sys::quietly(|| pair.show(bits, because, edges));
        }
    }

    /// Sets or clears a flag of the descriptor's file: `O_NONBLOCK` is the kernel's.
    pub fn set_flag(&self, flag: c_int, on: bool) {
        if let Some(pair) = &*self.pair.lock() {
            let flags = sys::quietly(|| sys::fcntl(pair.near, libc::F_GETFL, 0)).unwrap_or(0);
            let flags = if on { flags | flag } else { flags & !flag };
            let _ = sys::quietly(|| sys::fcntl(pair.near, libc::F_SETFL, flags));
        }
    }

    /// Whether it shows an end that cannot be taken back.
    pub fn has_ended(&self) -> bool {
        self.pair.lock().as_ref().is_none_or(|pair| pair.done || pair.hung_up || pair.failed)
    }

    /// Takes the place of another one.
    pub fn take_over(&self, other: Self) {
        let new = other.pair.into_inner();
        self.near.store(new.as_ref().map_or(-1, |pair| pair.near), Ordering::Release);
        self.far.store(new.as_ref().map_or(-1, |pair| pair.far), Ordering::Release);
        let old = std::mem::replace(&mut *self.pair.lock(), new);
        if let Some(old) = old {
            discard(old.near);
            discard(old.far);
        }
    }

    /// Ends it, all but the program's own descriptors. Sets of epoll forget a socket when its last descriptor
    /// is closed, so this comes before the program's.
    pub fn close(&self) {
        if let Some(pair) = self.pair.lock().take() {
            self.near.store(-1, Ordering::Release);
            self.far.store(-1, Ordering::Release);
            discard(pair.near);
            discard(pair.far);
        }
    }

    /// Gives the other end away, with nothing of the library's in the pair. `None`: there is none any more.
    pub fn give_away(&self) -> Option<Far> {
        let mut pair = self.pair.lock().take()?;
        self.near.store(-1, Ordering::Release);
        sys::take_all(pair.near);
        discard(pair.near);
        if pair.far < 0 {
            return None;
        }
        Some(Far { fd: pair.far, foreign: pair.is_foreign() })
    }

    /// Whether another process has written to the program's end.
    pub fn is_foreign(&self) -> bool {
        self.pair.lock().as_mut().is_some_and(Pair::is_foreign)
    }

    /// In a child: as long as it has copies, the parent cannot see whether somebody uses the program's end,
    /// and the child would not see the parent's end.
    pub fn close_copy(&self) {
        discard(self.near.swap(-1, Ordering::AcqRel));
        discard(self.far.swap(-1, Ordering::AcqRel));
    }
}

impl Pair {
    fn show(&mut self, bits: i16, because: Because, edges: bool) {
        if self.failed {
            if bits & libc::POLLERR == 0 {
                // Takes the pair's own error, as the program has taken the socket's.
                let _ = sys::option(self.near, libc::SOL_SOCKET, libc::SO_ERROR);
            }
            return;
        }
        let writable = bits & (libc::POLLOUT | libc::POLLHUP | libc::POLLERR) != 0;
        self.show_writable(writable, edges && because == Because::Blocked);
        if bits & libc::POLLERR != 0 && !self.hung_up {
            self.failed = true;
            sys::put(self.near, &[0]);
            discard(self.far);
            self.far = -1;
            return;
        }
        // An end first, so that it and its being readable are one event.
        if bits & libc::POLLHUP != 0 && !self.hung_up {
            (self.done, self.hung_up) = (true, true);
            sys::shut(self.far, libc::SHUT_RDWR);
        } else if bits & libc::POLLRDHUP != 0 && !self.done {
            self.done = true;
            sys::shut(self.far, libc::SHUT_WR);
        }
        let came = match because {
            Because::Receive => true,
            // More than data comes from there: what was sent has arrived, for example.
            Because::Network => bits & NOTHING_NEW == 0,
            // It has come during the call.
            Because::Call | Because::Blocked => bits & SOMETHING_NEW != 0,
        };
        self.show_readable(bits & libc::POLLIN != 0, edges && came);
    }

    fn show_writable(&mut self, writable: bool, edge: bool) {
        if writable == self.writable {
            if writable && edge && sys::put(self.near, &[0]) {
                // The kernel tells of the room that this leaves.
                sys::take_all(self.far);
            }
            return;
        }
        self.writable = writable;
        if writable {
            self.is_foreign();
        } else {
            let block = [0_u8; 4096];
            while sys::ready_for(self.near, libc::POLLOUT) & libc::POLLOUT != 0
                && let Ok(bytes @ 1..) = sys::send_now(self.near, &block)
            {
                self.filled += bytes;
            }
        }
    }

    /// Takes what lies before the other end, and says whether there was ever anything of another process.
    fn is_foreign(&mut self) -> bool {
        if self.far >= 0 {
            self.foreign |= sys::take_all(self.far) > std::mem::take(&mut self.filled);
        }
        self.foreign
    }

    fn show_readable(&mut self, readable: bool, edge: bool) {
        if self.done {
            // Always readable.
            return;
        }
        if readable && (edge || !self.readable) {
            if !sys::put(self.far, &[0]) {
                sys::take_all(self.near);
                sys::put(self.far, &[0]);
            }
        } else if !readable && self.readable {
            sys::take_all(self.near);
        }
        self.readable = readable;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: i16 = libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP;

    fn shown(bits: &[i16]) -> Vec<i16> {
        let (stand_in, program) = StandIn::new().unwrap();
        let after = |bits: &i16| {
            stand_in.show(Because::Call, false, || Some(*bits));
            sys::ready_for(program, ALL)
        };
        let seen = bits.iter().map(after).collect();
        stand_in.close();
        sys::close(program);
        seen
    }

    #[test]
    fn poll_says_of_a_stand_in_what_was_shown() {
        use libc::{POLLHUP, POLLIN, POLLOUT, POLLRDHUP};
        let open = [0, POLLIN, POLLOUT, 0, POLLIN | POLLOUT, POLLOUT, POLLIN, 0, POLLOUT];
        assert_eq!(shown(&open), open);
        let half = [POLLOUT, POLLIN | POLLOUT | POLLRDHUP, POLLIN | POLLRDHUP, POLLIN | POLLOUT | POLLRDHUP];
        assert_eq!(shown(&half), half);
        let ended = POLLIN | POLLOUT | POLLRDHUP | POLLHUP;
        assert_eq!(shown(&[0, ended]), [0, ended]);
        assert_eq!(shown(&[POLLIN, ended]), [POLLIN, ended]);
    }

    #[test]
    fn a_failure_is_an_error_until_it_is_taken() {
        use libc::{POLLERR, POLLHUP, POLLIN, POLLOUT, POLLRDHUP};
        let failed = POLLIN | POLLOUT | POLLERR;
        let after = POLLIN | POLLOUT | POLLRDHUP | POLLHUP;
        assert_eq!(shown(&[0, failed, after]), [0, after | POLLERR, after]);
    }

    /// Room came between a send that found none and the look after it: no edge told of it, and the program
    /// slept for ever.
    #[test]
    fn room_after_a_blocked_send_is_an_edge() {
        let (stand_in, program) = StandIn::new().unwrap();
        let set = sys::epoll().unwrap();
        sys::epoll_add(set, program, (libc::EPOLLOUT | libc::EPOLLET) as u32, 7).unwrap();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let mut edge = |because| {
            stand_in.show(because, true, || Some(libc::POLLOUT));
            sys::epoll_wait(set, &mut events, Some(std::time::Instant::now()))
        };
        assert_eq!(edge(Because::Call), 1, "the first time");
        assert_eq!(edge(Because::Call), 0);
        assert_eq!(edge(Because::Blocked), 1);
        assert_eq!(edge(Because::Network), 0);
        stand_in.close();
        sys::close(program);
        sys::close(set);
    }

    /// A late acknowledgement of what the program had sent was an edge of data that it had not read yet.
    #[test]
    fn what_brings_no_byte_is_no_edge() {
        let (stand_in, program) = StandIn::new().unwrap();
        let set = sys::epoll().unwrap();
        sys::epoll_add(set, program, (libc::EPOLLIN | libc::EPOLLET) as u32, 7).unwrap();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 4];
        let mut edge = |because, news| {
            stand_in.show(because, true, || Some(libc::POLLIN | libc::POLLOUT | news));
            sys::epoll_wait(set, &mut events, Some(std::time::Instant::now()))
        };
        assert_eq!(edge(Because::Network, SOMETHING_NEW), 1);
        assert_eq!(edge(Because::Network, NOTHING_NEW), 0);
        assert_eq!(edge(Because::Call, NOTHING_NEW), 0);
        assert_eq!(edge(Because::Call, SOMETHING_NEW), 1, "it came during the call");
        assert_eq!(edge(Because::Receive, NOTHING_NEW), 1, "what is left");
        assert_eq!(edge(Because::Network, 0), 1, "not known");
        stand_in.close();
        sys::close(program);
        sys::close(set);
    }

    #[test]
    fn edges_come_again_without_end() {
        let (stand_in, program) = StandIn::new().unwrap();
        for _ in 0..2000 {
            stand_in.show(Because::Network, true, || Some(libc::POLLIN | libc::POLLOUT));
            assert_ne!(sys::ready_for(program, ALL) & libc::POLLIN, 0);
        }
        stand_in.show(Because::Receive, true, || Some(libc::POLLOUT));
        assert_eq!(sys::ready_for(program, ALL), libc::POLLOUT);
        stand_in.close();
        sys::close(program);
    }
}
