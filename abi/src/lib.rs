//! C entry points of libibverbs and librdmacm.
//!
//! A thin layer: it converts C's arguments and calls `uwarp-driver`, `uwarp-rnic` and `uwarp-cm`. This crate is a room
//! for `unsafe`, which cannot be avoided where C hands us pointers: raw pointers become references in [`object`] only.
//!
//! | file | what |
//! |---|---|
//! | [`mod@entry`] | the macro every entry point goes through: panics, errno, trace, fork |
//! | [`object`] | one ownership kind for each C type |
//! | [`ibverbs`] | `<infiniband/verbs.h>` |
//! | [`private`] | what libibverbs offers to vendor drivers, and its 1.0 interface |
//! | [`rdmacm`] | `<rdma/rdma_cma.h>` |
//!
//! Which name is exported under which version is written in `abi/symbols.txt`.

// What `entry!` does on purpose, see there.
#![allow(clippy::macro_metavars_in_unsafe)]

pub mod entry;
pub mod ibverbs;
pub mod log;
pub mod object;
pub mod private;
pub mod rdmacm;
