//! `<rdma/rdma_cma.h>`: what librdmacm exports.
//!
//! Each file uses only the ones below it.
//!
//! | file | what |
//! |---|---|
//! | [`endpoint`] | `rdma_create_ep` and `rdma_get_request` |
//! | [`connection`] | bind, resolve, listen, connect, accept, reject, disconnect |
//! | [`qp`] | queue pairs of an id, with the completion queues and channels they need |
//! | [`multicast`] | groups of ids of datagrams |
//! | [`take`] | taking events, and what an event changes in the id that C sees |
//! | [`id`] | ids: create, destroy, migrate, options, addresses |
//! | [`event`] | events that the program holds, and their acknowledgement |
//! | [`channel`] | event channels |
//! | [`device`] | the one opened device that ids share, `rdma_get_devices` |
//! | [`addrinfo`] | `rdma_getaddrinfo` |
//! | [`address`] | `sockaddr` and back |
//! | [`rsocket`] | sockets over queue pairs |
//!
//! An id that was made without a channel has one of its own, and its calls block until their event has come.
//! That is done here ([`take::complete`]); the connection manager knows only events.

pub mod address;
pub mod addrinfo;
pub mod channel;
pub mod connection;
pub mod device;
pub mod endpoint;
pub mod event;
pub mod id;
pub mod multicast;
pub mod qp;
pub mod rsocket;
pub mod take;

#[cfg(test)]
mod tests;
