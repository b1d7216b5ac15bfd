//! Whether the environment may be trusted.

// Reason: the system's own word has no safe interface.
#![allow(unsafe_code)]

/// Whether the program has more rights than the process that started it (setuid, setgid, file capabilities).
/// Its environment must then not be trusted to name files.
pub fn has_more_rights_than_its_caller() -> bool {
    // SAFETY: no pointers.
    unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
}
