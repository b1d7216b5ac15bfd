//! Runs programs of other projects over uwarp and checks what they print.
//!
//! Nothing here knows how uwarp works: it sees `dist/`, the programs of the distribution, network namespaces
//! and the output. The tests beside it (`tests/programs.rs`, `tests/c_programs.rs`, `tests/tshark.rs`,
//! `tests/siw.rs`, `tests/hostile`, `tests/adapters`) are tables of cases.
//!
//! A missing program or a missing right is a failure that names the remedy, never a skip: a suite that
//! silently runs less on some machines proves nothing.
//!
//! | module | what it holds |
//! |---|---|
//! | [`dist`] | where `libuwarp.so` and the CLI are |
//! | [`netns`] | network namespaces and veth pairs that go away again |
//! | [`process`] | a program in its own process group, with a time limit and its output |
//! | [`pair`] | a server, a client, and the moment in between |
//! | [`one_host`] | rping's ends on one host, and the link they have |
//! | [`topology`] | loopback and veth as one thing: two places and an address |
//! | [`check`] | what output must hold: rping's lines, perftest's rows |
//! | [`capture`] | recording traffic, and tshark's opinion of it |
//! | [`cc`] | the C programs of `c/` |
//! | [`lab`] | the virtual machine with siw |
//! | [`links`] | which link the streams of a row had |
//! | [`attacker`] | a peer that lies, and the program it lies to |
//! | [`report`] | tables for a terminal and for Markdown |
//! | [`requirements`] | what the RFCs demand, and the tests of it |

pub mod attacker;
pub mod capture;
pub mod cc;
pub mod check;
pub mod dist;
pub mod lab;
pub mod links;
pub mod netns;
pub mod one_host;
pub mod pair;
pub mod process;
pub mod report;
pub mod requirements;
pub mod topology;

use std::fmt;

/// Why something did not work, as text for people: what was run, what it printed, what to do about it.
#[derive(Debug, Clone)]
pub struct Failure(pub String);

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failure {}

/// The result of everything here.
pub type Outcome<T = ()> = Result<T, Failure>;

/// Ends the function with a [`Failure`] made of a format string.
#[macro_export]
macro_rules! fail {
    ($($arg:tt)*) => { return Err($crate::Failure(format!($($arg)*))) };
}

/// Ends the function with a [`Failure`] unless the condition holds.
#[macro_export]
macro_rules! require {
    ($cond:expr, $($arg:tt)*) => { if !$cond { $crate::fail!($($arg)*) } };
}

/// Adds to an error what was attempted.
pub trait Context<T> {
    /// Turns the error into a [`Failure`] that begins with `what`.
    fn context(self, what: impl fmt::Display) -> Outcome<T>;
}

impl<T, E: fmt::Display> Context<T> for Result<T, E> {
    fn context(self, what: impl fmt::Display) -> Outcome<T> {
        self.map_err(|e| Failure(format!("{what}: {e}")))
    }
}
