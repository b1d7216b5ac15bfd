//! How C functions report success and failure.

use std::ffi::c_int;

use uwarp_abi_types::verbs::{IBV_REREG_MR_ERR_CMD, IBV_REREG_MR_ERR_INPUT};

use crate::failure::set_errno;

/// How a C function reports success and failure.
pub trait Convention {
    /// The C return type.
    type C;
    /// What the body returns on success.
    type Value;
    /// Whether a failure sets `errno`.
    const SETS_ERRNO: bool = true;
    /// Converts a success.
    fn success(value: Self::Value) -> Self::C;
    /// Converts a failure.
    fn failure(errno: c_int) -> Self::C;
}

/// Most verbs: 0, or the error number itself (and `errno`, which some programs read instead).
#[derive(Debug)]
pub struct Code;

/// librdmacm and some verbs: a value (0 mostly), or -1 and `errno`.
#[derive(Debug)]
pub struct MinusOne<T = ()>(std::marker::PhantomData<T>);

/// A value that is not negative, or a negative error number.
#[derive(Debug)]
pub struct Negative<T = c_int>(std::marker::PhantomData<T>);

/// A value, or the error number without `errno`.
#[derive(Debug)]
pub struct PlainCode;

/// ibv_rereg_mr(3): one negative code for input that libibverbs refuses itself, another for what the device
/// refuses.
#[derive(Debug)]
pub struct Reregistered;

/// How a re-registration ended that did not fail at the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It succeeded.
    Done,
    /// `IBV_REREG_MR_ERR_INPUT`, and `EINVAL` in `errno`.
    WrongInput,
}

/// Each: the convention, what its body returns and how that becomes C's value, and C's value for a failure.
macro_rules! conventions {
    ($(
        $convention:ty: $value:ty => $c:ty = |$ok:pat_param| $success:expr, |$errno:pat_param| $failure:expr;
    )*) => {$(
        impl Convention for $convention {
            type C = $c;
            type Value = $value;
            fn success($ok: $value) -> $c {
                $success
            }
            fn failure($errno: c_int) -> $c {
                $failure
            }
        }
    )*};
}

conventions! {
    Code: () => c_int = |()| 0, |errno| errno;
    MinusOne: () => c_int = |()| 0, |_| -1;
    MinusOne<c_int>: c_int => c_int = |value| value, |_| -1;
    MinusOne<isize>: isize => isize = |value| value, |_| -1;
    MinusOne<i64>: i64 => i64 = |value| value, |_| -1;
    Negative: c_int => c_int = |value| value, |errno| -errno;
    Negative<isize>: isize => isize = |value| value, |errno| -(errno as isize);
    // Functions without a result, or whose result cannot show a failure: they return zero.
    (): () => () = |()| (), |_| ();
    u8: u8 => u8 = |value| value, |_| 0;
    u16: u16 => u16 = |value| value, |_| 0;
    u32: u32 => u32 = |value| value, |_| 0;
    u64: u64 => u64 = |value| value, |_| 0;
    i32: i32 => i32 = |value| value, |_| 0;
}

impl Convention for PlainCode {
    type C = c_int;
    type Value = c_int;
    const SETS_ERRNO: bool = false;
    fn success(value: c_int) -> c_int {
        value
    }
    fn failure(errno: c_int) -> c_int {
        errno
    }
}

impl Convention for Reregistered {
    type C = c_int;
    type Value = Outcome;
    fn success(value: Outcome) -> c_int {
        if value == Outcome::Done {
            return 0;
        }
        set_errno(libc::EINVAL);
        IBV_REREG_MR_ERR_INPUT
    }
    fn failure(_: c_int) -> c_int {
        IBV_REREG_MR_ERR_CMD
    }
}

impl<T> Convention for *mut T {
    type C = Self;
    type Value = Self;
    fn success(value: Self) -> Self {
        value
    }
    fn failure(_: c_int) -> Self {
        std::ptr::null_mut()
    }
}

impl<T> Convention for *const T {
    type C = Self;
    type Value = Self;
    fn success(value: Self) -> Self {
        value
    }
    fn failure(_: c_int) -> Self {
        std::ptr::null()
    }
}
