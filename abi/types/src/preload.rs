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
