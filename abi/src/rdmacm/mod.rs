//! `<rdma/rdma_cma.h>` and `<rdma/rsocket.h>`.
