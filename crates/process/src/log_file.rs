//! `UWARP_LOG_FILE`: a file for log lines (`-`: standard error, as without it), which programs that speak
//! to each other over standard error, or throw it away, leave no place for. In its name `%p` is the
//! process, `%h` the host, `%%` a percent sign.
//!
//! The file is opened for each line. A descriptor that stays open would be one that programs close, hand on
//! to their children and count; log lines are rare. Lines of one write each do not mix.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use crate::once::PerProcess;
use crate::rights::has_more_rights_than_its_caller;

/// The name of this process's file.
static FILE: PerProcess<Option<OsString>> = PerProcess::new(|| {
    let name = std::env::var_os("UWARP_LOG_FILE").filter(|name| !name.is_empty() && name != "-");
    name.filter(|_| !has_more_rights_than_its_caller()).map(|name| written_out(&name))
});

/// Whether lines go to a file. In a program that has more rights than its caller, the caller's environment
/// must not choose a file to write to: there the variable does nothing.
pub fn is_wanted() -> bool {
    FILE.is_some()
}

/// Appends a line, if lines go to a file.
///
/// # Errors
/// The system's, and the name of the file, for a sentence.
pub fn append(line: &[u8]) -> Result<(), (&'static OsStr, Errno)> {
    let Some(name) = &*FILE else { return Ok(()) };
    // A pipe that nobody reads is an error, and no wait: some lines are said while locks are held.
    let appending = OFlags::WRONLY | OFlags::CREATE | OFlags::APPEND | OFlags::NONBLOCK | OFlags::NOCTTY;
    let appending = appending | OFlags::CLOEXEC;
    let result = open(name.as_os_str(), appending, Mode::from_raw_mode(0o666)).and_then(|file| {
        let mut rest = line;
        while !rest.is_empty() {
            rest = &rest[rustix::io::write(&file, rest)?..];
        }
        Ok(())
    });
    result.map_err(|error| (name.as_os_str(), error))
}

fn written_out(name: &OsStr) -> OsString {
    let mut made = Vec::new();
    let mut rest = name.as_bytes().iter();
    while let Some(&byte) = rest.next() {
        match (byte, rest.as_slice().first()) {
            (b'%', Some(b'p')) => made.extend(rustix::process::getpid().as_raw_nonzero().to_string().bytes()),
            (b'%', Some(b'h')) => made.extend(rustix::system::uname().nodename().to_bytes()),
            (b'%', Some(b'%')) => made.push(b'%'),
            _ => {
                made.push(byte);
                continue;
            }
        }
        rest.next();
    }
    OsString::from_vec(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_out() {
        let process = std::process::id();
        let written_out = |name: &str| written_out(OsStr::new(name)).into_string().unwrap();
        assert_eq!(written_out("/tmp/%p.log"), format!("/tmp/{process}.log"));
        assert_eq!(written_out("100%%p%x%"), "100%p%x%");
        assert!(!written_out("%h").contains('%'));
    }
}
