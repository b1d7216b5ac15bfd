//! C entry points of libibverbs and librdmacm.
//!
//! A thin layer: it converts C's arguments and calls `uwarp-driver`, `uwarp-rnic` and `uwarp-cm`. It keeps
//! only the C structures that programs hold (docs/adr/022). `unsafe` is allowed in this crate, because C
//! passes pointers: raw pointers become references in [`object`] only.
//!
//! | file | what |
//! |---|---|
//! | [`mod@entry`] | the macro every entry point goes through: panics, errno, trace, fork |
//! | [`wait`] | the same for verbs that wait, and can be cancelled meanwhile |
//! | [`convention`], [`failure`] | how C functions report success and failure |
//! | [`object`] | one ownership kind for each C type |
//! | [`ibverbs`] | `<infiniband/verbs.h>` |
//! | [`private`] | what libibverbs offers to vendor drivers, and its 1.0 interface |
//! | [`rdmacm`] | `<rdma/rdma_cma.h>` |
//! | [`uwarpdv`] | `<uwarpdv.h>`, what other devices do not have |
//! | [`sockets`] | `<uwarp_sockets.h>`, sockets in `IWARP_MODE` |
//!
//! `abi/symbols.txt` lists the exported names and their versions.

// `entry!` does so on purpose, see there.
#![allow(clippy::macro_metavars_in_unsafe)]

pub mod convention;
pub mod entry;
pub mod failure;
pub mod ibverbs;
pub mod log;
pub mod object;
pub mod private;
pub mod rdmacm;
pub mod sockets;
pub mod uwarpdv;
pub mod wait;
