//! Why an entry point fails.

use std::borrow::Cow;
use std::ffi::c_int;

use uwarp_cm::CmError;
use uwarp_rnic::VerbsError;

/// The errno that the program gets, and a reason for the log.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The error number, positive.
    pub errno: c_int,
    /// Shown under `UWARP_LOG=debug`. Empty: the error number says all.
    pub why: Cow<'static, str>,
}

impl Failure {
    /// A failure with a reason.
    pub fn new(errno: c_int, why: impl Into<Cow<'static, str>>) -> Self {
        Self { errno, why: why.into() }
    }

    /// `EINVAL` with a reason.
    pub fn invalid(why: &'static str) -> Self {
        Self::new(libc::EINVAL, why)
    }

    /// `EOPNOTSUPP`: the call exists, this device does not offer it.
    pub fn unsupported(what: &'static str) -> Self {
        Self::new(libc::EOPNOTSUPP, what)
    }
}

impl From<VerbsError> for Failure {
    fn from(error: VerbsError) -> Self {
        // Programs retry a full queue in a loop: no allocation for a text that is rarely read.
        let why = match error {
            VerbsError::Invalid(why) | VerbsError::NoResources(why) | VerbsError::NotSupported(why) => {
                why.into()
            }
            VerbsError::QueueFull => "the queue is full".into(),
            other => Cow::Owned(other.to_string()),
        };
        Self::new(error.errno(), why)
    }
}

impl From<CmError> for Failure {
    fn from(error: CmError) -> Self {
        Self::new(error.errno(), error.to_string())
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(error.raw_os_error().unwrap_or(libc::EIO), error.to_string())
    }
}

impl From<rustix::io::Errno> for Failure {
    fn from(error: rustix::io::Errno) -> Self {
        // Programs call again and again until there is something: no text that is rarely read.
        Self::new(error.raw_os_error(), "")
    }
}

/// A null check with the program's own name for the argument.
pub fn required<T>(pointer: *mut T, name: &'static str) -> Result<*mut T, Failure> {
    if pointer.is_null() { Err(Failure::new(libc::EINVAL, format!("{name} is NULL"))) } else { Ok(pointer) }
}

/// Sets the calling thread's `errno`.
pub fn set_errno(errno: c_int) {
    // SAFETY: the location is the thread's own and always valid.
    unsafe { *libc::__errno_location() = errno }
}

/// Reads the calling thread's `errno`.
pub fn errno() -> c_int {
    // SAFETY: as above.
    unsafe { *libc::__errno_location() }
}
