//! Errors of the system, on request.

/// From now on this system call fails with `errno` in this thread, and in the threads that it starts.
pub fn refuse(call: libc::c_long, errno: libc::c_int) {
    const LOAD_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const IS: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let statement = |code, jf, k| libc::sock_filter { code, jt: 0, jf, k };
    let mut program = [
        statement(LOAD_NUMBER, 0, 0),
        statement(IS, 1, call as u32),
        statement(RETURN, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(RETURN, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program is alive, and as long as it says.
    let refused = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            | libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter)
    };
    assert_eq!(refused, 0, "the system takes no filter: {}", std::io::Error::last_os_error());
}
