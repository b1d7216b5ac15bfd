//! C types of libibverbs and librdmacm, as programs compiled against `<infiniband/verbs.h>` and `<rdma/rdma_cma.h>` see
//! them.
//!
//! [`verbs`], [`rdmacm`] and [`kern`] are generated once by `scripts/regen-bindings` from the newest headers and checked
//! in, with an assertion for every size and offset. Older headers describe prefixes of these structures (or, for
//! [`verbs::verbs_context`], suffixes), so one binary serves programs built with any of them;
//! `tests/layout.rs` compares with the headers installed on the machine. [`private`] holds what the private
//! interface between libibverbs and its drivers needs; it is written by hand.

pub mod kern;
pub mod private;
pub mod rdmacm;
pub mod verbs;
