//! A program's own mistakes and the system's refusals, with their errno.

use rustix::io::Errno;
use uwarp_rnic::VerbsError;

/// Why a call of the connection manager failed. Nothing has changed when one of these is returned, unless the
/// call says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CmError {
    /// The call is not allowed in the id's state, or an argument is wrong.
    Invalid(&'static str),
    /// The system refused.
    System(Errno),
    /// The queue pair or the device refused.
    Verbs(VerbsError),
}

impl CmError {
    /// The errno that the program gets.
    pub fn errno(self) -> i32 {
        match self {
            Self::Invalid(_) => Errno::INVAL.raw_os_error(),
            Self::System(errno) => errno.raw_os_error(),
            Self::Verbs(error) => error.errno(),
        }
    }
}

impl std::fmt::Display for CmError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Invalid(what) => f.write_str(what),
            Self::System(errno) => errno.fmt(f),
            Self::Verbs(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for CmError {}

impl From<Errno> for CmError {
    fn from(errno: Errno) -> Self {
        Self::System(errno)
    }
}

impl From<VerbsError> for CmError {
    fn from(error: VerbsError) -> Self {
        Self::Verbs(error)
    }
}
