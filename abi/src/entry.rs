//! The code around the body of every C entry point.
//!
//! [`entry!`](crate::entry!) wraps a body that returns `Result<_, Failure>` into an exported `extern "C"`
//! function. The wrapper sets up logging on the first call, traces call and failure, turns a failure into the
//! calling convention's errno, and stops panics: a bug of ours becomes `EIO` and a log line, and never
//! unwinds through the program's frames.

use std::panic::{AssertUnwindSafe, catch_unwind};

use uwarp_driver::Uncancelled;

use crate::convention::Convention;
use crate::failure::{Failure, errno, set_errno};
use crate::log;

/// Runs the body of an entry point under the policies of this module. Use [`entry!`](crate::entry!).
#[inline]
pub fn run<R: Convention>(name: &'static str, body: impl FnOnce() -> Result<R::Value, Failure>) -> R::C {
    let before = errno();
    let _uncancelled = Uncancelled::begin();
    log::init();
    tracing::trace!(target: "uwarp::abi", "{name}");
    contain::<R>(name, || {
        let value = body()?;
        // A call that succeeds leaves errno as it was, as a system call does. rstream looks at it at the end
        // of a stream, where rrecv returns 0, and would go on for ever with an EAGAIN that an earlier call
        // left.
        set_errno(before);
        Ok(value)
    })
}

/// Like [`run`] for calls made millions of times a second: no log set-up, no trace. Use
/// [`slot!`](crate::slot!).
#[inline]
pub fn contain<R: Convention>(name: &'static str, body: impl FnOnce() -> Result<R::Value, Failure>) -> R::C {
    // A panic may leave our own state half changed. All of it is behind locks that do not poison, and the
    // program gets EIO. That does less harm than ending the program's process.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => R::success(value),
        Ok(Err(failure)) => refuse::<R>(name, failure),
        Err(payload) => panicked::<R>(name, payload.as_ref()),
    }
}

fn fail<R: Convention>(errno: i32) -> R::C {
    if R::SETS_ERRNO {
        set_errno(errno);
    }
    R::failure(errno)
}

/// Takes the failure by value, so that the code that drops it is not in the calling function.
#[cold]
fn refuse<R: Convention>(name: &'static str, failure: Failure) -> R::C {
    let error = std::io::Error::from_raw_os_error(failure.errno);
    match &*failure.why {
        "" => tracing::debug!(target: "uwarp::abi", "{name}: {error}"),
        why => tracing::debug!(target: "uwarp::abi", "{name}: {why}: {error}"),
    }
    fail::<R>(failure.errno)
}

#[cold]
fn panicked<R: Convention>(name: &'static str, payload: &(dyn std::any::Any + Send)) -> R::C {
    let what = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    tracing::error!(target: "uwarp::abi", "{name}: a bug in uwarp: {what}");
    fail::<R>(libc::EIO)
}

/// Defines exported C functions.
///
/// ```ignore
/// entry! {
///     /// ibv_dealloc_pd(3).
///     fn ibv_dealloc_pd(pd: *mut ibv_pd) -> Code {
///         ...                               // Result<(), Failure>; `?` works on VerbsError and io errors
///     }
///     /// ibv_node_type_str(3).
///     fn ibv_node_type_str(node_type: c_int) -> *const c_char { ... }
/// }
/// ```
///
/// The return type is a [`Convention`]. The body is an unsafe context, as the body of an `unsafe fn` once
/// was: an entry point trusts its pointers because C gives it no other choice. Where it does more than
/// convert and call, it says why that is sound.
///
/// Only C calls these functions: a program may define a function of the same name. If our own code needs the
/// same work, it calls a separate function (`abi/tests/symbols.rs` checks this).
#[macro_export]
macro_rules! entry {
    () => {};
    (
        $(#[$meta:meta])*
        fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty $body:block
        $($rest:tt)*
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says: valid, of the right kind, not used after they were
        /// given up.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> <$ret as $crate::convention::Convention>::C {
            $crate::entry::run::<$ret>(stringify!($name), move || {
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "see the macro")]
                unsafe { $body }
            })
        }
        $crate::entry! { $($rest)* }
    };
}

/// Defines functions that programs reach through a table of function pointers; not exported.
///
/// Same form as [`entry!`]: `verb fn` has all its policies; `hot fn` is called millions of times a second, so
/// it sets up no log and leaves no trace.
#[macro_export]
macro_rules! slot {
    () => {};
    (
        $(#[$meta:meta])*
        verb fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty $body:block
        $($rest:tt)*
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says: valid, of the right kind, not used after they were
        /// given up.
        pub unsafe extern "C" fn $name($($arg: $type),*) -> <$ret as $crate::convention::Convention>::C {
            $crate::entry::run::<$ret>(stringify!($name), move || {
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "see the macro")]
                unsafe { $body }
            })
        }
        $crate::slot! { $($rest)* }
    };
    (
        $(#[$meta:meta])*
        hot fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty $body:block
        $($rest:tt)*
    ) => {
        $(#[$meta])*
        ///
        /// # Safety
        /// The pointers are what the C interface says: valid, of the right kind, not used after they were
        /// given up.
        pub unsafe extern "C" fn $name($($arg: $type),*) -> <$ret as $crate::convention::Convention>::C {
            $crate::entry::contain::<$ret>(stringify!($name), move || {
                #[allow(unused_unsafe, clippy::undocumented_unsafe_blocks, reason = "see the macro")]
                unsafe { $body }
            })
        }
        $crate::slot! { $($rest)* }
    };
}

#[cfg(test)]
mod tests {
    use std::ffi::c_int;

    use uwarp_rnic::VerbsError;

    use super::*;
    use crate::convention::{Code, MinusOne};
    use crate::failure::errno;

    entry! {
        /// Succeeds, fails or panics.
        fn uwarp_test_code(what: c_int) -> Code {
            match what {
                0 => Ok(()),
                1 => Err(Failure::invalid("on request")),
                _ => panic!("on request"),
            }
        }
        /// The same with the other convention.
        fn uwarp_test_minus_one(what: c_int) -> MinusOne {
            match what {
                0 => {
                    // As a system call in it may. The program must not see it.
                    set_errno(libc::EAGAIN);
                    Ok(())
                }
                1 => Err(VerbsError::QueueFull.into()),
                _ => panic!("on request"),
            }
        }
        /// The same for pointers.
        fn uwarp_test_pointer(what: c_int) -> *mut c_int {
            match what {
                0 => Ok(std::ptr::dangling_mut()),
                1 => Err(VerbsError::BadAddress.into()),
                _ => panic!("on request"),
            }
        }
    }

    #[test]
    fn each_convention_reports_success_failure_and_bug() {
        let seen: Vec<_> = (0..3)
            .map(|what| {
                set_errno(0);
                // SAFETY: no pointers.
                let code = (unsafe { uwarp_test_code(what) }, errno());
                // SAFETY: no pointers.
                let minus_one = (unsafe { uwarp_test_minus_one(what) }, errno());
                // SAFETY: no pointers.
                let pointer = (unsafe { uwarp_test_pointer(what) }.is_null(), errno());
                (code, minus_one, pointer)
            })
            .collect();
        assert_eq!(
            seen,
            [
                ((0, 0), (0, 0), (false, 0)),
                ((libc::EINVAL, libc::EINVAL), (-1, libc::ENOMEM), (true, libc::EFAULT)),
                ((libc::EIO, libc::EIO), (-1, libc::EIO), (true, libc::EIO)),
            ]
        );
    }
}
