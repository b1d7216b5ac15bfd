//! Connection manager: what rdma_cm means, independent of its C names.
