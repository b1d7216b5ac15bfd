//! `<infiniband/verbs.h>`: what libibverbs exports.

pub mod bringup;
pub mod cq;
pub mod device;
pub mod event;
pub mod marshal;
pub mod memory;
mod modify;
pub mod mr;
pub mod netdev;
pub mod qp;
pub mod query;
pub mod srq;
pub mod sysfs;
pub mod text;
pub mod unsupported;
pub mod view;
pub mod wr_api;
