//! Upgrade in place: a TCP connection becomes an iWARP stream when both ends agree (docs/adr/044).
//!
//! ```text
//!  wire, inbound, machine    what is said, and when: no sockets, no clock
//!  conn                      one connection: its bytes before the stream
//!  kept                      what the program sends behind a marker
//!  side, kernel              ends on one host: links, and what proves the peer
//!  table                     connections that the program still has itself; forks
//!  service, datagrams        one thread: datagrams, time, markers
//!  spans                     memory of the program
//!  said                      what the user can read of a decision
//! ```

#[allow(unsafe_code)]
pub mod conn;
#[allow(unsafe_code)]
pub mod datagrams;
pub mod inbound;
#[allow(unsafe_code)]
pub mod kept;
#[allow(unsafe_code)]
pub mod kernel;
pub mod machine;
pub mod said;
#[allow(unsafe_code)]
pub mod service;
pub mod side;
#[allow(unsafe_code)]
pub mod spans;
#[allow(unsafe_code)]
pub mod table;
pub mod wire;
