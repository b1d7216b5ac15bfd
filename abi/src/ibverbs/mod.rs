//! `<infiniband/verbs.h>`: what libibverbs exports.
//!
//! Each file uses only the ones below it.
//!
//! | file | what |
//! |---|---|
//! | [`device`] | device lists, opened devices with their table of operations |
//! | [`async_event`] | asynchronous events: taken and acknowledged |
//! | [`create_qp`] | making queue pairs |
//! | [`wr_api`] | `ibv_wr_*` |
//! | [`srq`] | shared receive queues |
//! | [`post`] | posting lists of work requests |
//! | [`ah`] | address handles |
//! | [`qp`], `modify`, `path` | queue pairs, their attributes, and the addresses in these |
//! | [`batch`] | batches of work requests |
//! | [`cq`], [`clock`] | completion queues; the clock that the times of completions come from |
//! | [`parent`] | thread domains and parent domains |
//! | [`mr`], [`buffer`], [`dmabuf`] | protection domains and regions; buffers, own and shared |
//! | [`device_memory`] | device memory |
//! | [`query`] | queries of device and port |
//! | [`event`] | where the events of objects go; completion channels |
//! | [`context`], [`view`] | the device as C knows it; how it presents itself |
//! | [`text`], [`sysfs`], [`marshal`] | names of constants, sysfs for other libraries, conversions |
//! | [`unsupported`] | what is not offered |
//! | [`old`] | the interface of 2006, over the functions of today |

pub mod ah;
pub mod async_event;
pub mod batch;
pub mod buffer;
pub mod clock;
pub mod context;
pub mod cq;
pub mod create_qp;
pub mod device;
pub mod device_memory;
pub mod dmabuf;
pub mod event;
pub mod marshal;
mod modify;
pub mod mr;
mod mw;
pub mod old;
pub mod parent;
pub mod path;
pub mod post;
pub mod qp;
pub mod query;
pub mod srq;
pub mod sysfs;
pub mod text;
pub mod unsupported;
pub mod view;
pub mod wr_api;
