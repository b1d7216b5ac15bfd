//! Requests to callgrind by the program that it runs: a sequence of instructions that does nothing on a
//! processor, and that valgrind knows (valgrind.h, callgrind.h).

/// Begins to count at zero, in all threads.
pub fn begin() {
    request(ZERO_STATS);
}

/// Writes what was counted since [`begin`] to a file.
pub fn end() {
    request(DUMP_STATS);
}

/// The calling thread counts from now on, or stops. The others, those of the library among them, are not
/// concerned.
pub fn toggle() {
    request(TOGGLE_COLLECT);
}

/// `VG_USERREQ_TOOL_BASE('C', 'T')`
const DUMP_STATS: u64 = 0x4354_0000;
const ZERO_STATS: u64 = DUMP_STATS + 1;
const TOGGLE_COLLECT: u64 = DUMP_STATS + 2;

#[cfg(target_arch = "x86_64")]
fn request(code: u64) {
    let arguments = [code, 0, 0, 0, 0, 0];
    // SAFETY: rotations of a register by 128 bits in all, and an exchange of a register with itself. Under
    // valgrind, it reads the six words and answers in rdx.
    unsafe {
        std::arch::asm!(
            "rol rdi, 3",
            "rol rdi, 13",
            "rol rdi, 61",
            "rol rdi, 51",
            "xchg rbx, rbx",
            in("rax") arguments.as_ptr(),
            inout("rdx") 0_u64 => _,
        );
    }
}

/// The command has said that it works on x86-64 only.
#[cfg(not(target_arch = "x86_64"))]
fn request(_: u64) {}
