//! `<rdma/rdma_cma.h>`: what librdmacm exports.
//!
//! | file | what |
//! |---|---|
//! | [`device`] | the one opened device that ids share, `rdma_get_devices` |
//! | [`address`] | `sockaddr` and back |
//! | [`channel`] | event channels |
//! | [`id`] | ids: create, destroy, migrate, options, addresses |
//! | [`event`] | taking and acknowledging events, and what an event changes in the id that C sees |
//! | [`connection`] | bind, resolve, listen, connect, accept, reject, disconnect |
//! | [`qp`] | queue pairs of an id, with the completion queues and channels they need |
//! | [`endpoint`] | `rdma_create_ep` and `rdma_get_request` |
//! | [`addrinfo`] | `rdma_getaddrinfo` |
//! | [`rsocket`], [`unsupported`] | what is not offered |
//!
//! An id that was made without a channel has one of its own, and its calls block until their event has come. That is
//! done here ([`id::CId::complete`]); the connection manager knows only events.

pub mod address;
pub mod addrinfo;
pub mod channel;
pub mod connection;
pub mod device;
pub mod endpoint;
pub mod event;
pub mod id;
pub mod qp;
pub mod rsocket;
pub mod unsupported;

use uwarp_cm::CmError;

use crate::entry::Failure;

impl From<CmError> for Failure {
    fn from(error: CmError) -> Self {
        Self::new(error.errno(), error.to_string())
    }
}

#[cfg(test)]
mod tests;
