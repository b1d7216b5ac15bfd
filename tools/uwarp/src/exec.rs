//! Becoming another program, without a shell in between.

use std::collections::BTreeMap;
use std::env;
use std::ffi::{CString, OsString};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Becomes the program at `path`, called with `words`, its name first; returns only if that fails.
/// `variables` are set beside those of this process.
///
/// If `shell` allows it, /bin/sh runs what the kernel does not know, as execvp(3) does: scripts without a
/// first line that names their interpreter. For a program for another processor, a shell would print only
/// misleading errors.
pub fn exec(path: &Path, words: &[OsString], variables: &[(&str, OsString)], shell: bool) -> io::Error {
    let mut command = Command::new(path);
    if let Some((name, arguments)) = words.split_first() {
        command.arg0(name).args(arguments);
    }
    command.envs(variables.iter().cloned());
    // SAFETY: without a fork, it runs in this thread as all code does.
    unsafe { command.pre_exec(leave_broken_pipes) };
    if !shell {
        let (path, words, environment) = match prepared(path, words, variables) {
            Ok(prepared) => prepared,
            Err(error) => return error,
        };
        let execve = move || match nix::unistd::execve(&path, &words, &environment) {
            Err(error) => Err(error.into()),
        };
        // At this point signals are as a program expects them; the call that would use a shell comes later.
        // SAFETY: without a fork, it runs in this thread as all code does.
        unsafe { command.pre_exec(execve) };
    }
    command.exec()
}

/// Whether this process was started with SIGPIPE ignored, as services of systemd are. Rust's runtime ignores
/// it in any case, and sets it to its default before a program is run.
static IGNORES_BROKEN_PIPES: AtomicBool = AtomicBool::new(false);

/// Runs before that runtime.
#[used]
#[cfg_attr(not(test), unsafe(link_section = ".init_array"))]
static FIRST: extern "C" fn() = note_broken_pipes;

extern "C" fn note_broken_pipes() {
    // SAFETY: it only asks; zeros are a value, which the call overwrites.
    let handler = unsafe {
        let mut action = std::mem::zeroed::<libc::sigaction>();
        libc::sigaction(libc::SIGPIPE, std::ptr::null(), &raw mut action);
        action.sa_sigaction
    };
    IGNORES_BROKEN_PIPES.store(handler == libc::SIG_IGN, Ordering::Relaxed);
}

/// The program gets what this process was started with.
fn leave_broken_pipes() -> io::Result<()> {
    if IGNORES_BROKEN_PIPES.load(Ordering::Relaxed) {
        // SAFETY: no handler.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }
    Ok(())
}

type Prepared = (CString, Vec<CString>, Vec<CString>);

fn prepared(path: &Path, words: &[OsString], variables: &[(&str, OsString)]) -> io::Result<Prepared> {
    let text = |word: OsString| CString::new(word.into_vec()).map_err(io::Error::from);
    let mut environment: BTreeMap<OsString, OsString> = env::vars_os().collect();
    environment.extend(variables.iter().map(|(name, value)| (name.into(), value.clone())));
    let environment = environment.into_iter().map(|(mut name, value)| {
        name.push("=");
        name.push(value);
        text(name)
    });
    Ok((
        text(path.into())?,
        words.iter().cloned().map(text).collect::<io::Result<_>>()?,
        environment.collect::<io::Result<_>>()?,
    ))
}
