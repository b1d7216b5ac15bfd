//! The functions that those of a preloaded library stand before: libc's, or another preloaded library's.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The next function of a name in the order of the loader, looked up once.
pub struct Real {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Real {
    /// The function of this name.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(ptr::null_mut()) }
    }

    /// NULL if there is none.
    pub fn address(&self) -> *mut c_void {
        let found = self.found.load(Ordering::Relaxed);
        if !found.is_null() {
            return found;
        }
        // SAFETY: a C string; the loader knows this object by our own address.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// What a function returns that is not there.
pub trait Missing {
    /// `-1`, or NULL.
    const VALUE: Self;
}

impl Missing for () {
    const VALUE: Self = ();
}

impl Missing for i32 {
    const VALUE: Self = -1;
}

impl Missing for isize {
    const VALUE: Self = -1;
}

impl<T> Missing for *mut T {
    const VALUE: Self = ptr::null_mut();
}

/// `ENOSYS`, and the value that says that there is an error.
pub fn missing<T: Missing>() -> T {
    set_errno(libc::ENOSYS);
    T::VALUE
}

/// Sets `errno`.
pub fn set_errno(number: i32) {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = number }
}

/// `errno`.
pub fn errno() -> i32 {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() }
}

/// "C-unwind", here and at our functions: many are cancellation points, out of which glibc unwinds a thread
/// that is cancelled, and scandir(3) and its like call functions of the program, which may throw exceptions.
/// Nothing in our functions needs to be dropped then but memory.
///
/// Calls the function that ours of this name stands before: `real!(open(path: *const c_char, …) -> c_int)`,
/// with variables of these names as arguments.
#[macro_export]
macro_rules! real {
    ($name:ident($($argument:ident: $type:ty),*) -> $result:ty) => {{
        const NAME: &std::ffi::CStr =
            match std::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!(),
            };
        static REAL: $crate::Real = $crate::Real::new(NAME);
        let address = REAL.address();
        if address.is_null() {
            $crate::missing::<$result>()
        } else {
            // SAFETY: the types are those of the function of this name.
            let function = unsafe {
                std::mem::transmute::<
                    *mut std::ffi::c_void,
                    unsafe extern "C-unwind" fn($($type),*) -> $result,
                >(address)
            };
            // SAFETY: the arguments are the caller's, or in the place of such.
            unsafe { function($($argument),*) }
        }
    }};
}
