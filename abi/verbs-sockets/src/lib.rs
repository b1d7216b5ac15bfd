//! `<uwarp_sockets.h>` over any provider of librdmacm and libibverbs (docs/adr/047): the kernel's siw, an
//! adapter, or uwarp's own libraries.
//!
//! ```text
//!   uwarp_write, uwarp_post, uwarp_poll …                 calls: C
//!        │
//!   Socket (socket), table                                every call on a socket
//!        │            └── engine: the one thread that makes and ends connections; agree: what both ends say
//!   uwarp_rsocket::stream::Stream                         the protocol, as of all of uwarp's sockets
//!        │
//!   Provider (provider) ── foreign                        the queue pair; functions of the libraries
//! ```
//!
//! The connection of the program stays as it is: a kernel's siw takes no connected socket. The ends agree
//! over it on a second one, which rdma_cm makes.

#![deny(unsafe_code)]

mod agree;
mod calls;
mod engine;
mod foreign;
mod provider;
mod socket;
mod table;
mod waiting;
