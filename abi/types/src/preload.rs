//! Options of rsockets for `libuwarp-sockets.so`: how it learns that a socket has become ready, without a
//! thread that waits. Private: both are of one build.

use std::ffi::c_int;

/// Level of these options.
pub const SOL_UWARP_PRELOAD: c_int = 0x5557_0000;
/// To set, a [`watch`].
pub const UWARP_WATCH: c_int = 1;
/// To get, a `c_int`: poll(2)'s bits of what the socket is ready for now. The next change is reported.
pub const UWARP_LOOK: c_int = 2;
/// To get, a `c_int`: bytes that can be read.
pub const UWARP_UNREAD: c_int = 3;
/// To set, a [`take_over`]: the connection of a TCP socket becomes this socket's.
pub const UWARP_TAKE_OVER: c_int = 4;
/// To get, a `c_int`: what has become of that. 0: nothing yet; 1: the stream runs, or has run; below: an
/// errno, negative.
pub const UWARP_JOINED: c_int = 5;

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

/// What is called after a change, until the socket is closed. It is called with locks held, so it may do no
/// more than to note the key and to wake a thread.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct watch {
    /// The function.
    pub changed: extern "C" fn(key: usize),
    /// Its argument.
    pub key: usize,
}
