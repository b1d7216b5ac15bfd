//! Lower layer: the system calls that carry data.
