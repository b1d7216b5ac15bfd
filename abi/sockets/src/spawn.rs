//! Functions that start programs without fork(2)'s handlers. A program that is started may have a connection
//! of the process, and nobody tells what it does with it. So one that is in use and not decided stays TCP,
//! as after a fork, and one that no call has used yet, if the program inherits it.

use std::ffi::{c_char, c_int, c_void};

use libc::{FILE, pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};
use uwarp_preload::real;

use crate::agree::table;
use crate::{fds, process, relay, rsockets, sys};

/// A program is about to be started.
fn before() {
    if process::is_child() {
        return;
    }
    if fds::any_asking() {
        table::before_spawn();
    }
    relay::before_children();
    // Standard input and output of this process are those of what it starts.
    for fd in (0..3).filter(|fd| fds::is_ruled(*fd)) {
        hand_over(fd);
        let _ = sys::quietly(|| sys::fcntl(fd, libc::F_SETFD, 0));
    }
}

/// A program that is started uses this one.
fn hand_over(fd: c_int) {
    let handed = fds::find(fd).is_some_and(|sock| sock.hand_over());
    if !handed {
        sys::quietly(rsockets::say_forked);
    }
}

macro_rules! starts {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {$(
        #[cfg_attr(not(test), unsafe(no_mangle))]
        unsafe extern "C-unwind" fn $name($($argument: $type),*) -> $result {
            before();
            real!($name($($argument: $type),*) -> $result)
        }
    )*};
}

starts! {
    fn system(command: *const c_char) -> c_int;
    fn popen(command: *const c_char, kind: *const c_char) -> *mut FILE;
    fn posix_spawn(
        child: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int;
    fn posix_spawnp(
        child: *mut pid_t, path: *const c_char, actions: *const posix_spawn_file_actions_t,
        attributes: *const posix_spawnattr_t, arguments: *const *mut c_char, environment: *const *mut c_char
    ) -> c_int;
}

#[cfg_attr(not(test), unsafe(no_mangle))]
unsafe extern "C-unwind" fn posix_spawn_file_actions_adddup2(
    actions: *mut posix_spawn_file_actions_t,
    old: c_int,
    new: c_int,
) -> c_int {
    if fds::is_asking(old) && !process::is_child() {
        table::veto(old);
    }
    if fds::is_ruled(old) && !process::is_child() {
        hand_over(old);
    }
    real!(posix_spawn_file_actions_adddup2(
        actions: *mut posix_spawn_file_actions_t, old: c_int, new: c_int
    ) -> c_int)
}

/// What vfork(2) goes on with.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
extern "C" fn before_vfork() -> *const c_void {
    static REAL: uwarp_preload::Real = uwarp_preload::Real::new(c"vfork");
    before();
    let real = REAL.address();
    // A fork does all that it does.
    if real.is_null() { libc::fork as *const c_void } else { real }
}

/// It returns twice into the frame of its caller, so it must not have one of its own: it goes on in libc's.
#[cfg(all(target_arch = "x86_64", not(test)))]
#[unsafe(naked)]
#[unsafe(no_mangle)]
unsafe extern "C" fn vfork() -> pid_t {
    core::arch::naked_asm!(
        "endbr64",
        "sub rsp, 8",
        "call {before}",
        "add rsp, 8",
        "jmp rax",
        before = sym before_vfork,
    )
}
