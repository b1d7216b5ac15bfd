//! Reliable connected queue pairs.
//!
//! [`RcCore`] is a machine without sockets and without a clock of its own. Its owner holds a lock around it,
//! passes it work requests ([`RcCore::post_send`], [`RcCore::post_recv`]), and drives it with the verbs of
//! `machine`.
//!
//! From the bottom up:
//!
//! | file                                      | what it has                                        |
//! |-------------------------------------------|----------------------------------------------------|
//! | `params`, `timers`, `silence`, `buffered` | parts of the state, each with its own rules        |
//! | `reads`, `tx`, `ack_policy`               | more such parts                                    |
//! | `stream`                                  | the state of one connection                        |
//! | `core`, `psns`                            | the queue pair: what a program does with it        |
//! | `acks`, `transmit`                        | the way out                                        |
//! | `errors`, `gone`                          | what happens on an error, or when the peer is gone |
//! | `waiting`, `receive`, `direct`            | the way in                                         |
//! | `atomics`                                 | atomic operations, at both ends                    |
//! | `machine`                                 | the five verbs, deadlines, reports of the link     |

mod ack_policy;
mod acks;
mod atomics;
mod buffered;
mod core;
mod direct;
mod errors;
mod gone;
mod machine;
mod params;
mod psns;
mod reads;
mod receive;
mod silence;
mod stream;
mod timers;
mod transmit;
mod tx;
mod waiting;

pub use self::core::RcCore;
pub use direct::RxPlan;
pub use machine::{Action, End, LinkEvent};
pub use params::{LinkCaps, Rtr, StreamParams};
pub use psns::{Psns, ShownPsns};
pub use silence::Answers;
pub use stream::{Disconnect, DisconnectReply};
pub use timers::Now;
