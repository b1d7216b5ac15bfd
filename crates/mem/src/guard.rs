//! Copies that survive unmapped memory.
//!
//! A program may unmap memory that it has registered, take its rights away, or truncate the file behind it.
//! An adapter keeps the pages; the kernel's copies return EFAULT; a copy of ours would end the process
//! because of a peer's request. So [`copy`] runs between two labels. A handler for SIGSEGV and SIGBUS,
//! installed with the first region, makes it return early when the fault is one of its own. Every other fault
//! gets the handler that was there before, on the same stack, with the same mask and in the same way as
//! without us, or the default action at the instruction that faulted: debuggers, sanitizers, virtual machines
//! and crash reporters see what they always see.
//!
//! Limits: a program that installs its own handler later, and does not call the one it replaced, sees these
//! faults itself, as it would without us. A program that repairs faults on registered memory in its handler
//! (write barriers) must be run with `UWARP_GUARD=off`, because this handler would not call it for them. A
//! thread that blocks these signals cannot be helped: the kernel ends the process.

#![allow(unsafe_code)]

/// Copies `len` bytes between memory of ours and registered memory, in ascending order, the end last, and
/// once: a program that spins on the last byte finds the others in place, and what it then writes stays.
/// Returns false if the registered memory was not mapped; the bytes copied until then are undefined.
///
/// # Safety
/// `own`, which is either `dst` or `src`, is valid for `len` bytes, and nothing else uses it in a way that
/// conflicts. The other one is `len` bytes of memory that the program registered; it may be unmapped where a
/// fault of the program's memory is acceptable.
#[inline]
pub(super) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, own: *const u8) -> bool {
    // SAFETY: as this function's.
    unsafe { imp::copy(dst, src, len, own) }
}

/// Adds `add` to the eight bytes at `at`, atomically, and returns their old value; `None` if the memory was
/// not mapped, or is read-only.
///
/// # Safety
/// `at` is aligned. It names eight bytes of memory that the program registered, or may be unmapped as in
/// [`copy`].
#[inline]
pub(super) unsafe fn fetch_add(at: *mut u64, add: u64) -> Option<u64> {
    // SAFETY: as this function's.
    unsafe { imp::fetch_add(at, add) }
}

/// Writes `new` to the eight bytes at `at` if they are `expected`, atomically. Returns their old value;
/// `None` as [`fetch_add`].
///
/// # Safety
/// As [`fetch_add`].
#[inline]
pub(super) unsafe fn compare_exchange(at: *mut u64, expected: u64, new: u64) -> Option<u64> {
    // SAFETY: as this function's.
    unsafe { imp::compare_exchange(at, expected, new) }
}

/// Installs the handler, once, unless [`turn_off`] was called before.
#[inline]
pub fn arm() {
    imp::arm();
}

/// `UWARP_GUARD=off`: this process installs no handler. Has an effect only before the first region.
pub fn turn_off() {
    imp::turn_off();
}

/// Plain copies, so that Miri and the sanitizers of fuzzing can check them.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux", not(miri), not(fuzzing))))]
mod imp {
    pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, _own: *const u8) -> bool {
        // SAFETY: as the caller's; ours and registered memory do not overlap.
        unsafe {
            // The C library's copy stores the end of these twice on some processors.
            match len {
                2 => dst.cast::<u16>().write_unaligned(src.cast::<u16>().read_unaligned()),
                4 => dst.cast::<u32>().write_unaligned(src.cast::<u32>().read_unaligned()),
                8 => dst.cast::<u64>().write_unaligned(src.cast::<u64>().read_unaligned()),
                16 => dst.cast::<u128>().write_unaligned(src.cast::<u128>().read_unaligned()),
                _ => std::ptr::copy_nonoverlapping(src, dst, len),
            }
        }
        true
    }

    use std::sync::atomic::{AtomicU64, Ordering};

    pub unsafe fn fetch_add(at: *mut u64, add: u64) -> Option<u64> {
        // SAFETY: as the caller's; if the program does not use it atomically, it accepts any result.
        Some(unsafe { AtomicU64::from_ptr(at) }.fetch_add(add, Ordering::SeqCst))
    }

    pub unsafe fn compare_exchange(at: *mut u64, expected: u64, new: u64) -> Option<u64> {
        // SAFETY: as the caller's; if the program does not use it atomically, it accepts any result.
        let word = unsafe { AtomicU64::from_ptr(at) };
        let result = word.compare_exchange(expected, new, Ordering::SeqCst, Ordering::SeqCst);
        Some(result.unwrap_or_else(|found| found))
    }

    pub fn arm() {}
    pub fn turn_off() {}
}

#[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri), not(fuzzing)))]
mod imp {
    use std::cell::UnsafeCell;
    use std::ffi::{c_int, c_void};
    use std::mem::MaybeUninit;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

    use uwarp_process::Once;

    // rdi: to, rsi: from, rdx: length, rcx (kept in r8): which of the two is ours. rax: 0, or 1 from the exit
    // that the handler takes. Leaf code without a frame: whatever instruction faults, the return address is
    // on top of the stack.
    //
    // As memcpy does it, but the last byte is stored once: up to 64 bytes one, two or four overlapping moves,
    // then loops, from 4 KiB on the string instruction. (Its stores are not ordered among themselves, but the
    // store after it is.) A destination that begins up to 63 bytes behind the source in its page is left to
    // the loops: the string instruction takes fifteen times as long there on Zen 3 (up to 31 bytes), and is
    // slow on other processors, too.
    core::arch::global_asm!(
        ".pushsection .text.uwarp_guarded_copy,\"ax\",@progbits",
        ".p2align 6",
        ".globl uwarp_guarded_copy",
        ".hidden uwarp_guarded_copy",
        ".type uwarp_guarded_copy,@function",
        "uwarp_guarded_copy:",
        ".cfi_startproc",
        "mov r8, rcx",
        "cmp rdx, 16",
        "jb 4f",
        "cmp rdx, 32",
        "ja 2f",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + rdx - 16]",
        "cmp rdx, 16",
        "je 3f",
        "movups [rdi], xmm0",
        "3:",
        "movups [rdi + rdx - 16], xmm1",
        "xor eax, eax",
        "ret",
        "2:",
        "cmp rdx, 64",
        "ja 5f",
        "movups xmm0, [rsi]",
        "movups xmm1, [rsi + 16]",
        "movups xmm2, [rsi + rdx - 32]",
        "movups xmm3, [rsi + rdx - 16]",
        "movups [rdi], xmm0",
        "movups [rdi + 16], xmm1",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "xor eax, eax",
        "ret",
        // Less than 16.
        "4:",
        "cmp edx, 8",
        "jb 2f",
        "mov rax, [rsi]",
        "mov r9, [rsi + rdx - 8]",
        "je 3f",
        "mov [rdi], rax",
        "3:",
        "mov [rdi + rdx - 8], r9",
        "xor eax, eax",
        "ret",
        "2:",
        "cmp edx, 4",
        "jb 2f",
        "mov eax, [rsi]",
        "mov r9d, [rsi + rdx - 4]",
        "je 3f",
        "mov [rdi], eax",
        "3:",
        "mov [rdi + rdx - 4], r9d",
        "xor eax, eax",
        "ret",
        "2:",
        "cmp edx, 2",
        "jb 2f",
        "movzx eax, word ptr [rsi]",
        "movzx r9d, byte ptr [rsi + rdx - 1]",
        "mov [rdi], ax",
        "je 3f",
        "mov [rdi + rdx - 1], r9b",
        "3:",
        "xor eax, eax",
        "ret",
        "2:",
        "test edx, edx",
        "jz 2f",
        "movzx eax, byte ptr [rsi]",
        "mov [rdi], al",
        "2:",
        "xor eax, eax",
        "ret",
        // More than 64: all but the last 1 to 64 bytes in steps, then the last 64. Where there is AVX, with
        // twice the width.
        ".p2align 4",
        "5:",
        "cmp rdx, 4096",
        "jae 7f",
        "cmp byte ptr [rip + uwarp_guarded_copy_wide], 0",
        "je 8f",
        "cmp rdx, 128",
        "ja 3f",
        "vmovdqu ymm0, [rsi]",
        "vmovdqu ymm1, [rsi + 32]",
        "vmovdqu ymm2, [rsi + rdx - 64]",
        "vmovdqu ymm3, [rsi + rdx - 32]",
        "vmovdqu [rdi], ymm0",
        "vmovdqu [rdi + 32], ymm1",
        "vmovdqu [rdi + rdx - 64], ymm2",
        "vmovdqu [rdi + rdx - 32], ymm3",
        "vzeroupper",
        "xor eax, eax",
        "ret",
        // The stores of the loop are aligned: staging has headers of odd lengths.
        "3:",
        "vmovdqu ymm0, [rsi]",
        "mov r9d, edi",
        "and r9d, 31",
        "mov eax, 32",
        "sub eax, r9d",
        "lea r9, [rdx - 128]",
        "vmovdqu [rdi], ymm0",
        "cmp rax, r9",
        "jae 9f",
        ".p2align 4",
        "2:",
        "vmovdqu ymm0, [rsi + rax]",
        "vmovdqu ymm1, [rsi + rax + 32]",
        "vmovdqu ymm2, [rsi + rax + 64]",
        "vmovdqu ymm3, [rsi + rax + 96]",
        "vmovdqu [rdi + rax], ymm0",
        "vmovdqu [rdi + rax + 32], ymm1",
        "vmovdqu [rdi + rax + 64], ymm2",
        "vmovdqu [rdi + rax + 96], ymm3",
        "sub rax, -128",
        "cmp rax, r9",
        "jb 2b",
        "9:",
        "vmovdqu ymm0, [rsi + rdx - 128]",
        "vmovdqu ymm1, [rsi + rdx - 96]",
        "vmovdqu ymm2, [rsi + rdx - 64]",
        "vmovdqu ymm3, [rsi + rdx - 32]",
        "vmovdqu [rdi + rdx - 128], ymm0",
        "vmovdqu [rdi + rdx - 96], ymm1",
        "vmovdqu [rdi + rdx - 64], ymm2",
        "vmovdqu [rdi + rdx - 32], ymm3",
        "vzeroupper",
        "xor eax, eax",
        "ret",
        "8:",
        "lea r9, [rdx - 1]",
        "and r9, -64",
        "xor eax, eax",
        "6:",
        "movups xmm0, [rsi + rax]",
        "movups xmm1, [rsi + rax + 16]",
        "movups xmm2, [rsi + rax + 32]",
        "movups xmm3, [rsi + rax + 48]",
        "movups [rdi + rax], xmm0",
        "movups [rdi + rax + 16], xmm1",
        "movups [rdi + rax + 32], xmm2",
        "movups [rdi + rax + 48], xmm3",
        "add rax, 64",
        "cmp rax, r9",
        "jb 6b",
        "movups xmm0, [rsi + rdx - 64]",
        "movups xmm1, [rsi + rdx - 48]",
        "movups xmm2, [rsi + rdx - 32]",
        "movups xmm3, [rsi + rdx - 16]",
        "movups [rdi + rdx - 64], xmm0",
        "movups [rdi + rdx - 48], xmm1",
        "movups [rdi + rdx - 32], xmm2",
        "movups [rdi + rdx - 16], xmm3",
        "xor eax, eax",
        "ret",
        "7:",
        "mov eax, edi",
        "sub eax, esi",
        "dec eax",
        "and eax, 4095",
        "cmp eax, 63",
        "jb 2f",
        "lea rcx, [rdx - 16]",
        "rep movsb",
        "movups xmm0, [rsi]",
        "movups [rdi], xmm0",
        "xor eax, eax",
        "ret",
        "2:",
        "cmp byte ptr [rip + uwarp_guarded_copy_wide], 0",
        "je 8b",
        "jmp 3b",
        // rdi: at, rsi: the addend, rdx: 8, rcx: where the old value goes. For the handler this is a copy
        // with the latter as our side.
        ".globl uwarp_guarded_add",
        ".hidden uwarp_guarded_add",
        "uwarp_guarded_add:",
        "mov r8, rcx",
        "mov rax, rsi",
        "lock xadd [rdi], rax",
        "mov [rcx], rax",
        "xor eax, eax",
        "ret",
        // The same; rsi: the new value, rcx: where the expected value is read from, and the old value goes.
        ".globl uwarp_guarded_swap",
        ".hidden uwarp_guarded_swap",
        "uwarp_guarded_swap:",
        "mov r8, rcx",
        "mov rax, [rcx]",
        "lock cmpxchg [rdi], rsi",
        "mov [rcx], rax",
        "xor eax, eax",
        "ret",
        ".globl uwarp_guarded_copy_fault",
        ".hidden uwarp_guarded_copy_fault",
        "uwarp_guarded_copy_fault:",
        "cmp byte ptr [rip + uwarp_guarded_copy_wide], 0",
        "je 2f",
        "vzeroupper",
        "2:",
        "mov eax, 1",
        "ret",
        ".cfi_endproc",
        ".size uwarp_guarded_copy, . - uwarp_guarded_copy",
        ".popsection",
        ".pushsection .bss.uwarp_guarded_copy_wide,\"aw\",@nobits",
        ".globl uwarp_guarded_copy_wide",
        ".hidden uwarp_guarded_copy_wide",
        ".type uwarp_guarded_copy_wide,@object",
        ".size uwarp_guarded_copy_wide, 1",
        "uwarp_guarded_copy_wide: .byte 0",
        ".popsection",
    );

    unsafe extern "C" {
        fn uwarp_guarded_copy(dst: *mut u8, src: *const u8, len: usize, own: *const u8) -> u32;
        fn uwarp_guarded_add(at: *mut u64, add: u64, len: usize, before: *mut u64) -> u32;
        fn uwarp_guarded_swap(at: *mut u64, new: u64, len: usize, before: *mut u64) -> u32;
        /// The end of the part that may fault, and its exit.
        fn uwarp_guarded_copy_fault();
        /// Whether there is AVX.
        static uwarp_guarded_copy_wide: AtomicBool;
    }

    #[inline]
    pub unsafe fn copy(dst: *mut u8, src: *const u8, len: usize, own: *const u8) -> bool {
        // SAFETY: as the caller's. The routine keeps to the C calling convention.
        unsafe { uwarp_guarded_copy(dst, src, len, own) == 0 }
    }

    #[inline]
    pub unsafe fn fetch_add(at: *mut u64, add: u64) -> Option<u64> {
        let mut before = 0;
        // SAFETY: as the caller's; `before` is ours. The routine keeps to the C calling convention.
        let failed = unsafe { uwarp_guarded_add(at, add, size_of::<u64>(), &raw mut before) };
        (failed == 0).then_some(before)
    }

    #[inline]
    pub unsafe fn compare_exchange(at: *mut u64, expected: u64, new: u64) -> Option<u64> {
        let mut before = expected;
        // SAFETY: as the caller's; `before` is ours. The routine keeps to the C calling convention.
        let failed = unsafe { uwarp_guarded_swap(at, new, size_of::<u64>(), &raw mut before) };
        (failed == 0).then_some(before)
    }

    static OFF: AtomicBool = AtomicBool::new(false);
    static ONCE: Once = Once::new();

    /// The actions that [`SIGNALS`] had before. Set before the handler is installed, and kept in [`KEPT`].
    static BEFORE: [AtomicPtr<libc::sigaction>; 2] = [const { AtomicPtr::new(ptr::null_mut()) }; 2];
    /// For each signal what it had when it was looked at, and what was replaced. Not on the heap: the first
    /// one is never freed, since the handler may be reading it, and tools would call it a leak.
    static KEPT: [[Action; 2]; 2] =
        [const { [const { Action(UnsafeCell::new(MaybeUninit::uninit())) }; 2] }; 2];

    struct Action(UnsafeCell<MaybeUninit<libc::sigaction>>);

    // SAFETY: written once, by `keep`, before another thread has a pointer to it; then only read.
    unsafe impl Sync for Action {}

    impl Action {
        /// Writes it, and makes `before` point to it.
        ///
        /// # Safety
        /// Called once for each.
        unsafe fn keep(&self, action: libc::sigaction, before: &AtomicPtr<libc::sigaction>) {
            let place = self.0.get().cast::<libc::sigaction>();
            // SAFETY: nothing else uses it before this call makes `before` point to it.
            unsafe { place.write(action) };
            before.store(place, Ordering::Release);
        }
    }
    const SIGNALS: [c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

    pub fn turn_off() {
        OFF.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub fn arm() {
        ONCE.call(|| {
            // SAFETY: a byte that is 0 or 1, which nothing else writes.
            unsafe { &uwarp_guarded_copy_wide }.store(is_x86_feature_detected!("avx"), Ordering::Relaxed);
            if !OFF.load(Ordering::Relaxed) {
                for (signal, (before, kept)) in SIGNALS.into_iter().zip(BEFORE.iter().zip(&KEPT)) {
                    install(signal, before, kept);
                }
            }
        });
    }

    /// Called once for each signal.
    fn install(signal: c_int, before: &AtomicPtr<libc::sigaction>, [first, replaced]: &[Action; 2]) {
        // SAFETY: `sigaction` is plain data, and all zeros a valid value.
        let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: only a query; `old` is valid for writes.
        if unsafe { libc::sigaction(signal, ptr::null(), &raw mut old) } != 0 {
            return;
        }
        // Stored before our handler can be called. (A handler that another thread installs between these
        // lines is replaced before it is stored; it is found below.)
        // SAFETY: this function is called once.
        unsafe { first.keep(old, before) };
        let mut new = old;
        new.sa_sigaction = on_fault as *const () as usize;
        // The program's handler is called from ours, so ours gets the stack and the mask that the program
        // requested.
        let keep = match old.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK,
            _ => old.sa_flags & (libc::SA_ONSTACK | libc::SA_NODEFER | libc::SA_RESTART),
        };
        new.sa_flags = libc::SA_SIGINFO | keep;
        // SAFETY: the handler is a function of this object, which is never unloaded, and does only what is
        // allowed in one.
        let rc = unsafe { libc::sigaction(signal, &raw const new, &raw mut old) };
        if rc != 0 {
            tracing::warn!(
                signal,
                "cannot install a handler for memory faults; unmapping registered memory may end the process"
            );
            return;
        }
        // SAFETY: as above.
        unsafe { replaced.keep(old, before) };
    }

    extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: installed with SA_SIGINFO, so the kernel gives both (as does a handler that calls the one
        // it replaced).
        unsafe {
            if !cut_short(info, context.cast()) {
                pass_on(signal, info, context);
            }
        }
    }

    /// Whether the fault is the copy's own, at registered memory. If so, the copy continues at its exit.
    ///
    /// # Safety
    /// The arguments of a handler with SA_SIGINFO.
    unsafe fn cut_short(info: *const libc::siginfo_t, context: *mut libc::ucontext_t) -> bool {
        // SAFETY: valid by this function's contract; nothing else has them.
        let (code, at, registers) =
            unsafe { ((*info).si_code, (*info).si_addr() as usize, &mut (*context).uc_mcontext.gregs) };
        let value = |name: c_int| registers.get(name as usize).map_or(0, |r| *r as usize);
        let way_out = uwarp_guarded_copy_fault as *const () as usize;
        let copy = uwarp_guarded_copy as *const () as usize..way_out;
        if !copy.contains(&value(libc::REG_RIP)) {
            return false;
        }
        // A signal that a process has sent (code zero or less) is no fault. A fault at memory of ours is a
        // bug of ours and must stay visible. (The processor does not report the address if it is not
        // canonical, nor the exact address of a poisoned page; neither is memory of ours.)
        let own = value(libc::REG_R8);
        if code <= 0 || (own..own.saturating_add(value(libc::REG_RDX))).contains(&at) {
            return false;
        }
        if let Some(rip) = registers.get_mut(libc::REG_RIP as usize) {
            *rip = way_out as i64;
        }
        true
    }

    /// Does with the signal what would have happened without us.
    ///
    /// # Safety
    /// The arguments of a handler with SA_SIGINFO.
    unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
        let index = usize::from(signal == libc::SIGBUS);
        let before = BEFORE.get(index).map_or(ptr::null_mut(), |b| b.load(Ordering::Acquire));
        // SAFETY: null or a `sigaction` in `KEPT`, which is not written any more.
        let (handler, flags) =
            unsafe { before.as_ref() }.map_or((libc::SIG_DFL, 0), |b| (b.sa_sigaction, b.sa_flags));
        // SAFETY: valid by this function's contract.
        let is_fault = unsafe { (*info).si_code } > 0;
        match handler {
            // The kernel does not ignore a fault either.
            libc::SIG_IGN if !is_fault => {}
            libc::SIG_DFL | libc::SIG_IGN => {
                default_from_now_on(signal);
                if !is_fault {
                    // Nothing sends it again. SAFETY: to the calling thread, which gets it when this
                    // handler returns; `info` is valid.
                    unsafe {
                        libc::syscall(
                            libc::SYS_rt_tgsigqueueinfo,
                            libc::getpid(),
                            libc::syscall(libc::SYS_gettid),
                            signal,
                            info,
                        )
                    };
                }
                // The instruction faults again, now with the default action.
            }
            handler => {
                if flags & libc::SA_RESETHAND != 0 {
                    default_from_now_on(signal);
                }
                // SAFETY: the program installed it as a handler. The kernel gives all three arguments to
                // every handler, with SA_SIGINFO or without.
                unsafe {
                    let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                        std::mem::transmute(handler);
                    handler(signal, info, context);
                }
            }
        }
    }

    fn default_from_now_on(signal: c_int) {
        // SAFETY: plain data, of which all zeros means the default action; `sigaction` is allowed in a
        // handler.
        unsafe {
            let default: libc::sigaction = std::mem::zeroed();
            libc::sigaction(signal, &raw const default, ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_is_copied_and_nothing_beside_it() {
        // With SSE before the first region in this process, if this test runs first, and with AVX.
        copy_every_length();
        arm();
        copy_every_length();
    }

    fn copy_every_length() {
        let src: Vec<u8> = (0..9000u32).map(|i| (i * 7 + i / 256) as u8).collect();
        let mut dst = vec![0u8; 13_000];
        for len in (0..300).chain([511, 512, 513, 1023, 1024, 1025, 2048, 4095, 4096, 4097, 8191, 8192]) {
            // Where the destination begins in its page, seen from the source, decides about the way.
            let behind = |by: usize| (src.as_ptr() as usize + by).wrapping_sub(dst.as_ptr() as usize) % 4096;
            for (from, to) in
                [(0, 0), (1, 5), (3, 64), (16, 1), (0, behind(1)), (0, behind(63)), (7, behind(27))]
            {
                dst.fill(0xAA);
                // SAFETY: both buffers are larger than what is copied.
                assert!(unsafe { copy(dst[to..].as_mut_ptr(), src[from..].as_ptr(), len, src.as_ptr()) });
                assert_eq!(&dst[to..to + len], &src[from..from + len], "{len}");
                assert!(dst[..to].iter().chain(&dst[to + len..]).all(|b| *b == 0xAA), "{len}");
            }
        }
    }

    /// Copies in a child, step by step. When the last byte has come, it is cleared, as a program does that
    /// waits for it. `None`: that cannot be done here. Otherwise whether it has stayed so.
    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri), not(fuzzing)))]
    fn stays_cleared(len: usize) -> Option<bool> {
        const NONE: *mut libc::c_void = std::ptr::null_mut();
        let (src, mut dst) = (vec![0xFF_u8; len], vec![0_u8; len + 8]);
        let last = dst.as_mut_ptr().wrapping_add(len - 1);
        // SAFETY: the child calls what is allowed there, and ends; the parent reads and writes its memory by
        // the system, at an address that both have.
        unsafe {
            let child = libc::fork();
            if child == 0 {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, NONE, NONE) != 0 {
                    libc::_exit(9);
                }
                libc::raise(libc::SIGSTOP);
                copy(dst.as_mut_ptr(), src.as_ptr(), len, src.as_ptr());
                libc::_exit(i32::from(last.read_volatile() != 0));
            }
            let (mut status, mut seen) = (0, false);
            loop {
                assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
                if libc::WIFEXITED(status) {
                    return Some(libc::WEXITSTATUS(status)).filter(|code| *code != 9).map(|code| code == 0);
                }
                let word = libc::ptrace(libc::PTRACE_PEEKDATA, child, last, NONE);
                if !seen && word & 0xFF != 0 {
                    seen = true;
                    assert_eq!(libc::ptrace(libc::PTRACE_POKEDATA, child, last, word & !0xFF), 0);
                }
                if libc::ptrace(libc::PTRACE_SINGLESTEP, child, NONE, NONE) != 0 {
                    return None;
                }
            }
        }
    }

    /// A peer's Write of 16 bytes, as of 2, 4 and 8, was stored twice. A program that had seen the last byte
    /// in between and had cleared it found it there again. The entries by which a stream is told of room have
    /// 16 bytes: one was taken for two, and bytes that the peer had not read were overwritten.
    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri), not(fuzzing)))]
    #[test]
    fn the_last_byte_is_stored_once() {
        for wide in [false, true] {
            if wide {
                arm();
            }
            for len in (1..140).chain([192, 255, 256, 257, 512, 4095, 4096, 4100]) {
                assert_ne!(stays_cleared(len), Some(false), "{len} bytes");
            }
        }
    }

    #[cfg(all(target_arch = "x86_64", target_os = "linux", not(miri), not(fuzzing)))]
    #[test]
    fn copies_of_every_length_stop_at_unmapped_memory() {
        arm();
        const PAGE: usize = 4096;
        // SAFETY: a new mapping of three pages, of which the middle one is then without rights.
        let base = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let base = libc::mmap(std::ptr::null_mut(), 3 * PAGE, rights, flags, -1, 0).cast::<u8>();
            assert_eq!(libc::mprotect(base.add(PAGE).cast(), PAGE, libc::PROT_NONE), 0);
            base
        };
        let mut own = vec![0u8; PAGE + 100];
        for len in (1..200).chain([1023, 1024, 1040, 3000, 4096]) {
            let me = own.as_mut_ptr();
            // SAFETY: `own` holds `len` bytes; the test is about the other side.
            unsafe {
                // All but the last byte is mapped, and all of it is mapped.
                let before = base.add(PAGE - len);
                assert!(!copy(before.add(1), me, len, me) && !copy(me, before.add(1), len, me), "{len}");
                assert!(copy(before, me, len, me) && copy(me, before, len, me), "{len}");
                // All but the first.
                let behind = base.add(2 * PAGE);
                assert!(!copy(behind.sub(1), me, len, me) && !copy(me, behind.sub(1), len, me), "{len}");
                assert!(copy(behind, me, len, me), "{len}");
                // Not a canonical address: the processor does not report it.
                let nowhere = std::ptr::without_provenance_mut(1 << 62);
                assert!(!copy(nowhere, me, len, me) && !copy(me, nowhere, len, me), "{len}");
            }
        }
        // SAFETY: aligned; the test is about unmapped and read-only memory.
        unsafe {
            let there = base.cast::<u64>();
            there.write(0);
            assert_eq!((fetch_add(there, 5), compare_exchange(there, 5, 9)), (Some(0), Some(5)));
            assert_eq!((compare_exchange(there, 5, 1), there.read()), (Some(9), 9));
            let gone = base.add(PAGE).cast::<u64>();
            let nowhere = std::ptr::without_provenance_mut(1 << 62);
            for at in [gone, nowhere] {
                assert_eq!((fetch_add(at, 5), compare_exchange(at, 0, 9)), (None, None));
            }
        }
        // SAFETY: the mapping above.
        unsafe { libc::munmap(base.cast(), 3 * PAGE) };
    }
}
