//! A scripted attacker. It writes MPA, DDP, RDMAP and Terminate bytes itself, over plain TCP sockets. It
//! shares no code with uwarp, so that an error there is not repeated here. Every field can have any value.
//!
//! | module | what it holds |
//! |---|---|
//! | [`datagrams`] | an exchange of reliable datagrams, and streams in it |
//! | [`encode`] | frames, segments and messages as bytes, and a reader for what comes back |
//! | [`numbers`] | what queue pairs say to each other that are brought up by number |
//! | [`parted`] | `c/parted.c`: one datagram queue pair |
//! | [`parts`] | parts of datagrams, and the question for them |
//! | [`peer`] | one TCP connection of the attacker |
//! | [`stranger`] | sockets of another user or of another host |
//! | [`lines`] | a program that is told what to do in lines |
//! | [`named`] | `c/named.c`: one queue pair that is brought up by number |
//! | [`victim`] | `c/victim.c` in a process of its own, and an honest client of it |

pub mod datagrams;
pub mod encode;
pub mod lines;
pub mod named;
pub mod numbers;
pub mod parted;
pub mod parts;
pub mod peer;
pub mod stranger;
pub mod victim;
