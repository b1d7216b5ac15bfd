//! C entry points of libibverbs and librdmacm.
//!
//! A thin layer: it converts C's arguments and calls `uwarp-driver`, `uwarp-rnic` and `uwarp-cm`. What
//! decides how the RNIC behaves is below, where it can be read, tested and simulated without C. `unsafe` is
//! allowed in this crate, because C passes pointers: raw pointers become references in [`object`] only.
//!
//! It keeps the objects that C holds pointers to, and only what C's interface asks for:
//!
//! * One box for each C structure that a program was given ([`object`]): the structure, the object of a crate
//!   below, and holds on the objects that it uses, which make destroying those fail with `EBUSY`.
//! * In that box: events that the program has not acknowledged, the completion that the extended accessors
//!   read, the batch between `ibv_wr_start` and `ibv_wr_complete`, the kept event of an id whose calls block,
//!   and attributes that mean nothing to an RNIC (address vectors, path MTU).
//! * The `ibv_device` structures, which never change and never go.
//! * For the process: the contexts of the interface of 2006, the engine of event loops of rsockets, and what
//!   the log has said once.
//!
//! `ibv_qp.state`, where programs look, is written and never read. The number of uses of an object is counted
//! here: the `Arc` below also counts our own short holds, so a program would get `EBUSY` by chance.
//!
//! Only C calls an exported function, because a program may define a function of the same name. If our own
//! code needs the same work, it calls a separate function (`tests/symbols.rs`). The table of operations of an
//! opened device is in the topmost file of the verbs (`device`), the opened device itself (`context`) is at
//! the bottom. One circle is left below: the opened device holds the events of its port (`event`), whose
//! objects name the device.
//!
//! | file | what |
//! |---|---|
//! | [`mod@entry`] | the macro every entry point goes through: panics, errno, trace, fork |
//! | [`wait`] | the same for verbs that wait, and can be cancelled meanwhile |
//! | [`jumps`] | signals that are deferred for programs whose handlers jump out of calls |
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
pub mod jumps;
pub mod log;
pub mod object;
pub mod private;
pub mod rdmacm;
pub mod sockets;
pub mod uwarpdv;
pub mod wait;
