//! The part of libibverbs for vendor drivers, and other names that must exist but have little meaning here.
//!
//! Programs load vendor libraries (`libmlx5.so.1`, `libefa.so.1`) that bind to 61 private symbols at load
//! time and register a driver from a constructor. There is no kernel driver behind our device, so the private
//! symbols return `EOPNOTSUPP`; `abi/symbols.txt` says which of the functions below is behind each name.
//!
//! None of these goes through [`entry!`](crate::entry!): constructors call some of them, and a constructor
//! must not start anything.

use std::ffi::{c_int, c_void};

use crate::failure::set_errno;

/// Behind functions that return an error number.
#[unsafe(no_mangle)]
pub extern "C" fn uwarp_unsupported_code() -> c_int {
    set_errno(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

/// Behind functions that return -1 and set `errno`. Wide enough for `ssize_t`.
#[unsafe(no_mangle)]
pub extern "C" fn uwarp_unsupported_minus_one() -> isize {
    set_errno(libc::EOPNOTSUPP);
    -1
}

/// Behind functions that return a pointer, or a number of which zero means nothing.
#[unsafe(no_mangle)]
pub extern "C" fn uwarp_unsupported_pointer() -> *mut c_void {
    set_errno(libc::EOPNOTSUPP);
    std::ptr::null_mut()
}

/// Behind functions that return nothing. `verbs_register_driver_34` is one: a driver may register, and is
/// never used.
#[unsafe(no_mangle)]
pub extern "C" fn uwarp_unsupported_void() {}

/// Number of attributes of a driver's command. Drivers compute sizes with it before they issue a command,
/// which then fails.
#[unsafe(no_mangle)]
pub extern "C" fn __ioctl_final_num_attrs(attributes: u32, _link: *mut c_void) -> u32 {
    attributes
}
