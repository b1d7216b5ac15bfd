//! Programs whose signal handlers jump out of calls (`siglongjmp`).
//!
//! What a call has locked when it is left in this way stays locked for ever. To defer signals while it holds
//! locks takes two system calls, which is too much for each poll and each post of all programs. So only
//! programs that can jump pay for it: those in which something calls `sigsetjmp`, a macro for
//! `__sigsetjmp`, which shows in the relocations of its object. (`setjmp` is another function. It keeps no
//! mask of signals, so a handler that jumps back to it leaves its own signal blocked: such a program jumps
//! once.) They get other functions in their tables of operations, so all others pay nothing.
//!
//! An object that is loaded after the device was opened is not looked at.
//!
//! Rejected: to take the place of `siglongjmp`, or of the program's handlers: what loads us by dlopen binds
//! the C library's functions. To break locks whose holder has jumped: what they guard may be half changed.

use std::ffi::{CStr, c_char, c_int, c_void};

use libc::{PT_DYNAMIC, PT_LOAD};
use uwarp_driver::{Deferred, expect_jumps, jumps_are_expected};
use uwarp_process::Once;

/// Looks once whether jumps must be expected.
pub fn look() {
    static LOOKED: Once = Once::new();
    LOOKED.call(|| {
        let mut calls = false;
        // SAFETY: `object` is what it calls, with this pointer, before it returns.
        unsafe { libc::dl_iterate_phdr(Some(object), (&raw mut calls).cast()) };
        if calls {
            expect_jumps();
            tracing::debug!("the program uses sigsetjmp: signals are deferred while calls hold locks");
        }
    });
}

/// Defers signals while it lives, where jumps are expected.
#[inline]
pub fn defer() -> Option<Deferred> {
    jumps_are_expected().then(Deferred::begin)
}

/// The function for a table of operations.
pub fn choose<F>(plain: F, deferred: F) -> F {
    if jumps_are_expected() { deferred } else { plain }
}

/// Functions of tables of operations with signals deferred, each beside the one that it calls.
#[macro_export]
macro_rules! deferred {
    ($($name:ident = $plain:path: ($($arg:ident: $type:ty),* $(,)?) -> $ret:ty;)*) => {$(
        /// # Safety
        /// As the function that it calls.
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $ret {
            let _deferred = uwarp_driver::Deferred::begin();
            // SAFETY: the caller's promise.
            unsafe { $plain($($arg),*) }
        }
    )*};
}

const NAME: &CStr = c"__sigsetjmp";

/// An entry of an object's dynamic section.
#[repr(C)]
#[derive(Clone, Copy)]
struct Dynamic {
    tag: i64,
    value: u64,
}

/// A relocation.
#[repr(C)]
struct Relocation {
    offset: u64,
    info: u64,
    addend: i64,
}

/// A symbol.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    section: u16,
    value: u64,
    size: u64,
}

const END: i64 = 0;
const PLT_BYTES: i64 = 2;
const STRINGS: i64 = 5;
const SYMBOLS: i64 = 6;
const RELOCATIONS: i64 = 7;
const RELOCATION_BYTES: i64 = 8;
const PLT_KIND: i64 = 20;
const PLT: i64 = 23;

/// Called for each object that is loaded; ends the walk with the first one that calls the function.
unsafe extern "C" fn object(info: *mut libc::dl_phdr_info, _size: usize, calls: *mut c_void) -> c_int {
    // SAFETY: what dl_iterate_phdr passes; its objects stay loaded while it runs.
    let found = unsafe { calls_it(&*info) };
    if found {
        // SAFETY: `look` passes it.
        unsafe { *calls.cast::<bool>() = true };
    }
    c_int::from(found)
}

/// # Safety
/// The object is loaded.
unsafe fn calls_it(info: &libc::dl_phdr_info) -> bool {
    // SAFETY: the loader's table of the object.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let Some(dynamic) = headers.iter().find(|header| header.p_type == PT_DYNAMIC) else { return false };
    let first = (info.dlpi_addr + dynamic.p_vaddr) as *const Dynamic;
    // SAFETY: the section ends with this tag.
    let entries = (0..).map(|n| unsafe { *first.add(n) }).take_while(|entry| entry.tag != END);
    let entries: Vec<Dynamic> = entries.collect();
    let value = |tag| entries.iter().find(|entry| entry.tag == tag).map(|entry| entry.value);
    // The C library has made addresses of them, if the section can be written (the vDSO's cannot).
    let is_in = |at: u64| {
        headers.iter().filter(|header| header.p_type == PT_LOAD).any(|header| {
            at.checked_sub(info.dlpi_addr + header.p_vaddr).is_some_and(|offset| offset < header.p_memsz)
        })
    };
    let table = |tag| value(tag).filter(|at| is_in(*at));
    let (Some(strings), Some(symbols)) = (table(STRINGS), table(SYMBOLS)) else { return false };
    let plt = value(PLT_KIND).is_some_and(|kind| kind == RELOCATIONS.cast_unsigned());
    let plt = plt.then(|| (table(PLT), value(PLT_BYTES)));
    [plt, Some((table(RELOCATIONS), value(RELOCATION_BYTES)))].into_iter().flatten().any(|(at, bytes)| {
        let (Some(at), Some(bytes)) = (at, bytes) else { return false };
        let first = at as *const Relocation;
        (0..bytes as usize / size_of::<Relocation>()).any(|n| {
            // SAFETY: the tables of a loaded object: there are so many relocations, each names a symbol, and
            // its name is in the table of strings.
            let name = unsafe {
                let symbol = ((*first.add(n)).info >> 32) as usize;
                let symbol = &*(symbols as *const Symbol).add(symbol);
                CStr::from_ptr((strings as *const c_char).add(symbol.name as usize))
            };
            name == NAME
        })
    })
}
