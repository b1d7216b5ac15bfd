//! C types of libibverbs and librdmacm, generated once, with layout assertions.
