//! C entry points of libibverbs and librdmacm.
