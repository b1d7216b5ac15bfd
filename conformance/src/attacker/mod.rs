//! A scripted attacker. It writes MPA, DDP, RDMAP and Terminate bytes itself, over plain TCP sockets. It
//! shares no code with uwarp, so that an error there is not repeated here. Every field can have any value.
//!
//! | module | what it holds |
//! |---|---|
//! | [`encode`] | frames, segments and messages as bytes, and a reader for what comes back |
//! | [`peer`] | one TCP connection of the attacker |
//! | [`victim`] | `c/victim.c` in a process of its own, and an honest client of it |

pub mod encode;
pub mod peer;
pub mod victim;
