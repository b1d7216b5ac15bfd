//! Reliable connected queue pairs.
//!
//! [`RcCore`] is a machine without sockets and without a clock of its own. Its owner holds a lock around it,
//! hands it work requests ([`RcCore::post_send`], [`RcCore::post_recv`]), and moves it with the verbs of
//! `machine`.
//!
//! From the bottom up:
//!
//! | file                                                               | what it has                                     |
//! |--------------------------------------------------------------------|-------------------------------------------------|
//! | `params`, `timers`, `silence`, `aside`, `reads`, `tx`, `ack_policy` | parts of the state, each with its own rules     |
//! | `stream`                                                           | the state of one connection                     |
//! | `core`                                                             | the queue pair: what the program asks of it     |
//! | `acks`, `transmit`                                                 | the way out                                     |
//! | `errors`, `gone`                                                   | what happens when something is wrong, or the    |
//! |                                                                    | peer is gone                                    |
//! | `waiting`, `receive`, `direct`                                     | the way in                                      |
//! | `atomics`                                                          | atomic operations, at both ends                 |
//! | `machine`                                                          | the five verbs, deadlines, what the link says   |

mod ack_policy;
mod acks;
mod aside;
mod atomics;
mod core;
mod direct;
mod errors;
mod gone;
mod machine;
mod params;
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
pub use machine::{Action, LinkEvent};
pub use params::{Rtr, StreamParams};
pub use silence::Answers;
pub use stream::Disconnect;
pub use timers::Now;
