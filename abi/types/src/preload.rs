//! Options of rsockets for `libuwarp-sockets.so`: how it learns that a socket has become ready, without a
//! thread that waits. Private: both are of one build.

use std::ffi::c_int;

/// For `rsocket`, beside its type: the number is no descriptor's, nor are those of connections that it
/// accepts. Programs never see it.
pub const UWARP_NO_DESCRIPTOR: c_int = 1 << 28;
/// Level of these options.
pub const SOL_UWARP_PRELOAD: c_int = 0x5557_0000;
/// To set, a [`watch`].
pub const UWARP_WATCH: c_int = 1;
/// To get, a `c_int`: poll(2)'s bits of what the socket is ready for now. The next change is reported. If the
/// variable is not 0 before, each change is, and of a stream one of the two below is among the bits.
pub const UWARP_LOOK: c_int = 2;
/// Bytes have come since the last look of this kind. No bit of poll(2)'s.
pub const SOMETHING_NEW: i16 = 0x4000;
/// No byte has. No bit of poll(2)'s.
pub const NOTHING_NEW: i16 = 0x0800;
/// To get, a `c_int`: bytes that can be read.
pub const UWARP_UNREAD: c_int = 3;
/// To set, a [`take_over`]: the connection that was prepared becomes this socket's.
pub const UWARP_TAKE_OVER: c_int = 4;
/// To set before that, the same: all is made that it needs. -1 as the descriptor: it will not
/// follow, or is not wanted any more: then it runs already, or never will.
pub const UWARP_PREPARE: c_int = 8;
/// To get, a `c_int`: what has become of that. 0: nothing yet; 1: the stream runs, or has run; below: an
/// errno, negative.
pub const UWARP_JOINED: c_int = 5;
/// To get, a [`progress`].
pub const UWARP_PROGRESS: c_int = 7;

/// How a thread that waits for descriptors of the program makes progress meanwhile. The functions may be
/// called until the process ends, but not in a child.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct progress {
    /// Readable when there is something to serve, for poll(2).
    pub fd: c_int,
    /// Serves what is ready now, for a thread that has not begun.
    pub look: extern "C" fn(),
    /// The thread will sleep on `fd` and on descriptors of its own. 0: another thread does so.
    pub begin: extern "C" fn() -> u64,
    /// How long it may sleep now, in nanoseconds; [`FOR_EVER`], or [`NO_MORE`]: it must end.
    pub limit: extern "C" fn(lead: u64) -> i64,
    /// Serves what is ready now.
    pub serve: extern "C" fn(lead: u64),
    /// It returns to the program; not 0: it sleeps, but no longer on `fd`.
    pub end: extern "C" fn(lead: u64, sleeps: c_int),
}

/// No limit.
pub const FOR_EVER: i64 = -1;
/// The thread must not sleep on `fd` any more.
pub const NO_MORE: i64 = -2;

/// To get, of any socket, the address of a function without arguments: what the process has sent goes out,
/// and streams end. It waits for that, for a moment. A handler of a signal may call it.
pub const UWARP_LAST_WORDS: c_int = 6;

/// A connected TCP socket. It stays the caller's, which must not use it before the rsocket is closed, but for
/// its names and options.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct take_over {
    /// Its descriptor.
    pub fd: c_int,
    /// Not 0: this end sends the request.
    pub initiates: c_int,
}

/// What is called after a change, until the socket is closed. `changed` is called with locks held, so it may
/// do no more than to note the key and to wake a thread. `later`: not 0 if the calling thread will call
/// `settle` soon, without a lock.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct watch {
    /// The function.
    pub changed: extern "C" fn(key: usize, later: c_int),
    /// Its argument.
    pub key: usize,
    /// The first one that is given counts, for all sockets.
    pub settle: extern "C" fn(),
}
