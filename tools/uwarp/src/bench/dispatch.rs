//! Counts the system calls of one thread, exactly and from inside: the kernel hands each of them back as a
//! signal (syscall user dispatch, Linux 5.11), whose handler counts it and makes it.
//!
//! strace would do too, but it must be installed, it may be forbidden, and it makes each call so slow that
//! another thread does the work meanwhile. This costs a call one or two microseconds and needs no rights. It
//! sees the thread that counts and no other.

use std::collections::BTreeMap;

use super::protocol::{Call, Result};

/// Counts calls in two steps, because only the end of a walk shows which path it was.
pub struct Counter {
    _enabled: imp::Enabled,
    kept: BTreeMap<(usize, bool), u64>,
}

impl Counter {
    /// Fails if the kernel or the machine does not support it. For the calling thread; one in a process.
    pub fn new() -> Result<Counter> {
        Ok(Counter { _enabled: imp::Enabled::new()?, kept: BTreeMap::new() })
    }

    /// Counts the system calls of `walk`; returns their number.
    pub fn count<T>(&mut self, walk: impl FnOnce() -> T) -> (T, u64) {
        let before = imp::total();
        imp::set(true);
        let value = walk();
        imp::set(false);
        (value, imp::total() - before)
    }

    /// Drops what was counted since the last `keep`.
    pub fn drop(&mut self) {
        imp::take();
    }

    /// Keeps it.
    pub fn keep(&mut self) {
        for (number, empty, count) in imp::take() {
            *self.kept.entry((number, empty)).or_default() += count;
        }
    }

    /// All that was kept, the most frequent first; starts anew.
    pub fn take(&mut self) -> Vec<Call> {
        let kept = std::mem::take(&mut self.kept).into_iter();
        let mut calls: Vec<_> =
            kept.map(|((number, empty), count)| Call { name: name(number), empty, count }).collect();
        calls.sort_by_key(|call| std::cmp::Reverse(call.count));
        calls
    }
}

fn name(number: usize) -> String {
    // Those that a data path may make.
    let known: &[(i64, &str)] = &[
        (libc::SYS_read, "read"),
        (libc::SYS_write, "write"),
        (libc::SYS_readv, "readv"),
        (libc::SYS_writev, "writev"),
        (libc::SYS_sendto, "sendto"),
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_recvfrom, "recvfrom"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_epoll_pwait, "epoll_pwait"),
        (libc::SYS_epoll_pwait2, "epoll_pwait2"),
        (libc::SYS_epoll_ctl, "epoll_ctl"),
        (libc::SYS_ppoll, "ppoll"),
        (libc::SYS_futex, "futex"),
        (libc::SYS_sched_yield, "sched_yield"),
        (libc::SYS_fcntl, "fcntl"),
        (libc::SYS_ioctl, "ioctl"),
        (libc::SYS_clock_gettime, "clock_gettime"),
        (libc::SYS_clock_nanosleep, "clock_nanosleep"),
        (libc::SYS_getpid, "getpid"),
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_munmap, "munmap"),
        (libc::SYS_madvise, "madvise"),
        (libc::SYS_brk, "brk"),
        (libc::SYS_getrandom, "getrandom"),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_epoll_wait, "epoll_wait"),
        #[cfg(target_arch = "x86_64")]
        (libc::SYS_poll, "poll"),
    ];
    let found = known.iter().find(|(known, _)| usize::try_from(*known) == Ok(number));
    found.map_or_else(|| format!("system call {number}"), |(_, name)| (*name).to_owned())
}

#[cfg(not(target_arch = "x86_64"))]
mod imp {
    use super::super::protocol::{Failure, Result};

    pub struct Enabled;

    impl Enabled {
        pub fn new() -> Result<Enabled> {
            Err(Failure::new("system calls can be counted on x86-64 only"))
        }
    }

    pub fn set(_: bool) {}

    pub fn total() -> u64 {
        0
    }

    pub fn take() -> Vec<(usize, bool, u64)> {
        Vec::new()
    }
}

#[cfg(target_arch = "x86_64")]
mod imp {
    use std::arch::global_asm;
    use std::ffi::{c_int, c_void};
    use std::io;
    use std::ptr;
    use std::sync::atomic::{AtomicU8, AtomicU64, Ordering::Relaxed};

    use super::super::protocol::{Failure, Result};

    const NUMBERS: usize = 512;
    const AGAIN: i64 = -(libc::EAGAIN as i64);
    /// `SYSCALL_DISPATCH_FILTER_ALLOW` and `_BLOCK`.
    const ALLOW: u8 = 0;
    const BLOCK: u8 = 1;

    /// The kernel reads it at every call of the thread that counts.
    static SELECTOR: AtomicU8 = AtomicU8::new(ALLOW);
    static COUNTS: [[AtomicU64; 2]; NUMBERS] = [const { [const { AtomicU64::new(0) }; 2] }; NUMBERS];

    // The two calls that are never handed back, because they come from here: the one that the handler makes,
    // and the one that ends the handler.
    global_asm!(
        ".pushsection .text.uwarp_bench_dispatch, \"ax\"",
        "uwarp_bench_calls:",
        "uwarp_bench_call:", // (number, the six arguments' address)
        "push r12",
        "mov rax, rdi",
        "mov r12, rsi",
        "mov rdi, [r12]",
        "mov rsi, [r12 + 8]",
        "mov rdx, [r12 + 16]",
        "mov r10, [r12 + 24]",
        "mov r8, [r12 + 32]",
        "mov r9, [r12 + 40]",
        "syscall",
        "pop r12",
        "ret",
        "uwarp_bench_return:",
        "mov eax, 15", // rt_sigreturn
        "syscall",
        "ud2",
        "uwarp_bench_calls_end:",
        ".popsection",
    );

    unsafe extern "C" {
        static uwarp_bench_calls: u8;
        static uwarp_bench_calls_end: u8;
        fn uwarp_bench_call(number: i64, arguments: *const [i64; 6]) -> i64;
        fn uwarp_bench_return();
    }

    /// The kernel's own form of `sigaction`: libc's would put its own way back in.
    #[repr(C)]
    struct Action {
        handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void),
        flags: u64,
        restorer: unsafe extern "C" fn(),
        mask: u64,
    }

    const SA_RESTORER: u64 = 0x0400_0000;

    pub struct Enabled;

    impl Enabled {
        pub fn new() -> Result<Enabled> {
            let action = Action {
                handler: handle,
                flags: libc::SA_SIGINFO as u64 | SA_RESTORER,
                restorer: uwarp_bench_return,
                mask: 0,
            };
            let arguments = [libc::SIGSYS.into(), ptr::from_ref(&action).addr() as i64, 0, 8, 0, 0];
            // SAFETY: rt_sigaction with the kernel's structure, which outlives the call. The handler makes
            // the call it is told of and touches atomics only.
            answer(unsafe { uwarp_bench_call(libc::SYS_rt_sigaction, &arguments) })?;
            let start = ptr::addr_of!(uwarp_bench_calls).addr();
            let length = ptr::addr_of!(uwarp_bench_calls_end).addr() - start;
            const PR_SET_SYSCALL_USER_DISPATCH: i64 = 59;
            const PR_SYS_DISPATCH_ON: i64 = 1;
            let selector = SELECTOR.as_ptr().addr() as i64;
            let arguments =
                [PR_SET_SYSCALL_USER_DISPATCH, PR_SYS_DISPATCH_ON, start as i64, length as i64, selector, 0];
            // SAFETY: the selector lives as long as the process and stands at ALLOW.
            answer(unsafe { uwarp_bench_call(libc::SYS_prctl, &arguments) })?;
            Ok(Enabled)
        }
    }

    fn answer(value: i64) -> Result<()> {
        match i32::try_from(-value) {
            Ok(number) if number > 0 => {
                let words = io::Error::from_raw_os_error(number);
                Err(Failure(format!("the kernel does not let a program count its system calls: {words}")))
            }
            _ => Ok(()),
        }
    }

    extern "C" fn handle(_: c_int, _: *mut libc::siginfo_t, context: *mut c_void) {
        // SAFETY: the third argument of a handler with SA_SIGINFO is the interrupted context, ours to change.
        let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
        use libc::{REG_R8, REG_R9, REG_R10, REG_RAX, REG_RDI, REG_RDX, REG_RIP, REG_RSI};
        let number = registers[REG_RAX as usize];
        if matches!(
            number,
            libc::SYS_clone | libc::SYS_clone3 | libc::SYS_fork | libc::SYS_vfork | libc::SYS_rt_sigreturn
        ) {
            // These return twice, or elsewhere: step back (the instruction has two bytes) and let the kernel
            // do it.
            SELECTOR.store(ALLOW, Relaxed);
            registers[REG_RIP as usize] -= 2;
            return;
        }
        let arguments = [REG_RDI, REG_RSI, REG_RDX, REG_R10, REG_R8, REG_R9].map(|r| registers[r as usize]);
        // SAFETY: the call that the interrupted code was about to make, with its arguments.
        let result = unsafe { uwarp_bench_call(number, &arguments) };
        registers[REG_RAX as usize] = result;
        if let Some(counts) = usize::try_from(number).ok().and_then(|number| COUNTS.get(number)) {
            counts[usize::from(result == AGAIN)].fetch_add(1, Relaxed);
        }
    }

    pub fn set(counting: bool) {
        SELECTOR.store(if counting { BLOCK } else { ALLOW }, Relaxed);
        // The kernel looks at the byte behind the compiler's back.
        std::sync::atomic::compiler_fence(std::sync::atomic::Ordering::SeqCst);
    }

    pub fn total() -> u64 {
        COUNTS.iter().flatten().map(|count| count.load(Relaxed)).sum()
    }

    pub fn take() -> Vec<(usize, bool, u64)> {
        let mut calls = Vec::new();
        for (number, counts) in COUNTS.iter().enumerate() {
            for (empty, count) in [false, true].into_iter().zip(counts) {
                match count.swap(0, Relaxed) {
                    0 => {}
                    count => calls.push((number, empty, count)),
                }
            }
        }
        calls
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn counts_exactly_what_is_between() {
        let mut counter = Counter::new().unwrap();
        let (numbers, calls) =
            counter.count(|| (0..5).map(|_| rustix::process::getpid()).collect::<Vec<_>>());
        assert!(numbers.iter().all(|pid| *pid == rustix::process::getpid()));
        assert_eq!(calls, 5);
        rustix::thread::sched_yield();
        let empty = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let nothing_to_read = counter.count(|| rustix::io::read(&empty, &mut [0; 8]));
        assert_eq!(nothing_to_read, (Err(rustix::io::Errno::AGAIN), 1));
        counter.keep();
        counter.count(rustix::process::getpid);
        counter.drop();
        let calls = counter.take();
        let call = |name: &str, empty, count| Call { name: name.to_owned(), empty, count };
        assert_eq!(calls.first(), Some(&call("getpid", false, 5)));
        assert!(calls.contains(&call("read", true, 1)));
        assert!(calls.iter().all(|call| call.name != "sched_yield"));
        assert_eq!(counter.take(), []);
    }
}
