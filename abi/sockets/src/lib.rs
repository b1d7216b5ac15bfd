//! `libuwarp-sockets.so`: TCP sockets of an unmodified program become iWARP's, by rules.
//!
//! `uwarp run --sockets` preloads this library. Each function here has the name of one of libc that takes a
//! descriptor. If the descriptor is not one that a rule has chosen, the function passes the call on, after
//! one look at a table. The RNIC is not in here: it is loaded when the first rule applies. What becomes of
//! each call: docs/sockets.md; why it is made so: docs/adr/042.
//!
//! ```text
//!   life  data  wait  options  spawn  ending   functions that stand before libc's
//!        │      │
//!       agree               a TCP connection until it is a stream
//!        │
//!       Sock (sock) ── stand_in   a socket that a rule chose; the descriptor that the program has for it
//!        │      ├───── event_loop  threads that wait make progress
//!        │      ├───── watch      keeps readiness of stand-ins current
//!        │      └───── relay      open in another process, too
//!      fds     rsockets           what each descriptor is; the library's calls
//! ```

#![deny(unsafe_code)]
// Tests do not stand before libc, so nothing calls what does.
#![cfg_attr(test, allow(dead_code))]

// Reason for all of these: C functions, called and offered.
#[allow(unsafe_code)]
mod address;
#[allow(unsafe_code)]
mod agree;
#[allow(unsafe_code)]
mod data;
#[allow(unsafe_code)]
mod ending;
#[allow(unsafe_code)]
mod event_loop;
mod fds;
#[allow(unsafe_code)]
mod files;
#[allow(unsafe_code)]
mod life;
#[allow(unsafe_code)]
mod options;
#[allow(unsafe_code)]
mod process;
#[allow(unsafe_code)]
mod relay;
#[allow(unsafe_code)]
mod rsockets;
#[allow(unsafe_code)]
mod sock;
#[allow(unsafe_code)]
mod spawn;
#[allow(unsafe_code)]
mod stand_in;
#[allow(unsafe_code)]
mod sys;
#[allow(unsafe_code)]
mod wait;
#[allow(unsafe_code)]
mod watch;
