//! C types of libibverbs and librdmacm, as programs compiled against `<infiniband/verbs.h>` and
//! `<rdma/rdma_cma.h>` see them.
//!
//! [`verbs`], [`rdmacm`] and [`kern`] are generated once by `scripts/regen-bindings` from the newest headers
//! and checked in, with an assertion for every size and offset. Older headers describe prefixes of these
//! structures (or, for [`verbs::verbs_context`], suffixes), so one binary serves programs built with any of
//! them; `tests/layout.rs` compares with the headers installed on the machine. [`private`] holds what the
//! private interface between libibverbs and its drivers needs, [`preload`] what our preloaded library needs;
//! both are written by hand.

pub mod kern;
pub mod preload;
pub mod private;
pub mod rdmacm;
pub mod verbs;

/// bindgen asserts the offsets of members with a name only; these have none in C.
const _: () = {
    use std::mem::offset_of;
    ["Offset of field: ibv_send_wr::anon_1"][offset_of!(verbs::ibv_send_wr, anon_1) - 36usize];
    ["Offset of field: ibv_send_wr::anon_2"][offset_of!(verbs::ibv_send_wr, anon_2) - 80usize];
    ["Offset of field: ibv_wc::anon_1"][offset_of!(verbs::ibv_wc, anon_1) - 24usize];
    ["Offset of field: rdma_addr::anon_2"][offset_of!(rdmacm::rdma_addr, anon_2) - 128usize];
};
